#!/usr/bin/env bash
# `import scipy.special` imports numpy.f2py (the generator of Fortran wrappers), numpy.testing, numpy.polynomial and all
# other parts of numpy that numpy itself loads only when they are used: SciPy's copy of array_api_compat reads every
# attribute of numpy, and each read imports a part. `import numpy` alone loads none of the three. For a command that
# needs one function, such as the beta quantile of an interval, they are more than half of the time of the import.
#
# SciPy 1.17.1 with NumPy 2.4.6, seen on 2026-11-29.
# Source: tried with `python -X importtime`; page: NumPy's release notes, by which submodules are loaded lazily.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install scipy==1.17.1 numpy==2.4.6
cat >"$folder/finding.py" <<'EOF'
"""Parts of numpy that are loaded after `import numpy`, and after `import scipy.special`."""

import sys

PARTS = ("numpy.f2py", "numpy.testing", "numpy.polynomial")


def loaded() -> list[str]:
    """Returns the parts that are loaded now."""
    return [name for name in PARTS if name in sys.modules]


import numpy  # noqa: E402

after_numpy = loaded()
import scipy.special  # noqa: E402

after_special = loaded()
print(f"after import numpy {numpy.__version__}: {', '.join(after_numpy) or 'none of them'}")
print(f"after import scipy.special of {scipy.__version__}: {', '.join(after_special) or 'none of them'}")
if after_numpy or after_special != list(PARTS):
    sys.exit("changed: numpy loads these parts itself, or scipy.special no longer loads them")
EOF
"$folder/venv/bin/python" "$folder/finding.py"

"""A made `libnvidia-ml.so.1`, compiled by the tests and loaded by the real nvidia-ml-py.

    folder = build(tmp_path)
    subprocess.run(..., env={**os.environ, **variables(folder, gpus=1, lost="0=40")})

Its switches are environment variables, explained at the top of `fake_nvml.c`: `gpus=1` here is FAKE_NVML_GPUS=1.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.support.paths import SUPPORT

SOURCE = SUPPORT / "fake_nvml.c"


def build(path: Path, missing: Iterable[str] = ()) -> Path:
    """Compiles the library into a folder, for `LD_LIBRARY_PATH`.

    Args:
        path: where the folder is made.
        missing: functions that the library does not have, as with an old driver.

    Returns:
        The folder that holds `libnvidia-ml.so.1`.
    """
    folder = path / "made-nvml"
    folder.mkdir()
    script = folder / "symbols"
    hidden = " ".join(f"{name};" for name in missing)
    script.write_text(f"{{ global: *; {f'local: {hidden}' if hidden else ''} }};\n", encoding="ascii")
    flags = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,--version-script={script}")
    subprocess.run(["gcc", *flags, "-o", folder / "libnvidia-ml.so.1", SOURCE], check=True, timeout=120)
    return folder


def variables(folder: Path, **switches: object) -> dict[str, str]:
    """The environment variables that make a process find the library, with its switches."""
    before = os.environ.get("LD_LIBRARY_PATH", "")
    path = f"{folder}:{before}" if before else str(folder)
    return {"LD_LIBRARY_PATH": path, **{f"FAKE_NVML_{key.upper()}": str(value) for key, value in switches.items()}}

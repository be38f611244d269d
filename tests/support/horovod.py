"""What tests need of Horovod: the installed one over MPI, or one that stands in for it."""

from __future__ import annotations

import json
import os
import shutil
from functools import cache
from pathlib import Path

import pytest

from dlbench.setup.probes import ASK_HOROVOD, ask


def require_horovod_over_mpi() -> None:
    """Skips the test that calls it where ranks of Horovod cannot be started by MPI."""
    if reason := _why_not_over_mpi():
        pytest.skip(reason)


@cache
def _why_not_over_mpi() -> str:
    if shutil.which("mpirun") is None:
        return "no mpirun: install Open MPI, then `dlbench setup horovod`"
    answer = ask(ASK_HOROVOD)
    if isinstance(answer, str):
        return f"Horovod does not load: {answer}; `dlbench setup horovod` builds it"
    return (
        "" if answer["mpi"] else "this Horovod was built without MPI: run `dlbench setup horovod`, MPI is installed now"
    )


def stand_in_horovod(folder: Path, *, cuda: str | None = None, **built: bool) -> dict[str, str]:
    """Variables for a Python that has a Horovod with these parts, beside a torch for this CUDA; none starts a rank.

    Args:
        folder: where the packages are made.
        cuda: version of torch's CUDA; None for a torch for CPUs.
        built: gloo, mpi, nccl; what is not given is in it but NCCL.
    """
    parts = {"gloo": True, "mpi": True, "nccl": False, **built}
    files = {
        "torch/__init__.py": "from torch import version\n",
        "torch/version.py": f"cuda, hip = {cuda!r}, None\n",
        "horovod/__init__.py": "__version__ = '0.28.1'\n",
        "horovod/torch/__init__.py": "".join(f"def {name}_built(): return {is_in}\n" for name, is_in in parts.items())
        + "def cuda_built(): return False\n",
        # Of the process itself: there is no library.
        "horovod/torch/mpi_lib_v2.py": f"__file__ = None\n# {json.dumps(parts)}\n",
    }
    for name, text in files.items():
        path = folder / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    paths = [str(folder / "packages"), *filter(None, [os.environ.get("PYTHONPATH")])]
    # No bytecode: one of the same second and size would pass for the new text.
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        "DLBENCH_CACHE": str(folder / "cache"),
    }

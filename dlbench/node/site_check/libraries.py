"""Which libraries a rank would import, and whether each does."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform

import dlbench

REQUIRED = ("torch", "numpy", "safetensors")
"""Without these no rank trains."""
WANTED = {"horovod": "horovod.torch", "mpi4py": "mpi4py", "pynvml": "pynvml"}
"""Used where they are there: the package by the module that shows whether it works."""


def libraries() -> tuple[dict[str, str], dict[str, str]]:
    """Versions by name, and of what is installed and does not import, why; what is not installed is in neither."""
    versions = {"python": platform.python_version(), "dlbench": dlbench.__version__}
    broken: dict[str, str] = {}
    for name, module in {**{name: name for name in REQUIRED}, **WANTED}.items():
        if importlib.util.find_spec(name) is None:
            continue
        try:
            importlib.import_module(module)
        except Exception as error:  # a library may raise anything while it is imported
            said = next(iter(str(error).strip().splitlines()), "")
            broken[name] = f"{type(error).__name__}: {said}"[:300]
            continue
        versions[name] = _version(name)
    return versions, broken


def _version(name: str) -> str:
    try:
        return importlib.metadata.version("nvidia-ml-py" if name == "pynvml" else name)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(importlib.import_module(name), "__version__", "unknown"))

"""Finds the folders of choices and templates: inside an installed wheel, or in a checkout.

`workloads/`, `systems/`, `slurm/` and `reports/` stand beside the package in a checkout and inside
it, as `_bundled/`, in a wheel (see `[tool.hatch.build.targets.wheel.force-include]`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Folder = Literal["workloads", "systems", "slurm", "reports"]


def folder(name: Folder) -> Path:
    """The absolute path of one bundled folder.

    Raises:
        FileNotFoundError: the installation is damaged.
    """
    package = Path(__file__).resolve().parent
    for candidate in (package / "_bundled" / name, package.parent / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"dlbench is not installed whole: its folder {name!r} is missing beside {package}")

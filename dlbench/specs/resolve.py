"""Names become files: an explicit path, then the folders in ``DLBENCH_PATH``, then the bundled ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from dlbench import bundled
from dlbench.errors import UserError, nearest

Kind = Literal["workloads", "systems"]


def search_path(kind: Kind) -> list[Path]:
    """Folders searched for a name, in order. A folder of ``DLBENCH_PATH`` holds `workloads/` and `systems/`."""
    extra = [Path(part) for part in os.environ.get("DLBENCH_PATH", "").split(os.pathsep) if part]
    return [folder / kind for folder in extra] + [bundled.folder(kind)]


def available(kind: Kind) -> dict[str, Path]:
    """Every name that resolves, with its file; the first folder that has a name wins."""
    found: dict[str, Path] = {}
    for folder in search_path(kind):
        for path in sorted(folder.glob("*.yaml")) if folder.is_dir() else []:
            found.setdefault(path.stem, path)
    return found


def find(kind: Kind, name: str) -> Path:
    """The file of a workload or system given by name or by path.

    A text with a slash or ending in ``.yaml``/``.yml`` is a path, anything else a name.

    Raises `UserError`: nothing is there; the nearest right names are told.
    """
    if os.sep in name or name.endswith((".yaml", ".yml")):
        path = Path(name)
        # A pipe, too: `--system <(m4 machine.yaml)`.
        if not path.is_file() and not path.is_fifo():
            raise UserError(f"{name}: no such {kind[:-1]} file")
        return path
    names = available(kind)
    if name not in names:
        raise UserError(f"unknown {kind[:-1]} {name!r}: {nearest(name, names)}")
    return names[name]

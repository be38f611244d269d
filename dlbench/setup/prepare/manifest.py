"""`MANIFEST.sha256` of a prepared folder: every file with its digest, as sha256sum(1) writes and checks it."""

from __future__ import annotations

from pathlib import Path

from dlbench.opening import file_sha256

NAME = "MANIFEST.sha256"


def write_manifest(folder: Path) -> int:
    """Writes the list, in the order of names; returns how many bytes the files have together.

    Raises `OSError`: a file cannot be read, or the list not be written.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != NAME)
    lines = [f"{file_sha256(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    (folder / NAME).write_text("".join(lines), encoding="utf-8")
    return sum(path.stat().st_size for path in files)

"""The files of a run's folder, as a history takes them in: plain files alone, copied whole, with a digest of those that
figures are made of.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from dlbench.errors import IncompleteDataError, refused
from dlbench.opening import open_file
from dlbench.records.files import sync_folder
from dlbench.records.folder import RunFolder

MAX_DEPTH = 3  # Folders within a run's folder; `checkpoints/` is one.

# What makes two runs the same. Figures need nothing else but, for the stages of energy, the spans of each node's first
# rank, which come whole with the run and are never taken out of it; all else may differ, or go.
_FIGURE_FILE = re.compile(r"plan\.json|record\.json|(rank|node)-\d{4,}\.steps|node-\d{4,}\.samples")
_BLOCK = 1 << 20


class StillRunningError(IncompleteDataError):
    """A run changed while it was copied: it has not ended."""


def files_of(path: Path) -> dict[str, os.stat_result]:
    """The files of a run's folder by relative name; temporary ones, whose names begin with a dot, are passed over."""
    found: dict[str, os.stat_result] = {}

    def look(folder: Path, prefix: str, depth: int) -> None:
        for entry in sorted(os.scandir(folder), key=lambda one: one.name):
            if entry.name.startswith("."):
                continue
            if not entry.name.isprintable() or "\\" in entry.name:
                raise IncompleteDataError(f"{entry.path!a}: a name that no file of a run has")
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                # A run that still runs has taken it away in this moment.
                continue
            if stat.S_ISREG(status.st_mode):
                found[prefix + entry.name] = status
            elif stat.S_ISDIR(status.st_mode) and depth < MAX_DEPTH:
                with suppress(FileNotFoundError):
                    look(Path(entry.path), f"{prefix}{entry.name}/", depth + 1)
            else:
                what = "a folder too deep" if stat.S_ISDIR(status.st_mode) else "neither a file nor a folder"
                raise IncompleteDataError(f"{entry.path}: {what}; a history keeps plain files alone")

    try:
        look(path, "", 0)
    except OSError as error:
        raise IncompleteDataError(f"{path}: cannot be read: {error.strerror or error}") from None
    return found


def content_digest(folder: RunFolder) -> str:
    """SHA-256, in hexadecimal, over the files that figures are made of: plan, record, step files, samples.

    For each, by name: the name, a zero byte, the number of bytes in decimal, a zero byte, the bytes.
    """
    digest = hashlib.sha256()
    try:
        entries = [entry for entry in os.scandir(folder.path) if _FIGURE_FILE.fullmatch(entry.name)]
        for entry in entries:
            if not entry.is_file(follow_symlinks=False):
                raise IncompleteDataError(f"{entry.path}: is no plain file")
        for name in sorted(entry.name for entry in entries):
            with open_file(folder.path / name, follow=False) as file:
                digest.update(f"{name}\0{os.fstat(file.fileno()).st_size}\0".encode())
                while block := file.read(_BLOCK):
                    digest.update(block)
    except OSError as error:
        raise IncompleteDataError(f"{folder.path}: cannot be read: {error.strerror or error}") from None
    return digest.hexdigest()


def copy_run(source: Path, target: Path) -> None:
    """Copies a run's folder, every byte synced.

    Raises `StillRunningError`: it changed meanwhile. `IncompleteDataError`: it holds what a history does not keep, or
    what cannot be read. `RunError`: the copy cannot be written.
    """
    before = {name: (status.st_size, status.st_mtime_ns) for name, status in files_of(source).items()}
    try:
        target.mkdir(parents=True)
        for name in before:
            _copy_file(source / name, target / name)
        for folder in {(target / name).parent for name in before} | {target}:
            sync_folder(folder)
    except OSError as error:
        raise refused(error, f"{target}: cannot be written: {error.strerror or error}") from None
    after = {name: (status.st_size, status.st_mtime_ns) for name, status in files_of(source).items()}
    if before != after:
        name = min(name for name, _ in before.items() ^ after.items())
        raise StillRunningError(f"{source / name}: changed while it was copied: the run has not ended")


def _copy_file(source: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True, parents=True)
    try:
        read = open_file(source, follow=False)
    except FileNotFoundError:
        raise StillRunningError(f"{source}: went while the run was copied: the run has not ended") from None
    except OSError as error:
        raise IncompleteDataError(f"{source}: cannot be read: {error.strerror or error}") from None
    with read, target.open("xb") as written:
        shutil.copyfileobj(read, written, _BLOCK)
        written.flush()
        os.fsync(written.fileno())

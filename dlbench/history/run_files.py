"""Lists, copies and digests the files of a run's folder for a history."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

from dlbench.errors import IncompleteDataError, refused
from dlbench.opening import open_file
from dlbench.records.files import sync_folder
from dlbench.records.folder import RunFolder

MAX_DEPTH = 3  # Depth of folders within a run's folder, e.g. `checkpoints/`.

# Files whose content identifies a run. Figures need nothing else, except for the stages of energy the spans of each
# node's first rank; all other files may differ or be missing.
_FIGURE_FILE = re.compile(r"plan\.json|record\.json|node-\d{4,}\.(steps|samples)")
_BLOCK = 1 << 20


class StillRunningError(IncompleteDataError):
    """A run changed while it was copied, because it is still active."""


def files_of(path: Path) -> dict[str, os.stat_result]:
    """Returns the status of each file of a run's folder, by relative name; temporary (hidden) ones are left out."""
    status_by_name: dict[str, os.stat_result] = {}

    def scan(folder: Path, prefix: str, depth: int) -> None:
        for entry in sorted(os.scandir(folder), key=attrgetter("name")):
            if entry.name.startswith("."):
                continue
            if not entry.name.isprintable() or "\\" in entry.name:
                raise IncompleteDataError(f"{entry.path!a}: a name that no file of a run has")
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                # An active run has deleted it.
                continue
            if stat.S_ISREG(status.st_mode):
                status_by_name[prefix + entry.name] = status
            elif not stat.S_ISDIR(status.st_mode):
                raise IncompleteDataError(f"{entry.path}: neither a file nor a folder; a history keeps files only")
            elif depth >= MAX_DEPTH:
                raise IncompleteDataError(f"{entry.path}: more than {MAX_DEPTH} folders deep")
            else:
                with suppress(FileNotFoundError):
                    scan(Path(entry.path), f"{prefix}{entry.name}/", depth + 1)

    try:
        scan(path, "", 0)
    except OSError as error:
        raise IncompleteDataError(f"{path}: cannot be read: {error.strerror or error}") from None
    return status_by_name


def content_digest(folder: RunFolder) -> str:
    """Returns the SHA-256, in hexadecimal, of the files that figures are made of: plan, record, step files, samples.

    It is over, for each file by name: the name, a zero byte, the number of bytes in decimal, a zero byte, the bytes.
    """
    digest = hashlib.sha256()
    try:
        entries = [entry for entry in os.scandir(folder.path) if _FIGURE_FILE.fullmatch(entry.name)]
        for entry in entries:
            if not entry.is_file(follow_symlinks=False):
                raise IncompleteDataError(f"{entry.path}: is not a regular file")
        for name in sorted(entry.name for entry in entries):
            with open_file(folder.path / name, follow=False) as file:
                digest.update(f"{name}\0{os.fstat(file.fileno()).st_size}\0".encode())
                while block := file.read(_BLOCK):
                    digest.update(block)
    except OSError as error:
        raise IncompleteDataError(f"{folder.path}: cannot be read: {error.strerror or error}") from None
    return digest.hexdigest()


def copy_run(source: Path, target: Path) -> None:
    """Copies a run's folder and syncs it to disk.

    Raises `StillRunningError`: it changed during the copy; `IncompleteDataError`: it has other than files and folders,
    or cannot be read; `RunError`: the copy cannot be written.
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
        raise StillRunningError(f"{source / name}: changed during the copy: the run is still active")


def _copy_file(source: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True, parents=True)
    try:
        read = open_file(source, follow=False)
    except FileNotFoundError:
        raise StillRunningError(f"{source}: disappeared during the copy: the run is still active") from None
    except OSError as error:
        raise IncompleteDataError(f"{source}: cannot be read: {error.strerror or error}") from None
    with read, target.open("xb") as written:
        shutil.copyfileobj(read, written, _BLOCK)
        written.flush()
        os.fsync(written.fileno())

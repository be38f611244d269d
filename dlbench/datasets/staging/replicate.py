"""All of a data set copied to a node, file by file: the same folders, the same names.

Links are followed to regular files inside the data set only: what else they lead to would be copied unasked. Hidden
names are left out. What of an earlier, kept staging is whole and still what the source has is not copied again.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlbench.datasets.making.manifest import NAME as MANIFEST
from dlbench.datasets.making.manifest import read_files
from dlbench.datasets.staging.copying import BUFFER_BYTES, Journal, copy_file, is_whole
from dlbench.datasets.staging.place import StagingFolder, block_of, rounded, user_error
from dlbench.datasets.staging.streams import Tally, run_streams
from dlbench.opening import kind_of

_DATA = "data"
_PARTIAL = ".partial-"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to be copied."""

    name: str
    """Relative to the staged data, with `/`."""
    path: str
    num_bytes: int
    mtime_ns: int


def list_files(parts: Mapping[str, Path], within: Path, tally: Tally) -> list[SourceFile]:
    """The files of a data set, in the order of their names.

    Args:
        parts: folders, or single files, by their names in the copy; empty: the data itself.
        within: the data set, which links may not leave.
        tally: told of what was looked at.

    Raises:
        UserError: something in it is no file and no folder, or a link that leads out of it.
        OSError: it cannot be listed.
    """
    found: list[SourceFile] = []
    for name, folder in parts.items():
        real = folder.resolve()
        allowed = (within.resolve(), real)
        if real.is_file():
            status = real.stat()
            found.append(SourceFile(name or real.name, str(real), status.st_size, status.st_mtime_ns))
        else:
            found += _below(real, name, allowed, tally)
    return found


def _below(folder: Path, prefix: str, allowed: Sequence[Path], tally: Tally) -> Iterator[SourceFile]:
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    for entry in entries:
        if entry.name.startswith("."):
            continue
        tally.look()
        name = f"{prefix}/{entry.name}" if prefix else entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _below(Path(entry.path), name, allowed, tally)
            continue
        path = Path(entry.path)
        if entry.is_symlink():
            path = _followed(path, allowed)
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise user_error(Path(entry.path), f"is {kind_of(status.st_mode)}, not a regular file: it cannot be staged")
        yield SourceFile(name, str(path), status.st_size, status.st_mtime_ns)


def _followed(link: Path, allowed: Sequence[Path]) -> Path:
    try:
        real = link.resolve(strict=True)
    except (OSError, RuntimeError):
        raise user_error(link, "is a link to nothing: it cannot be staged") from None
    if not any(real.is_relative_to(root) for root in allowed):
        raise user_error(
            link,
            f"is a link that leads out of the data set, to {str(real)!r}; replicate copies what lies in it only: set "
            "data.staging to lazy or shard, which read samples and no files",
        )
    if real.is_dir():
        raise user_error(link, "is a link to a folder: replicate follows links to regular files only")
    return real


@dataclass(frozen=True)
class Replica:
    """A data set on this node."""

    path: Path
    """Of the folder that holds the parts."""
    num_files: int
    verified: str


def replicate(
    parts: Mapping[str, Path],
    within: Path,
    folder: StagingFolder,
    *,
    streams: int,
    tally: Tally,
    require: Callable[[int, int], None],
) -> Replica:
    """Copies a data set.

    Args:
        parts: folders, or single files, by their names in the copy; empty: the data itself.
        within: the data set, which links may not leave.
        folder: where to.
        streams: files at a time.
        tally: told of everything.
        require: given the bytes and files still to be written before the first is; raises if they do not fit.

    Raises:
        UserError: as `list_files`.
        IncompleteDataError: a file changed meanwhile, or is not what the manifest says.
        OSError: reading or writing failed.
    """
    files = list_files(parts, within, tally)
    root = folder.path / _DATA
    root.mkdir(exist_ok=True)
    for partial in folder.path.glob(f"{_PARTIAL}*"):
        partial.unlink()
    block = block_of(root)
    tally.needed = sum(file.num_bytes for file in files)
    journal = Journal(folder.path)
    try:
        missing = _missing(files, root, journal, streams, tally)
        to_write = sum(rounded(file.num_bytes, block) for file in missing)
        require(to_write, len(missing))
        _remove_others(root, {file.name for file in files})
        digests = _digests(within)
        _copy(missing, root, journal, digests, streams, tally, lambda left: folder.reserve(max(0, to_write - left)))
    finally:
        journal.close()
    how = "SHA-256 of the data set's manifest" if digests else "size and time of the source before and after"
    return Replica(root, len(files), f"{how}; CRC-32 of each copy in its journal")


def _missing(files: Sequence[SourceFile], root: Path, journal: Journal, streams: int, tally: Tally) -> list[SourceFile]:
    """The files that no earlier staging left whole."""
    if not journal.known:
        return list(files)
    missing: list[SourceFile] = []
    lock = threading.Lock()

    def look(_stream: int, file: SourceFile) -> None:
        entry = journal.known.get(file.name)
        is_same = entry is not None and (entry.bytes, entry.mtime_ns) == (file.num_bytes, file.mtime_ns)
        if is_same and entry is not None and is_whole(root / file.name, entry):
            tally.found(file.num_bytes)
        else:
            tally.look()
            with lock:
                missing.append(file)

    run_streams(streams, files, look)
    return sorted(missing, key=lambda file: file.name)


def _remove_others(root: Path, names: set[str]) -> None:
    """Removes what the source does not have, so that old and new never mix."""
    for here, folders, files in os.walk(root, topdown=False, followlinks=False):
        inside = os.path.relpath(here, root)
        for name in files:
            path = name if inside == "." else f"{inside}/{name}"
            if path not in names:
                Path(here, name).unlink()
        for name in folders:
            inner = Path(here, name)
            if inner.is_symlink():
                inner.unlink()
            elif not any(inner.iterdir()):
                inner.rmdir()


def _digests(within: Path) -> dict[str, bytes]:
    """The SHA-256 of each file, by its path in the data set; empty where it has no manifest."""
    root = within if within.is_dir() else within.parent
    if not (root / MANIFEST).is_file():
        return {}
    return {entry.path: bytes.fromhex(entry.sha256) for entry in read_files(root)}


def _copy(
    missing: Sequence[SourceFile],
    root: Path,
    journal: Journal,
    digests: Mapping[str, bytes],
    streams: int,
    tally: Tally,
    reserve_after: Callable[[int], None],
) -> None:
    # Folders first, so that streams do not race for them.
    for folder in sorted({(root / file.name).parent for file in missing}):
        folder.mkdir(parents=True, exist_ok=True)
    buffers = [memoryview(bytearray(BUFFER_BYTES)) for _ in range(streams)]
    told = [time.monotonic()]

    def copy(stream: int, file: SourceFile) -> None:
        begun = time.monotonic_ns()
        copied = copy_file(
            Path(file.path),
            root / file.name,
            name=file.name,
            partial=root.parent / f"{_PARTIAL}{stream}",
            buffer=buffers[stream],
            tally=tally,
            sha256=digests.get(file.name),
        )
        journal.add(copied)
        tally.done(stream, begun, copied.bytes)
        if stream == 0 and time.monotonic() - told[0] > 1:
            told[0] = time.monotonic()
            reserve_after(tally.copied)

    run_streams(streams, missing, copy)
    reserve_after(tally.needed)


def changed_files(root: Path, folder: Path) -> list[str]:
    """Names of staged files that are no longer what was copied, by size and time; they were changed while used."""
    journal = Journal(folder)
    journal.close()
    found = []
    for name, entry in journal.known.items():
        try:
            status = (root / name).lstat()
        except OSError:
            found.append(name)
            continue
        if (status.st_size, status.st_mtime_ns) != (entry.bytes, entry.mtime_ns):
            found.append(name)
    return found

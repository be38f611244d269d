"""All of a data set copied to a node, file by file: the same folders, the same names.

Links are followed to regular files inside the data set only: what else they lead to would be copied unasked. Hidden
names are left out. A copy gets its name when it is whole, and the time of its source: a file of an earlier, kept
staging that has size and time of its source, and the SHA-256 of the manifest if there is one, is not copied again.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dlbench.datasets.manifest import NAME as MANIFEST
from dlbench.datasets.manifest import read_files
from dlbench.datasets.staging.place import StagingFolder, block_of, rounded, user_error
from dlbench.errors import EnvironmentLacksError, IncompleteDataError
from dlbench.opening import file_sha256, kind_of, open_file
from dlbench.units import format_bytes

T = TypeVar("T")

_SPAN_NS = 1_000_000_000  # copies of a stream that follow each other within this time count as one
_MOST_SPANS = 200
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PIECE_BYTES = 4 << 20
_DATA = "data"
_PARTIAL = ".partial-"


class CancelledError(Exception):
    """Somebody else failed, and this copying ends for it."""


@dataclass
class Moved:
    """Copies of one stream, one after the other."""

    stream: int
    start_ns: int  # CLOCK_MONOTONIC
    end_ns: int
    num_bytes: int
    items: int


class Tally:
    """How far staging on this node is. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.cancelled = threading.Event()
        self.needed = self.copied = self.reused = self.items = self.looked = 0
        """Bytes that had to be there; of these copied, and found whole; files or samples staged; files looked at."""
        self.moved: list[Moved] = []

    def look(self, num: int = 1) -> None:
        """Notes how many files were looked at, for listing or checking. Raises CancelledError: staging is to end."""
        self._go_on()
        with self._lock:
            self.looked += num

    def add(self, num_bytes: int) -> None:
        """Bytes were copied."""
        self._go_on()
        with self._lock:
            self.copied += num_bytes

    def done(self, stream: int, start_ns: int, num_bytes: int, items: int = 1) -> None:
        """A stream has copied some files or samples, whose bytes were added before."""
        end_ns = time.monotonic_ns()
        with self._lock:
            self.items += items
            last = next((one for one in reversed(self.moved) if one.stream == stream), None)
            if last is not None and (start_ns - last.start_ns < _SPAN_NS or len(self.moved) >= _MOST_SPANS):
                last.end_ns, last.num_bytes, last.items = end_ns, last.num_bytes + num_bytes, last.items + items
            else:
                self.moved.append(Moved(stream, start_ns, end_ns, num_bytes, items))

    def found(self, num_bytes: int, items: int = 1) -> None:
        """Files or samples of an earlier run were there, whole."""
        self._go_on()
        with self._lock:
            self.reused += num_bytes
            self.items += items

    def _go_on(self) -> None:
        if self.cancelled.is_set():
            raise CancelledError


def run_streams(num: int, tasks: Iterable[T], work: Callable[[int, T], None]) -> None:
    """Does all tasks, `num` at a time, begun in their order; `work` gets the stream's number and a task.

    Raises Exception: what the first failing task raised; the others have ended then.
    """
    waiting, lock = iter(tasks), threading.Lock()
    failures: list[BaseException] = []

    def stream(number: int) -> None:
        try:
            while not failures:
                with lock:
                    task = next(waiting)
                work(number, task)
        except StopIteration:
            return
        except BaseException as error:
            failures.append(error)

    # Threads that do not keep a process from ending: a file system may hang.
    threads = [threading.Thread(target=stream, args=(n,), name=f"dlbench-stage-{n}", daemon=True) for n in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def disk_full_error(error: OSError, where: str, tally: Tally, free_before: int) -> EnvironmentLacksError | None:
    """The error of a disk that is full: what was needed and what was there; None for another error."""
    if error.errno not in _FULL:
        return None
    return EnvironmentLacksError(
        f"staging to {where}: {error.strerror} after {format_bytes(tally.copied)} of "
        f"{format_bytes(tally.needed - tally.reused)}; {format_bytes(free_before)} were free before; nothing of it is "
        "left there"
    )


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to be copied."""

    name: str  # relative to the staged data, with `/`
    path: str
    num_bytes: int
    mtime_ns: int


def list_files(parts: Mapping[str, Path], within: Path, tally: Tally) -> list[SourceFile]:
    """The files of a data set, in the order of their names.

    `parts`: folders, or single files, by their names in the copy; empty: the data itself. `within`: the data set, which
    links may not leave.
    Raises UserError: something in it is no file and no folder, or a link that leads out of it. OSError: it cannot be
    listed.
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


def replicate(
    parts: Mapping[str, Path],
    within: Path,
    folder: StagingFolder,
    *,
    streams: int,
    tally: Tally,
    require: Callable[[int, int], None],
) -> tuple[Sequence[SourceFile], str]:
    """Copies a data set; `parts` and `within` as of `list_files`.

    `require`: given the bytes and files still to be written before the first is; raises if they do not fit. Returns its
    files, and what they were compared with, in words.
    Raises UserError: as `list_files`. IncompleteDataError: a file changed meanwhile, or is not what the manifest says.
    OSError: reading or writing failed.
    """
    files = list_files(parts, within, tally)
    digests: dict[str, str] = {}  # the SHA-256 of each file, by its path in the data set
    source = within if within.is_dir() else within.parent
    if (source / MANIFEST).is_file():
        digests = {entry.path: entry.sha256 for entry in read_files(source)}
    root = folder.path / _DATA
    root.mkdir(exist_ok=True)
    for partial in folder.path.glob(f"{_PARTIAL}*"):
        partial.unlink()
    block = block_of(root)
    tally.needed = sum(file.num_bytes for file in files)
    missing = []
    for file in files:
        tally.look()
        copied = root / file.name
        if _is_same(file, copied) and digests.get(file.name) in (None, file_sha256(copied)):
            tally.found(file.num_bytes)  # an earlier staging left it whole
        else:
            missing.append(file)
    require(sum(rounded(file.num_bytes, block) for file in missing), len(missing))
    _remove_others(root, {file.name for file in files})
    # Folders first, so that streams do not race for them.
    for parent in {(root / file.name).parent for file in missing}:
        parent.mkdir(parents=True, exist_ok=True)

    def copy(stream: int, file: SourceFile) -> None:
        begun = time.monotonic_ns()
        partial = folder.path / f"{_PARTIAL}{stream}"
        copy_file(file, root / file.name, partial=partial, tally=tally, sha256=digests.get(file.name))
        tally.done(stream, begun, file.num_bytes)

    run_streams(streams, missing, copy)
    verified = "SHA-256 of the data set's manifest" if digests else "size and time of the source before and after"
    return files, verified


def copy_file(file: SourceFile, target: Path, *, partial: Path, tally: Tally, sha256: str | None) -> None:
    """Copies one file under another name, and then renames it.

    `partial`: the other name, on the same file system. `sha256`: what its digest must be; None: unknown.
    Raises IncompleteDataError: the source changed meanwhile, or its digest is another one. OSError: reading or writing
    failed.
    """
    digest = hashlib.sha256()
    with open_file(Path(file.path)) as source, partial.open("wb") as copy:
        while piece := source.read(_PIECE_BYTES):
            copy.write(piece)
            if sha256 is not None:
                digest.update(piece)
            tally.add(len(piece))
        after, num_bytes = os.fstat(source.fileno()), copy.tell()
    if (after.st_mtime_ns, after.st_size, num_bytes) != (file.mtime_ns, file.num_bytes, file.num_bytes):
        raise IncompleteDataError(f"{file.path!r} changed while it was staged; start the run again")
    if sha256 is not None and digest.hexdigest() != sha256:
        differs = "its SHA-256 differs from that in the data set's manifest"
        raise IncompleteDataError(f"{file.path!r}: altered ({differs}); see `dlbench data verify`")
    os.utime(partial, ns=(file.mtime_ns, file.mtime_ns))
    partial.rename(target)


def _is_same(file: SourceFile, copy: Path) -> bool:
    """Whether a copy is a file of the size and the time of its source."""
    try:
        status = copy.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and (status.st_size, status.st_mtime_ns) == (file.num_bytes, file.mtime_ns)


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


def changed_files(files: Sequence[SourceFile], folder: Path) -> list[str]:
    """Names of staged files that are no longer what was copied, by size and time; they were changed while used."""
    return [file.name for file in files if not _is_same(file, folder / _DATA / file.name)]

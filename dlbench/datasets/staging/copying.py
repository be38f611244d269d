"""All of a data set copied to a node, file by file: the same folders, the same names.

Links are followed to regular files inside the data set only: what else they lead to would be copied unasked. Hidden
names are left out. What of an earlier, kept staging is whole and still what the source has is not copied again.

`journal.jsonl`: the first line is `{"format": "dlbench.staged", "version": 1}`, every other one a file:
`{"path", "bytes", "mtime_ns" of the source, "crc32" of all of it, "edges": CRC-32 of its first and last 64 KiB}`. A
torn last line is none.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from dlbench.datasets.manifest import NAME as MANIFEST
from dlbench.datasets.manifest import read_files
from dlbench.datasets.staging.place import StagingFolder, block_of, rounded, user_error
from dlbench.errors import EnvironmentLacksError, IncompleteDataError
from dlbench.opening import descriptor, kind_of, open_file
from dlbench.units import format_bytes

T = TypeVar("T")

_SPAN_NS = 1_000_000_000  # copies of a stream that follow each other within this time count as one
_MOST_SPANS = 200
_FULL = (errno.ENOSPC, errno.EDQUOT)


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
        """Bytes were copied. Raises CancelledError: staging is to end."""
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
        for task in _taken(waiting, lock, failures):
            try:
                work(number, task)
            except BaseException as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=stream, args=(n,), name=f"dlbench-stage-{n}", daemon=True) for n in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _taken(waiting: Iterator[T], lock: threading.Lock, failures: list[BaseException]) -> Iterator[T]:
    while not failures:
        with lock:
            try:
                task = next(waiting)
            except StopIteration:
                return
            except BaseException as error:
                failures.append(error)
                return
        yield task


def disk_full_error(error: OSError, where: str, tally: Tally, free_before: int) -> EnvironmentLacksError | None:
    """The error of a disk that is full: what was needed and what was there; None for another error."""
    if error.errno not in _FULL:
        return None
    return EnvironmentLacksError(
        f"staging to {where}: {error.strerror} after {format_bytes(tally.copied)} of "
        f"{format_bytes(tally.needed - tally.reused)}; {format_bytes(free_before)} were free before; nothing of it is "
        "left there"
    )


JOURNAL = "journal.jsonl"
BUFFER_BYTES = 4 << 20
_EDGE_BYTES = 64 << 10
_HEAD = {"format": "dlbench.staged", "version": 1}
_MAX_LINE = 1 << 16


@dataclass(frozen=True)
class CopiedFile:
    """One file that was copied."""

    path: str  # relative, with `/`; bytes that are not UTF-8 as surrogate escapes
    bytes: int
    mtime_ns: int
    crc32: int
    edges: int


class Journal:
    """Which files are there, whole. Safe for threads."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / JOURNAL
        self.known = _load(self._path)
        self._lock = threading.Lock()
        if not self.known:
            self._path.unlink(missing_ok=True)
        self._file = self._path.open("ab", 0)
        # A line that was torn ends here.
        self._file.write(b"\n" if self.known else json.dumps(_HEAD).encode() + b"\n")

    def add(self, copied: CopiedFile) -> None:
        line = json.dumps(asdict(copied), ensure_ascii=True).encode("ascii") + b"\n"
        with self._lock:
            self._file.write(line)

    def close(self) -> None:
        self._file.close()


def _load(path: Path) -> dict[str, CopiedFile]:
    found: dict[str, CopiedFile] = {}
    try:
        with open_file(path, follow=False) as file:
            if json.loads(file.readline(_MAX_LINE)) != _HEAD:
                return {}
            while line := file.readline(_MAX_LINE):
                with suppress(ValueError, TypeError):
                    copied = CopiedFile(**json.loads(line))
                    found[copied.path] = copied
    except (OSError, ValueError):
        return {}
    return found


def is_whole(path: Path, entry: CopiedFile) -> bool:
    """Whether a copy still is what the journal says, by size, time and the checksum of its two ends."""
    try:
        opened = descriptor(path, follow=False)
    except OSError:
        return False
    try:
        status = os.fstat(opened)
        if (status.st_size, status.st_mtime_ns) != (entry.bytes, entry.mtime_ns):
            return False
        return _edges(opened, status.st_size) == entry.edges
    except OSError:
        return False
    finally:
        os.close(opened)


def copy_file(
    source: Path, target: Path, *, name: str, partial: Path, buffer: memoryview, tally: Tally, sha256: bytes | None
) -> CopiedFile:
    """Copies one file under another name, and then renames it.

    `source`: a regular file, or a link to one. `partial`: the other name, on the same file system. `sha256`: what its
    digest must be; None: unknown.
    Raises IncompleteDataError: the source changed meanwhile, or its digest is another one. OSError: reading or writing
    failed; nothing of the copy is left.
    """
    opened = descriptor(source)
    try:
        status = os.fstat(opened)
        if status.st_size > BUFFER_BYTES:
            os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        with suppress(FileNotFoundError):
            partial.unlink()
        written = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            size, crc, digest = _poured(opened, written, buffer, tally, with_digest=sha256 is not None)
            edges = _edges(written, size)
            os.utime(written, ns=(status.st_mtime_ns, status.st_mtime_ns))
            _require_same(source, status, os.fstat(opened), size, digest, sha256)
            partial.rename(target)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise
        finally:
            os.close(written)
    finally:
        os.close(opened)
    return CopiedFile(name, size, status.st_mtime_ns, crc, edges)


def _require_same(
    source: Path, before: os.stat_result, after: os.stat_result, size: int, digest: bytes | None, sha256: bytes | None
) -> None:
    if (after.st_size, after.st_mtime_ns, size) != (before.st_size, before.st_mtime_ns, before.st_size):
        raise IncompleteDataError(f"{str(source)!r} changed while it was staged; start the run again")
    if sha256 is not None and digest != sha256:
        differs = "its SHA-256 differs from that in the data set's manifest"
        raise IncompleteDataError(f"{str(source)!r}: altered ({differs}); see `dlbench data verify`")


def _poured(
    opened: int, written: int, buffer: memoryview, tally: Tally, *, with_digest: bool
) -> tuple[int, int, bytes | None]:
    """Copies all that a descriptor gives; size, CRC-32 and SHA-256 of it."""
    size = crc = 0
    digest = hashlib.sha256() if with_digest else None
    while num := os.readv(opened, [buffer]):
        piece = buffer[:num]
        crc = zlib.crc32(piece, crc)
        if digest is not None:
            digest.update(piece)
        done = 0
        while done < num:
            done += os.write(written, piece[done:])
        size += num
        tally.add(num)
    return size, crc, digest.digest() if digest is not None else None


def _edges(opened: int, size: int) -> int:
    first = os.pread(opened, _EDGE_BYTES, 0)
    return zlib.crc32(os.pread(opened, _EDGE_BYTES, max(0, size - _EDGE_BYTES)), zlib.crc32(first))


_DATA = "data"
_PARTIAL = ".partial-"


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


@dataclass(frozen=True)
class Replica:
    """A data set on this node."""

    path: Path  # of the folder that holds the parts
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

    `parts`: folders, or single files, by their names in the copy; empty: the data itself. `within`: the data set, which
    links may not leave. `require`: given the bytes and files still to be written before the first is; raises if they do
    not fit.
    Raises UserError: as `list_files`. IncompleteDataError: a file changed meanwhile, or is not what the manifest says.
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
    reserved_at = [time.monotonic()]

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
        if stream == 0 and time.monotonic() - reserved_at[0] > 1:
            reserved_at[0] = time.monotonic()
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

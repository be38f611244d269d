"""Stages a whole data set on a node, file by file, in a private folder of a storage tier.

Links are followed only to regular files inside the data set. A copy gets its name when it is complete, and the
modification time of its source: a file of an earlier staging is reused if it has the size and time of its source and,
with a manifest, its SHA-256. A private folder has mode 0700, and its job holds a lock (flock(2)) that the kernel
releases however the job ends. A temporary folder has a different name for each run. A kept folder has the same name for
the same data, and is used by one job at a time: a second job gets a temporary folder.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dlbench.datasets.manifest import NAME as MANIFEST
from dlbench.datasets.manifest import read_files
from dlbench.errors import EnvironmentLacksError, IncompleteDataError, UserError
from dlbench.opening import file_sha256, kind_of, open_file
from dlbench.process_tree import HeldFolder, also_remove, remove_abandoned, supervised_folder
from dlbench.specs.system import StagingTier, TierSpec
from dlbench.units import format_bytes

_VARIABLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
_LOCK = ".held"
_KEPT = "dlbench-staged-"
_LABEL = "staged-"
T = TypeVar("T")
_SPAN_NS = 1_000_000_000  # copies of a stream within this time are recorded as one span
_MAX_SPANS = 200
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PIECE_BYTES = 4 << 20
_DATA = "data"
_PARTIAL = ".partial-"


@dataclass(frozen=True)
class Room:
    """The free space for staging."""

    free: int  # bytes
    limit: str = ""  # limit other than the file system's free space, as text


def tier_path(
    tier: TierSpec, key: StagingTier, variables: Mapping[str, str], host: str, *, where: str | None = None
) -> Path:
    """Returns the folder of a tier on this node. `variables`: of the job; $TMPDIR means its value before dlbench gave
    the rank its own. `host`: value of {host}. `where`: the setting that names it, for messages; None:
    `storage.<key>.path`. Raises EnvironmentLacksError: it cannot be used.
    """
    where = f"{where or f'storage.{key}.path'} {tier.path!r}"
    text = tier.path.replace("{host}", host)
    rank_folder = supervised_folder(variables)
    for name in dict.fromkeys(_VARIABLE.findall(text)):
        value = variables.get(name, "")
        if name == "TMPDIR" and rank_folder is not None:
            value = str(Path(rank_folder).parent)
        if not value:
            raise EnvironmentLacksError(
                f"{where}: ${name} is not set on {host}; name another folder in the system file"
            )
        text = text.replace(f"${name}", value)
    path = Path(text).expanduser()
    if not path.is_absolute():
        raise EnvironmentLacksError(f"{where}: on {host} it becomes {text!r}, which does not begin with /")
    try:
        status = path.stat()
    except OSError as error:
        raise EnvironmentLacksError(f"{where}: {str(path)!r} on {host}: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise EnvironmentLacksError(f"{where}: {str(path)!r} on {host} is not a folder")
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise EnvironmentLacksError(
            f"{where}: {str(path)!r} on {host} is writable by everybody and not sticky, so that other users could "
            "replace staged data; make it sticky (chmod +t), or name another folder"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise EnvironmentLacksError(f"{where}: {str(path)!r} on {host} is not writable")
    return path


class StagingFolder:
    """A private folder for staged samples, locked by this process; `identity`: equal for equally staged data."""

    def __init__(self, place: Path, key: StagingTier, identity: str, *, keep: bool, host: str) -> None:
        self._place, self._key, self._host = place, key, host
        self.kept = keep
        self.warning = ""  # why a temporary folder is used although `keep` was set; empty if it is not
        self._held: HeldFolder | None = None
        self._lock = -1
        node = hashlib.sha256(host.encode()).hexdigest()[:6]
        self._label = f"{_LABEL}{node}-"
        remove_abandoned([str(place)], self._label)
        try:
            if not (keep and self._take(place / f"{_KEPT}{identity}-{node}")):
                self.kept = False
                self._held = HeldFolder([str(place)], self._label)
                self.path = Path(self._held.path)
                with suppress(OSError):  # then the next staging run in this tier removes it
                    also_remove(self._held.path, os.environ)
        except OSError as error:
            raise EnvironmentLacksError(
                f"storage.{key}.path: a folder cannot be created in {str(place)!r} on {host}: {error.strerror}"
            ) from None

    def _take(self, path: Path) -> bool:
        """Locks the kept folder of the data; returns False if another job uses it."""
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise EnvironmentLacksError(
                f"storage.{self._key}.path: {str(path)!r} on {self._host} is not a private folder of this user (mode "
                "0700): remove it, or name another folder"
            )
        lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            self.warning = (
                f"data.keep_staged: another job on {self._host} uses {str(path)!r}; this run staged to a temporary "
                "folder, which was not kept"
            )
            return False
        self.path, self._lock = path, lock
        return True

    def require(self, needed: int, files: int, capacity: int | None, room_in_memory: int | None) -> Room:
        """Returns the free space. Raises EnvironmentLacksError: it is less than `needed` bytes or `files` files.
        `room_in_memory`: bytes that memory limits allow if the tier is in memory.
        """
        room = self.room(room_in_memory)
        request = f"staging to storage.{self._key} {str(self._place)!r} on {self._host} needs {format_bytes(needed)}"
        if capacity is not None and needed > capacity:
            raise EnvironmentLacksError(f"{request}, storage.{self._key}.capacity_bytes is {format_bytes(capacity)}")
        if needed > room.free:
            raise EnvironmentLacksError(f"{request}; {format_bytes(room.free)} are free{room.limit}")
        status = os.statvfs(self.path)
        if status.f_files and files > status.f_favail:
            raise EnvironmentLacksError(f"{request} in {files:,} files; only {status.f_favail:,} can be created there")
        return room

    def room(self, room_in_memory: int | None = None) -> Room:
        """Returns the free space; `room_in_memory` as in `require`."""
        status = os.statvfs(self.path)
        free = status.f_bavail * status.f_frsize
        if room_in_memory is not None and room_in_memory < free:
            return Room(room_in_memory, " within the job's limit of memory")
        return Room(free)

    def empty(self) -> None:
        for entry in os.scandir(self.path):
            if entry.name == _LOCK:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                with suppress(OSError):
                    Path(entry.path).unlink()

    def close(self, *, keep: bool = True) -> None:
        """Releases the folder, and removes it unless it is a kept one and `keep` is set. May be called twice."""
        temporary_folder, self._held = self._held, None
        if temporary_folder is not None:
            temporary_folder.remove()
        if self._lock >= 0:
            if not keep:
                shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def rounded(num_bytes: int, block: int) -> int:
    """Returns the disk space of a file with that many bytes, without its directory entry."""
    return -(-num_bytes // block) * block


def block_of(folder: Path) -> int:
    """Returns the block size of a folder's file system in bytes."""
    return max(1, os.statvfs(folder).f_frsize)


def staging_identity(**parts: object) -> str:
    """Returns a digest of these values, 16 characters long."""
    return hashlib.sha256(repr(sorted(parts.items())).encode(errors="surrogateescape")).hexdigest()[:16]


def user_error(path: Path, reason: str) -> UserError:
    """Returns the error for an entry of the data set that cannot be staged."""
    return UserError(f"data.source: {str(path)!r} {reason}")


class CancelledError(Exception):
    """Another stream or process failed, so that copying ends."""


@dataclass
class Moved:
    """A span of time in which one stream copied items."""

    stream: int
    start_ns: int  # CLOCK_MONOTONIC
    end_ns: int
    num_bytes: int
    items: int


class Tally:
    """The progress of staging on this node. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.cancelled = threading.Event()
        self.needed = self.copied = self.reused = self.items = self.looked = 0
        """Bytes to be staged; bytes copied; bytes reused; files or samples staged; files listed or checked."""
        self.moved: list[Moved] = []

    def look(self, num: int = 1) -> None:
        """Counts listed or checked files. Raises CancelledError: staging was cancelled; also the other methods."""
        self._check_cancelled()
        with self._lock:
            self.looked += num

    def add(self, num_bytes: int) -> None:
        self._check_cancelled()
        with self._lock:
            self.copied += num_bytes

    def done(self, stream: int, start_ns: int, num_bytes: int, items: int = 1) -> None:
        """Records files or samples that a stream has copied, and whose bytes were counted before."""
        end_ns = time.monotonic_ns()
        with self._lock:
            self.items += items
            last = next((span for span in reversed(self.moved) if span.stream == stream), None)
            if last is not None and (start_ns - last.start_ns < _SPAN_NS or len(self.moved) >= _MAX_SPANS):
                last.end_ns, last.num_bytes, last.items = end_ns, last.num_bytes + num_bytes, last.items + items
            else:
                self.moved.append(Moved(stream, start_ns, end_ns, num_bytes, items))

    def reuse(self, num_bytes: int, items: int = 1) -> None:
        """Counts files or samples of an earlier run that are reused."""
        self._check_cancelled()
        with self._lock:
            self.reused += num_bytes
            self.items += items

    def _check_cancelled(self) -> None:
        if self.cancelled.is_set():
            raise CancelledError


def run_streams(num: int, tasks: Iterable[T], work: Callable[[int, T], None]) -> None:
    """Executes all tasks in `num` threads in their order; raises the first error after all threads have ended."""
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

    # Daemon threads, because a file system may hang and must not keep the process from ending.
    threads = [threading.Thread(target=stream, args=(n,), name=f"dlbench-stage-{n}", daemon=True) for n in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def disk_full_error(error: OSError, where: str, tally: Tally, free_before: int) -> EnvironmentLacksError | None:
    """Returns the error for a full disk; None for another error."""
    if error.errno not in _FULL:
        return None
    return EnvironmentLacksError(
        f"staging to {where}: {error.strerror} after {format_bytes(tally.copied)} of "
        f"{format_bytes(tally.needed - tally.reused)}; {format_bytes(free_before)} were free before; the copies were "
        "removed"
    )


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to be copied."""

    name: str  # relative to the staged data, with `/`
    path: str
    num_bytes: int
    mtime_ns: int


def list_files(parts: Mapping[str, Path], within: Path, tally: Tally) -> list[SourceFile]:
    """Lists the files of a data set. `parts`: folders or files by their names in the copy, an empty name for the data
    set itself. `within`: the data set, which links must not leave. Raises UserError: an entry cannot be staged.
    """
    files: list[SourceFile] = []
    for name, folder in parts.items():
        resolved = folder.resolve()
        allowed = (within.resolve(), resolved)
        if resolved.is_file():
            status = resolved.stat()
            files.append(SourceFile(name or resolved.name, str(resolved), status.st_size, status.st_mtime_ns))
        else:
            files += _below(resolved, name, allowed, tally)
    return files


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
        target = link.resolve(strict=True)
    except (OSError, RuntimeError):
        raise user_error(link, "is a broken link: it cannot be staged") from None
    if not any(target.is_relative_to(root) for root in allowed):
        raise user_error(
            link,
            f"is a link out of the data set, to {str(target)!r}; replicate copies only files of the data set: set "
            "data.staging to lazy or shard, which copy samples, not files",
        )
    if target.is_dir():
        raise user_error(link, "is a link to a folder: replicate follows only links to regular files")
    return target


def replicate(
    parts: Mapping[str, Path],
    within: Path,
    folder: StagingFolder,
    *,
    streams: int,
    tally: Tally,
    require: Callable[[int, int], None],
) -> tuple[Sequence[SourceFile], str]:
    """Copies a data set; returns its files, and how the copies were verified. `require`: raises if the bytes and files
    to be written do not fit. Raises UserError, IncompleteDataError (a file changed or is altered), or OSError.
    """
    files = list_files(parts, within, tally)
    digests: dict[str, str] = {}  # SHA-256 by path in the data set
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
            tally.reuse(file.num_bytes)  # a complete copy of an earlier staging
        else:
            missing.append(file)
    require(sum(rounded(file.num_bytes, block) for file in missing), len(missing))
    _remove_others(root, {file.name for file in files})
    # Folders first, so that threads do not create the same folder.
    for parent in {(root / file.name).parent for file in missing}:
        parent.mkdir(parents=True, exist_ok=True)

    def copy(stream: int, file: SourceFile) -> None:
        begun = time.monotonic_ns()
        partial = folder.path / f"{_PARTIAL}{stream}"
        copy_file(file, root / file.name, partial=partial, tally=tally, sha256=digests.get(file.name))
        tally.done(stream, begun, file.num_bytes)

    run_streams(streams, missing, copy)
    if digests:
        return files, "SHA-256 of the data set's manifest"
    return files, "size and time of the source before and after"


def copy_file(file: SourceFile, target: Path, *, partial: Path, tally: Tally, sha256: str | None) -> None:
    """Copies one file to `partial` and renames it. Raises IncompleteDataError: it changed, or is altered; OSError."""
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
        raise IncompleteDataError(
            f"{file.path!r}: altered (its SHA-256 differs from that in the data set's manifest); see "
            "`dlbench data verify`"
        )
    os.utime(partial, ns=(file.mtime_ns, file.mtime_ns))
    partial.rename(target)


def _is_same(file: SourceFile, copy: Path) -> bool:
    try:
        status = copy.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and (status.st_size, status.st_mtime_ns) == (file.num_bytes, file.mtime_ns)


def _remove_others(root: Path, names: set[str]) -> None:
    """Removes files that the source does not have, so that old and new files never mix."""
    for folder, folders, files in os.walk(root, topdown=False, followlinks=False):
        relative = os.path.relpath(folder, root)
        for name in files:
            path = name if relative == "." else f"{relative}/{name}"
            if path not in names:
                Path(folder, name).unlink()
        for name in folders:
            inner = Path(folder, name)
            if inner.is_symlink():
                inner.unlink()
            elif not any(inner.iterdir()):
                inner.rmdir()


def changed_files(files: Sequence[SourceFile], folder: Path) -> list[str]:
    """Returns the names of staged files that were changed after the copy, by size and time."""
    return [file.name for file in files if not _is_same(file, folder / _DATA / file.name)]

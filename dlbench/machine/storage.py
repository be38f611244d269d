"""Determines the kind of a file system, the rate at which it opens files, the bytes read from storage by a thread, and
the pages of files in the page cache, which it evicts and reads in; caches of servers cannot be controlled.

The kernel counts bytes in read_bytes of /proc/thread-self/io when a read is sent to a block device, for the thread
that caused it: read-ahead counts, hits in the page cache do not (proc(5); tested on ext4, tmpfs and a loop device).
File systems without a block device may or may not count.

Behaviour of the kernel on ext4, tmpfs (files are always cached) and a loop device, tested with Linux 6.18:

- `cachestat(2)` (6.5 and later) counts the cached pages of a file exactly, but only of the user's own files.
- A read with `RWF_NOWAIT` fails with EAGAIN if it would have to wait, for any user, but not on tmpfs. It starts
  read-ahead, of one page if the file is advised as random; that page is evicted again.
- `mincore(2)` is not used: for files of other users it reports every page as cached.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from dlbench.machine.cgroup import available_bytes
from dlbench.machine.sources import ReadingFailedError, read_text
from dlbench.opening import descriptor, why_unreadable

COUNTER = Path("/proc/thread-self/io")
_COUNTING = ("tmpfs", "ramfs", "overlay", "btrfs")
"""File systems without a device number that count correctly: the first two read nothing, the others read through a
block device within the call."""

_opened = threading.local()
_MAX_NAMES = 1 << 16  # most files of a data set, and names of one of its folders, that are used
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
COLD_AT_MOST = 0.01
"""Largest share of cached pages of a cold data set: some pages stay in per-core lists, or are mapped."""

WARM_AT_LEAST = 0.99
_MAX_FILES = 256  # most files of a data set whose pages are counted
_MAX_PAGES = 512
"""Pages of all files that are tested one by one if `cachestat` is not available, but at least 4 per file."""

_PIECE = 1 << 20
_STREAMS = 8  # files that are evicted or read at the same time
_CACHESTAT = 451  # the system call's number, the same on all architectures but Alpha


class Mount(NamedTuple):
    """A line of mountinfo (proc(5))."""

    device: str  # ``major:minor``
    root: str  # path within the file system that is mounted
    place: str  # mount point
    kind: str  # e.g. ``ext4`` or ``lustre``
    options: list[str]  # of the file system


def mounts(root: Path = Path("/")) -> list[Mount]:
    """Returns all mounts of this process. Raises `ReadingFailedError`: unreadable. `root`: parent folder of `proc`."""
    all_mounts = []
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if len(left) > 5 and len(right) > 2:
            all_mounts.append(Mount(left[2], _unescaped(left[3]), _unescaped(left[4]), right[0], right[2].split(",")))
    return all_mounts


def _unescaped(text: str) -> str:
    """Returns a path of mountinfo, in which blanks and others are octal numbers (proc(5))."""
    return re.sub(r"\\([0-3][0-7]{2})", lambda match: chr(int(match[1], 8)), text)


def file_system_of(folder: Path, root: Path = Path("/")) -> str:
    """Returns the kind of a folder's file system by its mount; empty if unknown. `root`: parent folder of `proc`."""
    try:
        path = folder.resolve(strict=True)
        device = _device(path)
        all_mounts = mounts(root)
    except (OSError, ValueError, ReadingFailedError):
        return ""
    kind_by_device, nearest_place, nearest_kind = "", "", ""
    for mount in all_mounts:
        if mount.device == device:
            kind_by_device = mount.kind
        # Devices of subvolumes (btrfs) and of overlays may differ from those of their mounts.
        is_above = str(path) == mount.place or str(path).startswith(mount.place.rstrip("/") + "/")
        if is_above and len(mount.place) >= len(nearest_place):
            nearest_place, nearest_kind = mount.place, mount.kind
    return kind_by_device or nearest_kind


def _device(path: Path) -> str:
    device = path.stat().st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def storage_reads() -> int | None:
    """Returns the bytes read from storage by the calling thread so far; None if the kernel does not count them."""
    # Opened once per thread; a forked process needs its own file.
    if getattr(_opened, "owner", None) != os.getpid():
        if getattr(_opened, "file", None) is not None:
            os.close(_opened.file)
        _opened.owner = os.getpid()
        try:
            _opened.file = os.open(COUNTER, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            _opened.file = None
    if _opened.file is None:
        return None
    try:
        text = os.pread(_opened.file, 4096, 0)
    except OSError:
        return None
    number = text.partition(b"\nread_bytes: ")[2].partition(b"\n")[0]
    return int(number) if number.isdigit() else None


def counts_reads(path: Path) -> bool:
    """Returns whether `storage_reads` counts reads of a file, because its file system reads through a block device."""
    try:
        device = _device(path)
        if Path("/sys/dev/block", device).exists():
            return True
        return next((mount.kind in _COUNTING for mount in mounts() if mount.device == device), False)
    except (OSError, ReadingFailedError):
        return False


def call_rates(files: Sequence[Path], seconds: float, seed: int) -> dict[str, float]:
    """Measures opened files, `stat` calls of other files, and listed names per second; each for `seconds`."""
    numbers = random.Random(seed).sample(range(len(files)), min(len(files), _MAX_NAMES))
    sample = [str(files[number]) for number in numbers]
    half = len(sample) // 2

    def open_and_close(path: str) -> None:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))

    def list_names(path: str) -> int:
        with os.scandir(path) as entries:
            return sum(1 for _ in islice(entries, _MAX_NAMES))

    def rate(call: Callable[[str], Any], paths: Iterable[str]) -> float:
        count, elapsed_s = 0, 0.0
        for path in paths:
            start, result = perf_counter(), None
            with suppress(OSError):  # a missing name counts as a call, too
                result = call(path)
            elapsed_s += perf_counter() - start
            count += result if isinstance(result, int) else 1
            if elapsed_s >= seconds:
                break
        return count / elapsed_s

    return {
        "opens_per_s": rate(open_and_close, sample[half:]),
        "stats_per_s": rate(os.stat, sample[:half] or sample),
        "names_per_s": rate(list_names, dict.fromkeys(map(os.path.dirname, sample))),
    }


@dataclass(frozen=True, kw_only=True)
class CachedPages:
    """The share of files' pages in the page cache."""

    share: float | None  # share of the tested pages that are in the page cache; None if unknown
    evidence: str  # how it was determined, or why it is unknown


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_uint64), ("length", ctypes.c_uint64))


class PageCounts(ctypes.Structure):
    """The answer of cachestat(2), in pages."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent"))


def cached_pages(files: Sequence[Path]) -> CachedPages:
    """Returns the share of files' pages in the page cache, from at most `_MAX_FILES` random files."""
    generator = random.Random(0)
    library = ctypes.CDLL(None)
    sample, files_text = list(files), f"{len(files):,} files"
    if len(files) > _MAX_FILES:
        sample, files_text = generator.sample(files, _MAX_FILES), f"{_MAX_FILES:,} of {len(files):,} files"
    num_cached = num_tested = 0
    methods: list[str] = []
    problem = "the files have no pages"
    for path in sample:
        try:
            opened = descriptor(path)
        except OSError as error:
            problem = error.strerror or problem
            continue
        try:
            size = os.fstat(opened).st_size
            if not size:
                continue
            counts = _count_cached(library, opened, size, max(4, _MAX_PAGES // len(sample)), generator)
        finally:
            os.close(opened)
        if counts is None:
            problem = "the kernel does not report which pages of these files are cached"
            continue
        method, cached, tested = counts
        methods.append(method)
        num_cached, num_tested = num_cached + cached, num_tested + tested
    if not num_tested:
        return CachedPages(share=None, evidence=problem)
    methods_text = " and ".join(dict.fromkeys(methods))
    evidence = f"{num_tested:,} pages of {files_text} tested by {methods_text}"
    return CachedPages(share=num_cached / num_tested, evidence=evidence)


def _count_cached(
    library: ctypes.CDLL, opened: int, size: int, max_pages: int, generator: random.Random
) -> tuple[str, int, int] | None:
    """Returns the method, the number of cached pages, and the number of tested pages; None if the kernel refuses."""
    pages = -(-size // mmap.PAGESIZE)
    counts = PageCounts()
    arguments = ctypes.c_uint(opened), ctypes.byref(_Range(0, 0)), ctypes.byref(counts), ctypes.c_uint(0)
    if library.syscall(ctypes.c_long(_CACHESTAT), *arguments) == 0:
        return "cachestat", min(int(counts.cached), pages), pages
    # Before Linux 6.5, or for files of other users.
    tested_pages, cached = sorted(generator.sample(range(pages), min(pages, max_pages))), 0
    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_RANDOM)
    for page in tested_pages:
        start, reads_before = page * mmap.PAGESIZE, storage_reads()
        try:
            os.preadv(opened, [bytearray(1)], start, os.RWF_NOWAIT)
        except BlockingIOError:
            # Waits for the page, because one that is being read cannot be evicted.
            os.pread(opened, 1, start)
        except OSError:
            return None
        else:
            # A fast disk may read the page within the call.
            if storage_reads() == reads_before:
                cached += 1
                continue
        os.posix_fadvise(opened, start, mmap.PAGESIZE, os.POSIX_FADV_DONTNEED)
    return "reads with RWF_NOWAIT", cached, len(tested_pages)


def evict(files: Sequence[Path], report: list[str], drop_caches: Path = DROP_CACHES) -> Iterator[None]:
    """Evicts files from the page cache while the caller iterates; appends lines about it to `report`. Dirty files are
    written, and all are advised as not needed. If this process is allowed to, it also drops the kernel's cache of names
    and attributes, of the whole machine, so that opening is cold.
    """
    yield from _advise(files, report)
    try:
        kernel = os.open(drop_caches, os.O_WRONLY | os.O_CLOEXEC)  # never created
    except OSError as error:
        report.append(f"names and attributes of files stay cached ({drop_caches}: {why_unreadable(error)})")
        return
    try:
        os.write(kernel, b"2\n")
        report.append(f"names and attributes of files dropped by {drop_caches}")
    except OSError as error:
        report.append(f"{drop_caches}: {why_unreadable(error)}")
    finally:
        os.close(kernel)


def _advise(files: Sequence[Path], report: list[str]) -> Iterator[None]:
    refused: list[str] = []

    def advise(path: Path, _stopped: threading.Event) -> None:
        try:
            opened = descriptor(path)
            try:
                os.fdatasync(opened)
                os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(opened)
        except OSError as error:
            refused.append(why_unreadable(error))

    yield from _side_by_side(advise, files)
    if refused:
        report.append(f"posix_fadvise was refused for {len(refused):,} of {len(files):,} files: {refused[0]}")
    else:
        report.append("emptied of these files by posix_fadvise")


def fill(files: Sequence[Path], report: list[str], room_bytes: int | None = None) -> Iterator[None]:
    """Reads files into the page cache up to `room_bytes` (None: available memory) while the caller iterates."""
    if room_bytes is None:
        room_bytes = available_bytes()
    sizes = [_size(path) for path in files]
    total = sum(sizes)
    num_fitting, fitting_bytes = 0, 0
    while num_fitting < len(files) and (room_bytes is None or fitting_bytes + sizes[num_fitting] <= room_bytes):
        fitting_bytes += sizes[num_fitting]
        num_fitting += 1

    def read(path: Path, stopped: threading.Event) -> None:
        buffer = bytearray(_PIECE)
        # Unreadable files are noticed when their pages are counted, and reported by the data readers.
        with suppress(OSError):
            opened = descriptor(path)
            try:
                while not stopped.is_set() and os.readv(opened, [buffer]):
                    pass
            finally:
                os.close(opened)

    yield from _side_by_side(read, files[:num_fitting])
    if num_fitting < len(files):
        report.append(f"{fitting_bytes:,} of {total:,} bytes were read: available memory is {room_bytes:,} bytes")
    else:
        report.append(f"filled by reading {total:,} bytes")


def _side_by_side(work: Callable[[Path, threading.Event], None], files: Sequence[Path]) -> Iterator[None]:
    """Processes all files in `_STREAMS` threads; yields about once a second."""
    waiting, stopped = iter(files), threading.Event()

    def stream() -> None:
        for path in waiting:
            if stopped.is_set():
                return
            work(path, stopped)

    with ThreadPoolExecutor(_STREAMS) as threads:
        running = [threads.submit(stream) for _ in range(_STREAMS)]
        try:
            while wait(running, timeout=1.0).not_done:
                yield
        finally:
            stopped.set()
    for future in running:
        future.result()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def files_bytes(files: Sequence[Path]) -> int:
    """Returns the total size of files in bytes, without missing ones."""
    return sum(map(_size, files))

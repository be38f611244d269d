"""Counts the pages of files in the page cache, evicts them, and reads them in; caches of servers cannot be controlled.

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
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dlbench.machine.cgroup import available_bytes
from dlbench.machine.storage import storage_reads
from dlbench.opening import descriptor, why_unreadable

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

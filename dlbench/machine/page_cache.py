"""Which pages of files are in the page cache; how they get out of it and into it.

What the kernel answers was tried on ext4, tmpfs and a loop device under Linux 6.18:

- `cachestat(2)` (6.5 and later) counts the cached pages of a file exactly, of one's own files only.
- A read with `RWF_NOWAIT` fails with EAGAIN where it would have to wait, for anybody; it begins to read ahead as it
  does so, one page where the file is advised as random. What such a look brought in is evicted again. Not on tmpfs.
- `mincore(2)` is not asked: it answers for one's own files alone, and of others calls every page cached.

Files on tmpfs are in the page cache and nowhere else. Caches of file servers are out of reach.
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

from dlbench.machine.host_memory import memory_room
from dlbench.machine.storage import storage_reads
from dlbench.opening import descriptor, why_unreadable

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
COLD_AT_MOST = 0.01
"""Share of cached pages up to which a data set counts as cold: some stay in lists of single cores, or are mapped."""
WARM_AT_LEAST = 0.99
_LOOKED_AT = 256  # files of a data set whose pages are counted, at most
_SPOTS = 512
"""Pages that are looked at one by one where the kernel does not count them, over all files; of each file 4 at least."""
_PIECE = 1 << 20
_STREAMS = 8  # files that are evicted or read at the same time
_CACHESTAT = 451  # the system call's number, the same on all architectures but Alpha


@dataclass(frozen=True, kw_only=True)
class CachedPages:
    """What the kernel says of some files' pages."""

    share: float | None  # of the pages that were looked at, those in the page cache; None: not known
    evidence: str  # how that is known, or why not


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_uint64), ("length", ctypes.c_uint64))


class PageCounts(ctypes.Structure):
    """The answer of cachestat(2), in pages."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent"))


def cached_pages(files: Sequence[Path]) -> CachedPages:
    """Returns the share of files' pages that is in the page cache; of a data set some hundred files are looked at."""
    generator = random.Random(0)
    library = ctypes.CDLL(None)
    chosen = list(files) if len(files) <= _LOOKED_AT else generator.sample(files, _LOOKED_AT)
    cached = looked = 0
    ways: dict[str, None] = {}
    refused = ""
    for path in chosen:
        try:
            opened = descriptor(path)
        except OSError as error:
            refused = error.strerror or ""
            continue
        try:
            size = os.fstat(opened).st_size
            spots = max(4, _SPOTS // len(chosen))
            found = _look(library, opened, size, spots, generator) if size else ("", 0, 0)
        finally:
            os.close(opened)
        if found is None:
            refused = "the kernel does not say which pages of these files are cached"
            continue
        way, here, pages = found
        ways |= {way: None} if way else {}
        cached, looked = cached + here, looked + pages
    if not looked:
        return CachedPages(share=None, evidence=refused or "there is no page to look at")
    of = f"{len(chosen):,} of {len(files):,} files" if len(chosen) < len(files) else f"{len(files):,} files"
    return CachedPages(share=cached / looked, evidence=f"{looked:,} pages of {of} asked for by {' and '.join(ways)}")


def _look(
    library: ctypes.CDLL, opened: int, size: int, num_spots: int, generator: random.Random
) -> tuple[str, int, int] | None:
    """The way of asking, pages found cached, and pages asked for; None where the kernel does not say."""
    pages = -(-size // mmap.PAGESIZE)
    counts = PageCounts()
    arguments = ctypes.c_uint(opened), ctypes.byref(_Range(0, 0)), ctypes.byref(counts), ctypes.c_uint(0)
    if library.syscall(ctypes.c_long(_CACHESTAT), *arguments) == 0:
        return "cachestat", min(int(counts.cached), pages), pages
    # Before Linux 6.5, or of somebody else's files: by reads that may not wait.
    spots, cached = sorted(generator.sample(range(pages), min(pages, num_spots))), 0
    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_RANDOM)
    for page in spots:
        start, before = page * mmap.PAGESIZE, storage_reads()
        try:
            os.preadv(opened, [bytearray(1)], start, os.RWF_NOWAIT)
        except BlockingIOError:
            # A page that is on its way cannot be evicted: it is waited for.
            os.pread(opened, 1, start)
        except OSError:
            return None
        else:
            # A fast disk may bring the page within the call.
            if storage_reads() == before:
                cached += 1
                continue
        os.posix_fadvise(opened, start, mmap.PAGESIZE, os.POSIX_FADV_DONTNEED)
    return "reads that may not wait", cached, len(spots)


def evict(files: Sequence[Path], report: list[str], drop_caches: Path = DROP_CACHES) -> Iterator[None]:
    """Takes files out of the page cache, for as long as somebody iterates; `report` gets a line on how, or why not.

    Each file is written where it is dirty, and advised as not needed: what other programs have cached stays. Where this
    process may, the kernel then forgets names and attributes of files (of the whole machine), so that opening is cold,
    too.
    """
    yield from _advise(files, report)
    try:
        kernel = os.open(drop_caches, os.O_WRONLY | os.O_CLOEXEC)  # the kernel's own file: never made
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
    """Reads files into the page cache as far as `room_bytes` reach (None: available memory); iterated as `evict`."""
    room = memory_room() if room_bytes is None else room_bytes
    sizes = [_size(path) for path in files]
    total = sum(sizes)
    fitting, taken = 0, 0
    while fitting < len(files) and (room is None or taken + sizes[fitting] <= room):
        taken += sizes[fitting]
        fitting += 1

    def read(path: Path, stopped: threading.Event) -> None:
        buffer = bytearray(_PIECE)
        # What cannot be read is found by the look at the pages, and named by the readers.
        with suppress(OSError):
            opened = descriptor(path)
            try:
                while not stopped.is_set() and os.readv(opened, [buffer]):
                    pass
            finally:
                os.close(opened)

    yield from _side_by_side(read, files[:fitting])
    if fitting < len(files):
        report.append(f"{taken:,} of {total:,} bytes were read: memory has room for {room:,}, the rest does not fit")
    else:
        report.append(f"filled by reading {total:,} bytes")


def _side_by_side(work: Callable[[Path, threading.Event], None], files: Sequence[Path]) -> Iterator[None]:
    """Does something with each file, several at the same time; yields about once a second."""
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
    for one in running:
        one.result()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def files_bytes(files: Sequence[Path]) -> int:
    """Bytes of files together; one that is not there has none."""
    return sum(map(_size, files))

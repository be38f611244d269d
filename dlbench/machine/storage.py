"""Determines the kind of a file system, the rate at which it opens files, and the bytes read from storage by a thread.
The kernel counts bytes in read_bytes of /proc/thread-self/io when a read is sent to a block device, for the thread that
caused it: read-ahead counts, hits in the page cache do not (proc(5); tested on ext4, tmpfs and a loop device). File
systems without a block device may or may not count.
"""

from __future__ import annotations

import os
import random
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from dlbench.machine.sources import ReadingFailedError, read_text

COUNTER = Path("/proc/thread-self/io")
_COUNTING = ("tmpfs", "ramfs", "overlay", "btrfs")
"""File systems without a device number that count correctly: the first two read nothing, the others read through a
block device within the call."""
_opened = threading.local()

_MAX_NAMES = 1 << 16  # most files of a data set, and names of one of its folders, that are used


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

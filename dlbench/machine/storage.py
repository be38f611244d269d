"""What kind of file system a folder lies on, how fast it opens, and what the kernel fetched from storage for a thread.

The kernel counts a read in read_bytes of /proc/thread-self/io where it is handed to a block device, for the thread that
asked for it: read-ahead counts, what the page cache had does not (proc(5); tried on ext4, tmpfs and a loop device,
whose backing file counts for the kernel's own thread). A thread's counter is not disturbed by others of its process.
File systems without a block device of their own may or may not count (the kernel's documentation leaves NFS open).
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
"""File systems without a device of their own number that count: from memory nothing is fetched, the others read through
a block device within the call."""
_opened = threading.local()

_ASKED = 1 << 16  # files of a data set, and names of one of its folders, at most


class Mount(NamedTuple):
    """A line of mountinfo (proc(5))."""

    device: str  # ``major:minor``.
    root: str  # What of its file system is mounted.
    place: str
    kind: str  # E.g. ``ext4`` or ``lustre``.
    options: list[str]  # Of its file system.


def mounts(root: Path = Path("/")) -> list[Mount]:
    """All mounts of this process; `root` is where `proc` is. `ReadingFailedError` where they cannot be read."""
    found = []
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if len(left) > 5 and len(right) > 2:
            found.append(Mount(left[2], _unescaped(left[3]), _unescaped(left[4]), right[0], right[2].split(",")))
    return found


def _unescaped(text: str) -> str:
    """A path of mountinfo: blanks and such are in octal (proc(5))."""
    return re.sub(r"\\([0-3][0-7]{2})", lambda found: chr(int(found[1], 8)), text)


def file_system_of(folder: Path, root: Path = Path("/")) -> str:
    """Kind of a folder's file system by its mount; empty where nobody says. `root` is where `proc` is."""
    try:
        real = folder.resolve(strict=True)
        number = _device(real)
        known = mounts(root)
    except (OSError, ValueError, ReadingFailedError):
        return ""
    by_device, by_place = "", ("", "")
    for mount in known:
        if mount.device == number:
            by_device = mount.kind
        # Devices of subvolumes (btrfs) and of overlays may differ from those of their mounts.
        is_above = str(real) == mount.place or str(real).startswith(mount.place.rstrip("/") + "/")
        if is_above and len(mount.place) >= len(by_place[0]):
            by_place = (mount.place, mount.kind)
    return by_device or by_place[1]


def _device(path: Path) -> str:
    device = path.stat().st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def storage_reads() -> int | None:
    """Bytes fetched from storage for the calling thread so far; None where the kernel does not count."""
    # Opened once: the file belongs to the thread, and a forked process has another.
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
    """Whether reads of a file are sure to be counted, because its file system reads through a block device."""
    try:
        device = _device(path)
        if Path("/sys/dev/block", device).exists():
            return True
        return next((mount.kind in _COUNTING for mount in mounts() if mount.device == device), False)
    except (OSError, ReadingFailedError):
        return False


def call_rates(files: Sequence[Path], seconds: float, seed: int) -> dict[str, float]:
    """Returns files opened, others looked up and names listed per second of one process; each for `seconds`."""
    drawn = [str(files[n]) for n in random.Random(seed).sample(range(len(files)), min(len(files), _ASKED))]
    half = len(drawn) // 2

    def listed(path: str) -> int:
        with os.scandir(path) as entries:
            return sum(1 for _ in islice(entries, _ASKED))

    def rate(call: Callable[[str], Any], paths: Iterable[str]) -> float:
        done, spent = 0, 0.0
        for path in paths:
            begun, found = perf_counter(), None
            with suppress(OSError):  # a name that has gone is looked up all the same
                found = call(path)
            spent += perf_counter() - begun
            done += found if isinstance(found, int) else 1
            if spent >= seconds:
                break
        return done / spent

    return {
        "opens_per_s": rate(lambda path: os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK)), drawn[half:]),
        "stats_per_s": rate(os.stat, drawn[:half] or drawn),
        "names_per_s": rate(listed, dict.fromkeys(map(os.path.dirname, drawn))),
    }

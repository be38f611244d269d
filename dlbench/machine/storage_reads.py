"""How many bytes the kernel fetched from storage for one thread: read_bytes of /proc/thread-self/io.

The kernel counts a read where it is handed to a block device, for the thread that asked for it: read-ahead counts, what
the page cache had does not (proc(5); tried on ext4, tmpfs and a loop device, whose backing file counts for the kernel's
own thread). A thread's counter is not disturbed by others of its process. File systems without a block device of their
own may or may not count (the kernel's documentation leaves NFS open).
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

COUNTER = Path("/proc/thread-self/io")
_COUNTING = ("tmpfs", "ramfs", "overlay", "btrfs")
"""File systems without a device of their own number that count: from memory nothing is fetched, the others read through
a block device within the call."""
_opened = threading.local()


def storage_reads(counter: Path = COUNTER) -> int | None:
    """Bytes fetched from storage for the calling thread so far; None where the kernel does not count."""
    # Opened once: the file belongs to the thread, and a forked process has another.
    if getattr(_opened, "owner", None) != (os.getpid(), counter):
        if getattr(_opened, "file", None) is not None:
            os.close(_opened.file)
        _opened.owner = os.getpid(), counter
        try:
            _opened.file = os.open(counter, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            _opened.file = None
    if _opened.file is None:
        return None
    try:
        text = os.pread(_opened.file, 4096, 0)
    except OSError:
        return None
    for line in text.splitlines():
        name, _, number = line.partition(b": ")
        if name == b"read_bytes" and number.isdigit():
            return int(number)
    return None


def counts_reads(path: Path, root: Path = Path("/")) -> bool:
    """Whether reads of a file are sure to be counted, because its file system reads through a block device.

    Args:
        path: a file.
        root: where `proc` and `sys` are.
    """
    try:
        device = path.stat().st_dev
        if (root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}").exists():
            return True
        mounts = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for words in map(str.split, mounts):
        if len(words) > 2 and words[2] == wanted and "-" in words:
            return words[words.index("-") + 1] in _COUNTING
    return False

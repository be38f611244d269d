"""Reads the memory of this process, the memory that a job may still use, and out-of-memory kills by the kernel. Such a
kill is proved by the counter `oom_kill` in `memory.events` of version 2 (Linux,
Documentation/admin-guide/cgroup-v2.rst) or `memory.oom_control` of version 1 (since Linux 4.13).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from dlbench.machine.cgroup import MEMORY_FILES, ControlGroup, memory_limit, own_group
from dlbench.machine.sources import ReadingFailedError, keyed_number, read_number
from dlbench.machine.storage import file_system_of
from dlbench.opening import read_text
from dlbench.units import format_bytes

_MAX_FILE = 1 << 20
_STATUS = Path("/proc/self/status")
_IN_MEMORY = ("tmpfs", "ramfs")


def resident_bytes() -> int | None:
    """Returns the resident memory (VmRSS); None if unknown."""
    return _bytes_of(_STATUS, "VmRSS")


def peak_resident_bytes() -> int | None:
    """Returns the peak of resident memory since the process began or `reset_peak` (VmHWM); None if unknown."""
    return _bytes_of(_STATUS, "VmHWM")


def reset_peak() -> bool:
    """Resets the peak of resident memory; returns whether the kernel supports that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5), since Linux 4.0
    except OSError:
        return False
    return True


def _bytes_of(path: Path, name: str) -> int | None:
    try:
        lines = read_text(path, _MAX_FILE).splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
    except (OSError, ValueError, IndexError):
        return None


def lies_in_memory(folder: Path) -> bool:
    """Returns whether a folder's file system is in memory, by its mount (/proc/self/mountinfo)."""
    return file_system_of(folder) in _IN_MEMORY


def available_bytes(root: Path = Path("/")) -> int | None:
    """Returns the bytes that this process may still use in memory, page cache included; None if unknown."""
    available = [_bytes_of(root / "proc/meminfo", "MemAvailable")]
    with suppress(ReadingFailedError):
        group = own_group(root, "memory")
        available += [_available_in_group(group, folder) for folder in group.upwards()]
    return min((num for num in available if num is not None), default=None)


def total_bytes(root: Path = Path("/")) -> int | None:
    """Returns the memory of this machine, or of the control groups of this process; None if unknown."""
    limits: list[float | None] = [_bytes_of(root / "proc/meminfo", "MemTotal")]
    with suppress(ReadingFailedError):
        group = own_group(root, "memory")
        for folder in group.upwards():
            with suppress(ReadingFailedError):  # The root of a hierarchy has no limit.
                limits.append(memory_limit(group, folder))
    return min((int(limit) for limit in limits if limit is not None), default=None)


def _available_in_group(group: ControlGroup, folder: Path) -> int | None:
    """Returns the bytes that a group may still use; None without a limit, or if it cannot be read."""
    files = ("inactive_file", "active_file")
    if group.version == 1:
        files = ("total_inactive_file", "total_active_file")
    try:
        limit = memory_limit(group, folder)
        if limit is None:
            return None
        used = int(read_number(folder / MEMORY_FILES[group.version]["used"]))
        cached = 0
        for line in read_text(folder / "memory.stat", _MAX_FILE).splitlines():
            name, _, value = line.partition(" ")
            if name in files:
                cached += int(value)
    except (ReadingFailedError, OSError, ValueError):
        return None
    return max(0, int(limit) - max(0, used - cached))


class MemoryKills:
    """Detects kills by the out-of-memory killer since its creation, with counters of this process's cgroups."""

    def __init__(self, root: Path = Path("/")) -> None:
        """`root`: parent folder of `proc` and of the mounted hierarchies."""
        try:
            self._group: ControlGroup | None = own_group(root, "memory")
        except ReadingFailedError:
            self._group = None
        self._kills = self._count()
        self._limit_hits = self._count_limit_hits()

    def cause_of_kill(self) -> str:
        """Returns which limit the kernel enforced, the lowest that was reached; empty: no process was killed."""
        kills = self._count()
        if self._group is None or kills is None or self._kills is None or kills <= self._kills:
            return ""
        groups = self._count_limit_hits().items()
        limits = [limit for folder, (limit, hits) in groups if hits > self._limit_hits.get(folder, (limit, hits))[1]]
        if not limits:
            return (
                "the cgroup's counter oom_kill rose, but no cgroup reached its limit: the machine's own memory was full"
            )
        return f"the cgroup's limit is {format_bytes(min(limits))} ({MEMORY_FILES[self._group.version]['limit']})"

    def _count(self) -> int | None:
        """Returns how many processes of the own group were killed so far; None if unknown."""
        if self._group is None:
            return None
        with suppress(ReadingFailedError):
            return keyed_number(self._group.own / MEMORY_FILES[self._group.version]["kills"], "oom_kill")
        return None

    def _count_limit_hits(self) -> dict[Path, tuple[float, int]]:
        """Returns for each group with a limit the limit in bytes, and how often the limit was reached."""
        if self._group is None:
            return {}
        by_folder = {}
        for folder in self._group.upwards():
            path = folder / MEMORY_FILES[self._group.version]["limit_hits"]
            try:
                limit = memory_limit(self._group, folder)
                hits = read_number(path) if self._group.version == 1 else keyed_number(path, "oom")
            except ReadingFailedError:  # the root of a hierarchy has no limit
                continue
            if limit is not None and hits is not None:
                by_folder[folder] = limit, hits
        return by_folder

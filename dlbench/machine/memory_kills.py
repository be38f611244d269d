"""Whether the kernel killed processes of this cgroup for want of memory: its counters, before a run and after.

A process that is killed so ends by SIGKILL as any other. The proof is `oom_kill`, in `memory.events` of version 2
(Linux, Documentation/admin-guide/cgroup-v2.rst) and in `memory.oom_control` of version 1 (since Linux 4.13).
"""

from __future__ import annotations

from pathlib import Path

from dlbench.machine.cgroup import Group, memory_limit, own_group
from dlbench.machine.readings import ReadingFailedError, number_in, read_number
from dlbench.units import format_bytes


class MemoryKills:
    """The counters of this process's own cgroup and of those above it, as they were when this was made."""

    def __init__(self, root: Path = Path("/")) -> None:
        """`root`: where `proc` and the mounted hierarchies are."""
        try:
            self._group: Group | None = own_group(root, "memory")
        except ReadingFailedError:
            self._group = None
        self._kills = self._count()
        self._full = self._times_full()

    def since(self) -> str:
        """What the counters prove since then, e.g. ``the cgroup's limit is 2 GiB (memory.max)``; empty: nothing.

        The limit is named of the tightest group that was full since; where none was, the machine itself was.
        """
        kills = self._count()
        if self._group is None or kills is None or self._kills is None or kills <= self._kills:
            return ""
        before, now = self._full, self._times_full()
        limits = [limit for folder, (limit, times) in now.items() if times > before.get(folder, (0.0, times))[1]]
        if not limits:
            return "its counter oom_kill rose, and no limit of a cgroup was met: the machine's own memory was full"
        return f"the cgroup's limit is {format_bytes(min(limits))} ({self._names[1]})"

    @property
    def _names(self) -> tuple[str, str, str]:
        """Files of kills, of the limit, and of how often it was met."""
        if self._group is not None and self._group.version == 1:
            return "memory.oom_control", "memory.limit_in_bytes", "memory.failcnt"
        return "memory.events", "memory.max", "memory.events"

    def _count(self) -> int | None:
        """Processes of the own group that were killed so far; None where the kernel does not tell."""
        return None if self._group is None else _keyed(self._group.own / self._names[0], "oom_kill")

    def _times_full(self) -> dict[Path, tuple[float, int]]:
        """Limit in bytes of each group that has one, and how often it was met."""
        found = {}
        for folder in self._group.upwards() if self._group is not None else ():
            assert self._group is not None
            try:
                limit = memory_limit(self._group, folder)
                path = folder / self._names[2]
                times = read_number(path) if self._group.version == 1 else _keyed(path, "oom")
            except ReadingFailedError:  # the root of a hierarchy has none
                continue
            if limit is not None and times is not None:
                found[folder] = limit, times
        return found


def _keyed(path: Path, key: str) -> int | None:
    try:
        for line in path.read_text(encoding="ascii", errors="replace").splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return number_in(value, path)
    except (OSError, ReadingFailedError):
        pass
    return None

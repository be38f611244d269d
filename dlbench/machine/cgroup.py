"""Reads limits and use of the job's cgroup (cores, throttled time, memory), the memory of this process, the memory
that a job may still use, and out-of-memory kills by the kernel. Sources: Linux, Documentation/admin-
guide/cgroup-v2.rst; for version 1 Documentation/scheduler/sched-bwc.rst and Documentation/admin-
guide/cgroup-v1/memory.rst. A limit applies to all groups below the one that has it: of the process's own group and
those above it, the one with the tightest limit is read. A kill is proved by the counter `oom_kill` in
`memory.events` of version 2 or `memory.oom_control` of version 1 (since Linux 4.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dlbench.machine.sources import (
    DOUBLE,
    Field,
    Reading,
    ReadingFailedError,
    Values,
    fact,
    keyed_number,
    number_in,
    read_line,
    read_number,
)
from dlbench.machine.sources import read_text as read_source_text
from dlbench.machine.storage import file_system_of, mounts
from dlbench.opening import read_text
from dlbench.units import format_bytes

_UNLIMITED = 2**62  # Version 1 has a number near 2^63 if there is no limit.
MEMORY_FILES = {
    1: {
        "limit": "memory.limit_in_bytes",
        "used": "memory.usage_in_bytes",
        "kills": "memory.oom_control",
        "limit_hits": "memory.failcnt",
    },
    2: {"limit": "memory.max", "used": "memory.current", "kills": "memory.events", "limit_hits": "memory.events"},
}
"""Files of a group by its version: memory limit, memory in use, killed processes, how often the limit was reached."""

_MAX_FILE = 1 << 20
_STATUS = Path("/proc/self/status")
_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True, kw_only=True)
class ControlGroup:
    """The process's own group of one controller."""

    version: int
    top: Path  # Mount point of the hierarchy.
    own: Path

    def upwards(self) -> Iterator[Path]:
        """Yields the folder of the process's own group, then the visible ones above it."""
        folder = self.own
        while True:
            yield folder
            if folder == self.top:
                return
            folder = folder.parent


def cgroup_readings(root: Path, unavailable: dict[str, str], facts: dict[str, str]) -> list[Reading]:
    """Returns readings of throttled time and memory of the groups with the tightest limits, else of the own group."""
    plan = (
        ("cpu", "host.cpu.throttled_s", "host.cgroup.cpu_limit_cores", _cpu_limit, _throttled),
        ("memory", "host.cgroup.memory_bytes", "host.cgroup.memory_limit_bytes", memory_limit, _memory),
    )
    readings = []
    for controller, name, limit_name, limit_of, reader in plan:
        try:
            group = own_group(root, controller)
        except ReadingFailedError as error:
            unavailable[name] = error.reason
            facts[limit_name] = f"unknown: {error.reason}"
            continue
        folder, limit = tightest(group, limit_of)
        facts[limit_name] = limit
        name_inside = "/" + str(folder.relative_to(group.top)).removeprefix(".")
        facts[f"host.cgroup.{controller}_group"] = f"{fact(name_inside)} (version {group.version})"
        readings.append(Reading(fields=(Field(name=name, kind=DOUBLE),), call=reader(group, folder)))
    return readings


def own_group(root: Path, controller: str) -> ControlGroup:
    """Returns this process's group of a controller. Raises `ReadingFailedError`: it is not visible."""
    paths: dict[str, str] = {}
    for line in read_source_text(root / "proc/self/cgroup").splitlines():
        _number, controllers, path = [*line.split(":", 2), "", ""][:3]
        paths |= dict.fromkeys(controllers.split(","), path)  # version 2 has an empty name
    all_mounts = mounts(root)
    version_1 = [mount for mount in all_mounts if mount.kind == "cgroup" and controller in mount.options]
    version_2 = [mount for mount in all_mounts if mount.kind == "cgroup2"]
    for version, key, hierarchies in ((1, controller, version_1), (2, "", version_2)):
        for mount in hierarchies:
            if key in paths:
                top = root / mount.place.lstrip("/")
                return ControlGroup(version=version, top=top, own=_below(top, paths[key], mount.root))
    raise ReadingFailedError(f"no cgroup of the controller {controller} is mounted")


def _below(top: Path, path: str, mount_root: str) -> Path:
    """Returns the folder of a group of /proc/self/cgroup, if `mount_root` of its hierarchy is mounted at `top`."""
    inside = PurePosixPath(path)
    if ".." in inside.parts:
        raise ReadingFailedError(f"the cgroup {fact(path)} is outside of the mounted hierarchy")
    try:
        folder = top / inside.relative_to(mount_root)
    except ValueError as error:
        raise ReadingFailedError(
            f"the cgroup {fact(path)} is not below {fact(mount_root)}, which is mounted"
        ) from error
    if not folder.is_dir():
        raise ReadingFailedError(f"the cgroup {fact(path)} is not below {top}")
    return folder


def tightest(group: ControlGroup, limit_of: Callable[[ControlGroup, Path], float | None]) -> tuple[Path, str]:
    """Returns the group with the lowest limit, and the limit as text; without a limit the own group and `none`."""
    best: tuple[float, Path] | None = None
    for folder in group.upwards():
        try:
            limit = limit_of(group, folder)
        except ReadingFailedError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                continue  # the root of a hierarchy, and a group without the controller, have no limits
            return group.own, f"unknown: {error.reason}"
        if limit is not None and (best is None or limit < best[0]):
            best = limit, folder
    if best is None:
        return group.own, "none"
    lowest, limited_group = best
    return limited_group, f"{lowest:.15g}"


def _cpu_limit(group: ControlGroup, folder: Path) -> float | None:
    """Returns the CPU time per time that a group may use, in cores; None without a limit."""
    if group.version == 1:
        quota = read_line(folder / "cpu.cfs_quota_us")
        period = read_line(folder / "cpu.cfs_period_us")
    else:
        quota, _, period = read_line(folder / "cpu.max").partition(" ")
    if quota in ("max", "-1"):
        return None
    period_us = number_in(period, folder)
    if period_us == 0:
        raise ReadingFailedError(f"{folder}: a period of 0 microseconds")
    return number_in(quota, folder) / period_us


def memory_limit(group: ControlGroup, folder: Path) -> float | None:
    """Returns the bytes that a group may use; None without a limit. Raises `ReadingFailedError`: it is not readable."""
    path = folder / MEMORY_FILES[group.version]["limit"]
    text = read_line(path)
    if text == "max":
        return None
    limit = number_in(text, path)
    return None if limit >= _UNLIMITED else float(limit)


def _throttled(group: ControlGroup, folder: Path) -> Callable[[], Values]:
    key, seconds_per_unit = "throttled_usec", 1e-6
    if group.version == 1:
        key, seconds_per_unit = "throttled_time", 1e-9
    path = folder / "cpu.stat"

    def call() -> Values:
        throttled = keyed_number(path, key)
        if throttled is None:
            raise ReadingFailedError(f"{path}: no line {key}, as in a group without a CPU limit")
        return [throttled * seconds_per_unit]

    return call


def _memory(group: ControlGroup, folder: Path) -> Callable[[], Values]:
    path = folder / MEMORY_FILES[group.version]["used"]
    return lambda: [float(read_number(path))]


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

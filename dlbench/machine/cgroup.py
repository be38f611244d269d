"""Reads limits and use of the job's cgroup: cores, throttled time and memory. Sources: Linux,
Documentation/admin-guide/cgroup-v2.rst; for version 1 Documentation/scheduler/sched-bwc.rst and
Documentation/admin-guide/cgroup-v1/memory.rst. A limit applies to all groups below the one that has it: of the
process's own group and those above it, the one with the tightest limit is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    read_text,
)
from dlbench.machine.storage import mounts

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
    for line in read_text(root / "proc/self/cgroup").splitlines():
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

"""What the job's cgroup allows and takes: limits of processors and memory, throttled time, memory in use.

Sources: Linux, Documentation/admin-guide/cgroup-v2.rst; for version 1 Documentation/scheduler/sched-bwc.rst and
Documentation/admin-guide/cgroup-v1/memory.rst. A limit acts on all groups below the one that has it, so that all groups
from the process's own upwards are looked at, and the tightest is the one that is read.
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

_UNLIMITED = 2**62  # Version 1 says `none` by a number near 2^63.
MEMORY_FILES = {
    1: {
        "limit": "memory.limit_in_bytes",
        "used": "memory.usage_in_bytes",
        "kills": "memory.oom_control",
        "met": "memory.failcnt",
    },
    2: {"limit": "memory.max", "used": "memory.current", "kills": "memory.events", "met": "memory.events"},
}
"""Files of a group by its version: the limit of memory, what is used, processes killed, how often the limit was met."""


@dataclass(frozen=True, kw_only=True)
class ControlGroup:
    """The process's own group of one controller."""

    version: int
    top: Path  # Where the hierarchy is mounted.
    own: Path

    def upwards(self) -> Iterator[Path]:
        """The own group's folder, then those above it that can be seen."""
        folder = self.own
        while True:
            yield folder
            if folder == self.top:
                return
            folder = folder.parent


def cgroup_readings(root: Path, unavailable: dict[str, str], facts: dict[str, str]) -> list[Reading]:
    """Reads throttled time and memory of the group with the tightest limit; of the own one where none is limited."""
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
    """This process's group of a controller; `ReadingFailedError` where it cannot be seen."""
    paths: dict[str, str] = {}
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        paths |= dict.fromkeys(controllers.split(","), path)  # version 2 has an empty name
    hierarchies = [mount for mount in mounts(root) if mount.kind in ("cgroup", "cgroup2")]
    for version, key in ((1, controller), (2, "")):
        for mount in hierarchies:
            is_it = mount.kind == "cgroup2" if version == 2 else mount.kind == "cgroup" and controller in mount.options
            if is_it and key in paths:
                top = root / mount.place.lstrip("/")
                return ControlGroup(version=version, top=top, own=_below(top, paths[key], mount.root))
    raise ReadingFailedError(f"no cgroup of the controller {controller} is mounted")


def _below(top: Path, path: str, mount_root: str) -> Path:
    """Where a group of /proc/self/cgroup is, in a hierarchy of which `mount_root` is mounted at `top`."""
    inside = PurePosixPath(path)
    if ".." in inside.parts:
        raise ReadingFailedError(f"the cgroup {fact(path)} is outside of what is mounted here")
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
    """The group with the lowest limit, and that limit as a fact; the own group and `none` without any."""
    best: tuple[float, Path] | None = None
    for folder in group.upwards():
        try:
            limit = limit_of(group, folder)
        except ReadingFailedError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                continue  # the root of a hierarchy has no limits, nor has a group without the controller
            return group.own, f"unknown: {error.reason}"
        if limit is not None and (best is None or limit < best[0]):
            best = limit, folder
    return (group.own, "none") if best is None else (best[1], f"{best[0]:.15g}")


def _cpu_limit(group: ControlGroup, folder: Path) -> float | None:
    """Cores' worth of time that the group may use."""
    if group.version == 1:
        quota = read_line(folder / "cpu.cfs_quota_us")
        period = read_line(folder / "cpu.cfs_period_us")
    else:
        quota, _, period = read_line(folder / "cpu.max").partition(" ")
    if quota in ("max", "-1"):
        return None
    length = number_in(period, folder)
    if length == 0:
        raise ReadingFailedError(f"{folder}: a period of 0 microseconds")
    return number_in(quota, folder) / length


def memory_limit(group: ControlGroup, folder: Path) -> float | None:
    """Bytes that a group may use; None where it has no limit. `ReadingFailedError` where that cannot be read."""
    path = folder / MEMORY_FILES[group.version]["limit"]
    text = read_line(path)
    if text == "max":
        return None
    limit = number_in(text, path)
    return None if limit >= _UNLIMITED else float(limit)


def _throttled(group: ControlGroup, folder: Path) -> Callable[[], Values]:
    key, factor = ("throttled_time", 1e-9) if group.version == 1 else ("throttled_usec", 1e-6)
    path = folder / "cpu.stat"

    def call() -> Values:
        throttled = keyed_number(path, key)
        if throttled is None:
            raise ReadingFailedError(f"{path}: no line {key}; a group without a limit of time has none")
        return [throttled * factor]

    return call


def _memory(group: ControlGroup, folder: Path) -> Callable[[], Values]:
    path = folder / MEMORY_FILES[group.version]["used"]
    return lambda: [float(read_number(path))]

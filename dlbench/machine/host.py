"""Cores, memory, networks, disks, cgroup and energy of this machine: counters of the kernel, read and never changed.

psutil reads what it knows; InfiniBand, cgroups and RAPL are read from sysfs here. Counters that fall were reset, and go
on from where they stood.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlbench.machine.cgroup import cgroup_readings
from dlbench.machine.host_energy import energy_readings
from dlbench.machine.host_network import infiniband_readings, interface_readings, moved_bytes
from dlbench.machine.readings import Reading, ReadingFailedError, Readings, Values, number_in, read_line
from dlbench.machine.source import DOUBLE, Field, Source, field_parts

MAX_CORES = 64
"""Cores with a field of their own; on larger machines only their mean and their maximum are kept."""

_LEFT_OUT_DISKS = re.compile(r"(loop|ram|zram|sr|fd)\d+$")

_ABOUT = {
    "host.about.busy": "share of the time since the reading before, not idle and not waiting for I/O; time that a "
    "hypervisor took counts as busy",
    "host.about.cpu_frequency": "mean over the cores that tell it",
    "host.about.memory_used_bytes": "MemTotal less MemAvailable: what is not free and could not be freed at once",
    "host.about.page_cache_bytes": "Cached of /proc/meminfo: files in memory, and shared memory",
    "host.about.disks": "whole disks; what goes through md or dm shows there and again on the disks below",
}


def open_host(root: Path = Path("/")) -> Source:
    """Host counters of this machine; what it lacks is in `unavailable`.

    Args:
        root: where `proc` and `sys` are. What psutil reads follows `psutil.PROCFS_PATH` instead.
    """
    unavailable: dict[str, str] = {}
    facts: dict[str, str] = dict(_ABOUT)
    load = Field(name="host.load_1min")
    readings = [
        *_core_readings(root, unavailable, facts),
        Reading(fields=(load,), call=_guarded(lambda: [os.getloadavg()[0]])),
        *_memory_readings(root),
        *interface_readings(root, unavailable, facts),
        *infiniband_readings(root, unavailable, facts),
        *_disk_readings(root, unavailable),
        *cgroup_readings(root, unavailable, facts),
        *energy_readings(root, unavailable, facts),
    ]
    return Readings(readings, unavailable, facts)


def _guarded(call: Callable[[], Values]) -> Callable[[], Values]:
    """What psutil raises where the kernel's text is not as it expects, as a reason."""

    def guarded() -> Values:
        try:
            return call()
        except (OSError, ValueError, LookupError, ArithmeticError, NotImplementedError) as error:
            raise ReadingFailedError(f"{type(error).__name__}: {error}"[:200]) from error

    return guarded


class _Cores:
    """How busy each core was since the call before."""

    def __init__(self) -> None:
        self._before = self._times()

    @property
    def count(self) -> int:
        return len(self._before)

    @staticmethod
    def _times() -> list[tuple[float, float]]:
        """Of each core: seconds in all, and of them idle or waiting for I/O."""
        import psutil

        found = []
        for core in psutil.cpu_times(percpu=True):
            guest = getattr(core, "guest", 0.0) + getattr(core, "guest_nice", 0.0)  # within user and nice already
            found.append((sum(core) - guest, core.idle + getattr(core, "iowait", 0.0)))
        return found

    def busy(self) -> list[float]:
        """Shares, in the order of the cores; NaN for a core whose clock did not advance."""
        before, now = self._before, self._times()
        if len(now) != len(before):
            raise ReadingFailedError(f"the number of cores changed from {len(before)} to {len(now)}")
        self._before = now
        shares = []
        for (total, idle), (total_before, idle_before) in zip(now, before, strict=True):
            passed = total - total_before
            # The kernel's count of idle time may step back (proc(5), /proc/stat), hence the limits.
            shares.append(min(1.0, max(0.0, 1 - (idle - idle_before) / passed)) if passed > 0 else math.nan)
        return shares


def _core_readings(root: Path, unavailable: dict[str, str], facts: dict[str, str]) -> list[Reading]:
    frequency = Field(name="host.cpu.frequency_hz", is_slow=True)
    readings = [Reading(fields=(frequency,), call=_guarded(_mean_frequency))]
    try:
        cores = _guarded_cores()
    except ReadingFailedError as error:
        unavailable["host.cpu.busy"] = error.reason
        return readings
    facts["host.cpu.cores"] = str(cores.count)
    if cores.count > MAX_CORES:
        facts["host.about.cores"] = f"{cores.count} cores, more than {MAX_CORES}: only their mean and maximum are kept"
        few = (Field(name="host.cpu.mean.busy"), Field(name="host.cpu.max.busy"))
        return [Reading(fields=few, call=_guarded(lambda: _mean_and_maximum(cores.busy()))), *readings]
    fields = tuple(Field(name=f"host.cpu.{number}.busy") for number in _core_numbers(root, cores.count))
    return [Reading(fields=fields, call=_guarded(cores.busy)), *readings]


def _guarded_cores() -> _Cores:
    made: list[_Cores] = []

    def make() -> Values:
        made.append(_Cores())
        return [float(made[0].count)]

    if _guarded(make)()[0] == 0:
        raise ReadingFailedError("the kernel lists no core")
    return made[0]


def _mean_and_maximum(shares: list[float]) -> Values:
    known = [share for share in shares if not math.isnan(share)]
    return [sum(known) / len(known), max(known)] if known else [math.nan, math.nan]


def _core_numbers(root: Path, count: int) -> list[int]:
    """The kernel's numbers of the cores that are online, where it tells as many as psutil; else from 0."""
    path = root / "sys/devices/system/cpu/online"
    try:
        spans = [[number_in(end, path) for end in part.split("-")] for part in read_line(path).split(",")]
    except ReadingFailedError:
        return list(range(count))
    # A span is as long as its numbers say: without a limit `0-18446744073709551615` would fill the memory.
    if sum(span[-1] - span[0] + 1 for span in spans) != count or any(span[-1] < span[0] for span in spans):
        return list(range(count))
    numbers = [number for span in spans for number in range(span[0], span[-1] + 1)]
    return numbers if len(set(numbers)) == count else list(range(count))


def _mean_frequency() -> Values:
    import psutil

    if not hasattr(psutil, "cpu_freq"):
        raise ReadingFailedError("the kernel tells no core's frequency")
    # 0 is what psutil says of a core that is off.
    known = [core.current for core in psutil.cpu_freq(percpu=True) if core.current > 0]
    if not known:
        raise ReadingFailedError("the kernel tells no core's frequency")
    return [sum(known) / len(known) * 1e6]


def _memory_readings(root: Path) -> list[Reading]:
    """Memory in use and page cache.

    Not by psutil, which says zero where the kernel does not tell the page cache.
    """
    path = root / "proc/meminfo"

    def call() -> Values:
        try:
            lines = path.read_text(encoding="ascii", errors="replace").splitlines()
        except OSError as error:
            raise ReadingFailedError(f"{path}: {error.strerror or error}") from error
        told = {key: rest.removesuffix(" kB").strip() for key, _, rest in (line.partition(":") for line in lines)}
        return [_meminfo(path, told, "MemTotal", "MemAvailable"), _meminfo(path, told, "Cached")]

    fields = (Field(name="host.memory_used_bytes", kind=DOUBLE), Field(name="host.page_cache_bytes", kind=DOUBLE))
    return [Reading(fields=fields, call=call)]


def _meminfo(path: Path, told: dict[str, str], key: str, less: str = "") -> float | ReadingFailedError:
    try:
        value = number_in(told[key], path) - (number_in(told[less], path) if less else 0)
    except KeyError as error:
        return ReadingFailedError(f"{path}: no line {error.args[0]}")
    except ReadingFailedError as error:
        return error
    return float(value * 1024)


def _disk_readings(root: Path, unavailable: dict[str, str]) -> list[Reading]:
    import psutil

    def all_disks() -> dict[str, Any]:
        return psutil.disk_io_counters(perdisk=True, nowrap=False) or {}

    names: list[str] = []

    def find() -> Values:
        # Partitions have no folder in /sys/block; where nothing at all has one, there is nothing to tell them by.
        found = sorted(name for name in all_disks() if not _LEFT_OUT_DISKS.match(name))
        whole = [name for name in found if (root / "sys/block" / name.replace("/", "!")).exists()]
        names.extend(whole or found)
        return []

    try:
        _guarded(find)()
    except ReadingFailedError as error:
        unavailable["host.disk"] = error.reason
        return []
    if not names:
        unavailable["host.disk"] = "the kernel lists no disk"
        return []
    ends = ("read_bytes", "written_bytes")
    fields = [
        Field(name=f"host.disk.{part}.{end}", kind=DOUBLE) for part in field_parts(names).values() for end in ends
    ]
    call = moved_bytes(names, all_disks, ("read_bytes", "write_bytes"))
    return [Reading(fields=tuple(fields), call=_guarded(call))]

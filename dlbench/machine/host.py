"""Reads the kernel's counters of cores, memory, networks, disks, cgroups and energy on this machine.

psutil reads most of them; InfiniBand, cgroups and RAPL are read from sysfs. A counter that falls was reset, and
continues from its last value. Sources:

- InfiniBand: `port_rcv_data` and `port_xmit_data` of /sys/class/infiniband count units of four bytes (InfiniBand
  Architecture Specification, PortCounters; Linux, Documentation/ABI/stable/sysfs-class-infiniband).
- RAPL: Linux, Documentation/power/powercap/powercap.rst: `energy_uj` counts microjoules and restarts at zero after
  `max_energy_range_uj`. Since CVE-2020-8694 only root may read it on most systems.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from dlbench.machine.cgroup import cgroup_readings
from dlbench.machine.gpus import cpu_list
from dlbench.machine.nvml import open_nvml
from dlbench.machine.sources import (
    DOUBLE,
    Field,
    MonotonicCounter,
    Reading,
    ReadingFailedError,
    Source,
    Values,
    fact,
    field_parts,
    guarded,
    read_line,
    read_number,
    read_text,
)

MAX_INTERFACES = 64  # Most interfaces that are read, those of real devices first.
KEEP_UP_S = 60.0  # The smallest counters overflow after 65 kJ, which is two minutes of a package that takes 500 W.
MAX_CORES = 64  # Most cores with a field each; larger machines have only fields for mean and maximum.

_LEFT_OUT_DISKS = re.compile(r"(loop|ram|zram|sr|fd)\d+$")

_ABOUT = {
    "host.about.busy": "share of the time since the reading before, not idle and not waiting for I/O; time that a "
    "hypervisor took counts as busy",
    "host.about.cpu_frequency": "mean over the cores that tell it",
    "host.about.memory_used_bytes": "MemTotal less MemAvailable: what is not free and could not be freed at once",
    "host.about.page_cache_bytes": "Cached of /proc/meminfo: files in memory, and shared memory",
    "host.about.disks": "whole disks; what goes through md or dm shows there and again on the disks below",
}


def _moved_bytes(
    group: str, names: list[str], counters: Callable[[], Mapping[str, Any]], members: Mapping[str, str]
) -> Reading:
    """Returns a reading of several devices by one call of psutil; `members`: its attributes by suffix of the field."""

    def call() -> Values:
        devices = counters()
        values: list[float | ReadingFailedError] = []
        for name in names:
            for member in members.values():
                if name in devices:
                    values.append(float(getattr(devices[name], member)))
                else:
                    values.append(ReadingFailedError(f"{fact(name)} is gone"))
        return values

    fields = _fields(f"{group}.", field_parts(names).values(), members)
    return Reading(fields=fields, call=call)


def _interface_readings(root: Path, unavailable: dict[str, str], facts: dict[str, str]) -> list[Reading]:
    """Returns a reading of the interfaces that are up, except the loopback; of all interfaces if there are none."""
    import psutil

    def all_interfaces() -> dict[str, Any]:
        return psutil.net_io_counters(pernic=True) or {}

    try:
        interfaces = guarded(all_interfaces)
        is_up = {name: state.isup for name, state in psutil.net_if_stats().items()}
    except ReadingFailedError as error:
        unavailable["host.net"] = error.reason
        return []
    except OSError as error:
        unavailable["host.net"] = f"states of the interfaces: {error.strerror or error}"
        return []
    names = [name for name in interfaces if name != "lo" and is_up.get(name, False)] or list(interfaces)
    if not names:
        unavailable["host.net"] = "the kernel lists no interface"
        return []
    names.sort(key=lambda name: (not (root / "sys/class/net" / name / "device").exists(), name))
    chosen = names[:MAX_INTERFACES]
    left_out = sorted(interfaces.keys() - set(chosen))
    if left_out:
        facts["host.net.left_out"] = fact(", ".join(left_out))
    members = {"received_bytes": "bytes_recv", "sent_bytes": "bytes_sent"}
    return [_moved_bytes("host.net", chosen, all_interfaces, members)]


def _fields(prefix: str, parts: Iterable[str], suffixes: Iterable[str]) -> tuple[Field, ...]:
    names = [f"{prefix}{part}.{suffix}" for part, suffix in product(parts, suffixes)]
    return tuple(Field(name=name, kind=DOUBLE) for name in names)


def _infiniband_readings(root: Path, unavailable: dict[str, str], facts: dict[str, str]) -> list[Reading]:
    top = root / "sys/class/infiniband"
    ports: list[Path] = []
    try:
        for device in top.iterdir():
            ports += (device / "ports").iterdir()
    except FileNotFoundError:
        ports = []
    except OSError as error:
        unavailable["host.infiniband"] = f"{error.filename}: {error.strerror or error}"
        return []
    if not ports:
        unavailable["host.infiniband"] = "no InfiniBand device"
        return []
    ports.sort()
    readings = []
    names = field_parts([f"{port.parent.parent.name}.{port.name}" for port in ports])
    for port, part in zip(ports, names.values(), strict=True):
        name = f"host.infiniband.{part}"
        try:
            state = read_line(port / "state")
            if "ACTIVE" not in state:
                unavailable[name] = f"the port is not active ({fact(state, 40)})"
                continue
            facts[f"{name}.rate"] = fact(read_line(port / "rate"))
        except ReadingFailedError as error:
            unavailable[name] = error.reason
            continue
        for end, counter in (("received_bytes", "port_rcv_data"), ("sent_bytes", "port_xmit_data")):
            fields = _fields("host.infiniband.", [part], [end])
            readings.append(Reading(fields=fields, call=_port_bytes(port / "counters" / counter)))
    return readings


def _port_bytes(path: Path) -> Callable[[], Values]:
    counter = MonotonicCounter()

    def call() -> Values:
        words = read_number(path)
        if words == 2**32 - 1:
            raise ReadingFailedError(f"{path}: an old counter of 32 bits, which stays at its maximum")
        return [float(4 * counter.at(words))]

    return call


def _energy_readings(root: Path, unavailable: dict[str, str], facts: dict[str, str]) -> list[Reading]:
    """Returns readings of the joules of each package and of its memory.

    Cores and uncore are parts of a package, and `psys` includes all packages: these are left out.
    """
    top = root / "sys/class/powercap"
    try:
        zones = sorted(zone for zone in top.iterdir() if zone.name.startswith("intel-rapl:"))
    except FileNotFoundError:
        zones = []
    except OSError as error:
        unavailable["host.energy"] = f"{top}: {error.strerror or error}"
        return []
    if not zones:
        unavailable["host.energy"] = "the kernel offers no RAPL counters"
        return []
    names: dict[Path, str] = {}
    counters: dict[Path, Callable[[], Values]] = {}
    for zone in zones:
        try:
            name = _name(zone)
            if name:
                if name in names.values():
                    name = f"{name}.{zone.name}"
                names[zone] = name
                counters[zone] = _joules(zone)
        except ReadingFailedError as error:
            unavailable[f"host.energy.{names.get(zone, zone.name)}_j"] = error.reason
    parts = field_parts([names[zone] for zone in counters])
    readings = []
    for zone, call in counters.items():
        part = parts[names[zone]]
        facts[f"host.energy.{part}.zone"] = zone.name
        readings.append(
            Reading(fields=(Field(name=f"host.energy.{part}_j", kind=DOUBLE),), call=call, keep_up_s=KEEP_UP_S)
        )
    return readings


def _name(zone: Path) -> str:
    """Returns the package, or the package and `dram`; empty for a zone that is part of another one."""
    name = read_line(zone / "name")
    if zone.name.count(":") == 1:
        return "" if name == "psys" else name
    if name != "dram":
        return ""
    package = zone.parent / zone.name.rpartition(":")[0]
    return f"{read_line(package / 'name')}.dram"


def _joules(zone: Path) -> Callable[[], Values]:
    # Without its maximum an overflow could not be distinguished from a reset.
    counter = MonotonicCounter(wraps_at=read_number(zone / "max_energy_range_uj"))

    def call() -> Values:
        try:
            return [counter.at(read_number(zone / "energy_uj")) / 1e6]
        except ReadingFailedError as error:
            if not isinstance(error.__cause__, PermissionError):
                raise
            reason = f"{error.reason}; since CVE-2020-8694 most systems let only root read it"
            raise ReadingFailedError(reason) from error

    return call


def open_sources() -> Source:
    """Opens GPUs and host of this machine as one source; missing parts are listed in `unavailable`."""
    return open_nvml().joined(open_host())


def open_host(root: Path = Path("/")) -> Source:
    """Opens the host counters; `root`: parent folder of `proc` and `sys`, except for psutil (`psutil.PROCFS_PATH`)."""
    unavailable: dict[str, str] = {}
    facts: dict[str, str] = dict(_ABOUT)
    load = Field(name="host.load_1min")
    readings = [
        *_core_readings(root, unavailable, facts),
        Reading(fields=(load,), call=lambda: [os.getloadavg()[0]]),
        *_memory_readings(root),
        *_interface_readings(root, unavailable, facts),
        *_infiniband_readings(root, unavailable, facts),
        *_disk_readings(root, unavailable),
        *cgroup_readings(root, unavailable, facts),
        *_energy_readings(root, unavailable, facts),
    ]
    return Source(readings, unavailable, facts)


class _Cores:
    def __init__(self) -> None:
        self._before = self._times()

    @property
    def count(self) -> int:
        return len(self._before)

    @staticmethod
    def _times() -> list[tuple[float, float]]:
        """Returns for each core the total seconds, and the seconds in which it was idle or waited for I/O."""
        import psutil

        times = []
        for core in psutil.cpu_times(percpu=True):
            guest = getattr(core, "guest", 0.0) + getattr(core, "guest_nice", 0.0)  # already part of user and nice
            times.append((sum(core) - guest, core.idle + getattr(core, "iowait", 0.0)))
        return times

    def busy(self) -> list[float]:
        before, now = self._before, self._times()
        if len(now) != len(before):
            raise ReadingFailedError(f"the number of cores changed from {len(before)} to {len(now)}")
        self._before = now
        shares = []
        for (total, idle), (total_before, idle_before) in zip(now, before, strict=True):
            elapsed_s = total - total_before
            share = math.nan
            if elapsed_s > 0:
                # Limited, because the kernel's idle time may decrease (proc(5), /proc/stat).
                share = min(1.0, max(0.0, 1 - (idle - idle_before) / elapsed_s))
            shares.append(share)
        return shares


def _core_readings(root: Path, unavailable: dict[str, str], facts: dict[str, str]) -> list[Reading]:
    frequency = Field(name="host.cpu.frequency_hz", is_slow=True)
    readings = [Reading(fields=(frequency,), call=_mean_frequency)]
    try:
        cores = guarded(_Cores)
    except ReadingFailedError as error:
        unavailable["host.cpu.busy"] = error.reason
        return readings
    if cores.count == 0:
        unavailable["host.cpu.busy"] = "the kernel lists no core"
        return readings
    facts["host.cpu.cores"] = str(cores.count)
    if cores.count > MAX_CORES:
        facts["host.about.cores"] = f"{cores.count} cores, more than {MAX_CORES}: only their mean and maximum are kept"
        few = (Field(name="host.cpu.mean.busy"), Field(name="host.cpu.max.busy"))

        def mean_and_maximum() -> Values:
            shares = [share for share in cores.busy() if not math.isnan(share)]
            if not shares:
                return [math.nan, math.nan]
            return [sum(shares) / len(shares), max(shares)]

        return [Reading(fields=few, call=mean_and_maximum), *readings]
    try:
        numbers = sorted(cpu_list(read_line(root / "sys/devices/system/cpu/online")))
    except ReadingFailedError:
        numbers = []
    if len(numbers) != cores.count:  # psutil lists other cores
        numbers = list(range(cores.count))
    fields = tuple(Field(name=f"host.cpu.{number}.busy") for number in numbers)
    return [Reading(fields=fields, call=cores.busy), *readings]


def _mean_frequency() -> Values:
    import psutil

    if not hasattr(psutil, "cpu_freq"):
        raise ReadingFailedError("the kernel provides no core frequency")
    # psutil returns 0 for a core that is offline.
    frequencies_mhz = [core.current for core in psutil.cpu_freq(percpu=True) if core.current > 0]
    if not frequencies_mhz:
        raise ReadingFailedError("the kernel provides no core frequency")
    return [sum(frequencies_mhz) / len(frequencies_mhz) * 1e6]


def _memory_readings(root: Path) -> list[Reading]:
    """Returns a reading of memory in use and page cache, without psutil, which counts SReclaimable as cache."""
    path = root / "proc/meminfo"

    def call() -> Values:
        lines = re.findall(r"^(\w+): +(\d+) kB$", read_text(path), re.MULTILINE)
        sizes = {name: 1024.0 * int(kilobytes) for name, kilobytes in lines}
        try:
            return [sizes["MemTotal"] - sizes["MemAvailable"], sizes["Cached"]]
        except KeyError as error:
            raise ReadingFailedError(f"{path}: no line {error.args[0]}") from error

    fields = (Field(name="host.memory_used_bytes", kind=DOUBLE), Field(name="host.page_cache_bytes", kind=DOUBLE))
    return [Reading(fields=fields, call=call)]


def _disk_readings(root: Path, unavailable: dict[str, str]) -> list[Reading]:
    import psutil

    def all_disks() -> dict[str, Any]:
        return psutil.disk_io_counters(perdisk=True) or {}

    try:
        # Partitions have no folder in /sys/block. If no disk has one, all are kept.
        all_names = sorted(name for name in guarded(all_disks) if not _LEFT_OUT_DISKS.match(name))
        names = [name for name in all_names if (root / "sys/block" / name.replace("/", "!")).exists()] or all_names
    except ReadingFailedError as error:
        unavailable["host.disk"] = error.reason
        return []
    if not names:
        unavailable["host.disk"] = "the kernel lists no disk"
        return []
    members = {"read_bytes": "read_bytes", "written_bytes": "write_bytes"}
    return [_moved_bytes("host.disk", names, all_disks, members)]

"""Bytes through network interfaces and InfiniBand ports.

InfiniBand: `port_rcv_data` and `port_xmit_data` of /sys/class/infiniband count units of four bytes (InfiniBand
Architecture Specification, PortCounters; Linux, Documentation/ABI/stable/sysfs-class-infiniband).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dlbench.machine.readings import Reading, ReadingFailedError, Rising, Values, read_line, read_number
from dlbench.machine.source import DOUBLE, Field, fact, field_parts

MAX_INTERFACES = 64
"""Interfaces that are read; those of real devices come first."""

_SATURATED = 2**32 - 1
_ENDS = ("received_bytes", "sent_bytes")


def moved_bytes(
    names: list[str], counters: Callable[[], Mapping[str, Any]], members: tuple[str, ...]
) -> Callable[[], Values]:
    """Counters of several devices from one call of psutil: for each name, each member, in this order.

    Args:
        names: devices, as psutil calls them.
        counters: what psutil knows of all devices.
        members: what is taken of each.
    """
    rising = {(name, member): Rising() for name in names for member in members}

    def call() -> Values:
        found = counters()
        values: list[float | ReadingFailedError] = []
        for name in names:
            device = found.get(name)
            for member in members:
                if device is None:
                    values.append(ReadingFailedError(f"{fact(name)} is gone"))
                else:
                    values.append(float(rising[name, member].at(getattr(device, member))))
        return values

    return call


def interface_readings(root: Path, unavailable: dict[str, str], facts: dict[str, str]) -> list[Reading]:
    """Interfaces that are up, without the loopback; all of them, where none is left.

    Args:
        root: where `sys` is; it tells the interfaces of real devices.
        unavailable: gets `host.net`, where nothing can be read.
        facts: gets what is left out.
    """
    import psutil

    def all_interfaces() -> dict[str, Any]:
        return psutil.net_io_counters(pernic=True, nowrap=False) or {}

    def guarded_interfaces() -> dict[str, Any]:
        try:
            return all_interfaces()
        except (OSError, ValueError, LookupError) as error:
            raise ReadingFailedError(f"{type(error).__name__}: {error}"[:200]) from error

    try:
        known = guarded_interfaces()
        is_up = {name: state.isup for name, state in psutil.net_if_stats().items()}
    except ReadingFailedError as error:
        unavailable["host.net"] = error.reason
        return []
    except OSError as error:
        unavailable["host.net"] = f"states of the interfaces: {error.strerror or error}"
        return []
    names = [name for name in known if name != "lo" and is_up.get(name, False)] or list(known)
    if not names:
        unavailable["host.net"] = "the kernel lists no interface"
        return []
    names.sort(key=lambda name: (not (root / "sys/class/net" / name / "device").exists(), name))
    chosen = names[:MAX_INTERFACES]
    left_out = sorted(known.keys() - set(chosen))
    if left_out:
        facts["host.net.left_out"] = fact(", ".join(left_out))
    fields = _fields("host.net.", field_parts(chosen).values())
    return [Reading(fields=fields, call=moved_bytes(chosen, guarded_interfaces, ("bytes_recv", "bytes_sent")))]


def _fields(prefix: str, parts: Iterable[str]) -> tuple[Field, ...]:
    return tuple(Field(name=f"{prefix}{part}.{end}", kind=DOUBLE) for part in parts for end in _ENDS)


def infiniband_readings(root: Path, unavailable: dict[str, str], facts: dict[str, str]) -> list[Reading]:
    """Ports that are active; each direction of each is a reading of its own.

    Args:
        root: where `sys` is.
        unavailable: gets `host.infiniband` where there is none, and ports that are not active.
        facts: gets each port's rate.
    """
    top = root / "sys/class/infiniband"
    try:
        ports = sorted(port for device in top.iterdir() for port in (device / "ports").iterdir())
    except FileNotFoundError:
        ports = []
    except OSError as error:
        unavailable["host.infiniband"] = f"{error.filename}: {error.strerror or error}"
        return []
    if not ports:
        unavailable["host.infiniband"] = "no InfiniBand device"
        return []
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
        for field, counter in zip(
            _fields("host.infiniband.", [part]), ("port_rcv_data", "port_xmit_data"), strict=True
        ):
            readings.append(Reading(fields=(field,), call=_port_bytes(port / "counters" / counter)))
    return readings


def _port_bytes(path: Path) -> Callable[[], Values]:
    rising = Rising()

    def call() -> Values:
        words = read_number(path)
        if words == _SATURATED:
            raise ReadingFailedError(f"{path}: an old counter of 32 bits, which has reached its end and stays there")
        return [float(4 * rising.at(words))]

    return call

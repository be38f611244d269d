"""Energy of processors and memory by RAPL, where the kernel lets it be read.

Source: Linux, Documentation/power/powercap/powercap.rst: `energy_uj` counts microjoules and starts again at zero after
`max_energy_range_uj`. Since CVE-2020-8694 only root may read it on most systems.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dlbench.machine.readings import Reading, ReadingFailedError, Rising, Values, read_line, read_number
from dlbench.machine.source import DOUBLE, Field, field_parts

KEEP_UP_S = 60.0
"""The smallest counters in use hold 65 kJ: two minutes and more of a package that takes 500 W."""


def energy_readings(root: Path, unavailable: dict[str, str], facts: dict[str, str]) -> list[Reading]:
    """One counter of joules for each package, and for each package's memory; no two of them overlap.

    Cores and uncore are within their package, and `psys` holds all of them; they are left out.

    Args:
        root: where `sys` is.
        unavailable: gets `host.energy` where there is no RAPL, and zones that cannot be named.
        facts: gets which zones stand for what.
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
    names: dict[str, str] = {}
    for zone in zones:
        try:
            name = _name(zone)
        except ReadingFailedError as error:
            unavailable[f"host.energy.{zone.name}_j"] = error.reason
            continue
        if name:
            names[zone.name] = name if name not in names.values() else f"{name}.{zone.name}"
    parts = field_parts(list(names.values()))
    readings = []
    for zone_name, name in names.items():
        field = Field(name=f"host.energy.{parts[name]}_j", kind=DOUBLE)
        facts[f"host.energy.{parts[name]}.zone"] = zone_name
        readings.append(Reading(fields=(field,), call=_joules(top / zone_name), keep_up_s=KEEP_UP_S))
    return readings


def _name(zone: Path) -> str:
    """The package, or the package and `dram`; empty for a zone that is part of another one that is read."""
    name = read_line(zone / "name")
    if zone.name.count(":") == 1:
        return "" if name == "psys" else name
    if name != "dram":
        return ""
    package = zone.parent / zone.name.rpartition(":")[0]
    return f"{read_line(package / 'name')}.dram"


def _joules(zone: Path) -> Callable[[], Values]:
    rising: list[Rising] = []

    def call() -> Values:
        path = zone / "energy_uj"
        try:
            now = read_number(path)
        except ReadingFailedError as error:
            if isinstance(error.__cause__, PermissionError):
                reason = f"{error.reason}; most systems let only root read it since CVE-2020-8694"
                raise ReadingFailedError(reason) from error
            raise
        if not rising:
            # Without its end a counter that wraps cannot be told from one that was reset.
            rising.append(Rising(wraps_at=read_number(zone / "max_energy_range_uj")))
        return [rising[0].at(now) / 1e6]

    return call

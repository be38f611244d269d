"""Samples of a node as counters of a trace: which fields are shown, by which name and in which unit.

Counters that only grow (bytes, throttled seconds) become rates between two readings. What was not read is a gap and
never a zero, and so is a rate whose counter fell.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dlbench.perfetto.clocks import LARGEST_NS
from dlbench.perfetto.notes import Notes, clean, merged
from dlbench.records.rows.samples import SampleReader
from dlbench.records.throttle_reasons import clock_reason_names

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from dlbench.perfetto.clocks import NodeClock, Times

    Values = npt.NDArray[np.float64]

_ROWS_AT_ONCE = 1024
_LARGEST_MASK = float(1 << 53)

_WORDS = {
    "power_w": "power",
    "sm_clock_hz": "SM clock",
    "sm_clock_max_hz": "highest SM clock",
    "memory_clock_hz": "memory clock",
    "utilization": "utilisation",
    "memory_utilization": "memory utilisation",
    "memory_used_bytes": "memory used",
    "sm_active": "SMs active",
    "sm_occupancy": "SM occupancy",
    "tensor_active": "tensor cores active",
    "dram_active": "memory bandwidth used",
    "pcie_received_mean_bytes_per_s": "PCIe received, mean",
    "pcie_sent_mean_bytes_per_s": "PCIe sent, mean",
    "nvlink_received_bytes_per_s": "NVLink received",
    "nvlink_sent_bytes_per_s": "NVLink sent",
    "temperature_c": "temperature",
    "pcie_received_bytes_per_s": "PCIe received",
    "pcie_sent_bytes_per_s": "PCIe sent",
    "cpu.frequency_hz": "CPU clock",
    "cpu.throttled_s": "CPU time withheld",
    "load_1min": "load",
    "page_cache_bytes": "page cache",
    "cgroup.memory_bytes": "cgroup memory",
}
"""What people call a field, without the device before it."""

# The first that ends a field's name decides: unit (viewers show it behind the name), factor, whether it only grows.
_UNITS: tuple[tuple[str, str, float, bool], ...] = (
    ("load_1min", "average (1 min)", 1.0, False),
    ("received_bytes", "MB/s", 1e-6, True),
    ("sent_bytes", "MB/s", 1e-6, True),
    ("read_bytes", "MB/s", 1e-6, True),
    ("written_bytes", "MB/s", 1e-6, True),
    ("throttled_s", "%", 100.0, True),
    ("_bytes_per_s", "MB/s", 1e-6, False),
    ("_bytes", "GB", 1e-9, False),
    ("_hz", "MHz", 1e-6, False),
    ("_w", "W", 1.0, False),
    ("_c", "°C", 1.0, False),
    ("utilization", "%", 100.0, False),
    ("busy", "%", 100.0, False),
    ("_active", "%", 100.0, False),
    ("_occupancy", "%", 100.0, False),
)

_CORE = re.compile(r"host\.cpu\.\d+\.busy")
_REASONS = re.compile(r"gpu\.(\d{1,4})\.clock_reasons")


@dataclass(frozen=True, kw_only=True)
class Counter:
    """How some fields are shown."""

    columns: tuple[str, ...]
    """One field; of several the mean is shown."""
    name: str
    unit: str
    factor: float = 1.0
    is_growing: bool = False
    """Shown as the rate of growth, from one reading to the next."""


def counters_of(columns: Sequence[str], *, cores: bool) -> list[Counter]:
    """The counters of a node, in the order of its fields; energy counters are left out.

    Args:
        columns: names of the fields.
        cores: whether every core has its own.
    """
    busy = tuple(name for name in columns if _CORE.fullmatch(name))
    result = [Counter(columns=busy, name="CPU busy", unit="%", factor=100.0)] if busy else []
    for column in columns:
        if _REASONS.fullmatch(column) or column.endswith("_j") or (column in busy and not cores):
            continue
        known = next(((unit, factor, grows) for end, unit, factor, grows in _UNITS if column.endswith(end)), None)
        unit, factor, grows = known or ("value", 1.0, False)
        result.append(Counter(columns=(column,), name=_title(column), unit=unit, factor=factor, is_growing=grows))
    return result


def _title(column: str) -> str:
    room, _, rest = column.partition(".")
    if room == "gpu":
        number, _, what = rest.partition(".")
        return clean(f"gpu {number} {_WORDS.get(what, what.replace('_', ' '))}")
    if room == "host":
        for end, words in (("received", "received"), ("sent", "sent"), ("read", "read"), ("written", "written")):
            if rest.endswith(f".{end}_bytes"):
                return clean(f"{rest.removesuffix(f'.{end}_bytes').replace('.', ' ')} {words}")
        if match := re.fullmatch(r"cpu\.(\d+)\.busy", rest):
            return f"core {match[1]} busy"
        return clean(_WORDS.get(rest, rest.replace("_", " ").replace(".", " ")))
    return clean(column)


@dataclass(frozen=True, kw_only=True)
class SampleRows:
    """Some samples of one node."""

    time: Times
    """(n,): on the axis of all nodes, nanoseconds."""
    values: Mapping[str, Values]
    """(n,) each: as they were sampled, by field."""


def sample_rows(path: Path, clock: NodeClock, notes: Notes) -> Iterator[SampleRows]:
    """All samples of one node; none where nothing was sampled.

    Raises:
        IncompleteDataError: the file is missing or damaged; what came before has been given.
    """
    import numpy as np

    reader = SampleReader(path=path)
    for rows in merged(reader.blocks(), _ROWS_AT_ONCE):
        good = (rows["time_ns"] >= 0) & (rows["time_ns"] < LARGEST_NS)
        time = clock.align(np.where(good, rows["time_ns"], 0))
        good &= time >= 0
        notes.count("samples have a time that cannot be and are left out", int((~good).sum()))
        values = {name: rows[name][good].astype(np.float64) for name in reader.columns}
        yield SampleRows(time=time[good], values=values)
    notes.torn(reader.torn_bytes)


class CounterSeries:
    """One counter of one node."""

    def __init__(self, counter: Counter) -> None:
        self.counter = counter
        self._last: tuple[int, float] | None = None

    def points(self, rows: SampleRows) -> tuple[Times, Values]:
        """Times and values of the events, in order; a rate stands at the beginning of its interval."""
        import numpy as np

        columns = np.stack([rows.values[name] for name in self.counter.columns])
        known = np.isfinite(columns)
        count = known.sum(axis=0)
        total = np.where(known, columns, 0.0).sum(axis=0)
        there = count > 0
        time, value = rows.time[there], total[there] / count[there]
        if not self.counter.is_growing:
            return time, value * self.counter.factor
        if self._last is not None:
            time, value = np.insert(time, 0, self._last[0]), np.insert(value, 0, self._last[1])
        if len(time):
            self._last = int(time[-1]), float(value[-1])
        seconds, grown = np.diff(time) / 1e9, np.diff(value)
        good = (seconds > 0) & (grown >= 0)
        return time[:-1][good], grown[good] / seconds[good] * self.counter.factor


@dataclass(kw_only=True)
class HeldClock:
    """Clock reasons of one GPU as intervals: a mask holds from the sample that told it to the next that was read."""

    column: str
    gpu: int
    _mask: int = 0
    _since: int = -1
    _seen: int = -1
    _samples: int = 0

    def intervals(self, rows: SampleRows) -> Iterator[tuple[int, int, int, int]]:
        """Beginning, end (nanoseconds on the axis), mask and number of samples of what has ended."""
        for time, value in zip(rows.time.tolist(), rows.values[self.column].tolist(), strict=True):
            if not 0 <= value < _LARGEST_MASK:  # NaN too: not read
                continue
            if self._samples and int(value) == self._mask:
                self._seen, self._samples = time, self._samples + 1
                continue
            if self._samples and self._mask:
                yield self._since, time, self._mask, self._samples
            self._mask, self._since, self._seen, self._samples = int(value), time, time, 1

    def rest(self) -> Iterator[tuple[int, int, int, int]]:
        """What still held at the last sample; it ends there."""
        if self._samples and self._mask:
            yield self._since, self._seen, self._mask, self._samples


def held_clocks(columns: Sequence[str]) -> list[HeldClock]:
    """One for each GPU whose reasons were sampled."""
    found = ((name, _REASONS.fullmatch(name)) for name in columns)
    return [HeldClock(column=name, gpu=int(match[1])) for name, match in found if match]


def reason_title(mask: int) -> str:
    """All reasons of a mask."""
    return " + ".join(clock_reason_names(mask))

"""Rows of a run as events of the Trace Event Format, which Perfetto and chrome://tracing open.

The format is described in the Trace Event Format document of the Chromium project; that slices of a thread must nest,
and what else Perfetto drops, in its documentation ("other formats"). Counters that only grow (bytes, throttled seconds)
become rates between two readings. What was not read is a gap and never a zero, and so is a rate whose counter fell.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlbench.lazy import Times
from dlbench.perfetto.rows import SampledRows, StepRows, Values, clean
from dlbench.perfetto.spans import COMPUTE_THREAD, EXCHANGE_THREAD, SpanRows, thread_id, thread_name
from dlbench.records.rows.spans import LANES
from dlbench.records.rows.steps import LAUNCHED, PHASES
from dlbench.records.throttle_reasons import clock_reason_names

_COMPUTE = thread_id(COMPUTE_THREAD)
LATE = "waited_for_launches_us_at_most"
"""Argument of a phase of a GPU: how long the device may have waited for the host's kernel launches in it."""
PHASE_NAMES = tuple("exchange after backward" if phase == "exchange" else phase for phase in PHASES)
"""What the phases of a step are called in a trace."""
_PARTED = ("input", "h2d", "forward", "backward")

_LARGEST_MASK = float(1 << 53)

_WORDS = {  # What people call a field, without the device before it.
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

_WAYS = ("received", "sent", "read", "written")  # Of bytes that are counted.

# The first that ends a field's name decides: unit (viewers show it behind the name), factor, whether it only grows.
_UNITS: tuple[tuple[str, str, float, bool], ...] = (
    ("load_1min", "average (1 min)", 1.0, False),
    *((f"{way}_bytes", "MB/s", 1e-6, True) for way in _WAYS),
    ("throttled_s", "%", 100.0, True),
    ("_bytes_per_s", "MB/s", 1e-6, False),
    ("_bytes", "GB", 1e-9, False),
    ("_hz", "MHz", 1e-6, False),
    ("_w", "W", 1.0, False),
    ("_c", "°C", 1.0, False),
    *((end, "%", 100.0, False) for end in ("utilization", "busy", "_active", "_occupancy")),
)

_CORE = re.compile(r"host\.cpu\.\d+\.busy")
REASONS = re.compile(r"gpu\.(\d{1,4})\.clock_reasons")


def quoted(text: str) -> str:
    """A name as JSON text; no escapes beyond those of quotes and backslashes, which Perfetto would show as they are."""
    return json.dumps(clean(text), ensure_ascii=False)


def dumped(content: Any) -> str:
    """Facts as JSON text that can be written as UTF-8, whatever a host or a path is called."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace").decode("utf-8")


def process_events(pid: int, name: str, order: int) -> str:
    """Name and place of a process."""
    return (
        f'{{"ph":"M","pid":{pid},"name":"process_name","args":{{"name":{quoted(name)}}}}},\n'
        f'{{"ph":"M","pid":{pid},"name":"process_sort_index","args":{{"sort_index":{order}}}}},\n'
    )


def thread_events(pid: int, tid: int, name: str | None = None) -> str:
    """Name and place of a thread."""
    text = quoted(thread_name(tid) if name is None else name)
    return (
        f'{{"ph":"M","pid":{pid},"tid":{tid},"name":"thread_name","args":{{"name":{text}}}}},\n'
        f'{{"ph":"M","pid":{pid},"tid":{tid},"name":"thread_sort_index","args":{{"sort_index":{tid}}}}},\n'
    )


class StepEvents:
    """Steps and phases of one rank as text; `parts` are the forward and backward passes of a step."""

    def __init__(self, pid: int, parts: int) -> None:
        head = f'{{"ph":"X","pid":{pid},"tid":{_COMPUTE},'
        tail = '"ts":%.3f,"dur":%.3f,"args":{"step":%d'
        self._step = [
            f'{head}"cat":"step","name":"step %d",{tail}}}}},\n',
            f'{head}"cat":"step","name":"step %d (warm-up)",{tail},"warm-up":true}}}},\n',
        ]
        self._phases = [
            f'{head}"cat":"phase","name":"{name}",{tail}'
            + (f',"is":"sum of {parts} parts"' if parts > 1 and phase in _PARTED else "")
            + "}},\n"
            for name, phase in zip(PHASE_NAMES, PHASES, strict=True)
        ]
        self._late = [
            text.removesuffix("}},\n") + f',"{LATE}":%.3f}}}},\n' if phase in LAUNCHED else text
            for text, phase in zip(self._phases, PHASES, strict=True)
        ]
        self._templates: dict[tuple[int, bool], tuple[str, list[int]]] = {}

    def text(self, rows: StepRows) -> tuple[str, int]:
        """Events of these steps, and how many; a phase without time is none."""
        took = np.diff(rows.edges, axis=1)
        bits = 1 << np.arange(len(PHASES))
        patterns = ((took[:, :-1] > 0) * bits).sum(axis=1) * 2 + rows.warmup
        changes = np.flatnonzero(np.diff(patterns)) + 1
        texts, count = [], 0
        for begin, end in zip([0, *changes.tolist()], [*changes.tolist(), len(patterns)], strict=True):
            if begin == end:
                continue
            template, places = self._template(int(patterns[begin]), has_launches=rows.launch is not None)
            count += (end - begin) * (1 + len(places))
            # The numbers of the template, one step a row.
            steps, edges = rows.steps[begin:end], rows.edges[begin:end] / 1000
            columns = [steps, edges[:, 0], (rows.edges[begin:end, -1] - rows.edges[begin:end, 0]) / 1000, steps]
            for place in places:
                columns += [edges[:, place], took[begin:end, place] / 1000, steps]
                if rows.launch is not None and PHASES[place] in LAUNCHED:
                    columns.append(rows.launch[begin:end, LAUNCHED.index(PHASES[place])] / 1000)
            texts.append(template * (end - begin) % tuple(np.stack(columns, axis=1).ravel().tolist()))
        return "".join(texts), count

    def _template(self, pattern: int, *, has_launches: bool) -> tuple[str, list[int]]:
        key = pattern, has_launches
        if key not in self._templates:
            places = [n for n in range(len(PHASES)) if pattern >> (n + 1) & 1]
            phases = self._late if has_launches else self._phases
            self._templates[key] = self._step[pattern & 1] + "".join(phases[n] for n in places), places
        return self._templates[key]


def span_events(pid: int, spans: SpanRows, kept: np.ndarray[Any, Any]) -> Iterator[tuple[str, int, int]]:
    """Events of the spans that are kept: text, how many, thread."""
    names = [quoted(name) for name in spans.names]
    where = kept.nonzero()[0]
    fields = spans.rows[where]
    for tid, lane, start, end, ready, number, name, step, num_bytes, track in zip(
        spans.threads[where].tolist(),
        fields["lane"].tolist(),
        spans.start[where].tolist(),
        spans.end[where].tolist(),
        spans.ready[where].tolist(),
        (where + spans.number).tolist(),
        fields["name"].tolist(),
        fields["step"].tolist(),
        fields["num_bytes"].tolist(),
        fields["track"].tolist(),
        strict=True,
    ):
        args = [f'"step":{step}'] if step >= 0 else []
        if num_bytes >= 0:
            args.append(f'"bytes":{num_bytes}')
        if tid >> 24 == EXCHANGE_THREAD:
            args += [f'"message":{track}', f'"queued_us":{(start - ready) / 1000:.3f}']
            text, count = _message(pid, number, names[name], (ready, start, end), ",".join(args))
            yield text, count, thread_id(EXCHANGE_THREAD)
            continue
        yield (
            f'{{"ph":"X","pid":{pid},"tid":{tid},"cat":"{LANES[lane]}","name":{names[name]},"ts":{start / 1000:.3f},'
            f'"dur":{(end - start) / 1000:.3f},"args":{{{",".join(args)}}}}},\n',
            1,
            tid,
        )


def _message(pid: int, number: int, name: str, times: tuple[int, int, int], args: str) -> tuple[str, int]:
    """A message: from its readiness to its end, within that its wait and itself.

    All are called "exchange" outside, so that Perfetto draws them in one row.
    """
    ready, start, end = (time / 1000 for time in times)
    head = f'"cat":"exchange","id2":{{"local":"0x{number:x}"}},"pid":{pid},"tid":{thread_id(EXCHANGE_THREAD)}'
    text = f'{{"ph":"b",{head},"name":"exchange","ts":{ready:.3f},"args":{{{args}}}}},\n'
    count = 4
    if start > ready:
        text += f'{{"ph":"b",{head},"name":"queued","ts":{ready:.3f}}},\n'
        text += f'{{"ph":"e",{head},"name":"queued","ts":{start:.3f}}},\n'
        count = 6
    text += f'{{"ph":"b",{head},"name":{name},"ts":{start:.3f},"args":{{{args}}}}},\n'
    text += f'{{"ph":"e",{head},"name":{name},"ts":{end:.3f}}},\n'
    return text + f'{{"ph":"e",{head},"name":"exchange","ts":{end:.3f}}},\n', count


def counter_events(pid: int, counter: Counter, time: Times, value: Values) -> str:
    """Events of one counter."""
    name, unit = (quoted(text).replace("%", "%%") for text in (counter.name, counter.unit))
    template = f'{{"ph":"C","pid":{pid},"name":{name},"ts":%.3f,"args":{{{unit}:%.6g}}}},\n'
    numbers = np.stack([time / 1000, value], axis=1)
    return template * len(time) % tuple(numbers.ravel().tolist())


def reason_event(pid: int, gpu: int, begin: int, end: int, mask: int, samples: int) -> str:
    """An interval in which the same reasons held a GPU's clock."""
    head = f'"pid":{pid},"tid":{thread_id(COMPUTE_THREAD, gpu)},"cat":"clock reasons"'
    return (
        f'{{"ph":"X",{head},"name":{quoted(" + ".join(clock_reason_names(mask)))},"ts":{begin / 1000:.3f},'
        f'"dur":{(end - begin) / 1000:.3f},"args":{{"mask":"0x{mask:x}","samples":{samples}}}}},\n'
    )


def note_event(pid: int, name: str, args: dict[str, Any]) -> str:
    """Something to read at the beginning of the trace."""
    tid = thread_id(COMPUTE_THREAD)
    return f'{{"ph":"i","s":"t","pid":{pid},"tid":{tid},"ts":0,"name":{quoted(name)},"args":{dumped(args)}}},\n'


@dataclass(kw_only=True)
class Counter:
    """How some fields of one node are shown."""

    columns: tuple[str, ...]  # One field; of several the mean is shown.
    name: str
    unit: str
    factor: float = 1.0
    is_growing: bool = False  # Shown as the rate of growth, from one reading to the next.
    _last: tuple[int, float] | None = None

    def points(self, rows: SampledRows) -> tuple[Times, Values]:
        """Times and values of the events, in order; a rate stands at the beginning of its interval."""
        columns = np.stack([rows.values[name] for name in self.columns])
        known = np.isfinite(columns)
        count = known.sum(axis=0)
        total = np.where(known, columns, 0.0).sum(axis=0)
        there = count > 0
        time, value = rows.time[there], total[there] / count[there]
        if not self.is_growing:
            return time, value * self.factor
        if self._last is not None:
            time, value = np.insert(time, 0, self._last[0]), np.insert(value, 0, self._last[1])
        if len(time):
            self._last = int(time[-1]), float(value[-1])
        seconds, grown = np.diff(time) / 1e9, np.diff(value)
        good = (seconds > 0) & (grown >= 0)
        return time[:-1][good], grown[good] / seconds[good] * self.factor


def counters_of(columns: Sequence[str]) -> list[Counter]:
    """Returns a node's counters but of energy, in the order of its fields; of its cores the mean."""
    busy = tuple(name for name in columns if _CORE.fullmatch(name))
    result = [Counter(columns=busy, name="CPU busy", unit="%", factor=100.0)] if busy else []
    for column in columns:
        if REASONS.fullmatch(column) or column.endswith("_j") or column in busy:
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
        for way in _WAYS:
            if rest.endswith(f".{way}_bytes"):
                return clean(f"{rest.removesuffix(f'.{way}_bytes').replace('.', ' ')} {way}")
        return clean(_WORDS.get(rest, rest.replace("_", " ").replace(".", " ")))
    return clean(column)


@dataclass(kw_only=True)
class HeldClock:
    """Clock reasons of one GPU as intervals: a mask holds from the sample that showed it to the next that was read."""

    column: str
    gpu: int
    _mask: int = 0
    _since: int = -1
    _seen: int = -1
    _samples: int = 0

    def intervals(self, rows: SampledRows) -> Iterator[tuple[int, int, int, int]]:
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

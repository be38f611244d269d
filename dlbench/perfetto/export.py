"""Writes a run as one file of the Trace Event Format, which Perfetto and chrome://tracing open, in constant memory."""
# Counters that only grow become rates. Missing readings are gaps and never zeros, as are rates of counters that fell.

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from dlbench.lazy import Times
from dlbench.perfetto.rows import (
    COMPUTE_THREAD,
    EXCHANGE_THREAD,
    Notes,
    SampledRows,
    SpanRows,
    StepRows,
    Values,
    clean,
    sample_rows,
    span_rows,
    step_rows,
    thread_id,
    thread_name,
)
from dlbench.perfetto.run import TraceRun
from dlbench.records.files import large_result
from dlbench.records.rows.samples import SamplesReader
from dlbench.records.rows.spans import LANES
from dlbench.records.rows.steps import LAUNCHED, PHASES
from dlbench.records.throttle_reasons import clock_reason_names

_COMPUTE = thread_id(COMPUTE_THREAD)
LATE = "waited_for_launches_us_at_most"
"""Argument of a phase on a GPU: the longest time that the device may have waited for the host's kernel launches."""

PHASE_NAMES = tuple(phase.replace("exchange", "exchange after backward") for phase in PHASES)
_PARTED = ("input", "h2d", "forward", "backward")  # Phases that run once per pass of gradient accumulation.
_LARGEST_MASK = float(1 << 53)
_WORDS = {  # Words for a field, without the device before it.
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
_DIRECTIONS = ("received", "sent", "read", "written")  # Directions in which bytes are counted.
# Suffix of a field's name, unit (which viewers show after the name), factor, whether it only grows; the first match.
_UNITS: tuple[tuple[str, str, float, bool], ...] = (
    ("load_1min", "average (1 min)", 1.0, False),
    *((f"{direction}_bytes", "MB/s", 1e-6, True) for direction in _DIRECTIONS),
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
_LEVEL = 2  # Compression; on generated runs higher levels took longer than making the text and saved little.


def quoted(text: str) -> str:
    """Returns a name as JSON text; only quotes and backslashes are escaped, as Perfetto shows other escapes."""
    return json.dumps(clean(text), ensure_ascii=False)


def dumped(content: Any) -> str:
    """Returns facts as JSON text that can be written as UTF-8, whatever the names of hosts and paths are."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace").decode("utf-8")


def process_events(pid: int, name: str, order: int) -> str:
    """Returns events for the name and the position of a process."""
    return (
        f'{{"ph":"M","pid":{pid},"name":"process_name","args":{{"name":{quoted(name)}}}}},\n'
        f'{{"ph":"M","pid":{pid},"name":"process_sort_index","args":{{"sort_index":{order}}}}},\n'
    )


def thread_events(pid: int, tid: int, name: str | None = None) -> str:
    """Returns events for the name and the position of a thread."""
    text = quoted(name or thread_name(tid))
    return (
        f'{{"ph":"M","pid":{pid},"tid":{tid},"name":"thread_name","args":{{"name":{text}}}}},\n'
        f'{{"ph":"M","pid":{pid},"tid":{tid},"name":"thread_sort_index","args":{{"sort_index":{tid}}}}},\n'
    )


class StepEvents:
    """Writes steps and phases of one rank; `parts` is the number of forward and backward passes of a step."""

    def __init__(self, pid: int, parts: int) -> None:
        head = f'{{"ph":"X","pid":{pid},"tid":{_COMPUTE},'
        tail = '"ts":%.3f,"dur":%.3f,"args":{"step":%d'
        self._step = [
            f'{head}"cat":"step","name":"step %d",{tail}}}}},\n',
            f'{head}"cat":"step","name":"step %d (warm-up)",{tail},"warm-up":true}}}},\n',
        ]
        self._phases = []  # Templates of phases.
        self._launched_phases = []  # The same with the time of kernel launches.
        for name, phase in zip(PHASE_NAMES, PHASES, strict=True):
            text = f'{head}"cat":"phase","name":"{name}",{tail}'
            if parts > 1 and phase in _PARTED:
                text += f',"is":"sum of {parts} parts"'
            self._phases.append(f"{text}}}}},\n")
            if phase in LAUNCHED:
                text += f',"{LATE}":%.3f'
            self._launched_phases.append(f"{text}}}}},\n")
        self._templates: dict[tuple[int, bool], tuple[str, list[int]]] = {}

    def text(self, rows: StepRows) -> tuple[str, int]:
        """Returns the events of these steps, and their number; a phase without time has no event."""
        durations = np.diff(rows.edges, axis=1)
        bits = 1 << np.arange(len(PHASES))
        patterns = ((durations[:, :-1] > 0) * bits).sum(axis=1) * 2 + rows.warmup
        changes = np.flatnonzero(np.diff(patterns)) + 1
        texts, count = [], 0
        for begin, end in zip([0, *changes.tolist()], [*changes.tolist(), len(patterns)], strict=True):
            if begin == end:
                continue
            template, phase_numbers = self._template(int(patterns[begin]), has_launches=rows.launch is not None)
            count += (end - begin) * (1 + len(phase_numbers))
            # The numbers of the template, one row per step.
            steps, edges = rows.steps[begin:end], rows.edges[begin:end] / 1000
            columns = [steps, edges[:, 0], (rows.edges[begin:end, -1] - rows.edges[begin:end, 0]) / 1000, steps]
            for number in phase_numbers:
                columns += [edges[:, number], durations[begin:end, number] / 1000, steps]
                if rows.launch is not None and PHASES[number] in LAUNCHED:
                    columns.append(rows.launch[begin:end, LAUNCHED.index(PHASES[number])] / 1000)
            texts.append(template * (end - begin) % tuple(np.stack(columns, axis=1).ravel().tolist()))
        return "".join(texts), count

    def _template(self, pattern: int, *, has_launches: bool) -> tuple[str, list[int]]:
        """Returns the template of a step, and the numbers of its phases; `pattern`: their bits, then warm-up."""
        key = pattern, has_launches
        if key not in self._templates:
            phase_numbers = [n for n in range(len(PHASES)) if pattern >> (n + 1) & 1]
            phases = self._launched_phases if has_launches else self._phases
            text = self._step[pattern & 1] + "".join(phases[n] for n in phase_numbers)
            self._templates[key] = text, phase_numbers
        return self._templates[key]


def span_events(pid: int, spans: SpanRows, is_shown: np.ndarray[Any, Any]) -> Iterator[tuple[str, int, int]]:
    """Yields events of the shown spans: text, number of events, thread."""
    names = [quoted(name) for name in spans.names]
    (indices,) = is_shown.nonzero()
    fields = spans.rows[indices]
    for tid, lane, start, end, ready, number, name, step, num_bytes, track in zip(
        spans.threads[indices].tolist(),
        fields["lane"].tolist(),
        spans.start[indices].tolist(),
        spans.end[indices].tolist(),
        spans.ready[indices].tolist(),
        (indices + spans.number).tolist(),
        fields["name"].tolist(),
        fields["step"].tolist(),
        fields["num_bytes"].tolist(),
        fields["track"].tolist(),
        strict=True,
    ):
        args = []
        if step >= 0:
            args.append(f'"step":{step}')
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
    """Returns a message's wait and exchange in a slice; all are named "exchange", so that Perfetto draws one row."""
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
    """Returns the events of one counter."""
    name, unit = (quoted(text).replace("%", "%%") for text in (counter.name, counter.unit))
    template = f'{{"ph":"C","pid":{pid},"name":{name},"ts":%.3f,"args":{{{unit}:%.6g}}}},\n'
    numbers = np.stack([time / 1000, value], axis=1)
    return template * len(time) % tuple(numbers.ravel().tolist())


def reason_event(pid: int, gpu: int, begin: int, end: int, mask: int, samples: int) -> str:
    """Returns the event of an interval with the same reasons for a GPU's clock."""
    head = f'"pid":{pid},"tid":{thread_id(COMPUTE_THREAD, gpu)},"cat":"clock reasons"'
    return (
        f'{{"ph":"X",{head},"name":{quoted(" + ".join(clock_reason_names(mask)))},"ts":{begin / 1000:.3f},'
        f'"dur":{(end - begin) / 1000:.3f},"args":{{"mask":"0x{mask:x}","samples":{samples}}}}},\n'
    )


def note_event(pid: int, name: str, args: dict[str, Any]) -> str:
    """Returns an event with a note at the beginning of the trace."""
    tid = thread_id(COMPUTE_THREAD)
    return f'{{"ph":"i","s":"t","pid":{pid},"tid":{tid},"ts":0,"name":{quoted(name)},"args":{dumped(args)}}},\n'


@dataclass(kw_only=True)
class Counter:
    """A counter of a trace, made of one or more fields of a node."""

    columns: tuple[str, ...]  # Names of the fields; several are averaged.
    name: str
    unit: str
    factor: float = 1.0
    is_growing: bool = False  # Shown as the rate of growth between readings.
    _last: tuple[int, float] | None = None

    def points(self, rows: SampledRows) -> tuple[Times, Values]:
        """Returns times and values of the events, in order; a rate has the time of the beginning of its interval."""
        readings = np.stack([rows.values[name] for name in self.columns])
        is_read = np.isfinite(readings)
        count = is_read.sum(axis=0)
        total = np.where(is_read, readings, 0.0).sum(axis=0)
        has_value = count > 0
        time, value = rows.time[has_value], total[has_value] / count[has_value]
        if not self.is_growing:
            return time, value * self.factor
        if self._last is not None:
            time, value = np.insert(time, 0, self._last[0]), np.insert(value, 0, self._last[1])
        if len(time):
            self._last = int(time[-1]), float(value[-1])
        seconds, growth = np.diff(time) / 1e9, np.diff(value)
        is_valid = (seconds > 0) & (growth >= 0)
        return time[:-1][is_valid], growth[is_valid] / seconds[is_valid] * self.factor


def counters_of(columns: Sequence[str]) -> list[Counter]:
    """Returns a node's counters without energy, in the order of its fields; cores are averaged."""
    counters = []
    busy = tuple(name for name in columns if _CORE.fullmatch(name))
    if busy:
        counters.append(Counter(columns=busy, name="CPU busy", unit="%", factor=100.0))
    for column in columns:
        if REASONS.fullmatch(column) or column.endswith("_j") or column in busy:
            continue
        counter = Counter(columns=(column,), name=_title(column), unit="value")
        for suffix, unit, factor, is_growing in _UNITS:
            if column.endswith(suffix):
                counter.unit, counter.factor, counter.is_growing = unit, factor, is_growing
                break
        counters.append(counter)
    return counters


def _title(column: str) -> str:
    source, _, field = column.partition(".")
    if source == "gpu":
        number, _, field = field.partition(".")
        return clean(f"gpu {number} {_WORDS.get(field, field.replace('_', ' '))}")
    if source == "host":
        for direction in _DIRECTIONS:
            if field.endswith(f".{direction}_bytes"):
                return clean(f"{field.removesuffix(f'.{direction}_bytes').replace('.', ' ')} {direction}")
        return clean(_WORDS.get(field, field.replace("_", " ").replace(".", " ")))
    return clean(column)


@dataclass(kw_only=True)
class ClockReasons:
    """Clock reasons of one GPU as intervals: a mask is valid from its sample to the next one that was read."""

    column: str
    gpu: int
    _mask: int = 0
    _begin: int = -1  # Time of the first sample of the mask, nanoseconds on the axis.
    _last: int = -1  # Time of its last sample.
    _samples: int = 0

    def intervals(self, rows: SampledRows) -> Iterator[tuple[int, int, int, int]]:
        """Yields intervals that have ended: begin, end (nanoseconds on the axis), mask, number of samples."""
        for time, value in zip(rows.time.tolist(), rows.values[self.column].tolist(), strict=True):
            if not 0 <= value < _LARGEST_MASK:  # also NaN: not read
                continue
            if self._samples and int(value) == self._mask:
                self._last, self._samples = time, self._samples + 1
                continue
            if self._samples and self._mask:
                yield self._begin, time, self._mask, self._samples
            self._mask, self._begin, self._last, self._samples = int(value), time, time, 1

    def last_interval(self) -> Iterator[tuple[int, int, int, int]]:
        """Yields the interval of the last sample, which ends there."""
        if self._samples and self._mask:
            yield self._begin, self._last, self._mask, self._samples


def write_perfetto(run: TraceRun, facts: Mapping[str, Any], notes: Notes, output: Path) -> None:
    """Writes the trace, gzipped if the name ends in `.gz`, completely or not at all; `facts` are its metadata."""
    level = _LEVEL if output.suffix.lower() == ".gz" else None
    with large_result(output, "a trace", level) as file:
        sink = io.TextIOWrapper(file, encoding="utf-8", newline="\n")
        sink.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for rank in run.ranks:
            _write_rank(run, rank, sink, notes)
        for node in run.nodes:
            _write_node(run, node, sink, notes)
        content = {**facts, "events": notes.num_events, "notes": notes.sentences, "problems": list(notes.problems)}
        # The facts are events, too, because viewers do not show `otherData`; the last events of the file.
        pid = run.node_pid(len(run.clocks))
        sink.write(process_events(pid, f"about this trace of {run.run_id}", -1))
        sink.write(thread_events(pid, thread_id(COMPUTE_THREAD), "notes"))
        for line in [*content["problems"], *content["notes"]]:
            sink.write(note_event(pid, line, {}))
        sink.write(note_event(pid, f"run {run.run_id}", content).removesuffix(",\n") + "\n")
        sink.write(f'],"otherData":{dumped(content)}}}\n')
        sink.detach()


def _write_rank(run: TraceRun, rank: int, sink: TextIO, notes: Notes) -> None:
    pid, clock = rank + 1, run.clock_of(rank)
    sink.write(process_events(pid, f"rank {rank} on {clock.host}{clock.unknown}", pid))
    threads: set[int] = set()
    events = StepEvents(pid, run.parts)
    for rows in notes.guarded(step_rows(run.folder.steps(rank), run.run_id, notes)):
        chosen = rows.aligned(clock).chosen(run.steps)
        if len(chosen.steps):
            text, count = events.text(chosen)
            sink.write(text)
            notes.num_events += count
            threads.add(thread_id(COMPUTE_THREAD))
    if run.has_spans_of(rank, notes):
        for spans in notes.guarded(span_rows(run.folder.spans(rank), run.run_id, clock, notes)):
            for text, count, tid in span_events(pid, spans, spans.shown(run.steps, run.window)):
                sink.write(text)
                notes.num_events += count
                threads.add(tid)
    for tid in sorted(threads):
        sink.write(thread_events(pid, tid))
    if run.folder.profile(rank).exists():
        notes.count("files of torch.profiler (rank-*.profile.json) are left out: ui.perfetto.dev opens them", 1)


def _write_node(run: TraceRun, node: int, sink: TextIO, notes: Notes) -> None:
    path, clock, pid = run.folder.samples(node), run.clocks[node], run.node_pid(node)
    if not run.has_samples_of(node, notes):
        return
    sink.write(process_events(pid, f"node {clock.host}{clock.unknown}", pid))
    columns = list(notes.guarded(_columns(run, node)))
    if not columns:
        return
    counters, gpu_fields = counters_of(columns), filter(None, map(REASONS.fullmatch, columns))
    clock_reasons = [ClockReasons(column=match[0], gpu=int(match[1])) for match in gpu_fields]
    low, high = run.window or (-1 << 62, 1 << 62)
    gpus: set[int] = set()

    def write_reason(gpu: int, begin: int, end: int, mask: int, samples: int) -> None:
        if end >= low and begin <= high:
            sink.write(reason_event(pid, gpu, begin, end, mask, samples))
            notes.num_events += 1
            gpus.add(gpu)

    for rows in notes.guarded(sample_rows(path, run.run_id, clock, notes)):
        for counter in counters:
            time, value = counter.points(rows)
            within = (time >= low) & (time <= high)
            sink.write(counter_events(pid, counter, time[within], value[within]))
            notes.num_events += int(within.sum())
        for reasons in clock_reasons:
            for interval in reasons.intervals(rows):
                write_reason(reasons.gpu, *interval)
    for reasons in clock_reasons:
        for interval in reasons.last_interval():
            write_reason(reasons.gpu, *interval)
    for gpu in sorted(gpus):
        sink.write(thread_events(pid, thread_id(COMPUTE_THREAD, gpu), f"clock reasons of gpu {gpu}"))


def _columns(run: TraceRun, node: int) -> Iterator[str]:
    yield from SamplesReader(path=run.folder.samples(node), run_id=run.run_id).columns

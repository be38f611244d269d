"""Writes a run as one file that Perfetto opens, one rank and node after the other, in constant memory."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from dlbench.perfetto.events import (
    StepEvents,
    clock_reasons_of,
    counter_events,
    counters_of,
    dumped,
    note_event,
    process_events,
    reason_event,
    span_events,
    thread_events,
)
from dlbench.perfetto.rows import Notes, sample_rows, step_rows
from dlbench.perfetto.run import TraceRun
from dlbench.perfetto.spans import COMPUTE_THREAD, span_rows, thread_id
from dlbench.records.files import large_result
from dlbench.records.rows.samples import SamplesReader

_LEVEL = 2  # Compression; on generated runs higher levels took longer than making the text and saved little.


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
    counters, clock_reasons = counters_of(columns), clock_reasons_of(columns)
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

"""One rank or one node as text of a trace, written piece by piece."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from dlbench.perfetto.counters import CounterSeries, counters_of, held_clocks, sample_rows
from dlbench.perfetto.events import (
    StepEvents,
    counter_events,
    process_events,
    reason_event,
    reason_thread,
    span_events,
    thread_events,
)
from dlbench.perfetto.notes import Notes
from dlbench.perfetto.profile import ANCHOR, Profile
from dlbench.perfetto.run import TraceRun
from dlbench.perfetto.spans import COMPUTE_THREAD, SpanRows, SpanSource, thread_id
from dlbench.perfetto.steps import step_rows
from dlbench.records.rows.samples import SampleReader

# Measured on generated runs: higher levels take longer than making the text and save little.
_LEVEL = 2
_PIECE = 1 << 18


class TextSink:
    """Text to a file, compressed as one member of a gzip file or as it is.

    Args:
        file: open for writing.
        compress: whether to compress.
    """

    def __init__(self, file: BinaryIO, *, compress: bool) -> None:
        self._file = file
        self._engine = zlib.compressobj(_LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS) if compress else None
        self._held: list[str] = []
        self._size = 0

    def write(self, text: str) -> None:
        """Adds text.

        Raises:
            OSError: the disk is full or gone.
        """
        self._held.append(text)
        self._size += len(text)
        if self._size >= _PIECE:
            self._flush()

    def _flush(self) -> None:
        data = "".join(self._held).encode("utf-8")
        self._held, self._size = [], 0
        self._file.write(data if self._engine is None else self._engine.compress(data))

    def close(self) -> None:
        """Writes the rest; the file stays open."""
        self._flush()
        if self._engine is not None:
            self._file.write(self._engine.flush())


@dataclass(frozen=True, kw_only=True)
class Part:
    """Ranks and nodes that are written together."""

    ranks: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()

    def __str__(self) -> str:
        members = (("ranks", self.ranks), ("nodes", self.nodes))
        return " and ".join(f"{what} {', '.join(map(str, numbers))}" for what, numbers in members if numbers)


def write_part(run: TraceRun, part: Part, file: BinaryIO, notes: Notes, *, compress: bool) -> None:
    """The events of some ranks and nodes, each with a comma behind it.

    Raises:
        OSError: the disk is full or gone.
    """
    sink = TextSink(file, compress=compress)
    for rank in part.ranks:
        write_rank(run, rank, sink, notes)
    for node in part.nodes:
        write_node(run, node, sink, notes)
    sink.close()


def rank_pid(rank: int) -> int:
    """The process of a rank."""
    return rank + 1


def node_pid(run: TraceRun, node: int) -> int:
    """The process of a node, above all ranks."""
    return run.num_ranks + 1 + node


def write_rank(run: TraceRun, rank: int, sink: TextSink, notes: Notes) -> None:
    """All events of one rank.

    Raises:
        OSError: the disk is full or gone.
    """
    pid, clock = rank_pid(rank), run.clock_of(rank)
    unknown = "" if clock.is_known else ", clock unknown"
    sink.write(process_events(pid, f"rank {rank} on {clock.host}{unknown}", pid))
    source = None
    if run.folder.spans(rank).exists():
        source = SpanSource(run.folder.spans(rank), clock, notes)
    elif run.has_spans:
        notes.problem(f"{run.folder.spans(rank)}: missing: rank {rank} is shown without spans")
    watched = source.watched_steps if source is not None else set()
    threads: set[int] = set()
    events = StepEvents(pid, run.parts)
    edges = {}
    for local in notes.guarded(step_rows(run.folder.steps(rank), notes)):
        rows = local.aligned(clock)
        for n in (n for n, step in enumerate(rows.steps.tolist()) if step in watched) if watched else ():
            edges[int(rows.steps[n])] = rows.edges[n]
        chosen = rows.chosen(run.selection.steps)
        if len(chosen.steps):
            text, count = events.text(chosen)
            sink.write(text)
            notes.num_events += count
            threads.add(thread_id(COMPUTE_THREAD))
    anchor = None
    for spans in source.batches(edges) if source is not None else ():
        anchor = _anchor(spans) if anchor is None else anchor
        kept = spans.shown(run.selection.steps, run.window)
        for text, count, tid in span_events(pid, spans, kept):
            sink.write(text)
            notes.num_events += count
            threads.add(tid)
    for tid in sorted(threads):
        sink.write(thread_events(pid, tid))
    if run.folder.profile(rank).exists():
        for text, count in Profile(run.folder.profile(rank), anchor, notes).events(pid, run.window):
            sink.write(text)
            notes.num_events += count


def _anchor(spans: SpanRows) -> int | None:
    """When the profiler's anchor began."""
    if ANCHOR not in spans.names:
        return None
    found = ((spans.rows["name"] == spans.names.index(ANCHOR)) & (spans.threads >= 0)).nonzero()[0]
    return int(spans.start[found[0]]) if len(found) else None


def write_node(run: TraceRun, node: int, sink: TextSink, notes: Notes) -> None:
    """All counters of one node.

    Raises:
        OSError: the disk is full or gone.
    """
    path, clock, pid = run.folder.samples(node), run.clocks[node], node_pid(run, node)
    if not path.exists():
        if node in run.sampled_nodes:
            notes.problem(f"{path}: missing: node {node} is shown without counters")
        return
    unknown = "" if clock.is_known else ", clock unknown"
    sink.write(process_events(pid, f"node {clock.host}{unknown}", pid))
    columns = list(notes.guarded(_columns(run, node)))
    counters = [CounterSeries(counter) for counter in counters_of(columns, cores=run.selection.cores)]
    clocks = held_clocks(columns)
    low, high = run.window or (-1 << 62, 1 << 62)
    threads: set[int] = set()

    def held(gpu: int, interval: tuple[int, int, int, int]) -> None:
        begin, end, mask, samples = interval
        if end >= low and begin <= high:
            sink.write(reason_event(pid, gpu, begin, end, mask, samples))
            notes.num_events += 1
            threads.add(gpu)

    for rows in notes.guarded(sample_rows(path, clock, notes)) if columns else ():
        for series in counters:
            time, value = series.points(rows)
            within = (time >= low) & (time <= high)
            sink.write(counter_events(pid, series.counter, time[within], value[within]))
            notes.num_events += int(within.sum())
        for gpu in clocks:
            for interval in gpu.intervals(rows):
                held(gpu.gpu, interval)
    for gpu in clocks:
        for interval in gpu.rest():
            held(gpu.gpu, interval)
    for number in sorted(threads):
        sink.write(thread_events(pid, reason_thread(number), f"clock reasons of gpu {number}"))


def _columns(run: TraceRun, node: int) -> Iterator[str]:
    yield from SampleReader(path=run.folder.samples(node)).columns

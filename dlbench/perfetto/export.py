"""A run as one file that Perfetto opens: ranks and nodes written one after the other, or by several processes.

Memory does not grow with the run. A compressed trace is a row of gzip members, one for some ranks each, so that
several processes can make them.
"""

from __future__ import annotations

import os
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from dlbench import pool
from dlbench.errors import UserError, refused
from dlbench.perfetto.events import (
    CounterSeries,
    StepEvents,
    counter_events,
    counters_of,
    dumped,
    held_clocks,
    note_event,
    process_events,
    reason_event,
    span_events,
    thread_events,
)
from dlbench.perfetto.rows import COMPUTE_THREAD, Notes, SpanSource, sample_rows, step_rows, thread_id
from dlbench.perfetto.run import TraceRun
from dlbench.records.files import TEMPORARY_SUFFIX, is_stream
from dlbench.records.rows.samples import SampleReader
from dlbench.records.rows.shared import file_of

PARALLEL_BYTES = 4_000_000  # Runs with smaller files are written by this process alone.
MOST_WORKERS = 4
_RANKS_PER_PART = 8
_NODES_PER_PART = 8


def write_perfetto(run: TraceRun, facts: Mapping[str, Any], notes: Notes, output: Path) -> None:
    """Writes the trace, compressed where the name ends in `.gz`; as a whole or not at all.

    `facts`: what the trace says of itself; to these, and to `notes`, what is met now is added. Raises UserError: it
    cannot be written; or RunError: a process that made a part died.
    """
    compress = output.suffix.lower() == ".gz"
    with _temporary_next_to(output) as temporary:
        partial = temporary / "trace"
        with partial.open("xb") as file:
            _write(run, facts, notes, file, temporary, compress)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(output)


@contextmanager
def _temporary_next_to(output: Path) -> Iterator[Path]:
    """A folder next to the output for what is not whole yet; gone in the end. Raises UserError: the file system
    refuses, here or within, or the output is a device or a pipe.
    """
    if is_stream(output):
        raise UserError(f"-o {output}: is a device or a pipe; a trace needs a file of its own")
    folder = output.with_name(f".{output.name}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        folder.mkdir()
        yield folder
    except OSError as error:
        raise refused(error, f"-o {output}: cannot be written: {error.strerror or error}", UserError) from None
    finally:
        with suppress(OSError):
            shutil.rmtree(folder)


def _write(
    run: TraceRun, facts: Mapping[str, Any], notes: Notes, file: BinaryIO, temporary: Path, compress: bool
) -> None:
    sink = TextSink(file, compress=compress)
    sink.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    sink.close()
    ranks, nodes = run.selection.ranks, run.nodes
    parts = [
        *(Part(ranks=ranks[n : n + _RANKS_PER_PART]) for n in range(0, len(ranks), _RANKS_PER_PART)),
        *(Part(nodes=nodes[n : n + _NODES_PER_PART]) for n in range(0, len(nodes), _NODES_PER_PART)),
    ]
    workers = _num_workers(run, len(parts))
    if workers < 2:
        for part in parts:
            write_part(run, part, file, notes, compress=compress)
    else:
        make = partial(_make_part, run, compress=compress)
        items = [(part, temporary / f"part-{number}") for number, part in enumerate(parts)]
        with pool.run(make, items, workers, name=lambda item: f"the trace of {item[0]}", verb="made") as results:
            for (_, path), met in zip(items, pool.in_order(results), strict=True):
                with path.open("rb") as written:
                    shutil.copyfileobj(written, file, 1 << 20)
                path.unlink()
                notes.add(met)
    sink = TextSink(file, compress=compress)
    content = {**facts, "events": notes.num_events, "notes": notes.sentences, "problems": list(notes.problems)}
    # The facts as events, because viewers do not show `otherData`; the last event of the file.
    pid = node_pid(run, len(run.clocks))
    text = process_events(pid, f"about this trace of {content['run_id']}", -1)
    text += thread_events(pid, thread_id(COMPUTE_THREAD), "notes")
    for line in [*content["problems"], *content["notes"]]:
        text += note_event(pid, line, {})
    sink.write(text + note_event(pid, f"run {content['run_id']}", dict(content)).removesuffix(",\n") + "\n")
    sink.write(f'],"otherData":{dumped(content)}}}\n')
    sink.close()


def _make_part(run: TraceRun, item: tuple[Part, Path], *, compress: bool) -> Notes:
    """Writes one part to a file of its own; returns what was met."""
    part, path = item
    notes = Notes()
    with path.open("xb") as file:
        write_part(run, part, file, notes, compress=compress)
    return notes


def _num_workers(run: TraceRun, num_parts: int) -> int:
    folder = run.folder
    paths = {file_of(path) for rank in run.selection.ranks for path in (folder.steps(rank), folder.spans(rank))}
    paths |= {folder.samples(node) for node in run.nodes}
    size = sum(path.stat().st_size for path in paths if path.exists())
    if size < PARALLEL_BYTES:
        return 1
    return min(num_parts, MOST_WORKERS, len(os.sched_getaffinity(0)))


# Measured on generated runs: higher levels take longer than making the text and save little.
_LEVEL = 2
_PIECE = 1 << 18


class TextSink:
    """Text to a file, compressed as one member of a gzip file or as it is."""

    def __init__(self, file: BinaryIO, *, compress: bool) -> None:
        self._file = file
        self._engine = zlib.compressobj(_LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS) if compress else None
        self._held: list[str] = []
        self._size = 0

    def write(self, text: str) -> None:
        """Adds text; OSError where the disk is full or gone."""
        self._held.append(text)
        self._size += len(text)
        if self._size >= _PIECE:
            self._flush()

    def _flush(self) -> None:
        data = "".join(self._held).encode("utf-8")
        self._held, self._size = [], 0
        self._file.write(data if self._engine is None else self._engine.compress(data))

    def close(self) -> None:
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
    """The events of some ranks and nodes, each with a comma behind it; OSError where the disk is full or gone."""
    sink = TextSink(file, compress=compress)
    for rank in part.ranks:
        _write_rank(run, rank, sink, notes)
    for node in part.nodes:
        _write_node(run, node, sink, notes)
    sink.close()


def node_pid(run: TraceRun, node: int) -> int:
    """The process of a node, above all ranks, whose processes count from 1."""
    return run.num_ranks + 1 + node


def _write_rank(run: TraceRun, rank: int, sink: TextSink, notes: Notes) -> None:
    pid, clock = rank + 1, run.clock_of(rank)
    sink.write(process_events(pid, f"rank {rank} on {clock.host}{clock.unknown}", pid))
    source = SpanSource(run.folder.spans(rank), run.run_id, clock, notes) if run.has_spans_of(rank, notes) else None
    watched = source.watched_steps if source is not None else set()
    threads: set[int] = set()
    events = StepEvents(pid, run.parts)
    edges = {}
    for local in notes.guarded(step_rows(run.folder.steps(rank), run.run_id, notes)):
        rows = local.aligned(clock)
        for n in (n for n, step in enumerate(rows.steps.tolist()) if step in watched) if watched else ():
            edges[int(rows.steps[n])] = rows.edges[n]
        chosen = rows.chosen(run.selection.steps)
        if len(chosen.steps):
            text, count = events.text(chosen)
            sink.write(text)
            notes.num_events += count
            threads.add(thread_id(COMPUTE_THREAD))
    for spans in source.batches(edges) if source is not None else ():
        kept = spans.shown(run.selection.steps, run.window)
        for text, count, tid in span_events(pid, spans, kept):
            sink.write(text)
            notes.num_events += count
            threads.add(tid)
    for tid in sorted(threads):
        sink.write(thread_events(pid, tid))
    if run.folder.profile(rank).exists():
        notes.count("files of torch.profiler (rank-*.profile.json) are left out: ui.perfetto.dev opens them", 1)


def _write_node(run: TraceRun, node: int, sink: TextSink, notes: Notes) -> None:
    path, clock, pid = run.folder.samples(node), run.clocks[node], node_pid(run, node)
    if not run.has_samples_of(node, notes):
        return
    sink.write(process_events(pid, f"node {clock.host}{clock.unknown}", pid))
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

    for rows in notes.guarded(sample_rows(path, run.run_id, clock, notes)) if columns else ():
        for series in counters:
            time, value = series.points(rows)
            within = run.in_window(time)
            sink.write(counter_events(pid, series.counter, time[within], value[within]))
            notes.num_events += int(within.sum())
        for gpu in clocks:
            for interval in gpu.intervals(rows):
                held(gpu.gpu, interval)
    for gpu in clocks:
        for interval in gpu.rest():
            held(gpu.gpu, interval)
    for number in sorted(threads):
        sink.write(thread_events(pid, thread_id(COMPUTE_THREAD, number), f"clock reasons of gpu {number}"))


def _columns(run: TraceRun, node: int) -> Iterator[str]:
    yield from SampleReader(path=run.folder.samples(node), run_id=run.run_id).columns

"""Reads a run for a trace: nodes of ranks, clocks on one axis, and the time of the selected steps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

import numpy as np

import dlbench
from dlbench.errors import IncompleteDataError, UserError
from dlbench.perfetto.rows import LARGEST_NS, NodeClock, Notes, TimeAxis, make_axis, step_rows
from dlbench.records.folder import RunFolder
from dlbench.records.rows.samples import SamplesReader
from dlbench.records.rows.shared import file_of
from dlbench.records.rows.spans import SpanReader
from dlbench.records.scan import Run

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def parse_ranks(text: str | None, num_ranks: int) -> tuple[int, ...] | None:
    """Returns the ranks of a text such as `0,1,8-15`, in order, each once; None without a text."""
    if text is None:
        return None
    chosen: set[int] = set()
    for part in text.split(","):
        first, last = _range("--ranks", text, part)
        if last >= num_ranks:
            raise UserError(f"--ranks {text}: the run has no rank {last}, only 0 to {num_ranks - 1}")
        chosen.update(range(first, last + 1))
    return tuple(sorted(chosen))


def parse_steps(text: str | None) -> tuple[int, int] | None:
    """Returns first and last step of `100-120` or `7`, None without a text; raises `UserError` if it is no range."""
    return None if text is None else _range("--steps", text, text)


def _range(option: str, text: str, part: str) -> tuple[int, int]:
    match = _PART.fullmatch(part.strip())
    if match is None:
        example = "0,1,8-15" if option == "--ranks" else "100-120"
        raise UserError(f"{option} {text}: {part.strip()!r} is neither a number nor a range; right: {example}")
    first = int(match[1])
    last = int(match[2] or first)
    if last < first:
        raise UserError(f"{option} {text}: {part.strip()} runs backwards; right: {last}-{first}")
    return first, last


@dataclass(frozen=True, kw_only=True)
class TraceRun:
    """A run with the ranks and steps that a trace shows."""

    folder: RunFolder
    run_id: str
    ranks: tuple[int, ...]  # Shown ranks, in order, each once.
    steps: tuple[int, int] | None  # First and last shown step; None: all.
    node_of: tuple[int, ...]  # Node of each rank.
    clocks: tuple[NodeClock, ...]  # By node.
    window: tuple[int, int] | None  # First and last nanosecond of the shown steps; None: all are shown.
    parts: int  # Forward and backward passes per step.
    has_spans: bool  # Whether every rank should have spans.
    sampled_nodes: tuple[int, ...]  # Nodes that should have samples.

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(sorted({self.node_of[rank] for rank in self.ranks}))

    def node_pid(self, node: int) -> int:
        """Returns the process number of a node, after those of all ranks, which count from 1."""
        return len(self.node_of) + 1 + node

    def clock_of(self, rank: int) -> NodeClock:
        return self.clocks[self.node_of[rank]]

    def has_spans_of(self, rank: int, notes: Notes) -> bool:
        """Returns whether there is a file of a rank's spans; a missing file is noted."""
        path = self.folder.spans(rank)
        exists = file_of(path).exists()
        if not exists and self.has_spans:
            notes.problem(f"{path}: missing: rank {rank} is shown without spans")
        return exists

    def has_samples_of(self, node: int, notes: Notes) -> bool:
        """Returns whether there is a file of a node's samples; a missing file is noted."""
        path = self.folder.samples(node)
        if not path.exists() and node in self.sampled_nodes:
            notes.problem(f"{path}: missing: node {node} is shown without counters")
        return path.exists()


def read_trace_run(
    run: Run, notes: Notes, ranks: tuple[int, ...] | None = None, steps: tuple[int, int] | None = None
) -> tuple[TraceRun, dict[str, Any]]:
    """Returns the shown part of a run (None: all ranks, all steps) and the trace's metadata; damage is noted."""
    layout = run.plan.layout
    recorded_ranks = run.record.ranks if run.record is not None else ()
    recorded_nodes = {rank.rank: rank.node_rank for rank in recorded_ranks}
    hosts = {node: f"node {node}" for node in range(layout.nodes)}
    node_of = tuple(recorded_nodes.get(rank, rank // layout.ranks_per_node) for rank in range(layout.ranks))
    if max(node_of) >= layout.nodes:
        raise IncompleteDataError(
            f"{run.folder.record}: damaged: a rank is on node {max(node_of)}, the plan has {layout.nodes} nodes"
        )
    hosts |= {node_of[status.rank]: status.host for status in run.statuses if status.rank < len(node_of)}
    hosts |= {rank.node_rank: rank.host for rank in recorded_ranks}
    lines = {}
    if run.record is not None and run.record.watch is not None:
        lines = {node.node_rank: node.clock for node in run.record.watch.nodes}
    earliest = _earliest(run, node_of, notes)
    try:
        axis = make_axis(lines, hosts, earliest)
    except IncompleteDataError as error:
        raise IncompleteDataError(f"{run.folder.path}: {error}") from None
    if ranks is None:
        ranks = tuple(range(layout.ranks))
    trace_run = TraceRun(
        folder=run.folder,
        run_id=run.plan.run_id,
        ranks=ranks,
        steps=steps,
        node_of=node_of,
        clocks=axis.clocks,
        window=_window(run, ranks, steps, node_of, axis.clocks),
        parts=run.plan.workload.train.gradient_accumulation,
        has_spans=run.plan.watch is not None and run.plan.watch.is_on,
        sampled_nodes=tuple(lines),
    )
    return trace_run, _facts(run, trace_run, axis)


def _earliest(run: Run, node_of: tuple[int, ...], notes: Notes) -> dict[int, int]:
    """Returns the first time in the files of each node, on its clock, of the whole run."""
    times_of_nodes: list[tuple[int, Iterator[int]]] = []
    for rank, node in enumerate(node_of):
        if file_of(run.folder.steps(rank)).exists():
            first_rows = islice(step_rows(run.folder.steps(rank), run.plan.run_id, Notes()), 1)
            times_of_nodes.append((node, (int(rows.edges[0, 0]) for rows in first_rows)))
        if file_of(run.folder.spans(rank)).exists():
            times_of_nodes.append((node, _span_beginnings(run, rank)))
    sampled_nodes = (node for node in range(run.plan.layout.nodes) if run.folder.samples(node).exists())
    times_of_nodes += [(node, _first_sample(run, node)) for node in sampled_nodes]
    earliest: dict[int, int] = {}
    for node, times in times_of_nodes:
        for time in notes.guarded(times):
            earliest[node] = min(time, earliest.get(node, time))
    return earliest


def _span_beginnings(run: Run, rank: int) -> Iterator[int]:
    for rows in SpanReader(path=run.folder.spans(rank), run_id=run.plan.run_id).blocks():
        start, duration, queued = rows["start_ns"], rows["duration_ns"], rows["queued_ns"]
        times = np.stack([start - queued, start, duration, queued])
        is_valid = (times >= 0).all(axis=0) & (times < LARGEST_NS).all(axis=0)
        if is_valid.any():
            yield int(times[0, is_valid].min())


def _first_sample(run: Run, node: int) -> Iterator[int]:
    for rows in SamplesReader(path=run.folder.samples(node), run_id=run.plan.run_id).blocks():
        is_valid = (rows["time_ns"] >= 0) & (rows["time_ns"] < LARGEST_NS)
        if is_valid.any():
            yield int(rows["time_ns"][is_valid].min())
            return


def _window(
    run: Run,
    ranks: tuple[int, ...],
    steps: tuple[int, int] | None,
    node_of: tuple[int, ...],
    clocks: tuple[NodeClock, ...],
) -> tuple[int, int] | None:
    """Returns first and last nanosecond of the selected steps, None for all; raises `UserError` if there are none."""
    if steps is None:
        return None
    begins, ends, last = [], [], -1
    for rank in ranks:
        # Damage is noted when the rank is written.
        for rows in Notes().guarded(step_rows(run.folder.steps(rank), run.plan.run_id, Notes())):
            last = max(last, int(rows.steps.max()))
            chosen = rows.chosen(steps).aligned(clocks[node_of[rank]])
            if len(chosen.steps):
                begins.append(int(chosen.edges[:, 0].min()))
                ends.append(int(chosen.edges[:, -1].max()))
            if last > steps[1]:
                break
    if not begins:
        existing = f"they have steps 0 to {last}" if last >= 0 else "they left no steps"
        raise UserError(f"--steps {steps[0]}-{steps[1]}: the chosen ranks have none of them; {existing}")
    return min(begins), max(ends)


def _facts(run: Run, shown: TraceRun, axis: TimeAxis) -> dict[str, Any]:
    plan, record = run.plan, run.record
    step_clock, phases, window, spans = None, plan.measure.phases, None, None
    if record is not None:
        step_clock, phases = record.clock, record.phases
    if record is not None and record.watch is not None:
        watch = record.watch
        window = {
            "first_step": watch.window_first_step,
            "num_steps": watch.window_num_steps,
            "ranks": _ranges(watch.window_ranks),
        }
        spans = {"written": watch.num_spans, "left_out": watch.dropped_spans}
    shown_steps = "all" if shown.steps is None else f"{shown.steps[0]}-{shown.steps[1]}"
    wall_clock = None
    if axis.wall_zero_ns is not None:
        wall_clock = (_EPOCH + timedelta(microseconds=axis.wall_zero_ns // 1000)).isoformat()
    return {
        "format": "dlbench.trace",
        "version": 1,
        "dlbench": dlbench.__version__,
        "run_id": plan.run_id,
        "state": run.state,
        "workload": plan.title,
        "plan_made_by": plan.dlbench_version,
        "ranks": plan.layout.ranks,
        "nodes": plan.layout.nodes,
        "shown_ranks": _ranges(shown.ranks),
        "shown_steps": shown_steps,
        "zero_wall_clock": wall_clock,
        "zero_monotonic_ns": axis.zero_ns,
        "step_clock": step_clock,
        "phases": phases,
        "parts_per_step": plan.workload.train.gradient_accumulation,
        "window": window,
        "spans": spans,
        "clocks": [
            {"node": clock.node, "host": clock.host, "basis": clock.basis}
            | {"error_bound_ns": clock.bound_ns, "problem": clock.problem}
            for clock in axis.clocks
        ],
        "clocks_unknown": [f"node {clock.node} ({clock.host})" for clock in axis.clocks if clock.unknown],
    }


def _ranges(numbers: tuple[int, ...]) -> str:
    """Returns ascending numbers as a short text: 0,1,8-15."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], number
        else:
            ranges.append((number, number))
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)

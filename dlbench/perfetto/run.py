"""A run as a trace needs it: who ran where, all clocks on one axis, and the time of the steps that were asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import dlbench
from dlbench.errors import IncompleteDataError, UserError
from dlbench.perfetto.clocks import LARGEST_NS, NodeClock, TimeAxis, make_axis
from dlbench.perfetto.rows import Notes, step_rows
from dlbench.records.folder import RunFolder
from dlbench.records.rows.samples import SamplesReader
from dlbench.records.rows.shared import file_of
from dlbench.records.rows.spans import SpanReader
from dlbench.records.scan import Run

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def parse_ranks(text: str | None, num_ranks: int) -> tuple[int, ...] | None:
    """Ranks from a text such as `0,1,8-15`, in order, each once; None without one."""
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
    """First and last step from a text such as `100-120` or `7`; None without one. Raises UserError: it is no range."""
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
    """What reading the files of a run takes."""

    folder: RunFolder
    run_id: str
    ranks: tuple[int, ...]  # Those that were asked for, in order, each once.
    steps: tuple[int, int] | None  # First and last step that were asked for; None: all.
    node_of: tuple[int, ...]  # Node of each rank.
    clocks: tuple[NodeClock, ...]  # By node.
    window: tuple[int, int] | None  # First and last nanosecond of the chosen steps; None where all are shown.
    parts: int  # Forward and backward passes per step.
    has_spans: bool  # Whether every rank is to have spans.
    sampled_nodes: tuple[int, ...]  # Nodes that are to have samples.

    @property
    def nodes(self) -> tuple[int, ...]:
        """Nodes of the chosen ranks."""
        return tuple(sorted({self.node_of[rank] for rank in self.ranks}))

    def node_pid(self, node: int) -> int:
        """The process of a node, above all ranks, whose processes count from 1."""
        return len(self.node_of) + 1 + node

    def clock_of(self, rank: int) -> NodeClock:
        return self.clocks[self.node_of[rank]]

    def has_spans_of(self, rank: int, notes: Notes) -> bool:
        """Whether there is a file of a rank's spans; one that is missing is noted."""
        path = self.folder.spans(rank)
        if not (exists := file_of(path).exists()) and self.has_spans:
            notes.problem(f"{path}: missing: rank {rank} is shown without spans")
        return exists

    def has_samples_of(self, node: int, notes: Notes) -> bool:
        """Whether there is a file of a node's samples; one that is missing is noted."""
        path = self.folder.samples(node)
        if not path.exists() and node in self.sampled_nodes:
            notes.problem(f"{path}: missing: node {node} is shown without counters")
        return path.exists()


def read_trace_run(
    run: Run, notes: Notes, ranks: tuple[int, ...] | None = None, steps: tuple[int, int] | None = None
) -> tuple[TraceRun, dict[str, Any]]:
    """Looks once over the run's files; what is damaged goes to the notes. `ranks`, `steps`: those that are shown.

    Also returns what a trace says of itself (without what is met later).
    """
    layout = run.plan.layout
    recorded = {} if run.record is None else {rank.rank: rank.node_rank for rank in run.record.ranks}
    node_of = tuple(recorded.get(rank, rank // layout.ranks_per_node) for rank in range(layout.ranks))
    if max(node_of) >= layout.nodes:
        raise IncompleteDataError(
            f"{run.folder.record}: damaged: a rank is on node {max(node_of)}, the plan has {layout.nodes} nodes"
        )
    watch = run.record.watch if run.record is not None else None
    lines = {} if watch is None else {node.node_rank: node.clock for node in watch.nodes}
    sampled = () if watch is None else tuple(node.node_rank for node in watch.nodes)
    earliest = _earliest(run, node_of, notes)
    try:
        hosts = {node: f"node {node}" for node in range(run.plan.layout.nodes)}
        hosts |= {node_of[status.rank]: status.host for status in run.statuses if status.rank < len(node_of)}
        if run.record is not None:
            hosts |= {rank.node_rank: rank.host for rank in run.record.ranks}
        axis = make_axis(lines, hosts, earliest)
    except IncompleteDataError as error:
        raise IncompleteDataError(f"{run.folder.path}: {error}") from None
    chosen = tuple(range(layout.ranks)) if ranks is None else ranks
    made = TraceRun(
        folder=run.folder,
        run_id=run.plan.run_id,
        ranks=chosen,
        steps=steps,
        node_of=node_of,
        clocks=axis.clocks,
        window=_window(run, chosen, steps, node_of, axis.clocks),
        parts=run.plan.workload.train.gradient_accumulation,
        has_spans=run.plan.watch is not None and run.plan.watch.is_on,
        sampled_nodes=sampled,
    )
    return made, _facts(run, made, axis)


def _earliest(run: Run, node_of: tuple[int, ...], notes: Notes) -> dict[int, int]:
    """First time in the files of each node, on its own clock; of the whole run, whatever is chosen."""
    firsts: dict[int, int] = {}

    def seen(node: int, time: int) -> None:
        firsts[node] = min(time, firsts.get(node, time))

    for rank, node in enumerate(node_of):
        if file_of(run.folder.steps(rank)).exists():
            rows = next(notes.guarded(step_rows(run.folder.steps(rank), run.plan.run_id, Notes())), None)
            if rows is not None:
                seen(node, int(rows.edges[0, 0]))
        if file_of(run.folder.spans(rank)).exists():
            for time in notes.guarded(_span_beginnings(run, rank)):
                seen(node, time)
    for node in range(run.plan.layout.nodes):
        if run.folder.samples(node).exists():
            for time in notes.guarded(_first_sample(run, node)):
                seen(node, time)
    return firsts


def _span_beginnings(run: Run, rank: int) -> Iterator[int]:
    """The earliest beginning of each block of spans."""
    for rows in SpanReader(path=run.folder.spans(rank), run_id=run.plan.run_id).blocks():
        begin = rows["start_ns"] - rows["queued_ns"]
        good = (begin >= 0) & (rows["start_ns"] < LARGEST_NS)
        for name in ("duration_ns", "queued_ns"):
            good &= (rows[name] >= 0) & (rows[name] < LARGEST_NS)
        if good.any():
            yield int(begin[good].min())


def _first_sample(run: Run, node: int) -> Iterator[int]:
    for rows in SamplesReader(path=run.folder.samples(node), run_id=run.plan.run_id).blocks():
        good = (rows["time_ns"] >= 0) & (rows["time_ns"] < LARGEST_NS)
        if good.any():
            yield int(rows["time_ns"][good].min())
            return


def _window(
    run: Run,
    ranks: tuple[int, ...],
    steps: tuple[int, int] | None,
    node_of: tuple[int, ...],
    clocks: tuple[NodeClock, ...],
) -> tuple[int, int] | None:
    """First and last nanosecond of the chosen ranks' chosen steps; None for all. Raises UserError: there are none."""
    if steps is None:
        return None
    begins, ends, last = [], [], -1
    for rank in ranks:
        # Damage is noted when the rank is shown.
        for rows in Notes().guarded(step_rows(run.folder.steps(rank), run.plan.run_id, Notes())):
            last = max(last, int(rows.steps.max()))
            chosen = rows.chosen(steps).aligned(clocks[node_of[rank]])
            if len(chosen.steps):
                begins.append(int(chosen.edges[:, 0].min()))
                ends.append(int(chosen.edges[:, -1].max()))
            if last > steps[1]:
                break
    if not begins:
        there = f"they have steps 0 to {last}" if last >= 0 else "they left no steps"
        raise UserError(f"--steps {steps[0]}-{steps[1]}: the chosen ranks have none of them; {there}")
    return min(begins), max(ends)


def _facts(run: Run, shown: TraceRun, axis: TimeAxis) -> dict[str, Any]:
    plan, record = run.plan, run.record
    watch = None if record is None else record.watch
    wall = None
    if axis.wall_zero_ns is not None:
        wall = (_EPOCH + timedelta(microseconds=axis.wall_zero_ns // 1000)).isoformat()
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
        "shown_steps": "all" if shown.steps is None else f"{shown.steps[0]}-{shown.steps[1]}",
        "zero_wall_clock": wall,
        "zero_monotonic_ns": axis.zero_ns,
        "step_clock": None if record is None else record.clock,
        "phases": plan.measure.phases if record is None else record.phases,
        "parts_per_step": plan.workload.train.gradient_accumulation,
        "window": None
        if watch is None
        else {
            "first_step": watch.window_first_step,
            "num_steps": watch.window_num_steps,
            "ranks": _ranges(watch.window_ranks),
        },
        "spans": None if watch is None else {"written": watch.num_spans, "left_out": watch.dropped_spans},
        "clocks": [
            {"node": one.node, "host": one.host, "basis": one.basis}
            | {"error_bound_ns": one.bound_ns, "problem": one.problem}
            for one in axis.clocks
        ],
        "clocks_unknown": [f"node {one.node} ({one.host})" for one in axis.clocks if one.unknown],
    }


def _ranges(numbers: tuple[int, ...]) -> str:
    """Numbers in order as a short text: 0,1,8-15."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(one) if one == other else f"{one}-{other}" for one, other in parts)

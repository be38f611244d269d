"""The samples of a node as arrays, and the stages of its ranks on the same clock, the node's CLOCK_MONOTONIC."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dlbench.errors import IncompleteDataError
from dlbench.lazy import Array, Times, np
from dlbench.records.record import RankResult
from dlbench.records.rows.samples import SamplesReader
from dlbench.records.rows.shared import file_of
from dlbench.records.rows.spans import STAGE, STAGING, SpanReader
from dlbench.records.rows.steps import StepReader
from dlbench.records.scan import Run
from dlbench.records.watch import NodeWatch

Interval = tuple[int, int]  # Begin and end, nanoseconds of the node's clock.

STAGES = ("idle", "building", "compiling", "staging", "warm-up", "measured", "evaluation", "checkpoint")
"""Stages of a node; idle is the time outside of other stages: before building, after the last step, between stages."""

# Later stages are within earlier ones and count instead of them.
_OVERLAYS = ("building", "compiling", "warm-up", "measured", "staging", "evaluation", "checkpoint")

_SLOW_FACTOR = 10


@dataclass(frozen=True, kw_only=True)
class NodeSamples:
    """The samples of a node."""

    node_rank: int
    host: str
    period_s: float  # Longest period of the sampler, seconds.
    time_ns: Times  # Time of each sample, shape (n,).
    columns: dict[str, Array]  # The wanted fields by name, NaN where one was not read; each of shape (n,).
    names: tuple[str, ...]  # All sampled fields.
    unavailable: dict[str, str]  # Reasons of fields that could not be read; a name may stand for a group (`gpu`).
    facts: dict[str, str]  # Constant properties: names and UUIDs of GPUs, limits.
    failures: tuple[str, ...]  # Failures during the run, each a sentence.

    def period_of(self, name: str) -> float:
        """Returns the longest period at which a field was read, seconds: slow fields are read every tenth time."""
        num_values = int(np.isfinite(self.columns[name]).sum())
        if 4 * num_values < len(self.time_ns):
            return self.period_s * _SLOW_FACTOR
        return self.period_s

    def why_not(self, *names: str) -> str:
        """Returns why fields were not read: the first reason of a field, of its group, or of a field in the group."""
        for name in names:
            parts = name.split(".")
            for length in range(len(parts), 0, -1):
                reason = self.unavailable.get(".".join(parts[:length]))
                if reason:
                    return reason
            for missing, reason in self.unavailable.items():
                if missing.startswith(f"{name}."):
                    return reason
        return "this node did not sample it"


def read_node(run: Run, node: int, is_wanted: Callable[[str], object]) -> NodeSamples:
    """Reads the wanted fields of a node. Raises IncompleteDataError: its file of samples is missing or damaged."""
    reader = SamplesReader(path=run.folder.samples(node), run_id=run.plan.run_id)
    names = [name for name in reader.columns if is_wanted(name)]
    columns = reader.read({"time_ns", *names})
    header = reader.header
    period_s = float(header["period_s"])
    watch = node_watch(run, node)
    if watch:
        period_s = max(period_s, watch.period_s)
    return NodeSamples(
        node_rank=node,
        host=str(header.get("host", "")),
        period_s=period_s,
        time_ns=columns["time_ns"].astype(np.int64),
        columns={name: columns[name].astype(np.float64) for name in names},
        names=tuple(reader.columns),
        unavailable={str(name): str(why) for name, why in dict(header.get("unavailable", {})).items()},
        facts={str(name): str(value) for name, value in dict(header.get("facts", {})).items()},
        failures=tuple(f"{failure['failed']}: {failure.get('reason', '')}" for failure in reader.failures),
    )


def every_field(name: str) -> bool:
    """Accepts all fields of a node."""
    return True


def node_watch(run: Run, node: int) -> NodeWatch | None:
    """Returns the report of a node's sampler in the record; None without one."""
    if run.record is None or run.record.watch is None:
        return None
    return next((watch for watch in run.record.watch.nodes if watch.node_rank == node), None)


def why_not_sampled(run: Run, node: int) -> str:
    """Returns why a node has no samples; empty if it has some."""
    if run.folder.samples(node).exists():
        return ""
    if run.plan.watch is None or not run.plan.watch.sampler:
        return "the run was not sampled (watch.sampler)"
    watched = node_watch(run, node)
    if watched is None:
        return f"node {node} has no samples, and its sampler did not report"
    return f"{watched.host} has no samples: {'; '.join(watched.failures) or 'the file is gone'}"


def node_ranks(run: Run, node: int) -> list[RankResult]:
    """Returns the ranks of a node, by rank; none without a record."""
    return list(run.ranks_by_node.get(node, ()))


def nodes_of(run: Run) -> list[int]:
    """Returns the nodes of a run with a record, by number."""
    return list(run.ranks_by_node)


@dataclass(frozen=True, kw_only=True)
class NodeStages:
    """The stages of a node over time, those of its lowest rank."""

    measured: Interval  # From the start of the first measured step to the end of the last.
    pieces: tuple[tuple[str, int, int], ...]  # Consecutive stages of the rank's process: stage, begin, end.
    unaccounted_s: float  # Seconds of the stage `measured` outside of measured steps and spans: pauses.
    has_spans: bool  # Whether there are spans of stages; otherwise stages are from the first to the last step.

    @property
    def edges(self) -> list[int]:
        return [*(begin for _, begin, _ in self.pieces), self.pieces[-1][2]]


def measured_window(run: Run, node: int) -> Interval:
    """Returns the start of the first and end of the last measured step of a node's lowest rank, on the node's clock."""
    return _window(run, node, _steps(run, node))


def _window(run: Run, node: int, steps: Mapping[str, Times]) -> Interval:
    measured = np.flatnonzero(steps["warmup"] == 0)
    if len(measured) == 0:
        raise IncompleteDataError(f"{run.folder.path}: no measured step on node {node}")
    first, last = measured[0], measured[-1]
    return int(steps["start_ns"][first]), int(steps["start_ns"][last] + steps["step_ns"][last])


def _steps(run: Run, node: int) -> dict[str, Times]:
    ranks = node_ranks(run, node)
    if not ranks:
        raise IncompleteDataError(f"{run.folder.path}: the record names no rank on node {node}")
    reader = StepReader(run.folder.steps(ranks[0].rank), run_id=run.plan.run_id)
    steps: dict[str, Any] = reader.read(("warmup", "start_ns", "step_ns"))
    return steps


def node_stages(run: Run, node: int) -> NodeStages:
    """Returns the stages of a node, from its steps and its spans of stages. Raises IncompleteDataError."""
    steps = _steps(run, node)
    measured = _window(run, node, steps)
    intervals: dict[str, list[Interval]] = {"measured": [measured]}
    first = int(steps["start_ns"][0])
    if first < measured[0]:
        intervals["warm-up"] = [(first, measured[0])]
    spans: list[tuple[str, int, int]] = []
    path = run.folder.spans(node_ranks(run, node)[0].rank)
    if file_of(path).exists():
        reader = SpanReader(path=path, run_id=run.plan.run_id)
        for block in reader.blocks():
            for row in block[(block["lane"] == STAGE) | (block["lane"] == STAGING)]:
                name = reader.names[int(row["name"])]
                if row["lane"] == STAGING:
                    name = "staging"
                begin = int(row["start_ns"])
                spans.append((name, begin, begin + int(row["duration_ns"])))
    for name, begin, end in spans:
        if name in ("building", "compiling", "staging", "evaluation", "checkpoint"):
            intervals.setdefault(name, []).append((begin, end))
    whole_run = (min([first, *(begin for _, begin, _ in spans)]), max([measured[1], *(end for _, _, end in spans)]))
    pieces = _cut(whole_run, intervals)
    steps_ns = int(steps["step_ns"][steps["warmup"] == 0].sum())
    measured_ns = sum(end - begin for stage, begin, end in pieces if stage == "measured")
    return NodeStages(
        measured=measured, pieces=pieces, unaccounted_s=max(0, measured_ns - steps_ns) / 1e9, has_spans=bool(spans)
    )


def _cut(whole_run: Interval, intervals: dict[str, list[Interval]]) -> tuple[tuple[str, int, int], ...]:
    all_intervals = [whole_run, *itertools.chain.from_iterable(intervals.values())]
    edges = sorted(set(itertools.chain.from_iterable(all_intervals)))
    stages = ["idle"] * (len(edges) - 1)
    for name in _OVERLAYS:
        for start, stop in intervals.get(name, ()):
            first, last = bisect_left(edges, start), bisect_left(edges, stop)
            stages[first:last] = [name] * (last - first)
    pieces: list[tuple[str, int, int]] = []
    for stage, begin, end in zip(stages, edges[:-1], edges[1:], strict=True):
        if pieces and pieces[-1][0] == stage:
            pieces[-1] = (stage, pieces[-1][1], end)
        else:
            pieces.append((stage, begin, end))
    return tuple(pieces)

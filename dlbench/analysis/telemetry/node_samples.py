"""The samples of a node as arrays, their integrals, and the stages of its ranks on the same clock, CLOCK_MONOTONIC.

Between two neighbouring samples a counter or a rate is interpolated linearly (trapezoidal rule). Time before the first
sample, after the last, or in a gap is unknown: it adds nothing, and is reported as missing. A counter goes on in a gap:
its difference counts only in an interval that contains the whole gap.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dlbench.errors import IncompleteDataError
from dlbench.lazy import Array, Flags, Times, np
from dlbench.records.record import RankResult
from dlbench.records.rows.reader import read_columns
from dlbench.records.rows.samples import SamplesReader
from dlbench.records.rows.shared import file_of
from dlbench.records.rows.spans import STAGE, STAGING, SpanReader
from dlbench.records.rows.steps import StepReader
from dlbench.records.scan import Run

EVERY_FIELD = re.compile(".*", re.DOTALL)
MAX_GAP_PERIODS = 5  # Samples further apart than this many of their own periods are not joined.
_NEIGHBOURS = 5
Interval = tuple[int, int]  # Begin and end, nanoseconds of the node's clock.
STAGES = ("idle", "building", "compiling", "staging", "warm-up", "measured", "evaluation", "checkpoint")
"""Stages of a node; idle is the time outside of other stages: before building, after the last step, between stages."""

# Later stages are within earlier ones and count instead of them.
_OVERLAYS = ("building", "compiling", "warm-up", "measured", "staging", "evaluation", "checkpoint")
_SLOW_FACTOR = 10


@dataclass(frozen=True, kw_only=True)
class Amount:
    """The integral over an interval."""

    value: float  # Integral over the known part, in the unit of the counter (joules).
    known_ns: int  # Length of the known part, nanoseconds.
    length_ns: int  # Length of the interval, nanoseconds.

    @property
    def coverage(self) -> float:
        return self.known_ns / self.length_ns if self.length_ns else 1.0

    @property
    def rate(self) -> float | None:
        """The mean over the known part, per second (watts); None if nothing is known."""
        return self.value / self.known_ns * 1e9 if self.known_ns else None

    def __add__(self, other: Amount) -> Amount:
        """Adds two intervals that do not overlap, or two sources over the same one."""
        return Amount(
            value=self.value + other.value,
            known_ns=self.known_ns + other.known_ns,
            length_ns=self.length_ns + other.length_ns,
        )


NOTHING = Amount(value=0.0, known_ns=0, length_ns=0)  # An interval of no length.


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A rate over time, linear between neighbouring samples."""

    time_ns: Times  # Times of the samples, increasing; shape (n,).
    begin_rate: Array  # Rate per second at the start of each piece between two samples; shape (..., max(n - 1, 0)).
    end_rate: Array  # Rate per second at the end of each piece.
    known: Flags  # Whether each piece is known; shape (max(n - 1, 0),).
    bridged: Flags  # Whether it is known only as a whole: a gap over which a counter went on.
    is_counter: bool = False
    resets: int = 0  # Number of times that the counter fell.

    def over(self, begin_ns: int, end_ns: int) -> Amount:
        """Returns the integral from `begin_ns` to `end_ns`; nothing if the end is before the start."""
        return self.between((begin_ns, max(begin_ns, end_ns)))[0]

    def between(self, edges: Sequence[int]) -> list[Amount]:
        """Returns the integrals between neighbouring `edges`, which increase."""
        values, known_ns = self.integrals(edges)
        columns = zip(values.tolist(), known_ns.tolist(), np.diff(edges).tolist(), strict=True)
        return [Amount(value=value, known_ns=known_ns, length_ns=length) for value, known_ns, length in columns]

    def integrals(self, edges: Sequence[int]) -> tuple[Array, Times]:
        """Returns the integrals between neighbouring `edges`, shape (..., edges - 1), and the known nanoseconds."""
        at = np.asarray(edges, dtype=np.int64)
        if not len(self.known):
            return np.zeros((*self.begin_rate.shape[:-1], len(at) - 1)), np.zeros(len(at) - 1, dtype=np.int64)
        lengths = np.diff(self.time_ns)
        amounts = (self.begin_rate + self.end_rate) / 2 * (lengths / 1e9)
        divisible = self.known & ~self.bridged
        inside = np.clip(at, self.time_ns[0], self.time_ns[-1])
        piece = np.clip(np.searchsorted(self.time_ns, inside, side="right") - 1, 0, len(lengths) - 1)
        into = np.where(divisible[piece], inside - self.time_ns[piece], 0)
        # The mean of a line is its value in the middle.
        growth = self.end_rate[..., piece] - self.begin_rate[..., piece]
        middle = self.begin_rate[..., piece] + growth * (into / lengths[piece]) / 2
        values = np.diff(_sums_before(np.where(divisible, amounts, 0.0))[..., piece] + middle * (into / 1e9))
        known_ns = np.diff(_sums_before(np.where(divisible, lengths, 0))[piece] + into)
        # A bridged piece counts only in the interval that contains all of it.
        complete = self.known & self.bridged
        if complete.any():
            first = np.searchsorted(self.time_ns[:-1], at[:-1])
            last = np.maximum(first, np.searchsorted(self.time_ns[1:], at[1:], side="right"))
            bridged_amounts = _sums_before(np.where(complete, amounts, 0.0))
            bridged_ns = _sums_before(np.where(complete, lengths, 0))
            values += bridged_amounts[..., last] - bridged_amounts[..., first]
            known_ns += bridged_ns[last] - bridged_ns[first]
        return values, known_ns

    def known_within(self, begin_ns: int, end_ns: int) -> Flags:
        """Returns the pieces that are known and at least partly in an interval, shape (n - 1,)."""
        start, stop = self.time_ns[:-1], self.time_ns[1:]
        is_whole = (start >= begin_ns) & (stop <= end_ns)
        overlapping: Flags = self.known & (start < end_ns) & (stop > begin_ns) & (is_whole | ~self.bridged)
        return overlapping


def counter_curve(time_ns: Times, values: Array, period_s: float) -> Curve:
    """Returns the curve of a counter with any start value, NaN where it was not read; both arrays have shape (n,).

    A gap over five periods is known only as a whole, the piece of a falling (reset) counter not at all. `values` of
    several counters, shape (counters, n), must have been read at the same times, and not fall.
    """
    times, read = _readable(time_ns, values)
    grown = np.diff(read)
    is_known = np.logical_and.reduce(np.atleast_2d(grown >= 0))
    rate = np.where(is_known, grown, 0.0) / np.diff(times) * 1e9
    return Curve(
        time_ns=times,
        begin_rate=rate,
        end_rate=rate,
        known=is_known,
        bridged=~joined(times, period_s),
        is_counter=True,
        resets=int((~is_known).sum()),
    )


def rate_curve(time_ns: Times, values: Array, period_s: float) -> Curve:
    """Returns the curve of a rate such as power, NaN where it was not read; gaps over five periods are unknown.

    The period is that of neighbouring samples, because a sampler doubles it when its file is full.
    """
    times, read = _readable(time_ns, values)
    near = joined(times, period_s)
    return Curve(
        time_ns=times, begin_rate=read[:-1], end_rate=read[1:], known=near, bridged=np.zeros(len(near), dtype=np.bool_)
    )


def _sums_before(pieces: Any) -> Any:
    """Returns the sum of all pieces before each, and of all of them, shape (..., n + 1)."""
    sums = np.zeros((*pieces.shape[:-1], pieces.shape[-1] + 1), dtype=pieces.dtype)
    np.cumsum(pieces, axis=-1, out=sums[..., 1:])
    return sums


def joined(times: Times, period_s: float) -> Flags:
    """Returns which neighbouring samples are joined, at most five local periods apart, shape (n - 1,).

    The local period is the lower median of up to five gaps on either side, and at most `period_s`.
    """
    # Cached, because mostly all sources of a node were read at the same times.
    return np.frombuffer(_joined(np.ascontiguousarray(times, dtype=np.int64).tobytes(), period_s), dtype=np.bool_)


@lru_cache(maxsize=8)
def _joined(content: bytes, period_s: float) -> bytes:
    gaps = np.diff(np.frombuffer(content, dtype=np.int64))
    if not len(gaps):
        return b""
    # The median is at least the smallest gap.
    if gaps.max() <= MAX_GAP_PERIODS * min(float(gaps.min()), period_s * 1e9):
        return np.ones(len(gaps), dtype=np.bool_).tobytes()
    windows = np.full((2 * _NEIGHBOURS + 1, len(gaps)), np.nan)
    for row, shift in enumerate(range(-_NEIGHBOURS, _NEIGHBOURS + 1)):
        begin, end = max(0, -shift), min(len(gaps), len(gaps) - shift)
        if begin < end:
            windows[row, begin:end] = gaps[begin + shift : end + shift]
    count = np.isfinite(windows).sum(axis=0)
    windows.sort(axis=0)
    local = windows[(count - 1) // 2, np.arange(len(gaps))]
    near: Flags = gaps <= MAX_GAP_PERIODS * np.minimum(local, period_s * 1e9)
    return near.tobytes()


def _readable(time_ns: Times, values: Array) -> tuple[Times, Array]:
    """Returns the samples with a value, each later than the one before."""
    is_finite = np.atleast_2d(np.isfinite(values)).all(axis=0)
    times, read = time_ns[is_finite], values[..., is_finite].astype(np.float64)
    later = np.concatenate([np.ones(min(1, len(times)), dtype=bool), np.diff(times) > 0])
    return times[later], read[..., later]


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
        return self.period_of_values(int(np.isfinite(self.columns[name]).sum()))

    def period_of_values(self, num_values: int) -> float:
        """Returns `period_of` a field with that many values."""
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


def read_node(run: Run, node: int, pattern: re.Pattern[str]) -> NodeSamples:
    """Reads the wanted fields of a node. Raises IncompleteDataError: its file of samples is missing or damaged."""
    reader = SamplesReader(run.folder.samples(node), run.plan.run_id)
    names = tuple(reader.columns)
    rows = reader.read_rows()
    header = reader.header
    period_s = float(header["period_s"])
    watch = run.watch_by_node.get(node)
    if watch:
        period_s = max(period_s, watch.period_s)
    return NodeSamples(
        node_rank=node,
        host=str(header.get("host", "")),
        period_s=period_s,
        time_ns=rows["time_ns"].astype(np.int64),
        columns={name: rows[name].astype(np.float64) for name in _matching(names, pattern)},
        names=names,
        unavailable={str(name): str(why) for name, why in dict(header.get("unavailable", {})).items()},
        facts={str(name): str(value) for name, value in dict(header.get("facts", {})).items()},
        failures=tuple(f"{failure['failed']}: {failure.get('reason', '')}" for failure in reader.failures),
    )


@lru_cache(maxsize=16)  # The nodes of a run mostly have the same fields.
def _matching(names: tuple[str, ...], pattern: re.Pattern[str]) -> tuple[str, ...]:
    return tuple(name for name in names if pattern.fullmatch(name))


def why_not_sampled(run: Run, node: int) -> str:
    """Returns why a node has no samples; empty if it has some."""
    if run.folder.samples(node).exists():
        return ""
    if run.plan.watch is None or not run.plan.watch.sampler:
        return "the run was not sampled (watch.sampler)"
    watched = run.watch_by_node.get(node)
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
    steps: dict[str, Any] = read_columns([reader], ("warmup", "start_ns", "step_ns"))
    return {name: values[0] for name, values in steps.items()}


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

"""Waiting for stragglers: its share of the exchange, the late ranks and why they are late; hosts that leave later.

A synchronous exchange ends when the last rank has sent its gradients, so a late rank waits less. With x[r] the exchange
phase of rank r in one step, it waits

    wait[r] = x[r] - min x .

It is *in time* if wait[r] >= max(wait)/2 (`IN_TIME_SHARE`), else *late*. The step is W, the mean of wait over the ranks
in time, longer than if the late ranks had come with the others, and a late rank is L[r] = W - wait[r] late. Of W,
mean(wait) over all p ranks is in the mean exchange. The remainder, (sum of L)/p, is the late ranks' own work: it is
moved out of the causes in which a late rank exceeds the mean of the ranks in time in this step, in proportion to these
excesses and up to L[r]. So ranks that are D late count with D, and nothing counts twice. All waiting of a step is
caused by its late ranks, in proportion to L[r]; the *last* is the rank that waited least, of equal ones the one with
most work.

The work before an exchange is: optimizer and *other* of the step before, then input wait, copy, forward and backward.

Waiting in collectives within the passes is part of x, but only its sum over all steps of a rank is known: in each step
it is the time above a level of own work, equal in all steps, for which the sum is right (`without_waits`). So ranks
that take turns at longer passes are not detected. Waiting in the update is a second exchange, after the optimizer's
work.

All times are whole nanoseconds: means are rounded down, and waiting is divided without changing its sum.

Limits: x shows late ranks only if all ranks leave an exchange together. Exchanges with leaders, and engines that
release ranks one by one, make W uncertain by the differences of these times. Jitter without a cause in a rank is
waiting too.

**Hosts that leave exchanges later** than the others are the sign of a slow link or NIC.

A host whose messages arrive D late leaves D late, and so enters the next exchange D late, where it waits as long as the
others: no phase shows it, but the time when it leaves does, if the clocks of all nodes are known.

A rank leaves at the start of the step + its phases up to the exchange, on node 0's clock, minus the median of all
ranks; a rank counts with the median over steps, a host by `largest_by_host`. A host is later by that minus the median
of the other hosts; with bounds b of the clocks' errors by at least (own - b) - median of the others' (own + b). Steps
count up to the first pause; on a GPU, whose clock drifts relative to the host's, as many as keep the drift within half
of the threshold.

Limits: behind a host with a slow network interface its neighbour in a ring leaves last, so no host is excluded for it;
in trees some hosts leave later by their position.
"""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import comb
from operator import attrgetter
from typing import NamedTuple

from dlbench.analysis.measures import RunSteps
from dlbench.lazy import Flags, Times, np
from dlbench.records.clocks import MAX_DRIFT_PPM, ClockLine
from dlbench.records.record import Record

WORK_PHASES: Mapping[str, tuple[str, ...]] = {
    "input": ("input", "h2d"),
    "compute": ("forward", "backward", "optimizer"),
    "host": ("other",),
}
"""Causes of a rank's lateness, with the phases of each; `other` is the time outside of phases."""

WORK = tuple(WORK_PHASES)
PHASES_OF_WORK = tuple(itertools.chain.from_iterable(WORK_PHASES.values()))
IN_TIME_SHARE = 0.5  # Share of the longest wait of a step: a rank that waits at least that long is in time.
_AT_ONCE = 1 << 16  # Times (steps x ranks) that are processed together, so that intermediate arrays fit into a cache.
_FEWEST_AT_ONCE = 16  # Fewest steps: those of one rank are next to each other in memory, 64 bytes or more.
LATE = 0.03  # Share of a step by which a late host leaves later; equal to the threshold of own work.
_UP_TO_EXCHANGE = ("input", "h2d", "forward", "backward", "exchange")


@dataclass(frozen=True, kw_only=True)
class LateRank:
    """A late rank: how long others waited for it, and the causes; sums over the measured steps."""

    rank: int
    steps_last: int  # Steps in which it came last and another rank waited.
    waited_ns: int  # Its share of all ranks' waiting in the steps in which it was late, nanoseconds.
    late_ns: dict[str, int]  # Its own time beyond the mean of the ranks in time, up to its lateness, by `WORK`.

    @property
    def order(self) -> tuple[int, int]:
        return -self.waited_ns, self.rank


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Waiting of a whole run; sums over ranks and steps, nanoseconds; together the time of the cause `straggler`."""

    waited_ns: int = 0  # Waiting in the exchange, and in collectives within passes and update.
    moved_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WORK, 0))  # Own work of late ranks.
    moved_phases_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES_OF_WORK, 0))
    """`moved_ns` by phase; the phases of one `WORK` sum to it."""
    ranks: tuple[LateRank, ...] = ()  # Ranks that were late at least once, the longest waited for first.

    @property
    def total_ns(self) -> int:
        return self.waited_ns + sum(self.moved_ns.values())


def num_slowest(ranks: int) -> int:
    """Returns the number of ranks in the slowest 5 %, at least one."""
    return max(1, ranks // 20)


def saved_without_slowest(work: Times) -> int:
    """Returns by how much all steps together would be shorter if the slowest ranks of each were not waited for, ns.

    `work`: own work of each rank in each step, nanoseconds, shape (ranks, steps), two ranks or more.
    """
    last_waited_for = len(work) - 1 - num_slowest(len(work))
    in_time: Times = np.partition(work, last_waited_for, axis=0)[last_waited_for]
    return int((work.max(axis=0) - in_time).sum())


def without_waits(steps: RunSteps, waits: Mapping[str, Times]) -> tuple[RunSteps, Times | None]:
    """Moves the waiting within phases to `exchange`; returns the steps, and the part of it that was in the update.

    `waits`: sums over steps, by phase, nanoseconds, shape (ranks,); at most the time of the phase.
    """
    phases: dict[str, Times] = dict(steps.phase_ns)
    update: Times | None = None
    for name, waited_ns in waits.items():
        beyond = np.stack(
            [_beyond(times, int(rank_waited_ns)) for times, rank_waited_ns in zip(phases[name], waited_ns, strict=True)]
        )
        phases[name] = phases[name] - beyond
        phases["exchange"] = phases["exchange"] + beyond
        if name == "optimizer":
            update = beyond
    return replace(steps, phase_ns=phases), update


def _beyond(times: Times, total_ns: int) -> Times:
    """Returns the part of each time above a level, which is such that the parts sum to `total_ns`; shape (steps,)."""
    high = np.sort(times)[::-1]
    total = np.cumsum(high)
    # The number of times above the level.
    above = int(np.searchsorted(total - np.arange(1, len(high) + 1) * high, total_ns, side="right"))
    beyond: Times = np.maximum(times - (int(total[above - 1]) - total_ns) // above, 0)
    # The level is rounded down.
    beyond[np.flatnonzero(beyond)[: int(beyond.sum()) - total_ns]] -= 1
    return beyond


def waiting(steps: RunSteps, update: Times | None = None) -> Waiting:
    """Returns the waiting in the measured steps of one run; none with one rank.

    `update`: the part of the exchange phase that ranks waited in the update, shape (ranks, steps).
    """
    ranks, count = steps.step_ns.shape
    if ranks == 1:
        return Waiting()
    if update is not None and not update.any():
        update = None
    by_rank = {name: np.zeros(ranks, dtype=np.int64) for name in (*WORK, "last", "waited", "steps_late")}
    by_phase = dict.fromkeys(PHASES_OF_WORK, 0)
    waited = 0
    for block in step_blocks(ranks, count):
        exchange, work = _exchanges_and_work(steps, update, block)
        wait: Times = exchange - exchange.min(axis=0)
        late = _late_ranks(wait)
        by_rank["last"] += _steps_last(wait, work, block.stop - block.start)
        by_rank["steps_late"] += np.bincount(late.rank, minlength=ranks)
        np.add.at(by_rank["waited"], late.rank, _shared_out(late))
        for name, charged, charged_by_phase in _moved(late, work):
            np.add.at(by_rank[name], late.rank, charged)
            for phase, charged_ns in charged_by_phase.items():
                by_phase[phase] += charged_ns
        waited += int(late.waited_ns.sum())
    totals = {name: values.tolist() for name, values in by_rank.items()}
    late_ranks = [
        LateRank(
            rank=rank,
            steps_last=totals["last"][rank],
            waited_ns=totals["waited"][rank],
            late_ns={name: totals[name][rank] for name in WORK},
        )
        for rank in np.flatnonzero(by_rank["steps_late"]).tolist()
    ]
    return Waiting(
        waited_ns=waited,
        moved_ns={name: sum(totals[name]) for name in WORK},
        moved_phases_ns=by_phase,
        ranks=tuple(sorted(late_ranks, key=attrgetter("order"))),
    )


def step_blocks(ranks: int, count: int) -> Iterator[slice]:
    """Yields slices of steps that are processed together."""
    width = max(_FEWEST_AT_ONCE, _AT_ONCE // ranks)
    for begin in range(0, count, width):
        yield slice(begin, min(begin + width, count))


def _exchanges_and_work(steps: RunSteps, update: Times | None, block: slice) -> tuple[Times, Times]:
    """Returns the exchanges of a block, shape (ranks, exchanges), and the work before each, by `PHASES_OF_WORK`, shape
    (phases, ranks, exchanges). With an update, the exchanges in it follow those of the backward passes.

    Optimizer and other are those of the step before; 0 in the first, before which all ranks waited for each other.
    """
    exchange: Times = steps.phase_ns["exchange"][:, block]
    ranks, num_steps = exchange.shape
    num_exchanges = num_steps if update is None else 2 * num_steps
    work = np.zeros((len(PHASES_OF_WORK), ranks, num_exchanges), dtype=steps.step_ns.dtype)
    work_by_phase = dict(zip(PHASES_OF_WORK, work, strict=True))
    for name in ("input", "h2d", "forward", "backward"):
        work_by_phase[name][:, :num_steps] = steps.phase_ns[name][:, block]
    before = slice(max(0, block.start - 1), block.stop - 1)
    first = num_steps - (before.stop - before.start)
    other = work_by_phase["other"][:, first:num_steps]
    other += steps.step_ns[:, before]
    for times in steps.phase_ns.values():
        other -= times[:, before]
    if update is None:
        work_by_phase["optimizer"][:, first:] = steps.phase_ns["optimizer"][:, before]
    else:
        work_by_phase["optimizer"][:, num_steps:] = steps.phase_ns["optimizer"][:, block]
        exchange = np.concatenate([exchange - update[:, block], update[:, block]], axis=1)
    return exchange, work


class _LateRanks(NamedTuple):
    """The late ranks of some exchanges; arrays of shape (late ranks,), in the order of the exchanges, then the ranks.

    Only late ranks are processed further: most of a run is not late.
    """

    rank: Times
    exchange: Times  # Number of its exchange.
    late_ns: Times  # L, at least 1.
    num_in_time: Times  # Ranks in time, shape (exchanges,).
    waited_ns: Times  # Waiting of all ranks, shape (exchanges,).


def _late_ranks(wait: Times) -> _LateRanks:
    """Returns the late ranks; `wait`: the waiting of each rank in each exchange, shape (ranks, exchanges)."""
    rank, exchange = _places(wait < np.ceil(IN_TIME_SHARE * wait.max(axis=0)).astype(wait.dtype))
    late_waits = wait[rank, exchange].astype(np.int64)
    num_in_time = len(wait) - np.bincount(exchange, minlength=wait.shape[1])
    waited_ns: Times = wait.sum(axis=0, dtype=np.int64)
    waited_in_time_ns = waited_ns.copy()
    np.subtract.at(waited_in_time_ns, exchange, late_waits)
    late_ns = (waited_in_time_ns // num_in_time)[exchange] - late_waits
    return _LateRanks(rank, exchange, late_ns, num_in_time, waited_ns)


def _places(is_counted: Flags) -> tuple[Times, Times]:
    """Returns rank and exchange of each flag that is set, in the order of the exchanges, then the ranks."""
    ranks = len(is_counted)
    places = np.flatnonzero(is_counted.T)  # A third of the time of `nonzero`.
    exchanges = places // ranks
    return places - exchanges * ranks, exchanges


def _steps_last(wait: Times, work: Times, steps: int) -> Times:
    """Returns in how many steps each rank came last, shape (ranks,); of two exchanges the longer wait counts."""
    rank, exchange = _places(wait == 0)
    work_ns = work[:, rank, exchange].sum(axis=0, dtype=np.int64)
    order = np.lexsort((rank, -work_ns, exchange))
    _, first = np.unique(exchange[order], return_index=True)
    last = rank[order][first]
    longest = wait.max(axis=0)
    counted = longest.reshape(-1, steps).argmax(axis=0) * steps + np.arange(steps)
    return np.bincount(last[counted[longest[counted] > 0]], minlength=len(wait))


def _moved(late: _LateRanks, work: Times) -> Iterator[tuple[str, Times, dict[str, int]]]:
    """Yields each `WORK` with the moved time of every late rank, and their sum by `PHASES_OF_WORK`.

    It is the excess of late ranks over those in time, scaled down in proportion if the sum exceeds the lateness.
    """
    late_work = np.take(work.reshape(len(work), -1), late.rank * work.shape[2] + late.exchange, axis=1).astype(np.int64)
    in_time = work.sum(axis=1, dtype=np.int64)
    for sums, values in zip(in_time, late_work, strict=True):
        np.subtract.at(sums, late.exchange, values)

    def excess(phases: Sequence[str]) -> Times:
        rows = [PHASES_OF_WORK.index(phase) for phase in phases]
        beyond: Times = reduce(np.add, [late_work[row] for row in rows])
        beyond = beyond - (in_time[rows].sum(axis=0) // late.num_in_time)[late.exchange]
        return np.maximum(beyond, 0, out=beyond)

    excesses = {name: excess(phases) for name, phases in WORK_PHASES.items()}
    excess_sum: Times = reduce(np.add, excesses.values())
    # In floating point, because the product of two times in nanoseconds need not fit into 64 bits.
    share = late.late_ns / np.maximum(excess_sum, 1)
    fits = excess_sum <= late.late_ns
    for name, values in excesses.items():
        charged = np.where(fits, values, np.floor(values * share).astype(np.int64))
        phases = WORK_PHASES[name]
        if len(phases) == 1:
            yield name, charged, {phases[0]: int(charged.sum())}
        else:
            yield name, charged, _by_phase(charged, {phase: excess([phase]) for phase in phases})


def _by_phase(charged: Times, excess: Mapping[str, Times]) -> dict[str, int]:
    """Returns the sum of moved time by phase; each time is divided in proportion to the excess of the phases."""
    total = np.maximum(reduce(np.add, excess.values()), 1)
    reached, before, sums = np.zeros_like(charged), np.zeros_like(charged), {}
    *others, last = excess
    for name in others:
        reached += excess[name]
        upto = np.minimum(np.floor(charged * (reached / total)).astype(np.int64), charged)
        sums[name] = int((upto - before).sum())
        before = upto
    return {**sums, last: int((charged - before).sum())}


def _shared_out(late: _LateRanks) -> Times:
    """Divides the waiting of each exchange among its late ranks, in proportion to their lateness."""
    begins = np.searchsorted(late.exchange, np.arange(len(late.waited_ns)))
    reached = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(late.late_ns)])
    before = reached[begins][late.exchange]
    ends = np.append(begins[1:], len(late.exchange))
    total = reached[ends][late.exchange] - before
    reached = reached[1:] - before
    waited_ns = late.waited_ns[late.exchange]
    # Floors of the running sum keep the total; in floating point as in `_moved`, so the end is set exactly.
    upto: Times = np.minimum(np.floor(waited_ns * (reached / total)).astype(np.int64), waited_ns)
    upto = np.where(reached == total, waited_ns, upto)
    shares = upto.copy()
    is_later = late.exchange[1:] == late.exchange[:-1]
    shares[1:] -= np.where(is_later, upto[:-1], 0)
    return shares


def largest_by_host(hosts: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """Returns the largest value of each host's ranks, corrected to the number of ranks of the host with fewest.

    The largest of eight values exceeds that of four by chance. With k ranks on the host with fewest, a host of m counts
    with the mean, over all choices of k of its ranks, of the largest: sum of C(i - 1, k - 1) / C(m, k) x[i], x
    ascending.
    """
    values_by_host: dict[str, list[float]] = {}
    for host, value in zip(hosts, values, strict=True):
        values_by_host.setdefault(host, []).append(value)
    fewest = min(map(len, values_by_host.values()), default=0)
    largest = {}
    for host, host_values in values_by_host.items():
        ordered = sorted(host_values)
        largest[host] = ordered[-1]
        if len(ordered) > fewest:
            weights = (comb(below, fewest - 1) for below in range(len(ordered)))
            choices = comb(len(ordered), fewest)
            largest[host] = sum(value * weight / choices for value, weight in zip(ordered, weights, strict=True))
    return largest


def medians_of_others(values: Mapping[str, float]) -> dict[str, float]:
    """Returns for each host the median over the other hosts, of which there is one or more."""
    ordered, medians = sorted(values.values()), {}
    middle = (len(ordered) - 2) // 2
    for host, host_value in values.items():
        # The two or three values in the middle, without the host's own or the one that it moves out of the middle.
        near = ordered[middle : len(ordered) - middle]
        del near[min(max(bisect_left(ordered, host_value) - middle, 0), len(near) - 1)]
        medians[host] = statistics.median(near)
    return medians


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """The time when a host leaves exchanges in one run; shares of the mean step (1)."""

    later: float  # Time by which it leaves after the other hosts, median over steps.
    at_least: float  # `later` minus the error bounds of the clocks; negative if that is not certain.


def leaving(record: Record, steps: RunSteps) -> Mapping[str, Leaving]:
    """Returns when hosts leave exchanges, by host; empty on one host, or if the clock of any node is not known."""
    if record.watch is None:
        return {}
    ranks = sorted(record.ranks, key=attrgetter("rank"))
    hosts = [rank.host for rank in ranks]
    clocks = {node.node_rank: node.clock for node in record.watch.nodes}
    lines = [clocks.get(rank.node_rank) for rank in ranks]
    known_lines = [line for line in lines if line is not None and line.is_known]
    if len(set(hosts)) < 2 or len(known_lines) < len(ranks):
        return {}
    count, drift_ppm = steps.unbroken, 0
    if record.clock == "cuda-events":
        count, drift_ppm = min(count, int(LATE / 2 * 1_000_000 / MAX_DRIFT_PPM)), MAX_DRIFT_PPM
    first, last = (_up_to_exchange(steps, slice(number, number + 1))[:, 0] for number in (0, count - 1))
    last += steps.step_ns[:, : count - 1].sum(axis=1)
    clocks_of_ranks = _ClocksOfRanks.of(known_lines, steps.begin_ns + first, steps.begin_ns + last)
    later_ns = np.empty((len(ranks), count), dtype=steps.step_ns.dtype)
    begin_ns = -first
    for block in step_blocks(len(ranks), count):
        left_ns = _up_to_exchange(steps, block)
        left_ns += begin_ns[:, None]
        ends_ns = np.cumsum(steps.step_ns[:, block], axis=1)
        left_ns[:, 1:] += ends_ns[:, :-1]
        begin_ns = begin_ns + ends_ns[:, -1]
        clocks_of_ranks.turn(left_ns)
        left_ns -= np.median(left_ns, axis=0).astype(np.int64)
        if not block.start:
            # Minus that of the first step, most times have 4 bytes.
            first_later_ns = left_ns[:, 0].copy()
        left_ns -= first_later_ns[:, None]
        if np.abs(left_ns).max() > np.iinfo(later_ns.dtype).max:
            later_ns = later_ns.astype(np.int64)
        later_ns[:, block] = left_ns
    medians_ns = first_later_ns + np.median(later_ns, axis=1, overwrite_input=True)
    leaving_ns = largest_by_host(hosts, medians_ns.tolist())
    step_ns = steps.step_ns[:, :count]
    drift = int(step_ns.sum(axis=1).max()) * drift_ppm / 1_000_000 + max(rank.clock_error_s for rank in ranks) * 1e9
    bound = dict.fromkeys(leaving_ns, drift)
    for host, clock_bound in zip(hosts, clocks_of_ranks.bounds_ns.tolist(), strict=True):
        bound[host] = max(bound[host], clock_bound + drift)
    others = medians_of_others(leaving_ns)
    # A median grows with each of its values, so this bounds the median of the others from above.
    latest = medians_of_others({host: leaving_ns[host] + bound[host] for host in leaving_ns})
    mean = float(step_ns.mean())
    return {
        host: Leaving(
            later=(leaving_ns[host] - others[host]) / mean,
            at_least=(leaving_ns[host] - bound[host] - latest[host]) / mean,
        )
        for host in sorted(leaving_ns)
    }


def _up_to_exchange(steps: RunSteps, block: slice) -> Times:
    """Returns the time from the start of each step to the end of its exchange, shape (ranks, steps of the block)."""
    first, *others = (steps.phase_ns[name][:, block] for name in _UP_TO_EXCHANGE)
    total = first.astype(np.int64)
    for times in others:
        total += times
    return total


@dataclass(frozen=True, kw_only=True)
class _ClocksOfRanks:
    """Converts times of ranks to node 0's clock, by lines between moments; arrays of shape (moments, ranks)."""

    first_ns: Times  # Local time from which moments count, shape (ranks,).
    start_ns: Times  # Offset at that time, shape (ranks,).
    moments_ns: Times  # From 0 to the last time of the rank, ascending; between these the offset is linear.
    turned_ns: Times  # Offsets at the moments, minus that of the first.
    bounds_ns: Times  # Largest bound of the error of any moment, shape (ranks,).

    @staticmethod
    def of(lines: Sequence[ClockLine], first_ns: Times, last_ns: Times) -> _ClocksOfRanks:
        """Returns the clocks of ranks with these lines between their first and last times, shape (ranks,)."""
        num_points = max(len(line.used_points) for line in lines)
        moments = np.empty((num_points + 2, len(lines)), dtype=np.int64)
        offsets, bounds = np.empty_like(moments), np.empty_like(first_ns)
        ranks_by_node: dict[int, list[int]] = {}
        for rank, line in enumerate(lines):
            ranks_by_node.setdefault(line.node_rank, []).append(rank)
        for ranks in ranks_by_node.values():
            line = lines[ranks[0]]
            points = np.full((num_points + 2, 1), np.iinfo(np.int64).max)
            points[0] = np.iinfo(np.int64).min
            points[1 : len(line.used_points) + 1, 0] = [point.local_ns for point in line.used_points]
            # A point outside of a rank's times becomes a second first or last one.
            moments_of_node = np.clip(points, first_ns[ranks], last_ns[ranks])
            moments[:, ranks] = moments_of_node
            offsets[:, ranks] = line.offsets_at(moments_of_node)
            bounds[ranks] = line.bounds_at(moments_of_node).max(axis=0)
        return _ClocksOfRanks(
            first_ns=first_ns,
            start_ns=offsets[0],
            moments_ns=moments - first_ns,
            turned_ns=offsets - offsets[0],
            bounds_ns=bounds,
        )

    def turn(self, since_ns: Times) -> None:
        """Converts times since `first_ns`, shape (ranks, times), in place."""
        moments, turned = self.moments_ns[:, :, None], self.turned_ns[:, :, None]
        slopes = np.diff(turned, axis=0) / np.maximum(np.diff(moments, axis=0), 1)
        since = since_ns.astype(np.float64)
        offsets = slopes[0] * since
        for moment, offset, slope in zip(moments[1:-1], turned[1:-1], slopes[1:], strict=True):
            offsets = np.where(since >= moment, offset + slope * (since - moment), offsets)
        since_ns += (self.first_ns + self.start_ns)[:, None]
        since_ns += np.rint(offsets, out=offsets).astype(np.int64)

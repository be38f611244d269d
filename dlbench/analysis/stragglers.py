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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import comb
from operator import attrgetter

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
    by_rank = dict.fromkeys((*WORK, "last", "waited", "late"), np.zeros(ranks, dtype=np.int64))
    by_phase = dict.fromkeys(PHASES_OF_WORK, 0)
    waited = 0
    width = max(1, _AT_ONCE // ranks)
    for begin in range(0, count, width):
        block = slice(begin, begin + width)
        exchange = steps.phase_ns["exchange"][:, block]
        phases = _phases_before_exchange(steps, block)
        num_steps = exchange.shape[1]
        if update is not None:
            update_ns = update[:, block]
            exchange = np.concatenate([exchange - update_ns, update_ns], axis=1)
            zeros = np.zeros_like(update_ns)
            for name in phases.keys() - {"optimizer"}:
                phases[name] = np.concatenate([phases[name], zeros], axis=1)
            phases["optimizer"] = np.concatenate([zeros, steps.phase_ns["optimizer"][:, block]], axis=1)
        wait: Times = exchange - exchange.min(axis=0)
        in_time = wait >= IN_TIME_SHARE * wait.max(axis=0)
        # L of the late ranks, at least 1; 0 for those in time.
        late: Times = _summed(wait, in_time) // in_time.sum(axis=0) - wait
        late[in_time] = 0
        work = {name: reduce(np.add, map(phases.__getitem__, parts)) for name, parts in WORK_PHASES.items()}
        moved, moved_by_phase = _moved(late, in_time, work, phases)
        moved["last"] = _steps_last(wait, work, num_steps)
        moved["waited"] = _shared_out(wait.sum(axis=0), late).sum(axis=1)
        moved["late"] = late.max(axis=1)
        by_rank = {name: by_rank[name] + values for name, values in moved.items()}
        by_phase = {name: value + moved_by_phase[name] for name, value in by_phase.items()}
        waited += int(wait.sum())
    late_ranks = [
        LateRank(
            rank=rank,
            steps_last=int(by_rank["last"][rank]),
            waited_ns=int(by_rank["waited"][rank]),
            late_ns={name: int(by_rank[name][rank]) for name in WORK},
        )
        for rank in np.flatnonzero(by_rank["late"]).tolist()
    ]
    return Waiting(
        waited_ns=waited,
        moved_ns={name: int(by_rank[name].sum()) for name in WORK},
        moved_phases_ns=by_phase,
        ranks=tuple(sorted(late_ranks, key=attrgetter("order"))),
    )


def _phases_before_exchange(steps: RunSteps, block: slice) -> dict[str, Times]:
    """Returns the work of each rank between two exchanges, by `PHASES_OF_WORK`; shape (ranks, steps of the block).

    Optimizer and other are those of the step before; 0 in the first, before which all ranks waited for each other.
    """
    phases = {name: steps.phase_ns[name][:, block] for name in ("input", "h2d", "forward", "backward")}
    before = slice(max(0, block.start - 1), block.start + phases["input"].shape[1] - 1)
    sliced = {name: times[:, before] for name, times in steps.phase_ns.items()}
    other_ns = replace(steps, step_ns=steps.step_ns[:, before], phase_ns=sliced).other_ns
    for name, times in (("optimizer", sliced["optimizer"]), ("other", other_ns)):
        if not block.start:
            times = np.pad(times, ((0, 0), (1, 0)))
        phases[name] = times
    return phases


def _summed(times: Times, is_counted: Flags) -> Times:
    """Returns the sum of the ranks with a flag, shape (steps,): four times as fast as `sum` with `where`."""
    total: Times = np.einsum("rs,rs->s", times, is_counted)
    return total


def _steps_last(wait: Times, work: Mapping[str, Times], steps: int) -> Times:
    """Returns in how many steps each rank came last, shape (ranks,); of two exchanges the longer wait counts."""
    total = reduce(np.add, work.values())
    total[wait > 0] = np.iinfo(np.int64).min
    longest = wait.max(axis=0)
    counted = longest.reshape(-1, steps).argmax(axis=0) * steps + np.arange(steps)
    last = total.argmax(axis=0)[counted[longest[counted] > 0]]
    return np.bincount(last, minlength=len(wait)).astype(np.int64)


def _moved(
    late: Times, in_time: Flags, work: Mapping[str, Times], phases: Mapping[str, Times]
) -> tuple[dict[str, Times], dict[str, int]]:
    """Returns the moved time of each rank by `WORK`, shape (ranks,), and of all ranks by `PHASES_OF_WORK`.

    It is the excess of late ranks over those in time, scaled down in proportion if the sum exceeds the lateness.
    """
    # Only late ranks are processed: most of a run is not late.
    is_late = late > 0
    place = np.flatnonzero(is_late)
    column = place % late.shape[1]
    lateness = late.ravel()[place]
    count = in_time.sum(axis=0)

    def excess(times: Times) -> Times:
        beyond: Times = times.ravel()[place] - (_summed(times, in_time) // count)[column]
        return np.maximum(beyond, 0, out=beyond)

    beyond = {name: excess(times) for name, times in work.items()}
    excess_sum: Times = np.zeros_like(lateness)
    for values in beyond.values():
        excess_sum += values
    # In floating point, because the product of two times in nanoseconds need not fit into 64 bits.
    share = lateness / np.maximum(excess_sum, 1)
    fits = excess_sum <= lateness
    ends = np.cumsum(is_late.sum(axis=1))
    by_rank: dict[str, Times] = {}
    by_phase: dict[str, int] = {}
    for name, values in beyond.items():
        charged = np.where(fits, values, np.floor(values * share).astype(np.int64))
        # Sums of consecutive pieces, by the end of each.
        total = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(charged)])[ends]
        by_rank[name] = np.diff(total, prepend=0)
        by_phase |= _by_phase(charged, {phase: excess(phases[phase]) for phase in WORK_PHASES[name]})
    return by_rank, by_phase


def _by_phase(charged: Times, excess: Mapping[str, Times]) -> dict[str, int]:
    """Returns the sum of moved time by phase; each time is divided in proportion to the excess of the phases."""
    if len(excess) == 1:
        return {name: int(charged.sum()) for name in excess}
    total = np.maximum(reduce(np.add, excess.values()), 1)
    reached, before, sums = np.zeros_like(charged), np.zeros_like(charged), {}
    *others, last = excess
    for name in others:
        reached += excess[name]
        upto = np.minimum(np.floor(charged * (reached / total)).astype(np.int64), charged)
        sums[name] = int((upto - before).sum())
        before = upto
    return {**sums, last: int((charged - before).sum())}


def _shared_out(waited: Times, late: Times) -> Times:
    """Divides the waiting of each step, shape (steps,), among its late ranks in proportion to their lateness."""
    reached = np.cumsum(late, axis=0)
    total = np.maximum(reached[-1], 1)
    # Floors of the running sum keep the total; in floating point as in `_moved`, so the end is set exactly.
    upto: Times = np.minimum(np.floor(waited * (reached / total)).astype(np.int64), waited)
    upto = np.where(reached == total, waited, upto)
    upto[1:] -= upto[:-1].copy()
    return upto


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
    step_ns = steps.step_ns[:, :count]
    # In place: in large runs each of these arrays is a large part of the memory.
    left_ns = np.cumsum(step_ns, axis=1)
    left_ns -= step_ns
    for name in _UP_TO_EXCHANGE:
        left_ns += steps.phase_ns[name][:, :count]
    left_ns += steps.begin_ns[:, None]
    bounds = [_to_node_0(line, times) for line, times in zip(known_lines, left_ns, strict=True)]
    # A few steps at a time, because the median copies.
    for block in np.array_split(left_ns, max(1, count // 64), axis=1):
        block -= np.median(block, axis=0).astype(np.int64)
    leaving_ns = largest_by_host(hosts, np.median(left_ns, axis=1, overwrite_input=True).tolist())
    drift = int(step_ns.sum(axis=1).max()) * drift_ppm / 1_000_000 + max(rank.clock_error_s for rank in ranks) * 1e9
    bound = dict.fromkeys(leaving_ns, drift)
    for host, clock_bound in zip(hosts, bounds, strict=True):
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


def _to_node_0(line: ClockLine, times: Times) -> int:
    """Converts ascending times to node 0's clock, in place; returns the largest bound of the error, nanoseconds."""
    first, last = int(times[0]), int(times[-1])
    # Between these moments the offset is linear.
    moments = sorted({first, *(point.local_ns for point in line.used_points if first < point.local_ns < last), last})
    start = line.offset_at(first)
    turned = np.interp(
        times - first, [moment - first for moment in moments], [line.offset_at(moment) - start for moment in moments]
    )
    times += start + np.rint(turned).astype(np.int64)
    bounds = [line.bound_at(moment) for moment in moments]
    return max(bound for bound in bounds if bound is not None)

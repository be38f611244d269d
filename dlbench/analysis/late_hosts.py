"""Finds hosts that leave exchanges later than the others, the sign of a slow link or NIC.

A host whose own work takes D longer enters the exchange D late and leaves it with the others. A host whose messages
arrive D late leaves D late, begins its next step D late, and so enters the next exchange D late, where it waits as
long as the others: the length of no phase shows it, because every rank's exchange is its step minus its own work. The
time when it leaves does, if the clocks of all nodes are known (`dlbench.records.clocks`).

In every step a rank leaves at the start of the step + its phases up to the exchange, on node 0's clock, minus the
median of all ranks; a rank counts with the median over steps, a host by `largest_by_host`. A host is later by that
minus the median of the other hosts. With bounds b of the clocks' errors it is later by at least (own - b) - median of
the others' (own + b).

Steps count from the first measured one to the first pause. On a GPU their lengths are those of its own clock, which may
drift relative to the host's: only as many count as keep the drift within half of the threshold.

Limits: a host that leaves late has a slow link, or receives over one: behind a host with a slow network interface, its
neighbour in a ring leaves last. So no host is excluded for it. In trees some hosts leave later by their position.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from operator import attrgetter

from dlbench.analysis.measures import RunSteps
from dlbench.lazy import Times, np
from dlbench.records.clocks import MAX_DRIFT_PPM, ClockLine
from dlbench.records.record import Record


def largest_by_host(hosts: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """Returns the largest value of each host's ranks, corrected to the number of ranks of the host with fewest.

    All ranks wait for the slowest, so a host is as slow as its slowest rank; but the largest of eight values exceeds
    that of four by chance alone. With k ranks on the host with fewest, a host of m counts with the mean, over all
    choices of k of its ranks, of the largest: sum of C(i - 1, k - 1) / C(m, k) x[i], x ascending. Both arguments have
    one item per rank.
    """
    of_host: dict[str, list[float]] = {}
    for host, value in zip(hosts, values, strict=True):
        of_host.setdefault(host, []).append(value)
    fewest = min(map(len, of_host.values()), default=0)
    largest = {}
    for host, host_values in of_host.items():
        ordered = sorted(host_values)
        largest[host] = ordered[-1]
        if len(ordered) > fewest:
            weights = (comb(below, fewest - 1) for below in range(len(ordered)))
            choices = comb(len(ordered), fewest)
            largest[host] = sum(value * weight / choices for value, weight in zip(ordered, weights, strict=True))
    return largest


def of_others(values: Mapping[str, float]) -> dict[str, float]:
    """Returns for each host the median over the others; there must be two hosts or more."""
    ordered, medians = sorted(values.values()), {}
    middle = (len(ordered) - 2) // 2
    for host, host_value in values.items():
        place = bisect_left(ordered, host_value)
        near = [ordered[at + (at >= place)] for at in range(middle, len(ordered) - 1 - middle)]
        medians[host] = statistics.median(near)
    return medians


LATE = 0.03  # Share of a step by which a late host leaves later; equal to the threshold of own work.

_UP_TO_EXCHANGE = ("input", "h2d", "forward", "backward", "exchange")


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
    others = of_others(leaving_ns)
    # A median grows with each of its values, so this bounds the median of the others from above.
    latest = of_others({host: leaving_ns[host] + bound[host] for host in leaving_ns})
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

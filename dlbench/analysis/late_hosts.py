"""Which host leaves the exchange later than the others: what a slow link or NIC does, and a slow host does not.

A host whose own work takes D longer comes D late to the exchange and leaves it with the others. A host whose messages
arrive D late leaves D late, begins its next step D late, and so comes D late to the next exchange, where it waits as
long as anybody: no length of a phase shows it, neither its own work nor its exchange, because every rank's exchange is
its step less its own work. The moments do, where the clocks of all nodes are known (`dlbench.records.clocks`).

In every step a rank leaves at the start of the step + its phases up to the exchange, on node 0's clock, less the median
of all ranks; a rank counts with the median over steps, a host with its ranks as `by_host.largest_by_host` does. A
host leaves later by that less the median of the other hosts. With b the bounds of the clocks' errors it is certain that
it leaves later by (own - b) - median of the others' (own + b).

Steps count from the first measured one to the first pause. On a GPU their lengths are those of its own clock, which may
drift against the host's: as many of them count as keep that within half of what is looked for.

Limits: a host that leaves late has a slow link, or receives over one: behind a host whose network interface lacks
bandwidth, its neighbour in a ring leaves last. So no host is excluded for it. In trees some hosts leave later by their
place.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb

from dlbench.analysis.measures import RunSteps
from dlbench.lazy import Times, np
from dlbench.records.clocks import MAX_DRIFT_PPM, ClockLine
from dlbench.records.record import Record


def largest_by_host(hosts: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """The largest value of each host's ranks, as if every host had as many ranks as the one with fewest.

    All ranks wait for the slowest, so a host is as slow as its slowest rank; but the largest of eight values is larger
    than that of four by chance alone. With k ranks on the host with fewest, a host of m counts with the mean, over all
    choices of k of its ranks, of the largest: sum of C(i - 1, k - 1) / C(m, k) x[i], x ascending. Both arguments have
    one item per rank.
    """
    of_host: dict[str, list[float]] = {}
    for host, value in zip(hosts, values, strict=True):
        of_host.setdefault(host, []).append(value)
    fewest = min(map(len, of_host.values()), default=0)
    largest = {}
    for host, own in of_host.items():
        ordered = sorted(own)
        largest[host] = ordered[-1]
        if len(ordered) > fewest:
            weights = (comb(below, fewest - 1) for below in range(len(ordered)))
            choices = comb(len(ordered), fewest)
            largest[host] = sum(value * weight / choices for value, weight in zip(ordered, weights, strict=True))
    return largest


def of_others(values: Mapping[str, float]) -> dict[str, float]:
    """For each host the median over the others; for two hosts or more."""
    ordered, medians = sorted(values.values()), {}
    middle = (len(ordered) - 2) // 2
    for host, own in values.items():
        place = bisect_left(ordered, own)
        near = [ordered[at + (at >= place)] for at in range(middle, len(ordered) - 1 - middle)]
        medians[host] = statistics.median(near)
    return medians


LATE = 0.03  # Share of a step by which a late host leaves later: that of own work, because all wait for it.

_UP_TO_EXCHANGE = ("input", "h2d", "forward", "backward", "exchange")


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """One host in one run; shares of the mean step (1)."""

    later: float  # By how much later than the other hosts it leaves an exchange, median over steps.
    at_least: float  # The same, as far as it is certain for all that the clocks may be off; negative where it is not.


def leaving(record: Record, steps: RunSteps) -> Mapping[str, Leaving]:
    """By host; empty for a run on one host, and where the clock of any node is not known."""
    ranks = sorted(record.ranks, key=lambda rank: rank.rank)
    hosts = [rank.host for rank in ranks]
    clocks = {} if record.watch is None else {node.node_rank: node.clock for node in record.watch.nodes}
    lines = [clocks.get(rank.node_rank) for rank in ranks]
    known = [line for line in lines if line is not None and line.is_known]
    if len(set(hosts)) < 2 or len(known) < len(ranks):
        return {}
    count, drift_ppm = steps.unbroken, 0
    if record.clock == "cuda-events":
        count, drift_ppm = min(count, int(LATE / 2 * 1_000_000 / MAX_DRIFT_PPM)), MAX_DRIFT_PPM
    step_ns = steps.step_ns[:, :count]
    # In place: for large runs each of these is a large part of all memory.
    left_ns = np.cumsum(step_ns, axis=1)
    left_ns -= step_ns
    for name in _UP_TO_EXCHANGE:
        left_ns += steps.phase_ns[name][:, :count]
    left_ns += steps.begin_ns[:, None]
    bounds = [_to_node_0(line, times) for line, times in zip(known, left_ns, strict=True)]
    for some in np.array_split(left_ns, max(1, count // 64), axis=1):  # views; the median copies
        some -= np.median(some, axis=0).astype(np.int64)
    own = largest_by_host(hosts, np.median(left_ns, axis=1, overwrite_input=True).tolist())
    drift = int(step_ns.sum(axis=1).max()) * drift_ppm / 1_000_000 + max(rank.clock_error_s for rank in ranks) * 1e9
    bound = dict.fromkeys(own, drift)
    for host, one in zip(hosts, bounds, strict=True):
        bound[host] = max(bound[host], one + drift)
    others = of_others(own)
    # A median rises with each of its values.
    latest = of_others({host: own[host] + bound[host] for host in own})
    mean = float(step_ns.mean())
    return {
        host: Leaving(later=(own[host] - others[host]) / mean, at_least=(own[host] - bound[host] - latest[host]) / mean)
        for host in sorted(own)
    }


def _to_node_0(line: ClockLine, times: Times) -> int:
    """Sets ascending times to node 0's clock, in place; returns the largest bound of the error, nanoseconds."""
    first, last = int(times[0]), int(times[-1])
    # Between these the offset is a straight line.
    at = sorted({first, *(one.local_ns for one in line.used_points if first < one.local_ns < last), last})
    start = line.offset_at(first)
    turned = np.interp(times - first, [one - first for one in at], [line.offset_at(one) - start for one in at])
    times += start + np.rint(turned).astype(np.int64)
    return max(bound for one in at if (bound := line.bound_at(one)) is not None)

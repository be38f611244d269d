"""Figures of ranks become figures of hosts, one host beside the others of its run."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import comb


def largest_by_host(hosts: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """The largest value of each host's ranks, as if every host had as many ranks as the one with fewest.

    All ranks wait for the slowest, so a host is as slow as its slowest rank; but the largest of eight values is larger
    than that of four by chance alone. With k ranks on the host with fewest, a host of m counts with the mean, over all
    choices of k of its ranks, of the largest: sum of C(i - 1, k - 1) / C(m, k) x[i], x ascending.

    Args:
        hosts: host of each rank.
        values: one for each rank.
    """
    of_host: dict[str, list[float]] = {}
    for host, value in zip(hosts, values, strict=True):
        of_host.setdefault(host, []).append(value)
    fewest = min(map(len, of_host.values()), default=0)
    return {host: _largest_of(sorted(own), fewest) for host, own in of_host.items()}


def _largest_of(ordered: Sequence[float], count: int) -> float:
    if len(ordered) == count:
        return ordered[-1]
    weights = (comb(place, count - 1) for place in range(len(ordered)))
    whole = comb(len(ordered), count)
    return sum(value * weight / whole for value, weight in zip(ordered, weights, strict=True))


def of_others(values: Mapping[str, float]) -> dict[str, float]:
    """For each host the median over the others; for two hosts or more."""
    ordered = sorted(values.values())
    return {host: _median_without(ordered, own) for host, own in values.items()}


def _median_without(ordered: Sequence[float], one: float) -> float:
    """The median of sorted values, one of them left out."""
    place, middle = bisect_left(ordered, one), (len(ordered) - 2) // 2
    near = [ordered[at + (at >= place)] for at in range(middle, len(ordered) - 1 - middle)]
    return statistics.median(near)

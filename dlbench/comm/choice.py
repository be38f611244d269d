"""The algorithm to use at each size, or none if there is no clear winner; and the size of fused messages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from dlbench.comm.measurements import CollectiveGroup, Measurement
from dlbench.stats.estimates import MIN_RUNS, Estimate, ratio_estimate

STAY_WITHIN = 0.05  # Algorithms slower than the fastest by at most this share count as equally fast.
RATE_SHARE = 0.9  # Share of the asymptotic rate that a fused message should reach.


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The fastest series at a size, and whether it is clearly the fastest."""

    num_bytes: int
    title: str
    is_clear: bool  # Whether every other series is slower beyond scatter and by more than `STAY_WITHIN`.
    tied: tuple[str, ...]  # The fastest series and those that are not clearly slower.
    spread: float  # How much slower than the fastest the slowest of `tied` was (fraction).


@dataclass(frozen=True, kw_only=True)
class Best(Standing):
    """The fastest series of a size and the second, as measured."""

    time: Estimate
    minimum_s: float  # The fastest iteration of all.
    rate: Estimate  # busbw (for one rank algbw), GB/s.
    second: str
    lead: Estimate | None


@dataclass(frozen=True, kw_only=True)
class Recommended:
    """One series for a range of measured sizes."""

    low: int  # Smallest measured size of the range, bytes.
    high: int  # Largest measured size of the range, bytes.
    title: str  # The clear winner; empty if there is none.
    tied: tuple[str, ...] = ()  # Without a winner: series not clearly slower at any size.
    spread: float = 0.0


def standing_fields(num_bytes: int, title: str, slower: Mapping[str, float]) -> dict[str, Any]:
    """Returns the fields of a `Standing`. `slower`: the fraction by which each equally fast series is slower."""
    return {
        "num_bytes": num_bytes,
        "title": title,
        "is_clear": not slower,
        "tied": (title, *slower),
        "spread": max(slower.values(), default=0.0),
    }


def best(group: CollectiveGroup) -> tuple[Best, ...]:
    """Returns the fastest series at each size, by size."""
    by_size: dict[int, list[Measurement]] = {}
    for series in group.series:
        for row in series.rows:
            by_size.setdefault(row.num_bytes, []).append(row)
    fastest_by_size = []
    for size, rows in sorted(by_size.items()):
        fastest, *others = sorted(rows, key=attrgetter("time.value"))
        leads = {row.series.title: ratio_estimate(row.by_run, fastest.by_run) for row in others}
        slower = {
            title: lead.value - 1
            for title, lead in leads.items()
            if lead.n < MIN_RUNS or lead.low is None or lead.low <= 1 or lead.value <= 1 + STAY_WITHIN
        }
        second = next(iter(leads), "")
        fields = standing_fields(size, fastest.series.title, slower) | {"second": second, "lead": leads.get(second)}
        best_of_size = Best(**fields, time=fastest.time, minimum_s=fastest.minimum_s, rate=fastest.rate)
        fastest_by_size.append(best_of_size)
    return tuple(fastest_by_size)


def ranges_of(standings: Sequence[Standing]) -> tuple[Recommended, ...]:
    """Returns ranges of sizes with a clear winner, or none. Unclear sizes between ranges of one winner join them."""
    winners = [""] * len(standings)
    for index, standing in enumerate(standings):
        if standing.is_clear:
            winners[index] = standing.title
    end = 0
    for winner, items in itertools.groupby(list(winners)):
        start, end = end, end + len(list(items))
        if winner or start == 0 or end == len(winners) or winners[start - 1] != winners[end]:
            continue
        if all(winners[end] in standing.tied for standing in standings[start:end]):
            winners[start:end] = [winners[end]] * (end - start)
    ranges: list[Recommended] = []
    for standing, winner in zip(standings, winners, strict=True):
        size = standing.num_bytes
        new = Recommended(low=size, high=size, title=winner)
        if not winner:
            new = replace(new, tied=standing.tied, spread=standing.spread)
        if ranges and ranges[-1].title == winner:
            last = ranges[-1]
            common = tuple(name for name in last.tied if name in new.tied)
            if winner or common:
                new = replace(new, low=last.low, tied=common, spread=max(last.spread, new.spread))
                ranges.pop()
        ranges.append(new)
    return tuple(ranges)


def fusion_bytes(startup_s: float, per_byte_s: float) -> float:
    """Returns the smallest message, bytes, whose rate is `RATE_SHARE` of the asymptotic one; infinite if bytes are
    free. With t(n) = s + n b: n_90 = 9 s / b (half the rate at n_1/2 = s / b: Hockney, Parallel Computing 20(3), 1994).
    """
    if per_byte_s <= 0:
        return math.inf
    return RATE_SHARE / (1 - RATE_SHARE) * startup_s / per_byte_s

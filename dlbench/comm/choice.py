"""Which algorithm to use at which size: the clear winner or none, and how large messages should be.

A winner is clear where every other series is slower beyond the scatter of five runs or more, and by more than
`STAY_WITHIN`. The fastest of several that differ by less is the fastest by chance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.comm.measurements import CollectiveGroup
from dlbench.stats.estimates import MIN_RUNS, Estimate, ratio_estimate

STAY_WITHIN = 0.05  # Algorithms that are at most this share slower than the fastest are as good as it.
RATE_SHARE = 0.9  # Share of the asymptotic rate that a fused message should reach.


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The fastest at a size, and whether it is clearly so."""

    num_bytes: int
    title: str
    is_clear: bool  # Whether every other one is slower beyond scatter and by more than `STAY_WITHIN`.
    tied: tuple[str, ...]  # Those that are not, the fastest first; the fastest alone where it is clear.
    spread: float  # How much slower than the fastest the slowest of them was (fraction).


@dataclass(frozen=True, kw_only=True)
class Best(Standing):
    """The fastest series of a size, and the one after it, as measured."""

    time: Estimate
    minimum_s: float  # The fastest iteration of all.
    rate: Estimate  # busbw, GB/s; algbw for one rank.
    second: str
    lead: Estimate | None


@dataclass(frozen=True, kw_only=True)
class Recommended:
    """One series for a range of measured sizes."""

    low: int  # Smallest measured size of the range, bytes.
    high: int  # Largest measured size of the range, bytes.
    title: str  # The clear winner at its ends; empty where there is none.
    tied: tuple[str, ...] = ()  # Where none is clear: those not clearly slower at any of these sizes, fastest first.
    spread: float = 0.0


def best(group: CollectiveGroup) -> tuple[Best, ...]:
    """The fastest series at each size, by size."""
    return tuple(_best(group, size) for size in group.sizes)


def _best(group: CollectiveGroup, size: int) -> Best:
    measured = [(series.title, one) for series in group.series if (one := series.at(size)) is not None]
    (title, first), *others = sorted(measured, key=lambda one: one[1].time.value)
    leads = [(name, ratio_estimate(one.by_run, first.by_run)) for name, one in others]
    # Not slower beyond doubt, or not by enough to matter.
    tied = [
        (name, lead)
        for name, lead in leads
        if lead.n < MIN_RUNS or lead.low is None or lead.low <= 1 or lead.value <= 1 + STAY_WITHIN
    ]
    return Best(
        num_bytes=size,
        title=title,
        time=first.time,
        minimum_s=first.minimum_s,
        rate=first.busbw or first.algbw,
        second=leads[0][0] if leads else "",
        lead=leads[0][1] if leads else None,
        is_clear=not tied,
        tied=(title, *(name for name, _ in tied)),
        spread=max((lead.value - 1 for _, lead in tied), default=0.0),
    )


def ranges_of(found: Sequence[Standing]) -> tuple[Recommended, ...]:
    """Sizes in ascending order become ranges of one clear winner, or of none.

    Sizes without a clear winner between two with the same one belong to it where it is among the fastest there.
    """
    winners = [one.title if one.is_clear else "" for one in found]
    end = 0
    for winner, items in itertools.groupby(list(winners)):
        start, end = end, end + len(list(items))
        if winner:
            continue
        around = {winners[start - 1], winners[end]} if start > 0 and end < len(winners) else {""}
        if len(around) == 1 and all(around <= {*one.tied} for one in found[start:end]):
            winners[start:end] = [*around] * (end - start)
    ranges: list[Recommended] = []
    for one, winner in zip(found, winners, strict=True):
        last = ranges[-1] if ranges else None
        common = () if last is None or winner else tuple(name for name in last.tied if name in one.tied)
        if last is not None and last.title == winner and (winner or common):
            spread = 0.0 if winner else max(last.spread, one.spread)
            ranges[-1] = Recommended(low=last.low, high=one.num_bytes, title=winner, tied=common, spread=spread)
        else:
            tied, spread = ((), 0.0) if winner else (one.tied, one.spread)
            ranges.append(Recommended(low=one.num_bytes, high=one.num_bytes, title=winner, tied=tied, spread=spread))
    return tuple(ranges)


def fusion_bytes(startup_s: float, per_byte_s: float) -> float:
    """Smallest message whose rate is `RATE_SHARE` of the asymptotic one, bytes; infinite where bytes cost nothing.

    With t(n) = s + n b the rate n / t(n) is a share of 1 / b at n = share / (1 - share) x s / b: n_90 = 9 s / b
    (half the rate at n_1/2 = s / b: Hockney, Parallel Computing 20(3), 1994).
    """
    if per_byte_s <= 0:
        return math.inf
    return RATE_SHARE / (1 - RATE_SHARE) * startup_s / per_byte_s

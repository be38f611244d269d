"""Which algorithm to use at which size: the fastest measured, where the lead changes, and how large messages should be.

Everything here is read off measurements; `dlbench.collectives.results.fit` says what the fitted model expects instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from dlbench.collectives.results.tables import CommGroup, Measurement, Series, SeriesName
from dlbench.stats.estimates import Estimate, are_paired, ratio_estimate

STAY_WITHIN = 0.05
"""The algorithm of the next smaller size stays recommended while it is at most this share slower than the fastest."""

RATE_SHARE = 0.9
"""Share of the asymptotic rate that a fused message should reach."""


@dataclass(frozen=True, kw_only=True)
class Best:
    """The fastest series of a size, and the one after it."""

    num_bytes: int
    name: SeriesName
    seconds: Estimate
    second: SeriesName | None
    """None where only one was measured."""
    lead: Estimate | None
    """Time of the second over that of the best (1)."""

    @property
    def is_clear(self) -> bool:
        """Whether the interval of the lead keeps away from 1; a single run has none, and is never clear."""
        return self.lead is not None and self.lead.low is not None and self.lead.low > 1


@dataclass(frozen=True, kw_only=True)
class Crossover:
    """Between two neighbouring sizes another series becomes the recommended one."""

    low: int
    """Largest size of `before`, bytes."""
    high: int
    """Smallest size of `after`, bytes."""
    before: SeriesName
    after: SeriesName
    num_bytes: float
    """Where their times meet, interpolated in logarithms of size and time; at `low` if `after` leads there already."""
    is_clear: bool
    """Whether at `high` the interval of their ratio keeps away from 1."""


@dataclass(frozen=True, kw_only=True)
class Recommended:
    """One series for a range of measured sizes."""

    low: int
    """Smallest measured size of the range, bytes."""
    high: int
    """Largest measured size of the range, bytes."""
    name: SeriesName


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """One of dlbench's algorithms against a library, at one size."""

    num_bytes: int
    own: SeriesName
    library: SeriesName
    speed: Estimate
    """Time of the library over time of the algorithm (1): above 1, the algorithm is faster."""
    paired: bool
    """Whether both were timed in the same runs."""


def best(group: CommGroup) -> tuple[Best, ...]:
    """The fastest series at each size, by size."""
    found = []
    for size in group.sizes:
        ranked = sorted(_at(group, size), key=lambda one: one[1].seconds.value)
        name, first = ranked[0]
        second = ranked[1] if len(ranked) > 1 else None
        found.append(
            Best(
                num_bytes=size,
                name=name,
                seconds=first.seconds,
                second=second[0] if second else None,
                lead=_ratio(second[1], first)[0] if second else None,
            )
        )
    return tuple(found)


def crossovers(group: CommGroup) -> tuple[Crossover, ...]:
    """Where one recommended series gives way to the next; only between series that were measured at both sizes."""
    found = []
    for left, right in itertools.pairwise(recommended(group)):
        ends = [_cell(group, name, size) for size in (left.high, right.low) for name in (left.name, right.name)]
        if any(end is None for end in ends):
            continue
        before_low, after_low, before_high, after_high = [end for end in ends if end is not None]
        found.append(
            Crossover(
                low=left.high,
                high=right.low,
                before=left.name,
                after=right.name,
                num_bytes=_meeting(before_low, after_low, before_high, after_high),
                is_clear=_slower(before_high, after_high),
            )
        )
    return tuple(found)


def recommended(group: CommGroup) -> tuple[Recommended, ...]:
    """A series for each range of sizes: the fastest, but no change for a gain of `STAY_WITHIN` or less."""
    ranges: list[Recommended] = []
    for leader in best(group):
        name = leader.name
        if ranges:
            kept = _cell(group, ranges[-1].name, leader.num_bytes)
            if kept is not None and kept.seconds.value <= leader.seconds.value * (1 + STAY_WITHIN):
                name = ranges[-1].name
        if ranges and ranges[-1].name == name:
            ranges[-1] = Recommended(low=ranges[-1].low, high=leader.num_bytes, name=name)
        else:
            ranges.append(Recommended(low=leader.num_bytes, high=leader.num_bytes, name=name))
    return tuple(ranges)


def fusion_bytes(startup_s: float, per_byte_s: float, share: float = RATE_SHARE) -> float:
    """Smallest message whose rate is `share` of the asymptotic one, bytes; infinite where bytes cost nothing.

    With t(n) = s + n b the rate n / t(n) is `share` of 1 / b at n = share / (1 - share) x s / b: n_90 = 9 s / b
    (half the rate at n_1/2 = s / b: Hockney, Parallel Computing 20(3), 1994).
    """
    if per_byte_s <= 0:
        return math.inf
    return share / (1 - share) * startup_s / per_byte_s


def ratios(group: CommGroup) -> tuple[Ratio, ...]:
    """Each own algorithm against each library at each size that both have; own algorithms in their order."""
    own = [series for series in group.series if not series.name.is_library]
    libraries = [series for series in group.series if series.name.is_library]
    return tuple(ratio for mine in own for theirs in libraries for ratio in _ratios(mine, theirs))


def _ratios(own: Series, library: Series) -> Iterator[Ratio]:
    for mine in own.sizes:
        theirs = library.at(mine.num_bytes)
        if theirs is not None:
            speed, paired = _ratio(theirs, mine)
            yield Ratio(num_bytes=mine.num_bytes, own=own.name, library=library.name, speed=speed, paired=paired)


def _ratio(top: Measurement, bottom: Measurement) -> tuple[Estimate, bool]:
    """Time over time, and whether in the same runs; runs that hold both are taken alone where there are any."""
    shared = top.by_run.keys() & bottom.by_run.keys()
    a = {key: top.by_run[key] for key in shared} if shared else top.by_run
    b = {key: bottom.by_run[key] for key in shared} if shared else bottom.by_run
    return ratio_estimate(a, b), are_paired(a, b)


def _slower(one: Measurement, other: Measurement) -> bool:
    """Whether one is slower beyond the scatter of runs."""
    low = _ratio(one, other)[0].low
    return low is not None and low > 1


def _at(group: CommGroup, num_bytes: int) -> list[tuple[SeriesName, Measurement]]:
    cells = ((series.name, series.at(num_bytes)) for series in group.series)
    return [(name, one) for name, one in cells if one is not None]


def _cell(group: CommGroup, name: SeriesName, num_bytes: int) -> Measurement | None:
    series = group.find(name)
    return None if series is None else series.at(num_bytes)


def _meeting(
    before_low: Measurement, after_low: Measurement, before_high: Measurement, after_high: Measurement
) -> float:
    """Where two lines through the points of two sizes cross, logarithms on both axes; bytes."""
    low, high = math.log(before_low.num_bytes), math.log(before_high.num_bytes)
    ahead = max(0.0, math.log(after_low.seconds.value / before_low.seconds.value))
    behind = math.log(before_high.seconds.value / after_high.seconds.value)
    return math.exp(low + (high - low) * ahead / (ahead + behind))

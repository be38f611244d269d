"""Which algorithm to use at which size: the fastest, where the lead changes, and how large messages should be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dlbench.collectives.results.fits import Fits
from dlbench.collectives.results.measurements import GIGA, CollectiveGroup, Measurement, SeriesName
from dlbench.costs import predictions
from dlbench.stats.estimates import Estimate, ratio_estimate
from dlbench.stats.pairing import pairing

STAY_WITHIN = 0.05
"""The algorithm of the next smaller size stays recommended while it is at most this share slower than the fastest."""

RATE_SHARE = 0.9
"""Share of the asymptotic rate that a fused message should reach."""


@dataclass(frozen=True, kw_only=True)
class Best:
    """The fastest series of a size, and the one after it."""

    num_bytes: int
    title: str
    time: Estimate
    rate: Estimate
    """busbw, GB/s; algbw for one rank."""
    second: str
    """The next one; empty where only one was measured."""
    lead: Estimate | None
    """Time of the next over that of the fastest."""
    is_clear: bool
    """Whether the interval of the lead keeps away from 1; a single run has none, and is never clear."""


@dataclass(frozen=True, kw_only=True)
class Crossover:
    """Where one series overtakes another."""

    source: Literal["measured", "model"]
    before: str
    after: str
    num_bytes: float
    """Measured: where their times meet, interpolated in logarithms of size and time; at `low` if `after` leads there
    already. Model: the first size at which `after` is predicted to be faster."""
    low: int | None = None
    """Largest measured size of `before`; None for the model."""
    high: int | None = None
    """Smallest measured size of `after`; None for the model."""
    is_clear: bool | None = None
    """Whether at `high` the interval of their ratio keeps away from 1; None for the model."""


@dataclass(frozen=True, kw_only=True)
class Recommended:
    """One series for a range of measured sizes."""

    low: int
    """Smallest measured size of the range, bytes."""
    high: int
    """Largest measured size of the range, bytes."""
    title: str


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """How large a message of fused gradients should be."""

    title: str
    """Series it holds for: the one recommended at the largest size."""
    num_bytes: float | None
    """Bytes; None where every size costs the start-up alone."""
    share: float
    """Share of the asymptotic rate that it reaches."""
    asymptotic_algbw: float | None
    """GB/s."""
    beyond_measured: bool
    """Whether it is larger than the largest measured size."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """One of dlbench's algorithms against a library, at one size."""

    num_bytes: int
    own: str
    library: str
    speed: Estimate
    """Time of the library over time of the algorithm (1): above 1, the algorithm is faster."""
    paired: bool
    """Whether both were timed in the same runs."""


def best(group: CollectiveGroup) -> tuple[Best, ...]:
    """The fastest series at each size, by size."""
    found = []
    for size in group.sizes:
        measured = [(series.title, one) for series in group.series if (one := series.at(size)) is not None]
        ranked = sorted(measured, key=lambda one: one[1].time.value)
        title, first = ranked[0]
        lead = _ratio(ranked[1][1], first)[0] if len(ranked) > 1 else None
        found.append(
            Best(
                num_bytes=size,
                title=title,
                time=first.time,
                rate=first.busbw or first.algbw,
                second=ranked[1][0] if len(ranked) > 1 else "",
                lead=lead,
                is_clear=_is_above_1(lead),
            )
        )
    return tuple(found)


def recommended(group: CollectiveGroup) -> tuple[Recommended, ...]:
    """A series for each range of sizes: the fastest, but no change for a gain of `STAY_WITHIN` or less."""
    ranges: list[Recommended] = []
    for size in group.sizes:
        leader, time = min(
            ((series.title, one.time.value) for series in group.series if (one := series.at(size)) is not None),
            key=lambda one: one[1],
        )
        if ranges:
            kept = group.at(ranges[-1].title, size)
            if kept is not None and kept.time.value <= time * (1 + STAY_WITHIN):
                leader = ranges[-1].title
        if ranges and ranges[-1].title == leader:
            ranges[-1] = Recommended(low=ranges[-1].low, high=size, title=leader)
        else:
            ranges.append(Recommended(low=size, high=size, title=leader))
    return tuple(ranges)


def crossovers(group: CollectiveGroup) -> tuple[Crossover, ...]:
    """Where one recommended series gives way to the next; only between series that were measured at both sizes."""
    found = []
    for left, right in itertools.pairwise(recommended(group)):
        before_low, before_high = group.at(left.title, left.high), group.at(left.title, right.low)
        after_low, after_high = group.at(right.title, left.high), group.at(right.title, right.low)
        if before_low and before_high and after_low and after_high:
            found.append(
                Crossover(
                    source="measured",
                    before=left.title,
                    after=right.title,
                    num_bytes=_meeting(before_low, after_low, before_high, after_high),
                    low=left.high,
                    high=right.low,
                    is_clear=_is_above_1(_ratio(before_high, after_high)[0]),
                )
            )
    return tuple(found)


def model_crossovers(group: CollectiveGroup, fits: Fits) -> Iterator[Crossover]:
    """Where the model of each carrier expects the lead to change among a group's algorithms over it."""
    own = [series for series in group.series if not series.is_library]
    sizes = group.sizes
    for carrier in dict.fromkeys(series.carrier for series in own):
        algorithms = [series.algorithm for series in own if series.carrier == carrier]
        fit = fits.of(group, carrier)
        if fit is None or len(algorithms) < 2 or len(sizes) < 2:
            continue
        for size, before, after in predictions.crossovers(
            group.collective, algorithms, group.layout, fit.network, sizes[0], sizes[-1]
        ):
            yield Crossover(
                source="model",
                before=SeriesName(carrier=carrier, algorithm=before).title,
                after=SeriesName(carrier=carrier, algorithm=after).title,
                num_bytes=size,
            )


def fusion(group: CollectiveGroup) -> Fusion | None:
    """The size of fused messages for all-reduce; None for other collectives, and without a line."""
    title = recommended(group)[-1].title
    series = next(series for series in group.series if series.title == title)
    if group.collective != "allreduce" or series.startup_s is None or series.per_byte_s is None:
        return None
    size = fusion_bytes(series.startup_s, series.per_byte_s)
    is_finite = series.per_byte_s > 0
    return Fusion(
        title=title,
        num_bytes=size if is_finite else None,
        share=RATE_SHARE,
        asymptotic_algbw=GIGA / series.per_byte_s if is_finite else None,
        beyond_measured=is_finite and size > group.sizes[-1],
    )


def fusion_bytes(startup_s: float, per_byte_s: float, share: float = RATE_SHARE) -> float:
    """Smallest message whose rate is `share` of the asymptotic one, bytes; infinite where bytes cost nothing.

    With t(n) = s + n b the rate n / t(n) is `share` of 1 / b at n = share / (1 - share) x s / b: n_90 = 9 s / b
    (half the rate at n_1/2 = s / b: Hockney, Parallel Computing 20(3), 1994).
    """
    if per_byte_s <= 0:
        return math.inf
    return share / (1 - share) * startup_s / per_byte_s


def ratios(group: CollectiveGroup) -> Iterator[Ratio]:
    """Each own algorithm against each library at each size that both have; own algorithms in their order."""
    libraries = [series for series in group.series if series.is_library]
    for own in (series for series in group.series if not series.is_library):
        for library in libraries:
            for mine in own.rows:
                theirs = library.at(mine.num_bytes)
                if theirs is not None:
                    speed, paired = _ratio(theirs, mine)
                    yield Ratio(
                        num_bytes=mine.num_bytes, own=own.title, library=library.title, speed=speed, paired=paired
                    )


def _ratio(top: Measurement, bottom: Measurement) -> tuple[Estimate, bool]:
    """Time over time, and whether of the same runs."""
    return ratio_estimate(top.by_run, bottom.by_run), pairing(top.by_run, bottom.by_run).is_paired


def _is_above_1(ratio: Estimate | None) -> bool:
    return ratio is not None and ratio.low is not None and ratio.low > 1


def _meeting(
    before_low: Measurement, after_low: Measurement, before_high: Measurement, after_high: Measurement
) -> float:
    """Where two lines through the points of two sizes cross, logarithms on both axes; bytes."""
    low, high = math.log(before_low.num_bytes), math.log(before_high.num_bytes)
    ahead = max(0.0, math.log(after_low.time.value / before_low.time.value))
    behind = math.log(before_high.time.value / after_high.time.value)
    return math.exp(low + (high - low) * ahead / (ahead + behind))

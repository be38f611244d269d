"""Which algorithm to use at which size: the clear winner or none, where the lead changes, how large messages should be.

A winner is clear where every other contender is slower beyond the scatter of five runs or more, and by more than
`STAY_WITHIN`. The fastest of several that differ by less is the fastest by chance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dlbench.comm.fits import Fits
from dlbench.comm.measurements import CollectiveGroup, Measurement, SeriesName
from dlbench.perfmodels import predictions
from dlbench.specs.comm import LineCost
from dlbench.stats.estimates import MIN_RUNS, Estimate, ratio_estimate
from dlbench.stats.pairing import pairing

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
class Crossover:
    """Where one series overtakes another."""

    source: Literal["measured", "model"]
    before: str
    after: str
    num_bytes: float
    """Measured: where their times meet, interpolated in logarithms of size and time; at `low` if `after` leads there
    already. Model: the first size at which `after` is predicted to be faster."""
    low: int | None = None  # Largest measured size of `before`; None for the model.
    high: int | None = None  # Smallest measured size of `after`; None for the model.


@dataclass(frozen=True, kw_only=True)
class Recommended:
    """One series for a range of measured sizes."""

    low: int  # Smallest measured size of the range, bytes.
    high: int  # Largest measured size of the range, bytes.
    title: str  # The clear winner at its ends; empty where there is none.
    tied: tuple[str, ...] = ()  # Where none is clear: those not clearly slower at any of these sizes, fastest first.
    spread: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """How large a message of fused gradients should be."""

    title: str  # Series whose line it is: the fastest at the largest size, by its line.
    num_bytes: float | None  # Bytes; None where every size costs the start-up alone.
    beyond_measured: bool  # Whether it is larger than the largest measured size.
    below_measured: bool  # Whether it is smaller than the smallest measured size, which these times do not show.
    largest: int  # Largest measured size, bytes.
    is_clear: bool  # Whether one series is clearly the fastest there: else the size is no advice.


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """One of dlbench's algorithms against a library, at one size."""

    num_bytes: int
    own: str
    library: str
    speed: Estimate  # Time of the library over time of the algorithm (1): above 1, the algorithm is faster.
    paired: bool


def best(group: CollectiveGroup) -> tuple[Best, ...]:
    """The fastest series at each size, by size; equal series are merged (`dlbench.comm.report.contenders`)."""
    return tuple(_best(group, size) for size in group.sizes)


def _best(group: CollectiveGroup, size: int) -> Best:
    measured = [(series.title, one) for series in group.series if (one := series.at(size)) is not None]
    (title, first), *others = sorted(measured, key=lambda one: one[1].time.value)
    leads = [(name, _ratio(one, first)[0]) for name, one in others]
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


def recommended(group: CollectiveGroup) -> tuple[Recommended, ...]:
    """The clear winner of each range of sizes, or that none is clear; the argument as of `best`."""
    return ranges_of(best(group))


def ranges_of(found: Sequence[Standing]) -> tuple[Recommended, ...]:
    """Sizes in ascending order become ranges of one clear winner, or of none.

    Sizes without a clear winner between two with the same one belong to it where it is among the fastest there.
    """
    winners = [one.title if one.is_clear else "" for one in found]
    for start, end in _gaps(winners):
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


def _gaps(winners: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Begin and end of each stretch without a winner."""
    place = 0
    for is_open, items in itertools.groupby(winners, key=lambda winner: not winner):
        length = len(list(items))
        if is_open:
            yield place, place + length
        place += length


def crossovers(group: CollectiveGroup) -> tuple[Crossover, ...]:
    """Where one clear winner gives way to the next; only between series that were measured at both sizes."""
    found = []
    clear = [one for one in recommended(group) if one.title]
    for left, right in itertools.pairwise(clear):
        if left.title == right.title:
            continue
        before_low, before_high = group.at(left.title, left.high), group.at(left.title, right.low)
        after_low, after_high = group.at(right.title, left.high), group.at(right.title, right.low)
        if before_low and before_high and after_low and after_high:
            # Where lines through the points of both sizes cross, logarithms on both axes.
            low, high = math.log(before_low.num_bytes), math.log(before_high.num_bytes)
            ahead = max(0.0, math.log(after_low.time.value / before_low.time.value))
            behind = math.log(before_high.time.value / after_high.time.value)
            found.append(
                Crossover(
                    source="measured",
                    before=left.title,
                    after=right.title,
                    num_bytes=math.exp(low + (high - low) * ahead / (ahead + behind)),
                    low=left.high,
                    high=right.low,
                )
            )
    return tuple(found)


def model_crossovers(group: CollectiveGroup, fits: Fits) -> Iterator[Crossover]:
    """Where the model of each carrier expects the lead to change among a group's algorithms over it.

    Algorithms that the fit misses are left out: see `dlbench.specs.comm.FitError`.
    """
    own = [series for series in group.series if not series.is_library]
    sizes = group.sizes
    for carrier in dict.fromkeys(series.carrier for series in own):
        algorithms = [series.algorithm for series in own if series.carrier == carrier]
        fit = fits.of(group, carrier)
        if fit is not None:
            algorithms = [name for name in algorithms if not fit.network.is_poor(group.collective, name)]
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
    """The size of fused messages for all-reduce; None for other collectives, and without a line.

    `dlbench comm predict` gives the same size for the same rank count, from the lines in the file.
    """
    lines = [
        LineCost(name=one.title, ranks=1, startup_s=one.startup_s, per_byte_s=one.per_byte_s)
        for one in group.series
        if one.startup_s is not None and one.per_byte_s is not None
    ]
    if group.collective != "allreduce" or not lines:
        return None
    line = fusion_line(lines, group.sizes[-1])
    size = fusion_bytes(line.startup_s, line.per_byte_s)
    is_finite = line.per_byte_s > 0
    return Fusion(
        title=line.name,
        num_bytes=size if is_finite else None,
        beyond_measured=is_finite and size > group.sizes[-1],
        below_measured=is_finite and size < group.sizes[0],
        largest=group.sizes[-1],
        is_clear=_best(group, group.sizes[-1]).is_clear,
    )


def fusion_line(lines: Sequence[LineCost], largest: int) -> LineCost:
    """The line that is fastest at the largest measured size: messages are fused for the sake of large ones."""
    return min(lines, key=lambda line: line.time(largest))


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

"""Where a history of nightly figures changed its level, how much, and how sure that is.

One value is one night: the median over the runs of one series. Nights, and not the runs in them, are what is
resampled and permuted here, because runs of one night share its state of the machine.

1. Candidates, far too many: kernel change points (Gaussian kernel on logarithms, in units of the scatter between
   neighbours, penalty 1) by the pruned search of Killick, Fearnhead and Eckley (JASA 107, 2012), in the library
   ruptures (Truong, Oudre and Vayatis, Signal Processing 167, 2020). The energy distance of E-divisive (Matteson and
   James, JASA 109, 2014) is such a kernel discrepancy too; the bounded kernel is deaf to outliers.
2. Candidates that do not hold are merged from the bottom, the weakest first, as Hunter does (Fleming et al., ICPE'23):
   each is moved, between its neighbours, to where the absolute deviations from the levels on its sides are least, and
   tested there.
3. The test is Wilcoxon's rank sum against permutations, as E-divisive tests, but against the largest rank sum of any
   place between the neighbours (Pettitt, Applied Statistics 28, 1979): so the search for the place is paid for, which a
   t test at the place found does not do. Neighbouring nights resemble each other: what each has from the night before
   is taken out first (prewhitening; von Storch, in Analysis of Climate Variability, 1995), with the upper end of what
   the autocorrelation may be, because of a dozen nights its estimate says little.
4. The medians must differ by a least effect, too.
5. Of several histories Benjamini and Hochberg's procedure decides over all of them together.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

from dlbench.history.trends.rank_sums import MIN_SEGMENT, NORMAL_MAD, p_value, rank_sums, ranks_of, whitened
from dlbench.stats.estimates import Estimate, median_estimate, shift_estimate
from dlbench.stats.multiplicity import benjamini_hochberg, student_quantile

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]

LEVEL = 0.003
"""Largest p of a change point; p counts the search for the place, and all histories that are followed together."""
MIN_EFFECT = 0.02
"""Least relative difference of the medians."""
ODD_NIGHTS = 3
"""So many odd nights in a row are outliers, however far they lie."""
MIN_NIGHTS = 12
"""With fewer nights no order of them, however clear, has a p below `LEVEL`."""

NAMED = 0.01
"""Share of ordinary nights that lie beyond the usual range."""
_TRIMMED = 15
"""Of so many nights one on each side is drawn in before their scatter is taken, so that odd nights blind nobody."""

_RESAMPLES = 1_000
"""For the interval of a place."""

_PENALTY = 1.0
_GAMMA = 0.5
_SEED = 20_140_109


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Nights between two change points, or an end of the history."""

    start: int
    end: int
    """First night after the segment."""
    level: Estimate
    """Median over its nights, in the unit of the values."""


@dataclass(frozen=True, kw_only=True)
class ChangePoint:
    """A night from which on the level is another."""

    index: int
    """First night after the change."""
    before: Segment
    after: Segment
    ratio: Estimate
    """The shift of the nights after against those before (1), by rank sums as the test. The place was found in the same
    nights, so a small change is shown slightly larger than it is."""
    p: float
    """Chance of a difference as clear at any place between the neighbouring change points, were there no change; of
    several histories adjusted for all of them."""
    earliest: int
    """First of the nights that may be the first after the change: its 95 % bootstrap interval."""
    latest: int
    """Last of them."""


@dataclass(frozen=True, kw_only=True)
class Newest:
    """What the newest nights alone say: too few of them for a change point."""

    num_beyond: int
    """Newest nights, in a row, that lie beyond the usual range on one side; 0: the newest is an ordinary night."""
    ratio: float
    """Median of these nights (of the newest one, if none is beyond) over the level before them (1)."""
    low: float
    """Usual range of the nights before: holds the next one but for `NAMED`; at least `MIN_EFFECT` to either side."""
    high: float
    wait_for: int
    """More such nights that make a change point of them at the earliest; 0 if none is beyond."""


def change_points(
    values: Sequence[float], *, level: float = LEVEL, min_effect: float = MIN_EFFECT
) -> list[ChangePoint]:
    """All change points of a history, oldest first; equal values give equal change points.

    Args:
        values: one positive, finite value for each night, oldest first, any unit.
        level: largest p.
        min_effect: least relative difference of the medians, upwards; downwards, its inverse.

    Returns:
        Nothing for fewer than `MIN_NIGHTS` nights.

    Raises:
        ValueError: a value is not positive and finite.
    """
    return _described(values, detect(values, level=level, min_effect=min_effect))


def change_points_together(histories: Sequence[Sequence[float]]) -> list[list[ChangePoint]]:
    """The change points of each of several histories, so that `LEVEL` holds for all together; errors as above."""
    found = detect_together(histories)
    return [_described(values, places) for values, places in zip(histories, found, strict=True)]


def _described(values: Sequence[float], found: Sequence[tuple[int, float]]) -> list[ChangePoint]:
    """Change points at these places, with p."""
    pieces = segments(values, [index for index, _ in found])
    made = []
    for (index, p), before, after in zip(found, pieces[:-1], pieces[1:], strict=True):
        earliest, latest = _place_interval(values[before.start : after.end], index - before.start)
        made.append(
            ChangePoint(
                index=index,
                before=before,
                after=after,
                ratio=_ratio(values, before, after),
                p=p,
                earliest=before.start + earliest,
                latest=before.start + latest,
            )
        )
    return made


def segments(values: Sequence[float], places: Sequence[int]) -> list[Segment]:
    """The levels between places (first nights after a change, ascending); one segment where there are none."""
    if not values:
        return []
    ends = [0, *places, len(values)]
    return [
        Segment(start=start, end=end, level=median_estimate(values[start:end]))
        for start, end in itertools.pairwise(ends)
    ]


def detect(values: Sequence[float], *, level: float = LEVEL, min_effect: float = MIN_EFFECT) -> list[tuple[int, float]]:
    """First nights after each change, with p; arguments and errors as `change_points`, without its intervals."""
    import numpy as np

    array = np.asarray(values, dtype=float)
    if not (np.isfinite(array).all() and (array > 0).all()):
        raise ValueError("change points need positive, finite values")
    if len(array) < MIN_NIGHTS:
        return []
    logs = np.log(array)
    places = _candidates(logs)
    seen: set[tuple[int, ...]] = set()
    known: dict[tuple[int, int, int], _Tested] = {}
    while places:
        tested = _tested(logs, places, known)
        weak = [i for i, one in enumerate(tested) if one.p > level or one.effect < math.log1p(min_effect)]
        if weak:
            del places[max(weak, key=lambda i: (tested[i].p, -tested[i].effect))]
            continue
        # One at a time: two neighbours that move at once could pass each other.
        moved = next((i for i, one in enumerate(tested) if one.place != places[i]), None)
        if moved is None or (key := (*places[:moved], tested[moved].place, *places[moved + 1 :])) in seen:
            return [(place, one.p) for place, one in zip(places, tested, strict=True)]
        seen.add(key)
        places = list(key)
    return []


def detect_together(histories: Sequence[Sequence[float]], *, level: float = LEVEL) -> list[list[tuple[int, float]]]:
    """`detect` for each of several histories, p adjusted for all of them and none above `level`.

    A history is one test, or as many as it has change points; those too short for any are none. Where the procedure of
    Benjamini and Hochberg leaves some out, their histories are searched again at the level of those that it keeps.
    """
    found = [detect(values, level=level) for values in histories]
    quiet = [not one and len(values) >= MIN_NIGHTS for one, values in zip(found, histories, strict=True)]
    tests = sum(map(len, found)) + sum(quiet)
    kept = sum(map(len, found))
    while True:
        adjusted = iter(benjamini_hochberg([*(p for one in found for _, p in one), *[1.0] * (tests - kept)]))
        judged = [[(index, next(adjusted)) for index, _ in one] for one in found]
        holding = sum(p <= level for one in judged for _, p in one)
        if holding == kept:
            return judged
        stricter = level * max(1, holding) / tests
        found = [
            detect(values, level=stricter) if any(p > stricter for _, p in one) else one
            for values, one in zip(histories, found, strict=True)
        ]
        kept = sum(map(len, found))


def newest(values: Sequence[float], start: int = 0, *, histories: int = 1) -> Newest | None:
    """What the newest nights say that are too few for a change point.

    Args:
        values: as `change_points` takes them.
        start: first night of the last segment.
        histories: how many are followed together, for `wait_for`.

    Returns:
        None where fewer than `MIN_SEGMENT` nights of the segment lie before the newest.
    """
    import numpy as np

    logs = np.log(np.asarray(values[start:], dtype=float))
    for count in range(min(len(logs) - MIN_SEGMENT, nights_needed(len(logs), histories)), 0, -1):
        low, high = _usual(logs[:-count])
        tail = logs[-count:]
        if (tail > high).all() or (tail < low).all():
            ratio = math.exp(float(np.median(tail) - np.median(logs[:-count])))
            wait = max(1, nights_needed(len(logs) - count, histories) - count)
            return Newest(num_beyond=count, ratio=ratio, low=math.exp(low), high=math.exp(high), wait_for=wait)
    if len(logs) <= MIN_SEGMENT:
        return None
    low, high = _usual(logs[:-1])
    ratio = math.exp(float(logs[-1] - np.median(logs[:-1])))
    return Newest(num_beyond=0, ratio=ratio, low=math.exp(low), high=math.exp(high), wait_for=0)


@functools.lru_cache(maxsize=1024)
def nights_needed(before: int, histories: int = 1) -> int:
    """Fewest nights, all on one side of `before` nights (counted as `MIN_SEGMENT` if fewer), that make a change.

    Of several histories: where it is the only one of them that changes.
    """
    import numpy as np

    before = max(before, MIN_SEGMENT)
    for count in itertools.count(max(MIN_SEGMENT, MIN_NIGHTS - before)):
        # Ascending ranks: every night after lies above every night before.
        statistics = rank_sums(np.arange(1.0, before + count + 1))
        if p_value(float(statistics[before - MIN_SEGMENT]), before + count) <= LEVEL / histories:
            return count
    raise AssertionError("counting does not end")


def _usual(logs: Array) -> tuple[float, float]:
    """Where the next night lies but for `NAMED`: Student's prediction interval around the median.

    The standard deviation is winsorised, in units of that of a normal distribution winsorised alike, with as many
    degrees of freedom as nights that were not drawn in, less 1 (Tukey and McLaughlin, Sankhya A 25, 1963).
    """
    import numpy as np

    n, ordered = len(logs), np.sort(logs)
    cut = n // _TRIMMED
    winsorised = np.clip(ordered, ordered[cut], ordered[n - 1 - cut])
    spread = float(np.std(winsorised, ddof=1)) / _winsorised_normal(cut / n)
    beyond = student_quantile(1 - NAMED / 2, n - 2 * cut - 1) * math.sqrt(1 + 1 / n)
    width = max(beyond * spread, math.log1p(MIN_EFFECT))
    centre = float(np.median(ordered))
    return centre - width, centre + width


def _winsorised_normal(share: float) -> float:
    """Standard deviation of a standard normal value that is drawn in to its quantiles at `share` from either end."""
    if not share:
        return 1.0
    normal = NormalDist()
    end = normal.inv_cdf(1 - share)
    return math.sqrt(1 - 2 * share - 2 * end * normal.pdf(end) + 2 * share * end * end)


def _ratio(values: Sequence[float], before: Segment, after: Segment) -> Estimate:
    return shift_estimate(values[after.start : after.end], values[before.start : before.end])


def _nearness(part: Array, place: int) -> Array:
    """How much nearer each night is to the level before than to that after; negative: it belongs before."""
    import numpy as np

    before, after = np.median(part[:place]), np.median(part[place:])
    # Bounded by the difference of the levels, so an outlier counts no more than any night of the other side.
    return np.asarray(np.abs(part - before) - np.abs(part - after))


def _places(nearness: Array) -> npt.NDArray[np.int64]:
    """Where the sum of absolute deviations from the two levels is least, along the last axis."""
    import numpy as np

    count = nearness.shape[-1]
    sums = np.cumsum(nearness, axis=-1)[..., MIN_SEGMENT - 1 : count - MIN_SEGMENT]
    return np.asarray(np.argmin(sums, axis=-1) + MIN_SEGMENT)


def _place_interval(part: Sequence[float], place: int) -> tuple[int, int]:
    """Where the place is found again in resamples of the nights of each side: 2.5 % and 97.5 %, and the place."""
    import numpy as np

    nearness = _nearness(np.log(np.asarray(part)), place)
    generator = np.random.default_rng([_SEED, place, len(nearness)])
    before = generator.choice(nearness[:place], size=(_RESAMPLES, place))
    after = generator.choice(nearness[place:], size=(_RESAMPLES, len(nearness) - place))
    low, high = np.percentile(_places(np.concatenate([before, after], axis=1)), [2.5, 97.5])
    return min(int(low), place), max(math.ceil(high), place)


def _candidates(logs: Array) -> list[int]:
    import numpy as np
    from ruptures import KernelCPD

    steps = np.abs(np.diff(logs))
    # Differences of neighbours know nothing of levels. More than half of them zero: values are rounded.
    scale = float(np.median(steps)) / (NORMAL_MAD * math.sqrt(2)) or float(np.mean(steps))
    if scale == 0:
        return []
    search = KernelCPD(kernel="rbf", min_size=MIN_SEGMENT, params={"gamma": _GAMMA})
    search.fit(((logs - np.median(logs)) / scale)[:, None])
    return [int(place) for place in search.predict(pen=_PENALTY)[:-1]]


@dataclass(frozen=True)
class _Tested:
    place: int
    p: float
    effect: float
    """Absolute difference of the medians of the logarithms."""


def _tested(logs: Array, places: list[int], known: dict[tuple[int, int, int], _Tested]) -> list[_Tested]:
    """Each place between its neighbours, and where it belongs."""
    ends = [0, *places, len(logs)]
    for between in zip(ends[:-2], places, ends[2:], strict=True):
        if between not in known:
            known[between] = _test(logs, *between)
    return [known[between] for between in zip(ends[:-2], places, ends[2:], strict=True)]


def _test(logs: Array, start: int, old: int, end: int) -> _Tested:
    import numpy as np

    part = logs[start:end]
    place = int(_places(_nearness(part, old - start)))
    statistic = float(rank_sums(ranks_of(whitened(part, place)))[place - MIN_SEGMENT])
    effect = abs(float(np.median(part[place:]) - np.median(part[:place])))
    return _Tested(start + place, p_value(statistic, len(part)), effect)

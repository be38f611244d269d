"""Change points of nightly figures: place, size, evidence, and whether the change was a step or a drift.

A value is one night, the median over the runs of one series, because the runs of one night share the machine's state.

1. The evidence is a Bayes factor (Kass and Raftery, JASA 90, 1995): the likelihood of the nights with a change of level
   at any place over that without one, summed over the places (Shiryaev, Theory of Probability and Its Applications 8,
   1963), because a test of the best place must correct for the search. Nights are a first-order autoregression with an
   unknown coefficient: without a change up to 0.95 (slow fluctuations of the machine), with one near 0.5. Scale and
   level are integrated out; the step has a normal prior of variance `_STEP_VARIANCE` in units of the scatter. Outliers
   are winsorized to `_CLIP` robust standard deviations of the nights around them, all nights to `_LIMIT` of the median.
   A large step has at most the evidence of the order of its nights (beta-binomial), because if a share of all nights
   are outliers, some are neighbours by chance.
2. Candidates are the likeliest places of overlapping stretches of all lengths (seeded binary segmentation: Kovács,
   Bühlmann, Li and Munk, Biometrika 110, 2023). As in Hunter (Fleming et al., ICPE'23) the weakest are merged first:
   each is moved to the likeliest place between its neighbours and tested there.
3. The levels must also differ by a minimum effect (Hodges and Lehmann's shift).
4. A change, or several in one direction, is compared with a ramp over the same nights: a slow rise is a drift.
5. For several histories the e-values of Wang and Ramdas (JRSS B 84, 2022) decide over all of them together: with m
   histories, of which k change, each change needs m / k times the evidence.

Measured by simulation in `benchmarks/truth/trends.py`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal

from dlbench.lazy import Array, np
from dlbench.stats.estimates import Estimate, median_estimate, shift_estimate

MIN_EVIDENCE = 800.0
"""Minimum Bayes factor of a change point. Set by simulation: at autocorrelation 0.5 about 5 % of histories of 110
nights ever show a false change. For a single test 150 is called very strong (Kass and Raftery)."""
MIN_EFFECT = 0.02  # Minimum relative difference of two levels.
MAX_OUTLIERS = 3  # Up to this many deviating nights in a row are outliers, however far off they are.
MIN_SEGMENT = 5  # Minimum nights between two change points, so that every level has a 95 % interval.
MIN_NIGHTS = 12  # With fewer nights no order of them reaches `MIN_EVIDENCE`.
MIN_DRIFT = 2 * MIN_SEGMENT  # Minimum nights of a drift.
SHAPE_FACTOR = 10.0
"""A ramp must be this many times as likely as steps to be called a drift, and the other way round (Jeffreys, Theory of
Probability, 1961, appendix B: "strong"); so must two levels against one level with outliers."""

NAMED = 0.01  # Share of ordinary nights outside the usual range.
_MAX_USUAL_NIGHTS = 250  # Newest nights of a level that its usual range is computed from.
_TAILS = (1.5, 2.0, 3.0, 6.0, 30.0)  # Degrees of freedom of the nights, equally likely: no variance to normal.
_WIDTHS = tuple(math.exp(-1.5 + 0.25 * step) for step in range(17))  # Possible scales, in robust standard deviations.
_SHIFTS = tuple(-3.0 + step for step in range(7))  # Possible distances of centre and median, in standard errors.

_CLIP = 3.0  # Limit of a night's distance from the nights around it, in robust standard deviations.
_LIMIT = 4.0  # Limit of a night's distance from the median, in robust standard deviations.
_LARGE_STEP = 3.0  # Smallest step that outliers may imitate, in scatters.
_OUTLIER_SHARE = (0.5, 3.0)  # Beta prior of the share of outliers: mean 1/7, and any share up to most nights.
_STEP_VARIANCE = 2.0  # Prior variance of a step, in squared scatters.
_NORMAL_MAD = 0.6744897501960817  # Median of the absolute value of a standard normal.
_RAMP_VARIANCE = 50.0  # Prior variance of ramps and of steps compared with them, which may be many scatters high.
_SHORTEST = 20  # Nights of the shortest stretches that are searched for candidates.
_RAMP_ENDS = 20  # Number of possible ends of a ramp.

Shape = Literal["step", "drift", "step or drift"]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Nights between two change points, or an end of the history."""

    start: int
    end: int
    level: Estimate  # Median over its nights, in the unit of the values; of a drift the level at its last night.
    rise: float = 0.0  # Rise of the logarithm per night; 0 without a drift.

    def flat(self, values: Sequence[float], at: int) -> list[float]:
        """Returns the nights of the segment without its drift, at the level of night `at`."""
        nights = values[self.start : self.end]
        if not self.rise:
            return list(nights)
        return [value * math.exp(self.rise * (at - night)) for night, value in enumerate(nights, self.start)]


@dataclass(frozen=True)
class DetectedChange:
    """A step at one night, or a drift over several nights."""

    index: int  # First night after a step; first night of a drift.
    end: int  # First night after a drift; `index` of a step.
    evidence: float
    """Bayes factor against none up to the neighbouring changes, divided by the correction for all histories."""
    shape: Shape
    earliest: int  # Start of the 95 % interval of the first night after the step; second night of a drift.
    latest: int  # End of that interval; last night of a drift.


@dataclass(frozen=True, kw_only=True)
class ChangePoint(DetectedChange):
    """A detected change with the levels around it."""

    before: Segment  # The segment before a step; the drift itself, at the level of its first night.
    after: Segment
    ratio: Estimate
    """The shift of the nights after relative to those before (1), by rank sums; of a drift its last night over its
    first (Theil and Sen). The place was found in the same nights, so a small change is slightly overestimated."""


@dataclass(frozen=True, kw_only=True)
class Newest:
    """The newest nights, if they are too few for a change point."""

    num_outside: int  # Newest nights, in a row, outside the usual range on one side; 0: the newest is ordinary.
    ratio: float  # Median of these nights (of the newest one, if none is outside) over the level before them (1).
    low: float  # Usual range of the nights before, without a share `NAMED`; at least `MIN_EFFECT` to each side.
    high: float
    wait_for: int  # Further such nights that make a change point; 0 if none is outside.


def change_points_together(histories: Sequence[Sequence[float]]) -> list[list[ChangePoint]]:
    """Returns the change points of each of several histories, as `detect_together` finds them."""
    detected = detect_together(histories)
    return [described(values, changes) for values, changes in zip(histories, detected, strict=True)]


def described(values: Sequence[float], detected: Sequence[DetectedChange]) -> list[ChangePoint]:
    """Returns the changes with the levels around them."""
    pieces = segments(values, detected)
    piece_by_start = {piece.start: piece for piece in pieces}
    piece_by_end = {piece.end: piece for piece in pieces}
    changes = []
    for change in detected:
        after = piece_by_start[change.index]
        if change.shape == "drift":
            slope = _slope([math.log(value) for value in values[change.index : change.end]])
            nights = change.end - 1 - change.index
            low, high = math.exp(float(slope.low_slope) * nights), math.exp(float(slope.high_slope) * nights)
            ratio = Estimate(math.exp(float(slope.slope) * nights), low, high, nights + 1, "fit", "", 0.95)
            before = replace(after, level=median_estimate(after.flat(values, change.index)))
        else:
            before = piece_by_end[change.index]
            ratio = shift_estimate(after.flat(values, after.start), before.flat(values, before.end - 1))
        changes.append(ChangePoint(**vars(change), before=before, after=after, ratio=ratio))
    return changes


def segments(values: Sequence[float], detected: Sequence[DetectedChange]) -> list[Segment]:
    """Returns the levels and drifts between changes, in order; one segment without changes."""
    if not values:
        return []
    drift_starts = {change.index for change in detected if change.shape == "drift"}
    ends = {0, len(values)}
    for change in detected:
        ends |= {change.index, change.end}
    pieces = []
    for start, end in itertools.pairwise(sorted(ends)):
        rise = 0.0
        if start in drift_starts:
            rise = float(_slope([math.log(value) for value in values[start:end]]).slope)
        piece = Segment(start=start, end=end, level=median_estimate(values[start:end]), rise=rise)
        pieces.append(replace(piece, level=median_estimate(piece.flat(values, end - 1))))
    return pieces


def detect(
    values: Sequence[float], *, evidence: float = MIN_EVIDENCE, min_effect: float = MIN_EFFECT
) -> list[DetectedChange]:
    """Returns all changes of a history, oldest first; none with fewer than `MIN_NIGHTS` nights.

    `values`: positive and finite, one for each night, oldest first. Levels must differ by `min_effect` (relative)
    upwards, or by its inverse downwards.
    """
    array = np.asarray(values, dtype=float)
    if len(array) < MIN_NIGHTS:
        return []
    logs = np.log(array)
    places = _candidates(logs, evidence)
    min_log_evidence, min_shift = math.log(evidence), math.log1p(min_effect)
    visited: set[tuple[int, ...]] = set()
    tested_by_ends: dict[tuple[int, int, int], _TestedStep] = {}
    tested: list[_TestedStep] = []
    while places:
        ends = [0, *places, len(logs)]
        tested = []
        for between in zip(ends[:-2], places, ends[2:], strict=True):
            if between not in tested_by_ends:
                tested_by_ends[between] = _test_step(logs, between[0], between[2])
            tested.append(tested_by_ends[between])
        weak = [i for i, step in enumerate(tested) if step.evidence < min_log_evidence or abs(step.effect) < min_shift]
        if weak:
            del places[min(weak, key=lambda i: (tested[i].evidence, abs(tested[i].effect)))]
            continue
        # One at a time: two neighbours that move at once could pass each other.
        moved = next((i for i, step in enumerate(tested) if step.place != places[i]), None)
        if moved is not None:
            next_places = (*places[:moved], tested[moved].place, *places[moved + 1 :])
        else:
            further = []
            for start, end in itertools.pairwise(ends):
                if end - start >= 2 * MIN_SEGMENT:
                    step = _test_step(logs, start, end)
                    if step.evidence >= min_log_evidence:
                        further.append(step.place)
            next_places = tuple(sorted([*places, *further]))
        if next_places in visited or next_places == tuple(places):
            break
        visited.add(next_places)
        places = list(next_places)
    return _add_drifts(logs, _steps_and_drifts(logs, places, tested), evidence, min_effect)


def detect_together(histories: Sequence[Sequence[float]]) -> list[list[DetectedChange]]:
    """Returns `detect` of each of several histories, with the evidence divided by the correction for all of them."""
    detected = [detect(values) for values in histories]
    while True:
        num_changes = sum(map(len, detected))
        num_tests = num_changes
        for values, changes in zip(histories, detected, strict=True):
            if not changes and len(values) >= MIN_NIGHTS:
                num_tests += 1
        correction = num_tests / max(1, num_changes)
        min_evidence = MIN_EVIDENCE * correction
        weakest = [min((change.evidence for change in changes), default=math.inf) for changes in detected]
        if min(weakest, default=math.inf) >= min_evidence:
            break
        for i, values in enumerate(histories):
            if weakest[i] < min_evidence:
                detected[i] = detect(values, evidence=min_evidence)
    for i, changes in enumerate(detected):
        detected[i] = [replace(change, evidence=change.evidence / correction) for change in changes]
    return detected


def newest(values: Sequence[float], last: Segment | None = None, *, histories: int = 1) -> Newest | None:
    """Returns the newest nights that are too few for a change point, and the usual range; None if it is not known."""
    if last:
        values = last.flat(values, last.end - 1)
    logs = np.log(np.asarray(values, dtype=float))
    if len(logs) <= MIN_SEGMENT:
        return None
    usual_low, usual_high = _usual_range(logs[:-1])
    for count in range(min(len(logs) - MIN_SEGMENT, MIN_NIGHTS), 0, -1):
        before, tail = logs[:-count], logs[-count:]
        # No range is narrower than this.
        distances, scatter = tail - np.median(before), float(np.median(np.abs(before - np.median(before))))
        if np.abs(distances).min() < max(1.5 * scatter, math.log1p(MIN_EFFECT)):
            continue
        low, high = usual_low, usual_high
        if count > 1:
            low, high = _usual_range(before)
        if (tail > high).all() or (tail < low).all():
            ratio = math.exp(float(np.median(distances)))
            wait = _nights_to_wait(logs, count, MIN_EVIDENCE * histories)
            return Newest(num_outside=count, ratio=ratio, low=math.exp(low), high=math.exp(high), wait_for=wait)
    ratio = math.exp(float(logs[-1] - np.median(logs[:-1])))
    return Newest(num_outside=0, ratio=ratio, low=math.exp(usual_low), high=math.exp(usual_high), wait_for=0)


def _nights_to_wait(logs: Array, count: int, evidence: float) -> int:
    """Returns how many more nights like the newest `count` ones make a change point."""
    for extra in range(1, MIN_NIGHTS):
        later = np.concatenate([logs, np.resize(logs[-count:], extra)])
        if len(later) >= MIN_NIGHTS and count + extra >= MIN_SEGMENT:
            tested = _test_step(later, 0, len(later))
            if tested.evidence >= math.log(evidence) and tested.place >= len(logs) - count - 1:
                return extra
    return MIN_NIGHTS


def _usual_range(logs: Array) -> tuple[float, float]:
    """Returns the range of the next night, with probability `NAMED` / 2 beyond either end.

    It is the predictive distribution of a Student t with unknown centre, scale and degrees of freedom (Geweke, Journal
    of Applied Econometrics 8, 1993), on a grid.
    """
    from scipy.special import gammaln, stdtr

    nights = np.sort(logs[-_MAX_USUAL_NIGHTS:])
    n, centre = len(nights), float(np.median(nights))
    narrowest = math.log1p(MIN_EFFECT)
    scale = float(np.median(np.abs(nights - centre))) / _NORMAL_MAD or float(np.std(nights))
    if scale < 1e-9:
        return centre - narrowest, centre + narrowest
    freedom, widths, shifts = np.array(_TAILS)[:, None, None], np.array(_WIDTHS)[:, None] * scale, np.array(_SHIFTS)
    freedom, widths, middles = np.broadcast_arrays(freedom, widths, centre + shifts * scale / math.sqrt(n))
    squares = ((nights - middles[..., None]) / widths[..., None]) ** 2
    likely = n * (gammaln((freedom + 1) / 2) - gammaln(freedom / 2) - np.log(freedom) / 2 - np.log(widths))
    likely = likely - (freedom + 1) / 2 * np.log1p(squares / freedom[..., None]).sum(axis=-1)
    weights = np.exp(likely - likely.max())
    relevant = weights > 1e-5
    weights = weights[relevant] / weights[relevant].sum()
    freedom, widths, middles = freedom[relevant], widths[relevant], middles[relevant]
    shares = np.array([NAMED / 2, 1 - NAMED / 2])
    low, high = np.full(2, centre - 1e3 * scale), np.full(2, centre + 1e3 * scale)
    for _ in range(30):
        middle = (low + high) / 2
        is_low = stdtr(freedom, (middle[:, None] - middles) / widths) @ weights < shares
        low, high = np.where(is_low, middle, low), np.where(is_low, high, middle)
    return min(float(low[0]), centre - narrowest), max(float(high[1]), centre + narrowest)


def _winsorized(logs: Array, limit: float = math.inf) -> Array:
    """Returns the nights relative to their median in robust standard deviations, winsorized; zeros if all are equal.

    Outliers are relative to the running median of 2 `MAX_OUTLIERS` + 1 nights, which `MAX_OUTLIERS` in a row do not
    affect; then all nights are limited to `limit` on either side of the median.
    """
    steps = np.abs(np.diff(logs))
    # The median is zero if values are rounded, so that more than half of the differences are.
    scale = float(np.median(steps)) / (_NORMAL_MAD * math.sqrt(2)) or float(np.mean(steps))
    # Below this, rounding of the logarithms.
    if scale < 1e-12:
        return np.zeros(len(logs))
    windows = np.lib.stride_tricks.sliding_window_view(logs, 2 * MAX_OUTLIERS + 1)
    around = np.partition(windows, MAX_OUTLIERS, axis=1)[:, MAX_OUTLIERS]
    around = np.concatenate([np.repeat(around[0], MAX_OUTLIERS), around, np.repeat(around[-1], MAX_OUTLIERS)])
    nights = around + np.clip(logs - around, -_CLIP * scale, _CLIP * scale)
    return np.asarray(np.clip((nights - np.median(nights)) / scale, -limit, limit))


class _ChangeModel:
    """Models of changes with given shapes, each of which is compared with no change.

    With the covariance C of a first-order autoregression r, a' C^-1 b = ((1 + r^2) a.b - r (a[1:].b[:-1] +
    a[:-1].b[1:]) - r^2 (a[0] b[0] + a[-1] b[-1])) / (1 - r^2), so the sums are made once for all r.
    """

    def __init__(self, shapes: Array, variance: float = _STEP_VARIANCE) -> None:
        """Computes the sums that do not depend on the nights.

        `shapes`: (m, k, n), m changes of n nights, each of k columns from 0 to 1 that are added to the level.
        `variance`: prior variance of a column's height, in squared scatters.
        """
        self.shapes = shapes
        n = shapes.shape[-1]
        self.level = self._product(np.ones(n), np.ones(n))
        self.with_level = self._product(shapes, np.ones(n))
        gram = self._product(shapes[:, :, None], shapes[:, None])
        gram = gram - self.with_level[..., None] * self.with_level[..., None, :] / self.level[..., None, None]
        posterior = gram + np.eye(shapes.shape[1]) / variance
        self.inverse = np.linalg.inv(posterior)
        self.size = np.linalg.slogdet(posterior * variance)[1] / 2
        self.common = -(n - 1) / 2 * np.log(1 - _autocorrelation_priors()[0][:, None] ** 2) - np.log(self.level) / 2

    @staticmethod
    def _product(a: Array, b: Array) -> Array:
        """Returns a' C^-1 b along the last axis, for each r."""
        r = _autocorrelation_priors()[0].reshape(-1, *[1] * max(1, np.broadcast(a, b).ndim - 1))
        product = np.einsum("...n,...n->...", a, b)
        lagged = np.einsum("...n,...n->...", a[..., 1:], b[..., :-1]) + np.einsum(
            "...n,...n->...", a[..., :-1], b[..., 1:]
        )
        ends = a[..., 0] * b[..., 0] + a[..., -1] * b[..., -1]
        return np.asarray(((1 + r * r) * product - r * lagged - r * r * ends) / (1 - r * r))

    def log_factors(self, nights: Array) -> Array:
        """Returns the logarithms of the Bayes factors of the m changes; `nights`: n nights of `_winsorized`."""
        half = (len(nights) - 1) / 2
        level_nights = self._product(np.ones(len(nights)), nights)
        squares = self._product(nights, nights) - level_nights**2 / self.level
        slopes = self._product(self.shapes, nights) - self.with_level * (level_nights / self.level)[..., None]
        gain = np.einsum("rmi,rmij,rmj->rm", slopes, self.inverse, slopes)
        unexplained = np.maximum(squares - gain, 1e-9)
        _, changed, unchanged = _autocorrelation_priors()
        with_change = changed[:, None] + self.common - self.size - half * np.log(unexplained)
        without = unchanged[:, None] + self.common - half * np.log(squares)
        return np.asarray(np.logaddexp.reduce(with_change, axis=0) - np.logaddexp.reduce(without, axis=0))


@functools.cache
def _autocorrelation_priors() -> tuple[Array, Array, Array]:
    """Returns possible autocorrelations of nights, and the logarithms of their priors with a change and without one."""
    r = np.linspace(0, 0.95, 20)
    # Beta(10, 10) with a change. Without one the prior grows up to 1, where fluctuations most resemble levels.
    changed, unchanged = 9 * (np.log(np.maximum(r, 0.01)) + np.log(1 - r)), np.log1p(4 * r)
    return r, changed - np.logaddexp.reduce(changed), unchanged - np.logaddexp.reduce(unchanged)


@functools.lru_cache(maxsize=16)
def _step_model(n: int) -> _ChangeModel:
    """Returns the model of a step at each place of n nights that leaves `MIN_SEGMENT` nights on either side."""
    return _ChangeModel(np.tri(n, dtype=float).T[MIN_SEGMENT : n - MIN_SEGMENT + 1, None, :])


@dataclass(frozen=True)
class _TestedStep:
    before: Array  # Logarithms of the nights before the step.
    after: Array
    place: int  # Likeliest first night after the step.
    evidence: float  # Logarithm of the Bayes factor, over all places.
    earliest: int  # 95 % interval of the place.
    latest: int
    spread: float  # Logarithm of the effective number of likely places.

    @functools.cached_property
    def effect(self) -> float:
        """Hodges and Lehmann's shift of the logarithms."""
        return float(np.median(self.after[:, None] - self.before))


def _test_step(logs: Array, start: int, end: int) -> _TestedStep:
    """Tests for one step in the nights from `start` to `end`, at least 2 `MIN_SEGMENT`."""
    part = logs[start:end]
    nights = _winsorized(part, _LIMIT)
    if not nights.any():
        place = start + MIN_SEGMENT
        return _TestedStep(nights[:1], nights[:1], place, -math.inf, earliest=place, latest=place, spread=0.0)
    factors = clear = _step_model(len(part)).log_factors(nights)
    if np.logaddexp.reduce(factors) > 0 and np.abs(nights).max() >= _LIMIT:
        # The place of a clear step is best determined from its full height.
        clear = _step_model(len(part)).log_factors(_winsorized(part))
    orders = np.full(len(factors), math.inf)
    for index in np.flatnonzero(np.maximum(factors, clear) > 0):
        orders[index] = _evidence_of_order(part, int(index) + MIN_SEGMENT)
    evidence = float(np.logaddexp.reduce(np.minimum(factors, orders)))
    factors = np.minimum(clear, orders)
    place = int(factors.argmax()) + MIN_SEGMENT
    total = float(np.logaddexp.reduce(factors))
    chances = np.cumsum(np.exp(factors - total))
    earliest = int(np.searchsorted(chances, 0.025)) + MIN_SEGMENT
    latest = int(np.searchsorted(chances, 0.975)) + MIN_SEGMENT
    return _TestedStep(
        before=part[:place],
        after=part[place:],
        place=start + place,
        evidence=evidence,
        earliest=start + min(earliest, place),
        latest=start + max(min(latest, len(part) - MIN_SEGMENT), place),
        spread=total - float(factors.max()),
    )


def _evidence_of_order(logs: Array, start: int) -> float:
    """Returns the logarithm of the Bayes factor of the order of the nights, with a step at `start` against none.

    Two levels, each with a share of nights at the other level, are compared with one level whose outliers come in any
    order. Nights far from both levels do not count. Infinite if the step is below `_LARGE_STEP`.
    """
    early, late = np.median(logs[:start]), np.median(logs[start:])
    scatter = float(np.median(np.minimum(np.abs(logs - early), np.abs(logs - late)))) / _NORMAL_MAD
    if abs(late - early) <= _LARGE_STEP * scatter:
        return math.inf
    heights = (logs - early) / (late - early)
    is_early, is_late = (heights >= -1) & (heights < 0.5), (heights >= 0.5) & (heights <= 2)
    before = int(is_early[:start].sum()), int(is_late[:start].sum())
    after = int(is_late[start:].sum()), int(is_early[start:].sum())
    num_early, num_late = before[0] + after[1], before[1] + after[0]
    one_level = np.logaddexp(
        _log_chance_of_order(num_early, num_late), _log_chance_of_order(num_late, num_early)
    ) - math.log(2)
    return _log_chance_of_order(*before) + _log_chance_of_order(*after) - float(one_level) - math.log(SHAPE_FACTOR)


def _log_chance_of_order(usual: int, outliers: int) -> float:
    """Returns the logarithm of the probability of the nights in their order, with an unknown share of outliers."""
    a, b = _OUTLIER_SHARE
    chance = math.lgamma(outliers + a) + math.lgamma(usual + b) - math.lgamma(outliers + usual + a + b)
    return chance + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)


def _candidates(logs: Array, evidence: float) -> list[int]:
    """Returns the likeliest places of the history, its halves, quarters, ..., each overlapping the next by half.

    The number of parts counts as the number of tests, because chance makes some part look like a change.
    """
    n, candidates = len(logs), []
    for level in itertools.count():
        length = n >> level
        if level and length < _SHORTEST:
            break
        count = 2 ** (level + 1) - 1
        min_log_evidence = math.log(evidence * count) if level else 0.0
        for start in np.linspace(0, n - length, count).astype(int):
            tested = _test_step(logs, int(start), int(start) + length)
            if tested.evidence > min_log_evidence:
                candidates.append(tested)
    places: list[int] = []
    for candidate in sorted(candidates, key=attrgetter("evidence"), reverse=True):
        if all(abs(candidate.place - place) >= MIN_SEGMENT for place in places):
            places.append(candidate.place)
    return sorted(places)


def _steps_and_drifts(logs: Array, places: Sequence[int], tested: Sequence[_TestedStep]) -> list[DetectedChange]:
    """Returns the steps, with a drift in place of steps in one direction if a ramp is likelier than they are."""
    ends = [0, *places, len(logs)]
    changes: list[DetectedChange] = []
    first = start = 0
    while first < len(places):
        beyond = [i for i in range(first, len(places)) if (tested[i].effect > 0) != (tested[first].effect > 0)]
        for last in range(min(beyond, default=len(places)), first, -1):
            odds, index, end = _ramp_odds(logs, start, ends[last + 1], tested[first:last])
            if odds > math.log(SHAPE_FACTOR):
                evidence = max(step.evidence for step in tested[first:last])
                changes.append(DetectedChange(index, end, math.exp(min(evidence, 700.0)), "drift", index + 1, end - 1))
                first, start = last, end
                break
        else:
            step = tested[first]
            shape: Shape = "step" if odds < -math.log(SHAPE_FACTOR) else "step or drift"
            evidence = math.exp(min(step.evidence, 700.0))
            # A step directly after a drift cannot be earlier than the end of the drift.
            earliest = min(max(step.earliest, start + 1), step.place)
            changes.append(DetectedChange(step.place, step.place, evidence, shape, earliest, step.latest))
            first, start = first + 1, step.place
    return changes


def _add_drifts(
    logs: Array, detected: Sequence[DetectedChange], evidence: float, min_effect: float
) -> list[DetectedChange]:
    """Returns the changes, and the drifts between them that are too even for any step to be detected."""
    changes = list(detected)
    starts = [0, *(change.end for change in detected)]
    stops = [*(change.index for change in detected), len(logs)]
    for start, stop in zip(starts, stops, strict=True):
        if stop - start < 2 * MIN_DRIFT:
            continue
        odds, index, end = _ramp_odds(logs, start, stop, ())
        if odds > math.log(evidence / MIN_EVIDENCE):
            rise = float(_slope(logs[index:end]).slope) * (end - 1 - index)
            places = range(max(index - start, MIN_SEGMENT), min(end, stop - MIN_SEGMENT) - start + 1)
            orders = [_evidence_of_order(logs[start:stop], place) for place in places]
            order_evidence = max((order for order in orders if order < math.inf), default=math.inf)
            if abs(rise) >= math.log1p(min_effect) and order_evidence >= math.log(evidence):
                bayes_factor = math.exp(min(odds, 700.0)) * MIN_EVIDENCE
                changes.append(DetectedChange(index, end, bayes_factor, "drift", index + 1, end - 1))
    return sorted(changes, key=attrgetter("index"))


def _slope(logs: Sequence[float] | Array) -> Any:
    # Imported only for drifts: importing `scipy.stats` takes longer than the analysis of a year of nights.
    from scipy.stats import theilslopes

    return theilslopes(logs)


def _ramp_odds(logs: Array, start: int, end: int, tested: Sequence[_TestedStep]) -> tuple[float, int, int]:
    """Returns the logarithm of the odds of a ramp against these steps, or no change; its first night, and its end."""
    n = end - start
    grid = np.unique(np.linspace(0, n - 1, _RAMP_ENDS).astype(int))
    # Flat ends shorter than a level are part of the drift.
    grid = grid[(grid == 0) | (grid == n - 1) | ((grid >= MIN_SEGMENT) & (grid < n - MIN_SEGMENT))]
    pairs = [(a, b) for a, b in itertools.combinations(grid.tolist(), 2) if b - a >= MIN_DRIFT - 1]
    nights, time = _winsorized(logs[start:end]), np.arange(n)
    if not pairs or not nights.any() or (tested and tested[0].place <= start):
        return -math.inf, start, end
    ramps = _ChangeModel(np.stack([np.clip((time - a) / (b - a), 0, 1) for a, b in pairs])[:, None, :], _RAMP_VARIANCE)
    factors = ramps.log_factors(nights)
    a, b = pairs[int(factors.argmax())]
    # A change begins on any night with prior odds of 1 to `MIN_EVIDENCE`: each further step is a further change.
    ramp_evidence = float(np.logaddexp.reduce(factors)) + math.log(n / len(pairs) / MIN_EVIDENCE)
    step_evidence = sum(step.spread - math.log(MIN_EVIDENCE) for step in tested)
    if tested:
        shapes = np.stack([(time >= step.place - start).astype(float) for step in tested])[None]
        step_evidence += float(_ChangeModel(shapes, _RAMP_VARIANCE).log_factors(nights)[0])
    return ramp_evidence - step_evidence, start + a, start + b + 1

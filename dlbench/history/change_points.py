"""Where a history of nightly figures changed its level, how much, how sure that is, and whether it was at once.

One value is one night: the median over the runs of one series. Nights, and not the runs in them, are the unit, because
runs of one night share its state of the machine.

1. The evidence for a change is a Bayes factor (Kass and Raftery, JASA 90, 1995): how much likelier the nights are with
   a change of level at any of the places than with none, summed over the places as Shiryaev (Theory of Probability and
   Its Applications 8, 1963) sums them for nights that come one after the other. That is more telling than the best
   place alone, on which a test has to pay for the search. Neighbouring nights resemble each other, so the nights are a
   first-order autoregression whose coefficient is not known: without a change it may be anything up to 0.95
   (moods of a machine then explain the nights), with one it is near 0.5. Scale and level are integrated out, the step
   has a normal prior of variance `_STEP` in units of the scatter. Odd nights are drawn in to `_CLIP` robust standard
   deviations (of differences of neighbours, which know nothing of levels) of the nights around them, so that no few of
   them are a level, and all nights to `_MOST` of the median. Where a share of all nights is odd, some are neighbours by
   chance: a large step has at most the evidence of the order of its nights (beta-binomial, against one share).
2. Candidates are the likeliest places of overlapping stretches of all lengths (seeded binary segmentation: Kovács,
   Bühlmann, Li and Munk, Biometrika 110, 2023). Those that do not hold are merged from the bottom, the weakest first,
   as Hunter does (Fleming et al., ICPE'23): each is moved to the likeliest place between its neighbours, and judged
   there.
3. The levels must differ by a least effect, too (Hodges and Lehmann's shift).
4. A change, or several in one direction, is held against a ramp over the same nights: what rises slowly is a drift and
   has no date. Where neither is clearly likelier, that is said.
5. Of several histories the e-values of Wang and Ramdas (JRSS B 84, 2022) decide over all of them together: with m
   histories, of which k change, each change needs m / k times the evidence.

Measured by simulation in `benchmarks/truth/trends.py`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dlbench.lazy import Array, np
from dlbench.stats.estimates import Estimate, median_estimate, shift_estimate

MIN_EVIDENCE = 800.0
"""Least Bayes factor of a change point. Set by simulation: at autocorrelation 0.5 about 5 % of histories of 110 nights
ever show a change that is none. For a single look 150 is called very strong (Kass and Raftery)."""
MIN_EFFECT = 0.02
ODD_NIGHTS = 3  # This many odd nights in a row are outliers, however far they lie.
MIN_SEGMENT = 5  # Fewest nights between two change points, so that every level has a 95 % interval.
MIN_NIGHTS = 12  # With fewer nights no order of them, however clear, reaches `MIN_EVIDENCE`.
MIN_DRIFT = 2 * MIN_SEGMENT
SHAPE_FACTOR = 10.0
"""A ramp must be this many times as likely as steps to be called a drift, and the other way round (Jeffreys, Theory of
Probability, 1961, appendix B: "strong"); two levels so many times as likely as one with odd nights."""

NAMED = 0.01  # Share of ordinary nights that lie beyond the usual range.
_MOST_USUAL = 250  # Newest nights of a level of which its usual range is made.
_TAILS = (1.5, 2.0, 3.0, 6.0, 30.0)
"""Degrees of freedom that nights may have, equally likely beforehand: from tails without a variance to normal ones."""
_WIDTHS = tuple(math.exp(-1.5 + 0.25 * step) for step in range(17))  # The scale, in robust standard deviations.
_SHIFTS = tuple(-3.0 + step for step in range(7))  # What the centre may be off the median, in standard errors.

_CLIP, _MOST = 3.0, 4.0
_LARGE = 3.0  # Scatters of the least step that odd nights may look like.
_ODD_SHARE = (0.5, 3.0)  # Beta distribution of the share of odd nights: mean 1/7, and any share up to most nights.
_STEP = 2.0
_NORMAL_MAD = 0.6744897501960817  # Median of the absolute value of a standard normal.
_RAMP = 50.0  # As `_STEP`, where a ramp is held against steps: what is compared may be many scatters high.
_SHORTEST = 20  # Nights of the shortest stretches that are looked at for candidates.
_RAMP_ENDS = 20

Shape = Literal["step", "drift", "step or drift"]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Nights between two change points, or an end of the history."""

    start: int
    end: int
    level: Estimate  # Median over its nights, in the unit of the values; of a drift that at its last night.
    rise: float = 0.0  # What the logarithm rises each night; 0 where it does not drift.

    def flat(self, values: Sequence[float], at: int) -> list[float]:
        """The nights of the segment as they would be without its drift, on the level of the night `at`."""
        own = values[self.start : self.end]
        if not self.rise:
            return list(own)
        return [value * math.exp(self.rise * (at - night)) for night, value in enumerate(own, self.start)]


@dataclass(frozen=True)
class Found:
    """A night from which on the level is another, or nights over which it drifted."""

    index: int  # First night after the change; of a drift its first night.
    end: int  # Of a drift the first night after it; else `index`.
    evidence: float
    """Bayes factor: how much likelier the nights between the neighbouring change points are with this change than
    without; of several histories divided by what all of them cost."""
    shape: Shape
    earliest: int
    """First of the nights that may be the first after the change: of 95 % of what is likely. Of a drift its second."""
    latest: int  # Last of them; of a drift its last night.


@dataclass(frozen=True, kw_only=True)
class ChangePoint(Found):
    """The change with the levels around it."""

    before: Segment  # The segment before; of a drift the drift, its level that of the first night.
    after: Segment
    ratio: Estimate
    """The shift of the nights after against those before (1), by rank sums; of a drift its last night over its first
    (Theil and Sen). The place was found in the same nights, so a small change is shown slightly larger than it is."""


@dataclass(frozen=True, kw_only=True)
class Newest:
    """What the newest nights alone say: too few of them for a change point."""

    num_beyond: int  # Newest nights, in a row, beyond the usual range on one side; 0: the newest is ordinary.
    ratio: float  # Median of these nights (of the newest one, if none is beyond) over the level before them (1).
    low: float  # Usual range of the nights before: holds the next but for `NAMED`; `MIN_EFFECT` or more each way.
    high: float
    wait_for: int  # More such nights that make a change point of them; 0 if none is beyond.


def change_points_together(histories: Sequence[Sequence[float]]) -> list[list[ChangePoint]]:
    """The change points of each of several histories, as `detect_together` finds them."""
    return [described(values, found) for values, found in zip(histories, detect_together(histories), strict=True)]


def described(values: Sequence[float], found: Sequence[Found]) -> list[ChangePoint]:
    """Changes with the levels around them."""
    pieces = segments(values, found)
    made = []
    for one in found:
        if one.shape == "drift":
            after = next(piece for piece in pieces if piece.start == one.index)
            slope = _slope([math.log(value) for value in values[one.index : one.end]])
            nights = one.end - 1 - one.index
            low, high = (math.exp(float(end) * nights) for end in (slope.low_slope, slope.high_slope))
            ratio = Estimate(math.exp(float(slope.slope) * nights), low, high, one.end - one.index, "fit", "", 0.95)
            before = replace(after, level=median_estimate(after.flat(values, one.index)))
        else:
            before = next(piece for piece in pieces if piece.end == one.index)
            after = next(piece for piece in pieces if piece.start == one.index)
            ratio = shift_estimate(after.flat(values, after.start), before.flat(values, before.end - 1))
        made.append(ChangePoint(**vars(one), before=before, after=after, ratio=ratio))
    return made


def segments(values: Sequence[float], found: Sequence[Found]) -> list[Segment]:
    """The levels, and drifts, between changes (in order); one segment where there are none."""
    if not values:
        return []
    drifts = {one.index for one in found if one.shape == "drift"}
    places = sorted({0, len(values), *(one.index for one in found), *(one.end for one in found)})
    made = []
    for start, end in itertools.pairwise(places):
        rise = float(_slope([math.log(value) for value in values[start:end]]).slope) if start in drifts else 0.0
        piece = Segment(start=start, end=end, level=median_estimate(values[start:end]), rise=rise)
        made.append(replace(piece, level=median_estimate(piece.flat(values, end - 1))))
    return made


def detect(values: Sequence[float], *, evidence: float = MIN_EVIDENCE, min_effect: float = MIN_EFFECT) -> list[Found]:
    """All changes of a history, oldest first; equal values give equal changes.

    Values are positive and finite, one for each night, oldest first, in any unit; fewer than `MIN_NIGHTS` have none.
    The levels must differ by `min_effect` (relative) upwards, or by its inverse downwards.
    """
    array = np.asarray(values, dtype=float)
    if len(array) < MIN_NIGHTS:
        return []
    logs = np.log(array)
    places = _candidates(logs, evidence)
    seen: set[tuple[int, ...]] = set()
    known: dict[tuple[int, int, int], _Tested] = {}
    tested: list[_Tested] = []
    while places:
        ends = [0, *places, len(logs)]
        tested = []
        for between in zip(ends[:-2], places, ends[2:], strict=True):
            if between not in known:
                known[between] = _test(logs, between[0], between[2])
            tested.append(known[between])
        least = math.log(evidence), math.log1p(min_effect)
        weak = [i for i, one in enumerate(tested) if one.evidence < least[0] or abs(one.effect) < least[1]]
        if weak:
            del places[min(weak, key=lambda i: (tested[i].evidence, abs(tested[i].effect)))]
            continue
        # One at a time: two neighbours that move at once could pass each other.
        moved = next((i for i, one in enumerate(tested) if one.place != places[i]), None)
        if moved is not None:
            key = (*places[:moved], tested[moved].place, *places[moved + 1 :])
        else:
            further = [
                one.place
                for start, end in itertools.pairwise(ends)
                if end - start >= 2 * MIN_SEGMENT and (one := _test(logs, start, end)).evidence >= least[0]
            ]
            key = tuple(sorted([*places, *further]))
        if key in seen or key == tuple(places):
            break
        seen.add(key)
        places = list(key)
    return _with_drifts(logs, _shaped(logs, places, tested), evidence, min_effect)


def detect_together(histories: Sequence[Sequence[float]]) -> list[list[Found]]:
    """`detect` for each of several histories, the evidence divided by what all of them cost.

    A history is one test, or as many as it has changes; those too short for any are none.
    """
    found = [detect(values) for values in histories]
    while True:
        kept = sum(map(len, found))
        tests = kept + sum(not one and len(values) >= MIN_NIGHTS for one, values in zip(found, histories, strict=True))
        cost = tests / max(1, kept)
        if all(one.evidence >= MIN_EVIDENCE * cost for changes in found for one in changes):
            return [[replace(one, evidence=one.evidence / cost) for one in changes] for changes in found]
        found = [
            detect(values, evidence=MIN_EVIDENCE * cost)
            if any(one.evidence < MIN_EVIDENCE * cost for one in changes)
            else changes
            for values, changes in zip(histories, found, strict=True)
        ]


def newest(values: Sequence[float], last: Segment | None = None, *, histories: int = 1) -> Newest | None:
    """What the newest nights say that are too few for a change point.

    Values are those of `detect`, of its last segment or of all nights; `histories`, how many are followed
    together, counts for `wait_for`. None where fewer than `MIN_SEGMENT` nights of the segment lie before the newest.
    """
    own = last.flat(values, last.end - 1) if last else values
    logs = np.log(np.asarray(own, dtype=float))
    if len(logs) <= MIN_SEGMENT:
        return None
    usual = _usual(logs[:-1])
    for count in range(min(len(logs) - MIN_SEGMENT, MIN_NIGHTS), 0, -1):
        before, tail = logs[:-count], logs[-count:]
        # No range is narrower than this.
        off, scatter = tail - np.median(before), float(np.median(np.abs(before - np.median(before))))
        if np.abs(off).min() < max(1.5 * scatter, math.log1p(MIN_EFFECT)):
            continue
        low, high = _usual(before) if count > 1 else usual
        if (tail > high).all() or (tail < low).all():
            ratio = math.exp(float(np.median(off)))
            wait = _wait(logs, count, MIN_EVIDENCE * histories)
            return Newest(num_beyond=count, ratio=ratio, low=math.exp(low), high=math.exp(high), wait_for=wait)
    ratio = math.exp(float(logs[-1] - np.median(logs[:-1])))
    return Newest(num_beyond=0, ratio=ratio, low=math.exp(usual[0]), high=math.exp(usual[1]), wait_for=0)


def _wait(logs: Array, count: int, evidence: float) -> int:
    """More nights like the newest `count` ones until these are a level."""
    for more in range(1, MIN_NIGHTS):
        later = np.concatenate([logs, np.resize(logs[-count:], more)])
        if len(later) >= MIN_NIGHTS and count + more >= MIN_SEGMENT:
            tested = _test(later, 0, len(later))
            if tested.evidence >= math.log(evidence) and tested.place >= len(logs) - count - 1:
                return more
    return MIN_NIGHTS


def _usual(logs: Array) -> tuple[float, float]:
    """Where the next night lies but for `NAMED`, half of it on either side.

    The predictive distribution of a Student t whose centre, scale and degrees of freedom are not known (Geweke, Journal
    of Applied Econometrics 8, 1993), on a grid: so the nights themselves say how long the tails are, and few nights
    leave that open.
    """
    from scipy.special import gammaln, stdtr

    nights = np.sort(logs[-_MOST_USUAL:])
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
    held = weights > 1e-5
    weights = weights[held] / weights[held].sum()
    freedom, widths, middles = freedom[held], widths[held], middles[held]
    shares = np.array([NAMED / 2, 1 - NAMED / 2])
    low, high = np.full(2, centre - 1e3 * scale), np.full(2, centre + 1e3 * scale)
    for _ in range(30):
        middle = (low + high) / 2
        is_low = stdtr(freedom, (middle[:, None] - middles) / widths) @ weights < shares
        low, high = np.where(is_low, middle, low), np.where(is_low, high, middle)
    return min(float(low[0]), centre - narrowest), max(float(high[1]), centre + narrowest)


def _drawn_in(logs: Array, most: float = math.inf) -> Array:
    """Nights around their median in robust standard deviations, odd ones drawn in; zeros where all are equal.

    A night is odd by the median of the nights around it, of which `ODD_NIGHTS` in a row do not decide; there are at
    least 2 `ODD_NIGHTS` + 1. What lies beyond `most`, on either side of the median of all, is drawn in, too.
    """
    steps = np.abs(np.diff(logs))
    # More than half of the differences zero: values are rounded.
    scale = float(np.median(steps)) / (_NORMAL_MAD * math.sqrt(2)) or float(np.mean(steps))
    # Below this, rounding of the logarithms.
    if scale < 1e-12:
        return np.zeros(len(logs))
    around = np.median(np.lib.stride_tricks.sliding_window_view(logs, 2 * ODD_NIGHTS + 1), axis=1)
    around = np.concatenate([np.repeat(around[0], ODD_NIGHTS), around, np.repeat(around[-1], ODD_NIGHTS)])
    nights = around + np.clip(logs - around, -_CLIP * scale, _CLIP * scale)
    return np.asarray(np.clip((nights - np.median(nights)) / scale, -most, most))


class _Changes:
    """Changes of given shapes, each of which is held against none.

    With the covariance C of a first-order autoregression r, a' C^-1 b = ((1 + r^2) a.b - r (a[1:].b[:-1] +
    a[:-1].b[1:]) - r^2 (a[0] b[0] + a[-1] b[-1])) / (1 - r^2), so the sums are made once for all r.
    """

    def __init__(self, shapes: Array, variance: float = _STEP) -> None:
        """Sums that are the same for all nights; `variance` is that of the prior of a column's height, in scatters'.

        Shapes are m x k x n: m changes of n nights, each of k columns that are added to the level, from 0 to 1.
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
        self.common = -(n - 1) / 2 * np.log(1 - _moods()[0][:, None] ** 2) - np.log(self.level) / 2

    @staticmethod
    def _product(a: Array, b: Array) -> Array:
        """For each r: a' C^-1 b along the last axis."""
        r = _moods()[0].reshape(-1, *[1] * max(1, np.broadcast(a, b).ndim - 1))
        whole = np.einsum("...n,...n->...", a, b)
        lagged = np.einsum("...n,...n->...", a[..., 1:], b[..., :-1]) + np.einsum(
            "...n,...n->...", a[..., :-1], b[..., 1:]
        )
        ends = a[..., 0] * b[..., 0] + a[..., -1] * b[..., -1]
        return np.asarray(((1 + r * r) * whole - r * lagged - r * r * ends) / (1 - r * r))

    def log_factors(self, nights: Array) -> Array:
        """Logarithms of the Bayes factors of the m changes, of n nights as `_drawn_in` makes them."""
        half = (len(nights) - 1) / 2
        level_nights = self._product(np.ones(len(nights)), nights)
        squares = self._product(nights, nights) - level_nights**2 / self.level
        slopes = self._product(self.shapes, nights) - self.with_level * (level_nights / self.level)[..., None]
        gain = np.einsum("rmi,rmij,rmj->rm", slopes, self.inverse, slopes)
        left = np.maximum(squares - gain, 1e-9)
        _, changed, unchanged = _moods()
        with_change = changed[:, None] + self.common - self.size - half * np.log(left)
        without = unchanged[:, None] + self.common - half * np.log(squares)
        return np.asarray(np.logaddexp.reduce(with_change, axis=0) - np.logaddexp.reduce(without, axis=0))


@functools.cache
def _moods() -> tuple[Array, Array, Array]:
    """Autocorrelations that nights may have, and logarithms of their priors with a change and without one."""
    r = np.linspace(0, 0.95, 20)
    # Beta(10, 10) with a change. Without one, more and more up to 1, where moods look most like levels.
    changed, unchanged = 9 * (np.log(np.maximum(r, 0.01)) + np.log(1 - r)), np.log1p(4 * r)
    return r, changed - np.logaddexp.reduce(changed), unchanged - np.logaddexp.reduce(unchanged)


@functools.lru_cache(maxsize=16)
def _steps(n: int) -> _Changes:
    """A step at each place of n nights that leaves `MIN_SEGMENT` nights on either side."""
    return _Changes(np.tri(n, dtype=float).T[MIN_SEGMENT : n - MIN_SEGMENT + 1, None, :])


@dataclass(frozen=True)
class _Tested:
    place: int
    evidence: float  # Logarithm, over all places.
    effect: float  # Hodges and Lehmann's shift of the logarithms.
    earliest: int
    latest: int
    spread: float  # Logarithm of how many places are as likely as the likeliest.


def _test(logs: Array, start: int, end: int) -> _Tested:
    """The one change in these nights, if there is one; at least 2 `MIN_SEGMENT` nights."""
    part = logs[start:end]
    nights = _drawn_in(part, _MOST)
    if not nights.any():
        return _Tested(start + MIN_SEGMENT, -math.inf, 0.0, start + MIN_SEGMENT, start + MIN_SEGMENT, 0.0)
    factors = clear = _steps(len(part)).log_factors(nights)
    if np.logaddexp.reduce(factors) > 0 and np.abs(nights).max() >= _MOST:
        # Where a clear step lies is clearest in all of its height.
        clear = _steps(len(part)).log_factors(_drawn_in(part))
    orders = np.full(len(factors), math.inf)
    for index in np.flatnonzero(np.maximum(factors, clear) > 0):
        orders[index] = _evidence_of_order(part, int(index) + MIN_SEGMENT)
    evidence = float(np.logaddexp.reduce(np.minimum(factors, orders)))
    factors = np.minimum(clear, orders)
    place = int(factors.argmax()) + MIN_SEGMENT
    whole = float(np.logaddexp.reduce(factors))
    chances = np.cumsum(np.exp(factors - whole))
    earliest, latest = (int(np.searchsorted(chances, share)) + MIN_SEGMENT for share in (0.025, 0.975))
    return _Tested(
        place=start + place,
        evidence=evidence,
        effect=float(np.median(part[place:, None] - part[:place])),
        earliest=start + min(earliest, place),
        latest=start + max(min(latest, len(part) - MIN_SEGMENT), place),
        spread=whole - float(factors.max()),
    )


def _evidence_of_order(logs: Array, start: int) -> float:
    """Returns the logarithm of how much likelier the order of the nights is with a step at `start` than without one.

    Two levels, each with a share of nights that lie at the other, are held against one whose odd nights come in any
    order. Nights farther from both levels than these are apart say nothing. Infinite where the step is below `_LARGE`.
    """
    early, late = np.median(logs[:start]), np.median(logs[start:])
    scatter = float(np.median(np.minimum(np.abs(logs - early), np.abs(logs - late)))) / _NORMAL_MAD
    if abs(late - early) <= _LARGE * scatter:
        return math.inf
    heights = (logs - early) / (late - early)
    is_early, is_late = (heights >= -1) & (heights < 0.5), (heights >= 0.5) & (heights <= 2)
    before = int(is_early[:start].sum()), int(is_late[:start].sum())
    after = int(is_late[start:].sum()), int(is_early[start:].sum())
    num_early, num_late = before[0] + after[1], before[1] + after[0]
    one_level = np.logaddexp(_with_odd(num_early, num_late), _with_odd(num_late, num_early)) - math.log(2)
    return _with_odd(*before) + _with_odd(*after) - float(one_level) - math.log(SHAPE_FACTOR)


def _with_odd(usual: int, odd: int) -> float:
    """Returns the logarithm of the chance of nights in their order, where the share of odd ones is not known."""
    a, b = _ODD_SHARE
    chance = math.lgamma(odd + a) + math.lgamma(usual + b) - math.lgamma(odd + usual + a + b)
    return chance + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)


def _candidates(logs: Array, evidence: float) -> list[int]:
    """Likeliest places of the whole, its halves, quarters, ..., each overlapping the next by half.

    Of the many parts chance makes one look like an episode now and then, so their number counts as more looks.
    """
    n, found = len(logs), []
    for level in itertools.count():
        length = n >> level
        if length < (_SHORTEST if level else 1):
            break
        count = 2 ** (level + 1) - 1
        for start in np.linspace(0, n - length, count).astype(int):
            tested = _test(logs, int(start), int(start) + length)
            if tested.evidence > (math.log(evidence * count) if level else 0.0):
                found.append(tested)
    places: list[int] = []
    for one in sorted(found, key=lambda one: -one.evidence):
        if all(abs(one.place - other) >= MIN_SEGMENT for other in places):
            places.append(one.place)
    return sorted(places)


def _shaped(logs: Array, places: Sequence[int], tested: Sequence[_Tested]) -> list[Found]:
    """The changes, those of one direction in a row as one drift where a ramp is likelier than they are."""
    ends = [0, *places, len(logs)]
    made: list[Found] = []
    first = start = 0
    while first < len(places):
        beyond = [i for i in range(first, len(places)) if (tested[i].effect > 0) != (tested[first].effect > 0)]
        for last in range(min(beyond, default=len(places)), first, -1):
            odds, index, end = _ramp(logs, start, ends[last + 1], tested[first:last])
            if odds > math.log(SHAPE_FACTOR):
                evidence = max(one.evidence for one in tested[first:last])
                made.append(Found(index, end, math.exp(min(evidence, 700.0)), "drift", index + 1, end - 1))
                first, start = last, end
                break
        else:
            one = tested[first]
            shape: Shape = "step" if odds < -math.log(SHAPE_FACTOR) else "step or drift"
            evidence = math.exp(min(one.evidence, 700.0))
            # After a drift that ends where it begins, a step has its own night alone.
            earliest = min(max(one.earliest, start + 1), one.place)
            made.append(Found(one.place, one.place, evidence, shape, earliest, one.latest))
            first, start = first + 1, one.place
    return made


def _with_drifts(logs: Array, found: Sequence[Found], evidence: float, min_effect: float) -> list[Found]:
    """The changes, and drifts between them so even that no step in them stands out."""
    made = list(found)
    ends = [0, *itertools.chain.from_iterable((one.index, one.end) for one in found), len(logs)]
    for start, stop in zip(ends[::2], ends[1::2], strict=True):
        if stop - start < 2 * MIN_DRIFT:
            continue
        odds, index, end = _ramp(logs, start, stop, ())
        if odds > math.log(evidence / MIN_EVIDENCE):
            rise = float(_slope(logs[index:end]).slope) * (end - 1 - index)
            places = range(max(index - start, MIN_SEGMENT), min(end, stop - MIN_SEGMENT) - start + 1)
            orders = [_evidence_of_order(logs[start:stop], place) for place in places]
            large = max((order for order in orders if order < math.inf), default=math.inf)
            if abs(rise) >= math.log1p(min_effect) and large >= math.log(evidence):
                certain = math.exp(min(odds, 700.0)) * MIN_EVIDENCE
                made.append(Found(index, end, certain, "drift", index + 1, end - 1))
    return sorted(made, key=lambda one: one.index)


def _slope(logs: Sequence[float] | Array) -> Any:
    """By Theil and Sen; imported where there is a drift, because `scipy.stats` takes longer than a year of nights."""
    from scipy.stats import theilslopes

    return theilslopes(logs)


def _ramp(logs: Array, start: int, end: int, tested: Sequence[_Tested]) -> tuple[float, int, int]:
    """Logarithm of how much likelier a ramp is than these steps, or than no change; its first night, and its end."""
    n = end - start
    grid = np.unique(np.linspace(0, n - 1, _RAMP_ENDS).astype(int))
    # Flat ends shorter than a level are part of the drift.
    grid = grid[(grid == 0) | (grid == n - 1) | ((grid >= MIN_SEGMENT) & (grid < n - MIN_SEGMENT))]
    pairs = [(int(a), int(b)) for a in grid for b in grid if b - a >= MIN_DRIFT - 1]
    nights, time = _drawn_in(logs[start:end]), np.arange(n)
    if not pairs or not nights.any() or (tested and tested[0].place <= start):
        return -math.inf, start, end
    ramps = _Changes(np.stack([np.clip((time - a) / (b - a), 0, 1) for a, b in pairs])[:, None, :], _RAMP)
    factors = ramps.log_factors(nights)
    a, b = pairs[int(factors.argmax())]
    # A change begins on any night with the odds of 1 to `MIN_EVIDENCE`: each further step is a further change.
    ramp = float(np.logaddexp.reduce(factors)) + math.log(n / len(pairs) / MIN_EVIDENCE)
    rival = sum(one.spread - math.log(MIN_EVIDENCE) for one in tested)
    if tested:
        steps = _Changes(np.stack([(time >= one.place - start).astype(float) for one in tested])[None], _RAMP)
        rival += float(steps.log_factors(nights)[0])
    return ramp - rival, start + a, start + b + 1

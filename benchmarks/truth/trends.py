"""Trends: how often a history in which nothing changes shows a change, how late real ones are seen, as what.

A night's value scatters by 3 % (2 % where changes are looked for), on logarithms. The noise is normal, of long tails
(Student's t with 2 degrees of freedom), one-sided (exponential: nights are only ever slower), or normal with one night
in twenty far off; of normal noise a share of a night's deviation is handed on to the next (first-order autoregression):
a machine has moods. In further histories a share of the nights is slow, all by as much or each by its own amount. A
history is looked at every fourth night until it has 110, in each look every change counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from benchmarks.figures import Figure
from benchmarks.gate import share, share_figure
from dlbench.history.change_points import NAMED, DetectedChange, detect, detect_together, newest

Array = npt.NDArray[np.float64]

NIGHTS, EVERY = 110, 4
TOGETHER = 9
"""Trends of a history: three metrics of three configurations."""
SINGLE, TOGETHER_HISTORIES = 120, 30
QUIET, MOST = 60, 60
"""Nights before a change, and after it until it counts as not seen."""
FED = 16
WEAK = 100
"""Histories with a step of 3 % at 2 % scatter."""
DRIFTS, DRIFT_NIGHTS, DRIFT = 15, 120, 0.10
NEWEST = 1000
FALSE = 5.0
"""Percent of histories without change that may ever show one."""
SLOW_SHARES = (0.05, 0.10, 0.15, 0.25)
"""Shares of nights that are slow for a reason of their own, in histories without change and with one."""
SLOW_HISTORIES, SLOW_FALSE = 120, 3.0


def figures() -> Iterator[Figure]:
    """All figures of the subject."""
    for kind, correlation in (("normal", 0.0), ("normal", 0.5), ("normal", 0.8)):
        yield false_histories(SINGLE, 1, correlation, kind)
    for kind in ("long tails", "one-sided", "odd nights"):
        yield false_histories(SINGLE // 2, 1, 0.0, kind)
    yield false_histories(TOGETHER_HISTORIES, TOGETHER, 0.5)
    for odd in SLOW_SHARES:
        yield false_among_slow(odd)
    for step in (0.03, 0.10):
        for odd in SLOW_SHARES:
            yield step_among_slow(step, odd)
    for quiet in (60, 90, 120):
        yield weak_step(quiet)
    for step in (0.05, 0.10):
        for correlation in (0.0, 0.5):
            yield delay(step, correlation)
    for correlation in (0.0, 0.5):
        yield from shapes(correlation)
    for count in (6, 12, 30, 100):
        for kind, correlation in (("normal", 0.0), ("normal", 0.5), ("long tails", 0.0), ("one-sided", 0.0)):
            yield named(count, correlation, kind)


def false_histories(histories: int, trends: int, correlation: float, kind: str = "normal") -> Figure:
    """Histories of so many trends that ever show a change at one of their looks."""
    alarms = sum(ever_shows(number, trends, correlation, kind) for number in range(histories))
    of = "one trend" if trends == 1 else f"{trends} trends together"
    return share_figure(
        f"trends: histories without change that show one in any of {len(looks())} looks, {of}, {kind} noise, "
        f"autocorrelation {correlation:g}",
        alarms,
        histories,
        f"at most {FALSE:g} %",
        lambda value: value <= FALSE,
    )


def looks() -> range:
    """Lengths of a history when it is looked at."""
    return range(12, NIGHTS + 1, EVERY)


def ever_shows(seed: int, trends: int, correlation: float, kind: str = "normal") -> bool:
    """Whether any look at a history without change shows one."""
    values = [nights([seed, trend], NIGHTS, correlation, 0.03, kind) for trend in range(trends)]
    return any(any(detect_together([one[:seen] for one in values])) for seen in looks())


def false_among_slow(odd: float) -> Figure:
    """Histories without change in which so many nights are slow that ever show a change at one of their looks."""
    alarms = 0
    for seed in range(SLOW_HISTORIES):
        values = slow_nights([seed, 80], NIGHTS, odd, (0.006, 0.03))
        alarms += any(detect(list(values[:seen])) for seen in looks())
    return share_figure(
        f"trends: histories without change that show one in any of {len(looks())} looks, one trend, {odd:.0%} of "
        "the nights 8 to 30 % slow, scatter of the others 0.6 to 3 %",
        alarms,
        SLOW_HISTORIES,
        f"at most {SLOW_FALSE:g} %",
        lambda value: value <= SLOW_FALSE,
    )


def step_among_slow(step: float, odd: float) -> Figure:
    """Histories in which so many nights are slow that show a step within 30 nights after it."""
    shown = 0
    for seed in range(SLOW_HISTORIES):
        values = slow_nights([seed, 81], 90 + 30, odd, (0.006, 0.012))
        values[90:] *= 1 + step
        shown += any(one.index >= 75 for seen in range(6, 31, 3) for one in detect(list(values[: 90 + seen])))
    return share_figure(
        f"trends: steps of {step:.0%} shown within 30 nights, after 90 nights, {odd:.0%} of the nights 8 to 30 % "
        "slow, scatter of the others 0.6 to 1.2 %",
        shown,
        SLOW_HISTORIES,
        "at least 80 %",
        lambda value: value >= 80,
    )


def weak_step(quiet: int) -> Figure:
    """Histories in which a step of 3 % at 2 % scatter and autocorrelation 0.5 is shown within 30 nights."""
    shown = 0
    for seed in range(WEAK):
        values = nights([seed, 78], quiet + 30, 0.5, 0.02)
        values[quiet:] *= 1.03
        shown += any(
            one.index >= quiet - 15 for seen in range(6, 31, 3) for one in detect(list(values[: quiet + seen]))
        )
    return share_figure(
        f"trends: steps of 3 % (scatter 2 %, autocorrelation 0.5) shown within 30 nights, after {quiet} nights",
        shown,
        WEAK,
        "at least 80 %",
        lambda value: value >= 80,
    )


def shapes(correlation: float) -> Iterator[Figure]:
    """What a drift of 10 % over 120 nights, and a step of as much, is called."""
    rise = math.log1p(DRIFT) * np.arange(DRIFT_NIGHTS) / DRIFT_NIGHTS
    for what, course in (("drift", rise), ("step", math.log1p(DRIFT) * (np.arange(DRIFT_NIGHTS) >= DRIFT_NIGHTS // 2))):
        found: list[DetectedChange] = []
        for seed in range(DRIFTS):
            found += detect(list(nights([seed, 79], DRIFT_NIGHTS, correlation, 0.02) * np.exp(course)))
        wrong = {"drift": "step", "step": "drift"}[what]
        counts = Counter(one.shape for one in found)
        value, low, high = share(counts[wrong], max(1, len(found)))  # type: ignore[index]
        yield Figure(
            name=f"trends: of a {what} of {DRIFT:.0%} (scatter 2 %, autocorrelation {correlation:g}, {DRIFT_NIGHTS} "
            f"nights) called a {wrong}",
            value=value,
            low=low,
            high=high,
            n=len(found),
            unit="%",
            goal="0 %",
            met=counts[wrong] == 0,  # type: ignore[index]
            reason=f"{DRIFTS} histories: " + ", ".join(f"{count} {shape}" for shape, count in counts.items()),
        )


def delay(step: float, correlation: float) -> Figure:
    """Nights after a slowdown in one of `TOGETHER` trends until it is shown."""
    waited = []
    for seed in range(FED):
        values = nights([seed, 77], QUIET + MOST, correlation, 0.02)
        values[QUIET:] *= 1 + step
        others = [nights([seed, trend], QUIET + MOST, correlation, 0.02) for trend in range(1, TOGETHER)]
        waited.append(_first_shown(values, others))
    return Figure.of(
        waited,
        name=f"trends: nights until a change of {step:.0%} in one of {TOGETHER} trends is shown (scatter 2 %, "
        f"autocorrelation {correlation:g})",
        unit="nights",
        goal="see the false alarms",
        reason=f"90 % within {np.percentile(waited, 90):.0f}; not within {MOST}: {sum(one > MOST for one in waited)}",
    )


def _first_shown(values: Array, others: list[Array]) -> float:
    for seen in range(1, MOST + 1):
        # What the other trends say does not change this one's look: as many quiet tests stand beside it.
        together = detect_together([values[: QUIET + seen], *(one[: QUIET // 2] for one in others)])
        if any(one.index >= QUIET - 5 for one in together[0]):
            return seen
    return MOST + 1


def named(count: int, correlation: float, kind: str) -> Figure:
    """Ordinary newest nights, of so many in all, that are named as beyond the usual range."""
    beyond = 0
    for seed in range(NEWEST):
        found = newest(list(nights([seed, 5], count, correlation, 0.03, kind)))
        assert found is not None
        beyond += found.num_outside > 0
    # The range is made for independent nights.
    most = 100 * NAMED * (3 if correlation else 1.5)
    return share_figure(
        f"trends: ordinary newest nights that are named, {count} nights, {kind} noise, autocorrelation {correlation:g}",
        beyond,
        NEWEST,
        f"at most {most:g} %",
        lambda value: value <= most,
    )


def nights(seed: list[int], count: int, correlation: float, scatter: float, kind: str = "normal") -> Array:
    """A level of 1, from night to night."""
    generator = np.random.default_rng(seed)
    if kind == "long tails":
        shocks = scatter / 2 * generator.standard_t(2, count)
    elif kind == "one-sided":
        shocks = generator.exponential(scatter, count)
    else:
        shocks = generator.normal(0, scatter, count)
    shocks[1:] *= math.sqrt(1 - correlation**2)
    logs = shocks.copy()
    for night in range(1, count):
        logs[night] += correlation * logs[night - 1]
    if kind == "odd nights":
        logs += np.where(generator.random(count) < 0.05, generator.choice([-10, 10], count) * scatter, 0.0)
    values: Array = np.exp(logs)
    return values


def slow_nights(seed: list[int], count: int, odd: float, scatters: tuple[float, float]) -> Array:
    """A level of 1 with so many slow nights: of one size in every other history, each of its own size in the others."""
    generator = np.random.default_rng(seed)
    logs = generator.normal(0, math.exp(generator.uniform(*np.log(scatters))), count)
    sizes = np.log1p(generator.uniform(0.08, 0.30, count))
    if seed[0] % 2:
        sizes[:] = sizes[0]
    logs += np.where(generator.random(count) < odd, sizes, 0.0)
    values: Array = np.exp(logs)
    return values

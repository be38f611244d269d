"""Trends: how often a history in which nothing changes shows a change, and how late real changes are seen.

A night's value scatters by 3 % (2 % where changes are looked for), normal on logarithms, and half of a night's
deviation is handed on to the next (first-order autoregression of 0.5): a machine has moods. A history is looked at
every fourth night until it has 180, and a look is false if it shows a change within the newest 21 nights, as
`--fail-on-regression 21` asks, in either direction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from dlbench.history.trends.change_points import NAMED, detect_together, newest
from tests.bench.figures import Figure, median_interval
from tests.bench.gate import share

Array = npt.NDArray[np.float64]

NIGHTS, EVERY, RECENT = 180, 4, 21
TOGETHER = 9
"""Trends of a history: three metrics of three configurations."""
SINGLE, TOGETHER_HISTORIES = 150, 50
QUIET, MOST = 60, 60
"""Nights before a change, and after it until it counts as not seen."""
FED = 16
NEWEST = 6000
FALSE = 5.0
"""Percent of histories without change that may ever show one."""


def figures() -> Iterator[Figure]:
    """All figures of the subject."""
    yield false_histories(SINGLE, 1, 0.5)
    yield false_histories(TOGETHER_HISTORIES, TOGETHER, 0.5)
    yield false_histories(60, 1, 0.0)
    for step in (0.05, 0.10):
        for correlation in (0.0, 0.5):
            yield delay(step, correlation)
    for count in (6, 12, 30):
        for correlation in (0.0, 0.5):
            yield named(count, correlation)


def false_histories(histories: int, trends: int, correlation: float) -> Figure:
    """Histories of so many trends that ever show a change at one of their looks."""
    alarms = sum(ever_shows(number, trends, correlation) for number in range(histories))
    value, low, high = share(alarms, histories)
    of = "one trend" if trends == 1 else f"{trends} trends together"
    return Figure(
        name=f"trends: histories without change that show one in any of {len(looks())} looks, {of}, autocorrelation "
        f"{correlation:g}",
        value=value,
        low=low,
        high=high,
        n=histories,
        unit="%",
        goal=f"at most {FALSE:g} %",
        met=value <= FALSE,
    )


def looks() -> range:
    """Lengths of a history when it is looked at."""
    return range(12, NIGHTS + 1, EVERY)


def ever_shows(seed: int, trends: int, correlation: float) -> bool:
    """Whether any look at a history without change shows a recent one."""
    values = [nights([seed, trend], NIGHTS, correlation, 0.03) for trend in range(trends)]
    return any(
        index >= seen - RECENT
        for seen in looks()
        for one in detect_together([v[:seen] for v in values])
        for index, _ in one
    )


def delay(step: float, correlation: float) -> Figure:
    """Nights after a slowdown in one of `TOGETHER` trends until it is shown."""
    waited = []
    for seed in range(FED):
        values = nights([seed, 77], QUIET + MOST, correlation, 0.02)
        values[QUIET:] *= 1 + step
        others = [nights([seed, trend], QUIET + MOST, correlation, 0.02) for trend in range(1, TOGETHER)]
        waited.append(_first_shown(values, others))
    middle, low, high = median_interval(waited)
    return Figure(
        name=f"trends: nights until a change of {step:.0%} in one of {TOGETHER} trends is shown (scatter 2 %, "
        f"autocorrelation {correlation:g})",
        value=middle,
        low=low,
        high=high,
        n=FED,
        unit="nights",
        goal="beside the false alarms",
        reason=f"90 % within {np.percentile(waited, 90):.0f}; not within {MOST}: {sum(one > MOST for one in waited)}",
    )


def _first_shown(values: Array, others: list[Array]) -> float:
    for seen in range(1, MOST + 1):
        # What the other trends say does not change this one's look: as many quiet tests stand beside it.
        together = detect_together([values[: QUIET + seen], *(one[: QUIET // 2] for one in others)])
        if any(index >= QUIET - 5 for index, _ in together[0]):
            return seen
    return MOST + 1


def named(count: int, correlation: float) -> Figure:
    """Ordinary newest nights, of so many in all, that are named as beyond the usual range."""
    beyond = 0
    for seed in range(NEWEST):
        found = newest(list(nights([seed, 5], count, correlation, 0.03)))
        assert found is not None
        beyond += found.num_beyond > 0
    value, low, high = share(beyond, NEWEST)
    return Figure(
        name=f"trends: ordinary newest nights that are named, {count} nights, autocorrelation {correlation:g}",
        value=value,
        low=low,
        high=high,
        n=NEWEST,
        unit="%",
        goal=f"at most {2 * NAMED:.0%}",
        met=value <= 200 * NAMED,
    )


def nights(seed: list[int], count: int, correlation: float, scatter: float) -> Array:
    """A level of 1, from night to night."""
    shocks = np.random.default_rng(seed).normal(0, scatter, count)
    shocks[1:] *= math.sqrt(1 - correlation**2)
    logs = shocks.copy()
    for night in range(1, count):
        logs[night] += correlation * logs[night - 1]
    values: Array = np.exp(logs)
    return values

"""Change points of simulated histories: what is found, what is found that is not there, and how late.

A history has 200 nights, one value each, with the noise of real nights: 2 % from night to night, in half of the
histories normal with one night in thirty far off (Student's t with 2 degrees of freedom times 8 %, upwards), in the
other half heavy tails (Student's t with 3 degrees of freedom, scaled to 2 %). There is no drift. Beside dlbench's
detection stand plain PELT with squared deviations (ruptures; values in robust standard deviations, penalty 3 log n)
and the rule of many a CI: the newest night is 5 % slower than the median of all before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from benchmarks.figures import Figure
from dlbench.history.change_points import MIN_NIGHTS, MIN_SEGMENT, detect

Array = npt.NDArray[np.float64]
Detector = Callable[[Array], list[int]]

NIGHTS = 200
SCATTER = 0.02
STEPS = (0.03, 0.05)
NEAR = 5
"""A change point so many nights off is a hit."""
EMPTY_HISTORIES = 600
PLANTED_HISTORIES = 200
CORRELATED_HISTORIES = 150
FED_HISTORIES = 60
QUIET_NIGHTS = 100
"""Nights before the step of a history that is fed night by night."""
MAX_DELAY = 60


def figures() -> Iterator[Figure]:
    """All figures of the area."""
    detectors: dict[str, Detector] = {"dlbench": dlbench, "PELT l2": pelt, "newest > median + 5 %": naive}
    for name, find in detectors.items():
        yield false_alarms(name, find)
    for step in STEPS:
        for name, find in detectors.items():
            yield from hits(name, find, step)
    for step in (*STEPS, 0.1):
        for name, find in detectors.items():
            yield from delays(name, find, step)
    for correlation in (0.3, 0.5):
        for name, find in (("dlbench", dlbench), ("PELT l2", pelt)):
            yield correlated_alarms(name, find, correlation)


def dlbench(values: Array) -> list[int]:
    """First nights after each change."""
    return [one.index for one in detect(list(values))]


def pelt(values: Array) -> list[int]:
    """The same by PELT with squared deviations."""
    from ruptures import KernelCPD

    logs = np.log(values)
    scale = float(np.median(np.abs(np.diff(logs)))) / (NormalDist().inv_cdf(0.75) * math.sqrt(2))
    # With the linear kernel the cost is that of squared deviations, and the search is PELT's.
    search = KernelCPD(kernel="linear", min_size=MIN_SEGMENT).fit((logs / scale)[:, None])
    return [int(place) for place in search.predict(pen=3 * math.log(len(values)))[:-1]]


def naive(values: Array) -> list[int]:
    """Every night on which the rule would have called: it looks at the newest night alone."""
    return [
        night for night in range(MIN_NIGHTS, len(values)) if values[night] > 1.05 * float(np.median(values[:night]))
    ]


def noise(generator: np.random.Generator, count: int, kind: int) -> Array:
    """Logarithms around zero; `kind` even: normal with outliers, odd: heavy tails."""
    if kind % 2:
        return np.asarray(generator.standard_t(3, count) / math.sqrt(3) * SCATTER)
    logs = generator.normal(0, SCATTER, count)
    odd = generator.random(count) < 1 / 30
    logs[odd] += np.abs(generator.standard_t(2, int(odd.sum()))) * 0.08
    return logs


def false_alarms(name: str, find: Detector) -> Figure:
    """Share of histories without any change in which one is found."""
    generator = np.random.default_rng(1)
    found = [len(find(np.exp(noise(generator, NIGHTS, kind)))) for kind in range(EMPTY_HISTORIES)]
    alarms = sum(count > 0 for count in found)
    low, high = share_interval(alarms, EMPTY_HISTORIES)
    return Figure(
        name=f"history: {name}: histories of {NIGHTS} nights without change in which one is found",
        value=100 * alarms / EMPTY_HISTORIES,
        unit="%",
        low=100 * low,
        high=100 * high,
        n=EMPTY_HISTORIES,
        goal="at most 1 %" if name == "dlbench" else "side by side",
        met=alarms <= 0.01 * EMPTY_HISTORIES if name == "dlbench" else None,
        reason=f"{sum(found) / EMPTY_HISTORIES:.3g} false change points a history",
    )


def hits(name: str, find: Detector, step: float) -> Iterator[Figure]:
    """Recall and precision with one planted step, up or down, anywhere but in the first and last ten nights."""
    generator = np.random.default_rng(2)
    hit, called = 0, 0
    for kind in range(PLANTED_HISTORIES):
        place = int(generator.integers(10, NIGHTS - 9))
        logs = noise(generator, NIGHTS, kind)
        logs[place:] += math.log1p(step) if kind % 4 < 2 else -math.log1p(step)
        found = find(np.exp(logs))
        called += len(found)
        hit += any(abs(one - place) <= NEAR for one in found)
    for what, share, of in (("recall", hit, PLANTED_HISTORIES), ("precision", hit, called)):
        low, high = share_interval(share, of)
        yield Figure(
            name=f"history: {name}: {what} of steps of {step:.0%} (+-{NEAR} nights)",
            value=100 * share / of if of else None,
            unit="%",
            low=100 * low,
            high=100 * high,
            n=of,
            goal="measured" if name == "dlbench" else "side by side",
            reason="" if of else "nothing was found",
        )


def delays(name: str, find: Detector, step: float) -> Iterator[Figure]:
    """Nights after a slowdown until it is reported, when the history grows night by night."""
    waited: list[float] = []
    early = 0
    for kind in range(FED_HISTORIES):
        logs = noise(np.random.default_rng([3, kind]), QUIET_NIGHTS + MAX_DELAY, kind)
        logs[QUIET_NIGHTS:] += math.log1p(step)
        values = np.exp(logs)
        early += bool(find(values[:QUIET_NIGHTS]))
        waited.append(_first_report(find, values))
    p90 = float(np.percentile(waited, 90))
    never = sum(delay > MAX_DELAY for delay in waited)
    yield Figure.of(
        waited,
        name=f"history: {name}: nights until a slowdown of {step:.0%} is reported",
        unit="nights",
        goal="measured" if name == "dlbench" else "side by side",
        reason=f"90 % within {p90:.0f}; not within {MAX_DELAY}: {never}; alarms before the step in {early} histories",
    )


def _first_report(find: Detector, values: Array) -> float:
    """How many nights after the step a change point near it is first reported; more than `MAX_DELAY`: never."""
    for seen in range(1, MAX_DELAY + 1):
        found = find(values[: QUIET_NIGHTS + seen])
        if any(QUIET_NIGHTS - NEAR <= one < QUIET_NIGHTS + seen for one in found):
            return seen
    return MAX_DELAY + 1


def correlated_alarms(name: str, find: Detector, correlation: float) -> Figure:
    """False alarms where a night resembles the one before: a first-order autoregression."""
    generator = np.random.default_rng(4)
    alarms = 0
    for kind in range(CORRELATED_HISTORIES):
        shocks = noise(generator, NIGHTS + 50, kind) * math.sqrt(1 - correlation**2)
        logs = np.zeros(NIGHTS + 50)
        for night in range(1, NIGHTS + 50):
            logs[night] = correlation * logs[night - 1] + shocks[night]
        alarms += bool(find(np.exp(logs[50:])))
    low, high = share_interval(alarms, CORRELATED_HISTORIES)
    return Figure(
        name=f"history: {name}: histories without change, autocorrelation {correlation:g}, in which one is found",
        value=100 * alarms / CORRELATED_HISTORIES,
        unit="%",
        low=100 * low,
        high=100 * high,
        n=CORRELATED_HISTORIES,
        goal="measured" if name == "dlbench" else "side by side",
    )


def share_interval(count: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share (JASA 22, 1927)."""
    if of == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.975)
    share = count / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of)) / (1 + z * z / of)
    return max(0.0, middle - half), min(1.0, middle + half)


if __name__ == "__main__":
    for one in figures():
        print(one.line(), flush=True)

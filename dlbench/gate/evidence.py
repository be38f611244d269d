"""What a test is made of: one value for each unit, their difference, and its standard error.

The unit is what varies independently between the sides. Interleaved pairs: the pair. Otherwise the session
(`dlbench.reading.sessions`), because runs of one night share its state: more runs of the same night say nothing about
another. Within one session that holds both sides it is the run.

Where a side has too few sessions of its own, the scatter between those of the other side, and of a history, stands for
it: Student's test with a pooled variance, for one new session against k earlier ones a standard error of
s sqrt(1 + 1/k) (Crawford and Howell, The Clinical Neuropsychologist 12, 1998).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, harmonic_mean, stdev, variance
from typing import Literal

from dlbench.reading.sessions import MIN_SESSIONS
from dlbench.stats.estimates import MIN_RUNS
from dlbench.stats.multiplicity import ROUNDING, welch_error

Unit = Literal["pair", "run", "session"]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One metric at one point: a value for each run, larger is worse."""

    a: tuple[float, ...]
    b: tuple[float, ...]
    paired: bool
    """Whether equal places are pairs of interleaved runs."""
    sessions_a: tuple[str, ...] | None = None
    """Session of each run of A; None: each run is one of its own."""
    sessions_b: tuple[str, ...] | None = None
    history: tuple[tuple[float, ...], ...] = ()
    """Values of further sessions, a tuple for each, which only tell how far sessions scatter."""

    @property
    def has_runs(self) -> bool:
        """Whether there are runs for a verdict."""
        return min(len(self.a), len(self.b)) >= MIN_RUNS


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The units of both sides, as logarithms, and what their difference is."""

    unit: Unit
    a: tuple[float, ...]
    """Mean logarithm of each unit; where paired, equal places are pairs."""
    b: tuple[float, ...]
    scatter: float
    """Standard deviation over units of these logarithms; of pairs, of their differences."""
    error: float
    """Standard error of the difference of the means."""
    freedom: int
    """Degrees of freedom of it."""
    is_borrowed: bool = False
    """Whether a side has too few units of its own, so that the scatter of others stands for it."""

    @property
    def shift(self) -> float:
        """Mean logarithm of B / A."""
        return fmean(self.b) - fmean(self.a)


def evidence_of(sample: Sample) -> Evidence | None:
    """What can be tested; None where nothing says how far sessions scatter.

    Raises:
        ValueError: a side has fewer than two runs.
    """
    if min(len(sample.a), len(sample.b)) < 2:
        raise ValueError(f"a test needs two runs per side, got {len(sample.a)} and {len(sample.b)}")
    if sample.paired:
        return _of_pairs(_logs(sample.a), _logs(sample.b))
    a, b = (_by_session(values, names) for values, names in _sides(sample))
    if a.keys() == b.keys() and len(a) == 1:
        return _apart(_logs(sample.a), _logs(sample.b), "run")
    if min(len(a), len(b)) >= MIN_SESSIONS:
        return _apart(tuple(map(fmean, a.values())), tuple(map(fmean, b.values())), "session")
    groups = [list(a.values()), list(b.values()), [_logs(values) for values in sample.history]]
    if max(map(len, groups)) < MIN_SESSIONS:
        return None
    return _borrowed(groups)


def num_sessions(sample: Sample) -> tuple[int, int]:
    """Sessions of each side."""
    a, b = (len(set(names)) for _, names in _sides(sample))
    return a, b


def _sides(sample: Sample) -> list[tuple[tuple[float, ...], Sequence[str]]]:
    return [
        (values, [f"{side} {i}" for i in range(len(values))] if names is None else names)
        for side, values, names in (("a", sample.a, sample.sessions_a), ("b", sample.b, sample.sessions_b))
    ]


def _logs(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(map(math.log, values))


def _by_session(values: Sequence[float], names: Sequence[str]) -> dict[str, tuple[float, ...]]:
    found: dict[str, list[float]] = {}
    for value, name in zip(values, names, strict=True):
        found.setdefault(name, []).append(math.log(value))
    return {name: tuple(logs) for name, logs in found.items()}


def _of_pairs(a: tuple[float, ...], b: tuple[float, ...]) -> Evidence:
    scatter = max(stdev(y - x for x, y in zip(a, b, strict=True)), ROUNDING)
    return Evidence(unit="pair", a=a, b=b, scatter=scatter, error=scatter / math.sqrt(len(a)), freedom=len(a) - 1)


def _apart(a: tuple[float, ...], b: tuple[float, ...], unit: Unit) -> Evidence:
    """Two independent sides: Welch's standard error and degrees of freedom."""
    error, freedom = welch_error(a, b)
    pooled = sum((len(side) - 1) * max(variance(side), ROUNDING**2) for side in (a, b))
    return Evidence(
        unit=unit,
        a=a,
        b=b,
        scatter=math.sqrt(pooled / (len(a) + len(b) - 2)),
        error=error,
        freedom=freedom,
    )


def _borrowed(groups: Sequence[Sequence[tuple[float, ...]]]) -> Evidence:
    """Student's pooled variance between sessions; a side of smaller sessions has more of the scatter within them."""
    means = [tuple(map(fmean, group)) for group in groups]
    telling = [(group, values) for group, values in zip(groups, means, strict=True) if len(values) > 1]
    freedom = sum(len(values) - 1 for _, values in telling)
    between = max(sum((len(values) - 1) * variance(values) for _, values in telling) / freedom, ROUNDING**2)
    within = _within(groups)
    usual = harmonic_mean([len(session) for group, _ in telling for session in group])
    square = sum(
        (between + within * max(0.0, 1 / harmonic_mean(list(map(len, group))) - 1 / usual)) / len(group)
        for group in groups[:2]
    )
    return Evidence(
        unit="session",
        a=means[0],
        b=means[1],
        scatter=math.sqrt(between),
        error=math.sqrt(square),
        freedom=freedom,
        is_borrowed=True,
    )


def _within(groups: Sequence[Sequence[tuple[float, ...]]]) -> float:
    """Pooled variance of runs within their sessions; 0 where every session is one run."""
    sessions = [session for group in groups for session in group if len(session) > 1]
    freedom = sum(len(session) - 1 for session in sessions)
    return sum((len(session) - 1) * variance(session) for session in sessions) / freedom if freedom else 0.0

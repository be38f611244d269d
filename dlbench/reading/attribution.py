"""Where the lost share of the ideal goes, at first order: each part of a step against the baseline's.

A step of the ideal machine takes, part by part, what the baseline's step takes for the same number
of samples per rank. With T = sum of the parts (mean seconds per step), T_ideal likewise:

    1 - E = (T - T_ideal) / T = sum over parts of (part - part_ideal) / T

so the lost points sum to the loss exactly. First order: a part is charged with the time it holds,
whatever its cause; a slow rank, for example, shows as exchange time of the ranks that wait for it.
`dlbench.reading.causes` splits the same step by causes instead, and uses the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlbench.reading.measures import PARTS
from dlbench.stats.estimates import (
    MIN_RUNS,
    Estimate,
    Kind,
    RunKey,
    are_paired,
    by_definition,
    interval,
    resample_weights,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Matrix = npt.NDArray[np.float64]

PartTimes = Mapping[RunKey, Mapping[str, float]]
"""Seconds a step of each part, by run."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a step at one scaling point."""

    name: str
    """One of `dlbench.reading.measures.PARTS` or of `dlbench.reading.causes.CAUSES`; `step` for the whole."""
    seconds: Estimate
    """Mean over runs of the run's mean seconds per step."""
    ideal_seconds: float
    """The same at the baseline, for the same number of samples per rank."""
    lost: Estimate
    """Share of the ideal that is lost here (1); negative where the part became faster."""


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """The parts of a step and their sum."""

    parts: tuple[Part, ...]
    whole: Part
    """The whole step: sum of the parts, lost share = sum of the lost shares = 1 - efficiency of means."""


def attribute(
    own: PartTimes, baseline: PartTimes, *, work: float, is_baseline: bool = False, names: Sequence[str] = PARTS
) -> Attribution:
    """The parts of a point against its baseline.

    Means over runs, not medians, because only means of parts sum to the mean of the whole.
    Intervals are made as in `dlbench.stats.estimates`: bootstrap over runs (in pairs where the
    repeats are the same), the range below five runs, none for a single run.

    Args:
        own: the parts of this point's runs.
        baseline: those of the baseline's runs.
        work: samples per rank and step of this point / of the baseline (1 under weak scaling).
        is_baseline: nothing is lost by definition.
        names: the parts, in order; together they are the whole step.
    """
    a, b = _matrix(own, names), _matrix(baseline, names) * work
    paired = are_paired(own, baseline)
    value, ideal = a.mean(axis=0), b.mean(axis=0)
    own_spread = a if len(a) < MIN_RUNS else resample_weights(len(a), stream=0) @ a
    seconds = _estimates(value, own_spread, len(a), "s")
    if is_baseline:
        lost = [by_definition(0.0, len(a), "fraction") for _ in value]
    else:
        n = min(len(a), len(b))
        spread = _lost_by_pair(a, b, paired) if n < MIN_RUNS else _lost_resampled(a, b, paired)
        lost = _estimates((value - ideal) / value[-1], spread, n, "fraction")
    made = tuple(
        Part(name=name, seconds=seconds[i], ideal_seconds=float(ideal[i]), lost=lost[i])
        for i, name in enumerate((*names, "step"))
    )
    return Attribution(parts=made[:-1], whole=made[-1])


def _matrix(times: PartTimes, names: Sequence[str]) -> Matrix:
    """Runs in the order of their keys x parts, with the sum of the parts as last column."""
    import numpy as np

    parts = np.array([[times[key][name] for name in names] for key in sorted(times)], dtype=float)
    return np.column_stack([parts, parts.sum(axis=1)])


def _lost_by_pair(a: Matrix, b: Matrix, paired: bool) -> Matrix:
    """Lost shares of each pair of runs, or of all combinations; their range holds the share of the means.

    It does, because that share is an average of theirs, weighted with the steps' times.
    """
    total = a[:, -1]
    if paired:
        lost: Matrix = (a - b) / total[:, None]
    else:
        lost = ((a[:, None, :] - b[None, :, :]) / total[:, None, None]).reshape(-1, a.shape[1])
    return lost


def _lost_resampled(a: Matrix, b: Matrix, paired: bool) -> Matrix:
    """Lost shares of every resample, shape (resamples, parts + 1)."""
    first = resample_weights(len(a), stream=0)
    second = first if paired else resample_weights(len(b), stream=1)
    top, bottom = first @ a, second @ b
    lost: Matrix = (top - bottom) / top[:, -1:]
    return lost


def _estimates(value: Matrix, spread: Matrix, n: int, unit: str) -> list[Estimate]:
    """One estimate for each part; `spread` holds resamples, or values of single runs where they are few."""
    import numpy as np

    if n == 1:
        return [Estimate(float(v), None, None, 1, "single run", unit) for v in value]
    kind: Kind = "range" if n < MIN_RUNS else "bootstrap 95 %"
    low, high = np.percentile(spread, [0, 100] if kind == "range" else [2.5, 97.5], axis=0)
    return [interval(float(v), float(lo), float(hi), n, kind, unit) for v, lo, hi in zip(value, low, high, strict=True)]

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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dlbench.reading.measures import PARTS
from dlbench.stats.estimates import Estimate, by_definition, difference_estimate, interval, mean_estimate
from dlbench.stats.multiplicity import paired_p, welch_p
from dlbench.stats.pairing import Pairing, RunKey, pairing

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
    """Mean over runs (where paired: over the pairs) of the run's mean seconds per step."""
    ideal_seconds: float
    """The same at the baseline, for the same number of samples per rank."""
    lost: Estimate
    """Share of the ideal that is lost here (1); negative where the part became faster."""
    p: float | None
    """Two-sided p of Student's t test that nothing is lost or gained here, of this part alone; None at the baseline."""


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

    Means over runs, not medians, because only means of parts sum to the mean of the whole. Where the two are paired
    (`dlbench.stats.pairing`), both are means over the pairs. The interval of a lost share is that of
    `dlbench.stats.estimates.difference_estimate` for the terms of its first-order expansion, one for each run: the
    ratio of means hangs on the runs almost linearly, because whole steps differ little between them.

    Args:
        own: the parts of this point's runs.
        baseline: those of the baseline's runs.
        work: samples per rank and step of this point / of the baseline (1 under weak scaling).
        is_baseline: nothing is lost by definition.
        names: the parts, in order; together they are the whole step.
    """
    pairs = Pairing((), 0) if is_baseline else pairing(own, baseline)
    keys = pairs.keys or sorted(own), pairs.keys or sorted(baseline)
    a, b = _matrix(own, names, keys[0]), _matrix(baseline, names, keys[1]) * work
    ideal = b.mean(axis=0)
    seconds = [mean_estimate(column.tolist(), "s") for column in a.T]
    lost: list[tuple[Estimate, float | None]]
    if is_baseline:
        lost = [(by_definition(0.0, len(a), "fraction"), None) for _ in seconds]
    else:
        lost = [_lost(part, a[:, -1], other, pairs) for part, other in zip(a.T, b.T, strict=True)]
    made = tuple(
        Part(name=name, seconds=seconds[i], ideal_seconds=float(ideal[i]), lost=lost[i][0], p=lost[i][1])
        for i, name in enumerate((*names, "step"))
    )
    return Attribution(parts=made[:-1], whole=made[-1])


def _matrix(times: PartTimes, names: Sequence[str], keys: Sequence[RunKey]) -> Matrix:
    """Runs x parts, with the sum of the parts as last column."""
    import numpy as np

    parts = np.array([[times[key][name] for name in names] for key in keys], dtype=float)
    return np.column_stack([parts, parts.sum(axis=1)])


def _lost(part: Matrix, step: Matrix, ideal: Matrix, pairs: Pairing) -> tuple[Estimate, float]:
    """L = (mean part - mean ideal) / mean step and its p, from part and step of each run and the baseline's ideal ones.

    To first order a run of this point moves L by (part - L step) / mean step, and one of the baseline by its ideal.
    Below `MIN_RUNS` the range is that of the shares of single runs: L is their average, weighted with the steps.
    """
    import numpy as np

    mean = float(step.mean())
    share = float(part.mean() - ideal.mean()) / mean
    blocks = ("pairs", "pairs") if pairs.is_paired else ("own", "baseline")
    moves = [
        {(block, place): float(value) for place, value in enumerate(values)}
        for block, values in zip(blocks, ((part - share * step) / mean, ideal / mean), strict=True)
    ]
    own, base = [share + move for move in moves[0].values()], list(moves[1].values())
    p = paired_p([x - y for x, y in zip(own, base, strict=True)]) if pairs.is_paired else welch_p(own, base)
    found = difference_estimate(moves[0], moves[1], "fraction").mapped(lambda moved: share + moved, "fraction")
    if found.low is None or found.high is None:
        return replace(found, value=share, unpaired=pairs.left_out), p
    low, high = found.low, found.high
    if found.kind == "range":
        lost = (part - ideal) / step if pairs.is_paired else np.subtract.outer(part, ideal) / step[:, None]
        low, high = float(lost.min()), float(lost.max())
    made = interval(share, low, high, found.n, found.kind, "fraction", level=found.level)
    return replace(made, unpaired=pairs.left_out), p

"""Efficiency as a product of factors: what each of them alone keeps of the ideal.

The factors are those of the POP project (Performance Optimisation and Productivity, "POP Standard Metrics for Parallel
Performance Analysis"): parallel efficiency = load balance x communication efficiency, and global efficiency = parallel
efficiency x computation scaling. POP counts as useful all time outside of communication; here waiting for input and
what lies between the phases are taken out of it as two further factors of the same form. With the causes of a step
(`dlbench.reading.causes`), means over the runs of a point,

    X0 = whole step, X1 = X0 - exchange, X2 = X1 - straggler - rest, X3 = X2 - input, X4 = X3 - host,

so that X1 is the step of the slowest rank without exposed communication, X2 that of the ranks in time, and X4 computing
alone (compute, throttling, memory). A point's own efficiencies, each between 0 and 1, are

    communication = X1/X0, load balance = X2/X1, input = X3/X2, host = X4/X3,

and their product is X4/X0. Against a baseline with X0', ..., X4' for the same samples per rank, each factor is the
point's own efficiency over the baseline's, and the last one is computation scaling, X4'/X4. All terms but X0'/X0
cancel:

    load balance x communication x input x computation x host = X0'/X0 = efficiency of means.

The shares that `dlbench.reading.attribution` finds add instead: they divide the seconds of each cause by the whole
step. A factor divides by what is left of the step once the factors before it are taken away, so it does not shrink
where others grow; in exchange it is no share of the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dlbench.reading.scaling import Group, Point
from dlbench.reading.table import RunTable
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

    Array = npt.NDArray[np.float64]

FACTORS = ("balance", "communication", "input", "compute", "host")
"""In the order in which they are printed and drawn; the product does not depend on it."""

_PEELED = (("compute", "throttling", "memory"), ("host",), ("input",), ("straggler", "rest"), ("exchange",))
"""Causes by what they add to X4, X3, X2, X1, X0."""

_OWN = {"host": (0, 1), "input": (1, 2), "balance": (2, 3), "communication": (3, 4)}
"""Numerator and denominator of a point's own efficiencies, as positions in (X4, X3, X2, X1, X0)."""


@dataclass(frozen=True, kw_only=True)
class Factor:
    """One factor at one scaling point."""

    name: str
    """One of `FACTORS`."""
    own: Estimate | None
    """The efficiency of this point by itself, a fraction; None for `compute`: that is known against a baseline only."""
    relative: Estimate
    """Against the baseline, a fraction: above 1 where this point does better. They multiply to the efficiency."""
    level: float
    """Product of this factor and those printed before it."""
    step: float
    """Level before it less its level: what a waterfall takes off here. Over the factors this sums to the loss."""


@dataclass(frozen=True, kw_only=True)
class FactoredPoint:
    """The factors of one scaling point."""

    ranks: int
    nodes: int
    is_baseline: bool
    factors: tuple[Factor, ...]
    """By `FACTORS`; empty where this point or the baseline computes nothing, which leaves nothing to divide by."""
    parallel: Estimate | None
    """The point's own load balance x communication, a fraction: POP's parallel efficiency; None where there are no
    factors."""
    efficiency: Estimate
    """Of means, against the baseline, a fraction: the product of the factors."""


def waterfall(group: Group, table: RunTable) -> tuple[FactoredPoint, ...]:
    """The factors of each point of a group, baseline first.

    Args:
        group: comparable runs.
        table: made `with_causes`, of the same runs.
    """
    keys = table.keys

    def times(point: Point) -> dict[RunKey, Mapping[str, float]]:
        return {keys[run_id]: table.causes[run_id].seconds for run_id in point.run_ids}

    baseline = times(group.baseline)
    return tuple(
        factorise(
            point,
            times(point),
            baseline,
            work=point.batch_per_rank / group.baseline.batch_per_rank,
            is_baseline=point is group.baseline,
        )
        for point in group.points
    )


def factorise(
    point: Point,
    own: Mapping[RunKey, Mapping[str, float]],
    baseline: Mapping[RunKey, Mapping[str, float]],
    *,
    work: float,
    is_baseline: bool,
) -> FactoredPoint:
    """The factors of one point.

    Intervals as in `dlbench.reading.attribution`: bootstrap over runs, in pairs where the repeats are the same; the
    range over pairs, or over all combinations, below five runs; none for a single run.

    Args:
        point: the scaling point.
        own: mean seconds per step of each cause of this point's runs.
        baseline: those of the baseline's runs.
        work: samples per rank and step of this point / of the baseline.
        is_baseline: every factor against itself is 1 by definition.
    """
    a, b = _levels(own), _levels(baseline) * work
    n = len(a) if is_baseline else min(len(a), len(b))
    top, bottom = a.mean(axis=0), b.mean(axis=0)
    if is_baseline:
        efficiency = by_definition(1.0, n, "fraction")
    else:
        tops, bottoms = _spread(a, b, are_paired(own, baseline))
        efficiency = _estimate(float(bottom[-1] / top[-1]), bottoms[:, -1] / tops[:, -1], n)
    found = FactoredPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        is_baseline=is_baseline,
        factors=(),
        parallel=None,
        efficiency=efficiency,
    )
    if (a <= 0).any() or (b <= 0).any():
        return found
    alone = a if len(a) < MIN_RUNS else resample_weights(len(a), stream=0) @ a
    owns = {name: _estimate(float(top[i] / top[j]), alone[:, i] / alone[:, j], len(a)) for name, (i, j) in _OWN.items()}
    if is_baseline:
        relatives = dict.fromkeys(FACTORS, by_definition(1.0, n, "fraction"))
    else:
        values, spread = _relative(top, bottom), _relative(tops, bottoms)
        relatives = {name: _estimate(float(values[name]), spread[name], n) for name in FACTORS}
    parallel = _estimate(float(top[2] / top[4]), alone[:, 2] / alone[:, 4], len(a))
    return replace(found, factors=_stairs(owns, relatives), parallel=parallel)


def _levels(times: Mapping[RunKey, Mapping[str, float]]) -> Array:
    """Runs in the order of their keys x (X4, X3, X2, X1, X0), seconds; sums upward, so that nothing cancels."""
    import numpy as np

    rows = [[sum(times[key][name] for name in names) for names in _PEELED] for key in sorted(times)]
    levels: Array = np.cumsum(np.array(rows, dtype=float), axis=1)
    return levels


def _spread(a: Array, b: Array, paired: bool) -> tuple[Array, Array]:
    """Levels of the point and of the baseline in every resample, or of all pairs of runs where they are few."""
    import numpy as np

    if min(len(a), len(b)) < MIN_RUNS:
        return (a, b) if paired else (np.repeat(a, len(b), axis=0), np.tile(b, (len(a), 1)))
    first = resample_weights(len(a), stream=0)
    return first @ a, (first if paired else resample_weights(len(b), stream=1)) @ b


def _relative(a: Array, b: Array) -> dict[str, Array]:
    """Factors against the baseline from levels along the last axis."""
    found = {name: (a[..., i] / a[..., j]) * (b[..., j] / b[..., i]) for name, (i, j) in _OWN.items()}
    return {**found, "compute": b[..., 0] / a[..., 0]}


def _stairs(owns: Mapping[str, Estimate], relatives: Mapping[str, Estimate]) -> tuple[Factor, ...]:
    made: list[Factor] = []
    before = 1.0
    for name in FACTORS:
        level = before * relatives[name].value
        made.append(Factor(name=name, own=owns.get(name), relative=relatives[name], level=level, step=before - level))
        before = level
    return tuple(made)


def _estimate(value: float, spread: Sequence[float] | Array, n: int) -> Estimate:
    """A fraction; `spread` holds resamples, or values of single runs where they are few."""
    import numpy as np

    if n == 1:
        return Estimate(value, None, None, 1, "single run", "fraction")
    kind: Kind = "range" if n < MIN_RUNS else "bootstrap 95 %"
    low, high = np.percentile(np.asarray(spread), [0, 100] if kind == "range" else [2.5, 97.5])
    return interval(value, float(low), float(high), n, kind, "fraction")

"""Efficiency as a product of factors: what each of them alone keeps of the ideal.

With the causes of a step (`dlbench.reading.causes`) of one run,

    X0 = whole step, X1 = X0 - exchange, X2 = X1 - straggler - rest, X3 = X2 - input, X4 = X3 - host,

so that X1 is the step of the slowest rank without exposed communication, X2 that of the ranks in time, and X4 computing
alone (compute, throttling, memory). A run's own efficiencies, each between 0 and 1, are

    communication = X1/X0, late ranks = X2/X1, input = X3/X2, host = X4/X3,

and their product is X4/X0. Against a run of the baseline with X0', ..., X4' for the same samples per rank, each factor
is the own efficiency over the baseline's, and the last one is compute scaling, X4'/X4. All terms but X0'/X0 cancel:

    late ranks x communication x input x compute x host = X0'/X0.

What holds in each run holds for geometric means over runs (Fleming and Wallace, CACM 29(3), 1986); so all factors of a
point are geometric means, and their product is the efficiency of mean steps.

The shares that `dlbench.reading.attribution` finds add instead: they divide the seconds of each cause by the whole
step. A factor divides by what is left of the step once the factors before it are taken away, so it does not shrink
where others grow; in exchange it is no share of the loss.

These are not the metrics of the POP project (Performance Optimisation and Productivity, "POP Standard Metrics for
Parallel Performance Analysis"), which Scalasca and Extrae print. POP compares whole runs and not steps: with each
rank's useful time, all that it spends outside of communication,

    load balance = mean / maximum of the useful time, communication efficiency = maximum of the useful time / run time,

and parallel efficiency is their product. A rank that is late, now one and now another, is imbalance in every step and
none over the run: there it lowers POP's communication efficiency. `Pop` holds those, by POP's definition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean

from dlbench.reading.causes import Causes
from dlbench.reading.scaling import Group, Point
from dlbench.reading.table import RunTable
from dlbench.stats.estimates import Estimate, by_definition, geometric_mean_estimate, ratio_estimate
from dlbench.stats.pairing import RunKey

Levels = tuple[float, ...]

FACTORS = ("late_ranks", "communication", "input", "compute", "host")
"""In the order in which they are printed and drawn; the product does not depend on it."""

_PEELED = (("compute", "throttling", "memory"), ("host",), ("input",), ("straggler", "rest"), ("exchange",))
"""Causes by what they add to X4, X3, X2, X1, X0."""

_OWN = {"host": (0, 1), "input": (1, 2), "late_ranks": (2, 3), "communication": (3, 4)}
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
class Pop:
    """Metrics of the POP project of one scaling point by itself, fractions; geometric means over runs."""

    load_balance: Estimate
    """Mean over ranks of the useful time / its maximum."""
    communication: Estimate
    """Maximum over ranks of the useful time / run time."""
    parallel: Estimate
    """Their product."""


@dataclass(frozen=True, kw_only=True)
class FactoredPoint:
    """The factors of one scaling point."""

    ranks: int
    nodes: int
    is_baseline: bool
    factors: tuple[Factor, ...]
    """By `FACTORS`; empty where this point or the baseline computes nothing, which leaves nothing to divide by."""
    pop: Pop | None
    """None where some rank does nothing but communicate."""
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
        replace(
            factorise(
                point,
                times(point),
                baseline,
                work=point.batch_per_rank / group.baseline.batch_per_rank,
                is_baseline=point is group.baseline,
            ),
            pop=pop_of([table.causes[run_id] for run_id in point.run_ids]),
        )
        for point in group.points
    )


def pop_of(runs: Sequence[Causes]) -> Pop | None:
    """POP's metrics over runs of one scaling point; None where some rank of theirs does nothing but communicate."""
    if any(min(run.work_ns) <= 0 for run in runs):
        return None
    times = [(fmean(run.work_ns), max(run.work_ns), sum(run.sums_ns.values()) / run.ranks) for run in runs]

    def over_runs(top: int, bottom: int) -> Estimate:
        return geometric_mean_estimate([time[top] / time[bottom] for time in times], "fraction")

    return Pop(load_balance=over_runs(0, 1), communication=over_runs(1, 2), parallel=over_runs(0, 2))


def factorise(
    point: Point,
    own: Mapping[RunKey, Mapping[str, float]],
    baseline: Mapping[RunKey, Mapping[str, float]],
    *,
    work: float,
    is_baseline: bool,
) -> FactoredPoint:
    """The factors of one point.

    Values and intervals of factors as `dlbench.stats.estimates.ratio_estimate`, of own efficiencies as
    `geometric_mean_estimate`.

    Args:
        point: the scaling point.
        own: mean seconds per step of each cause of this point's runs.
        baseline: those of the baseline's runs.
        work: samples per rank and step of this point / of the baseline.
        is_baseline: every factor against itself is 1 by definition.
    """
    mine, theirs = _levels(own, 1.0), _levels(baseline, work)
    ones = by_definition(1.0, len(own), "fraction")
    found = FactoredPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        is_baseline=is_baseline,
        factors=(),
        pop=None,
        efficiency=ones if is_baseline else ratio_estimate(_steps(theirs, 4), _steps(mine, 4), "fraction"),
    )
    if any(min(levels) <= 0 for levels in (*mine.values(), *theirs.values())):
        return found
    owns = {name: _own(mine, i, j) for name, (i, j) in _OWN.items()}
    if is_baseline:
        relatives = dict.fromkeys(FACTORS, ones)
    else:
        relatives = {
            name: ratio_estimate(_efficiencies(mine, i, j), _efficiencies(theirs, i, j), "fraction")
            for name, (i, j) in _OWN.items()
        }
        relatives["compute"] = ratio_estimate(_steps(theirs, 0), _steps(mine, 0), "fraction")
    return replace(found, factors=_stairs(owns, relatives))


def _levels(times: Mapping[RunKey, Mapping[str, float]], work: float) -> dict[RunKey, Levels]:
    """(X4, X3, X2, X1, X0) of each run, seconds times `work`; sums upward, so that nothing cancels."""
    return {
        key: tuple(accumulate(work * sum(causes[name] for name in names) for names in _PEELED))
        for key, causes in times.items()
    }


def _steps(runs: Mapping[RunKey, Levels], level: int) -> dict[RunKey, float]:
    return {key: levels[level] for key, levels in runs.items()}


def _efficiencies(runs: Mapping[RunKey, Levels], top: int, bottom: int) -> dict[RunKey, float]:
    return {key: levels[top] / levels[bottom] for key, levels in runs.items()}


def _own(runs: Mapping[RunKey, Levels], top: int, bottom: int) -> Estimate:
    found = _efficiencies(runs, top, bottom)
    return geometric_mean_estimate([found[key] for key in sorted(found)], "fraction")


def _stairs(owns: Mapping[str, Estimate], relatives: Mapping[str, Estimate]) -> tuple[Factor, ...]:
    made: list[Factor] = []
    before = 1.0
    for name in FACTORS:
        level = before * relatives[name].value
        made.append(Factor(name=name, own=owns.get(name), relative=relatives[name], level=level, step=before - level))
        before = level
    return tuple(made)

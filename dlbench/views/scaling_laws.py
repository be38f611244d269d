"""Scaling laws fitted to measured points, and what they would say of more ranks: forecasts, never measurements.

With k = p / p0 the ranks over the baseline's and T the time of a step's fixed work, a law is

    T(k) / T(1) = ideal(k) + a (1 - 1/k) + b log2 k + c (k - 1) + e (k - 1)^2 + d [k > 1],    a, b, c, d, e >= 0

with one or two of the terms; ideal(k) = 1 under weak scaling and 1/k under strong scaling. The first term alone is
Amdahl's law under strong scaling (AFIPS 1967), and under weak scaling what a ring's bytes cost; the second what trees
and the slowest of k ranks cost, the third start-ups of a ring or a server, the fourth what all pairs of ranks cost each
other (Gunther's coherency, Guerrilla Capacity Planning, 2007), the last what the edge of the node costs where the
baseline is inside one. Candidates of a few simple terms, distinguished by points held out, are how Extra-P models
programs (Calotoiu et al., SC'13).

A law is ruled out where the points miss it by more than the scatter of the runs explains. Of those left, the one counts
that, fitted without the largest point, comes nearest to it. The interval of a forecast is over runs and over all laws
that are left, because points that do not separate two laws do not separate their forecasts either. The same is made
of the smaller points for the largest one, the hindcast: where that misses, no forecast is made; and no forecast is
surer than the law's hindcast may have been off.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dlbench.analysis.scaling import Group, Point
from dlbench.analysis.table import RunTable
from dlbench.report.wording import POINTS, interval_text, points, value_text
from dlbench.specs.plan import RunPlan
from dlbench.stats.estimates import Estimate, interval
from dlbench.stats.pairing import LEAST_RUNS, resampled
from dlbench.views.next_step import most_ranks

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]

Term = Literal["saturating", "logarithmic", "linear", "quadratic", "edge"]
Scaling = Literal["weak", "strong"]

_GROWING: tuple[Term, ...] = ("saturating", "logarithmic", "linear", "quadratic")
FAMILY: tuple[tuple[Term, ...], ...] = (
    *((term,) for term in (*_GROWING, "edge")),
    *itertools.combinations(_GROWING, 2),
    *(("edge", term) for term in _GROWING),
)
TEXTS: dict[Term, str] = {
    "saturating": "a (1 - 1/k)",
    "logarithmic": "b log2 k",
    "linear": "c (k - 1)",
    "quadratic": "e (k - 1)^2",
    "edge": "d (beyond one node)",
}

MIN_POINTS = 3  # Rank counts, baseline included: with two, every law fits, and nothing shows which is wrong.
LEVEL = 0.01  # A law is ruled out where points that follow it would miss it as far less often than this.
RESAMPLES = 1000
ROUNDING = 1e-4  # Relative misses below this are no evidence at any scatter: clocks and models are no better.
FACTOR = 2
"""A forecast is made for this many times the largest measured rank count: about as far as the hindcast reached. Laws
that fit all points alike are too far apart at four times (simulated: `make bench AREA=truth.predictions`)."""


@dataclass(frozen=True, kw_only=True)
class LawPoint:
    """A measured point and what the law says of it."""

    ranks: int
    nodes: int
    measured: Estimate  # Efficiency.
    fitted: float  # Efficiency by the law (fraction).
    residual: float  # Measured less fitted (fraction).
    serial_fraction: Estimate | None  # Karp and Flatt's, of this point alone; None under weak scaling.


@dataclass(frozen=True, kw_only=True)
class Law:
    """A scaling law fitted to the measured points."""

    name: str  # Its terms; the first is called Amdahl under strong scaling.
    formula: str
    scaling: Scaling
    terms: tuple[Term, ...]
    coefficients: tuple[Estimate, ...]  # One for each term (1).
    worst_residual: float  # Largest residual without its sign (fraction).
    hindcast_ranks: int  # Ranks of the largest point.
    hindcast_error: float  # Measured less what the law fitted without the largest point says of it (fraction).
    is_ruled_out: bool  # Whether even this, the nearest, misses the points by more than the runs' scatter explains.
    alternatives: tuple[str, ...]  # Other laws that the points do not rule out.
    doubt: str  # Why nothing may be extrapolated from the law, in a sentence; empty where it may.
    points: tuple[LawPoint, ...]  # That it is fitted to, without the baseline, where every law holds.


@dataclass(frozen=True, kw_only=True)
class ForecastPoint:
    """What a law says of a rank count that was not measured."""

    ranks: int
    efficiency: float  # Share of the ideal (fraction).
    low: float
    high: float
    """95 % over runs and over the laws that the points do not rule out: the lowest and the highest end of any, further
    out by `Fitted.margin`."""
    throughput: float  # Samples per second; `low` and `high` scale alike.
    throughput_low: float
    throughput_high: float

    @property
    def share(self) -> Estimate:
        return Estimate(self.efficiency, self.low, self.high, LEAST_RUNS, "fit", "fraction", 0.95)

    @property
    def rate(self) -> Estimate:
        """The throughput as it is printed; its unit stands in headers."""
        return Estimate(self.throughput, self.throughput_low, self.throughput_high, LEAST_RUNS, "fit", "", 0.95)


def ideal_time(scaling: Scaling, ratios: Array) -> Array:
    """Time of the ideal over the baseline's at `ratios` times its ranks."""
    import numpy as np

    return 1 / ratios if scaling == "strong" else np.ones_like(ratios)


def _term(name: Term, ratios: Array) -> Array:
    import numpy as np

    found: Array = {
        "saturating": 1 - 1 / ratios,
        "logarithmic": np.log2(ratios),
        "linear": ratios - 1,
        "quadratic": (ratios - 1) ** 2,
        "edge": (ratios > 1).astype(float),
    }[name]
    return found


def fit_terms(scaling: Scaling, terms: tuple[Term, ...], ratios: Array, times: Array) -> Array:
    """Coefficients, none below 0, with the least squares of relative errors of the times.

    `terms`: one or two; `ratios`: ranks over the baseline's, above 1, shape (points); `times`: over the baseline's,
    shape (..., points). Returns shape (..., terms).
    """
    import numpy as np

    target = (times - ideal_time(scaling, ratios)) / times
    rows = [_term(name, ratios) / times for name in terms]
    alone = [np.maximum(0.0, (row * target).sum(-1) / (row * row).sum(-1)) for row in rows]
    if len(terms) == 1:
        return np.stack(alone, axis=-1)
    first, second = rows
    a, b, d = (first * first).sum(-1), (first * second).sum(-1), (second * second).sum(-1)
    y, z = (first * target).sum(-1), (second * target).sum(-1)
    found = np.stack([d * y - b * z, a * z - b * y], axis=-1) / (a * d - b * b)[..., None]
    # Where one would be below 0, the best has one of them 0.
    errors = [((target - row * one[..., None]) ** 2).sum(-1) for row, one in zip(rows, alone, strict=True)]
    nothing = np.zeros_like(alone[0])
    only_first, only_second = np.stack([alone[0], nothing], axis=-1), np.stack([nothing, alone[1]], axis=-1)
    single = np.where((errors[0] <= errors[1])[..., None], only_first, only_second)
    return np.where((found < 0).any(axis=-1)[..., None], single, found)


def time_at(scaling: Scaling, terms: tuple[Term, ...], coefficients: Array, ratios: Array) -> Array:
    """Time over the baseline's by a law: coefficients of shape (..., terms) give (..., points)."""
    rows = [coefficients[..., [place]] * _term(name, ratios) for place, name in enumerate(terms)]
    return ideal_time(scaling, ratios) + sum(rows)


def efficiency_at(law: Law, ratio: float) -> float:
    """Efficiency by a law (1) at `ratio` times the baseline's ranks."""
    import numpy as np

    coefficients, ratios = np.array([one.value for one in law.coefficients]), np.array([float(ratio)])
    return float((ideal_time(law.scaling, ratios) / time_at(law.scaling, law.terms, coefficients, ratios))[0])


@dataclass(frozen=True, kw_only=True)
class _Data:
    """The points that laws are fitted to."""

    scaling: Scaling
    points: tuple[Point, ...]
    ratios: Array
    times: Array  # Over the baseline's, shape (points).
    drawn: Array | None  # The same in each resample of the runs, (resamples, points); None: too few runs.

    def law(self, terms: tuple[Term, ...], coefficients: Array) -> Array:
        return time_at(self.scaling, terms, coefficients, self.ratios)


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """One law of the family on the data."""

    terms: tuple[Term, ...]
    coefficients: Array
    drawn: Array | None  # In each resample, (resamples, terms).
    is_ruled_out: bool


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The law, and what forecasts from it need."""

    law: Law
    left: tuple[_Candidate, ...]  # Laws that are not ruled out.
    largest: int  # Ranks of the largest point.
    margin: float  # How far the law's hindcast may be off: larger end of its 95 % interval over runs (fraction).


def usable_points(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """The points other than the baseline that one law may hold for: those on several nodes, or else those on one.

    What a network between nodes costs is not in points inside one node, and what holds inside is not what holds beyond.
    """
    others = points[1:]
    for wanted in ([one for one in others if one.nodes > 1], [one for one in others if one.nodes == 1]):
        if len({one.ranks for one in wanted}) >= MIN_POINTS - 1:
            return tuple(wanted)
    return ()


def law_of(group: Group, table: RunTable) -> Fitted | None:
    """The law of a group's scaling; None where fewer rank counts than `MIN_POINTS` belong together."""
    import numpy as np

    used = usable_points(group.points)
    if not used:
        return None
    times = np.array([1 / (point.speedup if group.scaling == "strong" else point.efficiency).value for point in used])
    ratios = np.array([point.ideal_speedup for point in used])
    drawn = _drawn_times(group.baseline, used, times, table)
    data = _Data(scaling=group.scaling, points=used, ratios=ratios, times=times, drawn=drawn)
    has_edge = group.baseline.nodes == 1 and used[0].nodes > 1
    distinct = len(set(ratios.tolist()))
    family = [terms for terms in FAMILY if has_edge or "edge" not in terms]
    tried = [_candidate(data, terms) for terms in family if len(terms) < distinct]
    left = tuple(one for one in tried if not one.is_ruled_out)
    misses = {one.terms: _hindcast(data, one.terms) for one in tried}
    chosen = min(left or tried, key=lambda one: (max(ROUNDING, abs(misses[one.terms][0])), len(one.terms)))
    missed = misses[chosen.terms]
    law = _law(group, data, chosen, left, missed)
    return Fitted(law=law, left=left, largest=group.points[-1].ranks, margin=max(map(abs, missed)))


def _drawn_times(baseline: Point, points: tuple[Point, ...], times: Array, table: RunTable) -> Array | None:
    """Times over the baseline's in each resample of the runs."""
    import numpy as np

    throughput = table.figures.set_index("run_id")["throughput"]
    by_run = [
        {table.keys[run_id]: float(throughput.loc[run_id]) for run_id in point.run_ids} for point in (baseline, *points)
    ]
    found = resampled(by_run, centre="geometric mean", resamples=RESAMPLES)
    if found is None:
        return None
    # What resamples scatter around: geometric means over the runs.
    away: Array = found / np.array([np.exp(np.mean(np.log(list(values.values())))) for values in by_run])
    return times * away[:, :1] / away[:, 1:]


def _candidate(data: _Data, terms: tuple[Term, ...]) -> _Candidate:
    coefficients = fit_terms(data.scaling, terms, data.ratios, data.times)
    return _Candidate(
        terms=terms,
        coefficients=coefficients,
        drawn=None if data.drawn is None else fit_terms(data.scaling, terms, data.ratios, data.drawn),
        is_ruled_out=data.drawn is not None and _likelihood(data, terms, coefficients) < LEVEL,
    )


def _likelihood(data: _Data, terms: tuple[Term, ...], coefficients: Array) -> float:
    """How often points that follow the law, and scatter as the runs do, would miss it as far as these (1)."""
    import numpy as np

    assert data.drawn is not None
    fitted = data.law(terms, coefficients)
    misses = np.log(data.times / fitted)
    if np.abs(misses).max() < ROUNDING:
        return 1.0
    made = fitted * data.drawn / data.times
    again = data.law(terms, fit_terms(data.scaling, terms, data.ratios, made))
    return float(np.mean((np.log(made / again) ** 2).sum(axis=1) >= (misses**2).sum()))


def _hindcast(data: _Data, terms: tuple[Term, ...]) -> tuple[float, float, float]:
    """Efficiency of the largest point less that of the law fitted to the others, and ends of its 95 % over runs."""
    import numpy as np

    earlier = data.ratios < data.ratios[-1]

    def missed(times: Array) -> Array:
        coefficients = fit_terms(data.scaling, terms, data.ratios[earlier], times[..., earlier])
        law = data.law(terms, coefficients)
        found: Array = ideal_time(data.scaling, data.ratios)[-1] * (1 / times[..., -1] - 1 / law[..., -1])
        return found

    value = missed(data.times)
    low, high = np.percentile(value if data.drawn is None else missed(data.drawn), [2.5, 97.5])
    return float(value), float(low), float(high)


def _name(scaling: Scaling, terms: tuple[Term, ...]) -> str:
    return " + ".join("Amdahl" if name == "saturating" and scaling == "strong" else name for name in terms)


def _law(
    group: Group, data: _Data, chosen: _Candidate, left: tuple[_Candidate, ...], missed: tuple[float, float, float]
) -> Law:
    import numpy as np

    fitted = data.law(chosen.terms, chosen.coefficients)
    by_law = (ideal_time(data.scaling, data.ratios) / fitted).tolist()
    points = tuple(
        LawPoint(
            ranks=point.ranks,
            nodes=point.nodes,
            measured=point.efficiency,
            fitted=value,
            residual=point.efficiency.value - value,
            serial_fraction=point.serial_fraction,
        )
        for point, value in zip(data.points, by_law, strict=True)
    )
    runs = min(len(point.run_ids) for point in (group.baseline, *data.points))
    ends = None if chosen.drawn is None else np.percentile(chosen.drawn, [2.5, 97.5], axis=0)
    worst = max(abs(point.residual) for point in points)
    shown = [TEXTS[name] for name in chosen.terms]
    return Law(
        name=_name(data.scaling, chosen.terms),
        formula=" + ".join(["T(k)/T(1) = 1/k" if data.scaling == "strong" else "T(k)/T(1) = 1", *shown]),
        scaling=data.scaling,
        terms=chosen.terms,
        coefficients=tuple(
            Estimate(float(value), None, None, runs, "single run", "ratio")
            if ends is None
            else interval(float(value), ends[0, place], ends[1, place], runs, "bootstrap", "ratio", level=0.95)
            for place, value in enumerate(chosen.coefficients)
        ),
        worst_residual=worst,
        hindcast_ranks=data.points[-1].ranks,
        hindcast_error=missed[0],
        is_ruled_out=chosen.is_ruled_out,
        alternatives=tuple(_name(data.scaling, one.terms) for one in left if one is not chosen),
        doubt=_doubt(group, data, left, worst, missed),
        points=points,
    )


def _doubt(
    group: Group, data: _Data, left: tuple[_Candidate, ...], worst: float, missed: tuple[float, float, float]
) -> str:
    """Why nothing may be extrapolated, in a sentence; empty where it may."""
    if data.points[-1].nodes == 1 and not _inside(group):
        most = max(one.nodes for one in group.points)
        what = "only one rank count is on several nodes, and points inside one node say nothing of their network"
        if most == 1:
            what = "all points are on one node, and what a network between nodes costs is in none of them"
        if most_ranks(group.sample.plan) is not None:
            return what
        return f"{what}; measure {MIN_POINTS - 1} rank counts or more on several nodes, e.g. --nodes 1,2,4"
    if data.drawn is None:
        return f"fewer than {LEAST_RUNS} runs of a point do not say how it scatters; repeat with --repeats 5"
    if not left:
        if all(point.efficiency.value > 1 for point in data.points):
            return "the measured points exceed the ideal, which no law knows"
        misses = f"the nearest misses a measured point by {points(worst)} of efficiency"
        return f"no law of the family fits: {misses}, more than the scatter of the runs explains"
    error, low, high = missed
    if low <= ROUNDING and high >= -ROUNDING:
        return ""
    nearest, farthest = sorted((abs(low), abs(high)))
    missing = interval(abs(error), nearest, farthest, len(data.points[-1].run_ids), "bootstrap", POINTS, level=0.95)
    return (
        f"withheld, because no law foretells {data.points[-1].ranks} ranks from the others: the nearest misses them by "
        f"{value_text(missing)} of efficiency {interval_text(missing)}"
    )


def _inside(group: Group) -> int | None:
    """The rank count to be forecast, if it fits on the one node of all points; None where that is not known."""
    most, wanted = ranks_of_a_node(group.sample.plan), group.points[-1].ranks * FACTOR
    return None if most is None or wanted > most or any(point.nodes > 1 for point in group.points) else wanted


def ranks_of_a_node(plan: RunPlan) -> int | None:
    """Ranks that a node of the system holds, as it declares them; None where it does not."""
    node = plan.system.node
    if node.ranks is not None:
        return node.ranks
    return node.gpus or (None if node.cores is None else node.cores // plan.layout.cores_per_rank)


def forecasts(group: Group, fitted: Fitted) -> tuple[ForecastPoint, ...]:
    """What the law says of `FACTOR` times the largest rank count of its group; empty where there is a doubt."""
    import numpy as np

    law = fitted.law
    if law.doubt:
        return ()
    ranks = fitted.largest * FACTOR
    ratio = ranks / group.baseline.ranks
    value = efficiency_at(law, ratio)
    ratios = np.array([ratio])
    ideal = ideal_time(law.scaling, ratios)
    drawn = [ideal / time_at(law.scaling, one.terms, one.drawn, ratios) for one in fitted.left if one.drawn is not None]
    ends = np.percentile(drawn, [2.5, 97.5], axis=1)
    low = max(0.0, min(value, float(ends[0].min())) - fitted.margin)
    high = min(1.0, max(value, float(ends[1].max())) + fitted.margin)
    scale = ratio * group.baseline.throughput.value
    ends_of = {"throughput": value * scale, "throughput_low": low * scale, "throughput_high": high * scale}
    return (ForecastPoint(ranks=ranks, efficiency=value, low=low, high=high, **ends_of),)

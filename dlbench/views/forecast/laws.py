"""Scaling laws fitted to measured points, and what they would say of more ranks: forecasts, never measurements.

With k = p / p0 the ranks over the baseline's, S the measured speed-up and E = S / k the efficiency:

* strong scaling, Amdahl (AFIPS 1967): S = 1 / (f + (1 - f) / k), so 1/S - 1/k = f (1 - 1/k);
* weak scaling, Gustafson (Communications of the ACM 31(5), 1988): S = k - f (k - 1), so 1 - E = f (1 - 1/k).

Both are straight lines through the origin in x = 1 - 1/k. The fraction f is fitted by least squares on their left
sides: on the time of the fixed work over the baseline's, or on the efficiency. The baseline itself says nothing of f.
For one point f is Karp and Flatt's fraction (strong scaling) or the loss of efficiency over its limit (weak scaling).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dlbench.reading.scaling import Group, Point
from dlbench.reading.table import RunTable
from dlbench.stats.estimates import MIN_RUNS, Estimate, interval
from dlbench.stats.resampling import RESAMPLES, SEED

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]

LawName = Literal["Amdahl", "Gustafson"]

MIN_POINTS = 3
"""Rank counts, baseline included: with two, every law fits, and nothing shows which is wrong."""
MAX_RESIDUAL = 0.03
"""Efficiency (fraction) by which a law may miss a measured point before nothing is extrapolated from it."""
FACTORS = (2, 4)
"""Forecasts are made for so many times the largest measured rank count."""


FORMULAS: dict[LawName, str] = {
    "Amdahl": "S = 1 / (f + (1 - f) / k)",
    "Gustafson": "S = k - f (k - 1)",
}


@dataclass(frozen=True, kw_only=True)
class LawPoint:
    """A measured point and what the law says of it."""

    ranks: int
    nodes: int
    measured: Estimate
    """Efficiency."""
    fitted: float
    """Efficiency by the law (fraction); the ideal for a fraction below 0, of which the law knows nothing."""
    residual: float
    """Measured less fitted (fraction)."""
    serial_fraction: Estimate | None
    """Karp and Flatt's, of this point alone; None under weak scaling."""


@dataclass(frozen=True, kw_only=True)
class Law:
    """A scaling law fitted to the measured points."""

    name: LawName
    formula: str
    fraction: Estimate
    """The part that does not scale, by the fit."""
    worst_residual: float
    """Largest residual without its sign (fraction)."""
    hindcast_ranks: int | None
    """Ranks of the largest point; None where what is left without it would not determine a law."""
    hindcast_error: float | None
    """Measured less what the law, fitted without the largest point, would have said of it (fraction)."""
    doubt: str
    """Why nothing may be extrapolated from the law, in a sentence; empty where it may."""
    points: tuple[LawPoint, ...]
    """Without the baseline, where every law holds."""


@dataclass(frozen=True, kw_only=True)
class ForecastPoint:
    """What a law says of a rank count that was not measured."""

    ranks: int
    efficiency: float
    """Share of the ideal (fraction)."""
    low: float
    high: float
    """Ends for the ends of the fraction's interval, widened by how far the law missed what was measured, as many times
    as there are more ranks than measured."""
    throughput: float
    """Samples per second; `low` and `high` scale alike."""
    throughput_low: float
    throughput_high: float


def fraction_of(law: LawName, ratios: Array, speedups: Array) -> Array:
    """The fraction that fits best.

    Args:
        law: which one.
        ratios: ranks over the baseline's, above 1, shape (points).
        speedups: measured, above 0, shape (..., points).

    Returns:
        Fractions (1), shape (...); below 0 where speed-ups exceed the ideal.
    """
    x = 1 - 1 / ratios
    y = 1 / speedups - 1 / ratios if law == "Amdahl" else 1 - speedups / ratios
    found: Array = (y * x).sum(axis=-1) / (x * x).sum(axis=-1)
    return found


def efficiency_at(law: LawName, fraction: float, ratio: float) -> float:
    """Efficiency by the law (1) at `ratio` times the baseline's ranks.

    Below a fraction of 0 Amdahl's law has a pole at `ratio` = 1 - 1 / fraction, and is below 0 beyond it.
    """
    if law == "Amdahl":
        return 1 / (fraction * ratio + (1 - fraction))
    return 1 - fraction * (1 - 1 / ratio)


def _known_efficiency(law: LawName, fraction: float, ratio: float) -> float:
    """`efficiency_at`, but the ideal below a fraction of 0."""
    return efficiency_at(law, max(0.0, fraction), ratio)


def law_of(group: Group, table: RunTable) -> Law | None:
    """The law of a group's scaling fitted to its points; None for fewer rank counts than `MIN_POINTS`.

    The interval of the fraction is over runs: a 95 % percentile bootstrap of the whole fit where every point has
    `MIN_RUNS` runs (repeats are drawn together where all points hold the same ones), the fits to the ends of the
    points' ranges for fewer, none for single runs.
    """
    import numpy as np

    if len({point.ranks for point in group.points}) < MIN_POINTS:
        return None
    name: LawName = "Amdahl" if group.scaling == "strong" else "Gustafson"
    others = group.points[1:]
    fraction = _fraction(name, group, table, np.array([point.ideal_speedup for point in others]))
    points = tuple(_law_point(name, fraction.value, point) for point in others)
    worst = max(abs(point.residual) for point in points)
    hindcast = _hindcast(name, group.points)
    return Law(
        name=name,
        formula=FORMULAS[name],
        fraction=fraction,
        worst_residual=worst,
        hindcast_ranks=None if hindcast is None else hindcast[0],
        hindcast_error=None if hindcast is None else hindcast[1],
        doubt=_doubt(fraction.value, worst),
        points=points,
    )


def _law_point(name: LawName, fraction: float, point: Point) -> LawPoint:
    fitted = _known_efficiency(name, fraction, point.ideal_speedup)
    return LawPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        measured=point.efficiency,
        fitted=fitted,
        residual=point.efficiency.value - fitted,
        serial_fraction=point.serial_fraction,
    )


def _fraction(name: LawName, group: Group, table: RunTable, ratios: Array) -> Estimate:
    import numpy as np

    others = group.points[1:]

    def fitted(speedups: list[float]) -> float:
        return float(fraction_of(name, ratios, np.array(speedups)))

    value = fitted([point.speedup.value for point in others])
    ends = [(point.speedup.low, point.speedup.high) for point in others]
    lows = [low for low, _ in ends if low is not None]
    highs = [high for _, high in ends if high is not None]
    if len(lows) < len(ends) or len(highs) < len(ends):
        return Estimate(value, None, None, 1, "single run", "fraction")
    if group.fewest_runs < MIN_RUNS:
        # It falls with every speed-up, so the ends change places.
        return interval(value, fitted(highs), fitted(lows), group.fewest_runs, "range", "fraction")
    drawn = _resampled_speedups(group, table)
    low, high = np.percentile(fraction_of(name, ratios, drawn), [2.5, 97.5])
    return interval(value, low, high, group.fewest_runs, "bootstrap", "fraction", level=0.95)


def _resampled_speedups(group: Group, table: RunTable) -> Array:
    """Speed-ups of every point but the baseline in each resample of the runs, shape (`RESAMPLES`, points)."""
    import numpy as np

    figures = table.figures.set_index("run_id")
    together = all(point.paired_with_baseline for point in group.points[1:])
    medians = []
    for number, point in enumerate(group.points):
        rows = figures.loc[list(point.run_ids)].sort_values(["block", "repeat"])
        values = rows["throughput"].to_numpy(dtype=float)
        draws = np.random.default_rng([SEED, 0 if together else number])
        picks = draws.integers(0, len(values), size=(RESAMPLES, len(values)))
        medians.append(np.median(values[picks], axis=1))
    found: Array = np.stack(medians[1:], axis=1) / medians[0][:, None]
    return found


def _hindcast(name: LawName, points: tuple[Point, ...]) -> tuple[int, float] | None:
    """Ranks of the largest point, and its efficiency less that of the law fitted without it (fraction)."""
    import numpy as np

    *earlier, last = points
    if len({point.ranks for point in earlier}) < MIN_POINTS or last.ranks == earlier[-1].ranks:
        return None
    ratios = np.array([point.ideal_speedup for point in earlier[1:]])
    fraction = float(fraction_of(name, ratios, np.array([point.speedup.value for point in earlier[1:]])))
    fitted = _known_efficiency(name, fraction, last.ideal_speedup)
    return last.ranks, last.efficiency.value - fitted


def _doubt(fraction: float, worst_residual: float) -> str:
    """Why nothing may be extrapolated from a law, in a sentence; empty where it may."""
    if fraction < 0:
        return "the measured points exceed the ideal, which the law does not know"
    if worst_residual > MAX_RESIDUAL:
        return (
            f"the law misses a measured point by {worst_residual * 100:.1f} points of efficiency, more than "
            f"{MAX_RESIDUAL * 100:.0f}: these points follow another law"
        )
    return ""


def forecasts(group: Group, law: Law) -> tuple[ForecastPoint, ...]:
    """What the law says of `FACTORS` times the largest rank count of its group; empty where there is a doubt."""
    if law.doubt:
        return ()
    base = group.baseline
    missed = law.worst_residual + (abs(law.hindcast_error) if law.hindcast_error is not None else 0.0)
    found = []
    for factor in FACTORS:
        ranks = group.points[-1].ranks * factor
        ratio = ranks / base.ranks
        value = efficiency_at(law.name, law.fraction.value, ratio)
        ends = [
            efficiency_at(law.name, max(0.0, end), ratio)
            for end in (law.fraction.high, law.fraction.low)
            if end is not None
        ] or [value, value]
        # What a law leaves out (cost that grows with the ranks) grows as far as it is extrapolated.
        low, high = max(0.0, min(ends) - factor * missed), max(ends) + factor * missed
        scale = ratio * base.throughput.value
        found.append(
            ForecastPoint(
                ranks=ranks,
                efficiency=value,
                low=low,
                high=high,
                throughput=value * scale,
                throughput_low=low * scale,
                throughput_high=high * scale,
            )
        )
    return tuple(found)

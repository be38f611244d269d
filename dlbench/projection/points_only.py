"""The second opinion: what measured steps alone say of more ranks, without a word on why a step takes as long.

With k the nodes (inside one node: the ranks over those of the smallest point),

    T(p) = c0 ideal(p) + c1 x(p),   x = log2 k (trees, the slowest of k) or 1 - 1/k (bytes of a ring, Amdahl's share)

ideal = 1 under weak and 1/k under strong scaling; c0, c1 >= 0, by least relative squares. Of the two that counts which,
fitted without the largest point, comes nearer to it. How far it is off beyond the points is learnt from every point
that two or more smaller ones predict (`dlbench.perfmodels.extrapolation`).

There is no linear term. Fitted to four points of published series of a large machine it told 20 to 420 % too long at 8
to 16 times the ranks, where the two above were 4 to 14 % off.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from dlbench.errors import UserError
from dlbench.lazy import Array, np
from dlbench.opening import read_named, why_unreadable
from dlbench.perfmodels.extrapolation import Miss, model_error
from dlbench.projection.ingredients import Ingredients, RunFigures
from dlbench.projection.refusals import refusal
from dlbench.records.folder import MAX_JSON
from dlbench.specs.problems import problem_of
from dlbench.stats.pairing import LEAST_RUNS, SEED, resampled

DRAWS = 1000
CURVES: Mapping[str, Callable[[float], float]] = {"logarithm": math.log2, "saturation": lambda k: 1 - 1 / k}
MIN_POINTS = 3  # Rank counts: through two goes every curve, and nothing shows which is wrong.


@dataclass(frozen=True, kw_only=True)
class ByPoints:
    """The step at a rank count by the points alone."""

    curve: str  # One of `CURVES`.
    step_s: Array  # By draw, seconds.
    error: Array  # Factor of the curve's own error that is in it, by draw.


def points_only(ingredients: Ingredients, ranks: int, *, draws: int = DRAWS) -> ByPoints | None:
    """By draw over runs, and over how far the curve may be off; None where the points do not say."""
    if refusal(ingredients, ranks, by="points") is not None:
        return None
    # What holds inside a node is not what holds beyond it: of a target on several nodes count points on several, with
    # full nodes, or a single rank on one, where these are too few. A series of the other kind of scaling has other
    # batches.
    points = [
        point
        for point in ingredients.points
        if len(point.runs) >= LEAST_RUNS and point.batch_per_rank == ingredients.batch_at(point.ranks)
    ]
    is_inside = ingredients.nodes_of(ranks) == 1
    if not is_inside:
        beyond = [point for point in points if point.nodes > 1]
        full = [point for point in points if point.nodes > 1 or point.ranks == ingredients.per_node]
        points = beyond if len(beyond) >= MIN_POINTS else full
    if len(points) < MIN_POINTS:
        return None
    base = points[0].ranks if is_inside else ingredients.per_node
    counts = [point.ranks / base for point in points]
    is_strong = ingredients.scaling == "strong"
    by_run = [{(run.session, run.run_id): run.step_s for run in point.runs} for point in points]
    drawn = resampled(by_run, centre="geometric mean", resamples=draws)
    assert drawn is not None  # Every point has `LEAST_RUNS`.
    middle = np.array([[statistics.geometric_mean(runs.values()) for runs in by_run]])

    def misses(curve: str) -> list[Miss]:
        """Each point from the third on, as the smaller ones have it."""
        found = []
        for place in range(MIN_POINTS - 1, len(points)):
            told = _at(curve, counts[:place], middle[:, :place], counts[place], is_strong)[0]
            doublings = math.log2(counts[place] / counts[place - 1])
            found.append(Miss(error=math.log(middle[0, place] / told), doublings=doublings))
        return found

    missed = {curve: misses(curve) for curve in CURVES}
    best = min(CURVES, key=lambda curve: abs(missed[curve][-1].error))
    # Equal seeds, so that errors at several rank counts are those of one curve.
    doublings = min(abs(math.log2(ranks / point.ranks)) for point in points)
    error = model_error(missed[best]).drawn(doublings, draws, [SEED, 8])
    step = _at(best, counts, drawn, ranks / base, is_strong) * error
    if doublings == 0:  # What was measured is no curve's.
        step = drawn[:, [point.ranks for point in points].index(ranks)]
    return ByPoints(curve=best, step_s=step, error=error)


def _at(curve: str, counts: Sequence[float], times: Array, wanted: float, is_strong: bool) -> Array:
    """The curve through times of shape (draws, points) at these k, at another k: shape (draws,)."""

    def terms(k: float) -> tuple[float, float]:
        return (1 / k if is_strong else 1.0), CURVES[curve](k)

    # Relative squares: both sides over the measured time, so that what is fitted is 1.
    rows = np.array([terms(k) for k in counts])[None] / times[..., None]
    squares, sums = rows.swapaxes(1, 2) @ rows, rows.sum(axis=1)
    both = np.linalg.solve(squares, sums[..., None])[..., 0]
    # Where one would be below 0, the best has it at 0.
    alone = np.where(both < 0, 0.0, sums / np.diagonal(squares, axis1=1, axis2=2))
    found: Array = np.where(both.min(axis=1, keepdims=True) < 0, alone, both) @ np.array(terms(wanted))
    return found


COLUMNS = ("ranks", "nodes", "step_s", "run")


def read_points(path: Path, scaling: Literal["weak", "strong"]) -> Ingredients:
    """Anybody's series: a CSV file with the columns of `COLUMNS`, a row for each run; all else is not known. Raises
    `UserError`: there is no such file, or a row is wrong, with its line.
    """
    try:
        rows = list(csv.DictReader(read_named(path, MAX_JSON).decode("utf-8-sig").splitlines(), strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = why_unreadable(error) if isinstance(error, OSError) else error
        raise UserError(f"{path}: cannot be read as CSV: {why}") from None
    if not rows or set(rows[0]) != set(COLUMNS):
        raise UserError(f"{path}: its first line must be {','.join(COLUMNS)}, and each further line one run")
    found: dict[tuple[int, int], list[RunFigures]] = {}
    for line, row in enumerate(rows, 2):
        try:
            place = (int(row["ranks"]), int(row["nodes"]))
            found.setdefault(place, []).append(RunFigures(run_id=row["run"], step_s=float(row["step_s"])))
        except ValidationError as error:
            raise UserError(f"{path}: line {line}: {problem_of(RunFigures, error)}") from None
        except (TypeError, ValueError):
            raise UserError(f"{path}: line {line}: must hold {', '.join(COLUMNS)}, numbers but for the last") from None
    try:
        points = [{"ranks": ranks, "nodes": nodes, "runs": runs} for (ranks, nodes), runs in sorted(found.items())]
        return Ingredients.model_validate(
            {"title": path.name, "source": str(path), "scaling": scaling, "points": points}
        )
    except ValidationError as error:
        raise UserError(f"{path}: {problem_of(Ingredients, error)}") from None

"""The second opinion gives back the curve that made the points, knows its own error, and reads anybody's series."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from scipy import optimize

from dlbench.errors import UserError
from dlbench.projection.ingredients import Ingredients, PointFigures, RunFigures
from dlbench.projection.points_only import points_only, read_points
from dlbench.projection.projected import Band

Scaling = Literal["weak", "strong"]


def by_points(ingredients: Ingredients, ranks: int) -> Band | None:
    found = points_only(ingredients, ranks)
    return None if found is None else Band.of(found.step_s)


def series(
    step: Callable[[int], float],
    counts: Sequence[int] = (1, 2, 4, 8),
    *,
    scaling: Scaling = "weak",
    noise: float = 0.01,
    per_node: int = 1,
) -> Ingredients:
    scatter = random.Random(7)
    return Ingredients(
        title="t",
        source="s",
        scaling=scaling,
        ranks_per_node=per_node,
        points=tuple(
            PointFigures(
                ranks=count,
                nodes=-(-count // per_node),
                runs=tuple(
                    RunFigures(run_id=f"{count}-{run}", step_s=step(count) * (1 + scatter.gauss(0, noise)))
                    for run in range(5)
                ),
            )
            for count in counts
        ),
    )


CURVES: dict[str, tuple[Scaling, str, Callable[[int], float]]] = {
    "slowest of p": ("weak", "logarithm", lambda p: 0.1 + 0.004 * math.log2(p)),
    "bytes of a ring": ("weak", "saturation", lambda p: 0.1 + 0.03 * (1 - 1 / p)),
    "Amdahl": ("strong", "saturation", lambda p: 1 / p + 0.05 * (1 - 1 / p)),
    "trees": ("strong", "logarithm", lambda p: 1 / p + 0.01 * math.log2(p)),
}


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("factor", [2, 4])
def test_points_of_a_curve_foretell_it(name: str, factor: int) -> None:
    scaling, curve, step = CURVES[name]
    found = points_only(series(step, scaling=scaling, noise=0.002), 8 * factor)
    assert found is not None
    assert found.curve == curve
    assert float(np.median(found.step_s)) == pytest.approx(step(8 * factor), rel=0.02)
    low, high = np.quantile(found.step_s, [0.1, 0.9])
    assert low < step(8 * factor) < high


@pytest.mark.parametrize("name", CURVES)
def test_no_other_coefficients_fit_better(name: str) -> None:
    """Against scipy's non-negative least squares, on points that are none of a curve."""
    scaling, _, step = CURVES[name]
    bent = series(lambda p: step(p) * (1.3 if p == 4 else 1.0), scaling=scaling, noise=0.0)
    found = points_only(bent, 16)
    assert found is not None
    counts = np.array([2.0, 4.0, 8.0])  # A single node takes part in no curve beyond it where there are three others.
    times = np.array([point.runs[0].step_s for point in bent.points[1:]])
    wanted = {}
    for curve, x in (("logarithm", np.log2), ("saturation", lambda k: 1 - 1 / k)):
        ideal = 1 / counts if scaling == "strong" else np.ones(3)
        best, _ = optimize.nnls(np.stack([ideal / times, x(counts) / times], axis=1), np.ones(3))
        wanted[curve] = best[0] * (1 / 16 if scaling == "strong" else 1) + best[1] * x(16.0)
    assert float(np.median(found.step_s / found.error)) == pytest.approx(wanted[found.curve], rel=1e-6)


def test_a_point_that_the_others_miss_widens_the_band() -> None:
    straight = by_points(series(lambda p: 0.1 + 0.004 * math.log2(p), noise=0.001), 16)
    bent = by_points(series(lambda p: 0.1 + 0.02 * max(0, math.log2(p) - 2), noise=0.001), 16)
    assert straight is not None
    assert bent is not None

    def width(low: float, high: float) -> float:
        return math.log(high / low)

    assert width(*bent.middle(80)) > 1.5 * width(*straight.middle(80))


def test_what_holds_inside_a_node_says_nothing_of_more_nodes() -> None:
    """Fast points inside a node of four do not talk a curve beyond it down."""

    def step(ranks: int) -> float:
        return 0.1 if ranks <= 4 else 0.15 + 0.002 * math.log2(ranks / 4)

    found = by_points(series(step, (1, 2, 4, 8, 16, 32), per_node=4, noise=0.002), 64)
    assert found is not None
    low, high = found.middle(80)
    assert low < step(64) < high
    assert by_points(series(step, (1, 2, 4), per_node=4), 8) is None


def test_few_points_and_far_targets_are_not_told() -> None:
    assert by_points(series(lambda p: 0.1, (1, 2)), 4) is None
    assert by_points(series(lambda p: 0.1), 64) is None


def test_another_kind_of_scaling_is_not_told_by_points_of_this_one() -> None:
    weak = series(lambda p: 0.1)
    points = tuple(point.model_copy(update={"batch_per_rank": 32}) for point in weak.points)
    assert by_points(weak.model_copy(update={"points": points}), 16) is not None
    assert by_points(weak.model_copy(update={"points": points, "scaling": "strong"}), 16) is None


HEADER = "ranks,nodes,step_s,run"


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (["ranks,step_s", "1,2"], "first line must be ranks,nodes,step_s,run"),
        ([HEADER], "first line must be"),
        ([HEADER, "1,1,-0.1,a"], r"line 2: step_s: must be a number from 1e-09 to 1,000,000"),
        ([HEADER, "1,1,0.1,a", "two,1,0.1,b"], "line 3: must hold ranks"),
        ([HEADER, "0,1,0.1,a"], "points.0.ranks: must be"),
        ([HEADER, "1,1,0.1"], "line 2"),
        ([HEADER, "8,3,0.1,a", "16,4,0.1,b"], "does not fill nodes of 4 ranks"),
    ],
)
def test_a_wrong_row_is_named_with_its_line(tmp_path: Path, rows: list[str], told: str) -> None:
    path = tmp_path / "series.csv"
    path.write_text("\n".join(rows))
    with pytest.raises(UserError, match=told):
        read_points(path, "weak")

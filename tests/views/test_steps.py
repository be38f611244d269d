"""The report's views of single steps against the steps themselves: quantiles, outliers, autocorrelation, maps."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlbench.analysis.measures import load_steps
from dlbench.records.scan import Run, scan
from dlbench.report.charts import Chart
from dlbench.report.document import Section
from dlbench.report.table import Sheet, TextTable
from dlbench.specs.plan import RunPlan
from dlbench.views import model
from dlbench.views.scaling_report import assemble
from dlbench.views.steps import RanksView, StepDistribution, StepsView
from dlbench.views.stragglers import EDGES, MapRow, RankMap, bin_title, slowest_text
from tests.analysis.test_causes import simulate
from tests.support.run_factory import StepTimes as Times
from tests.support.run_factory import Story, plans, write_run, write_scaling

VIEWS = (StepsView(), RanksView())

WARMUP, STEPS = 5, 60
LONG = (20, 41)
"""Steps with a long input wait on rank 1."""


def noisy(plan: RunPlan) -> Times:
    """Steps about 100 ms long; rank 3 takes 30 % longer to compute from step 35 on."""
    draw = random.Random(plan.series.position)

    def work(rank: int, step: int) -> dict[str, float]:
        slow = 1.375 if rank == 3 and step >= 35 else 1.0
        found = {"forward": 30 * slow * draw.uniform(0.99, 1.01), "backward": 50 * slow * draw.uniform(0.99, 1.01)}
        if rank == 1 and step in LONG:
            found["input"] = 305.0
        return found

    return simulate(plan, work)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("steps") / "runs"
    overrides = {"measure.warmup_steps": WARMUP, "measure.measured_steps": STEPS}
    for plan in plans(points=(2, 4), repeats=3, overrides=overrides):
        write_run(out, plan, noisy(plan), Story(host=lambda rank: f"n{rank // 2}"))
    return out


@pytest.fixture(scope="module")
def group(folder: Path) -> model.ReportGroup:
    (found,) = assemble(scan(folder)).groups
    return found


def steps_of(group: model.ReportGroup) -> StepDistribution:
    return group.of(StepDistribution)


def with_steps(group: model.ReportGroup, times: StepDistribution | None) -> model.ReportGroup:
    return dataclasses.replace(group, views={**group.views, "step_times": times})


def section(group: model.ReportGroup, view: str) -> Section:
    return next(one for one in VIEWS if one.id == view).section(group)


def runs_at(folder: Path, ranks: int) -> dict[str, Run]:
    return {run.plan.run_id: run for run in scan(folder).runs if run.plan.layout.ranks == ranks}


def slowest(run: Run) -> Any:
    """Seconds of the slowest rank in each measured step."""
    return load_steps(run).step_ns.max(axis=0) / 1e9


def sheets(group: model.ReportGroup, view: str) -> dict[str, Sheet[Any]]:
    return {sheet.name: sheet for sheet in section(group, view).sheets}


def charts(group: model.ReportGroup, view: str) -> tuple[Chart, ...]:
    return tuple(section(group, view).charts())


def cells(table: TextTable) -> set[str]:
    return {str(cell) for row in table.rows for cell in row.cells}


# Distribution


def test_quantiles_are_geometric_means_over_runs_of_the_runs_own(folder: Path, group: model.ReportGroup) -> None:
    for point in steps_of(group).points:
        times = [slowest(run) for run in runs_at(folder, point.ranks).values()]
        assert len(point.quantiles) == 101
        for index, one in enumerate(point.quantiles):
            own = [float(np.quantile(values, index / 100)) for values in times]
            assert one.share == pytest.approx(index / 100)
            assert one.seconds.value == pytest.approx(math.prod(own) ** (1 / len(own)))
            assert (one.seconds.low, one.seconds.high) == (pytest.approx(min(own)), pytest.approx(max(own)))
            assert (one.seconds.n, one.seconds.kind) == (3, "range")
        assert point.p50.value == point.quantiles[50].seconds.value
        assert point.p95.value == point.quantiles[95].seconds.value
        assert point.p99.value == point.quantiles[99].seconds.value
        assert point.longest.value == point.quantiles[100].seconds.value
        assert (point.num_steps, point.num_warmup) == (3 * STEPS, 3 * WARMUP)


def test_autocorrelation_is_the_median_over_runs_and_told_where_it_matters(
    folder: Path, group: model.ReportGroup
) -> None:
    points = steps_of(group).points
    for point in points:
        own = []
        for run in runs_at(folder, point.ranks).values():
            centred = slowest(run) - slowest(run).mean()
            own.append(float((centred[1:] * centred[:-1]).sum() / (centred**2).sum()))
        assert point.autocorrelation.value == pytest.approx(float(np.median(own)))
        assert "correlated" not in " ".join(section(group, "steps").notes)
    known = points[-1].autocorrelation
    assert known is not None
    alike = dataclasses.replace(points[-1], autocorrelation=dataclasses.replace(known, value=0.5, low=0.4, high=0.6))
    times = dataclasses.replace(steps_of(group), points=(points[0], alike))
    last = section(with_steps(group, times), "steps").notes[-1]
    assert "Successive steps are correlated (0.50 (0.40 to 0.60) at 4 ranks)" in last


# Outliers


def test_outliers_are_the_steps_beyond_the_fence(folder: Path, group: model.ReportGroup) -> None:
    for point in steps_of(group).points:
        expected: dict[tuple[str, int], float] = {}
        for run_id, run in runs_at(folder, point.ranks).items():
            times = slowest(run)
            low, high = np.quantile(times, (0.25, 0.75))
            beyond = np.flatnonzero(times > high + 3 * (high - low))
            expected |= {(run_id, WARMUP + int(step)): float(times[step] / np.median(times)) for step in beyond}
        assert point.num_outliers == len(expected)
        assert {(one.run_id, one.step): one.ratio for one in point.outliers} == pytest.approx(expected)
        assert [one.ratio for one in point.outliers] == sorted(expected.values(), reverse=True)
        assert {(one.rank, one.host, one.phase) for one in point.outliers} == {(1, "n0", "input")}
        assert {one.step for one in point.outliers} == set(LONG)


# Ranks by steps


def test_the_map_is_own_work_of_the_run_in_the_middle(folder: Path, group: model.ReportGroup) -> None:
    found = steps_of(group).map
    runs = runs_at(folder, 4)
    medians = {run_id: float(np.median(slowest(run))) for run_id, run in runs.items()}
    assert found.run_id == sorted(medians, key=lambda run_id: medians[run_id])[1]
    assert (found.ranks, found.num_runs, found.step_starts[0], found.last_step) == (4, 3, WARMUP, WARMUP + STEPS - 1)
    steps = load_steps(runs[found.run_id])
    own = steps.step_ns - steps.phase_ns["exchange"]
    relative = own / np.median(own)
    for rank, row in enumerate(found.rows):
        assert (row.first_rank, row.last_rank, row.hosts) == (rank, rank, f"n{rank // 2}")
        assert row.cells == pytest.approx(relative[rank].tolist(), rel=1e-3)
        assert row.mean == pytest.approx(relative[rank].mean())
        assert row.largest == pytest.approx(relative[rank].max())
        assert row.largest_first_step == row.largest_last_step == WARMUP + int(relative[rank].argmax())
    assert slowest_text(found).startswith(f"rank {int(relative.mean(axis=1).argmax())} on ")


def test_one_rank_has_no_map_but_a_remedy(tmp_path: Path) -> None:
    write_scaling(tmp_path, points=(1,), repeats=1)
    (found,) = assemble(scan(tmp_path)).groups
    assert StepsView().section(found) is not None
    assert RanksView().section(found) is None
    assert "--ranks 1,2 --repeats 5" in RanksView().remedy(dataclasses.replace(found, most_ranks=2))


def a_map(values: Any, width: int) -> RankMap:
    rows, columns = values.shape
    return RankMap(
        run_id="r",
        ranks=rows,
        nodes=1,
        num_runs=1,
        step_starts=tuple(range(7, 7 + columns * width, width)),
        last_step=7 + columns * width - 1,
        rows=tuple(
            MapRow(
                first_rank=row,
                last_rank=row,
                hosts="n0",
                cells=tuple(values[row].tolist()),
                mean=float(values[row].mean()),
                largest=float(values[row].max()),
                largest_first_step=7,
                largest_last_step=7,
            )
            for row in range(rows)
        ),
    )


def rectangles(group: model.ReportGroup, found: RankMap) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """Of a drawn map: rectangles, the specification, the words."""
    times = dataclasses.replace(steps_of(group), map=found)
    (chart,) = charts(with_steps(group, times), "ranks")
    every = [row for values in chart.spec.get("datasets", {}).values() for row in values]
    every += [row for layer in chart.spec["layer"] for row in (layer.get("data") or {}).get("values", [])]
    return [row for row in every if "bin" in row], chart.spec, chart.alt


def bin_of(value: float) -> str:
    """Counted, not searched."""
    return bin_title(sum(value >= edge for edge in EDGES))


@pytest.mark.parametrize("seed", range(3))
def test_rectangles_cover_the_cells_that_are_not_near_one(group: model.ReportGroup, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.choice([0.5, 0.95, 1.0, 1.0, 1.0, 1.05, 1.2, 1.3, 1.7, 3.0], (6, 20))
    made, _, alt = rectangles(group, a_map(values, 3))
    seen: dict[tuple[int, int], str] = {}
    for row in made:
        for step in range(round(row["x"] + 0.5), round(row["x2"] + 0.5)):
            for rank in range(round(row["y"] + 0.5), round(row["y2"] + 0.5)):
                assert (rank, step) not in seen
                seen[rank, step] = row["bin"]
    expected = {
        (rank, 7 + step): bin_of(values[rank, step // 3])
        for rank in range(6)
        for step in range(60)
        if not 0.97 <= values[rank, step // 3] < 1.03
    }
    assert seen == expected
    assert "drawn as one" not in alt

"""The report's projection is that of `dlbench project`."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlbench.analysis import scaling
from dlbench.analysis.table import tabulate
from dlbench.projection.gathering import gathered
from dlbench.projection.step import project
from dlbench.records.scan import scan
from dlbench.report.formats.data import to_csv
from dlbench.report.formats.markdown import to_markdown
from dlbench.views import model
from dlbench.views.forecast import Forecast, ForecastView
from dlbench.views.scaling_report import assemble, document_of
from tests.support.run_factory import constant, plans, write_run

ON_NODES: dict[str, Any] = {
    "system": "box",
    "points_are": "nodes",
    "ranks_per_node": 1,
    "launcher": "mpirun",
    "overrides": {"train.batch_per_rank": 64},
}


def weakly(k: int) -> float:
    """Loses a tenth."""
    return 100 + 10 * (1 - 1 / k)


def write_law(
    out: Path, points: tuple[int, ...] = (1, 2, 4, 8), step_ms: Callable[[int], float] = weakly, **request: Any
) -> None:
    """Runs whose steps take these milliseconds, on as many nodes as ranks unless asked otherwise."""
    noise = request.pop("noise", 0.001)
    scatter = random.Random(5)
    for plan in plans(**{**ON_NODES, "points": points, "repeats": 5, **request}):
        step = step_ms(plan.layout.ranks) * (1 + noise * plan.series.repeat + scatter.gauss(0, noise))
        write_run(out, plan, constant([0, 0, 0, step, 0, 0]))


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weak scaling that loses a tenth, 1 to 8 nodes of a rank, five repeats."""
    out = tmp_path_factory.mktemp("weak")
    write_law(out)
    return out


def forecast_of(out: Path) -> tuple[model.ReportGroup, Forecast]:
    (group,) = assemble(scan(out)).groups
    found = group.of(Forecast)
    assert found is not None
    return group, found


def markdown_of(out: Path) -> str:
    return to_markdown(document_of(assemble(scan(out))))


@pytest.mark.parametrize("kind", ["weak", "strong"])
def test_two_and_four_times_the_ranks_are_projected(tmp_path: Path, kind: str) -> None:
    def step(k: int) -> float:
        return weakly(k) if kind == "weak" else 1000 / k + 5 * (1 - 1 / k)

    write_law(tmp_path, step_ms=step, scaling=kind)
    group, found = forecast_of(tmp_path)
    assert [one.ranks for one in found.projection.targets] == [16, 32]
    for one in found.projection.targets:
        truth = step(1) / step(one.ranks) / (1 if kind == "weak" else one.ranks)
        assert one.efficiency is not None
        assert one.throughput is not None
        low, high = one.efficiency.middle(80)
        assert low <= truth <= high <= 1
        rate = one.efficiency.median * one.ranks * group.baseline.throughput.value
        assert one.throughput.median == pytest.approx(rate, rel=0.01)


def test_the_report_says_what_the_command_says(weak: Path) -> None:
    table = tabulate(scan(weak), with_causes=True)
    (group,) = scaling.groups(table)
    (one, other) = project(gathered(group, table, source=str(weak)), [16, 32]).targets
    _, found = forecast_of(weak)
    assert found.projection.targets == (one, other)


def test_digits_of_a_projection_follow_its_interval(tmp_path: Path) -> None:
    """Runs that scatter by a twentieth tell no tenths of a percent."""
    write_law(tmp_path, noise=0.05)
    text = markdown_of(tmp_path).replace("\\", "")
    assert re.search(r"\| 16 \| 16 \| \d\d % \| \[\d\d, \d+\] \|", text)


INSIDE = {"points_are": "ranks", "ranks_per_node": 8, "overrides": {"system.node.ranks": 8}}


@pytest.mark.parametrize(
    ("points", "more", "told"),
    [
        ((1, 2), {}, "needs 3 rank counts (you have 2): run the same workload with --ranks 1,2,4."),
        ((1, 2, 4, 8), INSIDE, "Refused, R2 (16 and 32 ranks): all measured points are on one node"),
    ],
)
def test_nothing_is_projected_from_what_tells_nothing(
    tmp_path: Path, points: tuple[int, ...], more: dict[str, Any], told: str
) -> None:
    write_law(tmp_path, points, **more)
    group, found = forecast_of(tmp_path)
    assert found.projection.targets == ()
    assert ForecastView().section(group) is None
    assert told in ForecastView().remedy(group)
    assert "Projected, not measured" not in markdown_of(tmp_path)


def test_projections_share_no_column_and_no_headline_with_measurements(weak: Path) -> None:
    report = assemble(scan(weak))
    document = document_of(report)
    points = to_csv(document, "points").splitlines()
    assert len(points) == 5
    assert "projected" not in points[0]
    header = to_csv(document, "forecast").splitlines()[0].split(",")
    assert {"projected_efficiency", "projected_throughput_per_s"} <= set(header)
    assert all(name.startswith("projected_") for name in header if name not in ("group", "label"))
    (group,) = report.groups
    assert "project" not in group.verdict
    assert "#### Projected, not measured" in to_markdown(document)

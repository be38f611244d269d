"""Scaling laws give back what made the points, refuse what they cannot know; anchors stand beside equal work only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.reading import scaling
from dlbench.reading.table import RunTable, tabulate
from dlbench.records.scan import Run, scan
from dlbench.report.formats.csv import to_csv
from dlbench.report.formats.markdown import to_markdown
from dlbench.views import model
from dlbench.views.assemble import assemble
from dlbench.views.document import document_of
from dlbench.views.forecast import anchors, laws
from dlbench.views.forecast.charts import CURVE, forecast_charts
from dlbench.views.forecast.laws import efficiency_at, fraction_of
from dlbench.views.forecast.numbers import Forecast
from dlbench.views.forecast.view import ForecastView
from tests.support.run_factory import Story, constant, plans, write_run

NAMES: tuple[laws.LawName, ...] = ("Amdahl", "Gustafson")


def write_law(
    out: Path,
    fraction: float,
    points: tuple[int, ...] = (1, 2, 4, 8),
    *,
    bend: float = 0.0,
    noise: float = 0.001,
    **more: Any,
) -> None:
    """Runs whose step follows the law of their scaling; `bend` adds so many ms for each rank beyond the first."""
    story = more.pop("story", Story())
    for plan in plans(points=points, **{"repeats": 5, **more}):
        k = plan.layout.ranks / points[0]
        strong = plan.series.scaling == "strong"
        ideal = 100 / k if strong else 100.0
        step = ideal / efficiency_at("Amdahl" if strong else "Gustafson", fraction, k)
        step = (step + bend * (k - 1)) * (1 + noise * plan.series.repeat)
        write_run(out, plan, constant([0, 0, 0, step, 0, 0]), story)


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weak scaling that loses a tenth, 1 to 8 ranks, five repeats."""
    out = tmp_path_factory.mktemp("weak")
    write_law(out, 0.1)
    return out


def only_group(out: Path) -> tuple[scaling.Group, RunTable]:
    table = tabulate(scan(out))
    (group,) = scaling.groups(table)
    return group, table


def law_of(out: Path) -> laws.Law:
    group, table = only_group(out)
    found = laws.law_of(group, table)
    assert found is not None
    return found


def forecast_of(out: Path) -> tuple[model.Group, Any]:
    (group,) = assemble(scan(out)).groups
    found = group.of(Forecast)
    assert found is not None
    return group, found


def markdown_of(out: Path) -> str:
    return to_markdown(document_of(assemble(scan(out))))


# The fit


@given(
    st.sampled_from(NAMES),
    st.floats(0, 1),
    st.lists(st.integers(2, 1000), min_size=1, max_size=6, unique=True),
)
def test_a_fit_gives_back_the_fraction(name: laws.LawName, fraction: float, counts: list[int]) -> None:
    ratios = np.array(counts, dtype=float)
    speedups = np.array([efficiency_at(name, fraction, ratio) * ratio for ratio in ratios])
    if (speedups <= 0).any():
        return
    assert float(fraction_of(name, ratios, speedups)) == pytest.approx(fraction, abs=1e-9)


@given(
    st.sampled_from(NAMES),
    st.lists(
        st.tuples(st.integers(2, 64), st.floats(0.2, 1.1)), min_size=2, max_size=5, unique_by=lambda pair: pair[0]
    ),
)
def test_no_other_fraction_fits_better(name: laws.LawName, points: list[tuple[int, float]]) -> None:
    """Against a search by brute force over fractions."""
    ratios = np.array([ranks for ranks, _ in points], dtype=float)
    speedups = np.array([efficiency * ranks for ranks, efficiency in points])
    left = 1 / speedups - 1 / ratios if name == "Amdahl" else 1 - speedups / ratios

    def error(fraction: float) -> float:
        return float(((left - fraction * (1 - 1 / ratios)) ** 2).sum())

    best = float(fraction_of(name, ratios, speedups))
    grid = np.linspace(best - 0.5, best + 0.5, 201)
    assert error(best) <= min(map(error, grid)) + 1e-12


def test_one_point_gives_karp_and_flatt(tmp_path: Path) -> None:
    write_law(tmp_path, 0.07, scaling="strong", overrides={"train.batch_per_rank": 8})
    group, _ = only_group(tmp_path)
    for point in group.points[1:]:
        found = fraction_of("Amdahl", np.array([point.ideal_speedup]), np.array([point.speedup.value]))
        assert point.serial_fraction is not None
        assert float(found) == pytest.approx(point.serial_fraction.value)


@pytest.mark.parametrize("scaling_kind", ["weak", "strong"])
def test_runs_that_follow_a_law_give_it_back(tmp_path: Path, scaling_kind: str) -> None:
    write_law(tmp_path, 0.1, scaling=scaling_kind, overrides={"train.batch_per_rank": 8})
    law = law_of(tmp_path)
    assert law.name == ("Amdahl" if scaling_kind == "strong" else "Gustafson")
    assert law.fraction.value == pytest.approx(0.1, abs=1e-3)
    assert law.fraction.kind == "bootstrap"
    assert law.fraction.low is not None
    assert law.fraction.high is not None
    assert law.fraction.low <= law.fraction.value <= law.fraction.high
    assert law.worst_residual < 1e-3
    assert law.hindcast_ranks == 8
    assert law.hindcast_error is not None
    assert abs(law.hindcast_error) < 1e-3


def test_intervals_say_what_they_are(tmp_path: Path) -> None:
    """The range for two to four repeats, none for one; the wider, the noisier the runs."""
    kinds = {}
    for repeats in (1, 3, 5):
        write_law(tmp_path / str(repeats), 0.1, repeats=repeats, noise=0.01)
        kinds[repeats] = law_of(tmp_path / str(repeats)).fraction
    assert [kinds[n].kind for n in (1, 3, 5)] == ["single run", "range", "bootstrap"]
    assert kinds[1].low is None
    for noisy in (kinds[3], kinds[5]):
        assert noisy.low is not None
        assert noisy.high is not None
        assert noisy.low <= noisy.value <= noisy.high


def write_speedups(out: Path, speedups: dict[int, float], scaling_kind: str) -> None:
    """Single runs at one rank and at these rank counts."""
    overrides = {"train.batch_per_rank": 16}
    for plan in plans(points=(1, *speedups), repeats=1, scaling=scaling_kind, overrides=overrides):
        ranks = plan.layout.ranks
        step = 1600 / {1: 1.0, **speedups}[ranks] * (ranks if scaling_kind == "weak" else 1)
        write_run(out, plan, constant([0, 0, 0, step, 0, 0]))


@pytest.mark.parametrize("scaling_kind", ["weak", "strong"])
@pytest.mark.parametrize("speedups", [{2: 4.0, 16: 16.0}, {2: 4.0, 4: 4.0, 16: 16.0}])
def test_more_than_the_ideal_fits_no_law(tmp_path: Path, speedups: dict[int, float], scaling_kind: str) -> None:
    """Beyond a fraction of 0 Amdahl's law has a pole, and efficiencies below 0: points are held against the ideal."""
    write_speedups(tmp_path, speedups, scaling_kind)
    law = law_of(tmp_path)
    assert law.fraction.value < 0
    assert [point.fitted for point in law.points] == [1.0] * len(speedups)
    assert law.worst_residual == pytest.approx(1.0)
    last = law.points[-1].measured.value
    assert law.hindcast_error is None or last - law.hindcast_error == 1.0
    assert (law.hindcast_error is None) == (len(speedups) == 2)
    text = markdown_of(tmp_path)
    words = text.partition("### Laws")[2]
    assert " does not fit: least squares gives f = -" in words
    assert "misses a measured point by 100.0 points of efficiency." in words
    assert " fits with f" not in words


def test_points_that_bend_away_do_not_fit(tmp_path: Path) -> None:
    write_law(tmp_path, 0.1, bend=8.0, repeats=1)
    text = markdown_of(tmp_path)
    assert " does not fit: least squares gives f = " in text
    assert " fits with f" not in text


def test_the_drawn_law_does_not_exceed_the_ideal(tmp_path: Path) -> None:
    # f = -0.25: the pole is at 5 times the ranks.
    write_speedups(tmp_path, {2: 4.0, 4: 16.0, 8: 16.0}, "strong")
    group, found = forecast_of(tmp_path)
    assert found.law.fraction.value < 0
    (chart,) = forecast_charts(group, found)
    (curve,) = [rows for rows in chart.spec["datasets"].values() if len(rows) == CURVE]
    assert {row["value"] for row in curve} == {1.0}


# Forecasts


def test_forecast_is_the_law_at_more_ranks(weak: Path) -> None:
    group, found = forecast_of(weak)
    assert [one.ranks for one in found.forecasts] == [16, 32]
    for one in found.forecasts:
        ratio = one.ranks
        assert one.efficiency == pytest.approx(1 - 0.1 * (1 - 1 / ratio), abs=1e-3)
        assert one.low <= one.efficiency <= one.high
        assert one.throughput == pytest.approx(one.efficiency * ratio * group.baseline.throughput.value)


def test_forecast_holds_what_came_true(tmp_path: Path) -> None:
    """Points bent away from the law: the interval of the forecast holds what the bent machine would really do."""
    write_law(tmp_path, 0.05, points=(1, 2, 4, 8), bend=0.3)
    _, found = forecast_of(tmp_path)
    assert found.law.worst_residual > 0.001
    coming = found.forecasts[0]
    truth = 100 / (100 / (1 - 0.05 * (1 - 1 / 16)) + 0.3 * 15)
    assert coming.low <= truth <= coming.high
    assert coming.high - coming.low >= 2 * found.law.worst_residual


@pytest.mark.parametrize(
    ("points", "more", "told"),
    [
        ((1, 2), {}, "No law is fitted: 2 rank counts"),
        ((1, 2, 4, 8), {"bend": 8.0}, "misses a measured point by"),
        ((1, 2, 4), {"fraction": -0.1}, "exceed the ideal"),
        ((1, 2, 4), {"story": Story(threads=2)}, "ranks shared cores"),
    ],
)
def test_nothing_is_forecast_from_what_tells_nothing(
    tmp_path: Path, points: tuple[int, ...], more: dict[str, Any], told: str
) -> None:
    fraction = more.pop("fraction", 0.1)
    write_law(tmp_path, fraction, points, **more)
    _, found = forecast_of(tmp_path)
    assert found.forecasts == ()
    assert told in f"{found.why_no_law} {found.why_no_forecast}"
    assert "Forecast, not measured" not in markdown_of(tmp_path)


def test_forecasts_share_no_column_and_no_headline_with_measurements(weak: Path) -> None:
    report = assemble(scan(weak))
    document = document_of(report)
    points = to_csv(document, "points").splitlines()
    assert len(points) == 5
    assert "forecast" not in points[0]
    header = to_csv(document, "forecast").splitlines()[0].split(",")
    assert all(name.startswith("forecast_") for name in header if "efficiency" in name or "throughput" in name)
    (group,) = report.groups
    assert "forecast" not in group.verdict
    text = to_markdown(document)
    table = text.partition("#### Forecast, not measured")[2].partition("####")[0]
    assert "16 ranks" in table
    assert "16 ranks" not in text.partition("#### Forecast, not measured")[0].partition("### Laws")[0]


def test_a_growing_serial_fraction_is_said(tmp_path: Path) -> None:
    write_law(tmp_path, 0.02, scaling="strong", overrides={"train.batch_per_rank": 8}, bend=0.1)
    _, found = forecast_of(tmp_path)
    assert found.forecasts
    assert any("promises too much" in note for note in found.notes)
    assert any("one node" in note for note in found.notes)


# Published figures


def resnet(out: Path, **overrides: Any) -> Run:
    """A run of the published ResNet-50 as far as its plan goes; its times are made up."""
    asked: dict[str, Any] = {"train.precision": "fp16", "data.source": "/data/imagenet", **overrides}
    preset = asked.pop("preset", "full")
    blocks = asked.pop("blocks", None)
    (plan,) = plans(workload="resnet50", preset=preset, points=(1,), repeats=1, overrides=asked)
    if blocks:
        network = plan.workload.model.model_copy(update={"stage_blocks": blocks})
        plan = plan.model_copy(update={"workload": plan.workload.model_copy(update={"model": network})})
    write_run(out, plan, constant([0, 0, 0, 100, 0, 0]))
    (run,) = scan(out).runs
    return run


def same(run: Run) -> list[str]:
    return [one.anchor.id for one in anchors.beside(run) if not one.differences]


def test_equal_work_has_its_anchor(tmp_path: Path) -> None:
    assert same(resnet(tmp_path / "64")) == ["jia-2018-batch-64"]
    assert same(resnet(tmp_path / "32", **{"train.batch_per_rank": 32})) == ["jia-2018-batch-32"]
    horovod = {"blocks": (3, 4, 23, 3), "train.precision": "fp32", "data.source": "synthetic"}
    assert same(resnet(tmp_path / "101", **horovod)) == ["horovod-resnet101"]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"preset": "ci"}, "preset"),
        ({"train.precision": "fp32"}, "precision"),
        ({"train.batch_per_rank": 16}, "batch per rank"),
        ({"data.source": "synthetic"}, "data"),
        ({"model.image_size": 160}, "model.image_size"),
        ({"train.gradient_accumulation": 2}, "parts per batch"),
    ],
)
def test_other_work_has_none_and_is_told_why(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    run = resnet(tmp_path, **changes)
    assert same(run) == []
    nearest = next(one for one in anchors.beside(run) if one.anchor.id == "jia-2018-batch-64")
    assert [difference.what for difference in nearest.differences if difference.what == what] == [what]


def test_every_published_figure_names_its_source() -> None:
    found = anchors.published()
    assert len({one.id for one in found}) == len(found) >= 3
    for one in found:
        assert one.source
        assert one.work.scaling == "weak"
        assert one.work.preset == "full"


def test_small_presets_say_why_there_is_no_reference_line(weak: Path) -> None:
    group, found = forecast_of(weak)
    assert found.same_work == ()
    assert "none is of the same work" in found.why_no_anchor
    assert "preset" in found.why_no_anchor
    other = replace(found, anchors=(replace(found.anchors[0], differences=()),), why_no_anchor="")
    (chart,) = forecast_charts(group, other)
    (plain,) = forecast_charts(group, found)
    assert "published" in str(chart.spec)
    assert "published" not in str(plain.spec)
    section = ForecastView().section(replace(group, views={"forecast": other}))
    assert section is not None
    assert [sheet.name for sheet in section.sheets][-1] == "anchors"

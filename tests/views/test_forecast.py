"""Scaling laws give back what made the points, refuse what they cannot know; anchors stand beside equal work only."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize

from dlbench.analysis import scaling
from dlbench.analysis.table import RunTable, tabulate
from dlbench.records.scan import Run, scan
from dlbench.report.formats.csv import to_csv
from dlbench.report.formats.markdown import to_markdown
from dlbench.views import model
from dlbench.views import scaling_laws as laws
from dlbench.views.forecast import CURVE, Forecast, ForecastView, forecast_charts, published, references
from dlbench.views.scaling_report import assemble, document_of
from tests.bench.truth import predictions
from tests.support.run_factory import Story, constant, plans, write_run

SCALINGS: tuple[laws.Scaling, ...] = ("weak", "strong")
ON_NODES: dict[str, Any] = {
    "system": "box",
    "points_are": "nodes",
    "ranks_per_node": 1,
    "launcher": "mpirun",
    "overrides": {"train.batch_per_rank": 64},
}


def step_of(scaling_kind: str, k: float, *, a: float = 0.0, b: float = 0.0, c: float = 0.0) -> float:
    """A step's time over that at the baseline, by the formula."""
    return (1 if scaling_kind == "weak" else 1 / k) + a * (1 - 1 / k) + b * math.log2(k) + c * (k - 1)


def write_law(
    out: Path,
    points: tuple[int, ...] = (1, 2, 4, 8),
    *,
    noise: float = 0.001,
    nodes: bool = True,
    coefficients: dict[str, float] | None = None,
    beyond: float = 0.0,
    **more: Any,
) -> None:
    """Runs whose step follows a law, on as many nodes as ranks or on one; `beyond` is added to the time there."""
    story = more.pop("story", Story())
    scatter = random.Random(5)
    asked = {**(ON_NODES if nodes else {}), "points": points, "repeats": 5, **more}
    for plan in plans(**asked):
        k = plan.layout.ranks / points[0]
        step = 100 * step_of(plan.series.scaling, k, **(coefficients or {"a": 0.1})) + beyond * (plan.layout.nodes > 1)
        step *= 1 + noise * plan.series.repeat + scatter.gauss(0, noise)
        write_run(out, plan, constant([0, 0, 0, step, 0, 0]), story)


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weak scaling that loses a tenth, 1 to 8 nodes of a rank, five repeats."""
    out = tmp_path_factory.mktemp("weak")
    write_law(out)
    return out


def only_group(out: Path) -> tuple[scaling.Group, RunTable]:
    table = tabulate(scan(out))
    (group,) = scaling.groups(table)
    return group, table


def law_of(out: Path) -> laws.Law:
    group, table = only_group(out)
    return laws.law_of(group, table).law


def forecast_of(out: Path) -> tuple[model.Group, Any]:
    (group,) = assemble(scan(out)).groups
    found = group.of(Forecast)
    assert found is not None
    return group, found


def markdown_of(out: Path) -> str:
    return to_markdown(document_of(assemble(scan(out))))


# The fit


@given(
    st.sampled_from(SCALINGS),
    st.sampled_from(laws.FAMILY),
    st.lists(st.floats(0, 0.5), min_size=2, max_size=2),
    st.lists(st.integers(2, 1000), min_size=2, max_size=6, unique=True),
)
def test_a_fit_gives_back_the_law(
    scaling_kind: laws.Scaling, terms: tuple[laws.Term, ...], planted: list[float], counts: list[int]
) -> None:
    ratios = np.array(sorted(counts), dtype=float)
    times = laws.time_at(scaling_kind, terms, np.array(planted[: len(terms)]), ratios)
    found = laws.fit_terms(scaling_kind, terms, ratios, times)
    assert laws.time_at(scaling_kind, terms, found, ratios) == pytest.approx(times, rel=1e-6)


@given(
    st.sampled_from(SCALINGS),
    st.sampled_from(laws.FAMILY),
    st.lists(
        st.tuples(st.integers(2, 64), st.floats(0.2, 1.2)), min_size=3, max_size=5, unique_by=lambda pair: pair[0]
    ),
)
def test_no_other_coefficients_fit_better(
    scaling_kind: laws.Scaling, terms: tuple[laws.Term, ...], points: list[tuple[int, float]]
) -> None:
    """Against scipy's non-negative least squares."""
    ratios = np.array([float(ranks) for ranks, _ in sorted(points)])
    times = laws.ideal_time(scaling_kind, ratios) / np.array([efficiency for _, efficiency in sorted(points)])
    rows = np.stack(
        [
            laws.time_at(scaling_kind, (term,), np.ones(1), ratios) - laws.ideal_time(scaling_kind, ratios)
            for term in terms
        ]
    )
    target = (times - laws.ideal_time(scaling_kind, ratios)) / times
    _, best = optimize.nnls((rows / times).T, target)
    found = laws.fit_terms(scaling_kind, terms, ratios, times)
    error = float(np.linalg.norm(target - found @ (rows / times)))
    assert (found >= 0).all()
    assert error <= best * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("scaling_kind", SCALINGS)
@pytest.mark.parametrize("coefficients", [{"a": 0.1}, {"c": 0.005}, {"a": 0.05, "c": 0.01}])
def test_runs_that_follow_a_law_give_it_back(tmp_path: Path, scaling_kind: str, coefficients: dict[str, float]) -> None:
    write_law(tmp_path, scaling=scaling_kind, coefficients=coefficients, noise=1e-5)
    law = law_of(tmp_path)
    found = {laws.TEXTS[name][0]: one.value for name, one in zip(law.terms, law.coefficients, strict=True)}
    for letter, value in coefficients.items():
        assert found[letter] == pytest.approx(value, rel=0.02)
    assert law.name.startswith("Amdahl") == (scaling_kind == "strong" and "a" in coefficients)
    assert law.worst_residual < 1e-3
    assert law.hindcast_ranks == 8
    assert abs(law.hindcast_error) < 1e-3


def test_few_runs_have_no_interval_and_no_forecast(tmp_path: Path) -> None:
    for repeats in (1, 3):
        write_law(tmp_path / str(repeats), repeats=repeats, noise=0.01)
    single, some = (forecast_of(tmp_path / str(repeats))[1] for repeats in (1, 3))
    assert single.law.coefficients[0].low is None
    assert "do not say how it scatters" in single.why_no_forecast
    assert some.law.coefficients[0].low <= some.law.coefficients[0].value <= some.law.coefficients[0].high
    assert some.forecasts


def write_speedups(out: Path, speedups: dict[int, float], scaling_kind: str) -> None:
    """Runs on one node and on as many nodes as ranks."""
    for plan in plans(**ON_NODES, points=(1, *speedups), repeats=3, scaling=scaling_kind):
        ranks = plan.layout.ranks
        step = 1600 / {1: 1.0, **speedups}[ranks] * (ranks if scaling_kind == "weak" else 1)
        step *= 1 + 0.001 * plan.series.repeat
        write_run(out, plan, constant([0, 0, 0, step, 0, 0]))


@pytest.mark.parametrize("scaling_kind", SCALINGS)
def test_more_than_the_ideal_is_forecast_by_no_law(tmp_path: Path, scaling_kind: str) -> None:
    write_speedups(tmp_path, {2: 2.4, 4: 5.0, 8: 11.0}, scaling_kind)
    group, found = forecast_of(tmp_path)
    assert found.forecasts == ()
    assert "exceed the ideal" in found.why_no_forecast
    (chart,) = forecast_charts(group, found)
    (curve,) = [rows for rows in chart.spec["datasets"].values() if len(rows) == CURVE]
    assert {row["value"] for row in curve} == {1.0}


# Forecasts


def test_forecast_is_the_law_at_more_ranks(weak: Path) -> None:
    group, found = forecast_of(weak)
    (one,) = found.forecasts
    assert one.ranks == 16
    assert one.efficiency == pytest.approx(1 / step_of("weak", one.ranks, a=0.1), abs=0.01)
    assert one.low <= one.efficiency <= one.high <= 1
    base = group.baseline.throughput
    assert one.throughput == pytest.approx(one.efficiency * one.ranks * base.value)


def test_digits_of_a_law_and_of_a_forecast_follow_their_intervals(tmp_path: Path) -> None:
    """Runs that scatter by a tenth tell no tenths of a percent."""
    write_law(tmp_path, noise=0.1)
    text = markdown_of(tmp_path).replace("\\", "")
    assert re.search(r"with a = 0\.\d\d \[0\.\d\d, 0\.\d\d\] \(k:", text)
    assert re.search(r"16 ranks \| \d\d % \[\d\d, \d+\] \|", text)


@pytest.mark.parametrize(("scaling_kind", "cost"), [("weak", 0.00495), ("strong", 0.0008083)])
def test_forecast_holds_what_came_true(tmp_path: Path, scaling_kind: str, cost: float) -> None:
    """25 buckets, each with 2 (p - 1) start-ups of 10 us: what grows with the ranks is in the interval at 16."""
    write_law(tmp_path, scaling=scaling_kind, coefficients={"c": cost}, noise=0.01)
    _, found = forecast_of(tmp_path)
    (coming,) = found.forecasts
    assert coming.ranks == 16
    truth = (1 if scaling_kind == "weak" else 1 / 16) / step_of(scaling_kind, 16, c=cost)
    assert coming.low <= truth <= coming.high


def test_a_forecast_is_withheld_where_the_hindcast_misses(tmp_path: Path) -> None:
    """Two and four nodes lose alike, eight lose more: a law fits all three, but not one that the two foretell."""
    noise = {1: (0, 2, -1, 1, -2), 2: (1, -2, 0, 2, -1), 4: (-1, 0, 2, -2, 1), 8: (2, 1, -2, -1, 0)}
    for plan in plans(**ON_NODES, points=(1, 2, 4, 8), repeats=5):
        nodes = plan.layout.nodes
        step = {1: 100.0, 2: 102.0, 4: 102.0, 8: 103.0}[nodes] * (1 + 0.0015 * noise[nodes][plan.series.repeat])
        write_run(tmp_path, plan, constant([0, 0, 0, step, 0, 0]))
    _, found = forecast_of(tmp_path)
    assert not found.law.is_ruled_out
    assert found.forecasts == ()
    told = "No forecast: withheld, because no law foretells 8 ranks from the others: the nearest misses them by "
    assert re.match(re.escape(told) + r"\d\.\d points of efficiency \[", found.why_no_forecast)
    text = markdown_of(tmp_path)
    assert found.why_no_forecast.partition(" [")[0] in text
    assert "Forecast, not measured" not in text


def test_no_law_crosses_the_edge_of_a_node(tmp_path: Path) -> None:
    """Four rank counts inside one node: refused, with what to measure instead where there are further nodes."""
    write_law(tmp_path / "alone", nodes=False)
    cluster = {"system": "box", "launcher": "mpirun", "ranks_per_node": 8, "overrides": {"system.node.ranks": 8}}
    write_law(tmp_path / "inside", nodes=False, **cluster)
    for name in ("alone", "inside"):
        _, found = forecast_of(tmp_path / name)
        assert found.law is not None
        assert found.forecasts == ()
        assert "all points are on one node" in found.why_no_forecast
        assert ("--nodes 1,2,4" in found.why_no_forecast) == (name == "inside")
    text = markdown_of(tmp_path / "inside")
    assert "Forecast, not measured" not in text
    assert "measure 2 rank counts or more on several nodes" in text


def test_a_law_beyond_the_node_is_fitted_beyond_the_node(tmp_path: Path) -> None:
    """Points of several ranks inside a node, none of them slow, do not talk a law of the network down."""
    many = {**ON_NODES, "ranks_per_node": 2}
    write_law(tmp_path, (1, 2, 4, 8), beyond=30.0, noise=0.005, **many)
    _, found = forecast_of(tmp_path)
    assert {point.nodes for point in found.law.points} == {2, 4, 8}
    coming = found.forecasts[0]
    truth = 100 * step_of("weak", 2, a=0.1) / (100 * step_of("weak", 32, a=0.1) + 30)
    assert coming.low <= truth <= coming.high


def test_a_node_that_holds_more_ranks_is_inside(tmp_path: Path) -> None:
    one_node = {"points_are": "ranks", "ranks_per_node": None, "launcher": "local", "system": "local"}
    write_law(tmp_path, nodes=False, points=(1, 2, 4), overrides={"system.node.ranks": 8}, **one_node)
    _, found = forecast_of(tmp_path)
    assert [one.ranks for one in found.forecasts] == [8]


@pytest.mark.parametrize(
    ("points", "more", "told"),
    [
        ((1, 2), {}, "needs 3 rank counts (you have 2)"),
        ((1, 2, 4, 8), {"coefficients": {"a": 0.1}, "beyond": -60.0}, "exceed the ideal"),
        ((1, 2, 4), {"story": Story(threads=2)}, "ranks shared cores"),
    ],
)
def test_nothing_is_forecast_from_what_tells_nothing(
    tmp_path: Path, points: tuple[int, ...], more: dict[str, Any], told: str
) -> None:
    write_law(tmp_path, points, **more)
    _, found = forecast_of(tmp_path)
    assert found.forecasts == ()
    assert told in f"{found.why_no_law} {found.why_no_forecast}"
    assert "Forecast, not measured" not in markdown_of(tmp_path)


def test_points_of_no_law_are_forecast_by_none(tmp_path: Path) -> None:
    for plan in plans(**ON_NODES, points=(1, 2, 4, 8), repeats=5):
        step = {1: 100.0, 2: 150.0, 4: 110.0, 8: 150.0}[plan.layout.ranks] * (1 + 0.001 * plan.series.repeat)
        write_run(tmp_path, plan, constant([0, 0, 0, step, 0, 0]))
    _, found = forecast_of(tmp_path)
    assert found.forecasts == ()
    assert "no law of the family fits" in found.why_no_forecast
    assert "No law fits; the nearest, " in markdown_of(tmp_path)


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


def test_laws_that_the_points_do_not_tell_apart_are_named(tmp_path: Path) -> None:
    write_law(tmp_path, coefficients={"b": 0.01}, noise=0.02)
    _, found = forecast_of(tmp_path)
    assert len(found.law.alternatives) >= 2
    assert any("Not ruled out" in note for note in found.notes)


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
    return [one.id for one, differences in references(run) if not differences]


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
    (differences,) = (other for one, other in references(run) if one.id == "jia-2018-batch-64")
    assert what in differences


def test_every_published_figure_names_its_source() -> None:
    found = published()
    assert len({one.id for one in found}) == len(found) >= 3
    for one in found:
        assert one.source
        assert one.work.scaling == "weak"
        assert one.work.preset == "full"


def test_small_presets_say_why_there_is_no_reference_line(weak: Path) -> None:
    group, found = forecast_of(weak)
    assert found.same_work == ()
    assert "No published reference is of the same work" in found.why_no_anchor
    assert "preset" in found.why_no_anchor
    other = replace(found, anchors=(replace(found.anchors[0], differences=()),), why_no_anchor="")
    (chart,) = forecast_charts(group, other)
    (plain,) = forecast_charts(group, found)
    assert "published" in str(chart.spec)
    assert "published" not in str(plain.spec)
    section = ForecastView().section(replace(group, views={"forecast": other}))
    assert [sheet.name for sheet in section.sheets][-1] == "anchors"


def test_gains_do_not_depend_on_the_scale_of_the_network() -> None:
    assert predictions.gains().met

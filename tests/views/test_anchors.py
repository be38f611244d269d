"""Published figures stand next to equal work only, at their rank counts; other work is told what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlbench.errors import UserError
from dlbench.records.scan import Run, scan
from dlbench.report.charts.chart import Chart
from dlbench.report.formats.markdown import to_markdown
from dlbench.views.anchors import QUANTITIES, anchors_of, published
from dlbench.views.forecast import Forecast, ForecastView, published_for
from dlbench.views.model import ReportGroup
from dlbench.views.scaling import ScalingView
from dlbench.views.scaling_report import assemble, document_of
from dlbench.views.time_to_train import TimeToTrainView
from tests.support.run_factory import Story, Training, constant, plans, write_run

FULL: dict[str, Any] = {"workload": "resnet50", "preset": "full"}
SITE = """\
format: dlbench.anchors
version: 1
anchors:
  - id: site-rate
    title: Our machine of 2019
    throughput_per_s: 5000
    ranks: 16
    hardware: 16 GPUs
    recipe: as installed
    source: the acceptance report
    address: https://example.org/report
    work:
      batch_per_rank: 64
      precision: [fp16]
      data: real
      model: {family: resnet, image_size: 224}
"""


def write_resnet(out: Path, points: tuple[int, ...] = (1,), **overrides: Any) -> None:
    """Writes runs of the published ResNet-50 as far as their plans go; their times are made up."""
    requested: dict[str, Any] = {"train.precision": "fp16", "data.source": "/data/imagenet", **overrides}
    request = {**FULL, "preset": requested.pop("preset", "full")}
    story = Story()
    if requested.get("measure.until") == "quality":
        story = Story(training=Training(values=(0.1, 0.8), every=2040, train_samples=4080))
    blocks = requested.pop("blocks", None)
    for plan in plans(**request, points=points, repeats=1, overrides=requested):
        if blocks:
            network = plan.workload.model.model_copy(update={"stage_blocks": blocks})
            plan = plan.model_copy(update={"workload": plan.workload.model_copy(update={"model": network})})
        write_run(out, plan, constant([0, 0, 0, 100, 0, 0]), story)


def resnet(out: Path, **overrides: Any) -> Run:
    write_resnet(out, **overrides)
    (run,) = scan(out).runs
    return run


def group_of(out: Path) -> ReportGroup:
    (group,) = assemble(scan(out)).groups
    return group


def same(run: Run) -> list[str]:
    return [anchor.id for anchor in anchors_of(run) if not anchor.differences]


def drawn(chart: Chart) -> list[dict[str, Any]]:
    """Returns the rows of the published marks of a chart."""
    return [
        {**row, "field": layer["encoding"]["x"]["field"]}
        for layer in chart.spec["layer"]
        if isinstance(layer["mark"], dict) and layer["mark"].get("shape") == "diamond"
        for row in chart.spec["datasets"][layer["data"]["name"]]
    ]


def test_equal_work_has_its_anchor(tmp_path: Path) -> None:
    assert same(resnet(tmp_path / "64")) == ["jia-2018-batch-64"]
    assert same(resnet(tmp_path / "32", **{"train.batch_per_rank": 32})) == ["jia-2018-batch-32", "jia-2018-2048"]
    horovod = {"blocks": (3, 4, 23, 3), "train.precision": "fp32", "data.source": "synthetic"}
    assert same(resnet(tmp_path / "101", **horovod)) == ["horovod-resnet101"]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"preset": "ci"}, "model.image_size"),
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
    (anchor,) = (anchor for anchor in anchors_of(run) if anchor.id == "jia-2018-batch-64")
    assert [difference for difference in anchor.differences if difference.startswith(f"{what} ")]


def test_every_published_figure_names_its_source_and_conditions() -> None:
    figures = published()
    assert {name for figure in figures for name in QUANTITIES if getattr(figure, name) is not None} == set(QUANTITIES)
    assert {figure.work.model["family"] for figure in figures} == {"resnet", "bert", "cosmoflow"}
    for figure in figures:
        assert figure.efficiency is None or figure.work.scaling == "weak"
    # Its derivation: 90 epochs in 6.6 minutes, over 218 images/s of one GPU.
    (derived,) = (figure for figure in figures if figure.id == "jia-2018-2048")
    assert derived.efficiency == pytest.approx(90 * 1_281_167 / (6.6 * 60) / 2048 / 218, abs=0.003)


def test_efficiency_and_rate_are_drawn_at_their_ranks(tmp_path: Path) -> None:
    write_resnet(tmp_path / "64", (1, 2))
    write_resnet(tmp_path / "51", (1, 2), **{"train.batch_per_rank": 51})
    section = ScalingView().section(group_of(tmp_path / "64"))
    efficiency, throughput, speedup = section.charts()
    (row,) = drawn(efficiency)
    assert (row["field"], row["ranks"], row["value"]) == ("ranks", 1024, 0.992)
    assert "Jia" in efficiency.alt
    assert drawn(throughput) == drawn(speedup) == []
    efficiency, throughput, _ = ScalingView().section(group_of(tmp_path / "51")).charts()
    (row,) = drawn(throughput)
    assert (row["ranks"], row["value"]) == (64, 167_664)
    assert drawn(efficiency) == []


def test_a_time_is_drawn_where_runs_train_to_the_same_target(tmp_path: Path) -> None:
    to_target = {"train.batch_per_rank": 51, "measure.until": "quality"}
    write_resnet(tmp_path / "same", (1, 2), **to_target)
    write_resnet(tmp_path / "other", (1, 2), **to_target, **{"quality.target": 0.7})
    group = group_of(tmp_path / "same")
    section = TimeToTrainView().section(group)
    assert section is not None
    (chart,) = section.charts()
    (row,) = drawn(chart)
    assert row["ranks"] == 64
    assert row["shown"].startswith("4 min 30 s")
    group = group_of(tmp_path / "other")
    assert published_for(group, "time_to_target_s") == ()
    forecast = group.of(Forecast)
    assert forecast is not None
    assert ("target 0.759 there, 0.7 here",) in [anchor.differences for anchor in forecast.anchors]
    assert "target 0.759 there, 0.7 here" in to_markdown(document_of(assemble(scan(tmp_path / "other"))))


def test_strong_scaling_must_agree_in_the_global_batch(tmp_path: Path) -> None:
    (plan,) = plans(
        **FULL,
        points=(2,),
        repeats=1,
        scaling="strong",
        overrides={"train.precision": "fp16", "data.source": "/data/imagenet", "train.batch_per_rank": 1632},
    )
    write_run(tmp_path, plan, constant([0, 0, 0, 100, 0, 0]))
    (run,) = scan(tmp_path).runs
    assert plan.global_batch == 3264
    assert same(run) == ["mlperf-2.1-resnet-64-rate"]


def test_small_presets_have_no_sentence_on_the_page(tmp_path: Path) -> None:
    write_resnet(tmp_path, (1, 2), preset="ci", **{"data.source": "synthetic", "train.precision": "fp32"})
    group = group_of(tmp_path)
    forecast = group.of(Forecast)
    assert forecast is not None
    assert forecast.same_work == ()
    assert "model.image_size" in forecast.why_no_anchor
    assert ForecastView().section(group) is None


def test_a_site_adds_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site/reports").mkdir(parents=True)
    (tmp_path / "site/reports/anchors.yaml").write_text(SITE)
    monkeypatch.setenv("DLBENCH_PATH", str(tmp_path / "site"))
    write_resnet(tmp_path / "runs")
    group = group_of(tmp_path / "runs")
    assert [anchor.title for anchor in published_for(group, "throughput_per_s")] == ["Our machine of 2019"]
    # One rank count: a table without a chart.
    section = ForecastView().section(group)
    assert section is not None
    assert [sheet.name for sheet in section.sheets] == ["anchors"]
    assert section.charts() == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("ranks: 16", "ranks: 0", "anchors.0.ranks"),
        ("    hardware: 16 GPUs\n", "", "anchors.0.hardware"),
        ("title:", "titel:", "anchors.0.titel"),
        ("id: site-rate", "id: jia-2018-2048", "anchors.0.id: 'jia-2018-2048' is already used"),
        ("throughput_per_s: 5000", "efficiency: 0.9", "anchors.0: an efficiency needs baseline"),
        ("    throughput_per_s: 5000\n", "", "anchors.0: must have exactly one of"),
        ("family: resnet, ", "", "anchors.0: work.model.family must be"),
        ("https://", "http://", "anchors.0.address"),
    ],
)
def test_a_wrong_file_of_a_site_names_file_and_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, problem: str
) -> None:
    path = tmp_path / "reports/anchors.yaml"
    path.parent.mkdir()
    path.write_text(SITE.replace(old, new))
    monkeypatch.setenv("DLBENCH_PATH", str(tmp_path))
    with pytest.raises(UserError) as error:
        published()
    assert str(error.value).startswith(f"{path}: {problem}")

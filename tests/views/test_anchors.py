"""Published figures stand next to equal work only, at their rank counts; other work is told what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlbench.errors import UserError
from dlbench.records.scan import scan
from dlbench.report.charts import Chart
from dlbench.report.formats.markdown import to_markdown
from dlbench.specs.plan import RunPlan
from dlbench.views.forecast import (
    QUANTITIES,
    ForecastView,
    PublishedFigure,
    anchors_of,
    differences,
    published,
    published_for,
)
from dlbench.views.model import ReportGroup
from dlbench.views.scaling import ScalingView
from dlbench.views.scaling_report import assemble, document_of
from dlbench.views.time_to_train import TimeToTrainView
from tests.support.run_factory import Story, Training, constant, plans, write_run

DOCS = Path(__file__).parents[2] / "docs/reports.md"
SITE = DOCS.read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]


def write_resnet(out: Path, points: tuple[int, ...], **overrides: Any) -> None:
    """Writes runs of the published ResNet-50 as far as their plans go; their times are made up."""
    requested: dict[str, Any] = {"train.precision": "fp16", "data.source": "/data/imagenet", **overrides}
    preset = requested.pop("preset", "full")
    story = Story()
    if requested.get("measure.until") == "quality":
        story = Story(training=Training(values=(0.1, 0.8), every=2040, train_samples=4080))
    for plan in plans(workload="resnet50", preset=preset, points=points, repeats=1, overrides=requested):
        write_run(out, plan, constant([0, 0, 0, 100, 0, 0]), story)


def group_of(out: Path) -> ReportGroup:
    (group,) = assemble(scan(out)).groups
    return group


def drawn(chart: Chart) -> list[dict[str, Any]]:
    """Returns the rows of the published marks of a chart."""
    return [
        {**row, "field": layer["encoding"]["x"]["field"]}
        for layer in chart.spec["layer"]
        if isinstance(layer["mark"], dict) and layer["mark"].get("shape") == "diamond"
        for row in chart.spec["datasets"][layer["data"]["name"]]
    ]


def plan_of(figure: PublishedFigure) -> RunPlan:
    """Returns the plan of a run of a published figure's work."""
    work = figure.work
    settings: dict[str, Any] = {f"model.{key}": value for key, value in work.model.items() if key != "family"}
    settings |= {"train.batch_per_rank": work.batch_per_rank, "train.precision": work.precision[0]}
    if work.data == "real":
        settings["data.source"] = "/data/files"
    if work.target is not None:
        settings |= {"train.optimizer.name": work.optimizer, "quality.target": work.target}
        settings["measure.until"] = "quality"
    if work.model["family"] == "bert":
        settings["checkpoint.initialize_from"] = "/data/phase1.safetensors"
    workload = str(work.model["family"]).replace("resnet", "resnet50")
    (plan,) = plans(workload=workload, preset="full", points=(1,), repeats=1, overrides=settings)
    return plan


def test_every_published_figure_can_be_matched() -> None:
    for figure in published():
        assert differences(plan_of(figure), figure) == [], figure.id


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
def test_other_work_is_told_why(changes: dict[str, Any], what: str) -> None:
    settings = {"train.precision": "fp16", "data.source": "/data/files", **changes}
    (plan,) = plans(
        workload="resnet50", preset=settings.pop("preset", "full"), points=(1,), repeats=1, overrides=settings
    )
    (anchor,) = (anchor for anchor in anchors_of(plan) if anchor.id == "jia-2018-batch-64")
    assert [difference for difference in anchor.differences if difference.startswith(f"{what} ")]


def test_published_figures_are_of_all_kinds_and_networks() -> None:
    figures = published()
    assert {name for figure in figures for name in QUANTITIES if getattr(figure, name) is not None} == set(QUANTITIES)
    assert {figure.work.model["family"] for figure in figures} == {"resnet", "bert", "cosmoflow"}
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
    assert "target 0.759 there, 0.7 here" in to_markdown(document_of(assemble(scan(tmp_path / "other"))))


def test_strong_scaling_must_agree_in_the_global_batch() -> None:
    (figure,) = (figure for figure in published() if figure.id == "mlperf-2.1-resnet-64-rate")
    settings = {"train.precision": "fp16", "data.source": "/data/files", "train.batch_per_rank": 1632}
    (plan,) = plans(workload="resnet50", preset="full", points=(2,), repeats=1, scaling="strong", overrides=settings)
    assert plan.global_batch == 51 * 64
    assert differences(plan, figure) == []


def test_a_site_adds_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site/reports").mkdir(parents=True)
    (tmp_path / "site/reports/anchors.yaml").write_text(SITE)
    monkeypatch.setenv("DLBENCH_PATH", f"{tmp_path / 'site'}:{tmp_path / 'site'}")  # Read once.
    write_resnet(tmp_path / "runs", (1,), **{"train.batch_per_rank": 256})
    group = group_of(tmp_path / "runs")
    assert [anchor.id for anchor in published_for(group, "throughput_per_s")] == ["acceptance-2025"]
    # One rank count: a table without a chart.
    section = ForecastView().section(group)
    assert section is not None
    assert [sheet.name for sheet in section.sheets] == ["anchors"]
    assert section.charts() == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("ranks: 64", "ranks: 0", "anchors.0.ranks"),
        ("    hardware: 64 NVIDIA A100, 4 a node\n", "", "anchors.0.hardware"),
        ("title:", "titel:", "anchors.0.titel"),
        ("id: acceptance-2025", "id: jia-2018-2048", "anchors.0.id: 'jia-2018-2048' is already used"),
        ("throughput_per_s: 150000", "efficiency: 0.9", "anchors.0: an efficiency needs baseline"),
        ("    throughput_per_s: 150000\n", "", "anchors.0: must have exactly one of"),
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

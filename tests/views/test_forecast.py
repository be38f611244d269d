"""Projections are those of `dlbench project`; published figures and rates stand next to equal work only."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlbench.analysis import scaling
from dlbench.analysis.scaling import groups
from dlbench.analysis.table import tabulate
from dlbench.errors import UserError
from dlbench.perfmodels.data_sheets import sheet_of
from dlbench.projection.gathering import gathered
from dlbench.projection.step import project
from dlbench.records.scan import scan
from dlbench.report.charts import Chart
from dlbench.report.formats.data import to_csv
from dlbench.report.formats.markdown import to_markdown
from dlbench.specs.plan import RunPlan
from dlbench.views import model
from dlbench.views.forecast import (
    QUANTITIES,
    Forecast,
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
from dlbench.views.utilisation import PublishedRate, published_rates, rates_beside
from tests.support.run_factory import Story, Training, constant, plans, write_run

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
    return to_markdown(document_of(assemble(scan(out)))).replace("\\", "")


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
    text = markdown_of(tmp_path)
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


A100 = "cuda:0 (NVIDIA A100-SXM4-80GB)"


def made(
    out: Path,
    *,
    device: str = A100,
    workload: str = "resnet50",
    preset: str = "gpu",
    ranks: int = 1,
    milliseconds: float = 100.0,
    **overrides: Any,
) -> tuple[PublishedRate, ...]:
    settings = {"watch.sampler": False, **{key.replace("__", "."): value for key, value in overrides.items()}}
    story = Story(device=device, record={"training_flops_per_sample": 24 * 10**9})
    asked = {"workload": workload, "preset": preset, "points": (ranks,), "overrides": settings}
    for plan in plans(**asked):
        short = plan.measure.model_copy(update={"warmup_steps": 1, "measured_steps": 3})
        write_run(out, plan.model_copy(update={"measure": short}), constant([0, 0, 0, milliseconds, 0, 0]), story)
    (group,) = groups(tabulate(scan(out)))
    return rates_beside(group)


def test_a_run_on_an_a100_stands_beside_the_published_rates_of_an_a100(tmp_path: Path) -> None:
    """256 images in 100 ms are 2,560 a second; NVIDIA's tables say 2,470 (PyTorch) and 3,410.52 (MXNet)."""
    found = made(tmp_path)
    assert [rate.published for rate in found] == [2470, 3410.52]
    assert found[0].ratio.value == pytest.approx(2560 / 2470)
    assert found[0].measured.value == pytest.approx(2560)
    assert "DeepLearningExamples" in found[0].source
    assert found[0].address.startswith("https://github.com/NVIDIA/")
    assert found[0].differences == ("data (real published, synthetic here)", "16-bit format (bf16 here)")
    assert "batch at a time (512 published, 256 here)" in found[1].differences
    assert "compiled or captured here" in made(tmp_path / "compiled", preset="gpu-compiled")[0].differences


@pytest.mark.parametrize(
    ("changes", "published"),
    [
        ({"train__precision": "tf32"}, [938, 1055.78]),
        ({"train__precision": "fp16"}, [2470, 3410.52]),
        ({"ranks": 8}, [16621 / 8, 26673.72 / 8]),
        ({"device": "cuda:0 (Tesla V100-SXM2-16GB)", "train__precision": "fp32"}, [367, 384, 412]),
        ({"device": "cuda:0 (NVIDIA H100 80GB HBM3)", "ranks": 8}, [52409 / 8]),
        ({"workload": "bert", "preset": "phase1"}, [580]),
        ({"workload": "bert", "preset": "gpu"}, [210]),
        ({"workload": "bert", "preset": "gpu-compiled"}, [210]),
        # Another card, precision, network, length or number of cards: nothing.
        ({"device": "cuda:0 (NVIDIA A100-SXM4-80GB MIG 3g.40gb)"}, []),
        ({"device": "cuda:0 (NVIDIA A100 80GB PCIe)"}, []),
        ({"device": "cuda:0 (NVIDIA H200)"}, []),
        ({"device": "cuda:0 (NVIDIA H100 80GB HBM3)"}, []),
        ({"device": "cpu"}, []),
        ({"train__precision": "fp32"}, []),
        ({"model__image_size": 160}, []),
        ({"ranks": 2}, []),
        ({"workload": "bert", "preset": "gpu", "data__sequence_length": 256}, []),
        ({"workload": "bert", "preset": "base", "train__precision": "bf16"}, []),
        ({"workload": "cosmoflow", "preset": "gpu"}, []),
    ],
)
def test_only_the_same_card_precision_and_network(
    tmp_path: Path, changes: dict[str, Any], published: list[float]
) -> None:
    assert sorted(rate.published for rate in made(tmp_path, **changes)) == pytest.approx(published)


def test_the_file_is_sound() -> None:
    found = published_rates()
    sources, networks = {one.id for one in found.sources}, {one.id for one in found.networks}
    assert {rate.source for rate in found.rates} == sources
    assert {rate.network for rate in found.rates} == networks
    for rate in found.rates:
        for device in rate.devices:
            assert sheet_of(device) is not None or "RTX" in device  # a name that drivers really tell
    keys = [(rate.source, rate.network, rate.devices, rate.precision, rate.gpus) for rate in found.rates]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(("in_force", "is_told"), [("unpadded", True), ("masked", False), (None, False)])
def test_padding_that_is_counted_but_not_computed_is_told(
    tmp_path: Path, in_force: str | None, *, is_told: bool
) -> None:
    """By what the run says, whatever its plan asks for."""
    setting = {"key": "model.attention", "requested": "unpadded", "effective": in_force, "evidence": "12 passes"}
    story = Story(device=A100, record={"training_flops_per_sample": 10**12}, settings=[setting] if in_force else [])
    (plan,) = plans(workload="bert", preset="phase1", points=(1,), repeats=1, overrides={"watch.sampler": False})
    short = plan.measure.model_copy(update={"warmup_steps": 1, "measured_steps": 3})
    write_run(tmp_path, plan.model_copy(update={"measure": short}), constant([0, 0, 0, 100, 0, 0]), story)
    text = markdown_of(tmp_path)
    assert "MFU" in text
    told = "padding is counted but not computed (model.attention unpadded), so the arithmetic done is less than stated"
    assert (f"GFLOP per sample; {told}; peak: " in text) == is_told

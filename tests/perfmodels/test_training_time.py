"""Time to train, impossible triples: published numbers and hand-made ones; `dlbench estimate`. Stated peaks are dense,
each with its source, found by the names that drivers really tell, and by no other.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from dlbench.cli import cli
from dlbench.errors import UserError
from dlbench.perfmodels.data_sheets import DataSheet, sheet_of, sheets, why_no_peak
from dlbench.perfmodels.training_time import consistency
from dlbench.specs.choices import WorkloadFile, choose
from dlbench.specs.files import find


def estimated(*arguments: str) -> tuple[int, str]:
    """Exit code and output of `dlbench estimate`; a UserError is raised."""
    # Through the group: a command invoked alone would keep its own help option, without -h, for later tests.
    done = CliRunner().invoke(cli, ["estimate", *arguments], catch_exceptions=False, standalone_mode=False)
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("seconds", "status"), [(9.6, "fits"), (9.4, "impossible"), (10.4, "fits"), (10.6, "unexplained")]
)
def test_the_tolerance_is_a_share_of_the_time(seconds: float, status: str) -> None:
    assert consistency(100.0, 1000, 1, seconds, tolerance=0.05).status == status


@given(
    throughput=st.floats(1e-3, 1e9),
    samples=st.integers(1, 10**9),
    epochs=st.floats(0.01, 1000),
    factor=st.floats(0.01, 100),
)
def test_the_needed_throughput_makes_any_triple_fit(
    throughput: float, samples: int, epochs: float, factor: float
) -> None:
    stated = samples * epochs / throughput * factor
    verdict = consistency(throughput, samples, epochs, stated)
    assert consistency(verdict.needed_throughput, samples, epochs, stated, tolerance=1e-9).status == "fits"
    assert (verdict.status == "impossible") == (verdict.speed_factor > 1.05)


PER_RANK = ("resnet50", "--throughput", "218", "--per-rank", "--ranks", "1024")
LECTURE = (*PER_RANK, "--efficiency", "0.992", "--epochs", "90")


def test_estimate_prints_the_time_to_train_and_ends_with_1_if_a_stated_one_is_impossible() -> None:
    code, output = estimated(*LECTURE)
    assert (code, "verdict" in output) == (0, False)
    assert "221,446 images/s" in output
    assert "8 min 41 s (8.68 min)" in output
    code, output = estimated(*LECTURE, "--time", "6.6min")
    assert code == 1
    assert "needs 291,174 images/s" in output
    assert "impossible: 1.31 times faster" in output


def test_estimate_names_the_usual_cause() -> None:
    code, output = estimated("resnet50", "--throughput", "27500", "--epochs", "90", "--time", "7.8min")
    assert code == 1
    assert "that of a node of 8" in output
    assert "8.74 min" in output
    assert max(map(len, output.splitlines())) <= 80


def test_estimate_takes_samples_where_there_are_no_epochs() -> None:
    assert estimated("bert", "--throughput", "1000", "--samples", "2500000", "--time", "2500s") == (
        0,
        "training       2,500,000 sequences\n"
        "throughput     1,000 sequences/s\n"
        "time to train  41 min 40 s (41.7 min)\n"
        "stated time    41 min 40 s (41.7 min): needs 1,000 sequences/s\n"
        "verdict        fits\n",
    )


BY_PEAK = ("resnet50", "--system", "p40-roce", "--samples", "1000000")


def test_estimate_by_peak_is_flops_over_peak_and_the_assumed_share() -> None:
    code, output = estimated(*BY_PEAK, "--ranks", "64", "--mfu", "0.5", "--price", "9 EUR/node-hour")
    assert code == 0
    workload = choose(WorkloadFile(find("workloads", "resnet50")), "full", {}).workload()
    hours = 1e6 * workload.model.training_flops(workload.data) / (64 * 12e12 * 0.5) / 3600
    (line,) = [line for line in output.splitlines() if line.startswith("MFU 50.00%")]
    assert f"as assumed: 1 min 03 s ({hours * 60:.2f} min)" in line
    assert f"{64 * hours:.3f} GPU-hours, price {8 * 9 * hours:.4g} EUR" in line
    assert "64 x 12 TFLOP/s by data sheet, 8 nodes of p40-roce" in output
    _, published = estimated(*BY_PEAK)
    assert "MFU 26.34%     lowest of language models on H100" in published
    assert "MFU 46.44%     highest of language models on H100" in published
    assert "8 x 12 TFLOP/s by data sheet, 1 node" in published


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["bert", "--throughput", "1", "--epochs", "3"], "--epoch-samples: missing; bert does not say how many seq"),
        (["resnet50", "--throughput", "1"], "--epochs: missing"),
        (["resnet50", "--throughput", "1", "--samples", "5", "--epochs", "3"], "--epochs 3: --samples 5"),
        (["resnet50", "--throughput", "1", "--epochs", "1", "--ranks", "4"], "--ranks 4: has no effect"),
        (["resnet50", "--throughput", "1", "--epochs", "1", "--efficiency", "0.9"], "--efficiency 0.9: has no effect"),
        (["resnet50", "--throughput", "1", "--epochs", "1", "--per-rank"], "give --ranks"),
        (["resnet50", "--throughput", "nan", "--epochs", "1"], "--throughput 'nan': must be"),
        (["resnet50", "--throughput", "1", "--epochs", "-1"], "--epochs '-1': must be"),
        (["resnet50", "--throughput", "1", "--epochs", "1", "--time", "7"], "--time: '7' is not a duration"),
        (["resnet50", "--throughput", "1", "--epochs", "1", "--time", "0min"], "--time: '0min' is not a duration"),
        ([*PER_RANK, "--efficiency", "99.2", "--epochs", "1"], "--efficiency '99.2': must be a share"),
        (["resnet", "--throughput", "1", "--epochs", "1"], "did you mean resnet50"),
        (["resnet50", "--throughput", "1", "--epochs", "1", "--mfu", "0.3"], "--mfu: only for RUNS or --system"),
        (["resnet50", "--mfu", "0.3"], "--mfu: only for WORKLOAD"),
        ([*BY_PEAK, "--mfu", "40"], "--mfu '40': must be a share"),
        ([*BY_PEAK, "--deadline", "3d"], "--deadline: has no effect on WORKLOAD --system"),
        ([*BY_PEAK, "bert"], "needs one WORKLOAD, not 2"),
        ([*BY_PEAK, "--price", "1 EUR/core-hour"], "must be of a GPU-hour or a node-hour"),
        (["resnet50", "--system", "local", "--epochs", "1"], "--system local: has no GPUs (node.gpus)"),
    ],
)
def test_wrong_usage_names_the_option(arguments: list[str], named: str) -> None:
    with pytest.raises(UserError) as error:
        estimated(*arguments)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_estimate_of_an_own_workload_takes_its_own_epoch_and_names_whose_it_is(tmp_path: Path) -> None:
    """A published set is that of the bundled workload: another network of its family trains on other data."""
    mine = tmp_path / "mine.yaml"
    text = find("workloads", "resnet50").read_text()
    mine.write_text(text.replace("epoch_samples: 1281167", "epoch_samples: 900"))
    asked = ("--throughput", "100", "--epochs", "3")
    _, output = estimated(str(mine), *asked)
    assert "training       3 epochs x 900 = 2,700 images\n" in output
    assert f"data set       train.schedule.epoch_samples of {mine}\n" in output
    bare = (
        text.replace("epoch_samples: 1281167", "")
        .replace("_epochs: 5.0", "_steps: 5")
        .replace("_epochs: 42.0", "_steps: 42")
    )
    mine.write_text(bare)
    with pytest.raises(
        UserError, match=r"--epoch-samples: missing; .*mine.yaml does not say how many images an epoch has"
    ):
        estimated(str(mine), *asked)
    assert "data set       --epoch-samples\n" in estimated(str(mine), *asked, "--epoch-samples", "30")[1]
    assert "data set       ImageNet-2012, as published\n" in estimated("resnet50", *asked)[1]


@pytest.mark.parametrize(
    ("device", "product", "tflops"),
    [
        ("NVIDIA H200", "H200 SXM", {"bf16": 989.4, "tf32": 494.7, "fp32": 66.9}),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", {"bf16": 989.4, "fp16": 989.4}),
        ("NVIDIA GH200 480GB", "GH200", {"bf16": 989.4}),
        ("NVIDIA B200", "B200", {"bf16": 2250}),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40 GB", {"bf16": 312, "tf32": 156, "fp32": 19.5}),
        ("A100-SXM4-40GB", "A100 SXM 40 GB", {"fp16": 312}),  # drivers before 455
        ("NVIDIA A40", "A40", {"tf32": 74.8, "bf16": 149.7}),
        ("NVIDIA L40S", "L40S", {"bf16": 362.05, "tf32": 183}),
        ("Tesla P40", "P40", {"fp32": 12.0}),
        ("Tesla V100-SXM2-16GB", "V100 SXM2", {"fp16": 125, "fp32": 15.7}),
        ("Tesla V100-PCIE-16GB", "V100 PCIe", {"fp16": 112}),
        ("AMD Instinct MI250X", "MI250X (one of its two dies)", {"bf16": 191.5, "fp32": 47.85}),
        ("AMD Instinct MI300X", "MI300X", {"bf16": 1307.4, "tf32": 653.7}),
    ],
)
def test_names_of_drivers_are_products(device: str, product: str, tflops: dict[str, float]) -> None:
    sheet = sheet_of(device)
    assert sheet.product == product
    assert {precision: sheet.tflops[precision] for precision in tflops} == tflops
    assert len([one for one in sheets() if one is sheet or one.product == product]) == 1


@pytest.mark.parametrize(
    ("device", "precision", "reason"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bf16", "MIG slice"),
        ("AMD Instinct MI250X / MI250", "bf16", "MI250X and MI250 alike"),
        ("AMD Radeon Graphics", "bf16", "does not name the product"),
        ("GRID A100X-40C", "bf16", "vGPU"),
        ("NVIDIA H2000", "bf16", "no data sheet of that name"),
        ("AMD EPYC 7763", "fp32", "no data sheet of that name"),
        ("Tesla V100-SXM2-16GB", "bf16", "the V100 SXM2 has no bf16 units"),
        ("AMD Instinct MI250X", "tf32", "has no tf32 units"),
    ],
)
def test_what_a_name_does_not_tell_has_no_peak_and_a_reason(device: str, precision: str, reason: str) -> None:
    assert reason in why_no_peak(device, precision)


@pytest.mark.parametrize("sheet", sheets(), ids=lambda sheet: sheet.product)
def test_every_sheet_is_dense_and_names_its_source(sheet: object) -> None:
    """A figure with sparsity would be twice its dense one: tf32 is half of bf16 on tensor cores, as printed."""
    assert isinstance(sheet, DataSheet)
    assert sheet.source.startswith(("NVIDIA", "AMD"))
    assert "fp32" in sheet.tflops
    if "bf16" in sheet.tflops:
        assert sheet.tflops["bf16"] == sheet.tflops["fp16"]
        if "tf32" in sheet.tflops:
            assert sheet.tflops["bf16"] / sheet.tflops["tf32"] == pytest.approx(2, rel=0.03)
    assert sheet.memory_tb_per_s is None or 0.1 < sheet.memory_tb_per_s < 10

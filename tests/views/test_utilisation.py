"""Published rates stand beside runs on the same cards, of the same network and precision, and beside no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlbench.analysis.scaling import groups
from dlbench.analysis.table import tabulate
from dlbench.perfmodels.data_sheets import sheet_of
from dlbench.records.scan import scan
from dlbench.views.utilisation import PublishedRate, published_rates, rates_beside
from tests.support.run_factory import Story, constant, plans, write_run
from tests.views.quality.test_quality import markdown_of

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

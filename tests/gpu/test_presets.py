"""Every preset that is made for GPUs trains on one, in its precision, and is found in the table of data sheets."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from dlbench.node.part import HELD_STEPS
from dlbench.perfmodels.data_sheets import sheet_of, why_no_sheet
from dlbench.records.rows.steps import read_steps
from dlbench.records.scan import Run, scan
from dlbench.views.utilisation import gpu_names
from tests.support.gpus import gpu_facts

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_process]

NEEDS_BYTES = 60 * 2**30
"""Of the batches that published tables of cards with 80 GB use; smaller cards need smaller ones."""
SHORT = (
    *("measure.warmup_s=0.0", "measure.measured_s=0.0", "measure.warmup_steps=2", "measure.measured_steps=3"),
    "watch.sampler=false",
)


def run_of(out: Path, workload: str, preset: str, *settings: str) -> Run:
    """One run of one rank on one GPU by the command that users run."""
    words = [sys.executable, "-P", "-m", "dlbench", "run", workload, "--preset", preset, "--engine", "single"]
    given = {setting.partition("=")[0] for setting in settings}
    for setting in (*(one for one in SHORT if one.partition("=")[0] not in given), *settings):
        words += ["--set", setting]
    done = subprocess.run(
        [*words, "--out", str(out), "--no-progress"], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (run,) = scan(out).runs
    return run


@pytest.mark.parametrize(
    ("workload", "preset", "settings"),
    [
        ("resnet50", "gpu", ()),
        ("cosmoflow", "gpu", ()),
        ("bert", "gpu", ()),
        ("resnet50", "gpu-compiled", ()),
        ("cosmoflow", "gpu-compiled", ()),
        ("bert", "gpu-compiled", ()),
        # Two parts of an update instead of 256 and 1,024.
        ("bert", "phase1", ("train.global_batch=512",)),
        ("bert", "phase2", ("train.global_batch=64",)),
    ],
)
def test_a_preset_for_gpus_trains(tmp_path: Path, workload: str, preset: str, settings: tuple[str, ...]) -> None:
    has = gpu_facts()["memory_bytes"]
    if has < NEEDS_BYTES:
        pytest.skip(f"the GPU has {has / 2**30:.0f} GiB, published batches need {NEEDS_BYTES / 2**30:.0f} GiB")
    run = run_of(tmp_path, workload, preset, *settings)
    assert run.record is not None
    assert run.state == "valid", run.record.warnings
    assert run.record.ranks[0].losses_finite
    (name,) = gpu_names(run)
    sheet = sheet_of(name)
    if sheet is None:
        pytest.skip(f"trained; no peak to compare with: {name}: {why_no_sheet(name)}")
    rank = run.record.ranks[0]
    flops = (run.record.training_flops_per_sample or 0) * rank.samples / rank.measured_s
    share = flops / (sheet.tflops["bf16"] * 1e12)
    # Below a hundredth something is not on the GPU; above the peak a data sheet is wrong.
    assert 0.01 < share < 1, f"MFU {share:.3f} on {name} ({sheet.source})"


def test_an_update_of_64_parts_is_that_of_one_and_no_step_sleeps_long(tmp_path: Path) -> None:
    """Three steps of the warm-up are held back; each may sleep for as long as its parts take, not for as many steps."""
    steps = ("measure.warmup_steps=12", "measure.measured_steps=6", "train.batch_per_rank=64", "train.precision=fp32")
    one = run_of(tmp_path / "1", "bert", "ci", *steps)
    many = run_of(tmp_path / "64", "bert", "ci", *steps, "train.gradient_accumulation=64")
    assert one.record is not None
    assert many.record is not None
    # The same samples in sums of another order.
    assert many.record.ranks[0].last_loss == pytest.approx(one.record.ranks[0].last_loss, rel=1e-2)
    times = read_steps(many.folder.steps(0)).steps["step_ns"]
    # The first two steps set things up. Of three in a row, held ones too, a host may be interrupted in one.
    longest = max(statistics.median(times[first : first + HELD_STEPS]) for first in range(2, 13 - HELD_STEPS))
    assert longest < 5 * statistics.median(times[12:])


def test_weights_of_a_checkpoint_are_those_on_the_gpu(tmp_path: Path) -> None:
    """Phase 2 begins with what phase 1 ended with, bit for bit, though it was written from and read to a GPU."""
    small = ("meant_for=any", "model.num_layers=2", "train.batch_per_rank=4", "train.optimizer.implementation=foreach")
    first = run_of(tmp_path / "1", "bert", "gpu", *small, "data.sequence_length=128", "checkpoint.every_steps=5")
    begin = f"checkpoint.initialize_from={first.folder.path}"
    second = run_of(tmp_path / "2", "bert", "gpu", *small, begin)
    assert first.record is not None
    assert second.record is not None
    assert second.record.ranks[0].initial_parameters_sha256 == first.record.ranks[0].final_parameters_sha256

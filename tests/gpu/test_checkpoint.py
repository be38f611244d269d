"""Checkpoints of a GPU's state: through page-locked memory, beside training, and on again bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from dlbench.errors import EnvironmentLacksError
from dlbench.node.models.build import build_model
from dlbench.node.models.optimizers import build_optimizer
from dlbench.node.page_locked import locked_memory
from dlbench.node.sync.engine import SingleEngine
from dlbench.node.training.checkpoint import Checkpoint, snapshot
from dlbench.node.training.checks import parameters_digest
from dlbench.node.training.precision import Kernels
from dlbench.records.rows.steps import read_steps
from dlbench.records.scan import Run, scan
from tests.support.one_rank import trained

pytestmark = [
    pytest.mark.gpu,
    # What `warn_only` below warns of: cuBLAS, and kernels that have no order of their sums.
    pytest.mark.filterwarnings("ignore:.*eterministic"),
]

NO_SEARCH: dict[str, Any] = {"train__cudnn_benchmark": "off"}
"""Which convolutions cuDNN's search finds fastest may differ between two runs, and so do their last bits."""
AT = 6
LAST = 12


@pytest.fixture(autouse=True)
def _same_kernels() -> object:
    """Kernels whose sums have one order, so that two runs of one program are equal."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Backward passes of the fused kernels of attention add up in no order of their own, also where one is asked for.
    with sdpa_kernel(SDPBackend.MATH):
        yield None
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def losses(run: Run) -> list[float]:
    return [float(loss) for loss in read_steps(run.folder.steps(0)).steps["loss"]]


def restored_parameters(run: Run, device: torch.device) -> str:
    """Digest of the parameters that the checkpoint at `AT` holds; the device gives all it holds back exactly."""
    workload, path = run.plan.workload, run.folder.checkpoint(AT)
    model = Kernels(run.plan, device).placed(build_model(workload.model))
    optimizer = build_optimizer(model, workload.train.at_batch(run.plan.global_batch).optimizer)
    kept = Checkpoint(path)
    kept.restore(model, optimizer)
    again, held = snapshot(SingleEngine().whole_state(model, optimizer), kept.progress, kept.trained), load_file(path)
    assert again.tensors.keys() == held.keys()
    assert any(name.startswith("optimizer/") for name in held)
    for name, tensor in held.items():
        assert torch.equal(again.tensors[name], tensor), name
    return parameters_digest(model)


def memory_said(num_bytes: int) -> str:
    """How the record of a checkpoint's memory begins on this machine."""
    try:
        locked_memory(num_bytes, "test")
    except EnvironmentLacksError:  # a low limit of locked memory: dlbench goes on without, and says why
        return "pageable: the state of a checkpoint: "
    return "page-locked"


@pytest.mark.gpu_process
@pytest.mark.parametrize("engine", ["ddp", "horovod"])
def test_ranks_of_several_gpus_get_what_rank_0_read(tmp_path: Path, engine: str) -> None:
    """Comes first (`gpu_process`): in exclusive mode a GPU takes no rank once this process has begun with CUDA."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU: ranks need one each")
    if engine == "horovod":
        pytest.importorskip("horovod.torch", reason="Horovod is not installed")

    def run(series: str, steps: int, *words: str) -> Run:
        command = [sys.executable, "-P", "-m", "dlbench", "run", "cosmoflow", "--preset", "ci", "--ranks", "2"]
        command += ["--engine", engine, "--out", str(tmp_path), "--series", series, "--no-progress", *words]
        for key, value in {"warmup_s": 0.0, "measured_s": 0.0, "warmup_steps": 1, "measured_steps": steps}.items():
            command += ["--set", f"measure.{key}={value}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return next(one for one in scan(tmp_path).runs if one.plan.series.id == series)

    first = run("first", 4, "--set", "checkpoint.every_steps=5")
    second = run("second", 3, "--resume", str(first.folder.path))
    assert first.record is not None
    assert second.record is not None
    assert second.record.first_step == 5
    ends = {rank.final_parameters_sha256 for rank in first.record.ranks}
    assert {rank.initial_parameters_sha256 for rank in second.record.ranks} == ends
    assert len({rank.final_parameters_sha256 for rank in second.record.ranks}) == 1


@pytest.mark.parametrize(
    ("workload", "settings"),
    [
        ("cosmoflow", NO_SEARCH),
        ("cosmoflow", {**NO_SEARCH, "train__optimizer__implementation": "fused"}),
        ("resnet50", NO_SEARCH),
        ("bert", {}),
    ],
)
def test_a_gpu_goes_on_from_a_checkpoint_bit_for_bit(tmp_path: Path, workload: str, settings: dict[str, Any]) -> None:
    device = torch.device("cuda", torch.cuda.current_device())

    def run(name: str, steps: int, **more: Any) -> Run:
        (tmp_path / name).mkdir()
        # 4 steps of warm-up, and as many measured ones as are asked for: none to fill seconds.
        common = {"measure__warmup_s": 0.0, "measure__measured_s": 0.0, **settings}
        return trained(tmp_path / name, steps, workload=workload, device=device, **common, **more)

    whole = run("whole", LAST - 4, checkpoint__every_steps=AT, checkpoint__keep=9)
    record = whole.record
    assert record is not None
    assert [write.step for write in record.checkpoint_writes] == [AT, LAST]
    for write in record.checkpoint_writes:
        assert write.memory.startswith(memory_said(write.bytes)), write.memory
    resumed = run("resumed", LAST - AT - 4, checkpoint__resume_from=str(whole.folder.checkpoint(AT)))
    assert resumed.record is not None
    assert resumed.record.first_step == AT
    assert resumed.record.ranks[0].initial_parameters_sha256 == restored_parameters(whole, device)
    if losses(resumed) != losses(whole)[AT:] and losses(run("again", LAST - 4)) != losses(whole):
        # Some kernel has no order of its sums here: last bits differ, and a few steps make them little more.
        assert losses(resumed) == pytest.approx(losses(whole)[AT:], rel=0.01)
        return
    assert losses(resumed) == losses(whole)[AT:]
    ends = {one.record.ranks[0].final_parameters_sha256 for one in (whole, resumed) if one.record is not None}
    assert len(ends) == 1

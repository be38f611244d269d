"""What is told of memory against what is held: live tensors by torch's profiler, resident memory by the kernel."""

from __future__ import annotations

import pytest
import torch

from dlbench.node.out_of_core.device_memory import CpuPeaks
from dlbench.node.out_of_core.executor import OutOfCore
from dlbench.node.out_of_core.profile import ChainProfile
from dlbench.perfmodels.out_of_core.planner import fixed_plan
from dlbench.specs.out_of_core import Recompute
from tests.node.out_of_core.networks import Task, bert_task, cosmoflow_task, cut, planned, resnet_task

TASKS = {"resnet": resnet_task, "cosmoflow": cosmoflow_task, "bert": lambda: bert_task(3)}


def told_and_live(task: Task, recompute: Recompute) -> tuple[int, int]:
    """The peak of a pass, parameters and batch included: by the chain, and by every allocation of a real pass."""
    model, batch = task.model(), task.inputs()
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    units = cut(task, model)
    profile = ChainProfile(
        model=model, units=units, device=torch.device("cpu"), keeps_gradients=False, beat=lambda _: None
    )
    named = {str(number): tensor for number, tensor in enumerate(batch)}
    chain = profile.measure(lambda _: task.loss(model), named, state_bytes=held)
    blocks = OutOfCore(model, units, planned(units, "keep" if recompute == "none" else "recompute"))
    blocks.install()
    task.loss(model).backward()
    model.zero_grad()
    with CpuPeaks() as meter:
        meter.mark("pass")
        task.loss(model).backward()
    live = held + sum(tensor.nbytes for tensor in batch) + meter.intervals()["pass"].peak
    return fixed_plan(chain, None, recompute, "none").predicted.peak_bytes, live


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_told_bytes_are_live_bytes(name: str, recompute: Recompute) -> None:
    told, live = told_and_live(TASKS[name](), recompute)
    assert told == pytest.approx(live, rel=0.05)

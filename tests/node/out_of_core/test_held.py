"""What a rank holds by kind: exact bytes of a network whose tensors can be counted by hand."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from dlbench.node.out_of_core.held import StepMemory
from dlbench.node.step_schedule import StepSchedule
from dlbench.node.sync.engine import SingleEngine
from dlbench.records.record import HeldMemory
from tests.support.forked_runs import run_forked

CPU = torch.device("cpu")
ROWS, WIDTH = 64, 256
WEIGHTS = 2 * WIDTH * WIDTH * 4


def weighed(optimizer: type[torch.optim.Optimizer], exchange: tuple[int, bool] = (0, False), at: int = 0) -> HeldMemory:
    """Of a step of a network of two square layers, a buffer of ten floats and a sigmoid between."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH, bias=False))
    model.register_buffer("ten", torch.zeros(10))
    update = optimizer(model.parameters(), lr=1e-3)  # type: ignore[call-arg]
    held, batch = StepMemory(SingleEngine().watch_memory, model, update, CPU, exchange), torch.randn(ROWS, WIDTH)
    schedule = StepSchedule(first=0, end=9, warmup=9, global_batch=1, steps_per_epoch=None)
    for step in range(3):
        held.before_warmup(step - at, schedule)
        model(batch).sum().backward()
        update.step()
        update.zero_grad()
    held.close()
    assert held.result is not None
    return held.result


def test_kinds_are_those_counted_by_hand_and_sum_to_the_peak() -> None:
    found = weighed(torch.optim.AdamW)
    steps = 2 * 4  # AdamW counts its updates in a tensor for each parameter
    assert (found.weights, found.gradients, found.buffers) == (WEIGHTS, WEIGHTS, 40)
    assert found.optimizer == 2 * WEIGHTS + steps
    kinds = found.weights + found.gradients + found.optimizer + found.buffers + found.activations
    assert kinds == found.peak == max(found.passes_peak, found.update_peak)
    assert found.host is None
    assert found.retries is None


def test_buffers_of_the_exchange_count_and_gradients_in_them_do_not_count_twice() -> None:
    alone, beside = weighed(torch.optim.SGD), weighed(torch.optim.SGD, exchange=(5000, False))
    assert (beside.buffers, beside.peak) == (alone.buffers + 5000, alone.peak + 5000)
    assert beside.activations == alone.activations


def test_sharding_halves_weights_and_optimizer_state_and_frees_what_it_gathers(tmp_path: Path) -> None:
    asked = ("--preset", "ci", "--ranks", "2", "--repeats", "1", "--set", "measure.measured_steps=1")
    found: dict[str, tuple[HeldMemory, HeldMemory]] = {}
    for engine in ("ddp", "fsdp"):
        (run,) = run_forked("bert", *asked, "--engine", engine, "--out", tmp_path)  # of three warm-up steps
        assert run.record is not None
        first, second = (rank.held for rank in run.record.ranks)
        assert first is not None
        assert second is not None
        found[engine] = first, second
    whole = found["ddp"][0]
    assert whole.weights == whole.gradients == whole.buffers  # of a CPU's buckets
    for kind in ("weights", "gradients", "optimizer"):
        both = sum(getattr(one, kind) for one in found["fsdp"])
        assert getattr(whole, kind) <= both <= 1.02 * getattr(whole, kind)  # rows that no rank count divides
    for one in (*found["ddp"], *found["fsdp"]):
        assert one.weights + one.gradients + one.optimizer + one.buffers + one.activations == one.peak
        assert "not seen" not in one.evidence
    assert all(one.peak < whole.peak for one in found["fsdp"])

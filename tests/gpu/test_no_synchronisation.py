"""In measured steps nothing of dlbench makes the host wait for the GPU: torch itself is asked to refuse it.

What torch does not see (its own words: `torch.distributed` is not covered) is left to the times of a run. One wait is
GradScaler's own: with an optimizer that is not fused it must know whether to step.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dlbench.node.sync.build_engine import build_engine
from dlbench.node.sync.engine import Engine
from dlbench.node.sync.own.engine import OwnExchange
from dlbench.node.training import phases
from dlbench.node.training.loop import LoopResult, TrainingLoop
from dlbench.node.training.run import Rank
from dlbench.records.folder import RunFolder
from dlbench.specs.plan import RunPlan
from tests.support.one_rank import PLACE, context_of
from tests.support.run_factory import plans

pytestmark = pytest.mark.gpu

WARMUP, MEASURED = 4, 5
WORKLOADS = ("resnet50", "bert", "cosmoflow")


@pytest.fixture
def device() -> torch.device:
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def waits_are_allowed_again() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def plan_of(workload: str, engine: str, ranks: int = 1, /, **overrides: Any) -> RunPlan:
    settings = {
        "measure.warmup_steps": WARMUP,
        "measure.measured_steps": MEASURED,
        "measure.warmup_s": 0.0,
        "measure.measured_s": 0.0,
        "watch.sampler": False,
        "watch.window_steps": 0,
        **overrides,
    }
    return plans(workload=workload, preset="ci", points=(ranks,), repeats=1, engine=engine, overrides=settings)[0]


def train(plan: RunPlan, engine: Engine, device: torch.device, folder: Path) -> LoopResult:
    """The steps of a plan on one GPU; torch raises where a measured one makes the host wait.

    The warm-up is left alone: there cuDNN searches, DDP arranges its buckets, and constants are made.
    """
    engine.start()
    try:
        timer = phases.timer_for(device, synchronise=False)
        context = context_of(plan, engine=engine, device=device)
        state = Rank(context, timer).prepare()
        loop = TrainingLoop(state, timer)
        _forbid_waits(loop)
        result = loop.run(folder / "rank-0.steps")
        state.close()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        engine.stop()
    assert result.steps == WARMUP + MEASURED
    assert len(result.losses) == WARMUP + MEASURED
    return result


def _forbid_waits(loop: TrainingLoop) -> None:
    """Around each measured step, its marks and its loss; not between steps, where the loop may wait."""
    plain, done = loop._step, [0]
    timer = loop._timer
    finish = timer.finish

    def watched(step: int) -> tuple[int, torch.Tensor]:
        done[0] += 1
        if done[0] > WARMUP:
            torch.cuda.set_sync_debug_mode("error")
        return plain(step)

    def finished(samples: int, loss: torch.Tensor) -> None:
        finish(samples, loss)
        torch.cuda.set_sync_debug_mode("default")

    loop._step = watched  # type: ignore[method-assign]
    timer.finish = finished  # type: ignore[method-assign]


def allow_gradscalers_own_wait(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets GradScaler read whether a gradient overflowed; returns a list that grows with each time it does."""
    original, seen = torch.amp.GradScaler._maybe_opt_step, list[int]()

    def allowed(scaler: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        overflowed = sum(found.item() for found in state["found_inf_per_device"].values())
        torch.cuda.set_sync_debug_mode(mode)
        seen.append(int(overflowed))
        return None if overflowed else optimizer.step(*args, **kwargs)

    assert callable(original)
    monkeypatch.setattr(torch.amp.GradScaler, "_maybe_opt_step", allowed)
    return seen


def test_torch_refuses_a_wait_when_it_is_asked_to(device: torch.device) -> None:
    """Otherwise the tests below could not fail."""
    torch.cuda.set_sync_debug_mode("error")
    values = torch.ones(4, device=device)
    with pytest.raises(RuntimeError, match="synchroniz"):
        values.sum().item()
    with pytest.raises(RuntimeError, match="synchroniz"):
        torch.tensor([1.0, 2.0], device=device)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_steps_without_an_exchange(
    workload: str, precision: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = allow_gradscalers_own_wait(monkeypatch)
    plan = plan_of(workload, "single", **{"train.precision": precision})
    train(plan, build_engine(plan, RunFolder(tmp_path), PLACE, device), device, tmp_path)
    assert len(seen) == (WARMUP + MEASURED if precision == "fp16" else 0)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_steps_of_ddp_with_one_rank(workload: str, device: torch.device, tmp_path: Path) -> None:
    plan = plan_of(workload, "ddp", **{"train.precision": "bf16"})
    train(plan, build_engine(plan, RunFolder(tmp_path), PLACE, device), device, tmp_path)


def test_steps_of_ddp_in_fp16_on_the_wire(device: torch.device, tmp_path: Path) -> None:
    """The search for overflows is on the device; the plan is of two ranks, as one sends nothing."""
    plan = plan_of("resnet50", "ddp", 2, **{"sync.wire": "fp16"})
    train(plan, build_engine(plan, RunFolder(tmp_path), PLACE, device), device, tmp_path)


@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16", "int8", "topk"])
def test_steps_of_dlbenchs_own_exchange_with_one_rank(wire: str, device: torch.device, tmp_path: Path) -> None:
    """The plan is of two ranks, as one has nothing to exchange; this one goes alone through all of the exchange."""
    plan = plan_of("resnet50", "ddp", 2, **{"sync.fusion": "own:single", "sync.wire": wire})
    library = build_engine(plan, RunFolder(tmp_path), PLACE, device)
    assert not isinstance(library, OwnExchange)
    train(plan, OwnExchange(library, plan, PLACE, device), device, tmp_path)


def test_samples_on_the_device_and_gradient_noise(device: torch.device, tmp_path: Path) -> None:
    overrides = {"data.synthetic_on": "device", "measure.noise_scale": True, "train.gradient_accumulation": 2}
    plan = plan_of("resnet50", "single", **overrides)
    train(plan, build_engine(plan, RunFolder(tmp_path), PLACE, device), device, tmp_path)

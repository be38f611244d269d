"""A rank that trains nothing: what its loop does in a step is all dlbench's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from dlbench.node.training.phases import PhaseTimer
from dlbench.node.training.run import Rank
from tests.support.one_rank import SMALL, context_of
from tests.support.run_factory import plans

Work = Callable[[], None]


def no_work() -> None: ...


def empty_training(
    timer: PhaseTimer,
    *,
    warmup: int,
    measured: int,
    parts: int = 1,
    forward: Work = no_work,
    backward: Work = no_work,
    update: Work = no_work,
    watchdog: Any = None,
) -> Rank:
    """One rank on this CPU. In place of what torch would compute, `forward` and `backward` are called for each of the
    `parts` of a batch, which has one sample for each, and `update` once a step. `timer`: as of `Rank`.
    """
    overrides = {
        "measure.warmup_steps": warmup,
        "measure.measured_steps": measured,
        "watch.sampler": False,
        "watch.window_steps": 0,
        "train.batch_per_rank": parts,
        "train.gradient_accumulation": parts,
    }
    (plan,) = plans(workload="cosmoflow", preset="ci", points=(1,), repeats=1, engine="single", overrides=overrides)
    model = {"model": plan.workload.model.model_copy(update=SMALL)}
    plan = plan.model_copy(update={"workload": plan.workload.model_copy(update=model)})
    context = context_of(plan, watchdog=watchdog)
    state = Rank(context, timer).prepare()
    state.close()
    value = torch.tensor(0.5)

    def loss(_model: object, _batch: object) -> torch.Tensor:
        forward()
        return value

    optimizer: Any = SimpleNamespace(param_groups=[{}], step=update, zero_grad=no_work)
    context.engine._optimizer = state.optimizer = optimizer
    state.loss = loss
    state.precision.backward = lambda _loss: backward()  # type: ignore[method-assign]
    state.batches = itertools.repeat({name: torch.zeros(parts, 1) for name in ("volume", "target")})
    return state

"""One rank in the process of the test: a real run, one that trains nothing, and checkpoints that are waited for."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from dlbench.node.data.sharding import Position
from dlbench.node.ranks import CoreBinding, RankPlace
from dlbench.node.sync.build_engine import build_engine
from dlbench.node.sync.engine import Engine, SingleEngine
from dlbench.node.training.checkpoint import Progress, snapshot, write_snapshot
from dlbench.node.training.context import RankContext, RankWatch
from dlbench.node.training.phases import PhaseTimer
from dlbench.node.training.run import Rank
from dlbench.records.folder import RunFolder, create
from dlbench.records.scan import Run, read_run
from dlbench.specs.plan import RunPlan
from tests.support.run_factory import plans

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"conv_channels": (2, 3, 4, 5, 6), "dense_sizes": (8, 4), "dropout": 0.1}
PLACE = RankPlace(rank=0, size=1, local_rank=0, local_size=1, node_rank=0, num_nodes=1, host="here", token="t")
Work = Callable[[], None]


def trained(
    out: Path,
    steps: int,
    engine: str = "single",
    *,
    workload: str = "cosmoflow",
    device: torch.device = CPU,
    **more: object,
) -> Run:
    """A run of one rank in this process, on a CPU of a smaller cosmoflow.

    `more`: settings of the plan, with two underscores for each point.
    """
    settings: dict[str, Any] = {"measure.warmup_steps": 4, "measure.measured_steps": steps, "watch.sampler": False}
    settings |= {key.replace("__", "."): value for key, value in more.items()}
    (plan,) = plans(workload=workload, preset="ci", points=(1,), repeats=1, engine=engine, overrides=settings)
    if workload == "cosmoflow" and device == CPU:
        model = {"model": plan.workload.model.model_copy(update=SMALL)}
        plan = plan.model_copy(update={"workload": plan.workload.model_copy(update=model)})
    folder = create(out, plan)
    context = context_of(plan, folder, engine=build_engine(plan, folder, PLACE, device), device=device)
    try:
        Rank(context).train()
    finally:
        context.watch.close()
    return read_run(folder.path)


class Quiet:
    """A status and a watchdog that nobody hears."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_arguments: None


def context_of(
    plan: RunPlan,
    folder: RunFolder | None = None,
    *,
    engine: Engine | None = None,
    device: torch.device | None = None,
    place: RankPlace = PLACE,
    status: Any = None,
    watchdog: Any = None,
) -> RankContext:
    """A rank in this process; without a folder nothing of it is watched."""
    started = time.monotonic()
    watched = plan if folder is not None else plan.model_copy(update={"watch": None})
    folder = folder or RunFolder(Path("/nowhere"))
    return RankContext(
        plan=plan,
        folder=folder,
        place=place,
        binding=CoreBinding(cores=(0,), pinned=False, threads=1, warnings=()),
        engine=engine or SingleEngine(),
        device=device or torch.device("cpu"),
        watch=RankWatch(watched, folder, place, None, started=started),
        status=status or Quiet(),
        watchdog=watchdog or Quiet(),
        started=started,
    )


def progress_at(step: int, **changes: Any) -> Progress:
    """Training after some steps of one sample each."""
    fields: dict[str, Any] = {"samples": step, "epoch": 0.0, "position": Position(), "train_s": 1.0, "wall_s": 1.0}
    return Progress(step=step, **{**fields, "loss_scaling": {}, "evaluations": (), **changes})


def write_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, trained: Mapping[str, Any]
) -> None:
    """Writes one as the thread of a run does."""
    write_snapshot(path, snapshot(SingleEngine().whole_state(model, optimizer), progress, trained))


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

"""A real run of one rank in the process of the test."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dlbench.node.cores import CoreBinding
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.build_engine import build_engine
from dlbench.node.sync.engine import Engine, SingleEngine
from dlbench.node.training.context import RankContext, RankWatch
from dlbench.node.training.run import Rank
from dlbench.records.folder import RunFolder, create
from dlbench.records.scan import Run, read_run
from dlbench.specs.plan import RunPlan
from tests.support.run_factory import plans

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"conv_channels": (2, 3, 4, 5, 6), "dense_sizes": (8, 4), "dropout": 0.1}


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


PLACE = RankPlace(rank=0, size=1, local_rank=0, local_size=1, node_rank=0, num_nodes=1, host="here", token="t")


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

"""The data of one rank among others, opened as training opens it, of a model and a data set alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from dlbench.node.data.loader import BatchSource
from dlbench.node.data.sharding import Position
from dlbench.node.training.context import RankContext
from dlbench.node.training.input_data import open_training_data
from dlbench.specs.workload import DataSpec, ModelSpec
from tests.support.one_rank import CPU, context_of
from tests.support.rank_places import rank_place
from tests.support.run_factory import plans


def data_context(
    model: ModelSpec,
    data: DataSpec,
    *,
    batch_size: int = 2,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    device: torch.device = CPU,
    token: str | None = None,
    patience_s: float = 60.0,
) -> RankContext:
    """`token`: of ranks that list the data once for all of them; None: each lists it for itself."""
    overrides: dict[str, Any] = {
        "train.batch_per_rank": batch_size,
        "train.seed": seed,
        "measure.stall_timeout_s": patience_s,
    }
    (plan,) = plans(points=(world_size,), repeats=1, engine="ddp", overrides=overrides)
    workload = plan.workload.model_copy(update={"model": model, "data": data})
    place = rank_place(rank, world_size, world_size if token else 1, token=token or "t")
    return context_of(plan.model_copy(update={"workload": workload}), device=device, place=place)


def training_data(
    model: ModelSpec, data: DataSpec, *, start: Position | None = None, start_batch: int = 0, **about: Any
) -> BatchSource:
    """`start`: where to begin in the data set; `start_batch`: batches of this rank that were trained before."""
    context = data_context(model, data, **about)
    progress: Any = SimpleNamespace(samples=start_batch * context.plan.global_batch, position=start or Position())
    return open_training_data(context, progress, None)

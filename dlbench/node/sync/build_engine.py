"""The plan's engine, built for this rank."""

from __future__ import annotations

from importlib import import_module

import torch

from dlbench.node.ranks import RankPlace
from dlbench.node.sync.engine import Engine, NoSyncEngine
from dlbench.records.folder import RunFolder
from dlbench.records.record import RankGpu
from dlbench.specs.engine import ENGINES
from dlbench.specs.plan import RunPlan


def build_engine(
    plan: RunPlan, folder: RunFolder, place: RankPlace, device: torch.device, gpu: RankGpu | None = None
) -> Engine:
    """The engine that the plan names, whose library is imported only here.

    Where the plan leaves gradients to dlbench, the engine only carries its messages; where none is synchronised, it
    only keeps the ranks in touch.

    Raises `UserError`: the plan's synchronisation is not possible here.
    """
    module, _, name = ENGINES[plan.engine.name].on_ranks.partition(":")
    engine: Engine = getattr(import_module(module), name).for_plan(plan, folder, place, device, gpu)
    if place.size == 1:
        return engine
    if plan.sync.exchange == "none":
        return NoSyncEngine(engine)
    if plan.sync.is_own:
        from dlbench.node.sync.own.engine import OwnExchange

        return OwnExchange(engine, plan, place, device)
    return engine

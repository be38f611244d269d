"""The plan's engine, built for this rank."""

from __future__ import annotations

import torch

from dlbench.node.ranks import RankPlace
from dlbench.node.sync.engine import Engine
from dlbench.records.folder import RunFolder
from dlbench.records.record import RankGpu
from dlbench.specs.plan import RunPlan


def build_engine(
    plan: RunPlan, folder: RunFolder, place: RankPlace, device: torch.device, gpu: RankGpu | None = None
) -> Engine:
    """The engine that the plan names; Horovod and torch.distributed are imported only where used.

    Where the plan leaves the exchange of gradients to dlbench, the engine only carries its messages; where no gradient
    is exchanged, it only keeps the ranks in touch.

    Raises:
        UserError: the plan's exchange is not possible here.
    """
    engine = _library(plan, folder, place, device, gpu)
    if plan.sync.exchange == "none" and place.size > 1:
        from dlbench.node.sync.no_exchange import ApartEngine

        return ApartEngine(engine, plan.engine.name, device)
    if plan.sync.is_own and place.size > 1:
        from dlbench.node.sync.own.engine import OwnExchange

        return OwnExchange(engine, plan, place, device)
    return engine


def _library(plan: RunPlan, folder: RunFolder, place: RankPlace, device: torch.device, gpu: RankGpu | None) -> Engine:
    launch = plan.system.launch
    if plan.engine.name == "single":
        from dlbench.node.sync.single import SingleEngine

        return SingleEngine()
    if plan.engine.name == "ddp":
        from dlbench.node.sync.ddp.engine import DdpEngine

        return DdpEngine(
            plan.engine.ddp,
            place,
            device,
            folder.rendezvous,
            launch.interface,
            fusion="auto" if plan.sync.is_own else plan.sync.fusion,
            # Sparse messages are numbers of fp32 and their places.
            wire="fp32" if plan.sync.wire == "topk" else plan.sync.wire,
            powersgd_rank=plan.sync.powersgd_rank,
            stall_timeout_s=plan.measure.stall_timeout_s,
            gpu=gpu,
        )
    from dlbench.node.sync.horovod.engine import HorovodEngine

    is_watched = not plan.sync.is_own and plan.sync.exchange != "none"
    return HorovodEngine(
        plan.engine.horovod,
        place,
        device,
        use_mpi=launch.by_mpi,
        address_file=folder.rendezvous,
        interface=launch.interface,
        fusion="auto" if plan.sync.is_own else plan.sync.fusion,
        wire="fp32" if plan.sync.wire == "topk" else plan.sync.wire,
        exchange=plan.sync.exchange if is_watched else "flat",
        is_watched=is_watched,
        stall_timeout_s=plan.measure.stall_timeout_s,
        gpu=gpu,
    )

"""The plan's engine, built for this rank."""

from __future__ import annotations

import torch

from dlbench.node.ranks import RankPlace
from dlbench.node.sync.engine import Engine
from dlbench.records.folder import RunFolder
from dlbench.specs.plan import RunPlan


def build_engine(plan: RunPlan, folder: RunFolder, place: RankPlace, device: torch.device) -> Engine:
    """The engine that the plan names; Horovod and torch.distributed are imported only where used."""
    launch = plan.system.launch
    if plan.engine.name == "single":
        from dlbench.node.sync.single import SingleEngine

        return SingleEngine()
    if plan.engine.name == "ddp":
        from dlbench.node.sync.ddp import DdpEngine

        return DdpEngine(plan.engine.ddp, place, device, folder.rendezvous, launch.interface)
    from dlbench.node.sync.horovod import HorovodEngine

    return HorovodEngine(
        plan.engine.horovod,
        place,
        device,
        use_mpi=launch.launcher in ("mpirun", "srun-mpi"),
        address_file=folder.rendezvous,
        interface=launch.interface,
    )

"""Which device a rank computes on: its own GPU by what is visible, or the CPU where there is none."""

from __future__ import annotations

import torch

from dlbench.errors import EnvironmentLacksError
from dlbench.node.ranks import RankPlace
from dlbench.specs.plan import LaunchPlan


def device_for(plan: LaunchPlan, place: RankPlace) -> torch.device:
    """The rank's GPU where there is one for each rank of the node, the CPU where there is none at all.

    A launcher that shows a rank one GPU has chosen; whether two ranks got the same one shows when they have met:
    see `dlbench.node.devices.identity`.

    Raises:
        EnvironmentLacksError: a node has GPUs, but fewer than ranks, or GPUs were asked for and none is seen.
    """
    asked = plan.system.slurm.gpu_request if plan.system.scheduler == "slurm" else "none"
    if not torch.cuda.is_available():
        if asked != "none":
            raise EnvironmentLacksError(
                f"slurm.gpu_request is {asked}, but torch sees no GPU on {place.host}: check the driver and torch's "
                "build, or set gpu_request to none to train on CPUs"
            )
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if visible > 1 and place.local_size > visible:
        raise EnvironmentLacksError(
            f"{place.local_size} ranks per node, but {visible} GPUs on {place.host}: ranks must not share one; use "
            "fewer ranks, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    index = 0 if visible == 1 else place.local_rank
    torch.cuda.set_device(index)
    return torch.device("cuda", index)

"""Who am I among the ranks: rank, size and place, from what the launcher put into the environment.

Only the variables of the planned launcher are read: looking at another one's turns one job of N
ranks into N jobs of one.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dlbench.errors import EnvironmentLacksError, RunError
from dlbench.specs.launch import LauncherName
from dlbench.specs.plan import LaunchPlan
from dlbench.units import utf8_text

# rank, size, local rank: names of the first set that is complete are used.
_VARIABLES: dict[LauncherName, tuple[tuple[str, str, str], ...]] = {
    "local": (("DLBENCH_RANK", "DLBENCH_WORLD_SIZE", "DLBENCH_LOCAL_RANK"),),
    "srun-mpi": (("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),),
    "srun-gloo": (("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),),
    "mpirun": (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ),
}


class Replica(NamedTuple):
    """The copy of the network that a rank trains a part of, among all copies of the run."""

    number: int  # From 0.
    replicas: int  # Copies in the run.
    ranks: range  # Neighbouring ranks that share it, and read the same samples.


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """One rank's place in the run."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int
    host: str
    token: str  # The same for all ranks of one start of the run, different for the next start.
    switch: str = ""  # The switches above its node from the root, as Slurm gives them; empty where it gives none.

    def replica(self, ranks_each: int) -> Replica:
        """Returns the replica that this rank is part of, where `ranks_each` neighbouring ranks share one."""
        number = self.rank // ranks_each
        ranks = range(number * ranks_each, (number + 1) * ranks_each)
        return Replica(number=number, replicas=self.size // ranks_each, ranks=ranks)


def switch_of(variables: Mapping[str, str]) -> str:
    """The path of switches to this process's node, ``root.leaf1``; empty where Slurm knows no topology.

    Slurm writes switches and node with dots between them, and in a pattern what each is (srun(1),
    SLURM_TOPOLOGY_ADDR).
    """
    address = variables.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    pattern = variables.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    depth = pattern.index("node") if "node" in pattern else 0
    return utf8_text(".".join(address[:depth]))


def detect(plan: LaunchPlan, variables: Mapping[str, str] = os.environ) -> RankPlace:
    """This process's place."""
    launcher = plan.system.launch.launcher
    names = next((n for n in _VARIABLES[launcher] if all(v in variables for v in n)), None)
    if names is None:
        wanted = " or ".join("/".join(n) for n in _VARIABLES[launcher])
        raise EnvironmentLacksError(
            f"launcher {launcher}: {wanted} not set; start the run with `dlbench run` or its script"
        )
    rank, size, local_rank = (int(variables[name]) for name in names)
    if size != plan.layout.ranks:
        raise RunError(
            f"the launcher started {size} ranks, the plan asks for {plan.layout.ranks}; nothing was measured"
        )
    local_size = plan.layout.ranks_per_node
    if rank % local_size != local_rank:
        raise RunError(
            f"rank {rank} has local rank {local_rank}, expected {rank % local_size}: ranks must be laid out in blocks "
            f"of {local_size} per node (srun --distribution=block)"
        )
    token = variables.get("DLBENCH_LAUNCH_TOKEN") or "-".join(
        variables.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    )
    return RankPlace(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=rank // local_size,
        num_nodes=plan.layout.nodes,
        host=utf8_text(variables.get("SLURMD_NODENAME") or platform.node()),
        token=token,
        switch=switch_of(variables),
    )

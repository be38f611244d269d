"""Rank, world size and node of this process, from the environment variables of the planned launcher alone."""

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

# Variables of rank, size and local rank; the first complete set is used. Those of other launchers may be left over.
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
    """A copy of the network, which one rank or several neighbouring ones train."""

    number: int  # Index of the copy, from 0.
    replicas: int  # Copies in the run.
    ranks: range  # The ranks that share the copy and read the same samples.


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Rank, world size and node of a rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int
    host: str
    token: str  # The same for all ranks of one start of the run, different for the next start.
    switch: str = ""  # Path of switches from the root to its node, as Slurm gives it; empty if it gives none.

    def replica(self, ranks_each: int) -> Replica:
        """Returns the replica of this rank, if `ranks_each` neighbouring ranks share one."""
        number = self.rank // ranks_each
        ranks = range(number * ranks_each, (number + 1) * ranks_each)
        return Replica(number=number, replicas=self.size // ranks_each, ranks=ranks)


def switch_of(variables: Mapping[str, str]) -> str:
    """Returns the path of switches to this process's node, ``root.leaf1`` (srun(1), SLURM_TOPOLOGY_ADDR), or ""."""
    address = variables.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    pattern = variables.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if "node" not in pattern:
        return ""
    return utf8_text(".".join(address[: pattern.index("node")]))


def detect(plan: LaunchPlan, variables: Mapping[str, str] = os.environ) -> RankPlace:
    """Returns the place of this process in the run."""
    launcher = plan.system.launch.launcher
    names = next((names for names in _VARIABLES[launcher] if variables.keys() >= set(names)), None)
    if names is None:
        expected = " or ".join(map("/".join, _VARIABLES[launcher]))
        raise EnvironmentLacksError(
            f"launcher {launcher}: {expected} not set; start the run with `dlbench run` or its script"
        )
    rank, size, local_rank = (int(variables[name]) for name in names)
    if size != plan.layout.ranks:
        raise RunError(f"the launcher started {size} ranks, but the plan has {plan.layout.ranks}; nothing was measured")
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

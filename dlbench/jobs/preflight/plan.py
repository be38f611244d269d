"""A system becomes the plan of a pre-flight: an all-reduce of a few bytes, as its launcher would start a run. Pure."""

from __future__ import annotations

import secrets
from datetime import datetime
from typing import Any

import dlbench
from dlbench.errors import UserError
from dlbench.jobs.scripts.job import Job, limit_seconds, time_text
from dlbench.specs.collectives.plan import CommPlan, CommSeries, CommSpec
from dlbench.specs.run_order import Counts
from dlbench.specs.system.system import SystemSpec

JOB_S = 300
"""What the job asks for: it takes a minute, and longer where a file system loads libraries slowly."""

SIZES = (1024, 1 << 20)
"""Bytes of the vectors: one that libraries send at once, and one that they cut up."""

_ITERATION_S = 30.0
_STALL_S = 120.0


def plan_of(system: SystemSpec, nodes: int, *, machine_cores: int, now: datetime) -> CommPlan:
    """The plan, which is that of a run of `dlbench comm`.

    Args:
        system: what is looked at.
        nodes: how many; 1 without a scheduler.
        machine_cores: cores of this machine, where the system leaves a node's cores open.
        now: its time stamp.

    Raises:
        UserError: no run can be planned on such a system.
    """
    # Somebody waits for it: begun anew on other nodes it would mix what two sets of them said.
    system = system.model_copy(update={"slurm": system.slurm.model_copy(update={"requeue": False})})
    is_here = system.scheduler == "none"
    if is_here and nodes != 1:
        raise UserError(f"--nodes {nodes}: system {system.name} is one machine")
    # Of one machine without GPUs two ranks, so that there is something to exchange.
    per_node = 2 if is_here and system.node.default_ranks == 1 and not system.node.gpus else None
    counts = Counts(values=(nodes,), are="nodes", ranks_per_node=per_node)
    layout = counts.layout(system, nodes, cores_per_rank=None, machine_cores=machine_cores)
    name = f"preflight-{system.name}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    return CommPlan(
        run_id=name,
        created=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        dlbench_version=dlbench.__version__,
        layout=layout,
        system=system,
        comm=CommSpec(
            backends=_backends(system), sizes=SIZES, warmup=1, iterations=3, timeout_s=_ITERATION_S, check=True
        ),
        series=CommSeries(id=name[-64:], repeat=0, repeats=1, position=0),
        stall_timeout_s=_STALL_S,
    )


def _backends(system: SystemSpec) -> Any:
    """All that a run on this system could exchange by; what is not installed there is told by the ranks."""
    by_mpi = ("mpi",) if system.launch.launcher in ("mpirun", "srun-mpi") else ()
    return ("nccl" if system.node.gpus else "gloo", *by_mpi, "horovod")


class PreflightJob(Job):
    """A job under another name than that of a run."""

    @property
    def name(self) -> str:
        return f"preflight-{self.shape.system.name}"


def job_of(plan: CommPlan) -> Job:
    """The job of a pre-flight: of a few minutes, or of the system's limit where that is shorter."""
    limit = limit_seconds(plan.system.slurm.time_limit) or JOB_S
    return PreflightJob(plans=(plan,), time_limit=time_text(min(limit, JOB_S)))

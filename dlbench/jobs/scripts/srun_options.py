"""What srun is asked for a plan, as words of its command line. Pure."""

from __future__ import annotations

from dlbench.jobs.scripts.sbatch_options import threading_options
from dlbench.specs.plan import LaunchPlan


def srun_options(plan: LaunchPlan) -> list[str]:
    """Every option of the step that a plan's ranks are.

    A dead rank ends the step, which srun does not do by itself. Each line of output begins with its rank's number.
    Whatever export policy the allocation was made with, ranks get what the script has.

    Ranks go in blocks over nodes and over the sockets of a node (srun(1), --distribution): neighbours share a socket,
    as the GPUs of neighbouring numbers mostly do. Slurm alone would deal them out over the sockets in turn.

    GPUs are not bound to ranks: a bound rank, as under gpus-per-task (srun(1), --tres-bind), cannot open the others',
    and NCCL goes by the host's memory. Each rank takes its own by its place on the node.
    """
    layout, launch, slurm = plan.layout, plan.system.launch, plan.system.slurm
    options = [
        f"--mpi={launch.mpi_plugin if launch.launcher == 'srun-mpi' else 'none'}",
        "--kill-on-bad-exit=1",
        "--label",
        "--export=ALL",
        f"--nodes={layout.nodes}",
        f"--ntasks={layout.ranks}",
        f"--ntasks-per-node={layout.ranks_per_node}",
        # Not the run's folder: a process that dies leaves its core where it is.
        "--chdir=/",
    ]
    if slurm.distribution != "site":
        options.append(f"--distribution={slurm.distribution}")
    if slurm.gpu_request != "none" and slurm.gpu_bind != "site":
        options.append(f"--gpu-bind={slurm.gpu_bind}")
    for name, value in (("cpu-bind", slurm.cpu_bind), ("mem-bind", slurm.mem_bind)):
        if value is not None:
            options.append(f"--{name}={value}")
    if slurm.cpus_per_task and slurm.cpus_per_gpu is None:
        options.append(f"--cpus-per-task={layout.cores_per_rank}")
    return [*options, *threading_options(plan), *(f"--{option}" for option in slurm.srun_args)]

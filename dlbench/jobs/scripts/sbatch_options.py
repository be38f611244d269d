"""What sbatch is asked for a plan, as words of its command line: nothing of it needs quoting. Pure."""

from __future__ import annotations

from dlbench.specs.plan import LaunchPlan


def sbatch_options(
    plan: LaunchPlan, *, job_name: str | None = None, time_limit: str | None = None, warn_script: bool = False
) -> list[str]:
    """Every option that the plan and its system decide; where a job runs and what it writes to is not among them.

    Args:
        plan: of the run; of a job with several runs, of its largest.
        job_name: another name than the plan's.
        time_limit: another than the system's, as Slurm writes it.
        warn_script: the warning before the end of the job's time goes to its script, not to its steps.
    """
    layout, slurm = plan.layout, plan.system.slurm
    options = [
        f"--job-name={plan.job_name if job_name is None else job_name}",
        f"--nodes={layout.nodes}",
        f"--ntasks={layout.ranks}",
        f"--ntasks-per-node={layout.ranks_per_node}",
    ]
    if slurm.cpus_per_task and slurm.cpus_per_gpu is None:
        options.append(f"--cpus-per-task={layout.cores_per_rank}")
    options.append(f"--time={slurm.time_limit if time_limit is None else time_limit}")
    for name in ("partition", "account", "qos", "reservation", "constraint", "nodelist", "exclude"):
        value = getattr(slurm, name)
        if value is not None:
            options.append(f"--{name}={value}")
    options += _resources(plan)
    if slurm.exclusive:
        options.append("--exclusive")
    options += threading_options(plan)
    options += [f"--{option}" for option in slurm.extra]
    # All that sbatch is given, which is little: see `dlbench.jobs.slurm.environment`. Unlike NIL and a list of names,
    # every version of Slurm reads ALL alike, and runs no login shell on the node for it.
    return [*options, "--export=ALL", *_ends(plan, warn_script), "--open-mode=append"]


def _ends(plan: LaunchPlan, warn_script: bool) -> list[str]:
    """What happens before and after the end of a job's time.

    The tasks of mpirun's steps are daemons, which get no signal: only mpirun itself passes one on.
    """
    slurm = plan.system.slurm
    is_told = slurm.warning_s and (warn_script or plan.system.launch.launcher != "mpirun")
    warning = [f"--signal={'B:' if warn_script else ''}USR1@{slurm.warning_s}"] if is_told else []
    return [*warning, "--requeue" if slurm.requeue else "--no-requeue"]


def threading_options(plan: LaunchPlan) -> list[str]:
    """What sbatch and srun are both told of the threads of a core."""
    slurm = plan.system.slurm
    hint = [] if slurm.hint is None else [f"--hint={slurm.hint}"]
    return hint + ([] if slurm.threads_per_core is None else [f"--threads-per-core={slurm.threads_per_core}"])


def _resources(plan: LaunchPlan) -> list[str]:
    """GPUs, other generic resources and memory."""
    slurm = plan.system.slurm
    typed = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
    count = plan.system.node.gpus if slurm.gpu_count == "node" else plan.layout.ranks_per_node
    gres = [f"gpu:{typed}{count}"] if slurm.gpu_request == "gres" else []
    gres += [] if slurm.gres is None else [slurm.gres]
    options = [f"--gres={','.join(gres)}"] if gres else []
    if slurm.gpu_request == "gpus-per-node":
        options.append(f"--gpus-per-node={typed}{count}")
    elif slurm.gpu_request == "gpus-per-task":
        options.append(f"--gpus-per-task={typed}1")
    if slurm.cpus_per_gpu is not None:
        options.append(f"--cpus-per-gpu={slurm.cpus_per_gpu}")
    if slurm.mem_per_gpu is not None:
        options.append(f"--mem-per-gpu={slurm.mem_per_gpu}")
    elif slurm.memory is not None:
        options.append(f"--mem={slurm.memory}")
    return options

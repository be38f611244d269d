"""A plan becomes a batch script and the sbatch command that submits it. Both pure.

Quoting happens at the border: `#SBATCH` lines cannot be quoted, so only checked words stand there;
everything else goes through one filter, `sh`. Paths (which may hold anything) are given to sbatch as
arguments, never written into directives.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from dlbench.jobs import launch
from dlbench.jobs.templates import render
from dlbench.records.folder import RunFolder
from dlbench.specs.plan import LaunchPlan


def render_script(plan: LaunchPlan, folder: RunFolder, python: str) -> str:
    """The exact text of `job.sbatch`.

    Args:
        plan: the run; its system must have a scheduler.
        folder: where the run lives, absolute.
        python: Python of the compute nodes, unless the system names another.
    """
    return render(
        "job.sbatch.j2",
        plan=plan,
        slurm=plan.system.slurm,
        words=_words(plan),
        job_name=job_name(plan),
        variables=launch.rank_environment(plan),
        command=_command(plan, folder, plan.system.python or python),
    )


def job_name(plan: LaunchPlan) -> str:
    """The job's name, of safe characters by the plan's own rules."""
    return f"dlbench-{plan.job_label}"[:64]


def _words(plan: LaunchPlan) -> list[tuple[str, str]]:
    slurm = plan.system.slurm
    named = [
        (name, getattr(slurm, name))
        for name in ("partition", "account", "qos", "reservation", "constraint", "nodelist", "exclude")
    ]
    return [(name, value) for name, value in named if value is not None] + _gpu_words(plan)


def _gpu_words(plan: LaunchPlan) -> list[tuple[str, str]]:
    slurm, layout = plan.system.slurm, plan.layout
    typed = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
    if slurm.gpu_request == "gres":
        return [("gres", f"gpu:{typed}{layout.ranks_per_node}")]
    if slurm.gpu_request == "gpus-per-node":
        return [("gpus-per-node", f"{typed}{layout.ranks_per_node}")]
    if slurm.gpu_request == "gpus-per-task":
        return [("gpus-per-task", f"{typed}1")]
    return []


def _command(plan: LaunchPlan, folder: RunFolder, python: str) -> str:
    if plan.system.launch.launcher == "mpirun":
        # The token must differ between two starts of the script; the job's id does. The place-holder is
        # random, so that no path or variable of a user can hold it.
        place_holder = f"TOKEN-{secrets.token_hex(16)}"
        words = launch.mpirun_command(plan, folder, python, place_holder)
        return launch.quoted(words).replace(place_holder, '"${SLURM_JOB_ID}"')
    return launch.quoted(launch.srun_command(plan, folder, python))


def sbatch_arguments(folder: RunFolder, after: str | None = None) -> list[str]:
    """The command that submits a run's script.

    Args:
        folder: the run's folder, absolute.
        after: id of the job that must have ended before this one begins; runs of a series would
            disturb each other on shared switches and file systems.
    """
    arguments = ["sbatch", "--parsable", f"--chdir={folder.path}", f"--output={_slurm_path(folder.path)}/slurm-%j.out"]
    if after is not None:
        arguments.append(f"--dependency=afterany:{after}")
    return [*arguments, str(folder.script)]


def _slurm_path(path: Path) -> str:
    """A path for --output, in which Slurm expands percent signs."""
    return str(path).replace("%", "%%")

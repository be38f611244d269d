"""What `dlbench run` executes: where modules or setup lines come first, a script made of the same text as a job's."""

from __future__ import annotations

from pathlib import Path

from dlbench.jobs.scripts import containers, launch
from dlbench.jobs.scripts.job import render
from dlbench.records.folder import RunFolder
from dlbench.specs.plan import LaunchPlan


def has_script(plan: LaunchPlan) -> bool:
    """Whether a shell must come before the ranks."""
    system = plan.system
    return bool(system.modules or system.setup or system.slurm.login_shell or system.container.is_used)


def shell_command(plan: LaunchPlan, script: Path) -> list[str]:
    """What runs the script; the shell of a job."""
    return ["bash", *(["-l"] if plan.system.slurm.login_shell else []), str(script)]


def render_run_script(plan: LaunchPlan, folder: RunFolder, python: str) -> str:
    """The exact text of `launch.sh`, which becomes what it starts last: a rank of launcher local, else the launcher.

    Args:
        plan: of the run.
        folder: where it lives, absolute.
        python: Python of the ranks, unless the system names another.
    """
    return render(
        "launch.sh.j2",
        plan=plan,
        variables=launch.rank_environment(plan),
        command=f"exec {launch.quoted(start_command(plan, folder, python))}",
        is_rank=plan.system.launch.launcher == "local",
        is_job=False,
    )


def start_command(plan: LaunchPlan, folder: RunFolder, python: str) -> list[str]:
    """What starts one rank under launcher local, else all of them; arguments as `render_run_script`."""
    own = plan.system.python or python
    of_ranks = containers.python_of(plan, own)
    if plan.system.launch.launcher == "local":
        return launch.local_command(plan, folder, of_ranks, own)
    return launch.launcher_command(plan, folder, of_ranks)

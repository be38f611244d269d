"""Plans become a batch script and the sbatch command that submits it. Both pure.

A job holds one run, or all runs of one point of a paired comparison, whose sides must share their nodes.

Quoting happens at the border: `#SBATCH` lines cannot be quoted, so only checked words stand there;
everything else goes through one filter, `sh`. Paths (which may hold anything) are given to sbatch as
arguments, never written into directives.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

from dlbench.errors import UserError
from dlbench.jobs.scripts import launch
from dlbench.jobs.scripts.templates import render
from dlbench.records.folder import RunFolder
from dlbench.specs.ab_sides import side_words
from dlbench.specs.collectives.plan import CommPlan
from dlbench.specs.plan import LaunchPlan, RunPlan, value_text
from dlbench.specs.system.slurm import SlurmSpec

Job = tuple[LaunchPlan, ...]
"""Plans whose runs go into one job, in the order in which they run."""


def jobs_of(plans: Sequence[LaunchPlan]) -> list[Job]:
    """The jobs of a series, in the order of their first runs: one for each run, or for each point of a comparison.

    Raises:
        UserError: the sides of a comparison cannot share a job, because they ask Slurm for different things.
    """
    jobs: dict[object, list[LaunchPlan]] = {}
    for plan in plans:
        is_side = isinstance(plan, RunPlan) and plan.series.side
        key = (plan.layout.ranks, plan.layout.nodes) if is_side else plan.run_id
        jobs.setdefault(key, []).append(plan)
    for job in jobs.values():
        _refuse_two_requests(job)
    return [tuple(job) for job in jobs.values()]


def _refuse_two_requests(job: Sequence[LaunchPlan]) -> None:
    first = dict(_requested(job[0]))
    for plan in job[1:]:
        for key, value in _requested(plan):
            if value != first[key]:
                raise UserError(
                    f"--ab: both sides run in one Slurm job, which has one {key}: they ask for {first[key]} and "
                    f"{value}; give it to --set, or submit two series"
                )


def _requested(plan: LaunchPlan) -> Iterator[tuple[str, object]]:
    """All that decides a plan's `#SBATCH` lines, by the keys of the plan."""
    for name in SlurmSpec.model_fields:
        if name != "gpu_bind":  # srun's
            yield f"system.slurm.{name}", getattr(plan.system.slurm, name)
    # Where Slurm is not told, the sides may differ.
    yield "layout.cores_per_rank", plan.layout.cores_per_rank if plan.system.slurm.cpus_per_task else None


def render_job(job: Job, folders: Sequence[RunFolder], python: str) -> str:
    """The exact text of `job.sbatch`, for one run or several.

    Args:
        job: the plans; their system must have a scheduler.
        folders: where each run lives, absolute, in the same order.
        python: Python of the compute nodes, unless the system names another.
    """
    if len(job) == 1:
        return render_script(job[0], folders[0], python)
    return _render_sides(job, folders, python)


def render_script(plan: LaunchPlan, folder: RunFolder, python: str) -> str:
    """The exact text of `job.sbatch` of a single run; arguments as `render_job`."""
    return render(
        "job.sbatch.j2",
        plan=plan,
        slurm=plan.system.slurm,
        words=_words(plan),
        place=_place(plan),
        job_name=plan.job_name,
        time_limit=plan.system.slurm.time_limit,
        variables=launch.rank_environment(plan),
        command=launch.quoted(launch.launcher_command(plan, folder, plan.system.python or python)),
        is_job=True,
    )


def _render_sides(job: Job, folders: Sequence[RunFolder], python: str) -> str:
    by_side = {plan.series.side: plan for plan in reversed(job) if isinstance(plan, RunPlan)}
    return render(
        "sides.sbatch.j2",
        plan=job[0],
        slurm=job[0].system.slurm,
        words=_words(job[0]),
        place=_place(job[0]),
        job_name=job[0].job_name,
        time_limit=time_limit(job),
        folders=[folder.path for folder in folders],
        is_job=True,
        sides=[
            {
                "name": name,
                "words": side_words(plan),
                "plan": plan,
                "variables": launch.rank_environment(plan),
                "command": _command_in_variable(plan, plan.system.python or python),
            }
            for name, plan in sorted(by_side.items())
        ],
    )


def _place(plan: LaunchPlan) -> dict[str, object]:
    """Where a run stands in its series, in words; `swept` is empty where nothing is."""
    assert isinstance(plan, RunPlan | CommPlan)
    axes = plan.series.axes if isinstance(plan, RunPlan) else {}
    return {
        "series": plan.series.id,
        "repeat": f"repeat {plan.series.repeat + 1} of {plan.series.repeats}",
        "swept": ", ".join(f"{key}={value_text(key, value)}" for key, value in axes.items()),
    }


def time_limit(job: Job) -> str:
    """The time that a job asks for, as Slurm writes it: that of all its runs."""
    limit = job[0].system.slurm.time_limit
    return limit if len(job) == 1 else total_time(limit, len(job))


def total_time(limit: str, runs: int) -> str:
    """A limit as Slurm writes it, so many times; a limit of nought is none, and stays none.

    Args:
        limit: as `limit_seconds`.
        runs: how many.
    """
    total = limit_seconds(limit) * runs
    clock = f"{total // 3600 % 24:02d}:{total // 60 % 60:02d}:{total % 60:02d}"
    return f"{total // 86400}-{clock}" if total >= 86400 else clock


def limit_seconds(limit: str) -> int:
    """A time limit in seconds.

    Args:
        limit: `minutes`, `minutes:seconds`, `hours:minutes:seconds`, `days-hours`, `days-hours:minutes` or
            `days-hours:minutes:seconds` (sbatch(1), --time).
    """
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash or len(parts) == 3:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def keeps_own_comment(job: Job) -> bool:
    """Whether the system file gives sbatch a comment of the site's, which dlbench must not replace."""
    return any(option.startswith("comment=") for option in job[0].system.slurm.extra)


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


def _command_in_variable(plan: LaunchPlan, python: str) -> str:
    """The command of a run whose folder is in the script's variable `dlbench_run`."""
    place_holder = f"/{_place_holder()}"
    command = launch.quoted(launch.launcher_command(plan, RunFolder(Path(place_holder)), python))
    return command.replace(place_holder, '"$dlbench_run"')


def _place_holder() -> str:
    """Random, so that no path or variable of a user can hold it."""
    return f"DLBENCH-{secrets.token_hex(16)}"


def sbatch_arguments(folder: RunFolder, after: str | None = None, comment: str = "") -> list[str]:
    """The command that submits a run's script.

    Args:
        folder: the run's folder, absolute; of a job with several runs the first one's.
        comment: by which the job is found again; empty: none.
        after: id of the job that must have ended before this one begins; runs of a series would
            disturb each other on shared switches and file systems.
    """
    arguments = ["sbatch", "--parsable", f"--chdir={folder.path}", f"--output={_slurm_path(folder.path)}/slurm-%j.out"]
    if comment:
        arguments.append(f"--comment={comment}")
    if after is not None:
        arguments.append(f"--dependency=afterany:{after}")
    return [*arguments, str(folder.script)]


def _slurm_path(path: Path) -> str:
    """A path for --output, in which Slurm expands percent signs."""
    return str(path).replace("%", "%%")

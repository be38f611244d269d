"""What `submit --dry-run` prints: all jobs of a series in a table, what they may use, and scripts as they would be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlbench.jobs.scripts.job import Job
    from dlbench.specs.plan import LaunchPlan

EARLIER = "JOB_ID_OF_{}"
"""Stands for the id of an earlier job, which Slurm gives it."""


def dry_run_lines(
    plans: Sequence[LaunchPlan], out: Path, python: str, *, chain: bool, all_scripts: bool
) -> Iterator[str]:
    """The lines of a dry run: the table and what belongs to a script as comments of the shell, scripts as they are.

    Args:
        plans: of the series.
        out: folder of all runs.
        python: as in `render_job`.
        chain: whether each job waits for the one before.
        all_scripts: every script; else the first.
    """
    from dlbench.jobs.campaign.packing import jobs_of
    from dlbench.jobs.scripts.batch import render_job
    from dlbench.records.folder import RunFolder

    jobs = jobs_of(plans)
    yield from _comments(_summary(jobs, chain))
    for number, job in enumerate(jobs if all_scripts else jobs[:1], 1):
        folders = [RunFolder(out.absolute() / run_id) for run_id in job.run_ids]
        yield from _comments(["", f"job {number} of {len(jobs)}: {job.name}", _command(job, number, out, chain)])
        yield render_job(job, folders, python).removesuffix("\n")
    if len(jobs) > 1 and not all_scripts:
        more = "1 more script" if len(jobs) == 2 else f"{len(jobs) - 1} more scripts"
        yield from _comments(["", f"{more}: --all-scripts prints all"])


def _comments(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        # A path may hold a newline, which would end the comment.
        yield f"# {''.join(c if c.isprintable() else ' ' for c in line)}".rstrip()


def _command(job: Job, number: int, out: Path, chain: bool) -> str:
    from dlbench.jobs.scripts.batch import keeps_own_comment, sbatch_arguments
    from dlbench.jobs.scripts.launch import quoted
    from dlbench.records.folder import RunFolder

    after = EARLIER.format(number - 1) if chain and number > 1 else None
    comment = "" if keeps_own_comment(job) else f"{job.run_ids[0]}/TOKEN"
    return quoted(sbatch_arguments(job, RunFolder(out.absolute() / job.run_ids[0]), after, comment))


def _summary(jobs: Sequence[Job], chain: bool) -> list[str]:
    """Series, table of jobs, total."""
    from dlbench.specs.collectives.plan import CommPlan
    from dlbench.specs.plan import RunPlan

    first = jobs[0].plans[0]
    assert isinstance(first, RunPlan | CommPlan)
    what = f"{_counted(len(jobs), 'job')} of series {first.series.id} on system {first.system.name}"
    lines = [f"Dry run: {what}; nothing is submitted.", ""]
    lines += _aligned([_header(jobs), *(_row(number, job, chain) for number, job in enumerate(jobs, 1))])
    return [*lines, "", *_total(jobs, chain)]


def _axes(job: Job) -> dict[str, str]:
    from dlbench.specs.plan import RunPlan, value_text

    plan = job.plans[0]
    axes = plan.series.axes if isinstance(plan, RunPlan) else {}
    return {key: value_text(key, value) for key, value in axes.items()}


def _header(jobs: Sequence[Job]) -> list[str]:
    return [
        "#",
        "job",
        "nodes",
        "ranks",
        *(key.rpartition(".")[2] for key in _axes(jobs[0])),
        "repeat",
        "time",
        "after",
    ]


def _row(number: int, job: Job, chain: bool) -> list[str]:
    plan = job.plans[0]
    after = f"afterany:{number - 1}" if chain and number > 1 else "-"
    place = [job.name, str(plan.layout.nodes), str(plan.layout.ranks)]
    return [str(number), *place, *_axes(job).values(), _repeat(job), job.time_limit, after]


def _repeat(job: Job) -> str:
    from dlbench.specs.collectives.plan import CommPlan
    from dlbench.specs.plan import RunPlan

    plan = job.plans[0]
    assert isinstance(plan, RunPlan | CommPlan)
    return f"{plan.series.repeat + 1}/{plan.series.repeats}" if len(job.plans) == 1 else f"{len(job.plans) // 2} pairs"


def _total(jobs: Sequence[Job], chain: bool) -> list[str]:
    from dlbench.jobs.scripts.job import limit_seconds

    limits = [limit_seconds(job.time_limit) for job in jobs]
    runs = sum(len(job.plans) for job in jobs)
    total = f"Total: {_counted(len(jobs), 'job')}, {_counted(runs, 'run')}"
    if all(limits):
        hours = sum(job.shape.layout.nodes * limit for job, limit in zip(jobs, limits, strict=True)) / 3600
        total += f", at most {hours:,.4g} node-hours (nodes x time limit)"
    else:
        total += "; no bound on node-hours, because time limit 0 is none"
    lines = [f"{total}.", *_least(jobs, limits)]
    if len(jobs) == 1:
        return lines
    each = f"from job 2 on, sbatch gets --dependency=afterany:{EARLIER.format('THE_JOB_BEFORE')}"
    order = f"one after the other: {each} (--no-chain: all at once)" if chain else "all at once (--no-chain)"
    return [*lines, f"Order: {order}."]


def _least(jobs: Sequence[Job], limits: Sequence[int]) -> Iterator[str]:
    """What the steps of these jobs last at least where seconds are measured, and which time limits are too short."""
    from dlbench.units import format_seconds

    each = list(map(_least_seconds, jobs))
    if not any(each):
        return
    hours = sum(job.shape.layout.nodes * seconds for job, seconds in zip(jobs, each, strict=True)) / 3600
    keys = "measure.warmup_s, measure.measured_s"
    yield f"Steps alone last at least {format_seconds(max(each))} a job, {hours:,.4g} node-hours in all ({keys})."
    short = sum(0 < limit <= seconds for limit, seconds in zip(limits, each, strict=True))
    if short:
        yield f"Time limit too short for that in {_counted(short, 'job')}: raise system.slurm.time_limit."


def _least_seconds(job: Job) -> float:
    from dlbench.specs.plan import RunPlan

    return sum(plan.least_training_s for plan in job.plans if isinstance(plan, RunPlan))


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as columns; numbers to the right."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(cell.isdigit() for cell in column[1:]) for column in columns]
    lines = []
    for row in rows:
        cells = zip(row, widths, right, strict=True)
        lines.append("  ".join(cell.rjust(width) if to_right else cell.ljust(width) for cell, width, to_right in cells))
    return [line.rstrip() for line in lines]

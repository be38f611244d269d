"""What `submit --dry-run` prints: all jobs of a series in a table, what they may use, and scripts as they would be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlbench.jobs.campaign.campaign import Campaign
    from dlbench.jobs.scripts.job import Job

EARLIER = "JOB_ID_OF_{}"
"""Stands for the id of an earlier job, which Slurm gives it."""


def dry_run_lines(campaign: Campaign, out: Path, python: str, *, all_scripts: bool) -> Iterator[str]:
    """The lines of a dry run: the table and what belongs to a script as comments of the shell, scripts as they are.

    Args:
        campaign: the jobs.
        out: folder of all runs.
        python: as in `render_job`.
        all_scripts: every script; else the first.
    """
    from dlbench.jobs.scripts.batch import render_job
    from dlbench.records.folder import RunFolder

    jobs = campaign.jobs
    yield from _comments(_summary(campaign))
    for number, job in enumerate(jobs if all_scripts else jobs[:1], 1):
        folders = [RunFolder(out.absolute() / run_id) for run_id in job.run_ids]
        command = _command(job, number, out, campaign.chain)
        yield from _comments(["", f"job {number} of {len(jobs)}: {job.name}", command])
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


def _summary(campaign: Campaign) -> list[str]:
    """Series, table of jobs, cost, order."""
    from dlbench.specs.collectives.plan import CommPlan
    from dlbench.specs.plan import RunPlan

    jobs, first = campaign.jobs, campaign.plans[0]
    assert isinstance(first, RunPlan | CommPlan)
    what = f"{_counted(len(jobs), 'job')} of series {first.series.id} on system {first.system.name}"
    rows = [_row(number, job, campaign.chain) for number, job in enumerate(jobs, 1)]
    table = _aligned([["#", "job", "nodes", "ranks", "runs", "time", "node-hours", "after"], *rows])
    lines = [f"Dry run: {what}; nothing is submitted.", "", *table, "", *cost_lines(campaign)]
    return [*lines, *_least(jobs), *_order(campaign)]


def _row(number: int, job: Job, chain: bool) -> list[str]:
    layout, hours = job.shape.layout, job.node_hours
    runs = f"{len(job.plans)} apart" if job.is_array else str(len(job.plans))
    after = f"afterany:{number - 1}" if chain and number > 1 else "-"
    cost = "no bound" if hours is None else f"{hours:,.4g}"
    return [str(number), job.name, str(layout.nodes), str(layout.ranks), runs, job.time_limit, cost, after]


def cost_lines(campaign: Campaign) -> Iterator[str]:
    """What the jobs may cost, and where that comes from."""
    jobs = campaign.jobs
    total = f"Total: {_counted(len(jobs), 'job')}, {_counted(len(campaign.plans), 'run')}"
    if campaign.bound is None:
        yield f"{total}; no bound on node-hours, because time limit 0 is none."
    else:
        expected = "" if campaign.expected is None else f"; {campaign.expected:,.4g} expected"
        yield f"{total}, at most {campaign.bound:,.4g} node-hours (nodes x time limit){expected}."
    if campaign.idle_bound:
        yield f"Of these up to {campaign.idle_bound:,.4g} are of nodes held idle by smaller runs (--pack points: none)."
    sources: dict[str, int] = {}
    for estimate in campaign.estimates.values():
        sources[estimate.text] = sources.get(estimate.text, 0) + 1
    for text, runs in list(sources.items())[:MOST_SOURCES]:
        yield f"Time of {_counted(runs, 'run')}: {text}."
    if len(sources) > MOST_SOURCES:
        yield f"Time of the others: {_counted(len(sources) - MOST_SOURCES, 'more estimate')}."
    if campaign.is_split:
        longest = jobs[0].shape.system.slurm.max_time
        yield f"Runs that could share a job are in several: system.slurm.max_time is {longest}."


MOST_SOURCES = 6
"""Lines of a dry run about where times come from."""


def _order(campaign: Campaign) -> Iterator[str]:
    jobs = campaign.jobs
    if any(job.is_array for job in jobs):
        yield f"Arrays: {'one run at a time' if campaign.chain else 'all runs at once'} of each."
    if len(jobs) == 1:
        return
    each = f"from job 2 on, sbatch gets --dependency=afterany:{EARLIER.format('THE_JOB_BEFORE')}"
    order = f"one after the other: {each} (--no-chain: all at once)" if campaign.chain else "all at once (--no-chain)"
    yield f"Order: {order}."


def _least(jobs: Sequence[Job]) -> Iterator[str]:
    """What the steps of these jobs last at least where seconds are measured, and which time limits are too short."""
    from dlbench.jobs.scripts.job import limit_seconds
    from dlbench.units import format_seconds

    limits = [limit_seconds(job.time_limit) for job in jobs]
    each = list(map(_least_seconds, jobs))
    if not any(each):
        return
    hours = sum(_least_hours(job) for job in jobs)
    keys = "measure.warmup_s, measure.measured_s"
    yield f"Steps alone last at least {format_seconds(max(each))} a job, {hours:,.4g} node-hours in all ({keys})."
    short = sum(0 < limit <= seconds for limit, seconds in zip(limits, each, strict=True))
    if short:
        yield f"Time limit too short for that in {_counted(short, 'job')}: raise system.slurm.time_limit."


def _least_seconds(job: Job) -> float:
    """Of the time limit, which in an array is that of a run."""
    each = _each_least(job)
    return max(each, default=0.0) if job.is_array else sum(each)


def _least_hours(job: Job) -> float:
    return job.shape.layout.nodes * sum(_each_least(job)) / 3600


def _each_least(job: Job) -> list[float]:
    from dlbench.specs.plan import RunPlan

    return [plan.least_training_s for plan in job.plans if isinstance(plan, RunPlan)]


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

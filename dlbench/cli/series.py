"""Submission of a series to the scheduler: dry run, first submission and resumption; for several commands."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlbench.cli import options as shared
from dlbench.errors import RunError, UserError
from dlbench.units import counted, plural

if TYPE_CHECKING:
    from dlbench.jobs.campaign.campaign import Campaign
    from dlbench.jobs.campaign.completing import Submitted
    from dlbench.jobs.campaign.ended import Reopened
    from dlbench.jobs.campaign.series_file import SeriesFile
    from dlbench.jobs.processes import Interruption
    from dlbench.jobs.scripts.job import Job

EARLIER = "JOB_ID_OF_{}"  # Placeholder for the id of an earlier job, which is known only after its submission.

MOST_SOURCES = 6  # Largest number of lines in which a dry run explains its time estimates.


def print_dry_run(campaign: Campaign, out: Path, python: str, all_scripts: bool) -> None:
    """Prints the scripts of the jobs, if wanted, and then a summary with a table of the jobs, as shell comments."""
    from dlbench.jobs.scripts.containers import quoted
    from dlbench.jobs.scripts.launch import render_job, sbatch_arguments
    from dlbench.records.folder import RunFolder

    jobs = campaign.jobs
    lines: list[str] = []
    for number, job in enumerate(jobs if all_scripts else (), 1):
        folders = [RunFolder(out.absolute() / run_id) for run_id in job.run_ids]
        comment = f"{job.run_ids[0]}/TOKEN"
        after = None
        if campaign.chain and number > 1:
            after = EARLIER.format(number - 1)
        command = sbatch_arguments(job, folders[0], after, comment)
        lines += _comments(["", f"job {number} of {len(jobs)}: {job.name}", quoted(command)])
        lines.append(render_job(job, folders, python, comment).removesuffix("\n"))
    if not jobs:
        lines += _comments(["Dry run: nothing is left to submit."])
    elif all_scripts:
        lines += _comments(["", *_summary(campaign, [])])
    else:
        lines += _comments(_summary(campaign, ["Scripts: --all-scripts prints them."]))
    for line in lines:
        # Bytes, because click removes terminal sequences from text if standard output is no terminal.
        click.echo(line.encode())


def print_sbatch_commands(root: Path, series: str, out: Path, written: Sequence[tuple[Job, str]]) -> None:
    """Prints the commands that submit scripts; `written`: each job, with the id of a submitted job before it."""
    from dlbench.jobs.campaign.series_file import read_series, scheduler_named
    from dlbench.jobs.scripts.containers import joined, quoted, variable
    from dlbench.records.folder import RunFolder

    file = read_series(root, series)
    for number, (job, job_before) in enumerate(written, 1):
        command = scheduler_named(file.scheduler).command(job, RunFolder(root / job.run_ids[0]), job_before or None, "")
        if file.chain and number > 1 and not job_before:
            # The script must stay the last word.
            command.insert(-1, joined("--dependency=afterany:", variable(f"{{job{number - 1}%%;*}}")))
        words = quoted(command)
        if file.chain and number < len(written):
            # The next command needs the id of this job.
            click.echo(f'job{number}=$({words}) && echo "$job{number}"')
        else:
            click.echo(words.replace(" --parsable", "", 1))
    if set_here := sorted(name for name in os.environ if name.startswith("SBATCH_") or name == "SLURM_HINT"):
        _say(f"note: {', '.join(set_here)}: set in this shell; sbatch prefers it to the script's #SBATCH lines")
    if not written:
        _say(submission_progress(root, series, out))
        return
    next_step = f"the {plural('command', len(written))} above, or {resume_command(series, out)}"
    _say(f"series {series}: {counted(len(written), 'job')} written, nothing submitted; next: {next_step}")


def _comments(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        # A path may hold a newline, which would end the comment.
        yield f"# {''.join(c if c.isprintable() else ' ' for c in line)}".rstrip()


def _summary(campaign: Campaign, notes: Sequence[str]) -> list[str]:
    from dlbench.cli.options import precision_words
    from dlbench.specs.comm import CommPlan
    from dlbench.specs.plan import RunPlan

    jobs, first = campaign.jobs, campaign.plans[0]
    assert isinstance(first, RunPlan | CommPlan)
    headline = f"{counted(len(jobs), 'job')} of series {first.series.id} on system {first.system.name}"
    rows = [_row(number, job, campaign.chain) for number, job in enumerate(jobs, 1)]
    table = aligned([["#", "job", "nodes", "ranks", "runs", "time", "node-hours", "after"], *rows])
    lines = [f"Dry run: {headline}; nothing is submitted.", *cost_lines(campaign)]
    precisions = dict.fromkeys(precision_words(plan) for plan in campaign.plans if isinstance(plan, RunPlan))
    if precisions:
        lines.append(f"Precision: {'; '.join(precisions)}.")
    lines += _minimum_time_lines(jobs)
    if any(job.is_array for job in jobs):
        concurrency = "one run at a time" if campaign.chain else "all runs at once"
        lines.append(f"Arrays: {concurrency} of each array.")
    if len(jobs) > 1 and campaign.chain:
        option = f"--dependency=afterany:{EARLIER.format('THE_JOB_BEFORE')}"
        lines.append(f"Order: one after the other: from job 2 on, sbatch gets {option} (--no-chain: all at once).")
    elif len(jobs) > 1:
        lines.append("Order: all at once (--no-chain).")
    return [*lines, *notes, "", *table]


def _row(number: int, job: Job, chain: bool) -> list[str]:
    layout = job.shape.layout
    runs, after, node_hours = str(len(job.plans)), "-", "no limit"
    if job.is_array:
        runs = f"{len(job.plans)} in array"
    if chain and number > 1:
        after = f"afterany:{number - 1}"
    if job.node_hours is not None:
        node_hours = f"{job.node_hours:,.4g}"
    return [str(number), job.name, str(layout.nodes), str(layout.ranks), runs, job.time_limit, node_hours, after]


def cost_lines(campaign: Campaign) -> Iterator[str]:
    """Yields sentences about the largest cost of the jobs, and about the source of each time estimate."""
    total = f"Total: {counted(len(campaign.jobs), 'job')}, {counted(len(campaign.plans), 'run')}"
    if campaign.bound is None:
        yield f"{total}; node-hours are not limited, because time limit 0 means no limit."
    else:
        expected = "" if campaign.expected is None else f"; {campaign.expected:,.4g} expected"
        yield f"{total}, at most {campaign.bound:,.4g} node-hours (nodes x time limit){expected}."
    if campaign.idle_bound:
        yield f"Up to {campaign.idle_bound:,.4g} of these are idle nodes during smaller runs (none with --pack points)."
    runs_by_source = Counter(estimate.text for estimate in campaign.estimates.values())
    for source, runs in list(runs_by_source.items())[:MOST_SOURCES]:
        yield f"Time of {counted(runs, 'run')}: {source}."
    if len(runs_by_source) > MOST_SOURCES:
        yield f"Time of the others: {counted(len(runs_by_source) - MOST_SOURCES, 'more estimate')}."


def _minimum_time_lines(jobs: Sequence[Job]) -> Iterator[str]:
    from dlbench.jobs.scripts.job import limit_seconds
    from dlbench.specs.plan import RunPlan
    from dlbench.units import format_seconds

    longest_s = node_hours = 0.0
    num_short = 0
    for job in jobs:
        run_seconds = [plan.least_training_s for plan in job.plans if isinstance(plan, RunPlan)]
        job_s = sum(run_seconds)
        node_hours += job.shape.layout.nodes * job_s / 3600
        if job.is_array:
            # Each run of an array has its own time limit.
            job_s = max(run_seconds, default=0.0)
        longest_s = max(longest_s, job_s)
        num_short += 0 < limit_seconds(job.time_limit) <= job_s
    if not longest_s:
        return
    keys = "measure.warmup_s, measure.measured_s"
    yield f"Steps take at least {format_seconds(longest_s)} per job, {node_hours:,.4g} node-hours in total ({keys})."
    if num_short:
        yield f"The time limit is too short for that in {counted(num_short, 'job')}: raise system.slurm.time_limit."


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table whose first row is the header; columns of numbers are aligned to the right."""
    aligned_columns = []
    for column in zip(*rows, strict=True):
        width = max(map(len, column))
        if all(cell.isdigit() for cell in column[1:]):
            aligned_columns.append([cell.rjust(width) for cell in column])
        else:
            aligned_columns.append([cell.ljust(width) for cell in column])
    return ["  ".join(cells).rstrip() for cells in zip(*aligned_columns, strict=True)]


def series_at(name_or_folder: str, out: Path) -> tuple[Path, str]:
    """Returns the absolute folder of the runs and the name of the series. Raises `UserError`: none, or several.

    `name_or_folder`: the name of a series in `out`, the folder of its runs, or the folder of one run.
    """
    from dlbench.jobs.campaign.series_file import FOLDER, series_path
    from dlbench.records.comm import read_launched
    from dlbench.records.folder import RunFolder

    if "/" not in name_or_folder and series_path(out, name_or_folder, "json").exists():
        return out.absolute(), name_or_folder
    path = Path(name_or_folder).absolute()
    if RunFolder(path).plan.exists():
        return path.parent, read_launched(path).plan.series.id
    series_names = sorted(file.stem for file in (path / FOLDER).glob("*.json"))
    if len(series_names) > 1:
        example = _command(click.get_current_context().info_name or "", series_names[0], "--out", name_or_folder)
        raise UserError(
            f"{name_or_folder}: contains {len(series_names)} series, {', '.join(series_names[:5])}; "
            f"name one, e.g. {example}"
        )
    if not series_names and path.is_dir():
        raise UserError(f"{name_or_folder}: contains no series that was submitted to Slurm")
    if not series_names:
        raise UserError(f"{name_or_folder}: no such series or run in {out}; give --out FOLDER, or the folder itself")
    return path, series_names[0]


def resume_series(options: dict[str, Any]) -> None:
    """Submits the remaining jobs of a series; with --write-only it prints the sbatch commands instead.

    Raises `UserError`: this user has no such series, or another process submits it. `RunError`: see `submit_rest`.
    """
    from dlbench.jobs.campaign.completing import adopt, missing_jobs, write_only
    from dlbench.jobs.campaign.ended import reopen
    from dlbench.jobs.campaign.series_file import require_own, scheduler_named
    from dlbench.jobs.processes import Interruption
    from dlbench.records.folder import prepare_output

    series, out = options["resume"], options["out"]
    if not out.is_dir():
        raise UserError(f"--out {out}: no such folder")
    root, dry_run = out.absolute(), options["dry_run"]
    file = require_own(root, series)
    scheduler = scheduler_named(file.scheduler)
    if not options["write_only"]:
        scheduler.require()
    if not dry_run:
        prepare_output(out)
    if options["write_only"]:
        if unanswered := adopt(root, series, scheduler):
            _say(f"note: {unanswered}: do not submit scripts that are in the queue already")
        with Interruption() as interruption:
            written = write_only(root, series, scheduler, interruption.check, also_written=True)
        print_sbatch_commands(root, series, out, written)
        return
    reopened = reopen(root, series, scheduler, with_cancelled=options["cancelled"], dry_run=dry_run)
    for line in _reopened_lines(series, out, reopened):
        _say(line)
    if dry_run:
        campaign = _remaining(file, missing_jobs(root, series, scheduler), reopened.campaign)
        print_dry_run(campaign, out, file.python, options["all_scripts"])
        return
    if reopened.campaign:
        for line in cost_lines(reopened.campaign):
            _say(line)
    with Interruption() as interruption:
        submit_rest(root, series, options, interruption)


def _remaining(series: SeriesFile, missing: Sequence[Job], renewed: Campaign | None) -> Campaign:
    from dlbench.jobs.campaign.campaign import Campaign, TimeEstimate
    from dlbench.jobs.scripts.job import limit_seconds

    estimates: dict[str, TimeEstimate] = {}
    for job in missing:
        run_s: float = limit_seconds(job.time_limit)
        if not job.is_array:
            run_s /= len(job.plans)
        for plan in job.plans:
            estimates[plan.run_id] = TimeEstimate(seconds=run_s)
    jobs = tuple(missing)
    if renewed is not None:
        jobs += renewed.jobs
        estimates.update(renewed.estimates)
    plans = tuple(plan for job in jobs for plan in job.plans)
    return Campaign(plans=plans, packing=series.pack, chain=series.chain, estimates=estimates, jobs=jobs)


def _reopened_lines(series: str, out: Path, reopened: Reopened) -> Iterator[str]:
    not_begun = reopened.runs - len(reopened.begun)
    if not_begun == 1:
        yield f"series {series}: 1 run did not begin before its job ended; it is submitted again"
    elif not_begun:
        yield f"series {series}: {not_begun:,} runs did not begin before their job ended; they are submitted again"
    if reopened.begun:
        yield (
            f"series {series}: {counted(len(reopened.begun), 'run')} had begun before the job was cancelled, and will "
            "be tried again; files of the earlier attempt are kept in attempt-NNNN of the run's folder"
        )
    if reopened.cancelled:
        jobs = f"cancelled {plural('job', len(reopened.cancelled_jobs))} {', '.join(reopened.cancelled_jobs)}"
        command = _command("submit", "--resume", series, "--cancelled", "--out", str(out))
        yield f"series {series}: left out: {counted(len(reopened.cancelled), 'run')} of {jobs}; to submit: {command}"


def submit_rest(root: Path, series: str, options: dict[str, Any], interruption: Interruption) -> None:
    """Submits the remaining jobs of a series, and prints the id of each job and then the progress of the series.

    Raises `UserError`: there is no such series, or another process submits it. `RunError`: Slurm refused a job or did
    not answer. `KeyboardInterrupt`: on a signal.
    """
    from dlbench.jobs.campaign.completing import complete, forget
    from dlbench.jobs.campaign.series_file import read_series, scheduler_named, submission_status
    from dlbench.jobs.scheduler import RefusedError

    file, out = read_series(root, series), options["out"]
    scheduler, max_jobs = scheduler_named(file.scheduler), options["max_jobs"] or file.max_jobs
    total, num_submitted = submission_status(root, series).total, 0

    def report(done: Submitted) -> None:
        nonlocal num_submitted
        job_id = done.job_id
        if done.is_adopted:
            job_id += ", already in the queue"
        else:
            num_submitted += 1
        description = shared.describe_plan(done.job.plans[0])
        if len(done.job.plans) > 1:
            kind = "array" if done.job.is_array else "job"
            description = f"{kind} of {len(done.job.plans)} runs, the first {description}"
        _say(f"[{done.number}/{total}] job {job_id}: {description}")
        if not streams_are_one():
            with suppress(OSError):
                click.echo(done.job_id.partition(";")[0])

    try:
        complete(root, series, scheduler, interruption.check, report, max_jobs)
        interruption.check()  # a signal may have come during the last sbatch
    except KeyboardInterrupt:
        _say(submission_progress(root, series, out))
        raise
    except RunError as error:
        if isinstance(error, RefusedError) and not submission_status(root, series).known:
            forget(root, series)
            raise
        raise type(error)(f"{error}; {submission_progress(root, series, out)}") from None
    _say(f"{submission_progress(root, series, out, num_submitted)}; next: {_command('status', str(out))}")


def submission_progress(root: Path, series: str, out: Path, num_submitted: int | None = None) -> str:
    """Returns a sentence on the submitted jobs, and the command for the rest; `num_submitted`: by this command."""
    from dlbench.jobs.campaign.series_file import submission_status

    now = submission_status(root, series)
    text = f"series {series}: {now.text}"
    if num_submitted == 0 and now.submitted == now.total:
        return f"{text}: nothing left to submit"
    if num_submitted is not None and num_submitted != now.submitted:
        text += f", {num_submitted} of them by this command"
    if now.submitted < now.total:
        text += f"; the rest: {resume_command(series, out)}"
    return text


def resume_command(series: str, out: Path) -> str:
    """Returns the command that submits the rest of a series."""
    return _command("submit", "--resume", series, "--out", str(out))


def _command(*words: str) -> str:
    from dlbench.jobs.scripts.containers import quoted

    return quoted(["dlbench", *words])


def streams_are_one() -> bool:
    """Returns whether standard output and error go to the same file or terminal, where bare job ids would confuse."""
    try:
        output, error = os.fstat(sys.stdout.fileno()), os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):  # closed, or no file
        return False
    return (output.st_dev, output.st_ino) == (error.st_dev, error.st_ino)


def _say(text: str) -> None:
    # A terminal that has closed must not end the series between two jobs.
    with suppress(OSError):
        click.echo(text, err=True)

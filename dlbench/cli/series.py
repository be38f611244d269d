"""A series on its way to the scheduler: submitted, resumed, fed; for several commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlbench.cli import options as shared
from dlbench.errors import RunError, UserError

if TYPE_CHECKING:
    from dlbench.jobs.campaign.campaign import Campaign
    from dlbench.jobs.campaign.completing import Submitted
    from dlbench.jobs.campaign.ended import Reopened
    from dlbench.jobs.campaign.series_file import SeriesFile
    from dlbench.jobs.processes import Interruption
    from dlbench.jobs.scripts.job import Job

EARLIER = "JOB_ID_OF_{}"  # Stands for the id of an earlier job, which Slurm gives it.

MOST_SOURCES = 6  # Lines of a dry run about where times come from.


def print_dry_run(campaign: Campaign, out: Path, python: str, all_scripts: bool) -> None:
    """Prints the jobs on standard output, and their scripts if asked for, byte for byte; all else is a comment."""
    from dlbench.jobs.scripts.launch import render_job, sbatch_arguments
    from dlbench.jobs.scripts.words import quoted
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
        # Bytes: of text, click takes terminal sequences out where no terminal reads.
        click.echo(line.encode())


def print_commands(root: Path, series: str, out: Path, written: Sequence[tuple[Job, str]]) -> None:
    """The commands that submit scripts by hand, on standard output, one a line in the order of submission."""
    from dlbench.jobs.campaign.series_file import read_series, scheduler_named
    from dlbench.jobs.scripts.words import joined, quoted, variable
    from dlbench.records.folder import RunFolder

    file = read_series(root, series)
    for number, (job, job_before) in enumerate(written, 1):
        command = scheduler_named(file.scheduler).command(job, RunFolder(root / job.run_ids[0]), job_before or None, "")
        if file.chain and number > 1 and not job_before:
            # Before the script.
            command.insert(-1, joined("--dependency=afterany:", variable(f"{{job{number - 1}%%;*}}")))
        words = quoted(command)
        # Where a job comes after this one, its id is needed.
        is_waited_for = file.chain and number < len(written)
        by_hand = words.replace(" --parsable", "", 1)
        click.echo(f'job{number}=$({words}) && echo "$job{number}"' if is_waited_for else by_hand)
    if wins := sorted(name for name in os.environ if name.startswith("SBATCH_") or name == "SLURM_HINT"):
        _say(f"note: {', '.join(wins)}: set here, and by hand sbatch takes it before the script's #SBATCH lines")
    if not written:
        _say(left(root, series, out))
        return
    by_hand = f"the command{'s' * (len(written) > 1)} above, or {resume_command(series, out)}"
    _say(f"series {series}: {_counted(len(written), 'job')} written, nothing submitted; next: {by_hand}")


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
    headline = f"{_counted(len(jobs), 'job')} of series {first.series.id} on system {first.system.name}"
    rows = [_row(number, job, campaign.chain) for number, job in enumerate(jobs, 1)]
    table = aligned([["#", "job", "nodes", "ranks", "runs", "time", "node-hours", "after"], *rows])
    lines = [f"Dry run: {headline}; nothing is submitted.", *cost_lines(campaign)]
    precisions = dict.fromkeys(precision_words(plan) for plan in campaign.plans if isinstance(plan, RunPlan))
    lines += [f"Precision: {'; '.join(precisions)}."] if precisions else []
    lines += _least(jobs)
    if any(job.is_array for job in jobs):
        lines.append(f"Arrays: {'one run at a time' if campaign.chain else 'all runs at once'} of each.")
    if len(jobs) > 1 and campaign.chain:
        option = f"--dependency=afterany:{EARLIER.format('THE_JOB_BEFORE')}"
        lines.append(f"Order: one after the other: from job 2 on, sbatch gets {option} (--no-chain: all at once).")
    elif len(jobs) > 1:
        lines.append("Order: all at once (--no-chain).")
    return [*lines, *notes, "", *table]


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


def _least(jobs: Sequence[Job]) -> Iterator[str]:
    from dlbench.jobs.scripts.job import limit_seconds
    from dlbench.specs.plan import RunPlan
    from dlbench.units import format_seconds

    limits = [limit_seconds(job.time_limit) for job in jobs]
    runs = [[plan.least_training_s for plan in job.plans if isinstance(plan, RunPlan)] for job in jobs]
    # The limit of an array is that of a run.
    least_job_s = [
        max(run_seconds, default=0.0) if job.is_array else sum(run_seconds)
        for job, run_seconds in zip(jobs, runs, strict=True)
    ]
    if not any(least_job_s):
        return
    hours = sum(job.shape.layout.nodes * sum(run_seconds) / 3600 for job, run_seconds in zip(jobs, runs, strict=True))
    keys = "measure.warmup_s, measure.measured_s"
    yield f"Steps alone last at least {format_seconds(max(least_job_s))} a job, {hours:,.4g} node-hours in all ({keys})."
    short = sum(0 < limit <= seconds for limit, seconds in zip(limits, least_job_s, strict=True))
    if short:
        yield f"Time limit too short for that in {_counted(short, 'job')}: raise system.slurm.time_limit."


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table, numbers to the right."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(cell.isdigit() for cell in column[1:]) for column in columns]
    lines = []
    for row in rows:
        cells = zip(row, widths, right, strict=True)
        lines.append("  ".join(cell.rjust(width) if to_right else cell.ljust(width) for cell, width, to_right in cells))
    return [line.rstrip() for line in lines]


def series_at(name_or_folder: str, out: Path) -> tuple[Path, str]:
    """The folder of all runs, absolute, and the name of a series: of its name, of a folder of runs, or of a run's.

    Raises `UserError`: there is no such series or folder, or the folder holds several; names them.
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
            f"{name_or_folder}: holds {len(series_names)} series, {', '.join(series_names[:5])}: name one, e.g. {example}"
        )
    if not series_names and path.is_dir():
        raise UserError(f"{name_or_folder}: holds no series that was submitted to Slurm")
    if not series_names:
        raise UserError(f"{name_or_folder}: no such series or run in {out}; give --out FOLDER, or the folder itself")
    return path, series_names[0]


def resume_series(options: dict[str, Any]) -> None:
    """`dlbench submit --resume SERIES`: submits what is left of a series, as often as it is called.

    With --write-only it prints the commands that do, and needs no scheduler.

    Raises `UserError`: there is no such series of this user, or another process submits it. `RunError`: as of
    `submit_rest`.
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
            _say(f"note: {unanswered}: give sbatch no script that waits in its queue already")
        with Interruption() as interruption:
            written = write_only(root, series, scheduler, interruption.check, also_written=True)
        print_commands(root, series, out, written)
        return
    reopened = reopen(root, series, scheduler, with_cancelled=options["cancelled"], dry_run=dry_run)
    _say_reopened(series, out, reopened)
    if dry_run:
        campaign = _left(file, missing_jobs(root, series, scheduler), reopened.campaign)
        print_dry_run(campaign, out, file.python, options["all_scripts"])
        return
    for line in cost_lines(reopened.campaign) if reopened.campaign else ():
        _say(line)
    with Interruption() as interruption:
        submit_rest(root, series, options, interruption)


def _left(series: SeriesFile, missing: Sequence[Job], renewed: Campaign | None) -> Campaign:
    from dlbench.jobs.campaign.campaign import Campaign, TimeEstimate
    from dlbench.jobs.scripts.job import limit_seconds

    estimates = {
        plan.run_id: TimeEstimate(seconds=limit_seconds(job.time_limit) / (1 if job.is_array else len(job.plans)))
        for job in missing
        for plan in job.plans
    }
    jobs = (*missing, *(renewed.jobs if renewed else ()))
    return Campaign(
        plans=tuple(plan for job in jobs for plan in job.plans),
        packing=series.pack,
        chain=series.chain,
        estimates={**estimates, **(renewed.estimates if renewed else {})},
        jobs=jobs,
    )


def _say_reopened(series: str, out: Path, done: Reopened) -> None:
    if never := done.runs - len(done.begun):
        whose = "its job" if never == 1 else "their job"
        _say(f"series {series}: {_counted(never, 'run')} never began before {whose} ended, and will be submitted again")
    if done.begun:
        _say(
            f"series {series}: {_counted(len(done.begun), 'run')} had begun before being cancelled, and will be tried "
            "again; what the earlier attempt left is kept in attempt-NNNN of its folder"
        )
    if done.cancelled:
        count, jobs = len(done.cancelled), done.cancelled_jobs
        are, them = ("are", "them") if count > 1 else ("is", "it")
        command = _command("submit", "--resume", series, "--cancelled", "--out", str(out))
        _say(
            f"series {series}: {count} run{'s' * (count > 1)} of cancelled job{'s' * (len(jobs) > 1)} "
            f"{', '.join(jobs)} {are} left out; {command} submits {them} again"
        )


def submit_rest(root: Path, series: str, options: dict[str, Any], interruption: Interruption) -> None:
    """Submits what is left of a series; of each job its id on standard output, and then how far the series is.

    `options`: of `submit_options`; without --max-jobs that of the series counts.
    Raises `UserError`: there is no such series, or another process submits it. `RunError`: Slurm refused a job, did not
    say whether it took it, or does not say what is queued. `KeyboardInterrupt`: on a signal.
    """
    from dlbench.jobs.campaign.completing import complete, forget
    from dlbench.jobs.campaign.series_file import read_series, scheduler_named, submission_status
    from dlbench.jobs.scheduler import RefusedError

    file, out = read_series(root, series), options["out"]
    scheduler, max_jobs = scheduler_named(file.scheduler), options["max_jobs"] or file.max_jobs
    total, num_submitted = submission_status(root, series).total, 0

    def report(done: Submitted) -> None:
        nonlocal num_submitted
        num_submitted += not done.is_adopted
        how = ", found in the queue" if done.is_adopted else ""
        first, runs = shared.describe_plan(done.job.plans[0]), len(done.job.plans)
        if runs > 1:
            first = f"{'array' if done.job.is_array else 'job'} of {runs} runs, the first {first}"
        _say(f"[{done.number}/{total}] job {done.job_id}{how}: {first}")
        if not streams_are_one():
            with suppress(OSError):
                click.echo(done.job_id.partition(";")[0])

    try:
        complete(root, series, scheduler, interruption.check, report, max_jobs)
        interruption.check()  # of a signal during the last sbatch
    except KeyboardInterrupt:
        _say(left(root, series, out))
        raise
    except RunError as error:
        if isinstance(error, RefusedError) and not submission_status(root, series).known:
            forget(root, series)
            raise
        raise type(error)(f"{error}; {left(root, series, out)}") from None
    _say(f"{left(root, series, out, num_submitted)}; next: {_command('status', str(out))}")


def left(root: Path, series: str, out: Path, num_submitted: int | None = None) -> str:
    """How far a series is, and what submits the rest; `taken`: jobs that were submitted just now."""
    from dlbench.jobs.campaign.series_file import submission_status

    now = submission_status(root, series)
    text = f"series {series}: {now.text}"
    if num_submitted == 0 and now.submitted == now.total:
        return f"{text}: nothing left to submit"
    if num_submitted is not None and num_submitted != now.submitted:
        text += f" ({num_submitted or 'none'} now)"
    return text if now.submitted == now.total else f"{text}; the rest: {resume_command(series, out)}"


def resume_command(series: str, out: Path) -> str:
    """The command that submits the rest of a series."""
    return _command("submit", "--resume", series, "--out", str(out))


def _command(*words: str) -> str:
    from dlbench.jobs.scripts.words import quoted

    return quoted(["dlbench", *words])


def streams_are_one() -> bool:
    """Whether a person sees standard output between the lines of standard error: there a bare job id says nothing."""
    try:
        output, error = os.fstat(sys.stdout.fileno()), os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):  # closed, or no file
        return False
    return (output.st_dev, output.st_ino) == (error.st_dev, error.st_ino)


def _say(text: str) -> None:
    # A terminal that has closed must not end the series between two jobs.
    with suppress(OSError):
        click.echo(text, err=True)

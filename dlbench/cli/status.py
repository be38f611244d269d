"""`dlbench status`: how far runs are."""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlbench.analysis.selection import select
from dlbench.cli.choosing import expanded, named, parse_where, read_comm_runs, runs_argument, runs_at, where_option
from dlbench.cli.options import AS_JSON, describe_point, duration, output_folder, value_option
from dlbench.cli.series import left, resume_command, series_at, streams_are_one
from dlbench.cli.streams import cleaned
from dlbench.errors import ExitCode, UserError
from dlbench.jobs.scheduler import read_submission
from dlbench.opening import open_inside
from dlbench.records.comm import read_launched
from dlbench.records.folder import RunFolder
from dlbench.records.scan import LaunchedRun
from dlbench.sharing import user_name
from dlbench.specs.comm import CommPlan
from dlbench.specs.plan import RunPlan
from dlbench.units import format_seconds

if TYPE_CHECKING:
    from dlbench.jobs.campaign.run_status import RunStatus
    from dlbench.jobs.campaign.series_file import SubmissionStatus

_TOLD = ("run_id", "state", "job", "detail", "reason", "starts")  # Of each run, in JSON.

_JOB_LOG = re.compile(r"slurm-\d+(_\d+)?\.out")
_RANK_LOG = re.compile(r"rank-\d+\.log")
_MAX_BYTES = 1 << 22  # Of each log, its end.


@click.command()
@runs_argument(default="runs")
@where_option("--where", "runs")
@click.option("--full", is_flag=True, help="Print one line per run.")
@AS_JSON
def status(runs: tuple[Path, ...], where: tuple[str, ...], full: bool, as_json: bool) -> None:
    """Show the state of the runs in RUNS (default: runs), one line per point, and why runs failed.

    States: valid, invalid (a sanity check failed, so the run has no figures), failed, cancelled (its job was cancelled
    before the run failed), interrupted (stopped on request, can be resumed), incomplete (killed or still running; on
    the machine where it ran, a killed run counts as failed), and Slurm's own (PENDING, RUNNING) for jobs that have not
    ended.

    A pending job is shown with Slurm's reason and its expected start. An unfinished series is shown with its number of
    valid runs and the command that submits the rest.

    Exits with 3 if a run failed or a submission was cut off, with 4 if a file is damaged.

    \b
    Examples:
      dlbench status runs
      dlbench status runs --where series=nightly --where state=failed --full
    """
    from dlbench.jobs.campaign.run_status import run_statuses

    conditions = parse_where(where, "--where")
    training, comm = runs_at(*runs), read_comm_runs(runs)
    _adopt(_roots([*training.runs, *comm.runs], runs))
    chosen = select([*training.runs, *comm.runs], named(runs), conditions, "--where")
    chosen_statuses, unread = run_statuses(chosen)
    of_roots = _roots([*training.runs, *comm.runs], runs)
    # Of a series, whatever --where leaves out.
    every = chosen_statuses if not conditions else run_statuses([*training.runs, *comm.runs])[0]
    series, damaged = _series(of_roots, conditions.get("series", ""), {run.run_id: run for run in every})
    # A folder without a readable plan may be of either kind, and both name it.
    problems = list(dict.fromkeys([*training.problems, *comm.problems, *unread, *damaged]))
    if as_json:
        rows = [{name: getattr(run, name) for name in _TOLD} for run in chosen_statuses]
        click.echo(json.dumps({"runs": rows, "series": series, "problems": problems}, indent=2))
    else:
        points: dict[str, list[RunStatus]] = {}  # in the order in which they run
        for run, run_status in zip(chosen, chosen_statuses, strict=True):
            assert isinstance(run.plan, RunPlan | CommPlan)
            points.setdefault(f"{run.plan.series.id}: {describe_point(run.plan)}", []).append(run_status)
        for point, statuses in points.items():
            for line in _run_lines(statuses) if full else _point_lines(point, statuses):
                click.echo(cleaned(line))
        for row in series:
            click.echo(f"series {row['series']}: {row['detail']}")
        click.echo(
            f"{len(chosen_statuses)} run{'s' * (len(chosen_statuses) != 1)}, {sum(run.state == 'valid' for run in chosen_statuses)} valid"
        )
    for problem in problems:
        click.echo(f"dlbench: damaged: {_one_line(problem)}", err=True)
    if problems:
        sys.exit(int(ExitCode.INCOMPLETE))
    if any(one.is_failed for one in chosen_statuses) or any(one["is_cut_off"] for one in series):
        sys.exit(int(ExitCode.RUN_FAILED))


def _point_lines(point: str, statuses: Sequence[RunStatus]) -> Iterator[str]:
    from dlbench.jobs.campaign.run_status import tally

    yield f"{point}: {tally([run.state for run in statuses])}"
    by_reason: dict[tuple[str, str], list[RunStatus]] = {}
    for run in statuses:
        if run.detail or (run.job and run.state != "valid"):
            by_reason.setdefault((run.state, run.detail), []).append(run)
    for alike in by_reason.values():
        yield from _run_lines(alike[:1], f" and {len(alike) - 1} more" if len(alike) > 1 else "")


def _run_lines(statuses: Sequence[RunStatus], others: str = "") -> Iterator[str]:
    for run in statuses:
        job = f"  job {run.job}" if run.job else ""
        yield f"  {run.state:<11} {run.run_id}{others}{job}"
        if run.detail:
            yield f"              {_one_line(run.detail)}"


def _roots(runs: Sequence[LaunchedRun], paths: Sequence[Path]) -> list[Path]:
    """The folders given and those below them in which runs lie, each once: where series may be written down."""
    roots = expanded(paths)
    parents = (run.folder.path.parent for run in runs if run.folder.path not in roots)
    return list(dict.fromkeys([*roots, *parents]))


def _adopt(roots: Sequence[Path], series: str = "") -> None:
    """Notes the jobs of scripts that were submitted by hand; of one series if it is named."""
    from dlbench.jobs.campaign.completing import adopt
    from dlbench.jobs.campaign.series_file import scheduler_named, standings

    for root in roots:
        for submission in standings(root)[0]:
            if series in ("", submission.series.id) and {"begun", "unsure", "written"} & {*submission.states}:
                adopt(root, submission.series.id, scheduler_named(submission.series.scheduler))


def _series(
    roots: Sequence[Path], series_name: str, status_by_run: Mapping[str, RunStatus]
) -> tuple[list[dict[str, Any]], list[str]]:
    from dlbench.jobs.campaign.series_file import standings

    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    for root in roots:
        submissions, damaged = standings(root)
        problems += damaged
        for submission in submissions:
            runs = [run_id for job in submission.series.jobs for run_id in job.runs]
            valid = sum(run_id in status_by_run and status_by_run[run_id].state == "valid" for run_id in runs)
            if series_name in ("", submission.series.id) and valid < len(runs):
                rows.append(_series_row(root, submission, status_by_run, valid))
    return rows, problems


def _series_row(
    root: Path, submission: SubmissionStatus, status_by_run: Mapping[str, RunStatus], valid: int
) -> dict[str, Any]:
    from dlbench.jobs.campaign.run_status import counted
    from dlbench.jobs.campaign.series_file import is_held

    name, detail = submission.series.id, counted(submission, status_by_run)
    is_left = submission.submitted < submission.total
    is_going_on = is_left and is_held(root, name)
    if is_left:
        detail += f"; {submission.text}; "
        if is_going_on:
            detail += "dlbench submits the rest now"
        elif submission.series.owner != user_name():
            detail += f"user {submission.series.owner} can submit the rest"
        else:
            detail += f"the rest: {resume_command(name, root)}"
    return {
        "series": name,
        "owner": submission.series.owner,
        "runs": sum(len(job.runs) for job in submission.series.jobs),
        "valid": valid,
        "jobs": submission.total,
        "submitted": submission.submitted,
        # One that the queue has no more room for is submitted later.
        "is_cut_off": bool({"missing", "unsure"} & {*submission.states})
        and not is_going_on
        and submission.series.max_jobs is None,
        "detail": detail,
    }


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def logs_of(folder: RunFolder, rank: int | None = None) -> list[Path]:
    """The logs of a run that are there: of its job, of its launcher, and of its ranks.

    `rank`: the log of this rank alone.
    Raises `UserError`: there is none (yet). `IncompleteDataError`: `submission.json` is damaged.
    """
    names = sorted(path.name for path in folder.path.iterdir())
    if rank is not None:
        if folder.log(rank).exists():
            return [folder.log(rank)]
        rank_logs = [name for name in names if _RANK_LOG.fullmatch(name)]
        hint = "its ranks write into one log, see without"
        if rank_logs:
            hint = f"there are {rank_logs[0]} to {rank_logs[-1]}"
        raise UserError(f"{folder.path}: has no {folder.log(rank).name}: {hint}")
    submission = read_submission(folder)
    job_log = [] if submission is None else [folder.path.parent / submission.log]
    job_logs = [folder.path / name for name in names if _JOB_LOG.fullmatch(name)]
    ranks = [folder.path / name for name in names if _RANK_LOG.fullmatch(name)]
    existing = [path for path in dict.fromkeys([*job_log, *job_logs, folder.launch_log, *ranks]) if path.is_file()]
    if not existing:
        raise UserError(f"{folder.path}: has no log yet; see {shlex.join(['dlbench', 'status', str(folder.path)])}")
    return existing


@click.command()
@click.argument("run")
@output_folder()
@value_option("--rank", "N", "Print only the log of this rank.", type=click.IntRange(min=0))
@value_option("--lines", "N", "Number of lines per log; 0: all.", 200, type=click.IntRange(min=0))
def logs(run: str, out: Path, rank: int | None, lines: int) -> None:
    """Print the last lines of the logs of RUN: Slurm job, launcher and ranks.

    RUN is the id of a run in --out, its folder, or a folder with this run only.

    \b
    Example:
      dlbench logs nightly-resnet50-ci-p00-n0001-k00
    """
    folder = run_folder(run, out)
    paths = logs_of(folder, rank)
    for path in paths:
        with open_inside(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_BYTES))
            text = file.read(_MAX_BYTES).decode("utf-8", "replace")
            log_lines = text.splitlines()
            if len(paths) > 1:
                click.echo(cleaned(f"==> {path.parent.name}/{path.name} <=="))
            for line in log_lines[-lines:] if lines else log_lines:
                click.echo(cleaned(line))


def run_folder(run: str, out: Path) -> RunFolder:
    """The folder of a run: its own path, or its name below the folder of all runs.

    Raises `UserError`: there is none; names the runs of a series of that name.
    """
    # A folder that a person names may be a link to it.
    for path in (Path(os.path.realpath(run)), (out / run).absolute()):
        if RunFolder(path).plan.exists():
            return RunFolder(path)
    inside = sorted(path.parent for path in Path(run).glob("*/plan.json"))
    if len(inside) == 1:
        return RunFolder(inside[0].absolute())
    runs = list(inside)
    if run and "/" not in run and run not in (".", ".."):
        runs += sorted(path.parent for path in out.glob(f"{glob.escape(run)}-*/plan.json"))
    if runs:
        others = f" and {len(runs) - 3} more" if len(runs) > 3 else ""
        problem = f"holds {len(inside)} runs" if inside else "is a series"
        raise UserError(
            f"{run}: {problem}; name one: {', '.join(shlex.quote(str(folder)) for folder in runs[:3])}{others}"
        )
    raise UserError(f"{run}: no such series or run in {out}; give --out FOLDER, or the folder itself")


@click.command()
@click.argument("series")
@output_folder()
def cancel(series: str, out: Path) -> None:
    """Cancel the pending and running jobs of SERIES, or of one run.

    Jobs of the series that were not submitted yet are removed from it. SERIES is the name of a series or run in --out,
    or the folder of one.

    Only jobs that Slurm reports as submitted from these run folders are cancelled. Finished runs are kept.

    \b
    Example:
      dlbench cancel nightly
      dlbench cancel runs
    """
    from dlbench.jobs.campaign.ended import cancel_run, cancel_series
    from dlbench.jobs.campaign.series_file import read_series, scheduler_named, series_path

    is_run = any(RunFolder(path).plan.exists() for path in (Path(series), out / series))
    if is_run and not series_path(out, series, "json").exists():
        folder = run_folder(series, out)
        submission = read_submission(folder)
        if submission is None:
            raise UserError(f"{series}: was not submitted to a scheduler, or nobody knows its job")
        done = cancel_run(folder, submission, scheduler_named(submission.scheduler))
        click.echo(f"run {series}: {done.text}", err=True)
    else:
        root, name = series_at(series, out)
        done = cancel_series(root, name, scheduler_named(read_series(root, name).scheduler))
        click.echo(f"series {name}: {done.text}", err=True)
    for job in done.jobs:
        click.echo(f"cancelled job {job}" if streams_are_one() else job)


@click.command()
@click.argument("series")
@output_folder()
@value_option("--timeout", "TIME", "Maximum time to wait, e.g. 90s, 30min or 2h.", "24h", callback=duration)
@value_option("--every", "TIME", "Polling interval.", "60s", callback=duration)
def wait(series: str, out: Path, timeout: float, every: float) -> None:
    """Wait until all jobs of SERIES have finished, then print the result.

    SERIES is the name of a series in --out, or a folder of its runs.

    Slurm's accounting of the jobs is stored with the runs (accounting.json), because Slurm deletes it after some time.

    Exits with 0 if all runs are valid, with 3 if one is not, and with 124 after the timeout, which cancels nothing.

    \b
    Example:
      dlbench wait nightly --timeout 2h && dlbench report runs
    """
    from dlbench.jobs.campaign.completing import sleep
    from dlbench.jobs.campaign.run_status import wait as wait_for
    from dlbench.jobs.processes import Interruption
    from dlbench.jobs.slurm.accounting import settled_accounting

    root, series = series_at(series, out)
    _adopt([root], series)
    with Interruption() as interruption:
        now = wait_for(root, series, interruption.check, lambda text: click.echo(text, err=True), timeout, every)
        if now.is_over and now.submission.series.scheduler == "slurm":
            # Many sites delete it after some time.
            folders = [root / run_id for run_id in now.runs]
            launched = [read_launched(folder) for folder in folders if folder.is_dir()]
            why_not = settled_accounting(launched, lambda seconds: sleep(seconds, interruption.check))
            if why_not:
                count, first = len(why_not), next(iter(why_not.values()))
                text = f"{count} run{'s' * (count > 1)}: {' '.join(first.splitlines())}"
                click.echo(f"note: no accounting of {text}", err=True)
    run_ids = [run_id for job in now.submission.series.jobs for run_id in job.runs]
    for invalid_run in (
        now.runs[run_id] for run_id in run_ids if run_id in now.runs and now.runs[run_id].state != "valid"
    ):
        click.echo(
            cleaned(f"{invalid_run.state}: {invalid_run.run_id}: {' '.join(invalid_run.detail.splitlines())}"), err=True
        )
    click.echo(now.text)
    if now.submission.submitted < now.submission.total:
        click.echo(left(root, series, root), err=True)
    if not now.is_over:
        click.echo(f"dlbench: not over after {format_seconds(timeout)}; its jobs go on", err=True)
        sys.exit(int(ExitCode.TIMEOUT))
    if not now.is_valid:
        sys.exit(int(ExitCode.RUN_FAILED))

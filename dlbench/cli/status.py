"""`dlbench status`, `wait`, `logs` and `cancel`: the state of runs and jobs."""

from __future__ import annotations

import glob
import json
import operator
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlbench.analysis.comparability import select
from dlbench.cli.options import AS_JSON, describe_point, duration, output_folder, value_option
from dlbench.cli.report import expanded, named, parse_where, read_comm_runs, runs_argument, runs_at, where_option
from dlbench.cli.series import resume_command, series_at, streams_are_one, submission_progress
from dlbench.cli.streams import cleaned
from dlbench.errors import ExitCode, UserError
from dlbench.jobs.scheduler import read_submission
from dlbench.opening import open_inside, user_name
from dlbench.records.comm import read_launched
from dlbench.records.folder import RunFolder
from dlbench.specs.comm import CommPlan
from dlbench.specs.plan import RunPlan
from dlbench.units import counted, first_of, format_seconds

if TYPE_CHECKING:
    from dlbench.jobs.campaign.run_status import RunStatus
    from dlbench.jobs.campaign.series_file import SubmissionStatus

_JSON_FIELDS = ("run_id", "state", "job", "detail", "reason", "starts")  # Of `RunStatus`, printed per run.

_JOB_LOG = re.compile(r"slurm-\d+(_\d+)?\.out")
_RANK_LOG = re.compile(r"rank-\d+\.log")
_MAX_BYTES = 1 << 22  # Largest part of a log that is read, at its end.


@click.command()
@runs_argument(default="runs")
@where_option("--where", "runs")
@click.option("--full", is_flag=True, help="Print one line per run.")
@AS_JSON
def status(runs: tuple[Path, ...], where: tuple[str, ...], full: bool, as_json: bool) -> None:
    """Show the state of the runs in RUNS (default: runs), one line per point, and why runs failed.

    States: valid, invalid (a sanity check failed, so the run has no figures), failed, cancelled, interrupted (stopped
    on request, can be resumed), incomplete (killed or still running; on the machine where it ran, a killed run counts
    as failed), and Slurm's own (PENDING, RUNNING). A pending job is shown with Slurm's reason and its expected start,
    an unfinished series with the command that submits the rest.

    Exits with 3 if a run failed or a submission was cut off, with 4 if a file is damaged.

    \b
    Example:
      dlbench status runs --where series=nightly --where state=failed --full
    """
    from dlbench.jobs.campaign.run_status import run_statuses

    conditions = parse_where(where, "--where")
    training, comm = runs_at(*runs), read_comm_runs(runs)
    all_runs = [*training.runs, *comm.runs]
    # Series files are in the given paths, or next to the folders of the runs.
    given = expanded(runs)
    parents = (run.folder.path.parent for run in all_runs if run.folder.path not in given)
    roots = list(dict.fromkeys([*given, *parents]))
    _adopt(roots)
    selected = select(all_runs, named(runs), conditions, "--where")
    statuses, unread = run_statuses(selected)
    # A series counts all its runs, also those that --where leaves out.
    all_statuses = statuses
    if conditions:
        all_statuses = run_statuses(all_runs)[0]
    status_by_run = {status.run_id: status for status in all_statuses}
    series, damaged = _unfinished_series(roots, conditions.get("series", ""), status_by_run)
    # A folder without a readable plan may be of either kind, and both name it.
    problems = list(dict.fromkeys([*training.problems, *comm.problems, *unread, *damaged]))
    if as_json:
        to_fields = operator.attrgetter(*_JSON_FIELDS)
        rows = [dict(zip(_JSON_FIELDS, to_fields(status), strict=True)) for status in statuses]
        click.echo(json.dumps({"runs": rows, "series": series, "problems": problems}, indent=2))
    else:
        points: dict[str, list[RunStatus]] = {}  # in the order in which they run
        for run, run_status in zip(selected, statuses, strict=True):
            assert isinstance(run.plan, RunPlan | CommPlan)
            points.setdefault(f"{run.plan.series.id}: {describe_point(run.plan)}", []).append(run_status)
        for point, point_statuses in points.items():
            lines = _run_lines(point_statuses) if full else _point_lines(point, point_statuses)
            for line in lines:
                click.echo(cleaned(line))
        for row in series:
            click.echo(f"series {row['series']}: {row['detail']}")
        num_valid = sum(status.state == "valid" for status in statuses)
        click.echo(f"{counted(len(statuses), 'run')}, {num_valid:,} valid")
    for problem in problems:
        click.echo(f"dlbench: damaged: {_one_line(problem)}", err=True)
    if problems:
        sys.exit(int(ExitCode.INCOMPLETE))
    if any(status.is_failed for status in statuses) or any(row["is_cut_off"] for row in series):
        sys.exit(int(ExitCode.RUN_FAILED))


def _point_lines(point: str, statuses: Sequence[RunStatus]) -> Iterator[str]:
    from dlbench.jobs.campaign.run_status import tally

    yield f"{point}: {tally([run.state for run in statuses])}"
    by_reason: dict[tuple[str, str], list[RunStatus]] = {}
    for run in statuses:
        if run.detail or (run.job and run.state != "valid"):
            by_reason.setdefault((run.state, run.detail), []).append(run)
    for alike in by_reason.values():
        others = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        yield from _run_lines(alike[:1], others)


def _run_lines(statuses: Sequence[RunStatus], others: str = "") -> Iterator[str]:
    for run in statuses:
        job = f"  job {run.job}" if run.job else ""
        yield f"  {run.state:<11} {run.run_id}{others}{job}"
        if run.detail:
            yield f"              {_one_line(run.detail)}"


def _adopt(roots: Sequence[Path], series: str = "") -> None:
    """Records the jobs of scripts that were submitted by hand, of one series or of all (`series` empty)."""
    from dlbench.jobs.campaign.completing import adopt
    from dlbench.jobs.campaign.series_file import scheduler_named, standings

    for root in roots:
        for submission in standings(root)[0]:
            if series in ("", submission.series.id) and {"begun", "unsure", "written"} & {*submission.states}:
                adopt(root, submission.series.id, scheduler_named(submission.series.scheduler))


def _unfinished_series(
    roots: Sequence[Path], series_name: str, status_by_run: Mapping[str, RunStatus]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns a JSON row for each series with runs that are not valid, and the damaged series files."""
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
    from dlbench.jobs.campaign import run_status
    from dlbench.jobs.campaign.series_file import is_held

    name, detail = submission.series.id, run_status.counted(submission, status_by_run)
    is_incomplete = submission.submitted < submission.total
    is_being_submitted = is_incomplete and is_held(root, name)
    if is_being_submitted:
        detail += f"; {submission.text}; dlbench is submitting the rest now"
    elif is_incomplete and submission.series.owner != user_name():
        detail += f"; {submission.text}; user {submission.series.owner} can submit the rest"
    elif is_incomplete:
        detail += f"; {submission.text}; the rest: {resume_command(name, root)}"
    has_unsubmitted_jobs = bool({"missing", "unsure"} & {*submission.states})
    return {
        "series": name,
        "owner": submission.series.owner,
        "runs": sum(len(job.runs) for job in submission.series.jobs),
        "valid": valid,
        "jobs": submission.total,
        "submitted": submission.submitted,
        # With --max-jobs the rest is submitted later.
        "is_cut_off": has_unsubmitted_jobs and not is_being_submitted and submission.series.max_jobs is None,
        "detail": detail,
    }


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def logs_of(folder: RunFolder, rank: int | None = None) -> list[Path]:
    """Returns the logs of a run or of one `rank`. Raises `UserError`: none yet. `IncompleteDataError`: damage."""
    names = sorted(path.name for path in folder.path.iterdir())
    if rank is not None:
        if folder.log(rank).exists():
            return [folder.log(rank)]
        rank_logs = [name for name in names if _RANK_LOG.fullmatch(name)]
        hint = "all ranks write to one log; leave out --rank"
        if rank_logs:
            hint = f"there are {rank_logs[0]} to {rank_logs[-1]}"
        raise UserError(f"{folder.path}: has no {folder.log(rank).name}: {hint}")
    submission = read_submission(folder)
    logs = [folder.path / name for name in names if _JOB_LOG.fullmatch(name)]
    if submission is not None:
        logs.insert(0, folder.path.parent / submission.log)
    logs.append(folder.launch_log)
    logs += [folder.path / name for name in names if _RANK_LOG.fullmatch(name)]
    existing = [path for path in dict.fromkeys(logs) if path.is_file()]
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
            for line in log_lines[-lines:]:  # -0 is the whole log
                click.echo(cleaned(line))


def run_folder(run: str, out: Path) -> RunFolder:
    """Returns the folder of a run, given by its path or by its name in `out`. Raises `UserError`: there is none."""
    # The given path may be a link to the folder.
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
        problem = f"contains {len(inside)} runs" if inside else "is a series"
        raise UserError(f"{run}: {problem}; name one: {first_of([shlex.quote(str(path)) for path in runs], 3)}")
    raise UserError(f"{run}: no such series or run in {out}; give --out FOLDER, or the folder itself")


@click.command()
@click.argument("series")
@output_folder()
def cancel(series: str, out: Path) -> None:
    """Cancel the pending and running jobs of SERIES, or of one run.

    SERIES is the name of a series or run in --out, or the folder of one. Jobs that were not submitted yet are removed
    from it. Only jobs that Slurm reports as submitted from these folders are cancelled. Finished runs are kept.

    \b
    Example:
      dlbench cancel nightly
    """
    from dlbench.jobs.campaign.ended import cancel_run, cancel_series
    from dlbench.jobs.campaign.series_file import read_series, scheduler_named, series_path

    is_run = any(RunFolder(path).plan.exists() for path in (Path(series), out / series))
    if is_run and not series_path(out, series, "json").exists():
        folder = run_folder(series, out)
        submission = read_submission(folder)
        if submission is None:
            raise UserError(f"{series}: was not submitted to a scheduler, or its job is not known")
        done = cancel_run(folder, submission, scheduler_named(submission.scheduler))
        click.echo(f"run {series}: {done.text}", err=True)
    else:
        root, name = series_at(series, out)
        done = cancel_series(root, name, scheduler_named(read_series(root, name).scheduler))
        click.echo(f"series {name}: {done.text}", err=True)
    prefix = "cancelled job " if streams_are_one() else ""
    for job in done.jobs:
        click.echo(f"{prefix}{job}")


@click.command()
@click.argument("series")
@output_folder()
@value_option("--timeout", "TIME", "Maximum time to wait, e.g. 90s, 30min or 2h.", "24h", callback=duration)
@value_option("--every", "TIME", "Polling interval.", "60s", callback=duration)
def wait(series: str, out: Path, timeout: float, every: float) -> None:
    """Wait until all jobs of SERIES have finished, then print the result.

    SERIES is the name of a series in --out, or a folder of its runs. Slurm's accounting is stored with the runs
    (accounting.json), because Slurm deletes it after some time.

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
        progress = wait_for(root, series, interruption.check, lambda text: click.echo(text, err=True), timeout, every)
        if progress.is_over and progress.submission.series.scheduler == "slurm":
            # Many sites delete it after some time.
            folders = [root / run_id for run_id in progress.runs]
            launched = [read_launched(folder) for folder in folders if folder.is_dir()]
            why_not = settled_accounting(launched, lambda seconds: sleep(seconds, interruption.check))
            if why_not:
                reason = _one_line(next(iter(why_not.values())))
                click.echo(f"note: no accounting of {counted(len(why_not), 'run')}: {reason}", err=True)
    for job in progress.submission.series.jobs:
        for run in (progress.runs[run_id] for run_id in job.runs if run_id in progress.runs):
            if run.state != "valid":
                click.echo(cleaned(f"{run.state}: {run.run_id}: {_one_line(run.detail)}"), err=True)
    click.echo(progress.text)
    if progress.submission.submitted < progress.submission.total:
        click.echo(submission_progress(root, series, root), err=True)
    if not progress.is_over:
        click.echo(f"dlbench: not finished after {format_seconds(timeout)}; its jobs continue", err=True)
        sys.exit(int(ExitCode.TIMEOUT))
    if not progress.is_valid:
        sys.exit(int(ExitCode.RUN_FAILED))

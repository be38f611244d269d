"""`dlbench status`: how far runs are."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlbench.cli.choosing import named, parse_where, read_comm_runs, runs_argument, runs_at, where_option
from dlbench.cli.streams import cleaned
from dlbench.errors import DlbenchError, ExitCode

if TYPE_CHECKING:
    from dlbench.jobs.slurm.states import JobStates
    from dlbench.jobs.slurm.submission import Submission
    from dlbench.records.scan import LaunchedRun
    from dlbench.records.status import RankStatus

# Slurm states after which nothing more will come.
FINAL = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)


# Of a run that says itself that it failed, worth saying beside that.
_TOLD_CAUSES = frozenset({"NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"})


@click.command()
@runs_argument(default="runs")
@where_option("--where", "runs")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def status(runs: tuple[Path, ...], where: tuple[str, ...], as_json: bool) -> None:
    """Tell the state of every run in folders RUNS (default: runs), and why some failed.

    States: valid, invalid (no figure: a sanity check failed), failed, incomplete (killed or still running; on the
    machine where it ran, what was killed is failed), and Slurm's own (PENDING, RUNNING) for jobs that have not ended.

    A series whose submission was cut off is told, with the command that completes it.

    Ends with 3 if a run failed or a series was cut off, and with 4 if a file is damaged.

    \b
    Examples:
      dlbench status runs
      dlbench status runs --where series=nightly --where state=failed
    """
    from dlbench.reading.selection import select

    wanted = parse_where(where, "--where")
    training, comm = runs_at(*runs), read_comm_runs(runs)
    chosen = select([*training.runs, *comm.runs], named(runs), wanted, "--where")
    rows, unread = _rows(chosen)
    series, damaged = _series(_roots([*training.runs, *comm.runs], runs), wanted.get("series", ""))
    # A folder without a readable plan may be of either kind, and both name it.
    problems = list(dict.fromkeys([*training.problems, *comm.problems, *unread, *damaged]))
    if as_json:
        click.echo(json.dumps({"runs": rows, "series": series, "problems": problems}, indent=2))
    else:
        for row in rows:
            click.echo(f"{row['state']:<11} {row['run_id']}" + (f"  job {row['job']}" if row["job"] else ""))
            if row["story"]:
                click.echo(cleaned(f"            {_one_line(row['story'])}"))
        for one in series:
            click.echo(f"series {one['series']}: {one['story']}")
        click.echo(f"{len(rows)} run{'s' * (len(rows) != 1)}, {sum(r['state'] == 'valid' for r in rows)} valid")
    for problem in problems:
        click.echo(f"dlbench: damaged: {_one_line(problem)}", err=True)
    if problems:
        sys.exit(int(ExitCode.INCOMPLETE))
    if any(row["state"] in ("failed", "invalid") for row in rows) or any(one["is_cut_off"] for one in series):
        sys.exit(int(ExitCode.RUN_FAILED))


def _roots(runs: Sequence[LaunchedRun], given: Sequence[Path]) -> list[Path]:
    """The folders given and those below them in which runs lie, each once: where series may be written down."""
    from dlbench.cli.choosing import expanded

    roots = expanded(given)
    parents = (run.folder.path.parent for run in runs if run.folder.path not in roots)
    return list(dict.fromkeys([*roots, *parents]))


def _series(roots: Sequence[Path], wanted: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Each series that is not wholly submitted, of them that of one name if `wanted` is not empty; what is damaged."""
    from dlbench.jobs.campaign.series import is_held, standings
    from dlbench.jobs.scripts.launch import quoted

    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    for root in roots:
        found, damaged = standings(root)
        problems += damaged
        for one in found:
            name = one.series.id
            if one.submitted == one.total or wanted not in ("", name):
                continue
            is_going_on = is_held(root, name)
            rest = quoted(["dlbench", "complete", name, "--out", str(root)])
            rows.append(
                {
                    "series": name,
                    "jobs": one.total,
                    "submitted": one.submitted,
                    "is_cut_off": not is_going_on,
                    "story": f"{one.text}; " + ("dlbench submits the rest now" if is_going_on else f"the rest: {rest}"),
                }
            )
    return rows, problems


def _rows(runs: Sequence[LaunchedRun]) -> tuple[list[dict[str, str]], list[str]]:
    """A row of each run, and which submissions cannot be read: without its own a waiting run seems not submitted."""
    from dlbench.jobs.slurm.states import job_states
    from dlbench.jobs.slurm.submission import read_submission

    jobs: dict[str, Submission] = {}
    unread: list[str] = []
    for run in runs:
        try:
            submission = read_submission(run.folder)
        except DlbenchError as error:
            submission = None
            unread.append(str(error))
        if submission is not None:
            jobs[run.plan.run_id] = submission
    waiting = [jobs[r.plan.run_id].job_id for r in runs if r.recorded is None and r.plan.run_id in jobs]
    # Runs that share a job ask once.
    states = job_states(list(dict.fromkeys(waiting)))
    return [_row(run, jobs.get(run.plan.run_id), states) for run in runs], unread


def _row(run: LaunchedRun, submission: Submission | None, known: JobStates) -> dict[str, str]:
    state: str = run.state
    story = run.story
    job = "" if submission is None else submission.job_id
    told = known.states.get(job)
    if state == "incomplete" and submission is not None:
        if told is None and known.unanswered:
            story = f"Slurm did not say what became of job {job} ({known.unanswered}); {story}"
        elif told is None:
            story = f"Slurm no longer knows job {job}; {story}"
        elif told in FINAL:
            state, story = "failed", f"job {job} ended as {told} without a record; {story}; {_where(submission)}"
        elif submission.runs and not run.statuses and told != "PENDING":
            state = told
            story = (
                f"no rank has said anything yet; the {len(submission.runs)} runs of job {job} go one after the other"
            )
        else:
            state, story = told, ""
    elif state == "failed" and told in _TOLD_CAUSES:
        story = f"{story}; job {job} ended as {told}"
    elif state == "incomplete" and submission is None and run.folder.script.exists() and not run.statuses:
        story = "not started; nobody knows whether its job was submitted"
    elif state == "incomplete" and (host := _left_by_all(run.statuses)):
        state, story = "failed", f"none of its processes is left on {host}, and no record; {story}"
    return {"run_id": run.plan.run_id, "state": state, "job": job, "story": story}


def _left_by_all(statuses: Sequence[RankStatus]) -> str:
    """This host's name, if all ranks that said anything ran here and none does any more; else empty."""
    here = platform.node()
    gone = bool(statuses) and all(status.host == here and not _lives(status) for status in statuses)
    return here if gone else ""


def _lives(status: RankStatus) -> bool:
    import psutil

    try:
        process = psutil.Process(status.pid)
        # A process that began after the rank's last word only has its number.
        told = datetime.fromisoformat(status.updated).timestamp()
        return bool(process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= told + 60)
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, ValueError):
        return True


def _where(submission: Submission) -> str:
    """Where to read what a job said."""
    return f"see launch.log, and {submission.log}" if submission.runs else f"see {submission.log}"


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())

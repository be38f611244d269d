"""`dlbench status`: how far runs are."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlbench.cli.choosing import named, parse_where, read_comm_runs, runs_argument, runs_at, where_option
from dlbench.cli.streams import cleaned
from dlbench.errors import ExitCode

if TYPE_CHECKING:
    from dlbench.jobs.campaign.file import Standing
    from dlbench.jobs.campaign.outlook import Outlook
    from dlbench.records.scan import LaunchedRun


@click.command()
@runs_argument(default="runs")
@where_option("--where", "runs")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def status(runs: tuple[Path, ...], where: tuple[str, ...], as_json: bool) -> None:
    """Tell the state of every run in folders RUNS (default: runs), and why some failed.

    States: valid, invalid (no figure: a sanity check failed), failed, interrupted (told to stop, it can go on),
    incomplete (killed or still running; on the machine where it ran, what was killed is failed), and Slurm's own
    (PENDING, RUNNING) for jobs that have not ended.

    A job that waits is told with Slurm's reason and when it should start; a series that is not done, with how many of
    its runs are valid, and with the command that submits what is left.

    Ends with 3 if a run failed or a series was cut off, and with 4 if a file is damaged.

    \b
    Examples:
      dlbench status runs
      dlbench status runs --where series=nightly --where state=failed
    """
    from dlbench.jobs.campaign.outlook import outlooks
    from dlbench.reading.selection import select

    wanted = parse_where(where, "--where")
    training, comm = runs_at(*runs), read_comm_runs(runs)
    chosen = select([*training.runs, *comm.runs], named(runs), wanted, "--where")
    found, unread = outlooks(chosen)
    of_roots = _roots([*training.runs, *comm.runs], runs)
    # Of a series, whatever --where leaves out.
    every = found if not wanted else outlooks([*training.runs, *comm.runs])[0]
    series, damaged = _series(of_roots, wanted.get("series", ""), {one.run_id: one for one in every})
    # A folder without a readable plan may be of either kind, and both name it.
    problems = list(dict.fromkeys([*training.problems, *comm.problems, *unread, *damaged]))
    if as_json:
        content = {"runs": [_row(one) for one in found], "series": series, "problems": problems}
        click.echo(json.dumps(content, indent=2))
    else:
        _print(found, series)
    for problem in problems:
        click.echo(f"dlbench: damaged: {_one_line(problem)}", err=True)
    if problems:
        sys.exit(int(ExitCode.INCOMPLETE))
    if any(one.is_failed for one in found) or any(one["is_cut_off"] for one in series):
        sys.exit(int(ExitCode.RUN_FAILED))


def _print(found: Sequence[Outlook], series: Sequence[dict[str, Any]]) -> None:
    for one in found:
        click.echo(f"{one.state:<11} {one.run_id}" + (f"  job {one.job}" if one.job else ""))
        if one.story:
            click.echo(cleaned(f"            {_one_line(one.story)}"))
    for row in series:
        click.echo(f"series {row['series']}: {row['story']}")
    click.echo(f"{len(found)} run{'s' * (len(found) != 1)}, {sum(one.state == 'valid' for one in found)} valid")


def _row(one: Outlook) -> dict[str, str]:
    return {
        "run_id": one.run_id,
        "state": one.state,
        "job": one.job,
        "story": one.story,
        "reason": one.reason,
        "starts": one.starts,
    }


def _roots(runs: Sequence[LaunchedRun], given: Sequence[Path]) -> list[Path]:
    """The folders given and those below them in which runs lie, each once: where series may be written down."""
    from dlbench.cli.choosing import expanded

    roots = expanded(given)
    parents = (run.folder.path.parent for run in runs if run.folder.path not in roots)
    return list(dict.fromkeys([*roots, *parents]))


def _series(roots: Sequence[Path], wanted: str, found: Mapping[str, Outlook]) -> tuple[list[dict[str, Any]], list[str]]:
    """Each series that is not done, of them that of one name if `wanted` is not empty; what is damaged."""
    from dlbench.jobs.campaign.file import standings

    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    for root in roots:
        there, damaged = standings(root)
        problems += damaged
        for one in there:
            runs = [run_id for job in one.series.jobs for run_id in job.runs]
            valid = sum(run_id in found and found[run_id].state == "valid" for run_id in runs)
            if wanted in ("", one.series.id) and valid < len(runs):
                rows.append(_series_row(root, one, found, valid))
    return rows, problems


def _series_row(root: Path, one: Standing, found: Mapping[str, Outlook], valid: int) -> dict[str, Any]:
    from dlbench.cli.series import resume_command
    from dlbench.jobs.campaign.file import is_held
    from dlbench.jobs.campaign.outlook import counted
    from dlbench.sharing import user_name

    name, story = one.series.id, counted(one, found)
    is_left = one.submitted < one.total
    is_going_on = is_left and is_held(root, name)
    if is_left:
        story += f"; {one.text}; "
        if is_going_on:
            story += "dlbench submits the rest now"
        elif one.series.owner != user_name():
            story += f"user {one.series.owner} can submit the rest"
        else:
            story += f"the rest: {resume_command(name, root)}"
    return {
        "series": name,
        "owner": one.series.owner,
        "runs": sum(len(job.runs) for job in one.series.jobs),
        "valid": valid,
        "jobs": one.total,
        "submitted": one.submitted,
        # One that the queue has no more room for is gone on with later.
        "is_cut_off": is_left and not is_going_on and one.series.max_jobs is None,
        "story": story,
    }


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())

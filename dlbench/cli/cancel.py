"""`dlbench cancel`: the jobs of a series or of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlbench.cli.options import output_folder
from dlbench.errors import UserError

if TYPE_CHECKING:
    from dlbench.jobs.campaign.cancelling import Cancelled


@click.command()
@click.argument("series")
@output_folder()
def cancel(series: str, out: Path) -> None:
    """Cancel the jobs of SERIES (or of one run) that wait or run; what was never submitted is taken out of it.

    Only jobs that carry the mark of the series are cancelled. Runs that ended stay.

    \b
    Example:
      dlbench cancel nightly
    """
    from dlbench.cli.series import root_of
    from dlbench.jobs.campaign.cancelling import cancel_series
    from dlbench.jobs.campaign.file import read_series, series_path
    from dlbench.jobs.known_schedulers import scheduler_named

    root = root_of(out)
    if "/" not in series and series_path(root, series, "json").exists():
        done = cancel_series(root, series, scheduler_named(read_series(root, series).scheduler))
        click.echo(f"series {series}: {done.text}", err=True)
    else:
        done = _cancel_run(series, root)
        click.echo(f"run {series}: {done.text}", err=True)
    for job in done.jobs:
        click.echo(job)


def _cancel_run(run: str, root: Path) -> Cancelled:
    """Raises UserError: there is no such run, or it was not submitted."""
    from dlbench.cli.logs import run_folder
    from dlbench.jobs.campaign.cancelling import cancel_run
    from dlbench.jobs.known_schedulers import scheduler_named
    from dlbench.jobs.submission import read_submission

    folder = run_folder(run, root)
    submission = read_submission(folder)
    if submission is None:
        raise UserError(f"{run}: was not submitted to a scheduler, or nobody knows its job")
    return cancel_run(folder, submission, scheduler_named(submission.scheduler))

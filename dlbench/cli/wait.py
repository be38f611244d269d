"""`dlbench wait`: until nothing more is to come of a series."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlbench.cli.options import duration, output_folder
from dlbench.errors import ExitCode

if TYPE_CHECKING:
    from dlbench.jobs.campaign.outlook import Outcome


@click.command()
@click.argument("series")
@output_folder()
@click.option(
    "--timeout", default="24h", show_default=True, callback=duration, metavar="TIME", help="Give up after this time."
)
@click.option(
    "--every",
    default="60s",
    show_default=True,
    callback=duration,
    metavar="TIME",
    help="Time between two looks at Slurm.",
)
def wait(series: str, out: Path, timeout: float, every: float) -> None:
    """Wait until nothing more is to come of SERIES, and say how it ended.

    What Slurm's accounting says of its jobs is kept beside the runs (accounting.json), because it forgets.

    Ends with 0 if all its runs are valid, with 3 if one is not, and with 124 after the time-out, which cancels nothing.

    \b
    Example:
      dlbench wait nightly --timeout 2h && dlbench report runs
    """
    from dlbench.cli.series import left, root_of
    from dlbench.cli.streams import cleaned
    from dlbench.jobs.campaign.outlook import wait as wait_for
    from dlbench.jobs.interruption import Interruption
    from dlbench.units import format_seconds

    root = root_of(out)
    with Interruption() as interruption:
        now = wait_for(root, series, interruption.check, lambda text: click.echo(text, err=True), timeout, every)
        if now.is_over:
            _keep_accounting(root, now, interruption.check)
    wanted = [run_id for job in now.standing.series.jobs for run_id in job.runs]
    for one in (now.runs[run_id] for run_id in wanted if run_id in now.runs and now.runs[run_id].state != "valid"):
        click.echo(cleaned(f"{one.state}: {one.run_id}: {' '.join(one.story.splitlines())}"), err=True)
    click.echo(now.text)
    if now.standing.submitted < now.standing.total:
        click.echo(left(root, series, out), err=True)
    if not now.is_over:
        click.echo(f"dlbench: not over after {format_seconds(timeout)}; its jobs go on", err=True)
        sys.exit(int(ExitCode.TIMEOUT))
    if not now.is_valid:
        sys.exit(int(ExitCode.RUN_FAILED))


def _keep_accounting(root: Path, now: Outcome, check: Callable[[], None]) -> None:
    """Writes what Slurm says of the jobs beside their runs: many sites delete it after some time."""
    from dlbench.jobs.campaign.completing import sleep
    from dlbench.jobs.slurm.accounting import settled_accounting
    from dlbench.records.collectives_scan import read_launched

    if now.standing.series.scheduler != "slurm":
        return
    runs = [read_launched(root / run_id) for run_id in now.runs if (root / run_id).is_dir()]
    why_not = settled_accounting(runs, lambda seconds: sleep(seconds, check))
    if why_not:
        count, first = len(why_not), next(iter(why_not.values()))
        click.echo(f"note: no accounting of {count} run{'s' * (count > 1)}: {' '.join(first.splitlines())}", err=True)

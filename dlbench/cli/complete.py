"""`dlbench complete`: a series whose submission was cut off."""

from __future__ import annotations

from pathlib import Path

import click

from dlbench.cli.options import output_folder


@click.command()
@click.argument("series")
@output_folder()
@click.option("--give-up", is_flag=True, help="Take the jobs that were never submitted out of the series instead.")
def complete(series: str, out: Path, give_up: bool) -> None:
    """Submit what is left of SERIES, whose `dlbench submit` was cut off.

    Jobs that Slurm has already are found there and not submitted again, however often this is called.

    \b
    Example:
      dlbench complete 20261122-185934-f750 --out runs
    """
    from dlbench.cli.submit import complete_series
    from dlbench.errors import UserError
    from dlbench.jobs.campaign.series import give_up as drop
    from dlbench.jobs.campaign.series import standing
    from dlbench.jobs.interruption import Interruption
    from dlbench.jobs.slurm.sbatch import require_slurm

    root = out.absolute()
    if not root.is_dir():
        raise UserError(f"--out {out}: no such folder")
    now = standing(root, series)
    if give_up:
        now = drop(root, series)
    elif now.submitted < now.total:
        require_slurm()
        with Interruption() as interruption:
            complete_series(root, series, out, interruption)
        now = standing(root, series)
    click.echo(f"series {series}: {now.text}; next: dlbench status {out}", err=True)

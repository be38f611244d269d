"""`dlbench history acknowledge`: a change of level is known, and no longer a reason to fail."""

from __future__ import annotations

from pathlib import Path

import click

from dlbench.cli.history.store import open_store, store_options, where_option


@click.command()
@click.argument("series")
@click.argument("day")
@click.option("--reason", required=True, metavar="TEXT", help="Why it is no reason to act; shown with the change.")
@store_options
@where_option
def acknowledge(
    series: str, day: str, reason: str, store: Path | None, index: Path | None, where: tuple[str, ...]
) -> None:
    """Say that a change of SERIES on DAY is known, so that it is no longer called worse and fails no gate.

    SERIES and DAY are those that `dlbench history trends` shows with the change. Who, when and why are kept in the
    history and shown. The change comes back if the level gets worse still; to take the word back, delete its file in
    the folder acknowledged of the history.

    \b
    Example:
      dlbench history acknowledge 0123456789ab-8-2-step_median_s 2026-03-15 --reason "driver 560, vendor told"
    """
    from dlbench.cli.report import require_modules

    require_modules("history acknowledge", "numpy", "scipy")
    from dlbench.history.acknowledged import acknowledge as write
    from dlbench.history.acknowledged import read_acknowledged
    from dlbench.history.page.report import FOLLOWED, trends_of
    from dlbench.history.page.words import percent_change
    from dlbench.history.where import parse_where

    opened = open_store(store, index)
    metric = series.rpartition("-")[2]
    followed = FOLLOWED if metric in FOLLOWED else (metric,)
    found = trends_of(opened.entries(parse_where(where)), followed, read_acknowledged(opened.store))
    made = write(opened.store, found.series, series, day, reason)
    click.echo(f"acknowledged: {series}, {made.time[:10]}: {percent_change(made.ratio)}", err=True)

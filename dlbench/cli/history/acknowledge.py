"""`dlbench history acknowledge`: a change of level is known, and no longer a reason to fail."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

import click

from dlbench.cli.history.store import open_store, store_options, where_option
from dlbench.errors import UserError


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
    from dlbench.history.acknowledged import MAX_REASON, Acknowledgement, read_acknowledged
    from dlbench.history.acknowledged import acknowledge as write
    from dlbench.history.entry import parse_where
    from dlbench.history.page.report import FOLLOWED, trends_of
    from dlbench.history.page.words import percent_change
    from dlbench.units import utc_now

    if not reason.strip() or len(reason) > MAX_REASON:
        raise UserError(f"--reason: must say why, in 1 to {MAX_REASON} characters")
    opened = open_store(store, index)
    metric = series.rpartition("-")[2]
    followed = FOLLOWED if metric in FOLLOWED else (metric,)
    found = trends_of(opened.entries(parse_where(where)), followed, read_acknowledged(opened.store))
    trend = next((one for one in found.series if one.id == series), None)
    if trend is None:
        known = ", ".join(one.id for one in found.series if one.changes) or "none has changes"
        raise UserError(f"{series}: is no series of this history; with changes: {known}")
    change = next((one for one in trend.changes if one.time[:10] == day), None)
    if change is None:
        days = ", ".join(one.time[:10] for one in trend.changes) or "none"
        raise UserError(f"{day}: {series} has no change of that day; it has: {days}")
    if change.acknowledged is not None:
        word = change.acknowledged
        raise UserError(f"{day}: is acknowledged by {word.by} on {word.written[:10]}: {word.reason}")
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # In a container whose user has no name.
        user = f"user {os.getuid()}"
    made = Acknowledgement(
        group=trend.group,
        ranks=trend.ranks,
        nodes=trend.nodes,
        metric=trend.metric,
        time=change.time,
        through=change.first_after,
        level=change.after.value,
        ratio=change.ratio.value,
        reason=reason.strip(),
        by=user,
        written=utc_now(),
    )
    write(opened.store, made)
    click.echo(f"acknowledged: {series}, {day}: {percent_change(made.ratio)}", err=True)

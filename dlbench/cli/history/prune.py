"""`dlbench history prune`: what a history lets go."""

from __future__ import annotations

from pathlib import Path

import click

from dlbench.cli.history.store import open_store, store_options
from dlbench.errors import UserError


@click.command()
@click.option("--keep-days", type=float, required=True, metavar="N", help="Keep all runs of the last N days.")
@click.option(
    "--keep-last",
    type=int,
    default=0,
    metavar="N",
    help="Of comparable runs with equal ranks and nodes, keep the last N valid ones whatever their age (default: 0).",
)
@click.option(
    "--traces-only",
    is_flag=True,
    help="Keep the runs; take spans, profiles, checkpoints and logs out of them. Spans of each node's first rank stay, "
    "so that every figure can still be made.",
)
@click.option("--dry-run", is_flag=True, help="Print what would go; touch nothing.")
@store_options
def prune(
    keep_days: float, keep_last: int, traces_only: bool, dry_run: bool, store: Path | None, index: Path | None
) -> None:
    """Let old runs go, or only their traces; prints what went, and how many bytes.

    A run's age counts from its end; of a run that did not end, from its plan.

    \b
    Example:
      dlbench history prune --keep-days 30 --traces-only
      dlbench history prune --keep-days 365 --keep-last 20 --dry-run
    """
    from datetime import datetime, timezone

    from dlbench.history import prune as history_prune
    from dlbench.history.page.listing import removal_lines

    # NaN is neither.
    if not 0 <= keep_days <= 1_000_000:
        raise UserError(f"--keep-days {keep_days:g}: must be from 0 to 1000000")
    if keep_last < 0:
        raise UserError(f"--keep-last {keep_last}: must be 0 or more")
    opened = open_store(store, index)
    old = history_prune.beyond(
        opened.entries(), keep_days=keep_days, keep_last=keep_last, now=datetime.now(timezone.utc)
    )
    num_runs = len(opened.entries())
    chosen = history_prune.removals(opened, old, traces_only=traces_only)
    if not dry_run:
        history_prune.prune(opened, chosen)
    for line in removal_lines(chosen, dry_run=dry_run, num_runs=num_runs):
        click.echo(line.encode() + b"\n", nl=False)

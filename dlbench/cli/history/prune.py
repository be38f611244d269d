"""`dlbench history prune`: what a history lets go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlbench.cli.history.store import open_store, store_options
from dlbench.errors import UserError

if TYPE_CHECKING:
    from dlbench.history.reading import Removal


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
    from datetime import datetime

    from dlbench.history import reading as history_reading

    # NaN is neither.
    if not 0 <= keep_days <= 1_000_000:
        raise UserError(f"--keep-days {keep_days:g}: must be from 0 to 1000000")
    if keep_last < 0:
        raise UserError(f"--keep-last {keep_last}: must be 0 or more")
    opened = open_store(store, index)
    old = history_reading.beyond(opened.entries(), keep_days=keep_days, keep_last=keep_last, now=datetime.now(UTC))
    num_runs = len(opened.entries())
    chosen = history_reading.removals(opened, old, traces_only=traces_only)
    if not dry_run:
        history_reading.prune(opened, chosen)
    for line in _lines(chosen, dry_run=dry_run, num_runs=num_runs):
        click.echo(line.encode() + b"\n", nl=False)


def _lines(chosen: Sequence[Removal], *, dry_run: bool, num_runs: int) -> Iterator[str]:
    """What went, or would go, run by run, and the sum."""
    from dlbench.report.wording import clean, runs_text
    from dlbench.units import format_bytes

    verb = "would remove" if dry_run else "removed"
    for removal in chosen:
        files = len(removal.files)
        what = f"{files} file{'' if files == 1 else 's'} of " if files else ""
        yield f"{verb} {what}{clean(removal.entry.run_id)}: {format_bytes(removal.num_bytes)}"
    total = format_bytes(sum(removal.num_bytes for removal in chosen))
    yield f"{verb} {total} of {len(chosen)} of {runs_text(num_runs)}"

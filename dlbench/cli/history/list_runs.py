"""`dlbench history list`: what a history holds."""

from __future__ import annotations

from pathlib import Path

import click

from dlbench.cli.history.store import open_store, store_options, where_option


@click.command("list")
@store_options
@where_option
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "csv", "json"]),
    default="text",
    show_default=True,
    help="text: 80 columns; csv: a line a run; json: all that the index knows.",
)
def list_runs(store: Path | None, index: Path | None, where: tuple[str, ...], form: str) -> None:
    """List runs by the time they ended, with step time, hosts, Slurm job and commit.

    \b
    Example:
      dlbench history list --where workload=resnet50 --where host=n17
    """
    from dlbench.history.page import listing as history_text
    from dlbench.history.where import parse_where

    wanted = parse_where(where)
    entries = open_store(store, index).entries(wanted)
    to_text = {"text": history_text.to_text, "csv": history_text.to_csv, "json": history_text.to_json}[form]
    click.echo(to_text(entries).encode(), nl=False)

"""`dlbench history list`: what a history holds."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import click

from dlbench.cli.history.store import open_store, store_options, where_option
from dlbench.cli.options import write_output
from dlbench.cli.report import emit

FormatName = Literal["text", "csv", "json"]


@click.command("list")
@store_options
@where_option
@click.option(
    "--format",
    "form",
    type=click.Choice(get_args(FormatName)),
    default="text",
    show_default=True,
    help="text: 80 columns; csv: one line per run; json: all that the index knows.",
)
def list_runs(store: Path | None, index: Path | None, where: tuple[str, ...], form: FormatName) -> None:
    """List runs by the time they ended, with step time, hosts, Slurm job and commit.

    \b
    Example:
      dlbench history list --where workload=resnet50 --where host=n17
    """
    from dlbench.history.page.listing import list_document, to_json
    from dlbench.history.where import parse_where

    entries = open_store(store, index).entries(parse_where(where))
    if form == "json":
        write_output(to_json(entries).encode("utf-8"), None)
    else:
        emit(list_document(entries), form, None, "runs")

"""`dlbench history rebuild`: the index made anew."""

from __future__ import annotations

from pathlib import Path

import click

from dlbench.cli.history.store import open_store, store_options


@click.command()
@store_options
def rebuild(store: Path | None, index: Path | None) -> None:
    """Make the index anew from the folders of runs.

    Nothing is lost by it: the index is a cache. A damaged index, or one of another version, is made anew by itself.
    """
    opened = open_store(store, index)
    opened.rebuild()
    runs = len(opened.entries())
    click.echo(f"{runs} run{'' if runs == 1 else 's'} indexed")

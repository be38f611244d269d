"""`dlbench history export`: runs of a history as one file."""

from __future__ import annotations

from pathlib import Path

import click

from dlbench.cli.history.store import note, open_store, store_options, where_option


@click.command("export")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE.tar[.gz]",
    help="The archive; .gz or .tgz: compressed.",
)
@store_options
@where_option
def export_runs(output: Path, store: Path | None, index: Path | None, where: tuple[str, ...]) -> None:
    """Write runs as a tar archive that `dlbench history import` reads; equal runs give equal bytes.

    \b
    Example:
      dlbench history export -o march.tar.gz --where system=cluster
    """
    from dlbench.history.archive import write_archive
    from dlbench.history.entry import parse_where
    from dlbench.units import format_bytes

    wanted = parse_where(where)
    opened = open_store(store, index)
    entries = []
    for entry in opened.entries(wanted):
        if entry.state == "damaged":
            note(f"left out: {entry.folder}: damaged: {entry.why}")
        else:
            entries.append(entry)
    write_archive(opened, entries, output)
    runs = "1 run" if len(entries) == 1 else f"{len(entries)} runs"
    click.echo(f"wrote {output}: {runs}, {format_bytes(output.stat().st_size)}", err=True)

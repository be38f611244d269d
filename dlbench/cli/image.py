"""`dlbench image`: the environment of the ranks as one file."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.group()
def image() -> None:
    """Pack the environment of the ranks into one file, which nodes unpack for themselves."""


@image.command()
@click.option(
    "--python", metavar="PY", help="Python of a virtual or conda environment with dlbench (default: this one)."
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The image: FILE.tar, FILE.tar.zst or FILE.sqsh.",
)
def build(python: str | None, output: Path) -> None:
    """Write an image of an environment, and FILE.json, which describes it.

    A thousand ranks that load Python from a shared file system open millions of files there; with an image each node
    reads one. Name it in the system file, `image.file`: jobs send it to their nodes, check its SHA-256, unpack it on
    the node's own disk and remove it at their end.

    An editable dlbench is copied in. The interpreter is, too, unless it is the operating system's.

    \b
    Example:
      dlbench image build -o /shared/me/dlbench.tar
    """
    from dlbench.setup.image.pack import pack
    from dlbench.setup.image.survey import survey
    from dlbench.units import format_bytes

    path = output.absolute()
    made = pack(survey(python or sys.executable), path, lambda line: click.echo(line, err=True))
    for folder in made.outside:
        click.echo(f"note: {folder} is not in it: modules there are still loaded from it", err=True)
    click.echo(f"{path}: {format_bytes(made.bytes)}, {made.files:,} files, SHA-256 {made.sha256}")
    click.echo(f"next: in the system file\nimage:\n  file: {path}")

"""`dlbench setup`: makes a machine ready."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from dlbench.cli.streams import cleaned, terminal


@click.group()
def setup() -> None:
    """Make this machine ready."""


@setup.command()
@click.option("--rebuild", is_flag=True, help="Build even if a wheel for this toolchain is cached.")
@click.option(
    "--source",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Horovod's source archive, for machines without a network (also DLBENCH_HOROVOD_SDIST).",
)
def horovod(rebuild: bool, source: Path | None) -> None:
    """Build Horovod from PyPI's source for this Python and torch, and install it.

    Gloo always; MPI where it is found; NCCL where torch is built for CUDA and nvcc is found. The wheel is kept in
    DLBENCH_CACHE (default ~/.cache/dlbench), so the next environment with the same toolchain gets it in seconds. Needs
    g++, make and cmake; no root.

    \b
    Example:
      dlbench setup horovod
    """
    from dlbench.setup.horovod import install

    if not sys.stderr.isatty():
        install(lambda line: click.echo(line, err=True), rebuild=rebuild, source=source)
        return
    from rich.text import Text

    console = terminal()
    with console.status("Horovod") as status:

        def say(line: str) -> None:
            status.update("Horovod")
            console.print(Text(cleaned(line)), soft_wrap=True)

        install(say, rewrite=lambda line: status.update(Text(cleaned(line))), rebuild=rebuild, source=source)

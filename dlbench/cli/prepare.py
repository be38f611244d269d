"""`dlbench prepare`: one folder for machines without a network."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--extra",
    "extras",
    multiple=True,
    metavar="NAME",
    help="Packages beside the core's, e.g. node (torch), analysis, data; repeatable.",
)
@click.option("--horovod", is_flag=True, help="Also Horovod's wheel, built here for this torch; needs --extra node.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Also this folder of data sets, e.g. of dlbench data demo.",
)
def prepare(folder: Path, extras: tuple[str, ...], horovod: bool, data: Path | None) -> None:
    """Put all that an installation needs into FOLDER, for machines without a network.

    Copy the folder there; FOLDER/install.sh checks its files' SHA-256 and makes a virtual environment. pip fetches
    packages as it is configured here, for this version of Python and this kind of machine.

    \b
    Example:
      dlbench prepare dlbench-offline --extra node --extra analysis --horovod
      dlbench-offline/install.sh /shared/me/dlbench
    """
    from dlbench.errors import UserError
    from dlbench.setup.prepare.folder import prepare as made
    from dlbench.units import format_bytes

    if horovod and "node" not in extras:
        raise UserError("--horovod needs torch beside it: add --extra node")
    path = folder.absolute()
    size = made(path, extras, with_horovod=horovod, data=data, say=lambda line: click.echo(line, err=True))
    click.echo(f"{path}: {format_bytes(size)}")
    click.echo(f"next, where there is no network: {path.name}/install.sh NEW-FOLDER")

"""`dlbench box`: a real Slurm cluster on this machine, for trying batch scripts and launchers."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

_FOLDER = click.argument("folder", type=click.Path(path_type=Path, file_okay=False))


@click.group()
def box() -> None:
    """A real Slurm cluster in one box: every node is a network of its own on this machine (root only).

    \b
    Example:
      eval "$(dlbench box start /tmp/box --nodes 2)"
      srun -N2 --ntasks-per-node=2 hostname
      dlbench box stop /tmp/box
    """


@box.command()
@_FOLDER
@click.option("--nodes", default=2, show_default=True, help="Nodes, 1 to 8.")
@click.option(
    "--cpus-per-node", default=2, show_default=True, help="Processors each node claims to have; they need not exist."
)
@click.option("--timeout", "timeout_s", default=60.0, show_default=True, help="Seconds to wait for idle nodes.")
def start(folder: Path, nodes: int, cpus_per_node: int, timeout_s: float) -> None:
    """Start a box that keeps its files in FOLDER and print what a shell needs to use it.

    \b
    Example:
      eval "$(dlbench box start /tmp/box --nodes 4)"
    """
    from dlbench.jobs.box.box import Box

    started = Box.start(folder, nodes, cpus_per_node, timeout_s)
    click.echo(f"box of {nodes} nodes with {cpus_per_node} processors each: {', '.join(started.node_names)}", err=True)
    for name, value in started.environment.items():
        click.echo(f"export {name}={shlex.quote(value)}")


@box.command()
@_FOLDER
def stop(folder: Path) -> None:
    """End the box in FOLDER: its jobs, its daemons and its networks. The logs stay.

    \b
    Example:
      dlbench box stop /tmp/box
    """
    from dlbench.jobs.box.box import Box

    if Box.was_stopped(folder):
        click.echo(f"no box runs in {folder} any more", err=True)
        return
    Box.attach(folder).stop()
    click.echo(f"the box in {folder} is gone; its logs are in {folder / 'log'}", err=True)


@box.command()
@_FOLDER
def status(folder: Path) -> None:
    """Say which daemons of the box in FOLDER run, and Slurm's state of each node. Ends with 3 if one is dead.

    \b
    Example:
      dlbench box status /tmp/box
    """
    from dlbench.errors import RunError
    from dlbench.jobs.box.box import Box

    found = Box.attach(folder)
    for process in found.processes:
        click.echo(f"{process.role:<12} pid {process.pid:<8} {'runs' if process.is_alive() else 'DEAD'}")
    if not found.is_alive():
        raise RunError(f"the box in {folder} is broken: `dlbench box stop {folder}` cleans up; see {folder / 'log'}")
    for node, node_state in found.node_states().items():
        click.echo(f"{node:<12} {node_state}")


@box.command()
@_FOLDER
@click.argument("rate")
def shape(folder: Path, rate: str) -> None:
    """Limit the links between the nodes of the box in FOLDER to RATE, such as 200mbit; `none` frees them.

    \b
    Example:
      dlbench box shape /tmp/box 200mbit
    """
    from dlbench.jobs.box.box import Box

    found = Box.attach(folder)
    if rate == "none":
        found.unshape()
        click.echo("links are free", err=True)
        return
    found.shape(rate)
    click.echo(f"every node's link is limited to {rate} in each direction", err=True)

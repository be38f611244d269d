"""`dlbench box`: a real Slurm cluster on this machine, for trying batch scripts and launchers."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dlbench.errors import RunError

_FOLDER = click.argument("folder", type=click.Path(path_type=Path, file_okay=False))


def _many(name: str, field: str, words: str) -> Callable[..., Any]:
    return click.option(name, field, multiple=True, metavar="TEXT", help=f"{words} Repeatable.")


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
@_many("--gres", "gres", "Devices that are counted and do not exist: gpu:a100:4 of every node, n1=gpu:a100:4 of one.")
@_many("--features", "features", "What --constraint asks for: a100,nvlink of every node, n2=h100 of one.")
@_many(
    "--partition",
    "partitions",
    "A name and words of slurm.conf: 'debug Nodes=n1 MaxTime=30'; the first is the default.",
)
@click.option("--switches", default=0, help="Leaf switches of a tree, each with an uplink; without it no topology.")
@click.option("--sockets", default=0, help="Sockets of a node: jobs are given cores, tasks bound to those that exist.")
@click.option("--threads-per-core", default=1, show_default=True, help="With --sockets.")
@click.option("--memory", "memory_mb", default=0, help="MiB of a node, asked for by --mem; without it not counted.")
@click.option(
    "--accounting", is_flag=True, help="slurmdbd on a MariaDB of the box's own: sacct, accounts, QOS, limits."
)
@_many("--account", "accounts", "With --accounting, of every user; the first is the default.")
@_many("--qos", "qos", "With --accounting, a name and words of sacctmgr: 'high Priority=100 Preempt=normal'.")
@_many("--user", "users", "With --accounting, a user of this machine who may use the box besides root.")
@click.option("--pfs", default="", metavar="RATE", help="A file system in FOLDER/pfs, throttled to e.g. 10MB/s.")
@click.option("--private-jobs", is_flag=True, help="Users see only their own jobs.")
@click.option(
    "--preempt",
    type=click.Choice(["none", "qos", "partition"]),
    default="none",
    help="Whose jobs yield: they are requeued.",
)
def start(folder: Path, nodes: int, cpus_per_node: int, timeout_s: float, **has: Any) -> None:
    """Start a box that keeps its files in FOLDER and print what a shell needs to use it.

    \b
    Example:
      eval "$(dlbench box start /tmp/box --nodes 4)"
    """
    from dlbench.jobs.box.box import Box
    from dlbench.jobs.box.config import Equipment
    from dlbench.jobs.processes import interrupted_by_signals

    with interrupted_by_signals():
        started = Box.start(folder, nodes, cpus_per_node, timeout_s, Equipment(**has))
    click.echo(f"box of {nodes} nodes with {cpus_per_node} processors each: {', '.join(started.node_names)}", err=True)
    if started.plan.equipment.sockets and not started.plan.binds_tasks:
        words = "cores are given to jobs, but tasks are not bound: a node claims more processors than this machine has"
        click.echo(words, err=True)
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
@click.option("--uplink", metavar="RATE", help="Rate of each leaf switch's uplink (see --switches); without it free.")
def shape(folder: Path, rate: str, uplink: str | None) -> None:
    """Limit the links between the nodes of the box in FOLDER to RATE, such as 200mbit; `none` frees them.

    \b
    Example:
      dlbench box shape /tmp/box 200mbit
      dlbench box shape /tmp/box 200mbit --uplink 100mbit
    """
    from dlbench.jobs.box.box import Box

    found, limit = Box.attach(folder), None if rate == "none" else rate
    found.shape(limit, uplink)
    words = "nodes' links are free" if limit is None else f"every node's link is limited to {rate} in each direction"
    if uplink is not None:
        words += f", every uplink to {uplink}"
    elif found.plan.leaf_links:
        words += ", uplinks are free"
    click.echo(words, err=True)

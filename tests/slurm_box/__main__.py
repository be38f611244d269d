"""The commands of a Slurm cluster on this machine: `python -m tests.slurm_box start|status|stop|shape FOLDER`."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from dlbench.errors import DlbenchError
from dlbench.jobs.processes import interrupted_by_signals
from tests.slurm_box.box import Box
from tests.slurm_box.config import Equipment


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.slurm_box", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("start", help="start a box, and print what a shell needs to use it")
    start.add_argument("--nodes", type=int, default=2, help="nodes, 1 to 8 (default: 2)")
    start.add_argument("--cpus-per-node", type=int, default=2, help="processors that each claims to have (default: 2)")
    start.add_argument("--switches", type=int, default=0, help="leaf switches, each with an uplink (default: none)")
    status = commands.add_parser("status", help="say which daemons run, and Slurm's state of each node")
    stop = commands.add_parser("stop", help="end its jobs, daemons and networks; its logs stay")
    shape = commands.add_parser("shape", help="limit the links between its nodes")
    for command in (start, status, stop, shape):
        command.add_argument("folder", type=Path, help="where the box keeps its files")
    shape.add_argument("rate", help="of every node's link, such as 200mbit; none frees them")
    shape.add_argument("--uplink", metavar="RATE", help="of every leaf switch's uplink (default: free)")
    return parser


def _start(asked: argparse.Namespace) -> None:
    with interrupted_by_signals():
        box = Box.start(asked.folder, asked.nodes, asked.cpus_per_node, has=Equipment(switches=asked.switches))
    print(f"box with nodes {', '.join(box.node_names)}", file=sys.stderr)
    for name, value in box.environment.items():
        print(f"export {name}={shlex.quote(value)}")


def _status(asked: argparse.Namespace) -> None:
    box = Box.attach(asked.folder)
    for process in box.processes:
        print(f"{process.role:<12} pid {process.pid:<8} {'runs' if process.is_alive() else 'DEAD'}")
    for node, state in box.node_states().items():
        print(f"{node:<12} {state}")


def _stop(asked: argparse.Namespace) -> None:
    if not Box.was_stopped(asked.folder):
        Box.attach(asked.folder).stop()
    print(f"the box in {asked.folder} is gone; its logs are in {asked.folder / 'log'}", file=sys.stderr)


def _shape(asked: argparse.Namespace) -> None:
    Box.attach(asked.folder).shape(None if asked.rate == "none" else asked.rate, asked.uplink)


def main() -> int:
    """Does what the command line asks for; returns the exit code."""
    asked = _parser().parse_args()
    act = {"start": _start, "status": _status, "stop": _stop, "shape": _shape}[asked.command]
    try:
        act(asked)
    except DlbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())

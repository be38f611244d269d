"""What `dlbench comm run` and `submit` are asked, and the plans that it makes."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import click

from dlbench.cli.options import F, decorated, output_folder
from dlbench.errors import UserError

if TYPE_CHECKING:
    from dlbench.specs.collectives.request import CommRuns

# A library's name, and what the ranks import.
_LIBRARIES = ("horovod", "mpi4py")


def measure_options(function: F) -> F:
    """Options that say what to measure; `runs_of` reads them."""
    decorators = [
        click.option(
            "--collective",
            metavar="NAME",
            default="allreduce",
            show_default=True,
            help="allreduce, reduce-scatter, all-gather, broadcast or all-to-all.",
        ),
        click.option(
            "--algorithms",
            metavar="all|A,B|none",
            default="all",
            show_default=True,
            help="dlbench's own; all: those that the layout permits.",
        ),
        click.option(
            "--backends",
            metavar="auto|A,B|none",
            default="auto",
            show_default=True,
            help="Libraries timed as references: gloo, mpi, nccl, horovod; auto: those at hand.",
        ),
        click.option(
            "--sizes",
            metavar="LOW:HIGH[:COUNT]|A,B",
            default="1KiB:64MiB",
            show_default=True,
            help="Bytes of each rank's buffer; a range takes factor 4, or COUNT sizes.",
        ),
        click.option("--dtype", metavar="NAME", default="fp32", show_default=True, help="fp32, fp16 or bf16."),
        click.option(
            "--transport",
            metavar="torch|mpi",
            default="torch",
            show_default=True,
            help="What carries the algorithms' messages: torch.distributed, or mpi4py.",
        ),
        click.option(
            "--iterations", type=int, metavar="N", default=10, show_default=True, help="Timed iterations of a point."
        ),
        click.option("--warmup", type=int, metavar="N", default=2, show_default=True, help="Iterations before them."),
        click.option("--group-size", type=int, metavar="N", help="Ranks of a group (default: those of a node)."),
        click.option("--shards", type=int, metavar="N", help="Servers of parameter-server (default: every rank)."),
        click.option(
            "--repeats", type=int, metavar="N", default=1, show_default=True, help="Runs of each count, interleaved."
        ),
        click.option("--launcher", metavar="NAME", help="local, mpirun, srun-mpi or srun-gloo."),
        click.option("--ranks-per-node", type=int, metavar="N", help="Ranks on each node (default: the system's)."),
        click.option("--set", "overrides", multiple=True, metavar="system.KEY=VALUE", help="Change a system's key."),
        click.option(
            "--timeout",
            type=float,
            default=60.0,
            show_default=True,
            metavar="SECONDS",
            help="Longest time of one iteration; then the run is given up.",
        ),
        click.option("--series", metavar="NAME", help="Name of the series (default: time and a random mark)."),
        output_folder(),
        click.option("--dry-run", is_flag=True, help="Print what would be run; touch nothing."),
    ]
    return decorated(function, decorators)


def runs_of(options: dict[str, Any], *, system: str, points: tuple[int, ...], points_are: str) -> CommRuns:
    """The options of `measure_options` as plans.

    Raises:
        UserError: anything wrong with them, in one line.
    """
    from dlbench.specs.collectives.request import CommRequest, expand_comm
    from dlbench.specs.requests import parse_set

    for name, least in (("iterations", 1), ("warmup", 0), ("group_size", 1), ("shards", 1), ("ranks_per_node", 1)):
        _at_least(name, options[name], least)
    _at_least("repeats", options["repeats"], 1)
    if not 0 < options["timeout"] < float("inf"):
        raise UserError(f"--timeout {options['timeout']:g}: must be a number of seconds above 0")
    request = CommRequest(
        **{name: options[name] for name in ("collective", "algorithms", "backends", "sizes", "dtype", "transport")},
        **{name: options[name] for name in ("iterations", "warmup", "group_size", "shards", "launcher", "series")},
        timeout_s=options["timeout"],
        system=system,
        points=points,
        points_are="nodes" if points_are == "nodes" else "ranks",
        ranks_per_node=options["ranks_per_node"],
        repeats=options["repeats"],
        overrides=parse_set(options["overrides"]),
    )
    installed = [name for name in _LIBRARIES if importlib.util.find_spec(name) is not None]
    return expand_comm(request, machine_cores=len(os.sched_getaffinity(0)), installed=installed)


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise UserError(f"--{name.replace('_', '-')} {value}: must be {least} or more")

"""`dlbench comm`: the collective benchmark; here its runs, in `comm_read` what is made of them."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dlbench.cli import options as shared
from dlbench.cli.comm.reading import fit, predict, report
from dlbench.errors import EnvironmentLacksError, UserError

if TYPE_CHECKING:
    from dlbench.specs.collectives.plan import CommPlan
    from dlbench.specs.collectives.request import CommRuns

F = TypeVar("F", bound=Callable[..., Any])

# A library's name, and what the ranks import.
_LIBRARIES = ("horovod", "mpi4py")


class InOrder(click.Group):
    """Lists commands in the order of work."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=InOrder)
def comm() -> None:
    """Measure collectives: dlbench's own algorithms, message by message, and libraries beside them.

    Every result is checked against the sum computed apart, and steps and bytes are counted.
    """


def _asked(function: F) -> F:
    """Options that say what to measure; `_runs_of` reads them."""
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
        click.option(
            "--out",
            type=click.Path(path_type=Path),
            default=Path("runs"),
            show_default=True,
            help="Folder of all runs.",
        ),
        click.option("--dry-run", is_flag=True, help="Print what would be run; touch nothing."),
    ]
    return shared.decorated(function, decorators)


@click.command()
@_asked
@click.option("--ranks", default="2", show_default=True, metavar="2,4", help="Rank counts.")
@click.option("--system", default="local", show_default=True, metavar="NAME|FILE", help="System file.")
@click.option("--no-progress", is_flag=True, help="Plain lines instead of a progress bar.")
def run(ranks: str, system: str, no_progress: bool, **options: Any) -> None:
    """Measure a collective on this machine, or inside an allocation, at each rank count.

    \b
    Example:
      dlbench comm run --ranks 2,4 --algorithms ring,direct --sizes 1KiB:64MiB
      dlbench comm run --ranks 4 --launcher mpirun --transport mpi --group-size 2
    """
    from dlbench.cli.run import print_commands, require_here, run_all, shown
    from dlbench.specs.requests import parse_counts

    made = _runs_of(options, system=system, points=parse_counts(ranks, "--ranks"), points_are="ranks")
    require_here(made.plans[0].system)
    if not options["dry_run"]:
        _require_libraries(made.plans)
    _tell(made)
    if options["dry_run"]:
        print_commands(made.plans, options["out"])
        return
    following = f"dlbench comm report {shown(options['out'])}"
    bar = sys.stderr.isatty() and not no_progress
    sys.exit(int(run_all(made.plans, options["out"], following, fail_fast=False, bar=bar)))


@click.command()
@_asked
@shared.submit_options("2,4")
def submit(system: str, nodes: str | None, ranks: str | None, chain: bool, **options: Any) -> None:
    """Measure a collective in Slurm jobs, one a run; --dry-run prints the exact scripts.

    \b
    Example:
      dlbench comm submit --system box --nodes 2,4 --repeats 3 --dry-run
      dlbench comm submit --system my-cluster.yaml --nodes 2,4,8 --algorithms ring,hierarchical
    """
    from dlbench.cli.submit import print_scripts, require_scheduler, submit_all
    from dlbench.specs.requests import parse_counts

    if (nodes is None) == (ranks is None):
        raise UserError("give either --nodes or --ranks, e.g. --nodes 2,4")
    points = parse_counts(nodes, "--nodes") if nodes is not None else parse_counts(ranks or "", "--ranks")
    made = _runs_of(options, system=system, points=points, points_are="ranks" if nodes is None else "nodes")
    require_scheduler(made.plans[0].system, options["out"], "dlbench comm run")
    _tell(made)
    if options["dry_run"]:
        print_scripts(made.plans, options["out"])
        return
    submit_all(made.plans, options["out"], chain)


def _runs_of(options: dict[str, Any], *, system: str, points: tuple[int, ...], points_are: str) -> CommRuns:
    """The options as plans.

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


def _tell(made: CommRuns) -> None:
    """What was chosen for the person, once nothing is wrong any more."""
    for note in made.notes:
        click.echo(f"note: {note}", err=True)


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise UserError(f"--{name.replace('_', '-')} {value}: must be {least} or more")


def _require_libraries(plans: list[CommPlan]) -> None:
    """Proves that what the ranks import is installed in this environment; imports nothing heavy.

    Raises:
        EnvironmentLacksError: a library is missing; names the remedy.
    """
    spec = plans[0].comm
    if plans[0].system.python:
        return  # another environment's business
    wanted = [("torch", "torch", shared.INSTALL_NODE)]
    if spec.transport == "mpi" or "mpi" in spec.backends:
        wanted.append(("mpi4py", "mpi4py, which carries MPI,", shared.INSTALL_MPI))
    if "horovod" in spec.backends:
        wanted.append(("horovod", "back-end horovod", f"{shared.SETUP_HOROVOD}, or choose other --backends"))
    for module, what, remedy in wanted:
        if importlib.util.find_spec(module) is None:
            raise EnvironmentLacksError(f"{what} is not installed in {sys.prefix}; remedy: {remedy}")


# In the order of work.
for command in (run, submit, report, fit, predict):
    comm.add_command(command)

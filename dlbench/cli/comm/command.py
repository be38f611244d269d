"""`dlbench comm`: the collective benchmark; here its runs, in `reading` what is made of them."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import click

from dlbench.cli import options as shared
from dlbench.cli.comm.options import measure_options, runs_of
from dlbench.cli.comm.reading import fit, predict, report
from dlbench.errors import EnvironmentLacksError, UserError

if TYPE_CHECKING:
    from dlbench.specs.collectives.plan import CommPlan
    from dlbench.specs.collectives.request import CommRuns


WIDTH = 80
"""Columns of notes."""


class InOrder(click.Group):
    """Lists commands in the order of work."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=InOrder)
def comm() -> None:
    """Measure collectives: dlbench's own algorithms, message by message, and libraries beside them.

    Every result is checked against the sum computed apart, and steps and bytes are counted.
    """


@click.command()
@measure_options
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
    from dlbench.cli.run import print_commands, require_here, require_room, run_all, shown
    from dlbench.specs.requests import parse_counts

    made = runs_of(options, system=system, points=parse_counts(ranks, "--ranks"), points_are="ranks")
    require_here(made.plans[0].system)
    require_room(made.plans)
    if not options["dry_run"]:
        _require_libraries(made.plans)
    _print_notes(made)
    if options["dry_run"]:
        print_commands(made.plans, options["out"])
        return
    following = f"dlbench comm report {shown(options['out'])}"
    bar = sys.stderr.isatty() and not no_progress
    sys.exit(int(run_all(made.plans, options["out"], following, fail_fast=False, bar=bar)))


@click.command()
@measure_options
@shared.submit_options("2,4")
def submit(system: str, nodes: str | None, ranks: str | None, all_scripts: bool, **options: Any) -> None:
    """Measure a collective in Slurm jobs, one per node count; --dry-run lists them and prints the first script.

    \b
    Example:
      dlbench comm submit --system box --nodes 2,4 --repeats 3 --dry-run
      dlbench comm submit --system my-cluster.yaml --nodes 2,4,8 --algorithms ring,hierarchical
    """
    from dlbench.cli.submit import campaign_from, print_scripts, require_scheduler, submit_all
    from dlbench.specs.requests import parse_counts

    if (nodes is None) == (ranks is None):
        raise UserError("give either --nodes or --ranks, e.g. --nodes 2,4")
    points = parse_counts(nodes, "--nodes") if nodes is not None else parse_counts(ranks or "", "--ranks")
    made = runs_of(options, system=system, points=points, points_are="ranks" if nodes is None else "nodes")
    require_scheduler(made.plans[0].system, options["out"], "dlbench comm run")
    campaign = campaign_from(made.plans, options)
    _print_notes(made)
    if options["dry_run"]:
        print_scripts(campaign, options["out"], all_scripts=all_scripts)
        return
    submit_all(campaign, options)


def _print_notes(made: CommRuns) -> None:
    """What was chosen for lack of an option, once nothing is wrong any more."""
    for note in made.notes:
        for line in textwrap.wrap(f"note: {note}", WIDTH, subsequent_indent="  ", break_on_hyphens=False):
            click.echo(line, err=True)


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

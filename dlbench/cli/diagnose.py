"""`dlbench diagnose`: where the lost percent goes, which ranks straggle, and what to try next."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from dlbench.cli.choosing import named, read_runs, runs_argument, where_option
from dlbench.cli.report import check_writable, emit, format_by_suffix, require_modules
from dlbench.errors import ExitCode

if TYPE_CHECKING:
    from dlbench.records.scan import Scan

FormatName = Literal["text", "json"]

SUFFIXES: dict[str, FormatName] = {".json": "json", ".txt": "text"}


@click.command()
@runs_argument()
@where_option("--where", "runs")
@click.option(
    "--network",
    metavar="FILE.network.json",
    type=click.Path(path_type=Path),
    help="Fitted costs of the network (dlbench comm fit), for forecasts of other exchanges.",
)
@click.option(
    "--slurm", is_flag=True, help="Ask Slurm's accounting (sacct) what the jobs consumed, beside the samples."
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write (default: standard output).")
@click.option(
    "--format",
    "format_name",
    type=click.Choice(["text", "json"]),
    help="Default: what the name of the output file says, else text.",
)
@click.option("--full", is_flag=True, help="Text with all tables; default: one screen per group.")
def diagnose(
    runs: tuple[Path, ...],
    where: tuple[str, ...],
    network: Path | None,
    slurm: bool,
    output: Path | None,
    format_name: FormatName | None,
    full: bool,
) -> None:
    """Show where the lost percent of RUNS (folders of runs, single runs, histories) goes, and what to try next.

    \b
    For every group of comparable runs and every rank count:
      one line with the diagnosis and the next experiment;
      the mean step and the points lost by cause, with intervals; they sum to
      the whole;
      stragglers, and what made them so;
      telemetry and energy of all runs.
    Over all runs: slow nodes, as an --exclude list for sbatch; decompositions.

    Ends with 4 if a file is damaged or no run has figures; what can be reported is reported all the same.

    \b
    Examples:
      dlbench diagnose runs
      dlbench diagnose runs --where workload=resnet50
      dlbench diagnose runs --network box.network.json
      dlbench diagnose runs -o diagnosis.json
    """
    if output is not None:
        check_writable(output)
    chosen = format_by_suffix(output, format_name, SUFFIXES, "text")
    require_modules("diagnose", "numpy", "pandas")
    from dlbench.records.network import read_network
    from dlbench.views.diagnosis import diagnosis

    costs = None if network is None else read_network(network)
    scanned = read_runs(runs, where)
    found, document = diagnosis(scanned, costs, _asked_of_slurm(scanned) if slurm else None)
    emit(document, chosen, output, full=full)
    for line in found.damaged:
        click.echo(f"dlbench: damaged: {line}", err=True)
    if not found.groups:
        click.echo(f"dlbench: {named(runs)}: no run has figures; the diagnosis says why", err=True)
    if found.damaged or not found.groups:
        sys.exit(int(ExitCode.INCOMPLETE))


def _asked_of_slurm(scanned: Scan) -> dict[str, float]:
    """Joules of the runs' jobs, by run id; says on standard error of which there are none, and why."""
    from dlbench.jobs.slurm.accounting import job_energies
    from dlbench.report.wording import clean

    found, why = job_energies(scanned.runs)
    for reason in dict.fromkeys(why.values()):
        names = [name for name, text in why.items() if text == reason]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        click.echo(f"dlbench: Slurm reports no energy of {clean(names[0])}{more}: {clean(reason)}", err=True)
    if not found and not why:
        click.echo("dlbench: --slurm: none of these runs was submitted to Slurm", err=True)
    return found

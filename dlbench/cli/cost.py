"""`dlbench cost`: what a campaign cost by Slurm's accounting."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from dlbench.cli.choosing import named, read_runs, runs_argument, where_option
from dlbench.cli.report import emit, prepared
from dlbench.errors import ExitCode


@click.command()
@runs_argument(default="runs")
@where_option("--where", "runs")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write: .html, .md, .json, .csv or .txt.")
@click.option("--full", is_flag=True, help="Run by run.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def cost(runs: tuple[Path, ...], where: tuple[str, ...], output: Path | None, full: bool, as_json: bool) -> None:
    """Tell what the Slurm jobs of RUNS (default: runs) cost: node-hours asked for, held and wasted, queue wait, memory,
    energy, by point and by result.

    Slurm is asked once for all jobs that have ended, and its answer kept beside each run (accounting.json), because it
    forgets. Without accounting, squeue knows a job's times for some minutes; what the runs' own records tell (start,
    measured steps, the rest) stands beside.

    Ends with 6 where Slurm tells nothing, with 4 if a run is damaged.

    \b
    Examples:
      dlbench cost runs
      dlbench cost runs --where series=nightly -o cost.html
    """
    from dlbench.jobs.slurm.accounting import with_accounting
    from dlbench.report.wording import clean
    from dlbench.views.campaign_cost import campaign_cost, cost_document, recorded_parts, recorded_text

    chosen = prepared("cost", output, "json" if as_json else None, needs=())
    scanned = read_runs(runs, where)
    found, why_not = with_accounting(scanned.runs)
    whole = campaign_cost(found)
    for reason in dict.fromkeys(why_not.values()):
        names = [name for name, text in why_not.items() if text == reason]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        click.echo(f"dlbench: no cost of {clean(names[0])}{more}: {clean(reason)}", err=True)
    for problem in scanned.problems:
        click.echo(f"dlbench: damaged: {problem}", err=True)
    if whole is not None:
        emit(cost_document(whole), chosen, output, "cost-points", full=full)
    elif as_json:
        click.echo(json.dumps(None))
    elif recorded := recorded_parts(found):
        click.echo(f"Cost by Slurm: not measured. {recorded_text(recorded)}")
    if scanned.problems:
        sys.exit(int(ExitCode.INCOMPLETE))
    if whole is None:
        if not why_not:
            click.echo(f"dlbench: {named(runs)}: none of these runs was submitted to Slurm", err=True)
        sys.exit(int(ExitCode.INCONCLUSIVE))

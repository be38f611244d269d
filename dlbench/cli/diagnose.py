"""`dlbench diagnose`: where the lost percent goes, who waits for whom, and what to try next."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from dlbench.cli.options import write_output
from dlbench.cli.report import check_writable, format_by_suffix, require_modules
from dlbench.errors import ExitCode

if TYPE_CHECKING:
    from dlbench.records.scan import Run, Scan
    from dlbench.views.causes.diagnosis_model import Diagnosis
    from dlbench.views.energy.of_runs import EnergyPoint

FormatName = Literal["text", "json"]

SUFFIXES: dict[str, FormatName] = {".json": "json", ".txt": "text"}


@click.command()
@click.argument("runs", type=click.Path(path_type=Path))
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
def diagnose(
    runs: Path, network: Path | None, slurm: bool, output: Path | None, format_name: FormatName | None
) -> None:
    """Tell where the lost percent of the runs in folder RUNS goes, who waits for whom, and what to try next.

    \b
    For every group of comparable runs and every rank count:
      one line with the diagnosis and the next experiment;
      the mean step and the lost share by cause, with intervals: exchange, waiting for late ranks, input,
      host, throttled clocks, compute, the rest; they sum to the whole;
      the ranks for which the others waited, and why these were late.
    Over all runs: nodes that are slow, as an --exclude list for sbatch; telemetry; energy; decompositions.

    Ends with 4 if a file is damaged or no run has figures; what can be told is told all the same.

    \b
    Examples:
      dlbench diagnose runs
      dlbench diagnose runs --network box.network.json
      dlbench diagnose runs -o diagnosis.json
    """
    if output is not None:
        check_writable(output)
    chosen = format_by_suffix(output, format_name, SUFFIXES, "text")
    require_modules("diagnose", "numpy", "pandas")
    from dlbench.records.network import read_network
    from dlbench.records.scan import scan
    from dlbench.views.causes.diagnosis_assemble import assemble

    costs = None if network is None else read_network(network)
    scanned = scan(runs)
    found = assemble(scanned, costs)
    damaged = _emit(found, scanned, chosen, output, _asked_of_slurm(scanned) if slurm else None)
    for line in damaged:
        click.echo(f"dlbench: damaged: {line}", err=True)
    if not found.has_figures:
        click.echo(f"dlbench: {runs}: no run has figures; the diagnosis says why", err=True)
    if damaged or not found.has_figures:
        sys.exit(int(ExitCode.INCOMPLETE))


def _asked_of_slurm(scanned: Scan) -> dict[str, float]:
    """Joules of the runs' jobs, by run id; says on standard error of which there are none, and why."""
    from dlbench.jobs.slurm_energy import job_energies
    from dlbench.report.wording import clean

    told, why = job_energies(scanned.runs)
    for reason in dict.fromkeys(why.values()):
        names = [name for name, text in why.items() if text == reason]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        click.echo(f"dlbench: Slurm tells no energy of {clean(names[0])}{more}: {clean(reason)}", err=True)
    if not told and not why:
        click.echo("dlbench: --slurm: none of these runs was submitted to Slurm", err=True)
    return told


def _with_figures(found: Diagnosis, scanned: Scan) -> list[Run]:
    """The runs that the diagnosis took: valid ones whose files are not damaged, each once."""
    from dlbench.report.wording import clean

    runs: dict[str, Run] = {}
    for run in scanned.runs:
        path = clean(str(run.folder.path))
        # Every line names its file or folder first; a file stands below the folder.
        if run.state == "valid" and not any(line.startswith((f"{path}:", f"{path}/")) for line in found.damaged):
            runs.setdefault(run.plan.run_id, run)
    return list(runs.values())


def _emit(
    found: Diagnosis, scanned: Scan, chosen: FormatName, output: Path | None, slurm: dict[str, float] | None
) -> list[str]:
    """Writes the diagnosis where it belongs.

    Returns:
        Damaged files, one line each: samples are read here only.
    """
    from dlbench.report.wording import clean
    from dlbench.views.energy.of_runs import energy_points

    runs = _with_figures(found, scanned)
    # Telemetry reads the same files as energy.
    energy = energy_points(runs)
    _write(found, scanned, runs, energy, chosen, output, slurm)
    return list(dict.fromkeys([*found.damaged, *(clean(line) for point in energy for line in point.damaged)]))


def _write(
    found: Diagnosis,
    scanned: Scan,
    runs: list[Run],
    energy: list[EnergyPoint],
    chosen: FormatName,
    output: Path | None,
    slurm: dict[str, float] | None,
) -> None:
    if chosen == "json":
        from dlbench.report.formats.json import as_plain
        from dlbench.views.causes.diagnosis_json import to_json
        from dlbench.views.decomposition.numbers import decompositions
        from dlbench.views.energy.text import energy_json
        from dlbench.views.telemetry.text import telemetry_json

        further = {
            "telemetry": telemetry_json(runs),
            "energy": energy_json(energy, slurm),
            "decomposition": as_plain(decompositions(scanned.runs)),
        }
        write_output(to_json(found, further).encode("utf-8"), output)
        return
    from dlbench.report.wording import clean
    from dlbench.views.causes.diagnosis_text import show, to_text
    from dlbench.views.decomposition.numbers import decompositions
    from dlbench.views.decomposition.view import decomposition_lines
    from dlbench.views.energy.text import energy_lines
    from dlbench.views.telemetry.text import telemetry_lines

    lines = (
        ("Telemetry: means over the measured steps", telemetry_lines(runs)),
        ("Energy", energy_lines(energy, slurm)),
        ("Decomposition", [clean(line) for line in decomposition_lines(decompositions(scanned.runs))]),
    )
    if output is None and sys.stdout.isatty():
        from rich.console import Console

        show(found, Console(), lines)
        return
    write_output(to_text(found, lines).encode("utf-8"), output)

"""`dlbench trace`: one run as a file for Perfetto, or as tables."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import click

from dlbench.cli.options import FILE
from dlbench.cli.report import check_writable, format_option
from dlbench.errors import EnvironmentLacksError, ExitCode, UserError

if TYPE_CHECKING:
    from dlbench.perfetto.rows import Notes
    from dlbench.records.scan import Run

FormatName = Literal["perfetto", "parquet"]

SUFFIXES: dict[str, FormatName] = {".json": "perfetto", ".json.gz": "perfetto", ".parquet": "parquet"}


@click.command()
@click.argument("run", type=FILE)
@click.option("-o", "--output", type=FILE, required=True, help="File to write: .json, .json.gz (smaller) or .parquet.")
@format_option(*get_args(FormatName), default="perfetto")
@click.option("--ranks", metavar="LIST", help="Only these ranks and their nodes, e.g. 0,1,8-15 (default: all).")
@click.option("--steps", metavar="A-B", help="Only these steps and what happened meanwhile (default: all).")
@click.option("--cores", is_flag=True, help="A counter for every core, not only for their mean.")
def trace(
    run: Path, output: Path, format_name: FormatName | None, ranks: str | None, steps: str | None, cores: bool
) -> None:
    """Write what the run in folder RUN did when: every phase of every step, and what was sampled meanwhile.

    Open the file in ui.perfetto.dev (it stays on your machine) or chrome://tracing. Every rank is a process; its
    threads are stages, compute, exchange, input. Every node is a process with counters: power, clocks, utilisation,
    memory, network. Clocks of all nodes are set to node 0's; what is known of the error stands in the trace.

    --format parquet writes two tables: FILE.parquet (steps, phases, spans) and FILE.counters.parquet (samples as read).

    Ends with 4 if the run is incomplete or a file is missing or damaged; what there is, is written all the same.

    \b
    Examples:
      dlbench trace runs/RUN -o trace.json.gz
      dlbench trace runs/RUN -o trace.json.gz --ranks 0,8-15 --steps 100-120
      dlbench trace runs/RUN -o trace.parquet
    """
    name = output.name.lower()
    by_name = next((chosen for suffix, chosen in SUFFIXES.items() if name.endswith(suffix)), None)
    if by_name is None and format_name is None:
        raise UserError(f"-o {output}: the name implies no format; end it in {', '.join(SUFFIXES)}, or give --format")
    if by_name is not None and format_name is not None and by_name != format_name:
        raise UserError(f"-o {output}: --format {format_name} and the name's ending exclude each other")
    chosen = by_name or format_name
    check_writable(output)
    if cores and chosen == "parquet":
        raise UserError("--cores: has no effect on --format parquet, which holds every field that was sampled")
    needed = {"numpy": "analysis"} | ({"pandas": "analysis", "pyarrow": "parquet"} if chosen == "parquet" else {})
    for name, extra in needed.items():
        if importlib.util.find_spec(name) is None:
            raise EnvironmentLacksError(
                f"trace: {name} is not installed in {sys.prefix}; remedy: pip install 'dlbench[{extra}]'"
            )
    from dlbench.perfetto.rows import Notes
    from dlbench.perfetto.run import Selection, parse_ranks, parse_steps, read_trace_run

    step_range = parse_steps(steps)
    found = _read(run)
    selection = Selection(ranks=parse_ranks(ranks, found.plan.layout.ranks), steps=step_range, cores=cores)
    notes = Notes()
    made, facts = read_trace_run(found, selection, notes)
    if found.record is None:
        notes.problem(f"the run is {found.state}: {found.detail}")
    if chosen == "parquet":
        from dlbench.perfetto.parquet import counters_next_to, write_parquet

        write_parquet(made, facts, notes, output)
        written = f"{output}, {counters_next_to(output)}: {notes.num_events} rows"
    else:
        from dlbench.perfetto.export import write_perfetto

        write_perfetto(made, facts, notes, output)
        written = f"{output}: {notes.num_events} events; open it in ui.perfetto.dev"
    _tell(found, written, facts["clocks_unknown"], notes)
    if notes.problems:
        sys.exit(int(ExitCode.INCOMPLETE))


def _tell(found: Run, written: str, clocks_unknown: list[str], notes: Notes) -> None:
    """What was written, and what a reader must know, on standard error."""
    from dlbench.report.wording import clean

    lines = []
    if found.recorded == "invalid":
        lines.append(f"a sanity check of the run failed: {found.objection}")
    if clocks_unknown:
        lines.append(f"clocks not compared, times may be off against other nodes: {', '.join(clocks_unknown)}")
    lines += notes.sentences
    lines += [f"incomplete: {problem}" for problem in notes.problems]
    click.echo(written, err=True)
    for line in lines:
        # Names of hosts and reasons come from files.
        click.echo(f"dlbench: {clean(line)}", err=True)


def _read(path: Path) -> Run:
    if not path.is_dir():
        raise UserError(f"{path}: no such folder of a run")
    from dlbench.records.folder import RunFolder
    from dlbench.records.scan import read_run, run_folders
    from dlbench.report.wording import runs_text

    if not RunFolder(path).plan.exists():
        inside = [folder.path for folder in run_folders(path) if folder.plan.exists()]
        if inside:
            raise UserError(f"{path}: holds {runs_text(len(inside))}; name one of them, e.g. {inside[0]}")
    return read_run(path)

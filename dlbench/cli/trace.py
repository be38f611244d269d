"""`dlbench trace`: writes one run as a file for Perfetto."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from dlbench.cli.choosing import read_one_run
from dlbench.cli.options import FILE
from dlbench.cli.report import check_writable, require_modules
from dlbench.errors import ExitCode, UserError

SUFFIXES = (".json", ".json.gz")


@click.command()
@click.argument("run", type=FILE)
@click.option("-o", "--output", type=FILE, required=True, help="File to write: .json, or .json.gz (compressed).")
@click.option("--ranks", metavar="LIST", help="Only these ranks and their nodes, e.g. 0,1,8-15 (default: all).")
@click.option("--steps", metavar="A-B", help="Only these steps and the samples taken during them (default: all).")
def trace(run: Path, output: Path, ranks: str | None, steps: str | None) -> None:
    """Write the timeline of the run in folder RUN: every phase of every step, and the sampled counters.

    Open the file in ui.perfetto.dev (it stays on your machine) or chrome://tracing. Every rank is a process with
    threads for stages, compute, exchange and input; every node is a process with counters. Clocks are aligned to node
    0; the trace contains the estimated error. For tables see dlbench.open: docs/reports.md, "In Python".

    Exits with 4 if the run is incomplete or a file is missing or damaged; the rest is written anyway.

    \b
    Example:
      dlbench trace runs/RUN -o trace.json.gz --ranks 0,8-15 --steps 100-120
    """
    if output.suffix.lower() == ".parquet":
        raise UserError(f"-o {output}: a trace is JSON; for tables: dlbench.open(FOLDER).steps(RUN).to_parquet(FILE)")
    if not output.name.lower().endswith(SUFFIXES):
        raise UserError(f"-o {output}: the name must end in {' or '.join(SUFFIXES)}")
    check_writable(output)
    require_modules("trace", "numpy")
    from dlbench.perfetto.export import write_perfetto
    from dlbench.perfetto.rows import Notes
    from dlbench.perfetto.run import parse_ranks, parse_steps, read_trace_run
    from dlbench.report.wording import clean

    step_range = parse_steps(steps)
    run_data = read_one_run(run)
    notes = Notes()
    trace_run, facts = read_trace_run(run_data, notes, parse_ranks(ranks, run_data.plan.layout.ranks), step_range)
    if run_data.record is None:
        notes.problem(f"the run is {run_data.state}: {run_data.detail}")
    write_perfetto(trace_run, facts, notes, output)
    lines = []
    if run_data.recorded == "invalid":
        lines.append(f"a sanity check of the run failed: {run_data.objection}")
    if facts["clocks_unknown"]:
        nodes = ", ".join(facts["clocks_unknown"])
        lines.append(f"clocks not compared, times may be off against other nodes: {nodes}")
    lines += notes.sentences
    lines += [f"incomplete: {problem}" for problem in notes.problems]
    click.echo(f"{output}: {notes.num_events} events; open it in ui.perfetto.dev", err=True)
    for line in lines:
        # Names of hosts and reasons come from files.
        click.echo(f"dlbench: {clean(line)}", err=True)
    if notes.problems:
        sys.exit(int(ExitCode.INCOMPLETE))

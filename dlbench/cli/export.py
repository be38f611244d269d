"""`dlbench export` and `trace`: write runs in the formats of other tools, of which one is Perfetto."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import click

from dlbench.cli.options import FILE, OUTPUT, F, decorated, value_option, write_output
from dlbench.cli.report import (
    check_writable,
    finish,
    named,
    read_one_run,
    read_runs,
    require_modules,
    runs_argument,
    where_option,
)
from dlbench.errors import ExitCode, IncompleteDataError, RunError, UserError
from dlbench.exports.mllog import Statement, Status, obstacles, rules_of, to_mllog
from dlbench.records.scan import Run

SUFFIXES = (".json", ".json.gz")


@click.group()
def export() -> None:
    """Export runs for other tools: monitoring metrics, an MLPerf log, or a description of the machine."""


@export.command(short_help="Write the figures of runs as metrics for monitoring.")
@runs_argument()
@where_option("--where", "runs")
@value_option("-o --output", None, "File to replace atomically (default: standard output).", type=FILE)
def metrics(runs: tuple[Path, ...], where: tuple[str, ...], output: Path | None) -> None:
    """Write the figures of RUNS (run folders, folders of runs, histories) as metrics for monitoring.

    Prometheus' textfile collector and OpenMetrics parsers read them: throughput, efficiency, step time and energy of
    each point with intervals, and the number of valid and failed runs. Control runs and pairs belong to no point.
    Exits with 4 if data is damaged (the rest is written) or if there is no run (nothing is written).

    \b
    Example:
      dlbench export metrics runs -o /var/lib/node_exporter/dlbench.prom
    """
    check_writable(output)
    require_modules("export metrics", "numpy")
    from dlbench.analysis.table import tabulate
    from dlbench.exports.metrics import to_openmetrics

    scan = read_runs(runs, where)
    table = tabulate(scan)
    if not scan.runs:
        reasons = "; ".join([*table.damaged[:3], "nothing is written"])
        raise IncompleteDataError(f"{named(runs)}: there is no run: {reasons}")
    write_output(to_openmetrics(scan.runs, table).encode("utf-8"), output)
    finish(table.damaged)


def _statement_options(command: F) -> F:
    statuses, how = click.Choice(get_args(Status)), "Availability of the machine, in MLPerf's terms."
    options = [
        click.argument("run", type=FILE),
        OUTPUT,
        click.option("--org", metavar="NAME", help='Organisation that made the run (default: "not stated").'),
        click.option("--platform", metavar="NAME", help="Name of the machine (default: the system's title)."),
        click.option("--status", type=statuses, default="research", show_default=True, help=how),
    ]
    return decorated(command, options)


@export.command()
@_statement_options
@click.option("--cache-cleared", is_flag=True, help="State in the log that caches were cleared before the run.")
def mllog(
    run: Path, output: Path | None, org: str | None, platform: str | None, status: Status, cache_cleared: bool
) -> None:
    """Write the run in folder RUN as MLPerf log lines (:::MLLOG).

    They follow the latest rules in the package mlperf-logging, and say "open division" and "MLPerf-derived workload,
    not an MLPerf result". If its checker would reject them, the reason is printed. dlbench clears no cache.

    \b
    Example:
      dlbench export mllog runs/RUN --org "My lab" -o result_0.txt
    """
    valid_run = _read(run, output)
    statement = _statement(org, platform, status, cache_cleared)
    require_modules("export mllog", "numpy")
    from dlbench.analysis.measures import measure

    write_output(to_mllog(valid_run, statement, measure(valid_run).throughput).encode("ascii"), output)
    rules = rules_of(valid_run)
    reasons = obstacles(valid_run)
    for reason in reasons:
        click.echo(f"dlbench: {rules.usage} {rules.ruleset}'s checker will not accept this log: {reason}", err=True)
    if output is not None and not reasons:
        click.echo(f"{output}: check it with: {rules.command} {output}", err=True)


@export.command(short_help="Write an MLPerf system description of a run's machine.")
@_statement_options
def system(run: Path, output: Path | None, org: str | None, platform: str | None, status: Status) -> None:
    """Write a description of the machine of the run in folder RUN, as an MLPerf system description (JSON).

    Fields that dlbench does not record say "not recorded"; fill them in by hand.

    \b
    Example:
      dlbench export system runs/RUN --org "My lab" -o system.json
    """
    from dlbench.exports.mllog import to_system_description

    valid_run = _read(run, output)
    write_output(to_system_description(valid_run, _statement(org, platform, status)).encode("ascii"), output)


def _statement(org: str | None, platform: str | None, status: Status, cache_cleared: bool = False) -> Statement:
    for option, text in (("--org", org), ("--platform", platform)):
        if text is not None and not text.strip():
            raise UserError(f"{option}: is empty; give a name or leave it out")
    statement = Statement(platform=platform, status=status, cache_cleared=cache_cleared)
    if org is not None:
        statement = replace(statement, org=org)
    return statement


def _read(path: Path, output: Path | None) -> Run:
    check_writable(output)
    run = read_one_run(path)
    if run.record is None:
        raise IncompleteDataError(f"{path}: {run.state}, without a record to export: {run.detail}")
    if run.record.state != "valid":
        raise RunError(f"{path}: a sanity check failed; only valid runs are exported: {run.detail}")
    return run


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

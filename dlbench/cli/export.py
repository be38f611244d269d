"""`dlbench export`: writes runs in the formats of other tools."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import click

from dlbench.cli.choosing import named, read_one_run, read_runs, runs_argument, where_option
from dlbench.cli.options import FILE, OUTPUT, F, decorated, value_option, write_output
from dlbench.cli.report import check_writable, finish, require_modules
from dlbench.errors import IncompleteDataError, RunError, UserError
from dlbench.exports.mllog import Statement, Status, obstacles, rules_of, to_mllog
from dlbench.records.scan import Run


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

"""`dlbench history trends` and `dlbench history slow-nodes`: what a history says over months."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import click

from dlbench.cli.history.store import open_store, store_options, where_option
from dlbench.cli.options import write_output
from dlbench.cli.report import FormatName, check_writable, emit, format_by_suffix, format_of, require_modules
from dlbench.errors import ExitCode, UserError, nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlbench.history.page.sheets import TableName
    from dlbench.history.trends.slow_months import SlowMonths

NodesFormatName = Literal["json", "csv", "text"]

NODES_SUFFIXES: dict[str, NodesFormatName] = {".json": "json", ".csv": "csv", ".txt": "text"}

_OUTPUT = click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="File to write (default: standard output)."
)


@click.command()
@store_options
@where_option
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    help="Figure to follow; may be given several times (default: step_median_s, energy_per_sample_j and "
    "time_to_quality_s, where runs have them; further: step_mean_s, step_p95_s).",
)
@click.option(
    "--fail-on-regression",
    is_flag=True,
    help="For CI: end with 1 while a level is worse than before and nobody has acknowledged that, with 6 if no series "
    "has the 12 nights that tell.",
)
@_OUTPUT
@click.option(
    "--format",
    "format_name",
    type=click.Choice(get_args(FormatName)),
    help="Default: what the name of the output file says, else text.",
)
@click.option(
    "--table",
    type=click.Choice(["changes", "series", "nights", "hosts"]),
    help="Which table CSV holds: change points (default), series, every night, or hosts by month.",
)
def trends(
    store: Path | None,
    index: Path | None,
    where: tuple[str, ...],
    metrics: tuple[str, ...],
    fail_on_regression: bool,
    output: Path | None,
    format_name: FormatName | None,
    table: TableName | None,
) -> None:
    """Find when runs became slower or faster, and what changed then.

    Runs of one configuration, machine, rank and node count are one series; runs planned together are one night. Each
    change point has its ratio with a 95 % interval, and the commit and environment on both sides; slow changes are told
    apart. A series needs 12 nights. Ends with 0 whatever was found, unless --fail-on-regression is given; with 4 if a
    run is damaged.

    \b
    Examples:
      dlbench history trends
      dlbench history trends --where workload=resnet50 -o trends.html
      dlbench history trends --fail-on-regression
    """
    if output is not None:
        check_writable(output)
    chosen = format_of(output, format_name)
    if table is not None and chosen != "csv":
        raise UserError(f"--table {table}: has no effect on --format {chosen}; only csv holds one table")
    drawn = ("altair", "vl_convert") if chosen == "html" else ()
    require_modules("history trends", "numpy", "pandas", "scipy", *drawn)
    from dlbench.history.entry import parse_where
    from dlbench.history.page.document import finding, trends_document
    from dlbench.history.page.report import FOLLOWED, trends_of
    from dlbench.history.page.words import regression_text
    from dlbench.history.store import read_acknowledged

    followed = _known(metrics) or FOLLOWED
    opened = open_store(store, index)
    found = trends_of(opened.entries(parse_where(where)), followed, read_acknowledged(opened.store))
    emit(trends_document(found), chosen, output, table or "changes")
    for line in found.damaged:
        click.echo(f"dlbench: damaged: {line}", err=True)
    worse = [(one, change) for one in found.series for change in one.open_regressions] if fail_on_regression else []
    for series, change in worse:
        click.echo(f"dlbench: regression: {regression_text(series, change)}", err=True)
    if worse:
        sys.exit(int(ExitCode.REGRESSION))
    if found.damaged:
        sys.exit(int(ExitCode.INCOMPLETE))
    if fail_on_regression and not any(series.is_long_enough for series in found.series):
        click.echo(f"dlbench: inconclusive: {finding(found)}", err=True)
        sys.exit(int(ExitCode.INCONCLUSIVE))


@click.command("slow-nodes")
@store_options
@where_option
@click.option(
    "--exclude",
    is_flag=True,
    help="Print only Slurm's option --exclude=... for nodes that are slow now, nothing if none is; the evidence goes "
    "to standard error.",
)
@_OUTPUT
@click.option(
    "--format",
    "format_name",
    type=click.Choice(get_args(NodesFormatName)),
    help="Default: what the name of the output file says, else text.",
)
def slow_nodes(
    store: Path | None,
    index: Path | None,
    where: tuple[str, ...],
    exclude: bool,
    output: Path | None,
    format_name: NodesFormatName | None,
) -> None:
    """Show which nodes were slow, month by month, since when, and whether they still are.

    Compared is the own work of a host's slowest rank with that of the other hosts in the same run, so runs of any
    workload count; runs on one host say nothing. Slow: shown to be more than 3 % by a t test over five nights or more,
    all hosts together. A slow link: exchanges end that much later than on the other hosts; it is named and not
    excluded, because either end may be to blame. Ends with 4 if a run is damaged.

    \b
    Examples:
      dlbench history slow-nodes
      dlbench history slow-nodes -o hosts.csv
      sbatch $(dlbench history slow-nodes --exclude) job.sh
    """
    if output is not None:
        check_writable(output)
    chosen = format_by_suffix(output, format_name, NODES_SUFFIXES, "text")
    if exclude and chosen != "text":
        raise UserError(f"--exclude: prints an option, not {chosen}; leave one of the two out")
    require_modules("history slow-nodes", "numpy", "pandas", "scipy")
    from dlbench.history.entry import parse_where
    from dlbench.history.page.document import nodes_document
    from dlbench.history.trends.slow_months import slow_months

    found = slow_months(open_store(store, index).entries(parse_where(where)))
    if exclude:
        _write_option(found, output)
    else:
        emit(nodes_document(found), chosen, output, "hosts")
    for line in found.damaged:
        click.echo(f"dlbench: damaged: {line}", err=True)
    if found.damaged:
        sys.exit(int(ExitCode.INCOMPLETE))


def _known(metrics: Sequence[str]) -> Sequence[str]:
    from dlbench.reading.metrics import by_name

    for name in metrics:
        if name not in by_name():
            raise UserError(f"--metric {name}: is no figure of a run: {nearest(name, by_name())}")
    return metrics


def _write_option(found: SlowMonths, output: Path | None) -> None:
    """Slurm's option alone; the evidence on stderr."""
    from dlbench.history.page.document import exclude_option, unsafe_text
    from dlbench.history.page.words import host_sentence
    from dlbench.reading.hosts.slow_nodes import TO_EXCLUDE
    from dlbench.report.wording import clean

    option = exclude_option(found)
    for host in found.slow:
        mark = "slow" if host.verdict in TO_EXCLUDE else "not excluded"
        click.echo(f"dlbench: {mark}: {host_sentence(host)}", err=True)
    write_output(f"{option}\n".encode() if option else b"", output)
    for name in found.unsafe:
        click.echo(f"dlbench: {clean(unsafe_text(name))}", err=True)

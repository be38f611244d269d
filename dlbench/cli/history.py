"""`dlbench history`: stores runs of months in one folder, and finds changes and slow nodes."""

from __future__ import annotations

import getpass
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import click

from dlbench.analysis.metrics import FOLLOWED, METRICS, by_name
from dlbench.cli.options import FILE, OUTPUT, InOrder, value_option, write_output
from dlbench.cli.report import FormatName, emit, finish, format_option, note, open_store, prepared, require_modules
from dlbench.errors import ExitCode, UserError, nearest
from dlbench.report.wording import clean, runs_text
from dlbench.units import format_bytes, printable, utc_now

if TYPE_CHECKING:
    from dlbench.history.importing import Candidate, ImportOutcome
    from dlbench.history.tables import TableName
    from dlbench.records.folder import RunFolder


store_option = value_option(
    "--store", "DIR", "History folder (default: $DLBENCH_HISTORY).", type=FILE, envvar="DLBENCH_HISTORY"
)
where_option = value_option(
    "--where",
    "KEY=VALUE",
    "Use only runs with this value, repeatable (all must match), e.g. workload=resnet50, ranks=8, state=valid, "
    "host=n17, tag.commit=1a2b3c.",
    multiple=True,
)
_VERDICTS = ("imported", "already there", "skipped", "refused", "damaged")


@click.group(cls=InOrder)
def history() -> None:
    """Store runs over months; find regressions and slow nodes.

    A history is a folder with unchanged run folders by month (`runs`), and an index that can be made again from them.

    \b
    Example:
      export DLBENCH_HISTORY=$HOME/history
      dlbench history import runs
    """


@history.command("import", short_help="Import runs: run folders, folders of runs, archives.")
@click.argument("runs", type=FILE, nargs=-1, required=True)
@store_option
def import_runs(runs: tuple[Path, ...], store: Path | None) -> None:
    """Import RUNS: run folders, folders of runs, histories, or archives (.tar, .tar.gz) of `dlbench history export`.

    Runs are copied completely and never changed. Those that the history has, or that have no record yet, are skipped.
    A run is refused if the history has another of its name, or if it comes from an earlier dlbench. It is damaged, and
    not imported, if a file cannot be read or the folder contains a link or a pipe. Recorded projections (`dlbench
    project runs --record`) are imported too. An empty or missing folder becomes a history.

    Exits with 2 if a run was refused, with 4 if one is damaged; all other runs are imported.

    \b
    Example:
      dlbench history import runs --store /shared/history
    """
    from dlbench.history import importing as history_import
    from dlbench.history.history import is_there
    from dlbench.projection.ledger import bring

    for path in runs:
        if not is_there(path):
            raise UserError(f"{path}: no such folder of runs or archive")
    opened = open_store(store, create=True)
    counts: Counter[str] = Counter()
    with opened.store.room() as room:
        for outcome in history_import.import_runs(opened, _candidates(runs, room), room):
            counts[outcome.verdict] += 1
            if outcome.verdict != "already there":
                line = ": ".join(filter(None, (f"{outcome.verdict:<9} {outcome.name}", outcome.why)))
                click.echo(printable(line), err=outcome.verdict in ("refused", "damaged"))
    for path in runs:
        if not path.is_dir():
            continue
        num_projections, problems = bring(path, opened.store.path)
        if num_projections:
            click.echo(printable(f"{path}: {num_projections} recorded projections imported"))
        for problem in problems:
            click.echo(printable(problem), err=True)
        counts["damaged"] += len(problems)
    click.echo(", ".join(f"{counts[verdict]} {verdict}" for verdict in _VERDICTS if counts[verdict]) or "no runs")
    if counts["damaged"]:
        sys.exit(int(ExitCode.INCOMPLETE))
    if counts["refused"]:
        sys.exit(int(ExitCode.USAGE))


def _candidates(paths: tuple[Path, ...], room: Path) -> Iterator[Candidate | ImportOutcome]:
    from dlbench.history.archive import read_archive
    from dlbench.history.importing import Candidate

    for path in paths:
        if path.is_dir():
            yield from (Candidate(folder=folder, name=str(folder.path)) for folder in _folders(path))
        else:
            yield from read_archive(path, room)


def _folders(path: Path) -> list[RunFolder]:
    from dlbench.history.history import MARKER, Store, is_there
    from dlbench.records.scan import run_folders

    if is_there(path / MARKER):
        return Store.at(path).folders(lambda folder: note(f"{folder!a}: not the name of a run; skipped"))
    try:
        return run_folders(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


@history.command("list", short_help="List the runs of a history.")
@store_option
@where_option
@value_option(
    "--format form",
    None,
    "text: 80 columns; csv: one line per run; json: all fields of the index.",
    "text",
    type=click.Choice(["text", "csv", "json"]),
)
def list_runs(store: Path | None, where: tuple[str, ...], form: Literal["text", "csv", "json"]) -> None:
    """List runs in the order in which they ended, with step time, hosts, Slurm job and commit.

    \b
    Example:
      dlbench history list --where workload=resnet50 --where host=n17
    """
    from dlbench.history.entry import parse_where
    from dlbench.history.tables import list_document, to_json

    entries = open_store(store).entries(parse_where(where))
    if form == "json":
        write_output(to_json(entries).encode("utf-8"), None)
    else:
        emit(list_document(entries), form, None, "runs")


@history.command("trends", short_help="Find when runs became slower or faster, and what changed then.")
@store_option
@where_option
@value_option(
    "--metric metrics",
    "NAME",
    "Metric to follow, repeatable (default: {}, if the runs have them; others: {}).".format(
        " and ".join((", ".join(FOLLOWED[:-1]), FOLLOWED[-1])),
        ", ".join(metric.name for metric in METRICS if metric.name not in FOLLOWED),
    ),
    multiple=True,
)
@click.option(
    "--fail-on-regression",
    is_flag=True,
    help="For CI: exit with 1 if there is an unacknowledged regression, with 6 if no trend has the required 12 nights.",
)
@OUTPUT
@format_option(*get_args(FormatName))
@value_option(
    "--table",
    None,
    "Table to write as CSV: change points (default), all trends (series), every night, or hosts by month.",
    type=click.Choice(["changes", "series", "nights", "hosts"]),
)
def trends(
    store: Path | None,
    where: tuple[str, ...],
    metrics: tuple[str, ...],
    fail_on_regression: bool,
    output: Path | None,
    format_name: FormatName | None,
    table: TableName | None,
) -> None:
    """Find when runs became slower or faster, and what changed then.

    A trend is one metric of runs with equal configuration, machine, ranks and nodes; runs of one session are a night.
    A trend needs 12 nights. A change point has its ratio, a 95 % interval, and commit and environment before and after.

    Exits with 0 whatever is found, unless --fail-on-regression is given; with 4 if a run is damaged.

    \b
    Examples:
      dlbench history trends --where workload=resnet50 -o trends.html
      dlbench history trends --fail-on-regression
    """
    chosen = prepared("history trends", output, format_name, table=table, needs=("numpy", "scipy"))
    from dlbench.history.document import trends_document
    from dlbench.history.entry import parse_where
    from dlbench.history.history import read_acknowledged
    from dlbench.history.tables import trends_of

    for name in metrics:
        if name not in by_name():
            raise UserError(f"--metric {name}: unknown metric: {nearest(name, by_name())}")
    followed = metrics or FOLLOWED
    opened = open_store(store)
    report = trends_of(opened.entries(parse_where(where)), followed, read_acknowledged(opened.store))
    # The entries of a long history take as much memory as its page.
    del opened
    emit(trends_document(report), chosen, output, table or "changes")
    for line in report.damaged:
        click.echo(f"dlbench: damaged: {line}", err=True)
    worse = report.open_regressions if fail_on_regression else ()
    for row in worse:
        click.echo(f"dlbench: regression: {row.line}", err=True)
    if worse:
        sys.exit(int(ExitCode.REGRESSION))
    if report.damaged:
        sys.exit(int(ExitCode.INCOMPLETE))
    if fail_on_regression and not any(trend.is_long_enough for trend in report.series):
        click.echo(f"dlbench: inconclusive: {report.finding}", err=True)
        sys.exit(int(ExitCode.INCONCLUSIVE))


@history.command("acknowledge", short_help="Acknowledge a change of level, with a reason.")
@click.argument("trend_id", metavar="TREND")
@click.argument("day")
@value_option("--reason", "TEXT", "Explanation that is stored and shown with the change.", required=True)
@store_option
@where_option
def acknowledge(trend_id: str, day: str, reason: str, store: Path | None, where: tuple[str, ...]) -> None:
    """Acknowledge the change of TREND on DAY: it no longer counts as a regression.

    `dlbench history trends` prints TREND and DAY. The change is reported again if the level gets even worse. To undo,
    delete its file in the folder `acknowledged` of the history.

    \b
    Example:
      dlbench history acknowledge 0123456789ab-8-2-step_median_s 2026-03-15 --reason "driver 560, vendor informed"
    """
    require_modules("history acknowledge", "numpy", "scipy")
    from dlbench.history.entry import parse_where
    from dlbench.history.history import MAX_REASON, Acknowledgement, read_acknowledged
    from dlbench.history.history import acknowledge as write
    from dlbench.history.series import percent_change
    from dlbench.history.tables import trends_of

    if not reason.strip() or len(reason) > MAX_REASON:
        raise UserError(f"--reason: must have 1 to {MAX_REASON} characters")
    opened = open_store(store)
    metric = trend_id.rpartition("-")[2]
    followed = FOLLOWED if metric in FOLLOWED else (metric,)
    report = trends_of(opened.entries(parse_where(where)), followed, read_acknowledged(opened.store))
    trend = next((trend for trend in report.series if trend.id == trend_id), None)
    if trend is None:
        changed_trends = ", ".join(trend.id for trend in report.series if trend.changes) or "none"
        raise UserError(f"{trend_id}: no such trend in this history; trends with changes: {changed_trends}")
    of_day = [change for change in trend.changes if change.time[:10] == day]
    change = next((change for change in of_day if change.acknowledged is None), next(iter(of_day), None))
    if change is None:
        days = ", ".join(change.time[:10] for change in trend.changes) or "none"
        raise UserError(f"{day}: {trend_id} has no change on that day, only: {days}")
    if (earlier := change.acknowledged) is not None:
        raise UserError(f"{day}: was acknowledged by {earlier.by} on {earlier.written[:10]}: {earlier.reason}")
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # In a container the user may have no name.
        user = f"user {os.getuid()}"
    acknowledgement = Acknowledgement(
        group=trend.group,
        ranks=trend.ranks,
        nodes=trend.nodes,
        metric=trend.metric,
        time=change.time,
        through=change.first_after,
        level=change.after.value,
        ratio=change.ratio.value,
        reason=reason.strip(),
        by=user,
        written=utc_now(),
    )
    write(opened.store, acknowledgement)
    click.echo(f"acknowledged: {trend_id}, {day}: {percent_change(acknowledgement.ratio)}", err=True)


@history.command("slow-nodes", short_help="Show which nodes were slow, month by month.")
@store_option
@where_option
@click.option(
    "--exclude",
    is_flag=True,
    help="Print only Slurm's option --exclude=... for nodes that are slow now (nothing if none is); the evidence goes "
    "to standard error.",
)
@OUTPUT
@format_option("json", "csv", "text")
def slow_nodes(
    store: Path | None, where: tuple[str, ...], exclude: bool, output: Path | None, format_name: FormatName | None
) -> None:
    """Show which nodes were slow, month by month, since when, and whether they still are.

    In each run on several hosts, the compute time of a host's slowest rank is compared with the other hosts. A node is
    slow if a t test over five nights or more, corrected for the number of hosts, shows it to be over 3 % slower. A link
    is slow if exchanges end that much later; it is not excluded, because either end may be the cause.

    Exits with 4 if a run is damaged.

    \b
    Example:
      sbatch $(dlbench history slow-nodes --exclude) job.sh
    """
    suffixes: dict[str, FormatName] = {".json": "json", ".csv": "csv", ".txt": "text"}
    needs = ("numpy", "scipy")
    chosen = prepared("history slow-nodes", output, format_name, suffixes=suffixes, needs=needs)
    if exclude and chosen != "text":
        raise UserError(f"--exclude: cannot be combined with format {chosen}: it prints a Slurm option")
    from dlbench.history.document import nodes_document
    from dlbench.history.entry import parse_where
    from dlbench.history.slow_months import slow_months
    from dlbench.history.trends import damaged_runs, dated

    entries = open_store(store).entries(parse_where(where))
    report = slow_months(dated(entries), damaged_runs(entries))
    if exclude:
        from dlbench.analysis.slow_nodes import TO_EXCLUDE

        for host in report.slow:
            mark = "slow" if host.verdict in TO_EXCLUDE else "not excluded"
            click.echo(f"dlbench: {mark}: {host.sentence}", err=True)
        option = f"{report.exclude_option}\n" if report.exclude else ""
        write_output(option.encode(), output)
        for line in report.unsafe_lines:
            click.echo(f"dlbench: {clean(line)}", err=True)
    else:
        emit(nodes_document(report), chosen, output, "hosts")
    finish(report.damaged)


@history.command("export", short_help="Write runs to an archive that `import` reads.")
@value_option(
    "-o --output",
    "FILE.tar[.gz]",
    "Archive to write; .gz or .tgz compresses it.",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
)
@store_option
@where_option
def export_runs(output: Path, store: Path | None, where: tuple[str, ...]) -> None:
    """Write runs to a tar archive that `dlbench history import` reads; the same runs give the same bytes.

    \b
    Example:
      dlbench history export -o march.tar.gz --where system=cluster
    """
    from dlbench.history.archive import write_archive
    from dlbench.history.entry import parse_where

    condition = parse_where(where)
    opened = open_store(store)
    entries = []
    for entry in opened.entries(condition):
        if entry.state == "damaged":
            note(f"left out: {entry.folder}: damaged: {entry.why}")
        else:
            entries.append(entry)
    write_archive(opened, entries, output)
    click.echo(f"wrote {output}: {runs_text(len(entries))}, {format_bytes(output.stat().st_size)}", err=True)

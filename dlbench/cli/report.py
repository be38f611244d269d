"""`dlbench report` and `dlbench diagnose`, and the output options of all commands that write a report."""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

import click

from dlbench.cli.choosing import named, open_store, read_runs, runs_argument, where_option
from dlbench.cli.options import FILE, OUTPUT, F, decorated, value_option, write_output
from dlbench.errors import EnvironmentLacksError, ExitCode, UserError, nearest

if TYPE_CHECKING:
    from dlbench.comm.report import CollectivesReport
    from dlbench.report.document import Document
    from dlbench.views.model import Report

FormatT = TypeVar("FormatT", bound=str)

LIST = "?"
FORMAT_MODULES: Mapping[str, Sequence[str]] = {"html": ("altair", "vl_convert")}  # Modules that a format needs.

FormatName = Literal["html", "json", "csv", "md", "text"]

SUFFIXES: Mapping[str, FormatName] = {
    ".html": "html",
    ".htm": "html",
    ".json": "json",
    ".csv": "csv",
    ".md": "md",
    ".txt": "text",
}


def format_option(*names: str, suffixes: str = "", default: str = "text") -> Callable[[F], F]:
    """Returns the option `--format`; `suffixes`: text for the help on the suffixes of --output."""
    help_text = f"Output format (default: by the suffix of --output{suffixes}, else {default})."
    return value_option("--format format_name", None, help_text, type=click.Choice(names))


def report_options(function: F) -> F:
    """Adds the options that all reports share: runs, output file and format."""
    decorators = [
        runs_argument(),
        where_option("--where", "runs"),
        OUTPUT,
        format_option(*get_args(FormatName)),
        click.option("--full", is_flag=True, help="Print all tables as text (default: one screen per group)."),
    ]
    return decorated(function, decorators)


def network_option(purpose: str) -> Callable[[F], F]:
    """Returns the option `--network` for fitted costs; `purpose` completes its help."""
    return value_option("--network", "FILE.network.json", f"Fitted network costs (`comm fit`), {purpose}.", type=FILE)


@click.command()
@report_options
@network_option("used for projections to more ranks")
@value_option("--history store", "DIR", "History folder: also report changes over months, and slow nodes.", type=FILE)
@value_option(
    "--table",
    "NAME|?",
    "Table to write as CSV, e.g. points (default), parts, runs, quality, evaluations, exchange, sweep; ? lists all.",
)
def report(
    runs: tuple[Path, ...],
    where: tuple[str, ...],
    output: Path | None,
    format_name: FormatName | None,
    full: bool,
    network: Path | None,
    store: Path | None,
    table: str | None,
) -> None:
    """Write a scaling report of RUNS (run folders, folders of runs, histories).

    It shows scaling, where the time goes, and warnings. Runs that failed a sanity check contribute no figures; the
    reason is listed. Exits with 4 if a file is damaged or no run has figures; the rest is reported anyway.

    \b
    Examples:
      dlbench report runs -o report.html
      dlbench report runs --where workload=bert --where engine=ddp
      dlbench report runs --format csv --table runs > runs.csv
    """
    csv_table = None if table == LIST else table
    chosen = prepared("report", output, format_name, table=csv_table)
    from dlbench.jobs.slurm.accounting import with_accounting
    from dlbench.records.comm import read_network
    from dlbench.views.scaling_report import assemble, document_of

    costs = None if network is None else read_network(network)
    # Records have no cycles and live to the end; searching them for cycles would take a fifth of the reading time.
    gc.disable()
    try:
        scanned = read_runs(runs, where)
    finally:
        gc.freeze()
        gc.enable()
    # Slurm deletes its accounting after some time, so that it is stored with the runs.
    scanned.runs = with_accounting(scanned.runs)[0]
    history = None
    if store is not None:
        require_modules("report --history", "scipy")
        from dlbench.history.acknowledgements import read_acknowledged
        from dlbench.history.report import trends_of

        opened = open_store(store)
        history = trends_of(opened.entries(), acknowledged=read_acknowledged(opened.store))
    scaling_report = assemble(scanned, history, network=costs)
    document = document_of(scaling_report)
    if table == LIST:
        tables = document.tables()
        width = max(map(len, tables))
        listed = "".join(f"{name.ljust(width)}  {table_document.title}\n" for name, table_document in tables.items())
        write_output(listed.encode("utf-8"), output)
    else:
        emit(document, chosen, output, table or "points", full=full)
        note_counts(output, scaling_report)
    problem = f"{named(runs)}: no run has figures; the report says why"
    finish(scaling_report.damaged, problem, unless=scaling_report.groups)


def prepared(
    command: str,
    output: Path | None,
    format_name: FormatName | None,
    *,
    suffixes: Mapping[str, FormatName] = SUFFIXES,
    table: str | None = None,
    needs: Sequence[str] = ("numpy",),
) -> FormatName:
    """Checks the output options before anything is read, and returns the format."""
    check_writable(output)
    chosen = format_by_suffix(output, format_name, suffixes, "text")
    if table is not None and chosen != "csv":
        raise UserError(f"--table {table}: has no effect on --format {chosen}; only csv contains a single table")
    require_modules(command, *needs, *FORMAT_MODULES.get(chosen, ()))
    return chosen


def note_counts(output: Path | None, report: Report | CollectivesReport) -> None:
    """Prints how many runs a written file contains."""
    if output is not None:
        without = len(report.without_figures)
        counts = f"runs with figures: {len(report.runs) - without}, without: {without}; groups: "
        counts += str(len(report.groups) + len(getattr(report, "pairs", ())))
        click.echo(f"{output}: {counts}", err=True)


def finish(damaged: Sequence[str], problem: str = "", *, unless: object = False) -> None:
    """Prints damaged files and, unless `unless` is true, a problem on standard error; exits with 4 if there are any."""
    if unless:
        problem = ""
    for line in damaged:
        click.echo(f"dlbench: damaged: {line}", err=True)
    if problem:
        click.echo(f"dlbench: {problem}", err=True)
    if damaged or problem:
        sys.exit(int(ExitCode.INCOMPLETE))


def format_by_suffix(
    output: Path | None, format_name: FormatT | None, suffixes: Mapping[str, FormatT], default: FormatT
) -> FormatT:
    """Returns the given format, else that of the output file's suffix; `default` for standard output."""
    if format_name is not None:
        return format_name
    if output is None:
        return default
    suffix = output.suffix.lower()
    if suffix not in suffixes:
        raise UserError(f"-o {output}: no --format and an unknown suffix {suffix!r}; {nearest(suffix, suffixes)}")
    return suffixes[suffix]


def check_writable(output: Path | None) -> None:
    """Refuses an output path that is a folder or has no parent folder, before the work is done."""
    if output is None:
        return
    if output.is_dir():
        raise UserError(f"-o {output}: is a folder; name a file in it")
    if not output.absolute().parent.is_dir():
        raise UserError(f"-o {output}: there is no folder {output.absolute().parent}")


def require_modules(command: str, *modules: str) -> None:
    """Raises `EnvironmentLacksError` if a module is not installed that a command needs."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentLacksError(
            f"{command}: {', '.join(missing)} not installed in {sys.prefix}; remedy: pip install 'dlbench[analysis]'"
        )


def emit(document: Document, chosen: FormatName, output: Path | None, table: str = "", *, full: bool = False) -> None:
    """Writes a report; CSV contains one `table`, text the summary or all tables (`full`), in colours on a terminal."""
    if chosen == "text" and output is None and sys.stdout.isatty():
        from rich.console import Console

        from dlbench.report.formats.terminal import show

        show(document, Console(), full=full)
        return
    write_output(render(document, chosen, table, full=full).encode("utf-8"), output)


def render(document: Document, chosen: FormatName, table: str = "", *, full: bool = False) -> str:
    """Returns a report as text in a format; arguments as in `emit`."""
    if chosen == "html":
        from dlbench.report.formats.html import to_html  # loads the template engine and the charts

        return to_html(document)
    from dlbench.report.formats import data, markdown, terminal

    if chosen == "json":
        return data.to_json(document)
    if chosen == "csv":
        return data.to_csv(document, table)
    if chosen == "md":
        return markdown.to_markdown(document)
    return terminal.to_text(document, full=full)


@click.command()
@runs_argument()
@where_option("--where", "runs")
@OUTPUT
@format_option("text", "json")
@click.option("--full", is_flag=True, help="Print all tables as text (default: one screen per group).")
def diagnose(
    runs: tuple[Path, ...],
    where: tuple[str, ...],
    output: Path | None,
    format_name: Literal["text", "json"] | None,
    full: bool,
) -> None:
    """Show where RUNS (run folders, folders of runs, histories) lose efficiency, and what to try next.

    For each group and rank count it prints the diagnosis, the next experiment, the percentage points of step time lost
    per cause (with intervals, summing to the total), stragglers, telemetry and energy; for all runs it prints slow
    nodes as an --exclude list for sbatch, and decompositions.

    Exits with 4 if a file is damaged or no run has figures; the rest is reported anyway.

    \b
    Example:
      dlbench diagnose runs --where workload=resnet50 -o diagnosis.json
    """
    chosen = prepared("diagnose", output, format_name, suffixes={".json": "json", ".txt": "text"})
    from dlbench.views.command_reports import diagnosis

    report, document = diagnosis(read_runs(runs, where))
    emit(document, chosen, output, full=full)
    problem = f"{named(runs)}: no run has figures; the diagnosis says why"
    finish(report.damaged, problem, unless=report.groups)

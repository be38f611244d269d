"""`dlbench report`: runs become a report, for a person or a program."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

import click

from dlbench.cli.choosing import named, read_runs, runs_argument, where_option
from dlbench.cli.options import F, decorated, write_output
from dlbench.errors import EnvironmentLacksError, ExitCode, UserError, nearest

if TYPE_CHECKING:
    from dlbench.history.page.report import TrendsReport
    from dlbench.report.document import Document

FormatT = TypeVar("FormatT", bound=str)

LIST = "?"
"""Asks for the names of the tables instead of one of them."""

FormatName = Literal["html", "json", "csv", "md", "text"]

SUFFIXES: dict[str, FormatName] = {
    ".html": "html",
    ".htm": "html",
    ".json": "json",
    ".csv": "csv",
    ".md": "md",
    ".txt": "text",
}

# What each format needs beside the login node's set.
_NUMBERS = ("numpy", "pandas")
_CHARTS = ("altair", "vl_convert")


def report_options(function: F) -> F:
    """What every report is asked: of which runs, to which file, in which format."""
    decorators = [
        runs_argument(),
        where_option("--where", "runs"),
        click.option(
            "-o", "--output", type=click.Path(path_type=Path), help="File to write (default: standard output)."
        ),
        click.option(
            "--format",
            "format_name",
            type=click.Choice(get_args(FormatName)),
            help="Default: what the name of the output file says, else text.",
        ),
        click.option("--full", is_flag=True, help="Text with all evidence; default: one screen per group."),
    ]
    return decorated(function, decorators)


@click.command()
@report_options
@click.option(
    "--history",
    "store",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Folder of a history: show beside the runs what changed over months, and which nodes are slow.",
)
@click.option(
    "--table",
    metavar="NAME|?",
    help="Which table CSV holds: points (of scaling, default), parts (of a step), runs, quality (of points), "
    "evaluations, exchange, sweep, or any other of the report; ? lists them.",
)
def report(
    runs: tuple[Path, ...],
    where: tuple[str, ...],
    output: Path | None,
    format_name: FormatName | None,
    full: bool,
    store: Path | None,
    table: str | None,
) -> None:
    """Turn RUNS (folders of runs, single runs, histories) into a report: scaling, where the time goes, how far to
    trust it.

    Only runs whose sanity checks held yield figures; all others are listed with the reason. Ends with 4 if a file
    is damaged or no run has figures; what can be reported is reported all the same.

    \b
    Examples:
      dlbench report runs
      dlbench report runs -o report.html
      dlbench report runs --where workload=bert --where engine=ddp
      dlbench report runs --format csv --table runs > runs.csv
      dlbench report runs --table '?'
    """
    if output is not None:
        check_writable(output)
    chosen = format_of(output, format_name)
    if table is not None and table != LIST and chosen != "csv":
        raise UserError(f"--table {table}: has no effect on --format {chosen}; only csv holds one table")
    require_modules("report", *_NUMBERS, *(_CHARTS if chosen == "html" else ()))
    from dlbench.jobs.slurm.accounting import with_accounting
    from dlbench.views.assemble import assemble
    from dlbench.views.document import document_of

    scanned = read_runs(runs, where)
    # Slurm forgets: what it still knows of these runs is kept beside them.
    scanned.runs = with_accounting(scanned.runs)[0]
    found = assemble(scanned, None if store is None else _history(store))
    document = document_of(found)
    if table == LIST:
        write_output(_listed(document).encode("utf-8"), output)
    else:
        emit(document, chosen, output, table or "points", full=full)
        if output is not None:
            without = len(found.without_figures)
            click.echo(
                f"{output}: runs with figures: {len(found.runs) - without}, without: {without}; "
                f"groups: {len(found.groups)}",
                err=True,
            )
    for line in found.damaged:
        click.echo(f"dlbench: damaged: {line}", err=True)
    if not found.groups:
        click.echo(f"dlbench: {named(runs)}: no run has figures; the report says why", err=True)
    if found.damaged or not found.groups:
        sys.exit(int(ExitCode.INCOMPLETE))


def _history(store: Path) -> TrendsReport:
    """What changed over the months of a history."""
    require_modules("report --history", "scipy")
    from dlbench.cli.history.store import open_store
    from dlbench.history.page.report import trends_of
    from dlbench.history.store import read_acknowledged

    opened = open_store(store, None)
    return trends_of(opened.entries(), acknowledged=read_acknowledged(opened.store))


def _listed(document: Document) -> str:
    """The tables of a report, a line each."""
    from dlbench.report.formats.csv import all_tables

    tables = all_tables(document)
    width = max(map(len, tables))
    return "".join(f"{name.ljust(width)}  {title}\n" for name, (title, _) in tables.items())


def format_of(output: Path | None, asked: FormatName | None) -> FormatName:
    """The format of a report; see `format_by_suffix`."""
    return format_by_suffix(output, asked, SUFFIXES, "text")


def format_by_suffix(
    output: Path | None, asked: FormatT | None, suffixes: Mapping[str, FormatT], default: FormatT
) -> FormatT:
    """The format that was asked for, or that the name of the output file tells; `default` for standard output.

    Raises:
        UserError: the name tells none.
    """
    if asked is not None:
        return asked
    if output is None:
        return default
    suffix = output.suffix.lower()
    if suffix not in suffixes:
        raise UserError(
            f"-o {output}: --format is missing and the suffix {suffix!r} tells none; {nearest(suffix, suffixes)}"
        )
    return suffixes[suffix]


def check_writable(output: Path) -> None:
    """Refuses a folder, or a file in a folder that is not there; early, because nobody wants to learn it afterwards.

    Raises:
        UserError: the file cannot be written there.
    """
    if output.is_dir():
        raise UserError(f"-o {output}: is a folder; name a file in it")
    if not output.absolute().parent.is_dir():
        raise UserError(f"-o {output}: there is no folder {output.absolute().parent}")


def require_modules(command: str, *modules: str) -> None:
    """Proves that what a command computes and draws with is installed.

    Raises:
        EnvironmentLacksError: something is missing; names the remedy.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentLacksError(
            f"{command}: {', '.join(missing)} not installed in {sys.prefix}; remedy: pip install 'dlbench[analysis]'"
        )


def emit(document: Document, chosen: FormatName, output: Path | None, table: str = "", *, full: bool = False) -> None:
    """Writes a report in a format where it belongs, in colours on a terminal.

    Args:
        document: the report.
        chosen: the format.
        output: a file; None: standard output.
        table: which one CSV holds.
        full: whether text holds all words and tables, not the summary.
    """
    if chosen == "text" and output is None and sys.stdout.isatty():
        from rich.console import Console

        from dlbench.report.formats.terminal import show

        show(document, Console(), full=full)
        return
    write_output(render(document, chosen, table, full=full).encode("utf-8"), output)


def render(document: Document, chosen: FormatName, table: str = "", *, full: bool = False) -> str:
    """A report as text of a format; arguments as of `emit`."""
    if chosen == "html":
        from dlbench.report.formats.html import to_html

        return to_html(document)
    if chosen == "json":
        from dlbench.report.formats.json import to_json

        return to_json(document)
    if chosen == "csv":
        from dlbench.report.formats.csv import to_csv

        return to_csv(document, table)
    if chosen == "md":
        from dlbench.report.formats.markdown import to_markdown

        return to_markdown(document)
    from dlbench.report.formats.terminal import to_text

    return to_text(document, full=full)

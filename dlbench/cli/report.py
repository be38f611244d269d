"""`dlbench report` and `diagnose`; how all commands read the runs that they name, and write their documents."""

from __future__ import annotations

import gc
import glob
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

import click

from dlbench.cli.options import FILE, OUTPUT, F, decorated, value_option, write_output
from dlbench.errors import EnvironmentLacksError, ExitCode, UserError, nearest
from dlbench.units import printable

if TYPE_CHECKING:
    from dlbench.comm.report import CollectivesReport
    from dlbench.history.history import History
    from dlbench.records.comm import CommScan
    from dlbench.records.scan import Run, Scan
    from dlbench.report.document import Document
    from dlbench.views.model import Report

FormatT = TypeVar("FormatT", bound=str)
LIST = "?"
EARLY_RANKS = (
    1000  # Of all runs; more are read in several processes, which need the memory that V8 would hold meanwhile.
)
FORMAT_MODULES: Mapping[str, Sequence[str]] = {"html": ("vl_convert",)}  # Modules that a format needs.
FormatName = Literal["html", "json", "csv", "md", "text"]
SUFFIXES: Mapping[str, FormatName] = {
    ".html": "html",
    ".htm": "html",
    ".json": "json",
    ".csv": "csv",
    ".md": "md",
    ".txt": "text",
}


def runs_argument(*, default: str | None = None) -> Callable[[F], F]:
    """Returns the argument RUNS of a command that reads any number of folders."""
    paths = () if default is None else (Path(default),)
    return click.argument(
        "runs", nargs=-1, required=not paths, type=FILE, callback=lambda ctx, param, value: value or paths
    )


def where_option(name: str, of: str) -> Callable[[F], F]:
    """Returns an option that selects runs by their properties; `of`: the runs it selects from."""
    return click.option(
        name,
        multiple=True,
        metavar="KEY=VALUE",
        help=f"Use only {of} with this property, repeatable. Keys: series, side, variant (plain, synthetic-input, "
        "cached-input, no-exchange or unwatched), state, tag.NAME, or a registered key such as workload, preset, "
        "engine, precision, ranks.",
    )


def parse_where(texts: Sequence[str], option: str) -> dict[str, str]:
    """Returns the values of `KEY=VALUE` texts by key. Raises `UserError`: another form, or two values for a key."""
    value_by_key: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key or not value:
            raise UserError(f"{option} {text}: must be KEY=VALUE, e.g. series=nightly")
        if value_by_key.setdefault(key, value) != value:
            raise UserError(f"{option} {key}: is given twice, as {value_by_key[key]} and {value}; no run has both")
    return value_by_key


def named(paths: Sequence[Path]) -> str:
    """Returns folders as text for an error or a title."""
    return ", ".join(map(str, paths))


def read_runs(paths: Sequence[Path], where: Sequence[str] = ()) -> Scan:
    """Returns the training runs in run folders, folders of runs and histories that match `where`."""
    from dlbench.analysis.comparability import select

    chosen = parse_where(where, "--where")
    scan = runs_at(*paths)
    scan.runs = select(scan.runs, named(paths), chosen, "--where")
    return scan


def read_one_run(path: Path) -> Run:
    """Returns the training run in a folder. Raises `UserError`: it is not the folder of one run."""
    if not path.is_dir():
        raise UserError(f"{path}: no such run folder")
    from dlbench.records.folder import RunFolder
    from dlbench.records.scan import read_run, run_folders
    from dlbench.report.wording import runs_text

    if not RunFolder(path).plan.exists():
        inside = [folder.path for folder in run_folders(path) if folder.plan.exists()]
        if inside:
            raise UserError(f"{path}: contains {runs_text(len(inside))}; name one of them, e.g. {inside[0]}")
    return read_run(path)


def read_comm_runs(paths: Sequence[Path], where: Sequence[str] = ()) -> CommScan:
    """Returns the runs of the collective benchmark that match `where`; histories contain none."""
    from dlbench.analysis.comparability import select
    from dlbench.records.comm import scan_comm

    chosen = parse_where(where, "--where")
    comm_scan = scan_comm(*expanded(paths))
    _note_withheld(comm_scan.withheld)
    comm_scan.runs = select(comm_scan.runs, named(paths), chosen, "--where")
    return comm_scan


def runs_at(*paths: Path) -> Scan:
    """Returns all training runs in run folders, folders of runs and histories."""
    from dlbench.history.history import MARKER, Store
    from dlbench.records.scan import Scan, read_each, read_run, scan

    roots = expanded(paths)
    stores = [path for path in roots if (path / MARKER).is_file()]
    folders = [path for path in roots if path not in stores]
    merged = scan(*folders) if folders else Scan(root=roots[0])
    for store in stores:
        stored = read_each(store, Store.at(store).folders(), lambda folder: read_run(folder.path))
        # The same run in a second folder of a history is no repeat.
        first = {run.plan.run_id: run for run in reversed(stored.runs)}
        merged.add([run for run in stored.runs if first[run.plan.run_id] is run], stored)
    _note_withheld(merged.withheld)
    return merged


def _note_withheld(lines: Sequence[str]) -> None:
    """Prints a note for each run that cannot be read, and one note for all runs of an earlier dlbench."""
    from dlbench.cli.streams import cleaned
    from dlbench.records.scan import EARLIER

    earlier = [line for line in lines if line.endswith(EARLIER)]
    if len(earlier) > 1:
        lines = [line for line in lines if line not in earlier] + [f"{len(earlier)} runs, the first {earlier[0]}"]
    noted: set[str] = set()
    if context := click.get_current_context(silent=True):
        noted = context.find_root().meta.setdefault("dlbench.withheld", noted)
    for line in lines:
        if line not in noted:
            noted.add(line)
            click.echo(f"note: {cleaned(line)}", err=True)


def expanded(paths: Iterable[Path]) -> list[Path]:
    """Replaces each pattern, unless a file of that name exists, by the folders that match it."""
    matched: list[Path] = []
    for path in paths:
        text = str(path)
        if not glob.has_magic(text) or path.exists():
            matched.append(path)
            continue
        matches = sorted(glob.glob(text))  # noqa: PTH207  # the pattern may be absolute
        if not matches:
            raise UserError(f"{text}: matches no folder of runs")
        matched += [Path(match) for match in matches if Path(match).is_dir()]
    return matched


def open_store(store: Path | None, *, create: bool = False) -> History:
    """Opens the history and updates its index; messages about the index go to standard error."""
    from dlbench.history.importing import open_history

    if store is None:
        raise UserError("no history was named: give --store DIR, or set DLBENCH_HISTORY")
    opened = open_history(store, create=create, notify=note)
    gc.freeze()  # Searching the many entries, which live to the end, for cycles would take a sixth of the time.
    return opened


def note(line: str) -> None:
    """Prints a line on standard error, without control characters."""
    click.echo(f"dlbench: history: {printable(line)}", err=True)


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
    chosen = prepared("report", output, format_name, table=None if table == LIST else table, starts_drawing=False)
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
    if chosen == "html" and sum(run.plan.layout.ranks for run in scanned.runs) <= EARLY_RANKS:
        _start_drawing()
    if any(run.folder.submission.exists() for run in scanned.runs):
        from dlbench.jobs.slurm.accounting import with_accounting

        # Slurm deletes its accounting after some time, so that it is stored with the runs.
        scanned.runs = with_accounting(scanned.runs)[0]
    history = None
    if store is not None:
        require_modules("report --history", "scipy")
        from dlbench.history.history import read_acknowledged
        from dlbench.history.tables import trends_of

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


def _start_drawing() -> None:
    from dlbench.report.formats import drawing

    with suppress(EnvironmentLacksError):  # Reported with the first chart, as not every page has one.
        drawing.start()


def prepared(
    command: str,
    output: Path | None,
    format_name: FormatName | None,
    *,
    suffixes: Mapping[str, FormatName] = SUFFIXES,
    table: str | None = None,
    needs: Sequence[str] = ("numpy",),
    starts_drawing: bool = True,
) -> FormatName:
    """Checks the output options before anything is read, and returns the format. `starts_drawing`: the process that
    draws a page's charts starts now, to be ready when they are made.
    """
    check_writable(output)
    chosen = format_by_suffix(output, format_name, suffixes, "text")
    if table is not None and chosen != "csv":
        raise UserError(f"--table {table}: has no effect on --format {chosen}; only csv contains a single table")
    require_modules(command, *needs, *FORMAT_MODULES.get(chosen, ()))
    if chosen == "html" and starts_drawing:
        _start_drawing()
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

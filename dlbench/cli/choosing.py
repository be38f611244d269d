"""Reads the runs that a command line names: run folders, histories, patterns of names, and the filter `--where`."""

from __future__ import annotations

import gc
import glob
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlbench.cli.options import FILE, F
from dlbench.errors import UserError
from dlbench.units import printable

if TYPE_CHECKING:
    from dlbench.history.history import History
    from dlbench.records.comm import CommScan
    from dlbench.records.scan import Run, Scan


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

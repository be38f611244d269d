"""`dlbench history import`: runs come in."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlbench.cli.history.store import note, open_store, store_options
from dlbench.errors import ExitCode, UserError

if TYPE_CHECKING:
    from dlbench.history.importing import Candidate, Outcome
    from dlbench.history.store import History
    from dlbench.records.folder import RunFolder

_VERDICTS = ("imported", "already there", "skipped", "refused", "damaged")


@click.command("import")
@click.argument("runs", type=click.Path(path_type=Path), nargs=-1, required=True)
@store_options
def import_runs(runs: tuple[Path, ...], store: Path | None, index: Path | None) -> None:
    """Bring RUNS in: folders of runs, single runs, histories, or archives (.tar, .tar.gz) of `dlbench history export`.

    Runs are copied whole and never changed or overwritten afterwards. A run that is there already is left alone; one
    of the same name with other content is refused. Runs that still run, or were killed, have no record and are passed
    over: import them again when they have ended. A run that cannot be copied whole, because a file cannot be read or a
    link, a pipe or a folder too deep lies in it, or whose samples or spans are damaged, counts as damaged and stays
    out: a history keeps whole runs of plain files. The history is
    made if the folder is empty or not there.

    Ends with 2 if a run was refused, and with 4 if one is damaged; all others are in then.

    \b
    Example:
      dlbench history import runs --store /shared/history
    """
    from dlbench.history import importing as history_import
    from dlbench.history.files import is_there

    for path in runs:
        if not is_there(path):
            raise UserError(f"{path}: no such folder of runs or archive")
    opened = open_store(store, index, create=True)
    counts: Counter[str] = Counter()
    with opened.store.room() as room:
        for outcome in history_import.import_runs(opened, _candidates(runs, opened, room), room):
            counts[outcome.verdict] += 1
            if outcome.verdict != "already there":
                click.echo(_line(outcome), err=outcome.verdict in ("refused", "damaged"))
    click.echo(", ".join(f"{counts[verdict]} {verdict}" for verdict in _VERDICTS if counts[verdict]) or "no runs")
    if counts["damaged"]:
        sys.exit(int(ExitCode.INCOMPLETE))
    if counts["refused"]:
        sys.exit(int(ExitCode.USAGE))


def _candidates(paths: tuple[Path, ...], opened: History, room: Path) -> Iterator[Candidate | Outcome]:
    from dlbench.history.archive import read_archive
    from dlbench.history.importing import Candidate

    for path in paths:
        if path.is_dir():
            yield from (Candidate(folder=folder, name=str(folder.path)) for folder in _folders(path))
        else:
            yield from read_archive(path, opened, room)


def _folders(path: Path) -> list[RunFolder]:
    """The runs of a history, or of a folder of runs."""
    from dlbench.history.files import MARKER, Store, is_there
    from dlbench.records.folder import RunFolder
    from dlbench.records.scan import run_folders

    if is_there(path / MARKER):
        return [
            RunFolder(path / name)
            for name in Store.at(path).listing(lambda folder: note(f"{folder!a}: a name that no run has; passed over"))
        ]
    try:
        return run_folders(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _line(outcome: Outcome) -> str:
    why = f": {outcome.why}" if outcome.why else ""
    return "".join(c if c.isprintable() else " " for c in f"{outcome.verdict:<9} {outcome.name}{why}")

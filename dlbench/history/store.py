"""The history of runs over months: immutable run folders are the truth, an index over them is a cache.

Entries are made by analysis, of which this room knows nothing: who opens a history brings the maker along. Opening it
compares the index with the folders that are there; what is new is indexed, what is gone is dropped. So an index that
missed something, because its writer was killed or another wrote at the same time, is right again after the next
opening. It may be deleted at any time, and is made anew where it is damaged.

Changes of level that somebody knows of: who said so, when, and why; a file each in the history, next to its runs.

An acknowledged change is no longer a reason to fail a gate or to call a level worse. It is one again when the level
gets worse still; a further change is another one, with a later date.
"""

from __future__ import annotations

import dataclasses
import errno
import gc
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Literal

from pydantic import Field

from dlbench.errors import IncompleteDataError, RunError, UserError
from dlbench.history.entry import HistoryEntry, matches
from dlbench.history.files import INDEX, Store
from dlbench.opening import folder_below, open_file
from dlbench.records.files import sync_folder, write_atomic, write_json
from dlbench.records.folder import RunFolder
from dlbench.records.scan import load_file
from dlbench.specs.base import Count, Name, Positive, Spec

FOLDER = "acknowledged"
MAX_REASON = 500


class Acknowledgement(Spec):
    """One file of `acknowledged`: a change of level that somebody knows of."""

    format: Literal["dlbench.acknowledgement"] = Field("dlbench.acknowledgement", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    group: Name = Field(description="Configuration, as runs of the history have it.")
    ranks: Count = Field(description="Ranks of the series.")
    nodes: Count = Field(description="Nodes of the series.")
    metric: Name = Field(description="Metric of the series.")
    time: str = Field(max_length=40, description="First night after the change, or of the drift; UTC, ISO 8601.")
    through: str = Field(max_length=40, description="First night that lay after it for certain, or last of the drift.")
    level: Positive = Field(description="The level after the change, in the metric's unit.")
    ratio: Positive = Field(description="Level after over level before (1).")
    reason: str = Field(min_length=1, max_length=MAX_REASON, description="Why it is no reason to act.")
    by: str = Field(max_length=200, description="Who acknowledged it.")
    written: str = Field(max_length=40, description="When; UTC, ISO 8601.")

    @property
    def series(self) -> tuple[str, int, int, str]:
        """Configuration, ranks, nodes, metric."""
        return self.group, self.ranks, self.nodes, self.metric


def read_acknowledged(store: Store) -> list[Acknowledgement]:
    """All of a history, the newest first."""
    try:
        with folder_below(store.path, FOLDER) as folder, os.scandir(folder) as entries:
            kinds = {one.name: one.is_file(follow_symlinks=False) for one in entries if one.name.endswith(".json")}
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"{store.path / FOLDER}: cannot be read: {error.strerror or error}") from None
    found = []
    for name, is_plain in kinds.items():
        path = store.path / FOLDER / name
        if not is_plain:
            raise IncompleteDataError(f"{path}: is no plain file; take it away")
        one = load_file(path, Acknowledgement)
        if one is not None:
            found.append(one)
    return sorted(found, key=lambda one: (one.written, one.through), reverse=True)


def acknowledge(store: Store, made: Acknowledgement) -> None:
    """Writes it into the history. Raises `UserError`: the store cannot be written."""
    stamp = "".join(letter for letter in made.written if letter.isalnum())
    series = f"{made.group}-{made.ranks}-{made.nodes}-{made.metric}"
    path = store.path / FOLDER / f"{series}.{made.time[:10]}.{stamp}.json"
    try:
        with folder_below(store.path, FOLDER, create=True):
            write_json(path, made.model_dump(mode="json"))
        sync_folder(path.parent)
    except OSError as error:
        why = "is a link or no folder" if error.errno in (errno.ENOTDIR, errno.ELOOP) else error.strerror or error
        raise UserError(f"{path.parent}: cannot be written: {why}") from None


INDEX_VERSION = 3  # Of the file's form; what entries mean depends on the version that their maker gives.
SPARE_LINES = 64  # Lines of runs that are gone, or were read anew, that an index may hold beyond as many as its runs.

Row = tuple[int, HistoryEntry]  # Time of the folder's last change (nanoseconds), and the entry.


class Index:
    """The file: a line that says which version made it, then a line for each run, of which a folder's last counts.

    A line is the time of the last change of the run's folder, a blank, and the entry in JSON.
    """

    def __init__(self, path: Path, version: str) -> None:
        self.path = path
        self._head = f"{json.dumps({'format': 'dlbench.history-index', 'version': f'{INDEX_VERSION}: {version}'})}\n"
        self._is_whole = False
        """Whether lines may be appended; else the file is missing, damaged, or of another version."""

    def read(self) -> tuple[dict[str, Row], str]:
        """Returns the rows that can be read, by folder, and what is wrong with the file, empty if nothing."""
        try:
            # No link leads out of a store.
            with open_file(self.path, follow=False) as file:
                head, *lines, end = file.read().decode().split("\n")
        except FileNotFoundError:
            return {}, ""
        except OSError as error:
            return {}, error.strerror or str(error)
        except ValueError:
            return {}, "is no index"
        if f"{head}\n" != self._head:
            return {}, "was made by another version of dlbench, or is no index"
        rows: dict[str, Row] = {}
        is_damaged = end != ""
        for line in lines:
            changed_ns, _, entry = line.partition(" ")
            try:
                made = HistoryEntry.from_json(entry)
                rows[made.folder] = (int(changed_ns), made)
            except (ValueError, KeyError, TypeError):
                is_damaged = True
        self._is_whole = not is_damaged and len(lines) <= 2 * len(rows) + SPARE_LINES
        return rows, "is damaged" if is_damaged else ""

    def write(self, new: Mapping[str, Row], every: Mapping[str, Row]) -> None:
        """Appends rows, or writes the file with all of them where it is not whole. Raises `OSError`: it cannot be."""
        if self._is_whole:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_lines(new))
        else:
            write_atomic(self.path, self._head.encode() + _lines(every), follow=False)
            self._is_whole = True


def _lines(rows: Mapping[str, Row]) -> bytes:
    lines = []
    for changed_ns, entry in rows.values():
        lines.append(f"{changed_ns} {json.dumps(entry.to_dict(), sort_keys=True, allow_nan=False)}\n")
    return "".join(lines).encode()


BATCH = 64  # Runs that are read at once, and written in one transaction.


@dataclass(frozen=True, kw_only=True)
class EntryMaker:
    """Makes entries of run folders."""

    make: Callable[[Sequence[RunFolder]], Sequence[HistoryEntry]]
    """An entry for each folder, in order; damaged runs get one that says so."""
    version: str  # Changes whenever entries would come out differently; an index of another version is made anew.


Notify = Callable[[str], None]


class History:
    """An open history."""

    def __init__(self, path: Path, maker: EntryMaker, *, create: bool = False, notify: Notify = lambda line: None):
        """Opens the history in a folder and brings its index up to date; `create` makes one where there is none.

        `notify` gets a line for what happened to the index.
        """
        self.store = Store.at(path, create=create)
        self.maker = maker
        self._notify = notify
        self._index = Index(path / INDEX, maker.version)
        self._is_writable = True
        self._rows: dict[str, Row] = {}
        self._by_id: dict[str, str] = {}
        self._catch_up()

    def entries(self, where: Mapping[str, str] | None = None) -> list[HistoryEntry]:
        """The runs that match (see `dlbench.history.entry`), by the time they finished, then by name."""
        wanted, chosen = where or {}, []
        for folder, (_, entry) in self._rows.items():
            first = self._by_id[entry.run_id]
            if first != folder:
                # A run that lies in two folders, because someone put it there, counts once.
                why = f"{folder}: holds run {entry.run_id} once more, like {first}; a copy is no repeat and is left out"
                entry = dataclasses.replace(entry, state="damaged", why=why, figures={}, hosts=())
            if matches(entry, wanted):
                chosen.append(entry)
        return sorted(chosen, key=attrgetter("finished", "run_id"))

    def find(self, run_id: str) -> HistoryEntry | None:
        """The run of that name."""
        folder = self._by_id.get(run_id)
        return None if folder is None else self._rows[folder][1]

    def run_folder(self, entry: HistoryEntry) -> Path:
        """Where a run lies."""
        return self.store.path / entry.folder

    def refresh(self, folders: Sequence[str]) -> None:
        """Makes the entries of folders of the store, and takes them into the index."""
        for start in range(0, len(folders), BATCH):
            names = folders[start : start + BATCH]
            made = self.maker.make([RunFolder(self.store.path / name) for name in names])
            self.remember(dataclasses.replace(entry, folder=name) for name, entry in zip(names, made, strict=True))

    def remember(self, entries: Iterable[HistoryEntry]) -> None:
        """Takes entries of folders that lie in the store into the index."""
        rows: dict[str, Row] = {}
        for entry in entries:
            # Else another process has taken it away in this moment.
            with suppress(FileNotFoundError, NotADirectoryError):
                rows[entry.folder] = ((self.store.path / entry.folder).stat().st_mtime_ns, entry)
        self._rows |= rows
        for folder, (_, entry) in rows.items():
            self._by_id.setdefault(entry.run_id, folder)
        if not self._is_writable or not rows:
            return
        try:
            self._index.write(rows, self._rows)
        except (OSError, RunError) as error:
            self._is_writable = False
            why = error.strerror if isinstance(error, OSError) else error
            self._notify(f"{self._index.path}: {why}; entries are kept in memory, for this command alone")

    def _catch_up(self) -> None:
        # Entries stay, in no cycles: collecting meanwhile takes a sixth of a page.
        is_collecting = gc.isenabled()
        gc.disable()
        try:
            rows, problem = self._index.read()
        finally:
            if is_collecting:
                gc.enable()
        if problem:
            self._notify(f"{self._index.path}: {problem}; the index is made anew")
        listing = self.store.listing(lambda folder: self._notify(f"{folder!a}: a name that no run has; passed over"))
        self._rows = {folder: row for folder, row in rows.items() if listing.get(folder) == row[0]}
        for folder, (_, entry) in sorted(self._rows.items()):
            self._by_id.setdefault(entry.run_id, folder)
        self.refresh([folder for folder in listing if folder not in self._rows])

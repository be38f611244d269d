"""The history of runs over months: immutable run folders are the truth, an index over them is a cache.

Opening a history compares the index with the folders that are there, so an index that missed something, because its
writer was killed or another wrote at the same time, is right again after the next opening. It may be deleted at any
time, and is made anew where it is damaged.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

from dlbench.errors import RunError
from dlbench.history.entry import HistoryEntry, matches
from dlbench.history.index import Index, Row
from dlbench.history.store import INDEX, Store
from dlbench.records.folder import RunFolder

BATCH = 64  # Runs that are read at once, and written in one transaction.


MakeEntries = Callable[[Sequence[RunFolder]], Sequence[HistoryEntry]]
"""Makes an entry for each folder, in order; damaged runs get one that says so."""

Notify = Callable[[str], None]


class History:
    """An open history."""

    def __init__(
        self,
        path: Path,
        make: MakeEntries,
        version: str,
        *,
        create: bool = False,
        notify: Notify = lambda line: None,
    ) -> None:
        """Opens the history in a folder and brings its index up to date; `create` makes one where there is none.

        `version` changes whenever `make` would make other entries: an index of another version is made anew. `notify`
        gets a line for what happened to the index.
        """
        self.store = Store.at(path, create=create)
        self.make = make
        self._notify = notify
        self._index = Index(path / INDEX, version)
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
            made = self.make([RunFolder(self.store.path / name) for name in names])
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

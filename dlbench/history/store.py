"""The history of runs over months: immutable run folders are the truth, an index over them is a cache.

Entries are made by analysis, of which this room knows nothing: who opens a history brings the maker along. Opening it
compares the index with the folders that are there; what is new is indexed, what is gone is dropped. So an index that
missed something, because its writer was killed or another index was in use, is right again after the next opening.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlbench.errors import UserError
from dlbench.history.entry import HistoryEntry, matches
from dlbench.history.files import INDEX, Store
from dlbench.history.index import Index, IndexDamagedError, IndexUnusableError, Row
from dlbench.records.folder import RunFolder

BATCH = 64
"""Runs that are read at once, and written in one transaction."""


@dataclass(frozen=True, kw_only=True)
class EntryMaker:
    """Makes entries of run folders."""

    make: Callable[[Sequence[RunFolder]], Sequence[HistoryEntry]]
    """An entry for each folder, in order; damaged runs get one that says so."""
    version: str
    """Changes whenever entries would come out differently; an index of another version is made anew."""


Notify = Callable[[str], None]
"""Takes a line about what a person should know and need not act upon."""


class History:
    """An open history."""

    def __init__(self, store: Store, index: Index, maker: EntryMaker, notify: Notify) -> None:
        """See `open`."""
        self.store = store
        self.maker = maker
        self.notify = notify
        self._index = index
        self._is_writable = True
        self._rows: dict[str, Row] = {}
        self._by_id: dict[str, str] = {}
        self._told: set[str] = set()

    @classmethod
    def open(
        cls,
        path: Path,
        maker: EntryMaker,
        *,
        index: Path | None = None,
        create: bool = False,
        notify: Notify = lambda line: None,
    ) -> History:
        """The history in a folder, its index brought up to date.

        Args:
            path: the folder.
            maker: makes entries of runs.
            index: where the index lies, if not in the folder; a file that is no index is left as it is.
            create: make a history if the folder is empty or not there.
            notify: gets a line for what happened to the index.

        Raises:
            UserError: it is no history, or the index is another file.
            RunError: its folders cannot be read.
        """
        store = Store.at(path, create=create)
        own = path / INDEX
        is_named = index is not None and os.path.realpath(index) != os.path.realpath(own)
        history = cls(store, Index(index or own, maker.version, is_named=is_named), maker, notify)
        history._load()
        history._catch_up()
        return history

    def entries(self, where: Mapping[str, str] | None = None) -> list[HistoryEntry]:
        """The runs that match, by the time they finished, then by name.

        Args:
            where: see `dlbench.history.entry`.

        Raises:
            UserError: a key that entries do not have.
        """
        chosen = (self._once(folder, entry) for folder, (_, entry) in self._rows.items())
        wanted = where or {}
        return sorted(
            (entry for entry in chosen if matches(entry, wanted)), key=lambda entry: (entry.finished, entry.run_id)
        )

    def _once(self, folder: str, entry: HistoryEntry) -> HistoryEntry:
        """A run that lies in two folders, because someone put it there, counts once."""
        first = self._by_id[entry.run_id]
        if first == folder:
            return entry
        why = f"{folder}: holds run {entry.run_id} once more, like {first}; a copy is no repeat and is left out"
        return dataclasses.replace(entry, state="damaged", why=why, figures={}, hosts=())

    def find(self, run_id: str) -> HistoryEntry | None:
        """The run of that name."""
        folder = self._by_id.get(run_id)
        return None if folder is None else self._rows[folder][1]

    def run_folder(self, entry: HistoryEntry) -> Path:
        """Where a run lies."""
        return self.store.path / entry.folder

    def rebuild(self) -> None:
        """Makes the index anew from the folders.

        Raises:
            UserError: it cannot be taken away.
        """
        try:
            self._index.discard(only_damaged=False)
        except IndexUnusableError as error:
            raise UserError(f"{error}; give another place with --index FILE") from None
        self._is_writable = True
        self._set({})
        self._catch_up()

    def refresh(self, folders: Sequence[str]) -> None:
        """Makes the entries of folders of the store, and takes them into the index."""
        for start in range(0, len(folders), BATCH):
            names = folders[start : start + BATCH]
            made = self.maker.make([RunFolder(self.store.path / name) for name in names])
            self.remember(dataclasses.replace(entry, folder=name) for name, entry in zip(names, made, strict=True))

    def remember(self, put: Iterable[HistoryEntry], remove: Iterable[str] = ()) -> None:
        """Takes entries of folders that lie in the store into the index, and folders that are gone out of it."""
        gone = list(remove)
        rows: dict[str, Row] = {}
        for entry in put:
            try:
                changed_ns = (self.store.path / entry.folder).stat().st_mtime_ns
            except (FileNotFoundError, NotADirectoryError):
                # Another process has taken it away in this moment.
                gone.append(entry.folder)
                continue
            rows[entry.folder] = (changed_ns, entry)
        for folder in gone:
            row = self._rows.pop(folder, None)
            if row is not None and self._by_id.get(row[1].run_id) == folder:
                del self._by_id[row[1].run_id]
        self._rows |= rows
        for folder, (_, entry) in rows.items():
            self._by_id.setdefault(entry.run_id, folder)
        self._save(rows, gone)

    def _load(self) -> None:
        try:
            self._set(self._index.read())
        except IndexDamagedError as error:
            self.notify(f"{error}; the index is made anew")
            self._set({})
            try:
                self._index.discard(only_damaged=True)
            except IndexUnusableError as why:
                self._keep_in_memory(why)
        except IndexUnusableError as error:
            self._set({})
            self._keep_in_memory(error)

    def _catch_up(self) -> None:
        """Indexes folders that are new or were changed, forgets those that are gone."""
        listing = self.store.listing(self._tell_of_stray)
        gone = [folder for folder in self._rows if folder not in listing]
        # Put there by another process after the listing was made: not gone.
        gone = [folder for folder in gone if not self.store.holds(folder)]
        if gone:
            self.remember((), gone)
        self.refresh([folder for folder, changed_ns in listing.items() if self._is_new(folder, changed_ns)])

    def _tell_of_stray(self, folder: str) -> None:
        if folder not in self._told:
            self._told.add(folder)
            self.notify(f"{folder!a}: a name that no run has; passed over")

    def _is_new(self, folder: str, changed_ns: int) -> bool:
        known = self._rows.get(folder)
        return known is None or known[0] != changed_ns

    def _set(self, rows: dict[str, Row]) -> None:
        self._rows = rows
        self._by_id = {}
        for folder, (_, entry) in sorted(rows.items()):
            self._by_id.setdefault(entry.run_id, folder)

    def _save(self, rows: Mapping[str, Row], gone: Sequence[str]) -> None:
        if not self._is_writable or not (rows or gone):
            return
        try:
            self._index.write(rows, gone)
        except IndexDamagedError:
            # Another version of dlbench, or the disk, has been at it since it was read: the next opening sees to it.
            self._keep_in_memory(IndexUnusableError(f"{self._index.path}: was changed by something else meanwhile"))
        except IndexUnusableError as error:
            self._keep_in_memory(error)

    def _keep_in_memory(self, error: IndexUnusableError) -> None:
        self._is_writable = False
        self.notify(f"{error}; entries are kept in memory, for this command alone")

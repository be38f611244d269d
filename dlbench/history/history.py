"""A history of runs: immutable run folders, and an index of their entries, which is a cache and rebuilt if damaged."""

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

BATCH = 64  # Runs that are read together, and written to the index together.

MakeEntries = Callable[[Sequence[RunFolder]], Sequence[HistoryEntry]]  # An entry per folder, in order.

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
        """Opens a history, or makes one (`create`); an index of another `version` of `make` is rebuilt."""
        self.store = Store.at(path, create=create)
        self.make = make
        self._notify = notify
        self._index = Index(path / INDEX, version)
        self._is_writable = True
        self._rows: dict[str, Row] = {}
        self._by_id: dict[str, str] = {}
        self._catch_up()

    def entries(self, where: Mapping[str, str] | None = None) -> list[HistoryEntry]:
        """Returns the matching runs (see `dlbench.history.entry`), by the time they finished, then by name."""
        chosen = []
        for folder, (_, entry) in self._rows.items():
            first = self._by_id[entry.run_id]
            if first != folder:
                # A run that somebody copied to a second folder counts once.
                why = f"{folder}: run {entry.run_id} is also in {first}; the copy is not a repeat and is left out"
                entry = dataclasses.replace(entry, state="damaged", why=why, figures={}, hosts=())
            if matches(entry, where or {}):
                chosen.append(entry)
        return sorted(chosen, key=attrgetter("finished", "run_id"))

    def find(self, run_id: str) -> HistoryEntry | None:
        if run_id not in self._by_id:
            return None
        return self._rows[self._by_id[run_id]][1]

    def run_folder(self, entry: HistoryEntry) -> Path:
        return self.store.path / entry.folder

    def refresh(self, folders: Sequence[str]) -> None:
        """Makes the entries of folders of the store, and adds them to the index."""
        for start in range(0, len(folders), BATCH):
            names = folders[start : start + BATCH]
            entries = self.make([RunFolder(self.store.path / name) for name in names])
            self.remember(dataclasses.replace(entry, folder=name) for name, entry in zip(names, entries, strict=True))

    def remember(self, entries: Iterable[HistoryEntry]) -> None:
        rows: dict[str, Row] = {}
        for entry in entries:
            # Another process may delete the folder at this moment.
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
            reason = getattr(error, "strerror", None) or str(error)
            self._notify(f"{self._index.path}: {reason}; entries are kept in memory for this command only")

    def _catch_up(self) -> None:
        # Entries have no cycles: garbage collection would only take time, a sixth of that of a page.
        is_collecting = gc.isenabled()
        gc.disable()
        try:
            rows, problem = self._index.read()
        finally:
            if is_collecting:
                gc.enable()
        if problem:
            self._notify(f"{self._index.path}: {problem}; the index is rebuilt")
        listing = self.store.listing(lambda folder: self._notify(f"{folder!a}: not a name of a run; ignored"))
        self._rows = {folder: row for folder, row in rows.items() if listing.get(folder) == row[0]}
        for folder, (_, entry) in sorted(self._rows.items()):
            self._by_id.setdefault(entry.run_id, folder)
        self.refresh([folder for folder in listing if folder not in self._rows])

"""The history of runs over months: immutable run folders are the truth, an index over them is a cache.

Entries are made by analysis, of which this room knows nothing: who opens a history brings the maker along. Opening it
compares the index with the folders that are there; what is new is indexed, what is gone is dropped. So an index that
missed something, because its writer was killed or another index was in use, is right again after the next opening.

The index is an SQLite file, a cache that may be deleted at any time: SQLite's own locks order its writers, and one that
cannot be read is deleted and made anew. Stores lie on file systems of clusters, hence a rollback journal and no
write-ahead log, which needs memory shared between hosts (sqlite.org/wal.html).

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
import sqlite3
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Literal

from pydantic import Field

from dlbench.errors import DlbenchError, IncompleteDataError, RunError, UserError
from dlbench.history.entry import HistoryEntry, matches
from dlbench.history.files import INDEX, Store, sync_folder
from dlbench.opening import folder_below, kind_of
from dlbench.records.files import write_json
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
    """All of a history, the newest first.

    Raises `IncompleteDataError`: one is damaged, or no plain file. `RunError`: the folder cannot be read, or is a link.
    """
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


INDEX_VERSION = 2  # Of the tables; what entries mean depends on the version that their maker gives.
LOCK_TIMEOUT_S = 60.0

_NEW_TABLES = (
    "DROP TABLE IF EXISTS meta",
    "DROP TABLE IF EXISTS runs",
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE runs (folder TEXT PRIMARY KEY, changed_ns INTEGER NOT NULL, entry TEXT NOT NULL) WITHOUT ROWID",
)


class IndexOutdatedError(DlbenchError):
    """The index is one of another version; the next writing replaces its tables."""


class IndexDamagedError(DlbenchError):
    """The file is no index, or a damaged one."""


class IndexUnusableError(DlbenchError):
    """The index cannot be written, or not be locked: entries are kept in memory."""


Row = tuple[int, HistoryEntry]  # Time of the folder's last change (nanoseconds), and the entry.


class Index:
    """The file; it is open only within a call."""

    def __init__(self, path: Path, version: str, *, is_named: bool = False) -> None:
        """Makes nothing yet.

        Args:
            path: the file.
            version: version of the way entries are made; an index of another one is outdated.
            is_named: whether a person named the file, so that it may hold anything and is never deleted.
        """
        self.path = path
        self._version = f"{INDEX_VERSION}: {version}"
        self._is_named = is_named

    def read(self) -> dict[str, Row]:
        """Returns all rows by folder; none if there is no file.

        Raises `IndexOutdatedError`, `IndexDamagedError`, `IndexUnusableError`: see there.
        """
        if not self._is_there():
            return {}
        rows: dict[str, Row] = {}
        with self._connected("rw" if os.access(self.path, os.W_OK) else "ro") as connection:
            version = _stored_version(connection)
            if version is None:
                return {}
            if version != self._version:
                raise IndexOutdatedError(f"{self.path}: was made by another version of dlbench")
            for folder, changed_ns, entry in connection.execute("SELECT folder, changed_ns, entry FROM runs"):
                rows[folder] = (changed_ns, HistoryEntry.from_json(entry))
        return rows

    def write(self, put: Mapping[str, Row], remove: Iterable[str] = ()) -> None:
        """Replaces rows and removes others, all or none.

        Raises `IndexDamagedError`: see there. `IndexUnusableError`: no permission, no space, or the lock was not to be
        had in time.
        """
        rows = []
        for folder, (changed_ns, entry) in put.items():
            rows.append((folder, changed_ns, json.dumps(entry.to_dict(), sort_keys=True, allow_nan=False)))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise IndexUnusableError(f"{self.path}: cannot be written: {error.strerror or error}") from None
        self._is_there()
        with self._connected("rwc") as connection:
            connection.execute("BEGIN IMMEDIATE")
            if _stored_version(connection) != self._version:
                for statement in _NEW_TABLES:
                    connection.execute(statement)
                connection.execute("INSERT INTO meta VALUES ('version', ?)", (self._version,))
            connection.executemany("DELETE FROM runs WHERE folder = ?", [(folder,) for folder in remove])
            connection.executemany("INSERT OR REPLACE INTO runs VALUES (?, ?, ?)", rows)

    def discard(self) -> None:
        """Deletes a damaged file.

        Raises `UserError`: a person named it, and it may be anything. `OSError`: it cannot be deleted.
        """
        if self._is_named:
            raise UserError(f"--index {self.path}: is no index of a history; name another file, or delete it")
        for path in (self.path.with_name(f"{self.path.name}-journal"), self.path):
            path.unlink(missing_ok=True)

    def _is_there(self) -> bool:
        """Returns whether there is a file. Raises `IndexDamagedError`: something else is in its place."""
        try:
            # No link leads out of a store; a person may name one.
            mode = self.path.stat(follow_symlinks=self._is_named).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise IndexUnusableError(f"{self.path}: cannot be read: {error.strerror or error}") from None
        if not stat.S_ISREG(mode):
            raise IndexDamagedError(f"{self.path}: is {kind_of(mode)}, not an index")
        return True

    @contextmanager
    def _connected(self, mode: str) -> Iterator[sqlite3.Connection]:
        """Opens the file; a transaction that was begun is committed at the end."""
        address = f"{self.path.absolute().as_uri()}?mode={mode}"
        try:
            # Autocommit, so that transactions begin where the code says so.
            connection = sqlite3.connect(address, uri=True, isolation_level=None, timeout=LOCK_TIMEOUT_S)
            with closing(connection), connection:
                yield connection
        except sqlite3.OperationalError as error:
            # No space, no permission, no locks on this file system; but also tables that are not as they should be.
            if "no such" in str(error) or "has no column" in str(error):
                raise IndexDamagedError(f"{self.path}: is no index: {error}") from None
            raise IndexUnusableError(f"{self.path}: {error}") from None
        except (sqlite3.DatabaseError, ValueError, KeyError, TypeError) as error:
            raise IndexDamagedError(f"{self.path}: is damaged: {error}") from None


def _stored_version(connection: sqlite3.Connection) -> str | None:
    """Returns the version that an index has; None for a new file, in which nothing was ever committed."""
    if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        return None
    (version,) = connection.execute("SELECT value FROM meta WHERE name = 'version'").fetchone()
    return str(version)


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

    def __init__(self, store: Store, index: Index, maker: EntryMaker, notify: Notify) -> None:
        """See `open`."""
        self.store = store
        self.maker = maker
        self.notify = notify
        self._index = index
        self._is_writable = True
        self._rows: dict[str, Row] = {}
        self._by_id: dict[str, str] = {}
        self._noted: set[str] = set()

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
        """The history in a folder, its index brought up to date; `create` makes one if the folder is empty or missing.

        The index may lie elsewhere (a file that is no index is left as it is); `notify` gets a line for what happened
        to it.

        Raises `UserError`: it is no history, or the index is another file. `RunError`: its folders cannot be read.
        """
        store = Store.at(path, create=create)
        own = path / INDEX
        is_named = index is not None and os.path.realpath(index) != os.path.realpath(own)
        history = cls(store, Index(index or own, maker.version, is_named=is_named), maker, notify)
        history._load()
        history._catch_up()
        return history

    def entries(self, where: Mapping[str, str] | None = None) -> list[HistoryEntry]:
        """The runs that match (see `dlbench.history.entry`), by the time they finished, then by name.

        Raises `UserError`: a key that entries do not have.
        """
        chosen = (self._once(folder, entry) for folder, (_, entry) in self._rows.items())
        wanted = where or {}
        return sorted((entry for entry in chosen if matches(entry, wanted)), key=attrgetter("finished", "run_id"))

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
        rows: dict[str, Row] = {}
        # Entries stay, in no cycles: collecting meanwhile takes a sixth of a page.
        is_collecting = gc.isenabled()
        gc.disable()
        try:
            rows = self._index.read()
        except IndexOutdatedError as error:
            self.notify(f"{error}; the index is made anew")
        except IndexDamagedError as error:
            self._discard(error)
        except IndexUnusableError as error:
            self._keep_in_memory(error)
        finally:
            if is_collecting:
                gc.enable()
        self._set(rows)

    def _discard(self, damage: IndexDamagedError) -> None:
        try:
            self._index.discard()
        except OSError as error:
            self._keep_in_memory(IndexUnusableError(f"{damage}, and cannot be deleted: {error.strerror or error}"))
        else:
            self.notify(f"{damage}; the index is made anew")

    def _catch_up(self) -> None:
        listing = self.store.listing(self._note_stray)
        gone = [folder for folder in self._rows if folder not in listing]
        # Put there by another process after the listing was made: not gone.
        gone = [folder for folder in gone if not self.store.holds(folder)]
        if gone:
            self.remember((), gone)
        known = {folder: changed_ns for folder, (changed_ns, _) in self._rows.items()}
        self.refresh([folder for folder, changed_ns in listing.items() if known.get(folder) != changed_ns])

    def _note_stray(self, folder: str) -> None:
        if folder not in self._noted:
            self._noted.add(folder)
            self.notify(f"{folder!a}: a name that no run has; passed over")

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

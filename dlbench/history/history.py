"""A history of runs on disk: its folders, an index of their entries, and acknowledged changes of level.

    STORE/history.json               marks the folder as a history
    STORE/runs/<yyyy-mm>/<run id>/   runs by the month in which they were planned; never changed afterwards
    STORE/partial/<pid>.<random>/    runs that a process is copying
    STORE/acknowledged/<name>.json   acknowledged changes: they fail no gate until the level gets worse again
    STORE/index.jsonl                a cache of the entries, which may be deleted at any time and is rebuilt if damaged

A run's folder appears in `runs` by one rename from `partial`, after all its bytes are synced, so that it is complete or
absent; the rename fails if the folder exists, so that one of several importing processes wins. Several people may write
a store, so nothing in it is reached through a link; renames and deletions use descriptors of the parents.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Literal

from pydantic import Field

from dlbench.errors import IncompleteDataError, RunError, UserError, refused
from dlbench.history.entry import HistoryEntry, from_line, matches, to_line
from dlbench.opening import delete_below, folder_below, kind_of, open_file
from dlbench.records.files import Named, sync_folder, write_atomic, write_json
from dlbench.records.folder import RunFolder
from dlbench.records.scan import load_file
from dlbench.specs.base import Count, Name, Positive, Spec

MARKER = "history.json"
INDEX = "index.jsonl"
DAY_S = 86_400.0
_MONTH = re.compile(r"\d{4}-(0[1-9]|1[0-2])")
# Equal to the pattern of `dlbench.specs.base.RunName`.
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
# Names of `Store.room`: no other folders are deleted.
_ROOM_NAME = re.compile(r"\d+\.[0-9a-f]{8}")
INDEX_VERSION = 5  # Version of the file format; entries have a version of their own.
SPARE_LINES = 64  # Lines that an index may have, in addition to one for each `BATCH` runs, before it is rewritten.
LINE_RUNS = 4096  # Maximum runs of a line: more would be read hardly faster, and take more memory.
Row = tuple[int, HistoryEntry]  # Time of the folder's last change (nanoseconds), and the entry.
BATCH = 64  # Runs that are read together, and written to the index together.
MakeEntries = Callable[[Sequence[RunFolder]], Sequence[HistoryEntry]]  # An entry per folder, in order.
Notify = Callable[[str], None]
ACKNOWLEDGED = "acknowledged"
MAX_REASON = 500


class HistoryMark(Spec):
    """The content of `history.json`, which marks a folder as a history."""

    format: Literal["dlbench.history"] = "dlbench.history"
    version: Literal[1] = 1


@dataclass(frozen=True)
class Store:
    """The folders of a history."""

    path: Path

    runs = Named("runs")  # Folders of months, which contain those of runs.
    partial = Named("partial")  # Runs that are being copied.

    @classmethod
    def at(cls, path: Path, *, create: bool = False) -> Store:
        """Opens the history in a folder; `create` makes one if the folder is empty or missing."""
        mark = path / MARKER
        if is_there(mark):
            load_file(mark, HistoryMark)
            return cls(path)
        if not create:
            raise UserError(f"{path}: is not a history of runs; `dlbench history import RUNS --store {path}` makes one")
        try:
            path.mkdir(parents=True, exist_ok=True)
            # Another process may be making the same history.
            others = {entry.name for entry in path.iterdir() if not entry.name.startswith(".")}
            if others - {MARKER, "runs", "partial", "acknowledged", INDEX}:
                raise UserError(f"{path}: has other files and is not a history of runs; choose an empty folder")
            for folder in (path / "runs", path / "partial"):
                folder.mkdir(exist_ok=True)
            write_json(mark, HistoryMark().model_dump(mode="json"))
            sync_folder(path)
        except OSError as error:
            raise refused(error, f"{path}: cannot be made: {error.strerror or error}", UserError) from None
        return cls(path)

    def listing(self, on_ignored: Callable[[str], None] = lambda folder: None) -> dict[str, int]:
        """Returns the folders of runs, relative to the store, with the time of their last change (nanoseconds)."""
        changed_by_folder: dict[str, int] = {}

        def folders(path: Path | int, prefix: str) -> Iterator[os.DirEntry[str]]:
            with os.scandir(path) as entries:
                for entry in sorted(entries, key=attrgetter("name")):
                    if not entry.is_dir(follow_symlinks=False):
                        continue
                    if _RUN_NAME.fullmatch(entry.name):
                        yield entry
                    elif not entry.name.startswith("."):
                        on_ignored(f"{prefix}{entry.name}")

        if self.runs.is_symlink():
            raise RunError(f"{self.runs}: is a link, not a folder of this history; remove it")
        try:
            for month in folders(self.runs, "runs/"):
                prefix = f"runs/{month.name}/"
                # Relative to a descriptor the system looks up one name, not a path, for each of many runs.
                with folder_below(self.path, self.runs.name, month.name) as descriptor:
                    for entry in folders(descriptor, prefix):
                        changed_by_folder[prefix + entry.name] = entry.stat(follow_symlinks=False).st_mtime_ns
        except FileNotFoundError:
            # Another process deleted a folder, or the whole history.
            return changed_by_folder if self.runs.is_dir() else {}
        except OSError as error:
            raise RunError(f"{self.runs}: cannot be read: {error.strerror or error}") from None
        return changed_by_folder

    def folders(self, on_ignored: Callable[[str], None] = lambda folder: None) -> list[RunFolder]:
        return [RunFolder(self.path / folder) for folder in self.listing(on_ignored)]

    def place_of(self, run_id: str, created: str) -> str:
        month = created[:7]
        if not _MONTH.fullmatch(month):
            month = "undated"
        return f"runs/{month}/{run_id}"

    def place(self, staged: Path, folder: str) -> bool:
        """Moves a complete folder from `partial` to its place, not yet durably (`sync`); returns False if that exists
        already.

        Raises `NotAFolderError`: a file, a link or a pipe has the name of its month; `RunError`: the file system
        refuses.
        """
        target = self.path / folder
        try:
            with (
                folder_below(self.path, *staged.relative_to(self.path).parts[:-1]) as source,
                folder_below(self.path, *Path(folder).parts[:-1], create=True) as month,
            ):
                os.rename(staged.name, target.name, src_dir_fd=source, dst_dir_fd=month)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            for parent in [
                self.path / folder_path for folder_path in reversed(Path(folder).parents) if folder_path.name
            ]:
                kind = _kind_unless_folder(parent)
                if kind:
                    raise NotAFolderError(f"{parent}: is {kind}, not a folder of this history; remove it") from None
            raise RunError(f"{target}: cannot be changed: {error.strerror or error}") from None
        return True

    def delete_staged(self, staged: Path) -> None:
        delete_below(self.path, *staged.relative_to(self.path).parts)

    def sync(self, folders: Iterable[str]) -> None:
        """Syncs the names of these folders to disk. Raises `RunError`: the file system refuses."""
        try:
            for parent in {(self.path / folder).parent for folder in folders} | {self.runs}:
                sync_folder(parent)
        except OSError as error:
            raise refused(error, f"{self.runs}: cannot be written: {error.strerror or error}") from None

    @contextmanager
    def room(self) -> Iterator[Path]:
        """Makes a temporary folder of this process in `partial`; deletes those of processes that were killed."""
        name = f"{os.getpid()}.{secrets.token_hex(4)}"
        try:
            with folder_below(self.path, self.partial.name, create=True) as partial:
                _delete_old_rooms(partial)
                os.mkdir(name, dir_fd=partial)
        except OSError as error:
            kind = _kind_unless_folder(self.partial)
            if kind:
                raise UserError(f"{self.partial}: is {kind}, not a folder of this history; remove it") from None
            raise UserError(f"{self.partial}: cannot be written: {error.strerror or error}") from None
        try:
            yield self.partial / name
        finally:
            delete_below(self.path, self.partial.name, name)


class NotAFolderError(RunError):
    """A path that should be a folder of the history is a file, a link or a pipe."""


def _kind_unless_folder(path: Path) -> str:
    """Returns the kind of a file, e.g. ``a link``; empty for a folder or nothing."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return ""
    return "" if stat.S_ISDIR(mode) else kind_of(mode)


def _delete_old_rooms(partial: int) -> None:
    """Deletes rooms that have not changed for a day: their process has ended."""
    with os.scandir(partial) as entries:
        rooms = [entry for entry in entries if _ROOM_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)]
    for entry in rooms:
        with suppress(OSError):
            if time.time() - entry.stat(follow_symlinks=False).st_mtime > DAY_S:
                shutil.rmtree(entry.name, ignore_errors=True, dir_fd=partial)


def is_there(path: Path) -> bool:
    """Returns whether a file or folder exists. Raises `UserError`: permission denied."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    return True


class Index:
    """The file: its version, then a line for the runs of each writing: the change times of their folders (JSON), a tab,
    their entries (`to_line`). The last entry of a folder counts.
    """

    def __init__(self, path: Path, version: str) -> None:
        self.path = path
        head = {"format": "dlbench.history-index", "version": f"{INDEX_VERSION}: {version}"}
        self._head = f"{json.dumps(head)}\n".encode()
        self._is_whole = False
        """Whether lines may be appended; otherwise the file is missing, damaged, or of another version."""

    def read(self) -> tuple[dict[str, Row], str]:
        """Returns the readable rows, by folder, and the problem of the file, empty if it has none."""
        rows: dict[str, Row] = {}
        num_lines = num_damaged = 0
        try:
            # A link could lead out of the store.
            with open_file(self.path, follow=False) as file:
                if file.readline() != self._head:
                    return {}, "was made by another version of dlbench, or is not an index"
                for line in file:
                    num_lines += 1
                    try:
                        rows |= _rows(line)
                    except (ValueError, TypeError, AttributeError, IndexError):
                        num_damaged += 1
        except FileNotFoundError:
            return {}, ""
        except OSError as error:
            return {}, error.strerror or str(error)
        self._is_whole = not num_damaged and num_lines <= len(rows) / BATCH + SPARE_LINES
        return rows, "is damaged" if num_damaged else ""

    def write(self, new: Mapping[str, Row], every: Mapping[str, Row]) -> None:
        """Appends the new rows, or writes a missing or damaged file with every row. Raises `OSError`."""
        if self._is_whole:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_lines(new))
        else:
            write_atomic(self.path, self._head + _lines(every), follow=False)
            self._is_whole = True


def _lines(rows: Mapping[str, Row]) -> bytes:
    lines = []
    remaining = iter(rows.values())
    while chosen := list(itertools.islice(remaining, LINE_RUNS)):
        changed_ns, entries = zip(*chosen, strict=True)
        lines.append(f"{json.dumps(changed_ns)}\t{to_line(entries)}\n".encode())
    return b"".join(lines)


def _rows(line: bytes) -> dict[str, Row]:
    """Returns the rows of a line, by folder. Raises errors as `from_line`: it is damaged, or was not written to its
    end.
    """
    changed, _, text = line.decode().partition("\t")
    if not text.endswith("\n"):
        raise ValueError("not written to its end")
    changed_ns = json.loads(changed)
    rows = {}
    for folder_changed_ns, entry in zip(changed_ns, from_line(text, len(changed_ns)), strict=True):
        rows[entry.folder] = (int(folder_changed_ns), entry)
    return rows


class History:
    """An open history."""

    def __init__(
        self, path: Path, make: MakeEntries, version: str, *, create: bool = False, notify: Notify = lambda line: None
    ) -> None:
        """Opens a history, or makes one (`create`); an index of another `version` of `make` is rebuilt."""
        self.store = Store.at(path, create=create)
        self.make = make
        self._notify = notify
        self._index = Index(path / INDEX, version)
        self._is_writable = True
        self._by_id: dict[str, str] = {}
        rows, problem = self._index.read()
        if problem:
            notify(f"{self._index.path}: {problem}; the index is rebuilt")
        listing = self.store.listing(lambda folder: notify(f"{folder!a}: not a name of a run; ignored"))
        self._rows = {folder: row for folder, row in rows.items() if listing.get(folder) == row[0]}
        for folder, (_, entry) in sorted(self._rows.items()):
            self._by_id.setdefault(entry.run_id, folder)
        self.refresh([folder for folder in listing if folder not in self._rows])

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


class Acknowledgement(Spec):
    """One file of `acknowledged`: an acknowledged change of level."""

    format: Literal["dlbench.acknowledgement"] = Field("dlbench.acknowledgement", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    group: Name = Field(description="Configuration, as runs of the history have it.")
    ranks: Count = Field(description="Ranks of the series.")
    nodes: Count = Field(description="Nodes of the series.")
    metric: Name = Field(description="Metric of the series.")
    time: str = Field(max_length=40, description="First night after the change, or of the drift; UTC, ISO 8601.")
    through: str = Field(max_length=40, description="First night certainly after the change, or last of the drift.")
    level: Positive = Field(description="The level after the change, in the metric's unit.")
    ratio: Positive = Field(description="Level after over level before (1).")
    reason: str = Field(min_length=1, max_length=MAX_REASON, description="Why no action is needed.")
    by: str = Field(max_length=200, description="Who acknowledged it.")
    written: str = Field(max_length=40, description="When; UTC, ISO 8601.")

    @property
    def series(self) -> tuple[str, int, int, str]:
        return self.group, self.ranks, self.nodes, self.metric


def read_acknowledged(store: Store) -> list[Acknowledgement]:
    """Returns all acknowledgements of a history, the newest first."""
    try:
        with folder_below(store.path, ACKNOWLEDGED) as folder, os.scandir(folder) as entries:
            kinds = {
                entry.name: entry.is_file(follow_symlinks=False) for entry in entries if entry.name.endswith(".json")
            }
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"{store.path / ACKNOWLEDGED}: cannot be read: {error.strerror or error}") from None
    acknowledgements = []
    for name, is_plain in kinds.items():
        path = store.path / ACKNOWLEDGED / name
        if not is_plain:
            raise IncompleteDataError(f"{path}: is not a regular file; remove it")
        acknowledgement = load_file(path, Acknowledgement)
        if acknowledgement is not None:
            acknowledgements.append(acknowledgement)
    return sorted(acknowledgements, key=attrgetter("written", "through"), reverse=True)


def acknowledge(store: Store, acknowledgement: Acknowledgement) -> None:
    """Writes an acknowledgement. Raises `UserError`: the store cannot be written."""
    stamp = "".join(letter for letter in acknowledgement.written if letter.isalnum())
    series = f"{acknowledgement.group}-{acknowledgement.ranks}-{acknowledgement.nodes}-{acknowledgement.metric}"
    path = store.path / ACKNOWLEDGED / f"{series}.{acknowledgement.time[:10]}.{stamp}.json"
    try:
        with folder_below(store.path, ACKNOWLEDGED, create=True):
            write_json(path, acknowledgement.model_dump(mode="json"))
        sync_folder(path.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            reason = "is a link or not a folder"
        raise UserError(f"{path.parent}: cannot be written: {reason}") from None

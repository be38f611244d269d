"""The folders of a history on disk.

    STORE/history.json               marks the folder as a history
    STORE/runs/<yyyy-mm>/<run id>/   runs by the month in which they were planned; never changed afterwards
    STORE/partial/<pid>.<random>/    runs that a process is copying
    STORE/acknowledged/<name>.json   acknowledged changes, see `dlbench.history.acknowledgements`
    STORE/index.jsonl                a cache, see `dlbench.history.index`

A run's folder appears in `runs` by one rename from `partial`, after all its bytes are synced, so that it is complete or
absent; the rename fails if the folder exists, so that one of several importing processes wins. Several people may write
a store, so nothing in it is reached through a link; renames and deletions use descriptors of the parents.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Literal

from dlbench.errors import RunError, UserError, refused
from dlbench.opening import delete_below, folder_below, kind_of
from dlbench.records.files import Named, sync_folder, write_json
from dlbench.records.folder import RunFolder
from dlbench.records.scan import load_file
from dlbench.specs.base import Spec

MARKER = "history.json"
INDEX = "index.jsonl"
DAY_S = 86_400.0

_MONTH = re.compile(r"\d{4}-(0[1-9]|1[0-2])")
# Equal to the pattern of `dlbench.specs.base.RunName`.
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
# Names of `Store.room`: no other folders are deleted.
_ROOM_NAME = re.compile(r"\d+\.[0-9a-f]{8}")


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

        def folders(path: Path, prefix: str) -> Iterator[os.DirEntry[str]]:
            for entry in sorted(os.scandir(path), key=attrgetter("name")):
                if not entry.is_dir(follow_symlinks=False) or entry.name.startswith("."):
                    continue
                if _RUN_NAME.fullmatch(entry.name):
                    yield entry
                else:
                    on_ignored(f"{prefix}/{entry.name}")

        if self.runs.is_symlink():
            raise RunError(f"{self.runs}: is a link, not a folder of this history; remove it")
        try:
            for month in folders(self.runs, "runs"):
                for entry in folders(Path(month.path), f"runs/{month.name}"):
                    changed_by_folder[f"runs/{month.name}/{entry.name}"] = entry.stat(follow_symlinks=False).st_mtime_ns
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

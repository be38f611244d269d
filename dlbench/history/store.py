"""The folders of a history: where a run's lies, how it gets there whole, how what was left behind is swept away.

    STORE/history.json               says that this is a history
    STORE/runs/<yyyy-mm>/<run id>/   the runs, by the month in which they were planned; never changed afterwards
    STORE/partial/<who>/             what is being copied in; <who> is a process and a random word
    STORE/acknowledged/<name>.json   changes of level that are known, see `dlbench.history.acknowledgements`
    STORE/index.jsonl                a cache, see `dlbench.history.index`

A run's folder appears in `runs` by one rename from `partial`, after all its bytes are synced, so that it is there whole
or not at all, whoever is killed when. The rename refuses a folder that is there already, so that of several processes
that bring the same run one wins.

Several people may write a store. So nothing in it is reached through a link: neither `runs`, nor a month, nor `partial`
may be one, and whatever is renamed or deleted is named from descriptors of the folders that it lies in.
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
# As `dlbench.specs.base.RunName`.
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
# As `Store.room` makes them: nothing of any other name is swept away.
_ROOM_NAME = re.compile(r"\d+\.[0-9a-f]{8}")


class HistoryMark(Spec):
    """`history.json`: says that a folder is a history."""

    format: Literal["dlbench.history"] = "dlbench.history"
    version: Literal[1] = 1


@dataclass(frozen=True)
class Store:
    """The folders of a history."""

    path: Path

    runs = Named("runs")  # Months, and in them runs.
    partial = Named("partial")  # Runs that are being copied in.

    @classmethod
    def at(cls, path: Path, *, create: bool = False) -> Store:
        """The history in a folder; `create` makes one if the folder is empty or not there."""
        mark = path / MARKER
        if is_there(mark):
            load_file(mark, HistoryMark)
            return cls(path)
        if not create:
            raise UserError(f"{path}: is no history of runs; `dlbench history import RUNS --store {path}` makes one")
        try:
            path.mkdir(parents=True, exist_ok=True)
            # Another process may be making the same one right now.
            others = {name.name for name in path.iterdir() if not name.name.startswith(".")}
            if others - {MARKER, "runs", "partial", "acknowledged", INDEX}:
                raise UserError(f"{path}: holds other files and is no history of runs; choose an empty folder")
            for folder in (path / "runs", path / "partial"):
                folder.mkdir(exist_ok=True)
            write_json(mark, HistoryMark().model_dump(mode="json"))
            sync_folder(path)
        except OSError as error:
            raise refused(error, f"{path}: cannot be made: {error.strerror or error}", UserError) from None
        return cls(path)

    def listing(self, pass_over: Callable[[str], None] = lambda folder: None) -> dict[str, int]:
        """Folders of runs, relative to the store, with the time of their last change (nanoseconds).

        `pass_over` gets folders with names that no run, and no month, has; hidden ones are none.
        """
        found: dict[str, int] = {}

        def folders(path: Path, prefix: str) -> Iterator[os.DirEntry[str]]:
            for entry in sorted(os.scandir(path), key=lambda one: one.name):
                if not entry.is_dir(follow_symlinks=False) or entry.name.startswith("."):
                    continue
                if _RUN_NAME.fullmatch(entry.name):
                    yield entry
                else:
                    pass_over(f"{prefix}/{entry.name}")

        if self.runs.is_symlink():
            raise RunError(f"{self.runs}: is a link, not a folder of this history; take it away")
        try:
            for month in folders(self.runs, "runs"):
                for entry in folders(Path(month.path), f"runs/{month.name}"):
                    found[f"runs/{month.name}/{entry.name}"] = entry.stat(follow_symlinks=False).st_mtime_ns
        except FileNotFoundError:
            # Taken away by another process in this moment.
            return found if self.runs.is_dir() else {}
        except OSError as error:
            raise RunError(f"{self.runs}: cannot be read: {error.strerror or error}") from None
        return found

    def folders(self, pass_over: Callable[[str], None] = lambda folder: None) -> list[RunFolder]:
        """Returns the folders of its runs; `pass_over` as of `listing`."""
        return [RunFolder(self.path / folder) for folder in self.listing(pass_over)]

    def place_of(self, run_id: str, created: str) -> str:
        """Where a run's folder belongs, relative to the store."""
        month = created[:7]
        return f"runs/{month if _MONTH.fullmatch(month) else 'undated'}/{run_id}"

    def place(self, staged: Path, folder: str) -> bool:
        """Puts a whole folder from `partial` where it belongs; False if another is there already.

        `sync` makes it survive a loss of power.

        Raises `NotAFolderError`: a file, a link or a pipe stands where its month should be. `RunError`: the file system
        refuses.
        """
        target = self.path / folder
        try:
            parents = staged.relative_to(self.path).parts[:-1], Path(folder).parts[:-1]
            with (
                folder_below(self.path, *parents[0]) as source,
                folder_below(self.path, *parents[1], create=True) as month,
            ):
                os.rename(staged.name, target.name, src_dir_fd=source, dst_dir_fd=month)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            for parent in [self.path / one for one in reversed(Path(folder).parents) if one.name]:
                if what := _instead_of_folder(parent):
                    raise NotAFolderError(f"{parent}: is {what}, not a folder of this history; take it away") from None
            raise RunError(f"{target}: cannot be changed: {error.strerror or error}") from None
        return True

    def delete_staged(self, staged: Path) -> None:
        """Deletes a folder that lies in `partial`; what cannot go stays."""
        delete_below(self.path, *staged.relative_to(self.path).parts)

    def sync(self, folders: Iterable[str]) -> None:
        """Makes the names of these folders survive a loss of power. Raises `RunError`: the file system refuses."""
        try:
            for parent in {(self.path / folder).parent for folder in folders} | {self.runs}:
                sync_folder(parent)
        except OSError as error:
            raise refused(error, f"{self.runs}: cannot be written: {error.strerror or error}") from None

    @contextmanager
    def room(self) -> Iterator[Path]:
        """A folder of this process in `partial`, gone afterwards; what was left there a day ago is swept away first."""
        name = f"{os.getpid()}.{secrets.token_hex(4)}"
        try:
            with folder_below(self.path, self.partial.name, create=True) as partial:
                _sweep(partial)
                os.mkdir(name, dir_fd=partial)
        except OSError as error:
            what = _instead_of_folder(self.partial)
            why = f"cannot be written: {error.strerror or error}"
            if what:
                why = f"is {what}, not a folder of this history; take it away"
            raise UserError(f"{self.partial}: {why}") from None
        try:
            yield self.partial / name
        finally:
            delete_below(self.path, self.partial.name, name)


class NotAFolderError(RunError):
    """Something else stands where a folder of the history should be."""


def _instead_of_folder(path: Path) -> str:
    """What stands at a path where a folder should be; empty if it is one, or nothing is there."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return ""
    return "" if stat.S_ISDIR(mode) else kind_of(mode)


def _sweep(partial: int) -> None:
    """Deletes rooms in which nothing has changed for a day: their process has ended."""
    with os.scandir(partial) as entries:
        rooms = [entry for entry in entries if _ROOM_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)]
    for entry in rooms:
        with suppress(OSError):
            if time.time() - entry.stat(follow_symlinks=False).st_mtime > DAY_S:
                shutil.rmtree(entry.name, ignore_errors=True, dir_fd=partial)


def is_there(path: Path) -> bool:
    """Whether there is a file or folder of that name. Raises `UserError`: that cannot be known without permission."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    return True

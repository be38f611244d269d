"""The files of a history: where a run's folder lies, how it gets there whole, how what was left behind is swept away.

    STORE/history.json               says that this is a history
    STORE/runs/<yyyy-mm>/<run id>/   the runs, by the month in which they were planned; never changed afterwards
    STORE/partial/<who>/             what is being copied in or taken away; <who> is host, process namespace, process
    STORE/index.sqlite               a cache, see `dlbench.records.history_index`

A run's folder appears in `runs` by one rename from `partial`, after all its bytes are synced, so that it is there whole
or not at all, whoever is killed when. The rename refuses a folder that is there already, so that of several processes
that bring the same run one wins.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dlbench.errors import IncompleteDataError, RunError, UserError
from dlbench.records.files import write_json
from dlbench.records.folder import RunFolder
from dlbench.records.scan import load_file
from dlbench.specs.base import Spec

MARKER = "history.json"
INDEX = "index.sqlite"
DAY_S = 86_400.0
MAX_DEPTH = 3
"""Folders within a run's folder; `checkpoints/` is one."""

# What figures are made of: energy needs the samples. All else may differ, or go, without a figure changing.
_FIGURE_FILE = re.compile(r"plan\.json|record\.json|rank-\d{4,}\.steps|node-\d{4,}\.samples")
_MONTH = re.compile(r"\d{4}-(0[1-9]|1[0-2])")
_BLOCK = 1 << 20


class HistoryMark(Spec):
    """`history.json`: says that a folder is a history."""

    format: Literal["dlbench.history"] = "dlbench.history"
    version: Literal[1] = 1


@dataclass(frozen=True)
class Store:
    """The folders of a history."""

    path: Path

    @property
    def runs(self) -> Path:
        """Months, and in them runs."""
        return self.path / "runs"

    @property
    def partial(self) -> Path:
        """What is not there yet, or no more."""
        return self.path / "partial"

    @classmethod
    def at(cls, path: Path, *, create: bool = False) -> Store:
        """The history in a folder.

        Args:
            path: the folder.
            create: make one if the folder is empty or not there.

        Raises:
            UserError: it is none, or cannot be made.
            IncompleteDataError: its mark is damaged.
        """
        mark = path / MARKER
        if mark.exists():
            load_file(mark, HistoryMark)
            return cls(path)
        if not create:
            raise UserError(f"{path}: is no history of runs; `dlbench history import RUNS --store {path}` makes one")
        try:
            path.mkdir(parents=True, exist_ok=True)
            # Another process may be making the same one right now.
            others = {name.name for name in path.iterdir() if not name.name.startswith(".")}
            if others - {MARKER, "runs", "partial", INDEX, f"{INDEX}.lock", f"{INDEX}-journal"}:
                raise UserError(f"{path}: holds other files and is no history of runs; choose an empty folder")
            for folder in (path / "runs", path / "partial"):
                folder.mkdir(exist_ok=True)
            write_json(mark, HistoryMark().model_dump(mode="json"))
            sync_folder(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be made: {error.strerror or error}") from None
        return cls(path)

    def listing(self) -> dict[str, int]:
        """Folders of runs, relative to the store, with the time of their last change (nanoseconds)."""
        found: dict[str, int] = {}
        try:
            months = sorted(entry.name for entry in os.scandir(self.runs) if entry.is_dir(follow_symlinks=False))
            for month in months:
                with os.scandir(self.runs / month) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                            found[f"runs/{month}/{entry.name}"] = entry.stat(follow_symlinks=False).st_mtime_ns
        except FileNotFoundError:
            # Taken away by another process in this moment.
            return found if self.runs.is_dir() else {}
        except OSError as error:
            raise RunError(f"{self.runs}: cannot be read: {error.strerror or error}") from None
        return found

    def place_of(self, run_id: str, created: str) -> str:
        """Where a run's folder belongs, relative to the store."""
        month = created[:7]
        return f"runs/{month if _MONTH.fullmatch(month) else 'undated'}/{run_id}"

    def place(self, staged: Path, folder: str) -> bool:
        """Puts a whole folder from `partial` where it belongs; False if another is there already.

        `sync` makes it survive a loss of power.

        Raises:
            RunError: the file system refuses.
        """
        target = self.path / folder
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            staged.rename(target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise RunError(f"{target}: cannot be written: {error.strerror or error}") from None
        return True

    def sync(self, folders: Iterable[str]) -> None:
        """Makes the names of these folders survive a loss of power.

        Raises:
            RunError: the file system refuses.
        """
        try:
            for parent in {(self.path / folder).parent for folder in folders} | {self.runs}:
                sync_folder(parent)
        except OSError as error:
            raise RunError(f"{self.runs}: cannot be written: {error.strerror or error}") from None

    @contextmanager
    def room(self) -> Iterator[Path]:
        """A folder of this process in `partial`, gone afterwards; what dead processes left there is swept away first.

        Raises:
            UserError: the store cannot be written.
        """
        try:
            self.partial.mkdir(exist_ok=True)
            self._sweep()
            room = self.partial / f"{_myself()}.{os.getpid()}.{secrets.token_hex(4)}"
            room.mkdir()
        except OSError as error:
            raise UserError(f"{self.partial}: cannot be written: {error.strerror or error}") from None
        try:
            yield room
        finally:
            shutil.rmtree(room, ignore_errors=True)

    def _sweep(self) -> None:
        for left in self.partial.iterdir():
            if _is_abandoned(left):
                shutil.rmtree(left, ignore_errors=True)


def _myself() -> str:
    """Host and process namespace: within them a process id means one process."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", platform.node()) or "host"
    return f"{host}.{Path('/proc/self/ns/pid').stat().st_ino}"


def _is_abandoned(room: Path) -> bool:
    """Whether its process is dead, or, where that cannot be told from here, nothing has changed in it for a day."""
    who, _, rest = room.name.rpartition(".")[0].rpartition(".")
    if who == _myself() and rest.isdigit():
        return not Path(f"/proc/{rest}").exists()
    try:
        return time.time() - room.stat().st_mtime > DAY_S
    except OSError:
        return False


def sync_folder(path: Path) -> None:
    """Makes the names in a folder survive a loss of power.

    Raises:
        OSError: the file system refuses.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def files_of(path: Path) -> dict[str, os.stat_result]:
    """The files of a run's folder by relative name; temporary ones, whose names begin with a dot, are passed over.

    Raises:
        IncompleteDataError: it holds links or special files, or folders too deep, or cannot be read.
    """
    found: dict[str, os.stat_result] = {}

    def look(folder: Path, prefix: str, depth: int) -> None:
        for entry in sorted(os.scandir(folder), key=lambda one: one.name):
            if entry.name.startswith("."):
                continue
            if not entry.name.isprintable() or "\\" in entry.name:
                raise IncompleteDataError(f"{entry.path!a}: a name that no file of a run has")
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                found[prefix + entry.name] = status
            elif stat.S_ISDIR(status.st_mode) and depth < MAX_DEPTH:
                look(Path(entry.path), f"{prefix}{entry.name}/", depth + 1)
            else:
                what = "a folder too deep" if stat.S_ISDIR(status.st_mode) else "neither a file nor a folder"
                raise IncompleteDataError(f"{entry.path}: {what}; a history keeps plain files alone")

    try:
        look(path, "", 0)
    except OSError as error:
        raise IncompleteDataError(f"{path}: cannot be read: {error.strerror or error}") from None
    return found


def content_digest(folder: RunFolder) -> str:
    """SHA-256, in hexadecimal, over the files that figures are made of: plan, record, step files, samples.

    For each, by name: the name, a zero byte, the number of bytes in decimal, a zero byte, the bytes.

    Raises:
        IncompleteDataError: the folder cannot be read.
    """
    digest = hashlib.sha256()
    try:
        names = sorted(entry.name for entry in os.scandir(folder.path) if _FIGURE_FILE.fullmatch(entry.name))
        for name in names:
            with (folder.path / name).open("rb") as file:
                digest.update(f"{name}\0{os.fstat(file.fileno()).st_size}\0".encode())
                while block := file.read(_BLOCK):
                    digest.update(block)
    except OSError as error:
        raise IncompleteDataError(f"{folder.path}: cannot be read: {error.strerror or error}") from None
    return digest.hexdigest()


def copy_run(source: Path, target: Path) -> None:
    """Copies a run's folder, every byte synced.

    Raises:
        IncompleteDataError: it holds what a history does not keep, or changed meanwhile: it still runs.
        RunError: the copy cannot be written.
    """
    before = files_of(source)
    try:
        target.mkdir(parents=True)
        for name in before:
            _copy_file(source / name, target / name)
        for folder in {(target / name).parent for name in before} | {target}:
            sync_folder(folder)
    except OSError as error:
        raise RunError(f"{target}: cannot be written: {error.strerror or error}") from None
    after = files_of(source)
    changed = [name for name in before.keys() | after.keys() if _mark(before.get(name)) != _mark(after.get(name))]
    if changed:
        raise IncompleteDataError(f"{source / min(changed)}: changed while it was copied: the run has not ended")


def _mark(status: os.stat_result | None) -> tuple[int, int] | None:
    return None if status is None else (status.st_size, status.st_mtime_ns)


def _copy_file(source: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True, parents=True)
    with source.open("rb") as read, target.open("xb") as written:
        shutil.copyfileobj(read, written, _BLOCK)
        written.flush()
        os.fsync(written.fileno())


def num_bytes(path: Path) -> int:
    """Bytes of the files of a folder."""
    return sum(status.st_size for status in files_of(path).values())

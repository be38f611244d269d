"""Imports runs into a history, a batch at a time: check, copy, rename into place, index."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Literal

from dlbench.errors import IncompleteDataError, RunError, refused
from dlbench.history.entry import HistoryEntry
from dlbench.history.history import BATCH, History, NotAFolderError
from dlbench.opening import open_file
from dlbench.records.files import sync_folder
from dlbench.records.folder import RunFolder
from dlbench.records.rows.damage import damaged_traces
from dlbench.records.scan import COMM_FORMAT, EARLIER, text_in

MAX_DEPTH = 3  # Depth of folders within a run's folder, e.g. `checkpoints/`.
# Files whose content identifies a run. Figures need nothing else, except for the stages of energy the spans of each
# node's first rank; all other files may differ or be missing.
_FIGURE_FILE = re.compile(r"plan\.json|record\.json|(rank|node)-\d{4,}\.steps|node-\d{4,}\.samples")
_BLOCK = 1 << 20
ImportVerdict = Literal["imported", "already there", "skipped", "refused", "damaged"]
COPIES_AT_ONCE = 8  # Copying waits for the disk, or for a server, most of the time.


class StillRunningError(IncompleteDataError):
    """A run changed while it was copied, because it is still active."""


def files_of(path: Path) -> dict[str, os.stat_result]:
    """Returns the status of each file of a run's folder, by relative name; temporary (hidden) ones are left out."""
    status_by_name: dict[str, os.stat_result] = {}

    def scan(folder: Path, prefix: str, depth: int) -> None:
        for entry in sorted(os.scandir(folder), key=attrgetter("name")):
            if entry.name.startswith("."):
                continue
            if not entry.name.isprintable() or "\\" in entry.name:
                raise IncompleteDataError(f"{entry.path!a}: a name that no file of a run has")
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                # An active run has deleted it.
                continue
            if stat.S_ISREG(status.st_mode):
                status_by_name[prefix + entry.name] = status
            elif not stat.S_ISDIR(status.st_mode):
                raise IncompleteDataError(f"{entry.path}: neither a file nor a folder; a history keeps files only")
            elif depth >= MAX_DEPTH:
                raise IncompleteDataError(f"{entry.path}: more than {MAX_DEPTH} folders deep")
            else:
                with suppress(FileNotFoundError):
                    scan(Path(entry.path), f"{prefix}{entry.name}/", depth + 1)

    try:
        scan(path, "", 0)
    except OSError as error:
        raise IncompleteDataError(f"{path}: cannot be read: {error.strerror or error}") from None
    return status_by_name


def content_digest(folder: RunFolder) -> str:
    """Returns the SHA-256, in hexadecimal, of the files that figures are made of: plan, record, step files, samples.

    It is over, for each file by name: the name, a zero byte, the number of bytes in decimal, a zero byte, the bytes.
    """
    digest = hashlib.sha256()
    try:
        entries = [entry for entry in os.scandir(folder.path) if _FIGURE_FILE.fullmatch(entry.name)]
        for entry in entries:
            if not entry.is_file(follow_symlinks=False):
                raise IncompleteDataError(f"{entry.path}: is not a regular file")
        for name in sorted(entry.name for entry in entries):
            with open_file(folder.path / name, follow=False) as file:
                digest.update(f"{name}\0{os.fstat(file.fileno()).st_size}\0".encode())
                while block := file.read(_BLOCK):
                    digest.update(block)
    except OSError as error:
        raise IncompleteDataError(f"{folder.path}: cannot be read: {error.strerror or error}") from None
    return digest.hexdigest()


def copy_run(source: Path, target: Path) -> None:
    """Copies a run's folder and syncs it to disk.

    Raises `StillRunningError`: it changed during the copy; `IncompleteDataError`: it has other than files and folders,
    or cannot be read; `RunError`: the copy cannot be written.
    """
    before = {name: (status.st_size, status.st_mtime_ns) for name, status in files_of(source).items()}
    try:
        target.mkdir(parents=True)
        for name in before:
            _copy_file(source / name, target / name)
        for folder in {(target / name).parent for name in before} | {target}:
            sync_folder(folder)
    except OSError as error:
        raise refused(error, f"{target}: cannot be written: {error.strerror or error}") from None
    after = {name: (status.st_size, status.st_mtime_ns) for name, status in files_of(source).items()}
    if before != after:
        name = min(name for name, _ in before.items() ^ after.items())
        raise StillRunningError(f"{source / name}: changed during the copy: the run is still active")


def _copy_file(source: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True, parents=True)
    try:
        read = open_file(source, follow=False)
    except FileNotFoundError:
        raise StillRunningError(f"{source}: disappeared during the copy: the run is still active") from None
    except OSError as error:
        raise IncompleteDataError(f"{source}: cannot be read: {error.strerror or error}") from None
    with read, target.open("xb") as written:
        shutil.copyfileobj(read, written, _BLOCK)
        written.flush()
        os.fsync(written.fileno())


@dataclass(frozen=True, kw_only=True)
class ImportOutcome:
    """The result of importing one run."""

    name: str  # Folder of the run, or its path in an archive.
    verdict: ImportVerdict
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A run to import."""

    folder: RunFolder
    name: str
    staged: bool = False  # Whether its folder is temporary and may be moved instead of copied.
    digest: str = ""  # Expected content digest; empty: not known.

    def outcome(self, verdict: ImportVerdict, why: str = "") -> ImportOutcome:
        return ImportOutcome(name=self.name, verdict=verdict, why=why)

    def damaged(self, why: str) -> ImportOutcome:
        """Returns that it is damaged, or refused because an earlier dlbench made it."""
        verdict: ImportVerdict = "refused" if why.endswith(EARLIER) else "damaged"
        if self.staged:
            # The temporary folder of an archive means nothing to the user.
            why = why.replace(str(self.folder.path), self.name)
        return self.outcome(verdict, why)


def import_runs(
    history: History, candidates: Iterable[Candidate | ImportOutcome], room: Path
) -> Iterator[ImportOutcome]:
    """Imports runs in temporary folder `room`; yields each result, those of imported runs also before a `RunError`."""
    waiting = iter(candidates)
    number = 0
    while batch := list(islice(waiting, BATCH)):
        number += 1
        yield from (candidate for candidate in batch if isinstance(candidate, ImportOutcome))
        chosen = [candidate for candidate in batch if isinstance(candidate, Candidate)]
        yield from _import_batch(history, chosen, room / f"batch-{number}")
        # Frees the space of unpacked runs that were not imported.
        for folder in [room / f"batch-{number}", *(candidate.folder.path for candidate in chosen if candidate.staged)]:
            history.store.delete_staged(folder)


def _import_batch(history: History, batch: Sequence[Candidate], room: Path) -> Iterator[ImportOutcome]:
    fresh: dict[str, Candidate] = {}
    later: list[Candidate] = []
    for candidate in batch:
        # Before any file is read: reading a named pipe would wait forever.
        try:
            files_of(candidate.folder.path)
        except IncompleteDataError as error:
            yield candidate.damaged(str(error))
            continue
        run_id = text_in(candidate.folder.plan, "run_id")
        if text_in(candidate.folder.plan, "format") == COMM_FORMAT:
            yield candidate.outcome("skipped", "a run of the collective benchmark; a history contains training runs")
        elif run_id and (history.find(run_id) is not None or run_id in fresh):
            later.append(candidate)
        else:
            # A run without a readable name is damaged, which its entry will say.
            fresh[run_id or str(candidate.folder.path)] = candidate
    if fresh:
        yield from _import_new(history, list(fresh.values()), room)
    # A run that is twice in one batch is compared with the one that was just imported.
    for candidate in later:
        yield _compare(history, candidate, text_in(candidate.folder.plan, "run_id"))


def _import_new(history: History, batch: Sequence[Candidate], room: Path) -> Iterator[ImportOutcome]:
    entries = history.make([candidate.folder for candidate in batch])
    chosen: list[tuple[Candidate, HistoryEntry, Path]] = []
    for candidate, entry in zip(batch, entries, strict=True):
        objection = _objection(candidate, entry)
        if objection is not None:
            yield objection
            continue
        staged = room / str(len(chosen)) / entry.run_id
        if candidate.staged:
            staged = candidate.folder.path
        chosen.append((candidate, entry, staged))
    with ThreadPoolExecutor(COPIES_AT_ONCE) as pool:
        objections = list(pool.map(_stage, chosen))
    outcomes: list[ImportOutcome] = []
    placed: list[HistoryEntry] = []
    problem: RunError | None = None
    try:
        for (candidate, entry, staged), objection in zip(chosen, objections, strict=True):
            if objection is not None:
                outcomes.append(objection)
                continue
            folder = history.store.place_of(entry.run_id, entry.created)
            try:
                is_new = history.store.place(staged, folder)
            except NotAFolderError as error:
                outcomes.append(candidate.outcome("damaged", str(error)))
                continue
            if is_new:
                placed.append(dataclasses.replace(entry, folder=folder))
                outcomes.append(candidate.outcome("imported"))
            else:
                # Another process has imported a run of that name since the history was opened.
                history.refresh([folder])
                outcomes.append(_compare(history, candidate, entry.run_id))
    except RunError as error:
        problem = error
    finally:
        # After an error, too, the runs in place are indexed and reported.
        history.store.sync(entry.folder for entry in placed)
        history.remember(placed)
    yield from outcomes
    if problem is not None:
        raise problem


def _objection(candidate: Candidate, entry: HistoryEntry) -> ImportOutcome | None:
    if entry.state == "damaged":
        return candidate.damaged(entry.why)
    if entry.state == "incomplete":
        return candidate.outcome("skipped", f"no record, because it was killed or is still running: {entry.why}")
    if candidate.digest and candidate.digest != entry.content_digest:
        return candidate.outcome("damaged", "its content differs from the digest in the archive's manifest")
    return None


def _stage(chosen: tuple[Candidate, HistoryEntry, Path]) -> ImportOutcome | None:
    candidate, entry, target = chosen
    damaged = damaged_traces(candidate.folder.path, entry.run_id, every_block=True)
    if damaged:
        return candidate.damaged(damaged[0])
    if candidate.staged:
        return None
    try:
        copy_run(candidate.folder.path, target)
        is_same = content_digest(RunFolder(target)) == entry.content_digest
    except StillRunningError as error:
        return candidate.outcome("skipped", str(error))
    except IncompleteDataError as error:
        return candidate.damaged(str(error))
    if not is_same:
        return candidate.outcome("skipped", "it changed while it was read: the run is still active")
    return None


def _compare(history: History, candidate: Candidate, run_id: str) -> ImportOutcome:
    existing = history.find(run_id)
    if existing is None:
        return candidate.outcome("skipped", "another process deleted a run of that name during the import")
    try:
        is_same = content_digest(candidate.folder) == existing.content_digest
    except IncompleteDataError as error:
        return candidate.damaged(str(error))
    if is_same:
        return candidate.outcome("already there")
    objection = _objection(candidate, history.make([candidate.folder])[0])
    why = f"the history has a different run {run_id} ({existing.folder}); runs are never overwritten"
    return objection or candidate.outcome("refused", why)

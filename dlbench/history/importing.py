"""Runs come into a history: looked at, copied whole, renamed into place, indexed; a batch at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from dlbench.errors import IncompleteDataError, RunError
from dlbench.history.entry import HistoryEntry
from dlbench.history.history import BATCH, History
from dlbench.history.run_files import StillRunningError, content_digest, copy_run, files_of
from dlbench.history.store import NotAFolderError
from dlbench.records.folder import RunFolder
from dlbench.records.rows.damage import damaged_traces
from dlbench.records.scan import COMM_FORMAT, EARLIER, text_in

ImportVerdict = Literal["imported", "already there", "skipped", "refused", "damaged"]

COPIES_AT_ONCE = 8  # Copying waits for the disk, or for a server, most of the time.


@dataclass(frozen=True, kw_only=True)
class ImportOutcome:
    """What became of one run."""

    name: str  # Its folder, or its place in an archive.
    verdict: ImportVerdict
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A run that is to come in."""

    folder: RunFolder
    name: str
    staged: bool = False  # Whether its folder was made for this and may be moved instead of copied.
    digest: str = ""  # What its content digest should be; empty where nobody has said.

    def outcome(self, verdict: ImportVerdict, why: str = "") -> ImportOutcome:
        """Says what became of it."""
        return ImportOutcome(name=self.name, verdict=verdict, why=why)

    def damaged(self, why: str) -> ImportOutcome:
        """Says that it is damaged, or that an earlier dlbench made it."""
        # Where an archive was unpacked is nobody's business.
        reason = why.replace(str(self.folder.path), self.name) if self.staged else why
        return self.outcome("refused" if why.endswith(EARLIER) else "damaged", reason)


def import_runs(
    history: History, candidates: Iterable[Candidate | ImportOutcome], room: Path
) -> Iterator[ImportOutcome]:
    """Brings runs in, and says of each what became of it; outcomes among the candidates are passed on.

    What is unpacked of archives lies in `room` (of `Store.room`), too.

    Raises `RunError`: no space, or the file system refuses. Runs reported as imported are in.
    """
    waiting = iter(candidates)
    number = 0
    while batch := list(islice(waiting, BATCH)):
        number += 1
        yield from (one for one in batch if isinstance(one, ImportOutcome))
        chosen = [one for one in batch if isinstance(one, Candidate)]
        yield from _bring(history, chosen, room / f"batch-{number}")
        # What was unpacked and did not come in need not lie there until the end.
        for left in [room / f"batch-{number}", *(one.folder.path for one in chosen if one.staged)]:
            history.store.delete_staged(left)


def _bring(history: History, batch: Sequence[Candidate], room: Path) -> Iterator[ImportOutcome]:
    fresh: dict[str, Candidate] = {}
    later: list[Candidate] = []
    for candidate in batch:
        # Before anything in it is read: reading a named pipe would wait forever.
        try:
            files_of(candidate.folder.path)
        except IncompleteDataError as error:
            yield candidate.damaged(str(error))
            continue
        run_id = text_in(candidate.folder.plan, "run_id")
        if text_in(candidate.folder.plan, "format") == COMM_FORMAT:
            yield candidate.outcome("skipped", "a run of the collective benchmark; a history keeps runs of training")
        elif run_id and (history.find(run_id) is not None or run_id in fresh):
            later.append(candidate)
        else:
            # Without a name that can be read it is damaged, as its entry will say.
            fresh[run_id or str(candidate.folder.path)] = candidate
    yield from _bring_fresh(history, list(fresh.values()), room)
    # A run that is twice in one batch is compared with what has just come in.
    for candidate in later:
        yield _compare(history, candidate, text_in(candidate.folder.plan, "run_id"))


def _bring_fresh(history: History, batch: Sequence[Candidate], room: Path) -> Iterator[ImportOutcome]:
    made = history.make([candidate.folder for candidate in batch]) if batch else []
    chosen: list[tuple[Candidate, HistoryEntry, Path]] = []
    for candidate, entry in zip(batch, made, strict=True):
        objection = _objection(candidate, entry)
        if objection is not None:
            yield objection
        else:
            staged = candidate.folder.path if candidate.staged else room / str(len(chosen)) / entry.run_id
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
                # Another process has brought a run of that name since the history was opened.
                history.refresh([folder])
                outcomes.append(_compare(history, candidate, entry.run_id))
    except RunError as error:
        problem = error
    finally:
        # Whatever went wrong on the way: what is in place is indexed, and reported.
        history.store.sync(entry.folder for entry in placed)
        history.remember(placed)
    yield from outcomes
    if problem is not None:
        raise problem


def _objection(candidate: Candidate, entry: HistoryEntry) -> ImportOutcome | None:
    if entry.state == "damaged":
        return candidate.damaged(entry.why)
    if entry.state == "incomplete":
        return candidate.outcome("skipped", f"killed or still running, it has no record: {entry.why}")
    if candidate.digest and candidate.digest != entry.content_digest:
        return candidate.outcome("damaged", "its content is not what the archive's list says")
    return None


def _stage(chosen: tuple[Candidate, HistoryEntry, Path]) -> ImportOutcome | None:
    candidate, entry, target = chosen
    if damaged := damaged_traces(candidate.folder.path, entry.run_id, every_block=True):
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
    return None if is_same else candidate.outcome("skipped", "it changed while it was read: the run has not ended")


def _compare(history: History, candidate: Candidate, run_id: str) -> ImportOutcome:
    known = history.find(run_id)
    if known is None:
        return candidate.outcome("skipped", "a run of that name has gone in this moment")
    try:
        is_same = content_digest(candidate.folder) == known.content_digest
    except IncompleteDataError as error:
        return candidate.damaged(str(error))
    if is_same:
        return candidate.outcome("already there")
    objection = _objection(candidate, history.make([candidate.folder])[0])
    why = f"the history holds a run {run_id} with other content ({known.folder}); runs are never overwritten"
    return objection or candidate.outcome("refused", why)

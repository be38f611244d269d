"""What a history lets go: whole runs beyond an age, or of each run what no figure is made of."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from dlbench.errors import IncompleteDataError, RunError
from dlbench.history.content import files_of, num_bytes
from dlbench.history.entry import HistoryEntry
from dlbench.history.files import sync_folder
from dlbench.opening import folder_below
from dlbench.records.files import write_json
from dlbench.records.folder import RunFolder
from dlbench.records.record import Record
from dlbench.records.scan import load_file
from dlbench.specs.base import CountOrZero, Spec
from dlbench.units import utc_now

if TYPE_CHECKING:
    from dlbench.history.store import History

DROPPED = "dropped.json"

KINDS: dict[str, re.Pattern[str]] = {
    "spans": re.compile(r"rank-\d{4,}\.spans"),
    "profiles": re.compile(r"rank-\d{4,}\.profile\.json"),
    "checkpoints": re.compile(r"checkpoints/.*"),
    "logs": re.compile(r"rank-\d{4,}\.log|launch\.log|slurm-[^/]*\.out"),
}
"""What may go, by the relative names of its files. Samples and some spans (`_spans_of_figures`) stay."""


class Dropped(Spec):
    """`dropped.json`: what was taken out of a run's folder in a history."""

    format: Literal["dlbench.dropped"] = Field("dlbench.dropped", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    kinds: tuple[str, ...] = Field(description="What was taken out: spans, profiles, checkpoints, logs.")
    files: CountOrZero = Field(description="How many files.")
    bytes: CountOrZero = Field(description="How many bytes they had.")
    updated: str = Field(description="When, UTC, ISO 8601.")


@dataclass(frozen=True, kw_only=True)
class Removal:
    """What goes of one run."""

    entry: HistoryEntry
    files: tuple[str, ...]
    """Relative names; empty: the whole run."""
    num_bytes: int


def dropped_kinds(folder: RunFolder) -> tuple[str, ...]:
    """What was taken out of a folder; nothing for folders outside of a history.

    A damaged note says that something is gone, and not what.
    """
    try:
        note = load_file(folder.path / DROPPED, Dropped)
    except IncompleteDataError:
        return ("unknown",)
    return () if note is None else note.kinds


def beyond(entries: Sequence[HistoryEntry], *, keep_days: float, keep_last: int, now: datetime) -> list[HistoryEntry]:
    """Runs older than so many days, but for the newest valid ones of each point.

    A run's age counts from its end, for runs that did not end from its plan; a run whose date cannot be read stays.

    Args:
        entries: all runs.
        keep_days: age that is kept whatever else.
        keep_last: valid runs of each `HistoryEntry.key` that are kept whatever their age.
        now: the present, with a time zone.
    """
    kept: dict[tuple[str, int, int], int] = {}
    chosen: list[HistoryEntry] = []
    for entry in sorted(entries, key=lambda one: (one.age_from, one.run_id), reverse=True):
        if entry.state == "valid" and kept.get(entry.key, 0) < keep_last:
            kept[entry.key] = kept.get(entry.key, 0) + 1
            continue
        moment = _moment(entry.age_from)
        if moment is not None and now - moment > timedelta(days=keep_days):
            chosen.append(entry)
    return chosen[::-1]


def _moment(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def removals(history: History, entries: Iterable[HistoryEntry], *, traces_only: bool) -> list[Removal]:
    """What would go of these runs; runs of which nothing would go are left out.

    Raises:
        IncompleteDataError: a folder holds what no history writes.
    """
    found = []
    for entry in entries:
        path = history.run_folder(entry)
        if not history.store.holds(entry.folder):
            continue
        if not traces_only:
            found.append(Removal(entry=entry, files=(), num_bytes=num_bytes(path)))
            continue
        files = files_of(path)
        kept = _spans_of_figures(RunFolder(path), files)
        sizes = {name: files[name].st_size for name in files if _kind(name) is not None and name not in kept}
        if sizes:
            found.append(Removal(entry=entry, files=tuple(sorted(sizes)), num_bytes=sum(sizes.values())))
    return found


def _spans_of_figures(folder: RunFolder, files: Iterable[str]) -> set[str]:
    """Spans of which figures are made: those of each node's first rank hold the stages of its energy.

    All, where no record says which ranks these are.
    """
    try:
        record = load_file(folder.record, Record)
    except IncompleteDataError:
        record = None
    if record is None:
        return {name for name in files if _kind(name) == "spans"}
    first: dict[int, int] = {}
    for one in record.ranks:
        first[one.node_rank] = min(one.rank, first.get(one.node_rank, one.rank))
    return {folder.spans(rank).name for rank in first.values()}


def prune(history: History, chosen: Sequence[Removal]) -> None:
    """Takes it away: whole runs by one rename, then from the index; traces after a note that says so.

    Raises:
        UserError: the store cannot be written.
        RunError: the file system refuses.
    """
    if not chosen:
        return
    with history.store.room() as room:
        whole = [removal for removal in chosen if not removal.files]
        for removal in whole:
            history.store.take_away(removal.entry.folder, room)
        history.remember((), [removal.entry.folder for removal in whole])
        for removal in chosen:
            if removal.files:
                _drop(history.store.path, removal)
        history.refresh([removal.entry.folder for removal in chosen if removal.files])


def _drop(store: Path, removal: Removal) -> None:
    folder = store / removal.entry.folder
    before = load_file(folder / DROPPED, Dropped)
    kinds = {kind for name in removal.files if (kind := _kind(name)) is not None}
    note = Dropped(
        kinds=tuple(sorted(kinds | set(before.kinds if before else ()))),
        files=len(removal.files) + (before.files if before else 0),
        bytes=removal.num_bytes + (before.bytes if before else 0),
        updated=utc_now(),
    )
    # The note first: a folder that says too much has lost nothing, one that says too little would deceive.
    write_json(folder / DROPPED, note.model_dump(mode="json"))
    by_folder: dict[tuple[str, ...], list[str]] = {}
    for name in removal.files:
        by_folder.setdefault(Path(name).parts[:-1], []).append(Path(name).name)
    own = Path(removal.entry.folder).parts
    try:
        for parts, names in by_folder.items():
            # Another process may be letting the same go.
            with suppress(FileNotFoundError), folder_below(store, *own, *parts) as opened:
                for name in names:
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=opened)
        emptied = {parts[:length] for parts in by_folder for length in range(1, len(parts) + 1)}
        for parts in sorted(emptied, key=len, reverse=True):
            with suppress(FileNotFoundError), folder_below(store, *own, *parts[:-1]) as opened:
                _remove_if_empty(parts[-1], opened)
        sync_folder(folder)
    except OSError as error:
        raise RunError(f"{folder}: cannot be changed: {error.strerror or error}") from None


def _remove_if_empty(name: str, folder: int) -> None:
    try:
        os.rmdir(name, dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _kind(name: str) -> str | None:
    return next((kind for kind, pattern in KINDS.items() if pattern.fullmatch(name)), None)

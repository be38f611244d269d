"""Run folders become entries of a history: who, what, where, and the figures of each run."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

from pydantic import Field

from dlbench.analysis.causes import Causes
from dlbench.analysis.comparability import AFTER_INTERRUPTION, chosen_settings, group_id, system_content
from dlbench.analysis.metrics import METRICS, metrics_by_run
from dlbench.analysis.slow_nodes import host_ratios
from dlbench.analysis.table import WithoutFigures, tabulate
from dlbench.errors import IncompleteDataError, RunError, UserError
from dlbench.history.entry import HistoryEntry, HostEntry
from dlbench.history.files import content_digest, files_of, num_bytes, sync_folder
from dlbench.history.series import moment_of
from dlbench.history.store import EntryMaker, History, Notify
from dlbench.opening import folder_below, read_json
from dlbench.records.files import write_atomic, write_json
from dlbench.records.folder import MAX_JSON, RunFolder
from dlbench.records.record import Record
from dlbench.records.registry import THROUGHPUT, data_source, goal, precision
from dlbench.records.rows.shared import file_of, part_alone, parts_of
from dlbench.records.scan import Run, Scan, load_file, read_run
from dlbench.report.wording import short_data
from dlbench.specs.base import CountOrZero, Spec
from dlbench.units import utc_now

DROPPED = "dropped.json"

KINDS: dict[str, re.Pattern[str]] = {
    "spans": re.compile(r"(rank|node)-\d{4,}\.spans"),
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
    files: tuple[str, ...]  # Relative names; empty: the whole run.
    num_bytes: int
    parts: tuple[Path, ...] = ()  # Of some of these files: what stays.


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
    """Of all runs those older than `keep_days`, but for the newest `keep_last` valid ones of each `HistoryEntry.key`.

    A run's age counts from its end, for runs that did not end from its plan; a run whose date cannot be read stays.
    """
    kept: dict[tuple[str, int, int], int] = {}
    chosen: list[HistoryEntry] = []
    for entry in sorted(entries, key=lambda one: (one.age_from, one.run_id), reverse=True):
        if entry.state == "valid" and kept.get(entry.key, 0) < keep_last:
            kept[entry.key] = kept.get(entry.key, 0) + 1
            continue
        moment = moment_of(entry.age_from)
        if moment is not None and now - moment > timedelta(days=keep_days):
            chosen.append(entry)
    return chosen[::-1]


def removals(history: History, entries: Iterable[HistoryEntry], *, traces_only: bool) -> list[Removal]:
    """What would go of these runs; runs of which nothing would go are left out.

    Raises `IncompleteDataError`: a folder holds what no history writes.
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
        parts = tuple(part for part in kept if part.parent != path and len(parts_of(part.parent)) > 1)
        names = {file_of(part).name for part in kept} - {part.parent.name for part in parts}
        sizes = {name: files[name].st_size for name in files if _kind(name) is not None and name not in names}
        stays = sum(len(part_alone(part)) for part in parts)
        if sizes:
            removed = sum(sizes.values()) - stays
            found.append(Removal(entry=entry, files=tuple(sorted(sizes)), num_bytes=removed, parts=parts))
    return found


def _spans_of_figures(folder: RunFolder, files: Iterable[str]) -> set[Path]:
    """Spans of which figures are made: those of each node's first rank hold the stages of its energy.

    All, where no record and plan say which ranks these are.
    """
    first: dict[int, int] = {}
    spans: set[Path] = set()
    with suppress(IncompleteDataError):
        record = load_file(folder.record, Record)
        for one in record.ranks if record is not None else ():
            first[one.node_rank] = min(one.rank, first.get(one.node_rank, one.rank))
        spans = {folder.spans(rank) for rank in first.values()}
    if not spans:
        return {folder.path / name for name in files if _kind(name) == "spans"}
    return {path for path in spans if file_of(path).exists()}


def prune(history: History, chosen: Sequence[Removal]) -> None:
    """Takes it away: whole runs by one rename, then from the index; traces after a note that says so.

    Raises `UserError`: the store cannot be written. `RunError`: the file system refuses.
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
                        if part := next((part for part in removal.parts if part.parent.name == name), None):
                            write_atomic(folder / name, part_alone(folder / name / part.name), follow=False)
                        else:
                            os.unlink(name, dir_fd=opened)
        emptied = {parts[:length] for parts in by_folder for length in range(1, len(parts) + 1)}
        for parts in sorted(emptied, key=len, reverse=True):
            with suppress(FileNotFoundError), folder_below(store, *own, *parts[:-1]) as opened:
                try:
                    os.rmdir(parts[-1], dir_fd=opened)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
        sync_folder(folder)
    except OSError as error:
        raise RunError(f"{folder}: cannot be changed: {error.strerror or error}") from None


def _kind(name: str) -> str | None:
    return next((kind for kind, pattern in KINDS.items() if pattern.fullmatch(name)), None)


ENTRIES_VERSION = 4  # Counted up when entries of the same folders come out differently: older indices are made anew.


def make_entries(folders: Sequence[RunFolder]) -> list[HistoryEntry]:
    """An entry for each folder, in order; one that cannot be read as a training run gets the state `damaged`.

    Several folders that hold the same run all get one.
    """
    runs: dict[Path, Run] = {}
    found: dict[Path, HistoryEntry] = {}
    for folder in folders:
        is_plain, digest = False, ""
        try:
            # First: reading a named pipe would wait forever.
            files_of(folder.path)
            is_plain = True
            runs[folder.path] = read_run(folder.path)
        except (IncompleteDataError, UserError) as error:
            with suppress(IncompleteDataError):
                digest = content_digest(folder) if is_plain else ""
            found[folder.path] = _damaged(folder, str(error), digest)
    for chosen in _each_name_once(list(runs.values())):
        table = tabulate(Scan(root=Path(), runs=chosen), with_causes=True)
        figures = metrics_by_run(table)
        without = {one.run.folder.path: one for one in table.without}
        for run in chosen:
            try:
                found[run.folder.path] = _entry(
                    run,
                    without.get(run.folder.path),
                    figures.get(run.plan.run_id, {}),
                    table.causes.get(run.plan.run_id),
                )
            except IncompleteDataError as error:
                # Changed, or taken away, since it was read.
                found[run.folder.path] = _damaged(run.folder, str(error), "")
    return [found[folder.path] for folder in folders]


def _each_name_once(runs: list[Run]) -> list[list[Run]]:
    """Tables know runs by their names: runs in as many lists as the same name is there."""
    lists: list[dict[str, Run]] = []
    for run in runs:
        free = next((names for names in lists if run.plan.run_id not in names), None)
        if free is None:
            lists.append(free := {})
        free[run.plan.run_id] = run
    return [list(names.values()) for names in lists]


MAKER = EntryMaker(make=make_entries, version=f"{ENTRIES_VERSION}: {' '.join(metric.name for metric in METRICS)}")


def open_history(
    path: Path, *, index: Path | None = None, create: bool = False, notify: Notify = lambda line: None
) -> History:
    """`History.open` with entries as this module makes them.

    Raises `UserError`: it is no history. `RunError`: its folders cannot be read.
    """
    return History.open(path, MAKER, index=index, create=create, notify=notify)


def _entry(
    run: Run, without: WithoutFigures | None, figures: Mapping[str, float], causes: Causes | None
) -> HistoryEntry:
    plan = run.plan
    record = run.record
    # The system's name and how ranks are launched keep groups apart already.
    asked = {
        key: value
        for key, value in system_content(plan).items()
        if value not in ("none", "0") and not key.startswith(("system.launch.", "system.name"))
    }
    environment = {} if record is None else {**asked, "dlbench.version": plan.dlbench_version, **record.environment}
    return HistoryEntry(
        run_id=plan.run_id,
        folder=str(run.folder.path),
        state="valid" if without is None else without.state,
        why="" if without is None else without.why,
        created=plan.created,
        finished="" if record is None else record.finished,
        series=plan.series.id,
        repeat=plan.series.repeat,
        side=plan.series.side,
        variant=plan.series.variant,
        group="" if record is None else group_id(run),
        label=_label(run),
        system=plan.system.name,
        workload=plan.workload.name,
        preset=plan.workload.preset,
        engine=plan.engine.name,
        ranks=plan.layout.ranks,
        nodes=plan.layout.nodes,
        slurm_job_id=environment.get("variable.SLURM_JOB_ID", "") or _submitted_job(run.folder),
        commit=plan.tags.get("commit", "") or environment.get("dlbench.commit", ""),
        tags=dict(plan.tags),
        environment=environment,
        figures=figures,
        hosts=_hosts(run, causes),
        content_digest=content_digest(run.folder),
        dropped=dropped_kinds(run.folder),
    )


def _hosts(run: Run, causes: Causes | None) -> tuple[HostEntry, ...]:
    names = [rank.host for rank in run.record.ranks] if run.record else [status.host for status in run.statuses]
    is_comparable = causes is not None and run.plan.fault is None and len(set(causes.hosts)) > 1
    ratios = host_ratios(causes) if causes is not None and is_comparable else {}
    left = causes.leaving if causes is not None and is_comparable else {}
    return tuple(
        HostEntry(
            host=host,
            num_ranks=names.count(host),
            work_ratio=ratios.get(host),
            later=left[host].later if host in left else None,
            later_at_least=left[host].at_least if host in left else None,
        )
        for host in sorted(set(names))
    )


def _label(run: Run) -> str:
    plan = run.plan
    shown = "".join(f", {key}={value}" for key, value in chosen_settings(run).items())
    variant = "" if plan.series.variant == "plain" else f", {plan.series.variant}"
    side = f", side {plan.series.side}" if plan.series.side else ""
    resumed = f", resumed {AFTER_INTERRUPTION}" if run.record is not None and run.record.goes_on else ""
    train = plan.workload.train
    to_accuracy = "" if goal(run) == THROUGHPUT else f", {goal(run)}"
    return (
        f"{plan.workload.name}, {plan.workload.preset} preset, {plan.engine_words}, {precision(run)}, batch "
        f"{train.batch_per_rank} per rank, {short_data(data_source(run))}, {plan.series.scaling} "
        f"scaling{to_accuracy}{shown}{variant}{side}{resumed}"
    )


def _submitted_job(folder: RunFolder) -> str:
    """The job as `dlbench submit` noted it; no figure hangs on it, so a damaged note is none."""
    try:
        content = read_json(folder.submission, MAX_JSON)
    except (OSError, ValueError):
        return ""
    job = content.get("job_id") if isinstance(content, dict) else None
    return job if isinstance(job, str) else ""


def _damaged(folder: RunFolder, why: str, digest: str) -> HistoryEntry:
    """All that is known of a folder that cannot be read: its name, and the digest if there is one."""
    name = folder.path.name
    return HistoryEntry(run_id=name, folder=str(folder.path), state="damaged", why=why, content_digest=digest)

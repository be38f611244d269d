"""Imports runs into a history, a batch at a time (check, copy, rename into place, index), and makes their entries."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Literal

from dlbench.analysis.causes import Causes
from dlbench.analysis.comparability import AFTER_INTERRUPTION, chosen_settings, group_id, system_content
from dlbench.analysis.metrics import METRICS, metrics_by_run
from dlbench.analysis.slow_nodes import host_ratios
from dlbench.analysis.table import WithoutFigures, tabulate
from dlbench.errors import IncompleteDataError, RunError, UserError, refused
from dlbench.history.entry import HistoryEntry, HostEntry
from dlbench.history.history import BATCH, History, NotAFolderError, Notify
from dlbench.opening import open_file
from dlbench.records.files import sync_folder
from dlbench.records.folder import RunFolder
from dlbench.records.registry import THROUGHPUT, data_source, goal, precision
from dlbench.records.rows.damage import damaged_traces
from dlbench.records.scan import COMM_FORMAT, EARLIER, Run, Scan, read_run, text_in
from dlbench.report.wording import short_data

ENTRIES_VERSION = 5  # Incremented if entries of the same folders change: older indices are rebuilt.
VERSION = f"{ENTRIES_VERSION}: {' '.join(metric.name for metric in METRICS)}"
MAX_DEPTH = 3  # Depth of folders within a run's folder, e.g. `checkpoints/`.
# Files whose content identifies a run. Figures need nothing else, except for the stages of energy the spans of each
# node's first rank; all other files may differ or be missing.
_FIGURE_FILE = re.compile(r"plan\.json|record\.json|node-\d{4,}\.(steps|samples)")
_BLOCK = 1 << 20
ImportVerdict = Literal["imported", "already there", "skipped", "refused", "damaged"]
COPIES_AT_ONCE = 8  # Copying waits for the disk, or for a server, most of the time.


def make_entries(folders: Sequence[RunFolder]) -> list[HistoryEntry]:
    """Returns an entry for each folder, in order; `damaged` if it cannot be read as a training run."""
    runs: dict[Path, Run] = {}
    entry_by_folder: dict[Path, HistoryEntry] = {}
    for folder in folders:
        try:
            # Before the run is read: reading a named pipe would wait forever.
            files_of(folder.path)
            runs[folder.path] = read_run(folder.path)
        except (IncompleteDataError, UserError) as error:
            entry_by_folder[folder.path] = _damaged(folder, str(error))
    for chosen in _without_equal_names(list(runs.values())):
        table = tabulate(Scan(root=Path(), runs=chosen), with_causes=True)
        figures = metrics_by_run(table)
        without = {run.run.folder.path: run for run in table.without}
        for run in chosen:
            try:
                entry_by_folder[run.folder.path] = _entry(
                    run,
                    without.get(run.folder.path),
                    figures.get(run.plan.run_id, {}),
                    table.causes.get(run.plan.run_id),
                )
            except IncompleteDataError as error:
                # It was changed or deleted after it was read.
                entry_by_folder[run.folder.path] = _damaged(run.folder, str(error))
    return [entry_by_folder[folder.path] for folder in folders]


def _without_equal_names(runs: list[Run]) -> list[list[Run]]:
    """Divides runs into lists without equal names, by which tables identify runs."""
    lists: list[dict[str, Run]] = []
    for run in runs:
        for runs_by_name in lists:
            if run.plan.run_id not in runs_by_name:
                runs_by_name[run.plan.run_id] = run
                break
        else:
            lists.append({run.plan.run_id: run})
    return [list(runs_by_name.values()) for runs_by_name in lists]


def open_history(path: Path, *, create: bool = False, notify: Notify = lambda line: None) -> History:
    """Opens a `History` with the entries of this module."""
    return History(path, make_entries, VERSION, create=create, notify=notify)


def _entry(
    run: Run, without: WithoutFigures[Run] | None, figures: Mapping[str, float], causes: Causes | None
) -> HistoryEntry:
    plan = run.plan
    record = run.record
    state, reason = "valid", ""
    if without is not None:
        state, reason = without.state, without.why
    finished, group = "", ""
    environment: dict[str, str] = {}
    if record is not None:
        finished, group = record.finished, group_id(run)
        # The system's name and the launch settings separate groups already.
        environment = {
            key: value
            for key, value in system_content(plan).items()
            if value not in ("none", "0") and not key.startswith(("system.launch.", "system.name"))
        }
        environment |= {"dlbench.version": plan.dlbench_version, **record.environment}
    return HistoryEntry(
        run_id=plan.run_id,
        folder=str(run.folder.path),
        state=state,
        why=reason,
        created=plan.created,
        finished=finished,
        series=plan.series.id,
        repeat=plan.series.repeat,
        side=plan.series.side,
        variant=plan.series.variant,
        group=group,
        label=_label(run),
        system=plan.system.name,
        workload=plan.workload.name,
        preset=plan.workload.preset,
        engine=plan.engine.name,
        ranks=plan.layout.ranks,
        nodes=plan.layout.nodes,
        slurm_job_id=environment.get("variable.SLURM_JOB_ID", "") or text_in(run.folder.submission, "job_id"),
        commit=plan.tags.get("commit", "") or environment.get("dlbench.commit", ""),
        tags=dict(plan.tags),
        environment=environment,
        figures=figures,
        hosts=_hosts(run, causes),
        content_digest=content_digest(run.folder),
    )


def _hosts(run: Run, causes: Causes | None) -> tuple[HostEntry, ...]:
    names = [status.host for status in run.statuses]
    if run.record:
        names = [rank.host for rank in run.record.ranks]
    entries = {host: HostEntry(host=host, num_ranks=names.count(host), work_ratio=None) for host in sorted(set(names))}
    if causes is None or run.plan.fault is not None or len(set(causes.hosts)) < 2:
        return tuple(entries.values())
    ratios = host_ratios(causes)
    for host, entry in entries.items():
        entry = dataclasses.replace(entry, work_ratio=ratios.get(host))
        leaving = causes.leaving.get(host)
        if leaving is not None:
            entry = dataclasses.replace(entry, later=leaving.later, later_at_least=leaving.at_least)
        entries[host] = entry
    return tuple(entries.values())


def _label(run: Run) -> str:
    plan = run.plan
    words = [
        plan.workload.name,
        f"{plan.workload.preset} preset",
        plan.engine_words,
        precision(run),
        f"batch {plan.workload.train.batch_per_rank} per rank",
        short_data(data_source(run)),
        f"{plan.series.scaling} scaling",
    ]
    if goal(run) != THROUGHPUT:
        words.append(goal(run))
    words += [f"{key}={value}" for key, value in chosen_settings(run).items()]
    if plan.series.variant != "plain":
        words.append(plan.series.variant)
    if plan.series.side:
        words.append(f"side {plan.series.side}")
    if run.record is not None and run.record.goes_on:
        words.append(f"resumed {AFTER_INTERRUPTION}")
    return ", ".join(words)


def _damaged(folder: RunFolder, why: str) -> HistoryEntry:
    return HistoryEntry(run_id=folder.path.name, folder=str(folder.path), state="damaged", why=why, content_digest="")


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

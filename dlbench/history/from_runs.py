"""Makes the entries of a history from run folders."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from dlbench.analysis.causes import Causes
from dlbench.analysis.comparability import AFTER_INTERRUPTION, chosen_settings, group_id, system_content
from dlbench.analysis.metrics import METRICS, metrics_by_run
from dlbench.analysis.slow_nodes import host_ratios
from dlbench.analysis.table import WithoutFigures, tabulate
from dlbench.errors import IncompleteDataError, UserError
from dlbench.history.entry import HistoryEntry, HostEntry
from dlbench.history.history import History, Notify
from dlbench.history.importing import content_digest, files_of
from dlbench.records.folder import RunFolder
from dlbench.records.registry import THROUGHPUT, data_source, goal, precision
from dlbench.records.scan import Run, Scan, read_run, text_in
from dlbench.report.wording import short_data

ENTRIES_VERSION = 5  # Incremented if entries of the same folders change: older indices are rebuilt.


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


VERSION = f"{ENTRIES_VERSION}: {' '.join(metric.name for metric in METRICS)}"


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

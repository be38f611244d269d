"""Run folders become entries of a history: who, what, where, and the figures of each run."""

from __future__ import annotations

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
from dlbench.history.run_files import content_digest, files_of
from dlbench.records.folder import RunFolder
from dlbench.records.registry import THROUGHPUT, data_source, goal, precision
from dlbench.records.scan import Run, Scan, read_run, text_in
from dlbench.report.wording import short_data

ENTRIES_VERSION = 5  # Counted up when entries of the same folders come out differently: older indices are made anew.


def make_entries(folders: Sequence[RunFolder]) -> list[HistoryEntry]:
    """An entry for each folder, in order; one that cannot be read as a training run gets the state `damaged`.

    Several folders that hold the same run all get one.
    """
    runs: dict[Path, Run] = {}
    found: dict[Path, HistoryEntry] = {}
    for folder in folders:
        try:
            # First: reading a named pipe would wait forever.
            files_of(folder.path)
            runs[folder.path] = read_run(folder.path)
        except (IncompleteDataError, UserError) as error:
            found[folder.path] = _damaged(folder, str(error))
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
                found[run.folder.path] = _damaged(run.folder, str(error))
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


VERSION = f"{ENTRIES_VERSION}: {' '.join(metric.name for metric in METRICS)}"


def open_history(path: Path, *, create: bool = False, notify: Notify = lambda line: None) -> History:
    """Opens a `History` with entries as this module makes them."""
    return History(path, make_entries, VERSION, create=create, notify=notify)


def _entry(
    run: Run, without: WithoutFigures[Run] | None, figures: Mapping[str, float], causes: Causes | None
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
        slurm_job_id=environment.get("variable.SLURM_JOB_ID", "") or text_in(run.folder.submission, "job_id"),
        commit=plan.tags.get("commit", "") or environment.get("dlbench.commit", ""),
        tags=dict(plan.tags),
        environment=environment,
        figures=figures,
        hosts=_hosts(run, causes),
        content_digest=content_digest(run.folder),
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


def _damaged(folder: RunFolder, why: str) -> HistoryEntry:
    return HistoryEntry(run_id=folder.path.name, folder=str(folder.path), state="damaged", why=why, content_digest="")

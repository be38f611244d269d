"""The views `runs` and `without-figures`: every run with its figures, or the reason why it has none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dlbench.analysis.table import RunTable
from dlbench.records.registry import data_source, goal, precision
from dlbench.records.scan import Run, Scan
from dlbench.report.document import Section, runs_sheet_of, without_figures
from dlbench.report.table import Column, Sheet, columns_of, drop_empty_columns
from dlbench.report.wording import clean, runs_text
from dlbench.units import whole_seconds
from dlbench.views import doubts
from dlbench.views.data_path import epoch_samples
from dlbench.views.model import Report, ReportView, TrainingRun


class RunsView(ReportView):
    """The table of all runs."""

    id = "runs"
    title = "Runs"
    level = "appendix"
    after = "history"

    def always(self) -> tuple[Sheet[Any], ...]:
        return (runs_sheet(()),)

    def sections(self, report: Report) -> tuple[Section, ...]:
        if not report.runs:
            return ()
        without = len(report.without_figures)
        headline = f"{runs_text(len(report.runs))}, {without or 'none'} excluded"
        return (Section(id=self.id, title=self.title, headline=headline, sheets=(runs_sheet(report.runs),)),)


def runs_sheet(runs: tuple[TrainingRun, ...]) -> Sheet[TrainingRun]:
    """Returns the table of all runs, a line each."""
    titles = {}
    if all(run.state == "valid" for run in runs):
        titles["state"] = ""
    if all(run.nodes == 1 for run in runs):
        titles["nodes"] = ""
    columns = columns_of(
        TrainingRun,
        *("run_id", "group", "state", "workload", "preset", "engine", "precision", "data", "batch_per_rank", "scaling"),
        *("series", "variant", "side", "ranks", "nodes", "repeat", "sample_unit", "steps", "throughput"),
        *("step_median_s", "step_p95_s", "step_cv", "epoch_s", "finished", "failure_reason", "warnings"),
        Column("", "Configuration", "configuration"),
        *("goal", "reached", "time_to_quality_s", "samples_to_quality", "epochs_to_quality"),
        titles=titles,
    )
    caption = "Scatter: standard deviation of step times over their mean."
    return runs_sheet_of(drop_empty_columns(columns, runs), runs, caption)


def newest_end(runs: Iterable[Run]) -> str:
    """Returns the time at which the newest run finished, UTC; empty if none did."""
    return whole_seconds(max((run.record.finished for run in runs if run.record), default=""))


def notices_of(runs: Iterable[Run]) -> tuple[str, ...]:
    """Returns the notices of the workloads of runs, each once: what their figures must not be mistaken for."""
    return tuple(sorted({clean(run.plan.workload.notice) for run in runs} - {""}))


def run_rows(scan: Scan, table: RunTable) -> tuple[TrainingRun, ...]:
    """Returns every run of the scan. Copies of a run have no figures."""
    without = {id(item.run): item for item in table.without}
    rows = []
    for run in scan.runs:
        item = without.get(id(run))
        if item is None:
            rows.append(_training_run(run, "valid", "", table.figures[run.plan.run_id]))
        else:
            rows.append(_training_run(run, item.state, item.why, {}))
    return tuple(rows)


def _training_run(run: Run, state: str, failure_reason: str, figures: Mapping[str, Any]) -> TrainingRun:
    """Returns the row of a run; `figures` is its row of the table of runs, empty if it has none."""
    plan, record = run.plan, run.record
    rate = figures.get("throughput")
    epoch_s = None
    if rate and not plan.workload.data.is_synthetic:
        samples = epoch_samples(run)
        if samples:
            epoch_s = samples / rate
    names = ("reached", "time_to_quality_s", "samples_to_quality", "epochs_to_quality")
    quality = {name: getattr(record and record.quality, name, None) for name in names}
    return TrainingRun(
        run_id=plan.run_id,
        group=figures.get("group", ""),
        state=state,
        failure_reason=clean(failure_reason),
        workload=plan.workload.name,
        preset=plan.workload.preset,
        engine=plan.engine.name,
        precision=precision(run),
        data=clean(data_source(run)),
        batch_per_rank=plan.workload.train.batch_per_rank,
        scaling=plan.series.scaling,
        series=plan.series.id,
        repeat=plan.series.repeat,
        variant=plan.series.variant,
        side=plan.series.side,
        ranks=plan.layout.ranks,
        nodes=plan.layout.nodes,
        sample_unit=clean(plan.workload.sample_unit, 40),
        throughput=rate,
        epoch_s=epoch_s,
        finished=clean(record.finished) if record else "",
        warnings=tuple(clean(doubt.text) for doubt in doubts.run_doubts(run)),
        goal=goal(run),
        **{name: figures.get(name) for name in ("steps", "step_median_s", "step_p95_s", "step_cv")},
        **quality,
    )


class WithoutFiguresView(ReportView):
    """The runs without figures, and the reasons."""

    id = "without-figures"
    title = "Excluded runs"
    level = "appendix"
    after = "runs"

    def sections(self, report: Report) -> tuple[Section, ...]:
        return without_figures(report.without_figures, report.damaged)

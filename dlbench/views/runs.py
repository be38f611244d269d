"""The views `runs`, `without-figures` and `environment`: every run, why some yield no figure, what they ran in."""

from __future__ import annotations

from dataclasses import dataclass

from dlbench.reading.environments import Difference
from dlbench.report.document import MAX_LISTED, Section, warnings_cell, without_figures
from dlbench.report.table import Column, Sheet, drop_empty_columns
from dlbench.report.wording import runs_text
from dlbench.views.model import Report, RunRow
from dlbench.views.view import ReportView

CAPTION = "Scatter: standard deviation of step times over their mean."


class RunsView(ReportView):
    """Every run."""

    id = "runs"
    title = "Runs"
    level = "appendix"

    def sections(self, report: Report) -> tuple[Section, ...]:
        if not report.runs:
            return ()
        without = len(report.without_figures)
        headline = f"{runs_text(len(report.runs))}, {without or 'none'} excluded"
        return (Section(id=self.id, title=self.title, headline=headline, sheets=(runs_sheet(report.runs),)),)


def runs_sheet(runs: tuple[RunRow, ...]) -> Sheet[RunRow]:
    """All runs, one line each."""
    columns: tuple[Column[RunRow], ...] = (
        Column("run_id", "Run", lambda run: run.run_id),
        Column("group", "", lambda run: run.group),
        Column("state", "State" if any(run.state != "valid" for run in runs) else "", lambda run: run.state),
        Column("workload", "", lambda run: run.workload),
        Column("preset", "", lambda run: run.preset),
        Column("engine", "", lambda run: run.engine),
        Column("precision", "", lambda run: run.precision),
        Column("data", "", lambda run: run.data),
        Column("batch_per_rank", "", lambda run: run.batch_per_rank),
        Column("scaling", "", lambda run: run.scaling),
        Column("series", "", lambda run: run.series),
        Column("variant", "", lambda run: run.variant),
        Column("side", "", lambda run: run.side),
        Column("ranks", "Ranks", lambda run: run.ranks),
        Column("nodes", "Nodes" if any(run.nodes != 1 for run in runs) else "", lambda run: run.nodes),
        Column("repeat", "", lambda run: run.repeat),
        Column("sample_unit", "", lambda run: run.sample_unit),
        Column("steps", "", lambda run: run.steps),
        Column("throughput_per_s", "Samples/s", lambda run: run.throughput, unit="ratio"),
        Column("step_median_s", "Step, median", lambda run: run.step_median_s, unit="s"),
        Column("step_p95_s", "Step, p95", lambda run: run.step_p95_s, unit="s"),
        Column("step_cv", "Scatter", lambda run: run.step_cv, unit="fraction"),
        Column("finished", "", lambda run: run.finished),
        Column("failure_reason", "", lambda run: run.failure_reason),
        Column("warnings", "Warnings", lambda run: " | ".join(run.warnings), lambda run: warnings_cell(run.warnings)),
        Column("", "Configuration", lambda run: f"{run.engine}, {run.precision}"),
        Column("goal", "", lambda run: run.goal),
        Column("reached", "", lambda run: run.reached),
        Column("time_to_quality_s", "", lambda run: run.time_to_quality_s),
        Column("samples_to_quality", "", lambda run: run.samples_to_quality),
        Column("epochs_to_quality", "", lambda run: run.epochs_to_quality),
    )
    return Sheet(
        name="runs",
        title="All runs",
        columns=drop_empty_columns(columns, runs),
        rows=runs,
        caption=CAPTION,
        is_sortable=True,
        max_rows=MAX_LISTED,
    )


class WithoutFiguresView(ReportView):
    """Runs that are in no figure, and why."""

    id = "without-figures"
    title = "Excluded runs"
    level = "appendix"

    def sections(self, report: Report) -> tuple[Section, ...]:
        return without_figures(report.without_figures, report.damaged)


@dataclass(frozen=True)
class _Setting:
    """One value of one key of the environment."""

    key: str
    value: str
    runs: str


class EnvironmentView(ReportView):
    """What the runs ran in."""

    id = "environment"
    title = "Environment"
    level = "appendix"

    def sections(self, report: Report) -> tuple[Section, ...]:
        found = report.environment
        if not found.num_runs:
            return ()
        surprising = [item for item in found.differences if not item.expected]
        if surprising:
            keys = [item.key for item in surprising]
            more = f" and {len(keys) - 2} more" if len(keys) > 2 else ""
            finding = f"runs differ in {', '.join(key[:30] for key in keys[:2])}{more}"
        else:
            finding = f"the same in all {runs_text(found.num_runs)}"
        common = [_Setting(key, value, "all") for key, value in found.common]
        recorded = [*_settings(list(found.differences), " (differs)"), *common]
        sheets = [_sheet("environment", "Everything that was recorded of the environment", recorded, True)]
        if surprising:
            sheets.insert(0, _sheet("environment-differences", "What differs", _settings(surprising, ""), False))
        return (Section(id=self.id, title=self.title, headline=finding, sheets=tuple(sheets)),)


def _settings(items: list[Difference], mark: str) -> list[_Setting]:
    return [
        _Setting(item.key + ("" if item.expected else mark), value, str(len(ids)))
        for item in items
        for value, ids in item.values
    ]


def _sheet(name: str, title: str, rows: list[_Setting], is_folded: bool) -> Sheet[_Setting]:
    columns: tuple[Column[_Setting], ...] = (
        Column("", "Key", lambda row: row.key),
        Column("", "Value", lambda row: row.value),
        Column("", "Runs", lambda row: row.runs),
    )
    return Sheet(name=name, title=title, columns=columns, rows=rows, is_folded=is_folded)

"""What a history says over time: its series with their changes, and its hosts by month."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dlbench.analysis.metrics import METRICS
from dlbench.history.acknowledgements import Acknowledgement
from dlbench.history.change_points import MIN_NIGHTS
from dlbench.history.entry import HistoryEntry
from dlbench.history.methods import METHODS
from dlbench.history.series import Change, Trend
from dlbench.history.slow_months import SlowMonths, slow_months
from dlbench.history.trends import damaged_runs, dated, trends
from dlbench.history.words import change_cell, day
from dlbench.report.document import BaseReport
from dlbench.stats.verdict_words import TREND

FOLLOWED = ("step_median_s", "energy_per_sample_j", "time_to_quality_s")
"""Metrics that are followed unless others are asked for: the mean and the p95 of steps say much the same."""

_IMPORT = "dlbench history import RUNS"


class ChangeOfSeries(NamedTuple):
    """A change, and the series that has it."""

    series: Trend
    change: Change

    @property
    def line(self) -> str:
        """Says in one line what changed, and how to acknowledge it."""
        series, change = self
        return f"{day(change.time)}: {series.label}: {change_cell(change.ratio)}; {series.acknowledgement(change)}"


@dataclass(frozen=True, kw_only=True)
class TrendsReport(BaseReport):
    """Everything; what the JSON of `dlbench history trends` holds."""

    format: str = "dlbench.trends"
    title: str = "dlbench history: trends"
    num_runs: int  # Runs with figures.
    num_without: int
    series: tuple[Trend, ...]
    nodes: SlowMonths
    damaged: tuple[str, ...]
    methods: tuple[tuple[str, str], ...]

    @property
    def changes(self) -> tuple[ChangeOfSeries, ...]:
        """All change points, newest first."""
        changes = [ChangeOfSeries(series, change) for series in self.series for change in series.changes]
        return tuple(sorted(changes, key=lambda row: row.change.time, reverse=True))

    @property
    def open_regressions(self) -> tuple[ChangeOfSeries, ...]:
        """Regressions that nobody acknowledged, by series."""
        return tuple(ChangeOfSeries(series, change) for series in self.series for change in series.open_regressions)

    @property
    def by_newest_change(self) -> tuple[Trend, ...]:
        """Series with the newest change first, then those without one, then those that are too short."""
        newest_first = sorted(self.series, key=_time_of_newest_change, reverse=True)
        return tuple(sorted(newest_first, key=lambda series: not series.is_long_enough))

    @property
    def finding(self) -> str:
        """What changed, in a sentence or two; or that nothing did, or why nobody can say."""
        if not self.series:
            return f"No run has figures. Bring runs in with {_IMPORT}."
        num_long_enough = sum(series.is_long_enough for series in self.series)
        if not num_long_enough:
            most = max(len(series.nights) for series in self.series)
            return (
                f"{len(self.series)} series, none long enough: a change point needs {MIN_NIGHTS} nights, the longest "
                f"has {most}. Bring in further nights with {_IMPORT}."
            )
        num_short = len(self.series) - num_long_enough
        others = f" {num_short} series more: fewer than {MIN_NIGHTS} nights." if num_short else ""
        if not self.changes:
            return f"Nothing changed in {num_long_enough} series.{others}"
        series, change = self.changes[0]
        num_open = len(self.open_regressions)
        still_open = f" Not acknowledged: {num_open}." if num_open else ""
        return (
            f"{self._counts()} in {num_long_enough} series. Newest: {series.subject} {change_cell(change.ratio)} "
            f"{change.since}, {series.point}.{still_open}{others}"
        )

    def _counts(self) -> str:
        kinds: list[str] = [row.change.kind for row in self.changes]
        texts = []
        for kind in (TREND["worse"].word, TREND["better"].word):
            count = kinds.count(kind)
            if count:
                texts.append(f"{count} {kind}" if count == 1 else f"{count} {kind}s")
        return " and ".join(texts)


def _time_of_newest_change(series: Trend) -> str:
    return series.changes[-1].time if series.changes else ""


def trends_of(
    entries: Iterable[HistoryEntry], metrics: Sequence[str] = FOLLOWED, acknowledged: Sequence[Acknowledgement] = ()
) -> TrendsReport:
    """The report over time of a history; metrics are names of `dlbench.analysis.metrics.METRICS`."""
    runs = list(entries)
    with_figures = [run for run in dated(runs) if run.group and run.figures]
    return TrendsReport(
        as_of=with_figures[-1].finished if with_figures else "",
        num_runs=len(with_figures),
        num_without=len(runs) - len(with_figures),
        series=tuple(trends(runs, [metric for metric in METRICS if metric.name in metrics], acknowledged)),
        nodes=slow_months(runs),
        damaged=damaged_runs(runs),
        methods=METHODS,
    )

"""Entries of a history become a report over time: series with their changes, and hosts by month."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import dlbench
from dlbench.history.entry import HistoryEntry
from dlbench.history.page.words import METHODS, verdict
from dlbench.history.store import Acknowledgement
from dlbench.history.trends.series import Change, Trend, damaged_runs, dated, trends
from dlbench.history.trends.slow_months import SlowMonths, slow_months
from dlbench.reading.metrics import METRICS

FORMAT = "dlbench.trends"
VERSION = 1

FOLLOWED = ("step_median_s", "energy_per_sample_j", "time_to_quality_s")
"""Metrics that are followed unless others are asked for: the mean and the p95 of steps say much the same."""


@dataclass(frozen=True, kw_only=True)
class TrendsReport:
    """Everything; what the JSON of `dlbench history trends` holds."""

    format: str = FORMAT
    version: int = VERSION
    title: str
    as_of: str
    """When the newest run with figures finished, UTC; empty if there is none."""
    dlbench_version: str
    num_runs: int
    """Runs with figures."""
    num_without: int
    series: tuple[Trend, ...]
    nodes: SlowMonths
    damaged: tuple[str, ...]
    methods: tuple[tuple[str, str], ...]

    @property
    def changes(self) -> tuple[tuple[Trend, Change], ...]:
        """All change points, newest first."""
        found = [(series, change) for series in self.series for change in series.changes]
        return tuple(sorted(found, key=lambda one: one[1].time, reverse=True))

    @property
    def by_newest_change(self) -> tuple[Trend, ...]:
        """Series with the newest change first, then those without one, then those that are too short."""
        newest_first = sorted(self.series, key=lambda one: one.changes[-1].time if one.changes else "", reverse=True)
        return tuple(sorted(newest_first, key=lambda one: not one.is_long_enough))


def trends_of(
    entries: Iterable[HistoryEntry], metrics: Sequence[str] = FOLLOWED, acknowledged: Sequence[Acknowledgement] = ()
) -> TrendsReport:
    """The report over time.

    Args:
        entries: of a history, in any order.
        metrics: names of `dlbench.reading.metrics.METRICS`.
        acknowledged: of that history.
    """
    known = list(entries)
    with_figures = [entry for entry in dated(known) if entry.group and entry.figures]
    found = trends(known, [metric for metric in METRICS if metric.name in metrics], acknowledged)
    return TrendsReport(
        title="dlbench history: trends",
        as_of=with_figures[-1].finished if with_figures else "",
        dlbench_version=dlbench.__version__,
        num_runs=len(with_figures),
        num_without=len(known) - len(with_figures),
        series=tuple(dataclasses.replace(one, verdict=verdict(one)) for one in found),
        nodes=slow_months(known),
        damaged=damaged_runs(known),
        methods=METHODS,
    )

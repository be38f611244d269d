"""What a history says over time: its series with their changes, and its hosts by month."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dlbench.analysis.metrics import FOLLOWED, METRICS
from dlbench.analysis.sessions import MIN_SESSIONS
from dlbench.analysis.slow_nodes import FALSE_SHARE, SLOW
from dlbench.history.acknowledgements import Acknowledgement
from dlbench.history.change_points import (
    MIN_DRIFT,
    MIN_EFFECT,
    MIN_EVIDENCE,
    MIN_NIGHTS,
    MIN_SEGMENT,
    NAMED,
    ODD_NIGHTS,
    SHAPE_FACTOR,
)
from dlbench.history.entry import HistoryEntry
from dlbench.history.series import Change, Trend
from dlbench.history.slow_months import RECENT_DAYS, SlowMonths, slow_months
from dlbench.history.trends import damaged_runs, dated, trends
from dlbench.history.words import change_cell, day
from dlbench.report.document import BaseReport
from dlbench.stats.verdict_words import TREND

_IMPORT = "dlbench history import RUNS"


METHODS: tuple[tuple[str, str], ...] = (
    (
        "What is one series",
        "Runs of one configuration on one machine and device, with equal ranks and nodes. Anything else that decides "
        "what is computed or how it is measured makes another series; a new machine begins a new one.",
    ),
    (
        "Runs and nights",
        "All runs of one session (less than 12 h from one to the next, a day at most, one boot; a Slurm job is one) "
        "are one night, whose value is the median over its runs. Nights are what is tested and resampled: runs of one "
        "night share its state of the machine, and counting them one by one "
        "would call differences real that are not.",
    ),
    (
        "Change points",
        "The evidence for a change is a Bayes factor: how much likelier the nights are with a change of level on any "
        "of them than with none, where neighbouring nights resemble each other by an amount that is not known, and odd "
        "nights are drawn in. Candidates are the likeliest places of overlapping stretches; those that do not hold "
        "between their neighbours are merged away, the weakest first, as Hunter does. A change point has a Bayes "
        f"factor of at least {MIN_EVIDENCE:.0f} (times series over changes where several series are followed: "
        f"e-values of Wang and Ramdas), levels at least {MIN_EFFECT:.0%} apart, and at least {MIN_SEGMENT} nights on "
        f"either side: up to {ODD_NIGHTS} odd nights are outliers. Fewer than {MIN_NIGHTS} nights show nothing.",
    ),
    (
        "At once, or slowly",
        f"Each change, or several in one direction, is held against a ramp of {MIN_DRIFT} nights or more. What the "
        f"ramp explains {SHAPE_FACTOR:.0f} times better is a slow change: it has a beginning and an end, and nothing "
        "is named with it. Where neither is so much likelier, that is said, and what differs there counts only if "
        "the change came at once.",
    ),
    (
        "Acknowledged changes",
        "A level that became worse is called worse, whatever its age, until `dlbench history acknowledge` says who "
        "knows of it and why. It is called worse again when the level gets worse by another "
        f"{MIN_EFFECT:.0%}, or at a further change.",
    ),
    (
        "Ratios and intervals",
        "The ratio is the median of the ratios of all nights after to all before (Hodges and Lehmann), up to the "
        "neighbouring change points, with the interval that the rank sum test gives; of a slow change its last night "
        "over its first (slope by Theil and Sen). A level has an interval by order statistics. They take nights for "
        "independent, so they are too narrow where neighbouring nights resemble each other. The place was found in the "
        "same nights, so a small change looks slightly larger than it is.",
    ),
    (
        "What differs at a change",
        "Where a change lies has an interval, too (95 % of what is likely). Commits are those of the nights just "
        "outside it (tag commit, else the commit of dlbench's own checkout). A key of the environment or a tag is "
        "named where all runs of the level after have other values than all runs of the level before, nights inside "
        "the interval left out, and keys that are new nearly every night, such as job numbers. What differs is a place "
        "to look, not a proven cause.",
    ),
    (
        "The newest nights",
        f"Nights beyond the range that holds the next ordinary night but for {NAMED:.0%} (the predictive "
        "distribution of a Student t whose tails are those of the nights of their level) are named at once; whether "
        "the level has changed is said when there are enough of them.",
    ),
    (
        "Slow nodes",
        "In a run on several hosts, a host's ratio is the own work of its slowest rank (its step without the exchange) "
        "over the median of the other hosts' slowest ranks, as if all hosts had equally many, so runs of any kind "
        "stand side by side. A slow link shows where the nodes' clocks were compared: its host leaves every exchange "
        "later than the others, by more than the clocks' error bounds, although its own work does not take longer; it "
        "is named and not excluded, because the link may be that of the host it receives from. "
        f"Nights are the unit. A host is slow where a one-sided t test of {MIN_SESSIONS} or more nights shows its mean "
        f"to be above {SLOW:g} (or its exchanges to end more than {SLOW - 1:.0%} of a step later), over all hosts "
        f"together: of those called slow {FALSE_SHARE:.0%} are not, on average (Benjamini and Hochberg). With fewer "
        "nights it is suspected at most. Whether it is slow now is decided by its nights since its last change point, "
        f"none older than {RECENT_DAYS} days before the newest run. Runs on one host and runs with an injected "
        "fault say nothing.",
    ),
)
"""How the numbers of a history are made."""


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

"""The report of `dlbench history trends` as data: series with their changes, and hosts by month."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from dlbench.analysis.metrics import FOLLOWED, METRICS
from dlbench.analysis.sessions import MIN_SESSIONS
from dlbench.analysis.slow_nodes import FALSE_SHARE, SLOW
from dlbench.history.acknowledgements import Acknowledgement
from dlbench.history.change_points import (
    MAX_OUTLIERS,
    MIN_DRIFT,
    MIN_EFFECT,
    MIN_EVIDENCE,
    MIN_NIGHTS,
    MIN_SEGMENT,
    NAMED,
    SHAPE_FACTOR,
)
from dlbench.history.entry import HistoryEntry
from dlbench.history.series import Change, Trend
from dlbench.history.slow_months import RECENT_DAYS, SlowMonths, slow_months
from dlbench.history.trends import damaged_runs, dated, trends
from dlbench.history.words import change_cell, day
from dlbench.report.document import BaseReport
from dlbench.stats.verdict_words import TREND
from dlbench.units import counted, plural

_IMPORT = "dlbench history import RUNS"

METHODS: tuple[tuple[str, str], ...] = (  # How the numbers of a history are made.
    (
        "Trends",
        "A trend is one metric of runs of one configuration on one machine and device, with equal ranks and nodes. "
        "Runs that differ in anything that decides what is computed or how it is measured have another trend.",
    ),
    (
        "Runs and nights",
        "All runs of one session (less than 12 h from one to the next, a day at most, one boot; or one Slurm job) "
        "are one night, whose value is the median over its runs. Nights are the unit of all tests: the runs of one "
        "night share the state of the machine, and counting them separately would call differences real that are not.",
    ),
    (
        "Change points",
        "The evidence for a change is a Bayes factor: the likelihood of the nights with a change of level on any "
        "of them over that without a change. Neighbouring nights are correlated by an unknown amount, and outliers "
        "are winsorized. Candidates are the likeliest places of overlapping stretches; the weakest are merged first, "
        "until all reach the threshold between their neighbours, as in Hunter. A change point has a Bayes "
        f"factor of at least {MIN_EVIDENCE:.0f} (times trends over changes if several trends are followed: "
        f"e-values of Wang and Ramdas), levels at least {MIN_EFFECT:.0%} apart, and at least {MIN_SEGMENT} nights on "
        f"either side: up to {MAX_OUTLIERS} deviating nights are outliers. At least {MIN_NIGHTS} nights are needed.",
    ),
    (
        "Step or drift",
        f"Each change, or several in one direction, is compared with a ramp of {MIN_DRIFT} nights or more. If the "
        f"ramp explains the nights {SHAPE_FACTOR:.0f} times better, it is a slow change: it has a beginning and an "
        "end, and no commits or settings are listed with it. If neither is that much likelier, the report says so, "
        "and the listed differences matter only if the change was a step.",
    ),
    (
        "Acknowledged changes",
        "A regression of any age counts until it is acknowledged with `dlbench history acknowledge`. It counts again "
        f"if the level gets worse by another {MIN_EFFECT:.0%}, or at a further change.",
    ),
    (
        "Ratios and intervals",
        "The ratio is the median of the ratios of all nights after to all before (Hodges and Lehmann), up to the "
        "neighbouring change points, with the interval of the rank sum test; of a slow change its last night "
        "over its first (slope by Theil and Sen). A level has an interval by order statistics. The intervals assume "
        "independent nights, so they are too narrow if neighbouring nights are correlated. The place was found in the "
        "same nights, so a small change is slightly overestimated.",
    ),
    (
        "Differences at a change",
        "The place of a change has a 95 % interval, too. Commits are those of the nights just outside it (tag commit, "
        "or the commit of dlbench's own checkout). A key of the environment or a tag is listed if all runs after the "
        "change have other values than all runs before it; nights inside the interval do not count, and keys with a "
        "new value nearly every night, such as job numbers, are not listed. A difference is a hint, not a proven "
        "cause.",
    ),
    (
        "The newest nights",
        f"The usual range contains the next ordinary night with a probability of {1 - NAMED:.0%} (predictive "
        "distribution of a Student t whose tails are estimated from the nights of the level). Nights outside are "
        "reported immediately; a change of level is reported when there are enough of them.",
    ),
    (
        "Slow nodes",
        "In a run on several hosts, a host's ratio is the own work of its slowest rank (its step without the exchange) "
        "over the median of the other hosts' slowest ranks, corrected for different numbers of ranks, so runs of any "
        "kind can be combined. A slow link is found if the nodes' clocks were compared: its host leaves every exchange "
        "later than the others, by more than the clocks' error bounds, although its own work does not take longer; it "
        "is reported and not excluded, because the link may be that of the host that it receives from. "
        f"Nights are the unit. A host is slow if a one-sided t test of {MIN_SESSIONS} or more nights shows its mean "
        f"to be above {SLOW:g} (or its exchanges to end more than {SLOW - 1:.0%} of a step later), over all hosts "
        f"together: on average {FALSE_SHARE:.0%} of the hosts called slow are not (Benjamini and Hochberg). With fewer "
        "nights it is at most suspected. Its present state is judged by its nights since its last change point, "
        f"none older than {RECENT_DAYS} days before the newest run. Runs on one host and runs with an injected "
        "fault do not count.",
    ),
)


class ChangeOfSeries(NamedTuple):
    """A change, and the series that has it."""

    series: Trend
    change: Change

    @property
    def line(self) -> str:
        """The change and how to acknowledge it, in one line."""
        series, change = self
        return f"{day(change.time)}: {series.label}: {change_cell(change.ratio)}; {series.acknowledgement(change)}"


@dataclass(frozen=True, kw_only=True)
class TrendsReport(BaseReport):
    """The content of the JSON of `dlbench history trends`."""

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
        changes: list[ChangeOfSeries] = []
        for series in self.series:
            changes += [ChangeOfSeries(series, change) for change in series.changes]
        return tuple(sorted(changes, key=attrgetter("change.time"), reverse=True))

    @property
    def open_regressions(self) -> tuple[ChangeOfSeries, ...]:
        regressions: list[ChangeOfSeries] = []
        for series in self.series:
            regressions += [ChangeOfSeries(series, change) for change in series.open_regressions]
        return tuple(regressions)

    @property
    def by_newest_change(self) -> tuple[Trend, ...]:
        """Series with the newest change first, then those without changes, then those that are too short."""
        newest_first = sorted(self.series, key=attrgetter("newest_change_time"), reverse=True)
        return tuple(sorted(newest_first, key=attrgetter("is_long_enough"), reverse=True))

    @property
    def finding(self) -> str:
        """The number of changes and the newest one, in a sentence or two; or why there is none."""
        if not self.series:
            return f"No run has figures. Import runs with {_IMPORT}."
        num_long_enough = sum(series.is_long_enough for series in self.series)
        if not num_long_enough:
            longest = max(len(series.nights) for series in self.series)
            return (
                f"{counted(len(self.series), 'trend')}, none long enough: a change point needs {MIN_NIGHTS} nights, "
                f"the longest has {longest}. Import further nights with {_IMPORT}."
            )
        sentences = [f"Nothing changed in {counted(num_long_enough, 'trend')}."]
        if self.changes:
            series, change = self.changes[0]
            sentences = [
                f"{self._counts()} in {counted(num_long_enough, 'trend')}.",
                f"Newest: {series.subject} {change_cell(change.ratio)} {change.since}, {series.point}.",
            ]
            if self.open_regressions:
                sentences.append(f"Not acknowledged: {len(self.open_regressions)}.")
        num_short = len(self.series) - num_long_enough
        if num_short:
            sentences.append(f"{num_short} more {plural('trend', num_short)}: fewer than {MIN_NIGHTS} nights.")
        return " ".join(sentences)

    def _counts(self) -> str:
        counts = Counter[str](row.change.kind for row in self.changes)
        kinds = (TREND["worse"].word, TREND["better"].word)
        return " and ".join(counted(counts[kind], kind) for kind in kinds if counts[kind])


def trends_of(
    entries: Iterable[HistoryEntry], metrics: Sequence[str] = FOLLOWED, acknowledged: Sequence[Acknowledgement] = ()
) -> TrendsReport:
    """Returns the report of a history; metrics are names of `dlbench.analysis.metrics.METRICS`."""
    runs = list(entries)
    with_figures = [run for run in dated(runs) if run.group and run.figures]
    return TrendsReport(
        as_of=max((run.finished for run in with_figures), default=""),
        num_runs=len(with_figures),
        num_without=len(runs) - len(with_figures),
        series=tuple(trends(runs, [metric for metric in METRICS if metric.name in metrics], acknowledged)),
        nodes=slow_months(runs),
        damaged=damaged_runs(runs),
        methods=METHODS,
    )

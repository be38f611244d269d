"""Entries of a history become a report over time: series with their changes, hosts by month, and the words on both."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dlbench.analysis.metrics import METRICS
from dlbench.analysis.sessions import MIN_SESSIONS
from dlbench.analysis.slow_nodes import FALSE_SHARE, SLOW
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
from dlbench.history.series import Change, Trend, damaged_runs, dated, trends
from dlbench.history.slow_months import RECENT_DAYS, HostCourse, SlowMonths, slow_months
from dlbench.history.store import Acknowledgement
from dlbench.report.document import BaseReport
from dlbench.report.table import Cell, unit_cell
from dlbench.report.wording import basis_text, clean, number_text, place_text, slow_link_text
from dlbench.stats.estimates import Estimate

FOLLOWED = ("step_median_s", "energy_per_sample_j", "time_to_quality_s")
"""Metrics that are followed unless others are asked for: the mean and the p95 of steps say much the same."""


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
    """The report over time of a history; metrics are names of `dlbench.analysis.metrics.METRICS`."""
    known = list(entries)
    with_figures = [entry for entry in dated(known) if entry.group and entry.figures]
    found = trends(known, [metric for metric in METRICS if metric.name in metrics], acknowledged)
    return TrendsReport(
        as_of=with_figures[-1].finished if with_figures else "",
        num_runs=len(with_figures),
        num_without=len(known) - len(with_figures),
        series=tuple(dataclasses.replace(one, verdict=verdict(one)) for one in found),
        nodes=slow_months(known),
        damaged=damaged_runs(known),
        methods=METHODS,
    )


MAX_COMMITS = 3
MAX_COMMIT_LENGTH = 60
MAX_HOSTS = 6


def nights_text(count: int) -> str:
    """``1 night``, ``5 nights``."""
    return f"{count} night" if count == 1 else f"{count} nights"


def amount_text(value: float, unit: str) -> str:
    """One number with its unit, e.g. ``12.3 ms``, ``4.1 J``."""
    text = number_text(value, unit)
    return text if unit in ("s", "fraction") else f"{text} {unit}"


def level_text(level: Estimate) -> str:
    """A level with its interval, e.g. ``101 ms [100, 102]``."""
    return str(unit_cell(level))


def percent_change(ratio: float) -> str:
    """A ratio as a change, e.g. ``+4.8 %``."""
    return f"{(ratio - 1) * 100:+.1f} %"


def change_cell(ratio: Estimate) -> Cell:
    """The same with its interval, e.g. ``+4.8 % [+3.9, +5.6]``."""
    ends = [percent_change(end).removesuffix(" %") for end in (ratio.low, ratio.high) if end is not None]
    return Cell(percent_change(ratio.value), f"[{', '.join(ends)}]" if ends else "", number=ratio.value)


def change_text(ratio: Estimate) -> str:
    """`change_cell` as one text."""
    return str(change_cell(ratio))


def ratio_cell(ratio: Estimate | None) -> Cell | None:
    """A ratio near 1, e.g. ``1.048 [1.031, 1.060]``."""
    if ratio is None:
        return None
    ends = [f"{end:.3f}" for end in (ratio.low, ratio.high) if end is not None]
    return Cell(f"{ratio.value:.3f}", f"[{', '.join(ends)}]" if ends else "", number=ratio.value)


def evidence_text(evidence: float) -> str:
    """``Bayes factor 2400``, or ``Bayes factor > 1e6``."""
    return f"Bayes factor {evidence:.0f}" if evidence <= 1e6 else "Bayes factor > 1e6"


def kind_text(change: Change) -> str:
    """``regression``, ``slow regression`` (a drift), ``regression, at once or slowly``."""
    return {"step": "{}", "drift": "slow {}", "step or drift": "{}, at once or slowly"}[change.shape].format(
        change.kind
    )


def since_text(change: Change) -> str:
    """``since 2026-03-04``, or ``from 2026-03-04 to 2026-06-02`` of a drift."""
    if change.shape == "drift":
        return f"from {day(change.last_before)} to {day(change.first_after)}"
    return f"since {day(change.time)}"


def acknowledged_text(series: Trend, change: Change) -> str:
    """Who knows of it, and why; else how to say so. Empty where a change needs nobody's word."""
    known = change.acknowledged
    if known is not None:
        return f"acknowledged by {clean(known.by)} on {day(known.written)}: {clean(known.reason)}"
    if change not in series.open_regressions:
        return ""
    return f"to acknowledge: dlbench history acknowledge {series.id} {day(change.time)} --reason TEXT"


def day(moment: str) -> str:
    """The day of a moment in UTC, e.g. ``2026-03-04``."""
    return moment[:10]


def point_text(series: Trend) -> str:
    """Configuration and place, without the metric."""
    return f"{series.configuration}; {place_text(series.ranks, series.nodes)}"


def between_text(change: Change) -> str:
    """``between the nights of 2026-03-01 and 2026-03-03``: the interval of the place, or the nights of a drift."""
    if change.shape == "drift":
        return f"slowly, over the nights of {day(change.last_before)} to {day(change.first_after)}"
    return f"between the nights of {day(change.last_before)} and {day(change.first_after)}"


def commits_text(change: Change) -> str:
    """``1a2b3c -> 4d5e6f``, or that nothing is known; empty for a drift, which has no commits."""
    if change.shape == "drift":
        return ""
    if not change.commits_before and not change.commits_after:
        return "commit not known"
    before, after = (
        _some([clean(commit, MAX_COMMIT_LENGTH) for commit in side], MAX_COMMITS) or "not known"
        for side in (change.commits_before, change.commits_after)
    )
    is_equal = set(change.commits_before) == set(change.commits_after)
    return f"commit {before} on both sides" if is_equal else f"commit {before} -> {after}"


def differences_text(change: Change) -> list[str]:
    """Everything else that differs, a line each; one line that says so where nothing does, or why it is not asked."""
    if change.shape == "drift":
        return ["a slow change has no date, so commits and environment are not set against it"]
    lines = [f"{one.key}: {one.before} -> {one.after}" for one in change.differences]
    if change.new_hosts:
        lines.append(f"hosts used only since: {_some(change.new_hosts, MAX_HOSTS)}")
    if change.gone_hosts:
        lines.append(f"hosts used only before: {_some(change.gone_hosts, MAX_HOSTS)}")
    return lines or ["no recorded key of the environment differs between all runs before and all runs after"]


def newest_text(series: Trend) -> str:
    """What the newest nights say, and how long to wait; empty where the newest night is an ordinary one."""
    newest = series.newest
    if newest is None:
        return ""
    what = "The newest night lies" if newest.num_beyond == 1 else f"The newest {newest.num_beyond} nights lie"
    usual = f"{amount_text(newest.low, series.unit)} to {amount_text(newest.high, series.unit)}"
    word = "worse" if newest.is_worse else "better"
    return (
        f"{what} beyond the usual range ({series.title.lower()} {percent_change(newest.ratio)}, {word}; usual: {usual})"
        f". That is not yet a change point: wait for {newest.wait_for} or more such nights."
    )


def verdict(series: Trend) -> str:
    """The finding of a series in one sentence."""
    count = nights_text(len(series.nights))
    if not series.is_long_enough:
        return f"{count}, level {level_text(series.levels[-1].value)}; a change point needs {MIN_NIGHTS} nights."
    level = series.levels[-1]
    if not series.changes:
        return f"No change in {count}; level {level_text(level.value)}."
    last = series.changes[-1]
    more = f" ({len(series.changes)} changes in all)" if len(series.changes) > 1 else ""
    kind = kind_text(last)
    when = since_text(last) if last.shape == "drift" else f"on {day(last.time)}"
    now = "at its end" if last.shape == "drift" else "since then"
    known = " Acknowledged." if last.acknowledged else ""
    return (
        f"{kind[:1].upper()}{kind[1:]} {when}: {series.title.lower()} {change_text(last.ratio)}{more}; {now} "
        f"{level_text(last.after)} over {nights_text(last.after.n)}.{known}"
    )


def short_verdict(series: Trend) -> str:
    """The finding of a series in a few words."""
    if series.changes:
        last = series.changes[-1]
        when = since_text(last) if last.shape == "drift" else f"on {day(last.time)}"
        known = ", acknowledged" if last.acknowledged else ""
        return f"{kind_text(last)} {when}, {percent_change(last.ratio.value)}{known}"
    return f"{'no change in ' if series.is_long_enough else ''}{nights_text(len(series.nights))}"


def change_lines(series: Trend, change: Change) -> list[str]:
    """A change for the terminal: the finding, then what differs, marked as items."""
    mark = "!" if change.kind == "regression" else "+"
    details = (between_text(change), commits_text(change), *differences_text(change), acknowledged_text(series, change))
    return [
        f"{mark} {day(change.time)} {kind_text(change)}: {change_text(change.ratio)}, {level_text(change.before)} to "
        f"{level_text(change.after)}; {change_basis(change)}; {evidence_text(change.evidence)}",
        *(f"- {line}" for line in details if line),
    ]


def change_basis(change: Change) -> str:
    """How many nights stand behind it, and what its intervals are."""
    if change.shape == "drift":
        return f"{nights_text(change.ratio.n)} of the drift, slope by Theil and Sen"
    return f"{basis_text(change.before, 'night')} before, {nights_text(change.after.n)} after"


def regression_text(series: Trend, change: Change) -> str:
    """A regression that nobody acknowledged, in one line."""
    return f"{day(change.time)}: {series.label}: {change_text(change.ratio)}; {acknowledged_text(series, change)}"


def host_sentence(host: HostCourse) -> str:
    """What a host is accused of."""
    assert host.current is not None
    return f"{clean(host.host, 253)}: {' and '.join(_reasons(host))} since {day(host.since)}"


def _reasons(host: HostCourse) -> Iterator[str]:
    current, later = host.current, host.later
    if current is not None and host.verdict in ("slow", "slow and slow link"):
        more = (current.value - 1) * 100
        yield (
            f"{more:.1f} % more own work than the other hosts of its runs ({ratio_cell(current)}, "
            f"{basis_text(current, 'night')})"
        )
    if later is not None and host.verdict in ("slow link", "slow and slow link"):
        yield f"slow link or NIC: {slow_link_text(later)}"


def _some(names: Sequence[str], most: int) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


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
"""How the numbers of trends are made."""

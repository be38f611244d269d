"""Entries of a history become a report over time; foreign text is made harmless here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import dlbench
from dlbench.history.entry import HistoryEntry
from dlbench.history.page import model
from dlbench.history.page.methods import METHODS
from dlbench.history.page.words import verdict
from dlbench.history.trends.change_points import MIN_NIGHTS
from dlbench.history.trends.series import Change, Difference, Night, Trend, dated, trends
from dlbench.history.trends.slow_months import HostCourse, SlowMonths, slow_months
from dlbench.reading.run_metrics import METRICS, Metric
from dlbench.report.wording import clean, place_text
from dlbench.stats.figure import figure_of, optional_figure_of

FOLLOWED = ("step_median_s", "energy_per_sample_j", "time_to_quality_s")
"""Metrics that are followed unless others are asked for: the mean and the p95 of steps say much the same."""

MOST_VALUES = 4
"""Values of a key that are told on one side of a change; the newest of more."""


def trends_of(entries: Iterable[HistoryEntry], metrics: Sequence[str] = FOLLOWED) -> model.TrendsReport:
    """The report over time.

    Args:
        entries: of a history, in any order.
        metrics: names of `dlbench.reading.run_metrics.METRICS`.
    """
    known = list(entries)
    followed = [metric for metric in METRICS if metric.name in metrics]
    systems = {entry.group: entry for entry in known}
    with_figures = [entry for entry in dated(known) if entry.group and entry.figures]
    return model.TrendsReport(
        title="dlbench history: trends",
        as_of=with_figures[-1].finished if with_figures else "",
        dlbench_version=dlbench.__version__,
        num_runs=len(with_figures),
        num_without=len(known) - len(with_figures),
        series=tuple(_series(trend, systems[trend.group]) for trend in trends(known, followed)),
        nodes=nodes_of(known),
        damaged=_damaged(known),
        methods=METHODS,
    )


def nodes_of(entries: Iterable[HistoryEntry]) -> model.NodesOverTime:
    """Hosts by month."""
    known = list(entries)
    found: SlowMonths = slow_months(known)
    return model.NodesOverTime(
        as_of=clean(found.as_of),
        hosts=tuple(map(_host, found.hosts)),
        months=found.months,
        num_runs=found.num_runs,
        num_without=found.num_without,
        exclude=found.exclude,
        unsafe=tuple(map(clean, found.unsafe)),
        damaged=_damaged(known),
    )


def _damaged(entries: Iterable[HistoryEntry]) -> tuple[str, ...]:
    return tuple(clean(f"{entry.run_id}: {entry.why}") for entry in entries if entry.state == "damaged")


def _series(trend: Trend, entry: HistoryEntry) -> model.TrendSeries:
    metric = trend.metric
    place = place_text(trend.ranks, trend.nodes)
    configuration = clean(trend.label)
    system = clean(entry.system)
    made = model.TrendSeries(
        id=f"{clean(trend.group)}-{trend.ranks}-{trend.nodes}-{metric.name}",
        label=f"{configuration}; {place}; {metric.title.lower()}",
        group=clean(trend.group),
        configuration=configuration,
        system=system,
        workload=clean(entry.workload),
        preset=clean(entry.preset),
        engine=clean(entry.engine),
        ranks=trend.ranks,
        nodes=trend.nodes,
        metric=metric.name,
        title=metric.title,
        unit=metric.unit,
        higher_is_worse=metric.higher_is_worse,
        caption=f"{configuration}; {place}, system {system}; {metric.about}; a night is the median of its runs, a "
        "level the median of its nights",
        verdict="",
        num_runs=trend.num_runs,
        is_long_enough=len(trend.nights) >= MIN_NIGHTS,
        nights=tuple(_nights(trend)),
        levels=tuple(_levels(trend)),
        changes=tuple(_change(change, trend.nights[change.point.index].time, metric) for change in trend.changes),
        newest=_newest(trend),
    )
    return dataclasses.replace(made, verdict=verdict(made, MIN_NIGHTS))


def _nights(trend: Trend) -> Iterable[model.NightRow]:
    for number, level in enumerate(trend.segments):
        for night in trend.nights[level.start : level.end]:
            yield model.NightRow(
                time=clean(night.time),
                series=clean(night.series),
                value=night.value,
                values=night.values,
                run_ids=tuple(map(clean, night.run_ids)),
                commits=_commits(night),
                hosts=tuple(map(clean, night.hosts)),
                level=number,
            )


def _levels(trend: Trend) -> Iterable[model.Level]:
    for level in trend.segments:
        yield model.Level(
            first=clean(trend.nights[level.start].time),
            last=clean(trend.nights[level.end - 1].time),
            num_nights=level.end - level.start,
            value=figure_of(level.level, trend.metric.unit),
        )


def _change(change: Change, time: str, metric: Metric) -> model.ChangeRow:
    point = change.point
    return model.ChangeRow(
        kind="regression" if change.is_regression else "improvement",
        time=clean(time),
        last_before=clean(change.last_before.time),
        first_after=clean(change.first_after.time),
        before=figure_of(point.before.level, metric.unit),
        after=figure_of(point.after.level, metric.unit),
        ratio=figure_of(point.ratio, "ratio"),
        p=point.p,
        commits_before=_commits(change.last_before),
        commits_after=_commits(change.first_after),
        runs_before=tuple(map(clean, change.last_before.run_ids)),
        runs_after=tuple(map(clean, change.first_after.run_ids)),
        differences=tuple(map(_difference, change.differences)),
        new_hosts=tuple(map(clean, change.new_hosts)),
        gone_hosts=tuple(map(clean, change.gone_hosts)),
    )


def _commits(night: Night) -> tuple[str, ...]:
    return tuple(clean(commit, 60) for commit in night.commits)


def _difference(found: Difference) -> model.DifferenceRow:
    return model.DifferenceRow(key=clean(found.key, 200), before=_values(found.before), after=_values(found.after))


def _values(values: Sequence[str]) -> str:
    more = f" and {len(values) - MOST_VALUES} before" if len(values) > MOST_VALUES else ""
    return ", ".join(clean(value, 200) for value in values[-MOST_VALUES:]) + more


def _newest(trend: Trend) -> model.NewestNights | None:
    found = trend.newest
    if found is None or not found.num_beyond or len(trend.nights) < MIN_NIGHTS:
        return None
    return model.NewestNights(
        num_beyond=found.num_beyond,
        ratio=found.ratio,
        low=found.low,
        high=found.high,
        wait_for=found.wait_for,
        is_worse=(found.ratio > 1) == trend.metric.higher_is_worse,
    )


def _host(course: HostCourse) -> model.HostRow:
    return model.HostRow(
        host=clean(course.host, 253),
        verdict=course.verdict,
        current=optional_figure_of(course.current, "ratio"),
        since=clean(course.since),
        num_runs=course.num_runs,
        months=tuple(
            model.HostMonthRow(month=clean(one.month), ratio=figure_of(one.ratio, "ratio"), verdict=one.verdict)
            for one in course.months
        ),
        changes=tuple(
            model.HostChangeRow(time=clean(one.time), ratio=figure_of(one.point.ratio, "ratio"), p=one.point.p)
            for one in course.changes
        ),
    )

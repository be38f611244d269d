"""Tables of a history over time: for people as rows of text, for programs as columns with units in their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from dlbench.history.page.model import ChangeRow, HostRow, NodesOverTime, TrendSeries, TrendsReport
from dlbench.history.page.words import (
    amount_text,
    basis_text,
    change_text,
    commits_text,
    day,
    differences_text,
    level_text,
    p_text,
    times_text,
)
from dlbench.report.tabular import Table
from dlbench.report.wording import DASH, place_text
from dlbench.stats.figure import Cell, figure_columns

TableName = Literal["changes", "series", "nights", "hosts"]

MAX_MONTHS = 6
"""Newest months shown side by side; CSV and JSON hold all."""


# For people


def changes(found: Sequence[tuple[TrendSeries, ChangeRow]]) -> Table:
    """Change points with what differs at each."""
    rows: Table = [
        (
            "First night after",
            "Between",
            "Change",
            "Metric",
            "Ratio",
            "From",
            "To",
            "Code",
            "Also differs",
            "p",
            "Series",
        )
    ]
    rows += [
        (
            day(change.time),
            f"{day(change.last_before)}, {day(change.first_after)}",
            change.kind,
            series.title.lower(),
            change_text(change.ratio),
            level_text(change.before),
            level_text(change.after),
            commits_text(change),
            "; ".join(differences_text(change)),
            p_text(change.p).removeprefix("p "),
            f"{series.configuration}; {place_text(series.ranks, series.nodes)}",
        )
        for series, change in found
    ]
    return rows


def series_rows(found: Sequence[TrendSeries]) -> Table:
    """All series, one line each."""
    rows: Table = [("Series", "Metric", "System", "Nights", "Runs", "From", "To", "Level now", "Interval", "Changes")]
    rows += [
        (
            f"{series.configuration}; {place_text(series.ranks, series.nodes)}",
            series.title.lower(),
            series.system,
            str(len(series.nights)),
            str(series.num_runs),
            day(series.nights[0].time),
            day(series.nights[-1].time),
            level_text(series.levels[-1].value),
            basis_text(series.levels[-1].value),
            str(len(series.changes)) if series.is_long_enough else "too few nights",
        )
        for series in found
    ]
    return rows


def nights(series: TrendSeries) -> Table:
    """Every night of a series."""
    rows: Table = [("Night", "Median", "Runs", "Level", "Commit", "Hosts")]
    rows += [
        (
            night.time,
            amount_text(night.value, series.unit),
            ", ".join(amount_text(value, series.unit) for value in night.values),
            level_text(series.levels[night.level].value),
            ", ".join(night.commits) or DASH,
            str(len(night.hosts)) if len(night.hosts) > 4 else ", ".join(night.hosts) or DASH,
        )
        for night in series.nights
    ]
    return rows


def hosts(nodes: NodesOverTime, most: int | None = None) -> Table:
    """Hosts as they are now, slow ones first, with the newest months."""
    months = nodes.months[-MAX_MONTHS:]
    rows: Table = [("Host", "Now", "Ratio", "Interval", "Since", "Runs", *months)]
    for host in nodes.hosts[:most]:
        by_month = {one.month: one for one in host.months}
        rows.append(
            (
                host.host,
                host.verdict,
                DASH if host.current is None else times_text(host.current),
                DASH if host.current is None else basis_text(host.current, "run"),
                day(host.since) or DASH,
                str(host.num_runs),
                *(times_text(by_month[month].ratio) if month in by_month else DASH for month in months),
            )
        )
    return rows


def host_months(nodes: NodesOverTime, told: Sequence[HostRow]) -> Table:
    """Every month of some hosts."""
    rows: Table = [("Month", *(host.host for host in told))]
    for month in nodes.months:
        found = [next((one for one in host.months if one.month == month), None) for host in told]
        rows.append((month, *(DASH if one is None else f"{times_text(one.ratio)} ({one.verdict})" for one in found)))
    return rows


# For programs

_SERIES = ("series_id", "group", "label", "system", "workload", "preset", "engine", "ranks", "nodes", "metric", "unit")

CHANGE_COLUMNS: tuple[str, ...] = (
    *_SERIES,
    *(
        "kind",
        "time",
        "last_before",
        "first_after",
        "ratio",
        "ratio_low",
        "ratio_high",
        "before",
        "before_low",
        "before_high",
    ),
    *("after", "after_low", "after_high", "nights_before", "nights_after", "p", "commits_before", "commits_after"),
    *("differences", "new_hosts", "gone_hosts"),
)
SERIES_COLUMNS: tuple[str, ...] = (
    *_SERIES,
    *("num_nights", "num_runs", "first", "last", "level", "level_low", "level_high", "level_nights", "changes"),
    *("newest_beyond", "newest_ratio", "wait_for", "verdict"),
)
NIGHT_COLUMNS: tuple[str, ...] = (*_SERIES, "time", "series", "value", "runs", "level_number", "commits", "hosts")
HOST_COLUMNS: tuple[str, ...] = (
    *("host", "month", "ratio", "ratio_low", "ratio_high", "runs", "interval", "verdict", "now", "current"),
    *("current_low", "current_high", "since"),
)


def of_series(series: TrendSeries) -> dict[str, Cell]:
    """What every row says of its series."""
    return {"series_id": series.id, **{name: getattr(series, name) for name in _SERIES[1:]}}


def change_rows(report: TrendsReport) -> Iterator[Mapping[str, Cell]]:
    """Change points, newest first."""
    for series, change in report.changes:
        yield {
            **of_series(series),
            "kind": change.kind,
            "time": change.time,
            "last_before": change.last_before,
            "first_after": change.first_after,
            **figure_columns("ratio", change.ratio),
            **figure_columns("before", change.before),
            **figure_columns("after", change.after),
            "nights_before": change.before.n,
            "nights_after": change.after.n,
            "p": change.p,
            "commits_before": " ".join(change.commits_before),
            "commits_after": " ".join(change.commits_after),
            "differences": " | ".join(f"{one.key}: {one.before} -> {one.after}" for one in change.differences),
            "new_hosts": " ".join(change.new_hosts),
            "gone_hosts": " ".join(change.gone_hosts),
        }


def series_records(report: TrendsReport) -> Iterator[Mapping[str, Cell]]:
    """Series as they stand now."""
    for series in report.series:
        level = series.levels[-1]
        yield {
            **of_series(series),
            "num_nights": len(series.nights),
            "num_runs": series.num_runs,
            "first": series.nights[0].time,
            "last": series.nights[-1].time,
            **figure_columns("level", level.value),
            "level_nights": level.num_nights,
            "changes": len(series.changes) if series.is_long_enough else None,
            "newest_beyond": series.newest.num_beyond if series.newest else 0,
            "newest_ratio": series.newest.ratio if series.newest else None,
            "wait_for": series.newest.wait_for if series.newest else None,
            "verdict": series.verdict,
        }


def night_rows(report: TrendsReport) -> Iterator[Mapping[str, Cell]]:
    """Every night of every series."""
    for series in report.series:
        for night in series.nights:
            yield {
                **of_series(series),
                "time": night.time,
                "series": night.series,
                "value": night.value,
                "runs": len(night.values),
                "level_number": night.level,
                "commits": " ".join(night.commits),
                "hosts": " ".join(night.hosts),
            }


def host_rows(nodes: NodesOverTime) -> Iterator[Mapping[str, Cell]]:
    """Hosts by month."""
    for host in nodes.hosts:
        for one in host.months:
            yield {
                "host": host.host,
                "month": one.month,
                **figure_columns("ratio", one.ratio),
                "runs": one.ratio.n,
                "interval": one.ratio.kind,
                "verdict": one.verdict,
                "now": host.verdict,
                **figure_columns("current", host.current),
                "since": host.since,
            }

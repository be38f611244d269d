"""Series over nights (one metric of one group, rank and node count), with the differences at each change of level."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from operator import attrgetter
from typing import cast

from dlbench.analysis.environments import NOT_SET
from dlbench.analysis.metrics import METRICS, Metric
from dlbench.analysis.repeats import circumstances, sessions_of
from dlbench.history.change_points import (
    MIN_EFFECT,
    MIN_NIGHTS,
    ChangePoint,
    Segment,
    change_points_together,
    newest,
    segments,
)
from dlbench.history.entry import HistoryEntry
from dlbench.history.history import Acknowledgement
from dlbench.history.series import Change, ChangeWord, DifferingKey, LevelStretch, NewestNights, Night, Trend
from dlbench.report.wording import clean, place_text
from dlbench.stats.verdict_words import TREND

UTC_FORMAT = "%Y-%m-%dT%H:%M:%SZ"  # Format of all times that this module returns.
_PLAIN = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)  # A time in `UTC_FORMAT`.
MAX_DIFFERING = 2  # Maximum settings of the system that are added to equal labels.

# Keys that are reported separately from other differences, because every night may have a new value.
_COMMIT_KEYS = {"commit", "dlbench.commit", "tag.commit", "tag.dlbench.commit"}

MAX_VALUES = 4  # Values of a key that are named on one side of a change; the newest of more.
MAX_VALUE_LENGTH = 200


@dataclasses.dataclass(frozen=True)
class _Course:
    metric: Metric
    nights: Sequence[Sequence[HistoryEntry]]
    values: Sequence[float]


def dated(entries: Iterable[HistoryEntry]) -> list[HistoryEntry]:
    """Returns valid runs with a valid end, oldest first, each once, with `finished` in `UTC_FORMAT`."""
    entry_by_run: dict[str, HistoryEntry] = {}
    for entry in entries:
        if entry.state != "valid":
            continue
        moment = moment_of(entry.finished)
        if moment is None:
            continue
        if not _PLAIN.fullmatch(entry.finished):
            entry = dataclasses.replace(entry, finished=utc_seconds_text(moment))
        entry_by_run[entry.run_id] = entry
    return sorted(entry_by_run.values(), key=attrgetter("finished", "run_id"))


def damaged_runs(entries: Iterable[HistoryEntry]) -> tuple[str, ...]:
    """Returns the runs that cannot be read, each with the reason."""
    return tuple(f"{entry.run_id}: {entry.why}" for entry in entries if entry.state == "damaged")


def utc_seconds_text(moment: datetime) -> str:
    """Returns a time in UTC, e.g. ``2026-03-04T02:06:00Z``."""
    return moment.astimezone(UTC).strftime(UTC_FORMAT)


def moment_of(text: str) -> datetime | None:
    """Parses a time, in UTC if it has no zone; None if it is not a time."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    # Other years are errors, and the ends of the calendar cannot be converted to UTC.
    if not 1970 < moment.year < 9000:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def trends(
    runs: Iterable[HistoryEntry], metrics: Sequence[Metric] = METRICS, acknowledged: Sequence[Acknowledgement] = ()
) -> list[Trend]:
    """Returns the trend of every metric of every point with figures, by label, rank count, node count and metric;
    `runs` are those of `dated`.
    """
    points: dict[tuple[str, int, int], list[HistoryEntry]] = {}
    for run in runs:
        if run.group:
            points.setdefault(run.key, []).append(run)
    courses: list[_Course] = []
    for key in sorted(points, key=lambda key: (min({run.label for run in points[key]}), key)):
        nights = by_night(points[key])
        for metric in metrics:
            course = _course(metric, nights)
            if course.nights:
                courses.append(course)
    changes = change_points_together([course.values for course in courses])
    num_followed = sum(len(course.values) >= MIN_NIGHTS for course in courses)
    series = [
        _trend(course, points_of_course, num_followed, acknowledged)
        for course, points_of_course in zip(courses, changes, strict=True)
    ]
    settings = {trend.id: _system_settings(points[trend.group, trend.ranks, trend.nodes][-1]) for trend in series}
    return _with_different_labels(series, settings)


def _course(metric: Metric, nights: Sequence[Sequence[HistoryEntry]]) -> _Course:
    measured_nights, values = [], []
    for night in nights:
        # A figure of zero (an energy without a counter) has no ratio to others.
        measured = [run for run in night if run.figures.get(metric.name, 0.0) > 0]
        if measured:
            measured_nights.append(measured)
            values.append(statistics.median(run.figures[metric.name] for run in measured))
    return _Course(metric, measured_nights, values)


def _system_settings(run: HistoryEntry) -> dict[str, str]:
    return {key: value for key, value in run.environment.items() if key.startswith("system.")}


def _with_different_labels(series: list[Trend], settings: Mapping[str, Mapping[str, str]]) -> list[Trend]:
    """Adds differing `settings` of the newest runs, or the configuration's id, to equal labels of one system."""
    ids_by_label: dict[tuple[str, str], list[str]] = {}
    for trend in series:
        ids_by_label.setdefault((trend.label, trend.system), []).append(trend.id)
    labelled = []
    for trend in series:
        equal_ids = ids_by_label[trend.label, trend.system]
        if len(equal_ids) > 1:
            differing = _differing_settings(settings[trend.id], [settings[series_id] for series_id in equal_ids])
            suffix = differing or f"configuration {trend.group}"
            trend = dataclasses.replace(
                trend, label=f"{trend.label}, {suffix}", configuration=f"{trend.configuration}, {suffix}"
            )
        labelled.append(trend)
    return labelled


def _differing_settings(own: Mapping[str, str], of_all: Sequence[Mapping[str, str]]) -> str:
    """Returns the settings of one series that differ from some other; empty if they do not identify the series."""
    differing = []
    for key, value in own.items():
        if {settings.get(key) for settings in of_all} != {value}:
            differing.append(f"{key}={value}")
    if len(differing) > MAX_DIFFERING or of_all.count(own) > 1:
        return ""
    return ", ".join(differing)


def by_night(runs: Iterable[HistoryEntry]) -> list[list[HistoryEntry]]:
    """Returns the runs of each session, in order of their last run; `runs` are those of `dated`."""
    ordered = list(runs)
    sessions = sessions_of(
        {run.run_id: circumstances(run.finished, run.slurm_job_id, run.environment) for run in ordered}
    )
    nights: dict[str, list[HistoryEntry]] = {}
    for run in ordered:
        nights.setdefault(sessions[run.run_id], []).append(run)
    return sorted(nights.values(), key=lambda night: (night[-1].finished, night[-1].run_id))


def _trend(
    course: _Course, points: Sequence[ChangePoint], num_followed: int, acknowledged: Sequence[Acknowledgement]
) -> Trend:
    """Returns the trend of a course; `num_followed`: the number of series that are tested together."""
    metric, values = course.metric, course.values
    pieces = segments(values, points)
    newest_nights = None
    if len(values) >= MIN_NIGHTS:
        outside = newest(values, pieces[-1], histories=max(1, num_followed))
        if outside is not None and outside.num_outside:
            is_worse = (outside.ratio > 1) == metric.higher_is_worse
            newest_nights = NewestNights(**vars(outside), is_worse=is_worse)
    nights: list[Night] = []
    for level, piece in enumerate(pieces):
        nights += [_night(course.nights[i], metric, values[i], level) for i in range(piece.start, piece.end)]
    newest_run = course.nights[-1][-1]
    group, ranks, nodes = newest_run.key
    series_key = (group, ranks, nodes, metric.name)
    acknowledged = [acknowledgement for acknowledgement in acknowledged if acknowledgement.series == series_key]
    place = place_text(ranks, nodes)
    return Trend(
        id=f"{group}-{ranks}-{nodes}-{metric.name}",
        label=f"{newest_run.label}; {place}; {metric.title.lower()}",
        group=group,
        configuration=newest_run.label,
        system=newest_run.system,
        workload=newest_run.workload,
        preset=newest_run.preset,
        engine=newest_run.engine,
        ranks=ranks,
        nodes=nodes,
        metric=metric.name,
        title=metric.title,
        unit=metric.unit,
        higher_is_worse=metric.higher_is_worse,
        caption=f"{newest_run.label}; {place}, system {newest_run.system}; {metric.about}; a night is the median of "
        "its runs, a level the median of its nights",
        num_runs=sum(map(len, course.nights)),
        is_long_enough=len(nights) >= MIN_NIGHTS,
        nights=tuple(nights),
        levels=tuple(_level(piece, nights, metric) for piece in pieces),
        changes=tuple(_change(point, course, nights, acknowledged) for point in points),
        newest=newest_nights,
    )


def _night(runs: Sequence[HistoryEntry], metric: Metric, value: float, level: int) -> Night:
    return Night(
        time=runs[-1].finished,
        series=runs[0].series,
        value=value,
        values=tuple(run.figures[metric.name] for run in runs),
        run_ids=tuple(run.run_id for run in runs),
        commits=tuple(dict.fromkeys(run.commit for run in runs if run.commit)),
        hosts=tuple(sorted(_hosts([runs]))),
        level=level,
    )


def _level(piece: Segment, nights: Sequence[Night], metric: Metric) -> LevelStretch:
    return LevelStretch(
        first=nights[piece.start].time,
        last=nights[piece.end - 1].time,
        num_nights=piece.end - piece.start,
        value=piece.level.in_unit(metric.unit),
        at_first=piece.level.value * math.exp(piece.rise * (piece.start - piece.end + 1)),
    )


def _hosts(nights: Iterable[Iterable[HistoryEntry]]) -> set[str]:
    return {host.host for run in itertools.chain.from_iterable(nights) for host in run.hosts}


def _change(
    point: ChangePoint, course: _Course, nights: Sequence[Night], acknowledged: Sequence[Acknowledgement]
) -> Change:
    metric = course.metric
    last_before, first_after = nights[point.earliest - 1], nights[point.latest]
    commits_before: tuple[str, ...] = ()
    commits_after: tuple[str, ...] = ()
    before: Sequence[Sequence[HistoryEntry]] = ()
    after: Sequence[Sequence[HistoryEntry]] = ()
    # A drift has no date, so runs before and after are not compared.
    if point.shape != "drift":
        before = course.nights[point.before.start : point.earliest]
        after = course.nights[point.latest : point.after.end]
        commits_before, commits_after = last_before.commits, first_after.commits
    hosts_before, hosts_after = _hosts(before), _hosts(after)
    outcome = "worse" if (point.ratio.value > 1) == metric.higher_is_worse else "better"
    kind = cast("ChangeWord", TREND[outcome].word)
    time, level = nights[point.index].time, point.after.level.value

    def covers(acknowledgement: Acknowledgement) -> bool:
        """Returns whether it is of the same days, and the level has not become worse since."""
        shift = math.log(level / acknowledgement.level)
        if not metric.higher_is_worse:
            shift = -shift
        is_same_time = acknowledgement.time <= first_after.time and time <= acknowledgement.through
        return is_same_time and shift < math.log1p(MIN_EFFECT)

    return Change(
        kind=kind,
        shape=point.shape,
        time=time,
        last_before=last_before.time,
        first_after=first_after.time,
        before=point.before.level.in_unit(metric.unit),
        after=point.after.level.in_unit(metric.unit),
        ratio=point.ratio,
        evidence=point.evidence,
        acknowledged=next(filter(covers, acknowledged), None),
        commits_before=commits_before,
        commits_after=commits_after,
        runs_before=last_before.run_ids,
        runs_after=first_after.run_ids,
        differences=tuple(_differences(before, after)),
        new_hosts=tuple(sorted(hosts_after - hosts_before)),
        removed_hosts=tuple(sorted(hosts_before - hosts_after)),
    )


def _differences(
    before: Sequence[Sequence[HistoryEntry]], after: Sequence[Sequence[HistoryEntry]]
) -> Iterable[DifferingKey]:
    """Yields the keys whose values after a change are all different from those before it."""
    facts_before = [_facts(run) for run in itertools.chain.from_iterable(before)]
    facts_after = [_facts(run) for run in itertools.chain.from_iterable(after)]
    for key in sorted(set().union(*facts_before, *facts_after) - _COMMIT_KEYS):
        # dict: different values in order of time.
        values_before = list(dict.fromkeys(facts.get(key, NOT_SET) for facts in facts_before))
        values_after = list(dict.fromkeys(facts.get(key, NOT_SET) for facts in facts_after))
        is_steady = 2 * len(values_before) <= len(before) and 2 * len(values_after) <= len(after)
        if is_steady and not set(values_before) & set(values_after):
            yield DifferingKey(key=key, before=_listed(values_before), after=_listed(values_after))


def _facts(run: HistoryEntry) -> dict[str, str]:
    return {**run.environment, **{f"tag.{name}": value for name, value in run.tags.items()}}


def _listed(values: Sequence[str]) -> str:
    text = ", ".join(clean(value, MAX_VALUE_LENGTH) for value in values[-MAX_VALUES:])
    if len(values) > MAX_VALUES:
        text += f" and {len(values) - MAX_VALUES} before"
    return text

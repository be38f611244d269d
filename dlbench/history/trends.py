"""Entries of a history become series over nights, with what changed where the level changed.

A trend is one metric of one point: runs of one group (`dlbench.analysis.comparability`), rank count and node count.
All runs of a session (`dlbench.analysis.sessions`) are one night, whose value is their median.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from operator import attrgetter
from typing import cast

from dlbench.analysis.metrics import METRICS, Metric
from dlbench.analysis.sessions import circumstances, sessions_of
from dlbench.history.acknowledgements import Acknowledgement
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
from dlbench.history.series import Change, ChangeWord, DifferingKey, LevelStretch, NewestNights, Night, Trend
from dlbench.report.wording import clean, place_text
from dlbench.stats.verdict_words import TREND

UTC_FORMAT = "%Y-%m-%dT%H:%M:%SZ"  # Of all times that leave this module.
_PLAIN = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)  # A time in that form.
MAX_APART = 2  # Settings of the system by which series of equal labels differ; more are no name.
NOT_SET = "not set"  # Value of a key that a run does not have.

# Keys that name every night anew, and stand for themselves.
_NAMED_APART = {"commit", "dlbench.commit", "tag.commit", "tag.dlbench.commit"}

MAX_VALUES = 4  # Values of a key that are named on one side of a change; the newest of more.
MAX_VALUE_LENGTH = 200

_Course = tuple[Metric, Sequence[Sequence[HistoryEntry]], Sequence[float]]
"""One metric of one point: nights with the figure, and the value of each."""


def dated(entries: Iterable[HistoryEntry]) -> list[HistoryEntry]:
    """Valid runs, oldest first, each once, `finished` in one form (UTC, seconds, Z) so that texts sort as times do.

    Runs whose end cannot be read as a time are left out: they have no place in a history.
    """
    known: dict[str, HistoryEntry] = {}
    for entry in entries:
        moment = moment_of(entry.finished) if entry.state == "valid" else None
        if moment is not None:
            is_plain = _PLAIN.fullmatch(entry.finished) is not None
            known[entry.run_id] = entry if is_plain else dataclasses.replace(entry, finished=utc_text(moment))
    return sorted(known.values(), key=attrgetter("finished", "run_id"))


def damaged_runs(entries: Iterable[HistoryEntry]) -> tuple[str, ...]:
    """Runs that cannot be read, each with the reason."""
    return tuple(f"{entry.run_id}: {entry.why}" for entry in entries if entry.state == "damaged")


def utc_text(moment: datetime) -> str:
    """``2026-03-04T02:06:00Z``."""
    return moment.astimezone(UTC).strftime(UTC_FORMAT)


def moment_of(text: str) -> datetime | None:
    """A time with its zone, UTC where none is said; None where it is none."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    # Nothing was measured outside these years, and both ends of the calendar leave it on the way to UTC.
    if not 1970 < found.year < 9000:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def trends(
    entries: Iterable[HistoryEntry], metrics: Sequence[Metric] = METRICS, acknowledged: Sequence[Acknowledgement] = ()
) -> list[Trend]:
    """Every metric of every point that any run has a figure of, by label, rank count, node count and metric.

    Runs without figures are passed over, a run that is there twice counts once, `acknowledged` changes may be of any
    series; trends of too few nights for a change point are among them.
    """
    points: dict[tuple[str, int, int], list[HistoryEntry]] = {}
    for entry in dated(entries):
        if entry.group:
            points.setdefault(entry.key, []).append(entry)
    ordered = sorted(points.values(), key=lambda runs: (min(one.label for one in runs), runs[0].key))
    courses: list[_Course] = []
    for runs in ordered:
        nights = by_night(runs)
        for metric in metrics:
            # A figure of zero (an energy that no counter saw) has no ratio to others.
            counted = [[run for run in night if run.figures.get(metric.name, 0.0) > 0] for night in nights]
            if known := [night for night in counted if night]:
                values = [statistics.median(run.figures[metric.name] for run in one) for one in known]
                courses.append((metric, known, values))
    changes = change_points_together([values for _, _, values in courses])
    followed = sum(len(values) >= MIN_NIGHTS for _, _, values in courses)
    return _told_apart(
        [_trend(one, found, followed, acknowledged) for one, found in zip(courses, changes, strict=True)], points
    )


def _told_apart(found: list[Trend], points: Mapping[tuple[str, int, int], Sequence[HistoryEntry]]) -> list[Trend]:
    """Behind equal labels of one system stands what was asked of the system otherwise; else the configuration's id."""
    counts = Counter((one.label, one.system) for one in found)
    made = []
    for one in found:
        if counts[one.label, one.system] > 1:
            twins = [other for other in found if (other.label, other.system) == (one.label, one.system)]
            newest_of = [points[other.group, other.ranks, other.nodes][-1].environment for other in twins]
            asked = [{key: run[key] for key in run if key.startswith("system.")} for run in newest_of]
            own = asked[twins.index(one)]
            differing = [f"{key}={own[key]}" for key in own if any(other.get(key) != own[key] for other in asked)]
            is_enough = asked.count(own) == 1 and 0 < len(differing) <= MAX_APART
            apart = ", ".join(differing) if is_enough else f"configuration {one.group}"
            one = dataclasses.replace(one, label=f"{one.label}, {apart}", configuration=f"{one.configuration}, {apart}")
        made.append(one)
    return made


def by_night(runs: Iterable[HistoryEntry]) -> list[list[HistoryEntry]]:
    """Returns the runs of each session; nights in order of their last run. `runs` are as `dated` gives them."""
    ordered = list(runs)
    sessions = sessions_of(
        {run.run_id: circumstances(run.finished, run.slurm_job_id, run.environment) for run in ordered}
    )
    nights: dict[str, list[HistoryEntry]] = {}
    for run in ordered:
        nights.setdefault(sessions[run.run_id], []).append(run)
    return sorted(nights.values(), key=lambda night: (night[-1].finished, night[-1].run_id))


def _trend(
    course: _Course, found: Sequence[ChangePoint], followed: int, acknowledged: Sequence[Acknowledgement]
) -> Trend:
    metric, known, values = course
    pieces = segments(values, found)
    beyond = newest(values, pieces[-1], histories=max(1, followed)) if len(values) >= MIN_NIGHTS else None
    made = [
        _night(known[place], metric, values[place], number)
        for number, piece in enumerate(pieces)
        for place in range(piece.start, piece.end)
    ]
    newest_run = known[-1][-1]
    group, ranks, nodes = newest_run.key
    own = [one for one in acknowledged if one.series == (group, ranks, nodes, metric.name)]
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
        num_runs=sum(map(len, known)),
        is_long_enough=len(made) >= MIN_NIGHTS,
        nights=tuple(made),
        levels=tuple(_level(piece, made, metric) for piece in pieces),
        changes=tuple(_change(point, metric, made, known, own) for point in found),
        newest=NewestNights(**vars(beyond), is_worse=(beyond.ratio > 1) == metric.higher_is_worse)
        if beyond is not None and beyond.num_beyond
        else None,
    )


def _night(runs: Sequence[HistoryEntry], metric: Metric, value: float, level: int) -> Night:
    return Night(
        time=runs[-1].finished,
        series=runs[0].series,
        value=value,
        values=tuple(run.figures[metric.name] for run in runs),
        run_ids=tuple(run.run_id for run in runs),
        commits=tuple(dict.fromkeys(run.commit for run in runs if run.commit)),
        hosts=tuple(sorted({host.host for run in runs for host in run.hosts})),
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


def _change(
    point: ChangePoint,
    metric: Metric,
    nights: Sequence[Night],
    runs: Sequence[Sequence[HistoryEntry]],
    acknowledged: Sequence[Acknowledgement],
) -> Change:
    is_dated = point.shape != "drift"
    before = runs[point.before.start : point.earliest] if is_dated else ()
    after = runs[point.latest : point.after.end] if is_dated else ()
    used_before, used_after = (
        {host.host for night in side for run in night for host in run.hosts} for side in (before, after)
    )
    last_before, first_after = nights[point.earliest - 1], nights[point.latest]
    outcome = "worse" if (point.ratio.value > 1) == metric.higher_is_worse else "better"
    kind = cast("ChangeWord", TREND[outcome].word)
    time, level = nights[point.index].time, point.after.level.value

    def covers(one: Acknowledgement) -> bool:
        """Whether it is of the same days, and the level after the change is still the acknowledged one."""
        worse = math.log(level / one.level) * (1 if metric.higher_is_worse else -1)
        return one.time <= first_after.time and time <= one.through and worse < math.log1p(MIN_EFFECT)

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
        commits_before=last_before.commits if is_dated else (),
        commits_after=first_after.commits if is_dated else (),
        runs_before=last_before.run_ids,
        runs_after=first_after.run_ids,
        differences=tuple(_differences(before, after)) if is_dated else (),
        new_hosts=tuple(sorted(used_after - used_before)),
        gone_hosts=tuple(sorted(used_before - used_after)),
    )


def _differences(
    before: Sequence[Sequence[HistoryEntry]], after: Sequence[Sequence[HistoryEntry]]
) -> Iterable[DifferingKey]:
    facts = [
        [
            {**run.environment, **{f"tag.{name}": value for name, value in run.tags.items()}}
            for night in side
            for run in night
        ]
        for side in (before, after)
    ]
    keys = {key for side in facts for one in side for key in one} - _NAMED_APART
    for key in sorted(keys):
        # dict: distinct values in order of time.
        seen = [tuple(dict.fromkeys(one.get(key, NOT_SET) for one in side)) for side in facts]
        is_steady = all(2 * len(values) <= len(nights) for values, nights in zip(seen, (before, after), strict=True))
        if is_steady and not set(seen[0]) & set(seen[1]):
            yield DifferingKey(key=key, before=_listed(seen[0]), after=_listed(seen[1]))


def _listed(values: Sequence[str]) -> str:
    more = f" and {len(values) - MAX_VALUES} before" if len(values) > MAX_VALUES else ""
    return ", ".join(clean(value, MAX_VALUE_LENGTH) for value in values[-MAX_VALUES:]) + more

"""A history of runs as series over nights, with what changed where the level changed.

A trend is one metric of one point: runs of one group (equal configuration, machine and device, see
`dlbench.reading.comparability`), rank count and node count. Nothing else is ever put into one series. All runs of one
request (one series name, planned at one moment) are one night, whose value is their median: the run is what is
measured, the night is the step in time.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from dlbench.history.entry import HistoryEntry
from dlbench.history.trends.change_points import ChangePoint, Newest, Segment, change_points, newest, segments
from dlbench.reading.run_metrics import METRICS, Metric

UTC_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
"""Of all times that leave this module."""

NOT_SET = "not set"
"""Value of a key that a run has not."""

# They name every night anew, and stand for themselves.
_NAMED_APART = {"commit", "dlbench.commit"}


@dataclass(frozen=True, kw_only=True)
class Night:
    """The runs of one request at one point."""

    series: str
    time: str
    """When the last of them finished, UTC, ISO 8601."""
    value: float
    """Median over the runs, in the metric's unit."""
    values: tuple[float, ...]
    """One for each run."""
    run_ids: tuple[str, ...]
    commits: tuple[str, ...]
    """Distinct, in order of the runs; empty where none is known."""
    hosts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A key with other values in all runs after a change than in any run before it."""

    key: str
    """Of the environment, or `tag.NAME`."""
    before: tuple[str, ...]
    """Values in order of time; `not set` where a run has none."""
    after: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change point, and what else changed there. Not one of these is thereby shown to be the cause."""

    point: ChangePoint
    is_regression: bool
    last_before: Night
    """Last night that lies before the change for certain (95 %)."""
    first_after: Night
    """First night that lies after it for certain (95 %)."""
    differences: tuple[Difference, ...]
    """Between all runs of the levels before and after, without the nights of which it is not certain on which side they
    lie; keys that are new nearly every night are left out."""
    new_hosts: tuple[str, ...]
    """Used after the change and never on the level before it."""
    gone_hosts: tuple[str, ...]
    """Used on the level before the change and never after it."""


@dataclass(frozen=True, kw_only=True)
class Trend:
    """One metric of one point over time."""

    group: str
    label: str
    ranks: int
    nodes: int
    metric: Metric
    nights: tuple[Night, ...]
    """Oldest first."""
    segments: tuple[Segment, ...]
    """Levels between changes; one where there are none."""
    changes: tuple[Change, ...]
    newest: Newest | None

    @property
    def num_runs(self) -> int:
        """Runs of all nights."""
        return sum(len(night.values) for night in self.nights)


def dated(entries: Iterable[HistoryEntry]) -> list[HistoryEntry]:
    """Valid runs, oldest first, each once, `finished` in one form (UTC, seconds, Z) so that texts sort as times do.

    Runs whose end cannot be read as a time are left out: they have no place in a history.
    """
    known: dict[str, HistoryEntry] = {}
    for entry in entries:
        moment = _moment(entry.finished) if entry.state == "valid" else None
        if moment is not None:
            known[entry.run_id] = dataclasses.replace(entry, finished=utc_text(moment))
    return sorted(known.values(), key=lambda run: (run.finished, run.run_id))


def utc_text(moment: datetime) -> str:
    """``2026-03-04T02:06:00Z``."""
    return moment.astimezone(timezone.utc).strftime(UTC_FORMAT)


def _moment(text: str) -> datetime | None:
    try:
        # Python 3.10 does not know Z.
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    # Nothing was measured outside these years, and both ends of the calendar leave it on the way to UTC.
    if not 1970 < found.year < 9000:
        return None
    return found if found.tzinfo else found.replace(tzinfo=timezone.utc)


def trends(entries: Iterable[HistoryEntry], metrics: Sequence[Metric] = METRICS) -> list[Trend]:
    """Every metric of every point that any run has a figure of; runs without figures are passed over.

    Args:
        entries: of a history, in any order; a run that is there twice counts once.
        metrics: the figures to follow.

    Returns:
        By label, rank count, node count and metric; trends of too few nights for a change point are among them.
    """
    points: dict[tuple[str, int, int], list[HistoryEntry]] = {}
    for entry in dated(entries):
        if entry.group:
            points.setdefault(entry.key, []).append(entry)
    ordered = sorted(points.items(), key=lambda item: (min(one.label for one in item[1]), item[0]))
    found = []
    for (group, ranks, nodes), runs in ordered:
        nights = by_night(runs)
        for metric in metrics:
            trend = _trend(group, ranks, nodes, metric, nights)
            if trend is not None:
                found.append(trend)
    return found


def by_night(runs: Iterable[HistoryEntry]) -> list[list[HistoryEntry]]:
    """Runs of one request together; nights in order of their last run. `runs` are as `dated` gives them."""
    nights: dict[tuple[str, str], list[HistoryEntry]] = {}
    for run in runs:
        nights.setdefault((run.series, run.created), []).append(run)
    return sorted(nights.values(), key=lambda night: (night[-1].finished, night[-1].run_id))


def _trend(
    group: str, ranks: int, nodes: int, metric: Metric, nights: Sequence[Sequence[HistoryEntry]]
) -> Trend | None:
    # A figure of zero (an energy that no counter saw) has no ratio to others.
    known = [[run for run in night if run.figures.get(metric.name, 0.0) > 0] for night in nights]
    known = [night for night in known if night]
    if not known:
        return None
    made = [_night(runs, metric) for runs in known]
    values = [night.value for night in made]
    found = change_points(values)
    pieces = segments(values, [point.index for point in found])
    return Trend(
        group=group,
        label=known[-1][-1].label,
        ranks=ranks,
        nodes=nodes,
        metric=metric,
        nights=tuple(made),
        segments=tuple(pieces),
        changes=tuple(_change(point, metric, made, known) for point in found),
        newest=newest(values, pieces[-1].start),
    )


def _night(runs: Sequence[HistoryEntry], metric: Metric) -> Night:
    values = tuple(run.figures[metric.name] for run in runs)
    return Night(
        series=runs[0].series,
        time=runs[-1].finished,
        value=statistics.median(values),
        values=values,
        run_ids=tuple(run.run_id for run in runs),
        commits=tuple(dict.fromkeys(run.commit for run in runs if run.commit)),
        hosts=tuple(sorted({host.host for run in runs for host in run.hosts})),
    )


def _change(
    point: ChangePoint, metric: Metric, nights: Sequence[Night], runs: Sequence[Sequence[HistoryEntry]]
) -> Change:
    before = runs[point.before.start : point.earliest]
    after = runs[point.latest : point.after.end]
    used_before, used_after = (
        {host.host for night in side for run in night for host in run.hosts} for side in (before, after)
    )
    return Change(
        point=point,
        is_regression=(point.ratio.value > 1) == metric.higher_is_worse,
        last_before=nights[point.earliest - 1],
        first_after=nights[point.latest],
        differences=tuple(_differences(before, after)),
        new_hosts=tuple(sorted(used_after - used_before)),
        gone_hosts=tuple(sorted(used_before - used_after)),
    )


def _differences(
    before: Sequence[Sequence[HistoryEntry]], after: Sequence[Sequence[HistoryEntry]]
) -> Iterable[Difference]:
    facts = [[_facts(run) for night in side for run in night] for side in (before, after)]
    keys = {key for side in facts for one in side for key in one} - _NAMED_APART
    for key in sorted(keys):
        # dict: distinct values in order of time.
        seen = [tuple(dict.fromkeys(one.get(key, NOT_SET) for one in side)) for side in facts]
        is_steady = all(2 * len(values) <= len(nights) for values, nights in zip(seen, (before, after), strict=True))
        if is_steady and not set(seen[0]) & set(seen[1]):
            yield Difference(key=key, before=seen[0], after=seen[1])


def _facts(run: HistoryEntry) -> Mapping[str, str]:
    tags = {f"tag.{name}": value for name, value in run.tags.items() if name not in _NAMED_APART}
    return {**run.environment, **tags}

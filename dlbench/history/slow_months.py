"""Slow nodes over months: each host and the other hosts of the same runs, by calendar month.

The figures of a run and their limits are those of `dlbench.analysis.slow_nodes` and
`dlbench.analysis.late_hosts`, so are the threshold,
the test and the verdicts, over all hosts together. The unit is the night: all runs of one session
(`dlbench.analysis.sessions`); of a night counts the median of its runs. Whether a host is slow now is
decided by its nights since its last change point, none older than `RECENT_DAYS`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Literal

from dlbench.analysis.slow_nodes import ACCUSED, SAFE_HOST, TO_EXCLUDE, HostSessions, Verdict, mean_ratio, verdicts_of
from dlbench.history.change_points import ChangePoint, change_points_together
from dlbench.history.entry import HistoryEntry, HostEntry
from dlbench.history.series import UTC_FORMAT, by_night, damaged_runs, dated, utc_text
from dlbench.stats.estimates import Estimate, mean_estimate

FORMAT = "dlbench.slow-nodes"
VERSION = 1

RECENT_DAYS = 92  # Runs that ended longer before the newest run of the history say nothing of now.

Now = Verdict | Literal["not used lately"]


@dataclass(frozen=True, kw_only=True)
class HostMonth:
    """One host in one calendar month (UTC)."""

    month: str
    ratio: Estimate  # Own work of its slowest rank over that of the other hosts' slowest (1); mean over nights.
    later: Estimate | None
    """By how much later than the other hosts' its exchanges end, as a share of the step; mean over nights. None where
    the clocks do not say."""
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class HostChange:
    """A change of a host's level over nights."""

    time: str
    ratio: Estimate
    evidence: float


@dataclass(frozen=True, kw_only=True)
class HostCourse:
    """One host over all runs that it shared with other hosts."""

    host: str
    verdict: Now
    current: Estimate | None  # As in `HostMonth`, over the nights that say how it is now; None where not used lately.
    later: Estimate | None
    since: str  # End of the first of the nights that `current` is made of, UTC; empty without one.
    num_nights: int
    num_runs: int
    months: tuple[HostMonth, ...]  # Oldest first; months without runs are left out.
    changes: tuple[HostChange, ...]

    @property
    def is_safe(self) -> bool:
        """Whether its name may stand in an option of Slurm."""
        return SAFE_HOST.fullmatch(self.host) is not None


@dataclass(frozen=True, kw_only=True)
class SlowMonths:
    """What a history says of its hosts."""

    format: str = FORMAT
    version: int = VERSION
    as_of: str  # End of the newest run, from which `RECENT_DAYS` count back; empty without runs.
    hosts: tuple[HostCourse, ...]  # Those that are slow first, then by their current ratio, largest first.
    months: tuple[str, ...]  # All months with runs on two hosts or more, oldest first.
    num_runs: int  # Runs on two hosts or more that were counted.
    num_without: int  # Valid runs that compare no hosts: on one host, or with an injected fault.
    exclude: tuple[str, ...]  # Hosts that are slow now, for Slurm's `--exclude`, by name.
    unsafe: tuple[str, ...]  # Slow hosts whose names cannot stand in an option.
    damaged: tuple[str, ...]

    @property
    def slow(self) -> tuple[HostCourse, ...]:
        """Hosts that are slow now, or at a slow link."""
        return tuple(host for host in self.hosts if host.verdict in ACCUSED)


@dataclass(frozen=True)
class _Night:
    """One host in one night: medians over the runs that it shared with other hosts."""

    end: str
    num_runs: int
    work: float
    later: float | None
    at_least: float | None


def slow_months(entries: Iterable[HistoryEntry]) -> SlowMonths:
    """All hosts of all valid runs on two hosts or more, whatever they ran; a run that is there twice counts once."""
    known = list(entries)
    runs = dated(known)
    counted = [run for run in runs if any(host.work_ratio for host in run.hosts)]
    shared: dict[str, list[_Night]] = {}
    for runs_of_night in by_night(counted):
        for host, night in _hosts(runs_of_night).items():
            shared.setdefault(host, []).append(night)
    changes = change_points_together([[night.work for night in nights] for nights in shared.values()])
    courses = [
        _course(host, nights, points, counted[-1].finished)
        for (host, nights), points in zip(shared.items(), changes, strict=True)
    ]

    def order(course: HostCourse) -> tuple[bool, float, str]:
        return course.verdict not in ACCUSED, -course.current.value if course.current else 0.0, course.host

    hosts = sorted(_judged(courses, shared), key=order)
    slow = sorted((one for one in hosts if one.verdict in TO_EXCLUDE), key=lambda one: one.host)
    return SlowMonths(
        as_of=counted[-1].finished if counted else "",
        hosts=tuple(hosts),
        months=tuple(sorted({run.finished[:7] for run in counted})),
        num_runs=len(counted),
        num_without=len(runs) - len(counted),
        exclude=tuple(one.host for one in slow if one.is_safe),
        unsafe=tuple(one.host for one in slow if not one.is_safe),
        damaged=damaged_runs(known),
    )


def _hosts(night: Sequence[HistoryEntry]) -> dict[str, _Night]:
    found: dict[str, list[tuple[str, HostEntry]]] = {}
    for run in night:
        for host in run.hosts:
            if host.work_ratio:
                found.setdefault(host.host, []).append((run.finished, host))
    return {
        host: _Night(
            end=seen[-1][0],
            num_runs=len(seen),
            work=statistics.median(one.work_ratio for _, one in seen if one.work_ratio),
            later=_median([one.later for _, one in seen]),
            at_least=_median([one.later_at_least for _, one in seen]),
        )
        for host, seen in found.items()
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _course(host: str, nights: Sequence[_Night], points: Sequence[ChangePoint], as_of: str) -> HostCourse:
    oldest = utc_text(datetime.strptime(as_of, UTC_FORMAT).replace(tzinfo=UTC) - timedelta(days=RECENT_DAYS))
    recent = [night for night in nights[points[-1].index if points else 0 :] if night.end >= oldest]
    months: dict[str, list[_Night]] = {}
    for night in nights:
        months.setdefault(night.end[:7], []).append(night)
    return HostCourse(
        host=host,
        verdict="not used lately",
        current=mean_ratio([night.work for night in recent]) if recent else None,
        later=_later(recent),
        since=recent[0].end if recent else "",
        num_nights=len(nights),
        num_runs=sum(night.num_runs for night in nights),
        months=tuple(
            HostMonth(
                month=month,
                ratio=mean_ratio([night.work for night in own]),
                later=_later(own),
                verdict="not shown to be slow",
            )
            for month, own in sorted(months.items())
        ),
        changes=tuple(
            HostChange(time=nights[point.index].end, ratio=point.ratio, evidence=point.evidence) for point in points
        ),
    )


def _later(nights: Sequence[_Night]) -> Estimate | None:
    known = [night.later for night in nights if night.later is not None]
    return mean_estimate(known, "fraction") if known else None


def _judged(courses: Sequence[HostCourse], shared: Mapping[str, Sequence[_Night]]) -> list[HostCourse]:
    """The courses with their verdicts: of now, and of each month, over all hosts together."""
    now = verdicts_of(
        {
            course.host: _sessions([night for night in shared[course.host] if night.end >= course.since])
            for course in courses
            if course.current is not None
        }
    )
    of_month: dict[str, dict[str, HostSessions]] = {}
    for course in courses:
        for month in course.months:
            own = [night for night in shared[course.host] if night.end.startswith(month.month)]
            of_month.setdefault(month.month, {})[course.host] = _sessions(own)
    by_month = {month: verdicts_of(hosts) for month, hosts in of_month.items()}
    return [
        replace(
            course,
            verdict=now.get(course.host, course.verdict),
            months=tuple(replace(one, verdict=by_month[one.month][course.host]) for one in course.months),
        )
        for course in courses
    ]


def _sessions(nights: Sequence[_Night]) -> HostSessions:
    return HostSessions(
        work=[night.work for night in nights],
        at_least=[night.at_least for night in nights if night.at_least is not None],
    )

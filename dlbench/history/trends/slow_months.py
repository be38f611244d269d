"""Slow nodes over months: each host's own work relative to the other hosts of the same runs, by calendar month.

The ratio of a run and its limits are those of `dlbench.reading.slow_nodes`, so are the threshold and the verdicts: the
run is the unit, the median over the runs of a month has an interval, a host is slow where all of it lies above 1.03.
Whether it is slow now is decided by its runs since its last change point, none older than `RECENT_DAYS`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from dlbench.history.entry import HistoryEntry
from dlbench.history.trends.change_points import change_points
from dlbench.history.trends.series import UTC_FORMAT, by_night, damaged_runs, dated, utc_text
from dlbench.reading.slow_nodes import SAFE_HOST, Verdict, verdict_of
from dlbench.stats.estimates import Estimate, median_estimate

FORMAT = "dlbench.slow-nodes"
VERSION = 1

RECENT_DAYS = 92
"""Runs that ended longer before the newest run of the history say nothing of now."""

Now = Verdict | Literal["not used lately"]


@dataclass(frozen=True, kw_only=True)
class HostMonth:
    """One host in one calendar month (UTC)."""

    month: str
    """`2026-04`."""
    ratio: Estimate
    """Own work of its slowest rank relative to that of the other hosts' slowest ranks (1); median over runs."""
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class HostChange:
    """A change of a host's level over nights."""

    time: str
    """End of the first night after, UTC, ISO 8601."""
    ratio: Estimate
    """After over before."""
    p: float


@dataclass(frozen=True, kw_only=True)
class HostCourse:
    """One host over all runs that it shared with other hosts."""

    host: str
    verdict: Now
    """As it is now."""
    current: Estimate | None
    """Median over the runs that say how it is now; None where it was not used lately."""
    since: str
    """End of the first of the runs that `current` is made of, UTC; empty without one."""
    num_runs: int
    months: tuple[HostMonth, ...]
    """Oldest first; months without runs are left out."""
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
    as_of: str
    """End of the newest run, from which `RECENT_DAYS` count back; empty without runs."""
    hosts: tuple[HostCourse, ...]
    """Slow ones first, then by their current ratio, largest first."""
    months: tuple[str, ...]
    """All months with runs on two hosts or more, oldest first."""
    num_runs: int
    """Runs on two hosts or more that were counted."""
    num_without: int
    """Valid runs that compare no hosts: on one host, or with a fault planted."""
    exclude: tuple[str, ...]
    """Hosts that are slow now, for Slurm's `--exclude`, by name."""
    unsafe: tuple[str, ...]
    """Slow hosts whose names cannot stand in an option."""
    damaged: tuple[str, ...]
    """Runs that cannot be read, each with the reason."""

    @property
    def slow(self) -> tuple[HostCourse, ...]:
        """Hosts that are slow now."""
        return tuple(host for host in self.hosts if host.verdict == "slow")


def slow_months(entries: Iterable[HistoryEntry]) -> SlowMonths:
    """All hosts of all valid runs on two hosts or more, whatever they ran; a run that is there twice counts once."""
    known = list(entries)
    runs = dated(known)
    shared: dict[str, list[HistoryEntry]] = {}
    counted = []
    for run in runs:
        compared = [host.host for host in run.hosts if host.work_ratio]
        for host in compared:
            shared.setdefault(host, []).append(run)
        if compared:
            counted.append(run)
    as_of = counted[-1].finished if counted else ""
    hosts = sorted((_course(host, found, as_of) for host, found in shared.items()), key=_rank)
    slow = sorted((one for one in hosts if one.verdict == "slow"), key=lambda one: one.host)
    return SlowMonths(
        as_of=as_of,
        hosts=tuple(hosts),
        months=tuple(sorted({run.finished[:7] for run in counted})),
        num_runs=len(counted),
        num_without=len(runs) - len(counted),
        exclude=tuple(one.host for one in slow if one.is_safe),
        unsafe=tuple(one.host for one in slow if not one.is_safe),
        damaged=damaged_runs(known),
    )


def _rank(course: HostCourse) -> tuple[bool, float, str]:
    return course.verdict != "slow", -course.current.value if course.current else 0.0, course.host


def _course(host: str, runs: Sequence[HistoryEntry], as_of: str) -> HostCourse:
    nights = by_night(runs)
    points = change_points([statistics.median(_ratio(run, host) for run in night) for night in nights])
    start = points[-1].index if points else 0
    newest = datetime.strptime(as_of, UTC_FORMAT).replace(tzinfo=UTC)
    oldest = utc_text(newest - timedelta(days=RECENT_DAYS))
    recent = [run for night in nights[start:] for run in night if run.finished >= oldest]
    current = median_estimate([_ratio(run, host) for run in recent], "ratio") if recent else None
    by_month: dict[str, list[float]] = {}
    for run in runs:
        by_month.setdefault(run.finished[:7], []).append(_ratio(run, host))
    return HostCourse(
        host=host,
        verdict="not used lately" if current is None else verdict_of(current),
        current=current,
        since=min(run.finished for run in recent) if recent else "",
        num_runs=len(runs),
        months=tuple(_month(month, values) for month, values in sorted(by_month.items())),
        changes=tuple(
            HostChange(time=nights[point.index][-1].finished, ratio=point.ratio, p=point.p) for point in points
        ),
    )


def _ratio(run: HistoryEntry, host: str) -> float:
    return next(one.work_ratio for one in run.hosts if one.host == host and one.work_ratio)


def _month(month: str, values: Sequence[float]) -> HostMonth:
    ratio = median_estimate(values, "ratio")
    return HostMonth(month=month, ratio=ratio, verdict=verdict_of(ratio))

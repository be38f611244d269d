"""Slow nodes over months: each host and the other hosts of the same runs, by calendar month.

Figures, threshold, test and verdicts are those of `dlbench.analysis.slow_nodes` and `dlbench.analysis.late_hosts`, over
all hosts together. The unit is the night: all runs of one session, of which the median counts. Whether a host is slow
now is decided by its nights since its last change point, none older than `RECENT_DAYS`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Literal

from dlbench.analysis.slow_nodes import ACCUSED, SAFE_HOST, TO_EXCLUDE, HostSessions, HostWord, mean_ratio, verdicts_of
from dlbench.history.change_points import change_points_together
from dlbench.history.entry import HistoryEntry, HostEntry
from dlbench.history.trends import UTC_FORMAT, by_night, damaged_runs, dated, utc_text
from dlbench.history.words import change_cell, day, day_if_any, evidence_text, ratio_cell
from dlbench.report.table import column, unit_cell
from dlbench.report.wording import basis_text, clean, slow_link_text
from dlbench.specs.hostlist import compressed
from dlbench.stats.estimates import Estimate, mean_estimate

RECENT_DAYS = 92  # Runs that ended longer before the newest run of the history say nothing of now.

HOST_LENGTH = 253  # Characters of a name that DNS takes.

Now = HostWord | Literal["not used lately"]


@dataclass(frozen=True, kw_only=True)
class HostMonth:
    """One host in one calendar month (UTC)."""

    month: str = field(metadata=column())
    ratio: Estimate = field(metadata=column())
    """Own work of its slowest rank over that of the other hosts' slowest (1); mean over nights."""
    later: Estimate | None = field(metadata=column())
    """By how much later than the other hosts' its exchanges end, as a share of the step; mean over nights. None where
    the clocks do not say."""
    verdict: HostWord = field(metadata=column())


@dataclass(frozen=True, kw_only=True)
class HostChange:
    """A change of a host's level over nights."""

    time: str
    ratio: Estimate
    evidence: float

    def __str__(self) -> str:
        return f"changed on {day(self.time)} by {change_cell(self.ratio)}, {evidence_text(self.evidence)}"


@dataclass(frozen=True, kw_only=True)
class HostCourse:
    """One host over all runs that it shared with other hosts."""

    host: str = field(metadata=column("Host", is_brief=True, limit=HOST_LENGTH))
    verdict: Now = field(metadata=column("Now", "now", is_brief=True))
    current: Estimate | None = field(metadata=column("Ratio", text=ratio_cell, is_brief=True))
    """As in `HostMonth`, over the nights that say how it is now; None where it was not used lately."""
    later: Estimate | None = field(metadata=column("Leaves later", "current_later", text=unit_cell))
    since: str = field(metadata=column("Since", text=day_if_any, is_brief=True))
    """End of the first of the nights that `current` is made of, UTC; empty without one."""
    num_nights: int = field(metadata=column("Nights", "", is_brief=True))
    num_runs: int
    months: tuple[HostMonth, ...]  # Oldest first; months without runs are left out.
    changes: tuple[HostChange, ...]

    @property
    def basis(self) -> str | None:
        """Says what the interval of `current` is; None without one."""
        return None if self.current is None else basis_text(self.current, "night")

    @property
    def sentence(self) -> str:
        """Says what the host is accused of, and since when."""
        reasons = []
        if self.current is not None and self.verdict in ("slow", "slow and slow link"):
            more = (self.current.value - 1) * 100
            evidence = f"{ratio_cell(self.current)}, {self.basis}"
            reasons.append(f"{more:.1f} % more own work than the other hosts of its runs ({evidence})")
        if self.later is not None and self.verdict in ("slow link", "slow and slow link"):
            reasons.append(f"slow link or NIC: {slow_link_text(self.later)}")
        return f"{clean(self.host, HOST_LENGTH)}: {' and '.join(reasons)} since {day(self.since)}"

    def ratio_of(self, month: str) -> Estimate | None:
        """Returns its ratio in a month; None where it had no run."""
        return next((one.ratio for one in self.months if one.month == month), None)


@dataclass(frozen=True, kw_only=True)
class SlowMonths:
    """What a history says of its hosts."""

    format: str = "dlbench.slow-nodes"
    version: int = 1
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

    @property
    def exclude_option(self) -> str:
        """Slurm's option that keeps jobs off the nodes that are slow now; empty if none is."""
        return f"--exclude={compressed(self.exclude)}" if self.exclude else ""

    @property
    def unsafe_lines(self) -> tuple[str, ...]:
        """Says why slow hosts are not among those to exclude, a line each."""
        return tuple(f"{host}: slow, but its name cannot stand in an option of Slurm" for host in self.unsafe)


@dataclass(frozen=True)
class _Night:
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
    months = sorted({run.finished[:7] for run in counted})
    nights: dict[str, list[_Night]] = {}
    for runs_of_night in by_night(counted):
        for host, night in _hosts(runs_of_night).items():
            nights.setdefault(host, []).append(night)
    points = change_points_together([[night.work for night in own] for own in nights.values()])
    changes = dict(zip(nights, points, strict=True))
    oldest = ""  # The end of the first night that still says something of now.
    if counted:
        newest = datetime.strptime(counted[-1].finished, UTC_FORMAT).replace(tzinfo=UTC)
        oldest = utc_text(newest - timedelta(days=RECENT_DAYS))
    recent = {
        host: [night for night in own[changes[host][-1].index if changes[host] else 0 :] if night.end >= oldest]
        for host, own in nights.items()
    }
    by_month = {
        month: _verdicts({host: [one for one in own if one.end.startswith(month)] for host, own in nights.items()})
        for month in months
    }
    now = _verdicts(recent)
    hosts = [
        HostCourse(
            host=host,
            verdict=now.get(host, "not used lately"),
            current=mean_ratio([night.work for night in recent[host]]) if recent[host] else None,
            later=_later(recent[host]),
            since=recent[host][0].end if recent[host] else "",
            num_nights=len(own),
            num_runs=sum(night.num_runs for night in own),
            months=tuple(_month(host, month, own, by_month[month]) for month in months if host in by_month[month]),
            changes=tuple(
                HostChange(time=own[point.index].end, ratio=point.ratio, evidence=point.evidence)
                for point in changes[host]
            ),
        )
        for host, own in nights.items()
    ]

    def order(course: HostCourse) -> tuple[bool, float, str]:
        return course.verdict not in ACCUSED, -course.current.value if course.current else 0.0, course.host

    slow = sorted(one.host for one in hosts if one.verdict in TO_EXCLUDE)
    return SlowMonths(
        as_of=counted[-1].finished if counted else "",
        hosts=tuple(sorted(hosts, key=order)),
        months=tuple(months),
        num_runs=len(counted),
        num_without=len(runs) - len(counted),
        exclude=tuple(host for host in slow if SAFE_HOST.fullmatch(host)),
        unsafe=tuple(host for host in slow if not SAFE_HOST.fullmatch(host)),
        damaged=damaged_runs(known),
    )


def _hosts(night: Sequence[HistoryEntry]) -> dict[str, _Night]:
    shared: dict[str, list[tuple[str, HostEntry]]] = {}
    for run in night:
        for host in run.hosts:
            if host.work_ratio:
                shared.setdefault(host.host, []).append((run.finished, host))
    return {
        host: _Night(
            end=seen[-1][0],
            num_runs=len(seen),
            work=statistics.median(one.work_ratio for _, one in seen if one.work_ratio),
            later=_median([one.later for _, one in seen]),
            at_least=_median([one.later_at_least for _, one in seen]),
        )
        for host, seen in shared.items()
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _month(host: str, month: str, nights: Sequence[_Night], verdicts: Mapping[str, HostWord]) -> HostMonth:
    own = [night for night in nights if night.end.startswith(month)]
    ratio = mean_ratio([night.work for night in own])
    return HostMonth(month=month, ratio=ratio, later=_later(own), verdict=verdicts[host])


def _later(nights: Sequence[_Night]) -> Estimate | None:
    known = [night.later for night in nights if night.later is not None]
    return mean_estimate(known, "fraction") if known else None


def _verdicts(nights: Mapping[str, Sequence[_Night]]) -> dict[str, HostWord]:
    """Returns the verdicts of `dlbench.analysis.slow_nodes`, whose sessions are nights, on hosts that have any."""
    return verdicts_of(
        {
            host: HostSessions(
                work=[night.work for night in own],
                at_least=[night.at_least for night in own if night.at_least is not None],
            )
            for host, own in nights.items()
            if own
        }
    )

"""Slow nodes over months: hosts compared with the others of the same runs; the unit is the night, a median of runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Literal

from dlbench.analysis.slow_nodes import ACCUSED, SAFE_HOST, TO_EXCLUDE, HostSessions, HostWord, verdicts_of
from dlbench.history.change_points import change_points_together
from dlbench.history.entry import HistoryEntry, HostEntry
from dlbench.history.series import change_cell, day, day_if_any, evidence_text, ratio_cell
from dlbench.history.trends import UTC_FORMAT, by_night, utc_seconds_text
from dlbench.report.table import column, unit_cell
from dlbench.report.wording import basis_text, clean, slow_link_text
from dlbench.specs.launch import compressed
from dlbench.stats.estimates import Estimate, geometric_mean_estimate, mean_estimate

RECENT_DAYS = 92  # Runs that ended earlier before the newest run of the history do not count for the present state.

HOST_LENGTH = 253  # Maximum characters of a name in DNS.

Now = HostWord | Literal["not used lately"]


@dataclass(frozen=True, kw_only=True)
class HostMonth:
    """A host in one calendar month (UTC)."""

    month: str = field(metadata=column())
    ratio: Estimate = field(metadata=column())
    """Own work of its slowest rank over that of the other hosts' slowest (1); mean over nights."""
    later: Estimate | None = field(metadata=column())
    """Share of the step by which its exchanges end later; None: clocks unknown."""
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
    """A host over all runs that it shared with other hosts."""

    host: str = field(metadata=column("Host", is_brief=True, limit=HOST_LENGTH))
    verdict: Now = field(metadata=column("Now", "now", is_brief=True))
    current: Estimate | None = field(metadata=column("Ratio", text=ratio_cell, is_brief=True))
    """`HostMonth.ratio` over the nights that count for the present state; None if it was not used lately."""
    later: Estimate | None = field(metadata=column("Leaves later", "current_later", text=unit_cell))
    since: str = field(metadata=column("Since", text=day_if_any, is_brief=True))  # End of the first such night.
    num_nights: int = field(metadata=column("Nights", "", is_brief=True))
    num_runs: int
    months: tuple[HostMonth, ...]  # Oldest first; months without runs are left out.
    changes: tuple[HostChange, ...]

    @property
    def basis(self) -> str | None:
        return None if self.current is None else basis_text(self.current, "night")

    @property
    def sentence(self) -> str:
        """The reason why the host is slow, and since when."""
        reasons = []
        if self.current is not None and self.verdict in ("slow", "slow and slow link"):
            percent = (self.current.value - 1) * 100
            evidence = f"{ratio_cell(self.current)}, {self.basis}"
            reasons.append(f"{percent:.1f} % more own work than the other hosts of its runs ({evidence})")
        if self.later is not None and self.verdict in ("slow link", "slow and slow link"):
            reasons.append(f"slow link or NIC: {slow_link_text(self.later)}")
        return f"{clean(self.host, HOST_LENGTH)}: {' and '.join(reasons)} since {day(self.since)}"


@dataclass(frozen=True, kw_only=True)
class SlowMonths:
    """The hosts of a history and their state by month."""

    format: str = "dlbench.slow-nodes"
    version: int = 1
    as_of: str  # End of the newest run, from which `RECENT_DAYS` count back; empty without runs.
    hosts: tuple[HostCourse, ...]  # Slow hosts first, then by current ratio, largest first.
    months: tuple[str, ...]  # All months with runs on two hosts or more, oldest first.
    num_runs: int  # Runs on two hosts or more that were counted.
    num_without: int  # Valid runs that compare no hosts: on one host, or with an injected fault.
    exclude: tuple[str, ...]  # Slow hosts for Slurm's `--exclude`, by name.
    unsafe: tuple[str, ...]  # Slow hosts whose names are not valid in an option.
    damaged: tuple[str, ...]

    @property
    def slow(self) -> tuple[HostCourse, ...]:
        return tuple(host for host in self.hosts if host.verdict in ACCUSED)

    @property
    def exclude_option(self) -> str:
        """Slurm's option that excludes the slow nodes from jobs; empty if there are none."""
        return f"--exclude={compressed(self.exclude)}" if self.exclude else ""

    @property
    def unsafe_lines(self) -> tuple[str, ...]:
        """The slow hosts that the option cannot exclude, a line each."""
        return tuple(f"{host}: slow, but its name is not valid in an option of Slurm" for host in self.unsafe)


@dataclass(frozen=True)
class _HostNight:
    end: str  # End of its last run, UTC.
    num_runs: int
    work: float  # Own work over that of the other hosts.
    later: float | None  # Time by which its exchanges end later, as a share of the step; None: not known.
    at_least: float | None  # `later` minus the error bounds of the clocks.


def slow_months(runs: Sequence[HistoryEntry], damaged: Sequence[str] = ()) -> SlowMonths:
    """Returns the state of all hosts of runs on two hosts or more; `runs` are those of `dated`, `damaged` of
    `damaged_runs`.
    """
    counted = [run for run in runs if any(host.work_ratio for host in run.hosts)]
    months = sorted({run.finished[:7] for run in counted})
    nights_by_host: dict[str, list[_HostNight]] = {}
    for runs_of_night in by_night(counted):
        for host, night in _host_nights(runs_of_night).items():
            nights_by_host.setdefault(host, []).append(night)
    changes = dict(zip(nights_by_host, change_points_together(list(map(_works, nights_by_host.values()))), strict=True))
    as_of, oldest = "", ""
    if counted:
        as_of = counted[-1].finished
        newest = datetime.strptime(as_of, UTC_FORMAT).replace(tzinfo=UTC)
        oldest = utc_seconds_text(newest - timedelta(days=RECENT_DAYS))
    recent: dict[str, list[_HostNight]] = {}
    for host, nights in nights_by_host.items():
        if changes[host]:
            nights = nights[changes[host][-1].index :]
        recent[host] = [night for night in nights if night.end >= oldest]
    host_months = _host_months(nights_by_host, months)
    verdicts = _verdicts(recent)
    hosts = [
        HostCourse(
            host=host,
            verdict=verdicts.get(host, "not used lately"),
            current=_mean_work(recent[host]),
            later=_mean_later(recent[host]),
            since=next((night.end for night in recent[host]), ""),
            num_nights=len(nights),
            num_runs=sum(night.num_runs for night in nights),
            months=tuple(host_months[host]),
            changes=tuple(
                HostChange(time=nights[change.index].end, ratio=change.ratio, evidence=change.evidence)
                for change in changes[host]
            ),
        )
        for host, nights in nights_by_host.items()
    ]
    # Slow hosts first, then by ratio, then by name.
    hosts.sort(
        key=lambda course: (
            course.verdict not in ACCUSED,
            -course.current.value if course.current else 0.0,
            course.host,
        )
    )
    slow = sorted(course.host for course in hosts if course.verdict in TO_EXCLUDE)
    return SlowMonths(
        as_of=as_of,
        hosts=tuple(hosts),
        months=tuple(months),
        num_runs=len(counted),
        num_without=len(runs) - len(counted),
        exclude=tuple(host for host in slow if SAFE_HOST.fullmatch(host)),
        unsafe=tuple(host for host in slow if not SAFE_HOST.fullmatch(host)),
        damaged=tuple(damaged),
    )


def _host_nights(runs: Sequence[HistoryEntry]) -> dict[str, _HostNight]:
    ends: dict[str, str] = {}
    entries_by_host: dict[str, list[HostEntry]] = {}
    for run in runs:
        for host in run.hosts:
            if host.work_ratio:
                ends[host.host] = run.finished
                entries_by_host.setdefault(host.host, []).append(host)
    nights = {}
    for name, entries in entries_by_host.items():
        nights[name] = _HostNight(
            end=ends[name],
            num_runs=len(entries),
            work=statistics.median(entry.work_ratio for entry in entries if entry.work_ratio),
            later=_median([entry.later for entry in entries]),
            at_least=_median([entry.later_at_least for entry in entries]),
        )
    return nights


def _median(values: Sequence[float | None]) -> float | None:
    known_values = [value for value in values if value is not None]
    return statistics.median(known_values) if known_values else None


def _host_months(
    nights_by_host: Mapping[str, Sequence[_HostNight]], months: Sequence[str]
) -> dict[str, list[HostMonth]]:
    host_months: dict[str, list[HostMonth]] = {host: [] for host in nights_by_host}
    for month in months:
        month_nights: dict[str, list[_HostNight]] = {}
        for host, nights in nights_by_host.items():
            month_nights[host] = [night for night in nights if night.end[:7] == month]
        for host, verdict in _verdicts(month_nights).items():
            ratio = geometric_mean_estimate(_works(month_nights[host]), "ratio")
            later = _mean_later(month_nights[host])
            host_months[host].append(HostMonth(month=month, ratio=ratio, later=later, verdict=verdict))
    return host_months


def _mean_work(nights: Sequence[_HostNight]) -> Estimate | None:
    return geometric_mean_estimate(_works(nights), "ratio") if nights else None


def _works(nights: Sequence[_HostNight]) -> list[float]:
    return [night.work for night in nights]


def _mean_later(nights: Sequence[_HostNight]) -> Estimate | None:
    shares = [night.later for night in nights if night.later is not None]
    return mean_estimate(shares, "fraction") if shares else None


def _verdicts(nights_by_host: Mapping[str, Sequence[_HostNight]]) -> dict[str, HostWord]:
    """Returns the verdicts of `dlbench.analysis.slow_nodes` with nights as sessions, on hosts with any night."""
    sessions = {}
    for host, nights in nights_by_host.items():
        if nights:
            at_least = [night.at_least for night in nights if night.at_least is not None]
            sessions[host] = HostSessions(work=_works(nights), at_least=at_least)
    return verdicts_of(sessions)

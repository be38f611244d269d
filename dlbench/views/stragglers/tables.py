"""Tables of stragglers: ranks, and hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.reading.late_ranks import Straggler
from dlbench.report.table import Column, Sheet
from dlbench.report.wording import number_text, percent, place_text, runs_text
from dlbench.views.causes.numbers import CausePoint

MAX_SHOWN = 10
"""Late ranks, or hosts, in a table for people and in a chart."""
MAX_LISTED = 64
"""The same in a table for programs, at each rank count."""


@dataclass(frozen=True)
class _Row:
    """A late rank or host at one rank count."""

    point: CausePoint
    position: int
    """From 1, longest waited for first."""
    late: Straggler
    is_largest: bool
    """Whether the point is the one with most ranks."""


def rank_sheet(points: Sequence[CausePoint]) -> Sheet[_Row]:
    """Ranks that the others waited for; the largest rank count for people."""
    largest = points[-1]
    left = len(largest.waiting_ranks) - MAX_SHOWN
    more = f" {left} more ranks were late at times." if left > 0 else ""
    return Sheet(
        name="stragglers",
        title=f"Stragglers at {place_text(largest.ranks, largest.nodes)}",
        columns=_columns(has_rank=True),
        rows=_rows(points, hosts=False),
        is_shown=_is_shown,
        caption=f"{_caption(largest)}.{more}",
    )


def host_sheet(points: Sequence[CausePoint]) -> Sheet[_Row]:
    """The same by host."""
    largest = points[-1]
    return Sheet(
        name="straggler-hosts",
        title=f"The same by host, at {place_text(largest.ranks, largest.nodes)}",
        columns=_columns(has_rank=False),
        rows=_rows(points, hosts=True),
        is_shown=_is_shown,
        caption=f"{_caption(largest)}, mean over the ranks of a host.",
    )


def _caption(largest: CausePoint) -> str:
    return (
        f"Means over {runs_text(len(largest.run_ids))}. Last in: share of the steps in which it came last. Costs: its "
        "share of waiting for stragglers, per step. Late by: its own time beyond that of the ranks on time, per step"
    )


def _columns(*, has_rank: bool) -> tuple[Column[_Row], ...]:
    rank: Column[_Row] = Column("rank", "Rank", lambda row: row.late.rank)
    return (
        Column("ranks", "", lambda row: row.point.ranks),
        Column("nodes", "", lambda row: row.point.nodes),
        Column("is_baseline", "", lambda row: row.point.is_baseline),
        Column("position", "", lambda row: row.position),
        *((rank,) if has_rank else ()),
        Column("host", "Host", lambda row: row.late.host, limit=64),
        Column("last_share_fraction", "Last in", lambda row: row.late.last_share, _last_in),
        Column("waited_s_per_step", "", lambda row: row.late.waited_s, unit="s"),
        Column("costs_s_per_step", "Costs per step", lambda row: cost(row.point, row.late), unit="s"),
        Column("waited_share_fraction", "Of all waiting", lambda row: row.late.waited_share, _of_all),
        Column("late_input_s_per_step", "", lambda row: row.late.input_s),
        Column("late_compute_s_per_step", "", lambda row: row.late.compute_s),
        Column("late_host_s_per_step", "", lambda row: row.late.host_s),
        Column("late_by", "Late by", lambda row: row.late.late_by, _late_by),
        Column("runs", "", lambda row: len(row.point.run_ids)),
    )


def _rows(points: Sequence[CausePoint], *, hosts: bool) -> list[_Row]:
    return [
        _Row(point, position, late, point is points[-1])
        for point in points
        for position, late in enumerate((point.waiting_hosts if hosts else point.waiting_ranks)[:MAX_LISTED], start=1)
    ]


def _is_shown(row: _Row) -> bool:
    return row.is_largest and row.position <= MAX_SHOWN


def cost(point: CausePoint, late: Straggler) -> float:
    """Its share of what the account calls waiting for stragglers, seconds per step."""
    return late.waited_share * point.cause("straggler").seconds.value


def _last_in(row: _Row) -> str:
    return percent(row.late.last_share, 0)


def _of_all(row: _Row) -> str:
    return percent(row.late.waited_share, 0)


def _late_by(row: _Row) -> str:
    late = row.late
    times = {"input": late.input_s, "compute": late.compute_s, "host": late.host_s}
    return f"{late.late_by} {number_text(times[late.late_by], 's')}" if late.late_by in times else late.late_by

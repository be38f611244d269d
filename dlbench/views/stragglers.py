"""The view `stragglers`: who keeps the others waiting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dlbench.reading.late_ranks import Straggler
from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.style import INK, WIDE, si_label
from dlbench.report.document import Section
from dlbench.report.table import Column, Sheet
from dlbench.report.wording import basis_text, number_text, percent, place_text, runs_text
from dlbench.views.causes.numbers import CausePoint, LostPercent
from dlbench.views.causes.view import CAUSE_COLOURS, VARIANT, place, short
from dlbench.views.model import Group
from dlbench.views.next_step import second_rank
from dlbench.views.slow_nodes import ratio_text
from dlbench.views.view import GroupView

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


def _sheet(points: Sequence[CausePoint], *, by_host: bool = False) -> Sheet[_Row]:
    """Ranks, or hosts, that the others waited for; the largest rank count for people."""
    largest = points[-1]
    where, left = place_text(largest.ranks, largest.nodes), len(largest.waiting_ranks) - MAX_SHOWN
    more = ", mean over the ranks of a host." if by_host else "."
    if left > 0 and not by_host:
        more += f" {left} more ranks were late at times."
    rank: Column[_Row] = Column("rank", "Rank", lambda row: row.late.rank)
    columns: tuple[Column[_Row], ...] = (
        Column("ranks", "", lambda row: row.point.ranks),
        Column("nodes", "", lambda row: row.point.nodes),
        Column("is_baseline", "", lambda row: row.point.is_baseline),
        Column("position", "", lambda row: row.position),
        *(() if by_host else (rank,)),
        Column("host", "Host", lambda row: row.late.host, limit=64),
        Column(
            "last_share_fraction",
            "Last in",
            lambda row: row.late.last_share,
            lambda row: percent(row.late.last_share, 0),
        ),
        Column("waited_s_per_step", "", lambda row: row.late.waited_s, unit="s"),
        Column("costs_s_per_step", "Costs per step", lambda row: _cost(row.point, row.late), unit="s"),
        Column(
            "waited_share_fraction",
            "Of all waiting",
            lambda row: row.late.waited_share,
            lambda row: percent(row.late.waited_share, 0),
        ),
        Column("late_input_s_per_step", "", lambda row: row.late.input_s),
        Column("late_compute_s_per_step", "", lambda row: row.late.compute_s),
        Column("late_host_s_per_step", "", lambda row: row.late.host_s),
        Column("late_by", "Late by", lambda row: row.late.late_by, _late_by),
        Column("runs", "", lambda row: len(row.point.run_ids)),
    )
    return Sheet(
        name="straggler-hosts" if by_host else "stragglers",
        title=f"The same by host, at {where}" if by_host else f"Stragglers at {where}",
        columns=columns,
        rows=[
            _Row(point, position, late)
            for point in points
            for position, late in enumerate((point.waiting_hosts if by_host else point.waiting_ranks)[:MAX_LISTED], 1)
        ],
        is_shown=lambda row: row.point is largest and row.position <= MAX_SHOWN,
        caption=f"Means over {runs_text(len(largest.run_ids))}. Last in: share of the steps in which it came last. "
        "Costs: its share of waiting for stragglers, per step. Late by: its own time beyond that of the ranks on time, "
        f"per step{more}",
    )


def _cost(point: CausePoint, late: Straggler) -> float:
    """Its share of what the account calls waiting for stragglers, seconds per step."""
    return late.waited_share * point.cause("straggler").seconds.value


def _late_by(row: _Row) -> str:
    late = row.late
    times = {"input": late.input_s, "compute": late.compute_s, "host": late.host_s}
    return f"{late.late_by} {number_text(times[late.late_by], 's')}" if late.late_by in times else late.late_by


_LATE_COLOURS = {
    "input": CAUSE_COLOURS["input"],
    "compute": CAUSE_COLOURS["compute"],
    "host": CAUSE_COLOURS["host"],
    "unexplained": CAUSE_COLOURS["rest"],
}


def _charts(group: Group, point: CausePoint) -> list[Chart]:
    if not point.waiting_ranks:
        return []
    import altair as alt

    rows: Rows = [
        {
            "rank": _who(late),
            "seconds": short(_cost(point, late)),
            "by": late.late_by,
            "shown": number_text(_cost(point, late), "s"),
            "last": percent(late.last_share, 0),
            "share": percent(late.waited_share, 0),
        }
        for late in point.waiting_ranks[:MAX_SHOWN]
    ]
    present = [name for name in _LATE_COLOURS if any(row["by"] == name for row in rows)]
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        y=alt.Y("rank:N", title=None, sort=[row["rank"] for row in rows]).axis(labelLimit=200)
    )
    x = alt.X("seconds:Q", title="waiting for it per step").axis(labelExpr=si_label("s"), tickCount=5)
    colour = alt.Color("by:N", title="late by").scale(domain=present, range=[_LATE_COLOURS[name] for name in present])
    tooltip = [
        alt.Tooltip("rank:N", title="rank"),
        alt.Tooltip("shown:N", title="costs per step"),
        alt.Tooltip("share:N", title="of all waiting"),
        alt.Tooltip("last:N", title="last in"),
        alt.Tooltip("by:N", title="late by"),
    ]
    bars = base.mark_bar(height={"band": 0.7}).encode(
        x=x, color=colour.legend(orient="bottom", columns=4), tooltip=tooltip
    )
    text = base.mark_text(align="left", dx=4, color=INK, fontSize=11).encode(x=x, text="share:N")
    words = "; ".join(
        f"{row['rank']}: {row['shown']} per step, {row['share']} of all waiting, last in {row['last']} of the steps, "
        f"late by {row['by']}"
        for row in rows[:5]
    )
    return [
        finish(
            alt.layer(bars, text),
            group,
            name="stragglers",
            title=f"Stragglers at {place(point)} (label: share of all waiting)",
            alt=f"Waiting for single ranks, longest first. {words}.",
            table=_sheet([point]),
            size=(WIDE - 60, max(60, 24 * len(rows))),
        )
    ]


def _who(late: Straggler) -> str:
    return f"rank {late.rank} on {late.host}"


class StragglersView(GroupView):
    """Ranks and hosts for which the others wait."""

    id = "stragglers"
    title = "Stragglers"

    def section(self, group: Group) -> Section | None:
        found = group.of(LostPercent)
        if found is None or group.largest.ranks == 1:
            return None
        points = found.diagnosed.points
        has_late = any(point.waiting_ranks for point in points)
        has_hosts = has_late and any(point.num_hosts > 1 for point in points)
        return Section(
            id=self.id,
            title=self.title,
            headline=_headline(points[-1]),
            caption=f"{group.parts_caption}.",
            words=tuple(_words(found)),
            charts=lambda: _charts(group, points[-1]),
            sheets=(*((_sheet(points),) if has_late else ()), *((_sheet(points, by_host=True),) if has_hosts else ())),
        )

    def remedy(self, group: Group) -> str:
        if group.of(LostPercent) is None:
            return VARIANT
        return second_rank(group, "one rank waits for nobody")


def _words(found: LostPercent) -> Iterator[str]:
    """Who is waited for most at each rank count but the largest (the headline); slow hosts of all runs."""
    yield from (_waited_for(point) for point in reversed(found.diagnosed.points[:-1]) if point.ranks > 1)
    for one in (slow := [one for one in found.nodes.hosts if one.verdict == "slow"]):
        yield (
            f"Over all runs of this folder {one.host} is slow: {ratio_text(one.ratio)} times the work of the other "
            f"hosts ({basis_text(one.ratio)})."
        )
    if slow and found.nodes.option:
        yield f"To keep jobs off all slow hosts: sbatch {found.nodes.option}"


def _waited_for(point: CausePoint) -> str:
    where = place_text(point.ranks, point.nodes)
    if not point.waiting_ranks:
        return f"{where}: no rank waited for another one."
    first = point.waiting_ranks[0]
    return (
        f"{where}: {percent(first.waited_share, 0)} of all waiting is for {_who(first)}, last in "
        f"{percent(first.last_share, 0)} of the steps, late by {first.late_by}."
    )


def _headline(point: CausePoint) -> str:
    """The rank that is waited for most."""
    if not point.waiting_ranks:
        return "No rank waited for another one"
    first = point.waiting_ranks[0]
    return f"{percent(first.waited_share, 0)} of all waiting is for {_who(first)}"[:80] + f", late by {first.late_by}"

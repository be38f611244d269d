"""The views `stragglers` and `slow-nodes`: who keeps the others waiting at a rank count, and over all runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dlbench.analysis.late_ranks import Straggler
from dlbench.analysis.sessions import MIN_SESSIONS
from dlbench.analysis.slow_nodes import ACCUSED, FALSE_SHARE, HostHistory, SlowNodes, slow_nodes
from dlbench.report.document import Section
from dlbench.report.table import Cell, Column, Sheet, columns_of, unit_cell
from dlbench.report.wording import clean, estimate_parts, number_text, percent, runs_text, sessions_text, slow_link_text
from dlbench.stats.verdict_words import HOST
from dlbench.units import first_of
from dlbench.views.causes.numbers import CausePoint, LostPercent
from dlbench.views.causes.view import VARIANT
from dlbench.views.model import Report, ReportGroup
from dlbench.views.next_step import second_rank
from dlbench.views.view import MEANS, GroupView, ReportSource, ReportView, place_of

MAX_SHOWN = 10  # Late ranks, or hosts, in a table for people (of slow hosts all).
MAX_LISTED = 64  # Late ranks in a table for programs, at each rank count.


@dataclass(frozen=True)
class LateRankRow:
    """A late rank at one rank count."""

    point: CausePoint
    position: int  # From 1, longest waited for first.
    late: Straggler

    @property
    def cost_s(self) -> float:
        """Its share of what the account calls waiting for stragglers, seconds per step."""
        return self.late.waited_share * self.point.cause("straggler").seconds.value


def _sheet(points: Sequence[CausePoint]) -> Sheet[LateRankRow]:
    largest = points[-1]
    left = len(largest.waiting_ranks) - MAX_SHOWN
    more = f" {left} more ranks were late at times." if left > 0 else ""

    def late_by(row: LateRankRow) -> str:
        seconds = getattr(row.late, f"{row.late.late_by}_s", None)
        return row.late.late_by if seconds is None else f"{row.late.late_by} {number_text(seconds, 's')}"

    def share(name: str, title: str, field: str) -> Column[LateRankRow]:
        return Column(
            name, title, lambda row: getattr(row.late, field), lambda row: percent(getattr(row.late, field), 0)
        )

    columns: tuple[Column[LateRankRow], ...] = (
        *columns_of(LateRankRow, "ranks=point.ranks", "nodes=point.nodes", "is_baseline=point.is_baseline", "position"),
        Column("rank", "Rank", lambda row: row.late.rank),
        Column("host", "Host", lambda row: row.late.host, limit=64),
        share("last_share_fraction", "Last in", "last_share"),
        Column("waited_s_per_step", "", lambda row: row.late.waited_s),
        Column("costs_s_per_step", "Costs per step", lambda row: row.cost_s, unit="s"),
        share("waited_share_fraction", "Of all waiting", "waited_share"),
        *columns_of(LateRankRow, *(f"late_{name}_s_per_step=late.{name}_s" for name in ("input", "compute", "host"))),
        Column("late_by", "Late by", lambda row: row.late.late_by, late_by),
        Column("runs", "", lambda row: len(row.point.run_ids)),
    )
    return Sheet(
        name="stragglers",
        title=f"Stragglers at {place_of(largest)}",
        columns=columns,
        rows=[
            LateRankRow(point, position, late)
            for point in points
            for position, late in enumerate(point.waiting_ranks[:MAX_LISTED], 1)
        ],
        is_shown=lambda row: row.point is largest and row.position <= MAX_SHOWN,
        caption=f"Means over {runs_text(len(largest.run_ids))}. Last in: share of the steps in which it came last. "
        "Costs: its share of waiting for stragglers, per step. Late by: its own time beyond that of the ranks on time, "
        f"per step.{more}",
    )


class StragglersView(GroupView):
    """Ranks and hosts for which the others wait."""

    id = "stragglers"
    title = "Stragglers"
    after = "forecast"

    def section(self, group: ReportGroup) -> Section | None:
        found = group.of(LostPercent)
        if found is None or group.largest.ranks == 1:
            return None
        points = found.diagnosed.points
        headline = "No rank waited for another one"
        if points[-1].waiting_ranks:
            first = points[-1].waiting_ranks[0]
            late_rank = f"rank {first.rank} on {first.host}"
            headline = f"{percent(first.waited_share, 0)} of all waiting is for {late_rank}"[:80]
            headline += f", late by {first.late_by}"
        return Section(
            id=self.id,
            title=self.title,
            headline=headline,
            caption=MEANS,
            sheets=(_sheet(points),) if any(point.waiting_ranks for point in points) else (),
        )

    def remedy(self, group: ReportGroup) -> str:
        if group.of(LostPercent) is None:
            return VARIANT
        return second_rank(group, "one rank waits for nobody")


# Slow nodes, over all runs


def _host_sheet(found: SlowNodes) -> Sheet[HostHistory]:
    slowest = found.hosts[:MAX_SHOWN]
    left = sum(one.verdict not in ACCUSED for one in found.hosts[MAX_SHOWN:])

    def work(one: HostHistory) -> Cell:
        number, interval, _ = estimate_parts(one.ratio, 3)
        return Cell(number, interval, number=one.ratio.value)

    def later(one: HostHistory) -> Cell:
        return unit_cell(one.later)

    columns: tuple[Column[HostHistory], ...] = (
        Column("host", "Host", lambda one: one.host, limit=64),
        Column("own_work_ratio", "Own work", lambda one: one.ratio, work, has_interval=True),
        Column("leaves_later_fraction", "Leaves later", lambda one: one.later, later, has_interval=True),
        Column("sessions", "Sessions", lambda one: one.ratio.n),
        Column("runs", "Runs", lambda one: one.num_runs),
        *columns_of(HostHistory, "interval=ratio.kind"),
        Column("last_share_fraction", "Last in", lambda one: one.last_share, lambda one: percent(one.last_share, 0)),
        Column("fair_share_fraction", "Fair share", lambda one: one.fair_share, lambda one: percent(one.fair_share, 0)),
        Column("verdict", "Verdict", lambda one: one.verdict, _verdict_text),
    )
    return Sheet(
        name="slow-nodes",
        title="Hosts, over all runs of the folder",
        columns=columns,
        rows=found.hosts,
        is_shown=lambda one: one.verdict in ACCUSED or one in slowest,
        caption=(
            f"Own work: the slowest rank's step without exchange, over the other hosts'; slow: above "
            f"{found.threshold:g} by a t test over sessions (false discovery rate {FALSE_SHARE * 100:.0f} %)."
            + (f" The {left} fastest hosts are left out." if left else "")
        ),
    )


def _verdict_text(one: HostHistory) -> str:
    """With fewer than five sessions a host is suspected at most."""
    if one.verdict == "suspected":
        return f"suspected ({sessions_text(one.ratio.n)}: insufficient)"
    return next(answer.in_sentence for answer in HOST.values() if answer.word == one.verdict)


class SlowNodesView(ReportView):
    """Slow nodes, as an option for sbatch."""

    id = "slow-nodes"
    title = "Slow nodes"
    key = "slow_nodes"
    after = "campaign-cost"

    def numbers(self, source: ReportSource) -> SlowNodes:
        return slow_nodes(source.table)

    def shown(self, report: Report, found: SlowNodes) -> Section | None:
        if not found.hosts:
            return None
        accused = [f"{clean(one.host, 30)} ({one.verdict})" for one in found.hosts if one.verdict in ACCUSED]
        headline = f"{first_of(accused, 2)}, of {len(found.hosts)} hosts"
        if not accused:
            headline = f"none of {len(found.hosts)} hosts is shown to be slow ({sessions_text(found.num_sessions)})"
        return Section(headline=headline, words=tuple(_of_hosts(found)), sheets=(_host_sheet(found),))

    def remedy(self, report: Report) -> str:
        found = report.of(SlowNodes)
        faulty = f" {_faulty_text(found)}" if found and found.num_faulty else ""
        return f"unknown: no run had ranks on two hosts or more.{faulty}"


def _faulty_text(found: SlowNodes) -> str:
    return f"{runs_text(found.num_faulty)} with an injected fault left out."


def _of_hosts(found: SlowNodes) -> Iterator[str]:
    if found.option:
        yield found.option
    for one in found.hosts:
        if one.later is not None and one.verdict in ("slow link", "slow and slow link"):
            yield f"Slow link or NIC at host {clean(one.host, 253)}: {slow_link_text(one.later)}."
    yield from (f"Left out of the list, no name for an option: {host}" for host in found.unsafe)
    if found.num_faulty:
        yield _faulty_text(found)
    if found.num_sessions < MIN_SESSIONS:
        needed = f"{MIN_SESSIONS} are needed (other jobs or days)"
        yield f"Suspected at most: {sessions_text(found.num_sessions)}, and {needed}."

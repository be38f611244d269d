"""The views `stragglers` and `slow-nodes`: late ranks at a rank count, and slow hosts over all runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dlbench.analysis.late_ranks import Straggler
from dlbench.analysis.sessions import MIN_SESSIONS
from dlbench.analysis.slow_nodes import ACCUSED, FALSE_SHARE, HostHistory, SlowNodes, slow_nodes
from dlbench.analysis.stragglers import num_slowest
from dlbench.report.document import Section, with_rows
from dlbench.report.table import Cell, Column, Sheet, columns_of, unit_cell
from dlbench.report.wording import (
    clean,
    estimate_parts,
    figure_text,
    number_text,
    percent,
    runs_text,
    sessions_text,
    slow_link_text,
)
from dlbench.stats.verdict_words import HOST
from dlbench.units import first_of
from dlbench.views.causes.numbers import CausePoint, LostPercent
from dlbench.views.causes.view import VARIANT
from dlbench.views.model import MEANS, GroupView, Report, ReportGroup, ReportSource, ReportView, place_of
from dlbench.views.next_step import second_rank

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
        """Its share of the account's waiting for stragglers, seconds per step."""
        return self.late.waited_share * self.point.cause("straggler").seconds.value

    @property
    def late_by(self) -> str:
        seconds = getattr(self.late, f"{self.late.late_by}_s", None)
        if seconds is None:
            return self.late.late_by
        return f"{self.late.late_by} {number_text(seconds, 's')}"


def _sheet(points: Sequence[CausePoint]) -> Sheet[LateRankRow]:
    largest = points[-1]
    caption = (
        f"{place_of(largest)}, means over {runs_text(len(largest.run_ids))}. Last in: share of the steps in which it "
        "came last. Costs: its share of waiting for stragglers, per step. Late by: its own time beyond that of the "
        "ranks on time, per step."
    )
    num_further = len(largest.waiting_ranks) - MAX_SHOWN
    if num_further > 0:
        caption += f" {num_further} more ranks were late in some steps."
    saved = largest.saved_without_slowest
    if saved is not None and saved.value > 0:
        step = number_text(largest.whole.seconds.value * (1 - saved.value), "s")
        left_out = f"{num_slowest(largest.ranks)} of {largest.ranks}"
        caption += (
            f" Without the slowest 5 % of ranks ({left_out}) of each step it would take {step}, {figure_text(saved)} "
            "less: computed from recorded steps, with the exchange as recorded and gradients of these ranks dropped."
        )
    rows: list[LateRankRow] = []
    for point in points:
        late_ranks = enumerate(point.waiting_ranks[:MAX_LISTED], 1)
        rows += [LateRankRow(point, position, late) for position, late in late_ranks]

    def waited_share(row: LateRankRow) -> str:
        return percent(row.late.waited_share, 0)

    columns: tuple[Column[LateRankRow], ...] = (
        *columns_of(LateRankRow, "ranks=point.ranks", "nodes=point.nodes", "is_baseline=point.is_baseline", "position"),
        Column("rank", "Rank", "late.rank"),
        Column("host", "Host", "late.host", limit=64),
        Column("last_share_fraction", "Last in", "late.last_share", lambda row: percent(row.late.last_share, 0)),
        Column("waited_s_per_step", "", "late.waited_s"),
        Column("costs_s_per_step", "Costs per step", "cost_s", unit="s"),
        Column("waited_share_fraction", "Of all waiting", "late.waited_share", waited_share),
        *columns_of(LateRankRow, *(f"late_{name}_s_per_step=late.{name}_s" for name in ("input", "compute", "host"))),
        Column("late_by", "Late by", "late.late_by", "late_by"),
        Column("runs", "", lambda row: len(row.point.run_ids)),
    )
    return Sheet(
        name="stragglers",
        title=f"Stragglers at {place_of(largest)}",
        columns=columns,
        rows=rows,
        is_shown=lambda row: row.point is largest and row.position <= MAX_SHOWN,
        caption=caption,
    )


class StragglersView(GroupView):
    """Ranks and hosts for which the others wait."""

    id = "stragglers"
    title = "Stragglers"
    after = "forecast"

    def section(self, group: ReportGroup) -> Section | None:
        lost = group.of(LostPercent)
        if lost is None or group.largest.ranks == 1:
            return None
        points = lost.diagnosed.points
        headline = "No rank waited for another one"
        if points[-1].waiting_ranks:
            first = points[-1].waiting_ranks[0]
            headline = f"{percent(first.waited_share, 0)} of all waiting is for rank {first.rank} on {first.host}"[:80]
            headline += f", late by {first.late_by}"
        return Section(id=self.id, title=self.title, headline=headline, caption=MEANS, sheets=with_rows(_sheet(points)))

    def remedy(self, group: ReportGroup) -> str:
        if group.of(LostPercent) is None:
            return VARIANT
        return second_rank(group, "one rank waits for nobody")


def _host_sheet(slow: SlowNodes) -> Sheet[HostHistory]:
    slowest = slow.hosts[:MAX_SHOWN]
    num_hidden = sum(host.verdict not in ACCUSED for host in slow.hosts[MAX_SHOWN:])
    caption = (
        f"Own work: the slowest rank's step without exchange, over the other hosts'; slow: above {slow.threshold:g} by "
        f"a t test over sessions (false discovery rate {FALSE_SHARE * 100:.0f} %)."
    )
    if num_hidden:
        caption += f" The {num_hidden} fastest hosts are left out."

    def work(host: HostHistory) -> Cell:
        number, interval, _ = estimate_parts(host.ratio, 3)
        return Cell(number, interval, number=host.ratio.value)

    columns: tuple[Column[HostHistory], ...] = (
        Column("host", "Host", "host", limit=64),
        Column("own_work_ratio", "Own work", "ratio", work, has_interval=True),
        Column("leaves_later_fraction", "Leaves later", "later", lambda host: unit_cell(host.later), has_interval=True),
        Column("sessions", "Sessions", "ratio.n"),
        Column("runs", "Runs", "num_runs"),
        *columns_of(HostHistory, "interval=ratio.kind"),
        Column("last_share_fraction", "Last in", "last_share", lambda host: percent(host.last_share, 0)),
        Column("fair_share_fraction", "Fair share", "fair_share", lambda host: percent(host.fair_share, 0)),
        Column("verdict", "Verdict", "verdict", _verdict_text),
    )
    return Sheet(
        name="slow-nodes",
        title="Hosts, over all runs of the folder",
        columns=columns,
        rows=slow.hosts,
        is_shown=lambda host: host.verdict in ACCUSED or host in slowest,
        caption=caption,
    )


def _verdict_text(host: HostHistory) -> str:
    # With fewer than five sessions a host is suspected at most.
    if host.verdict == "suspected":
        return f"suspected ({sessions_text(host.ratio.n)}: insufficient)"
    return next(answer.in_sentence for answer in HOST.values() if answer.word == host.verdict)


class SlowNodesView(ReportView):
    """Slow nodes, as an option for sbatch."""

    id = "slow-nodes"
    title = "Slow nodes"
    key = "slow_nodes"
    after = "campaign-cost"

    def numbers(self, source: ReportSource) -> SlowNodes:
        return slow_nodes(source.table)

    def shown(self, report: Report, slow: SlowNodes) -> Section | None:
        if not slow.hosts:
            return None
        accused = [f"{clean(host.host, 30)} ({host.verdict})" for host in slow.hosts if host.verdict in ACCUSED]
        headline = f"{first_of(accused, 2)}, of {len(slow.hosts)} hosts"
        if not accused:
            headline = f"none of {len(slow.hosts)} hosts is shown to be slow ({sessions_text(slow.num_sessions)})"
        return Section(headline=headline, words=tuple(_of_hosts(slow)), sheets=(_host_sheet(slow),))

    def remedy(self, report: Report) -> str:
        text = "unknown: no run had ranks on two hosts or more."
        slow = report.of(SlowNodes)
        if slow and slow.num_faulty:
            text += f" {_faulty_text(slow)}"
        return text


def _faulty_text(slow: SlowNodes) -> str:
    return f"{runs_text(slow.num_faulty)} with an injected fault left out."


def _of_hosts(slow: SlowNodes) -> Iterator[str]:
    if slow.option:
        yield slow.option
    for host in slow.hosts:
        if host.later is not None and host.verdict in ("slow link", "slow and slow link"):
            yield f"Slow link or NIC at host {clean(host.host, 253)}: {slow_link_text(host.later)}."
    yield from (f"Left out of the list, no name for an option: {name}" for name in slow.unsafe)
    if slow.num_faulty:
        yield _faulty_text(slow)
    if slow.num_sessions < MIN_SESSIONS:
        needed = f"{MIN_SESSIONS} are needed (other jobs or days)"
        yield f"Suspected at most: {sessions_text(slow.num_sessions)}, and {needed}."

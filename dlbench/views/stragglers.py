"""The views `stragglers` and `slow-nodes`: late ranks at a rank count, and slow hosts over all runs; and a map of ranks
by steps, of the run with the middle median step: ranks whose own work takes longer, and when.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from dlbench.analysis.repeats import MIN_SESSIONS
from dlbench.analysis.scaling import Point
from dlbench.analysis.slow_nodes import ACCUSED, FALSE_SHARE, HostHistory, SlowNodes, Straggler, slow_nodes
from dlbench.analysis.stragglers import num_slowest
from dlbench.analysis.table import RunTable
from dlbench.report.chart_style import WIDE
from dlbench.report.charts import Chart, Series, Subject, channel, finish, layer, palette, tooltips
from dlbench.report.document import Section, with_rows
from dlbench.report.table import Cell, Column, Sheet, column, columns_of, constant, unit_cell
from dlbench.report.wording import (
    DASH,
    clean,
    estimate_parts,
    figure_text,
    number_text,
    percent,
    runs_text,
    sessions_text,
    slow_link_text,
    span_text,
)
from dlbench.stats.verdict_words import HOST
from dlbench.units import first_of, plural
from dlbench.views.causes.numbers import CausePoint, LostPercent
from dlbench.views.causes.view import VARIANT
from dlbench.views.model import MEANS, GroupView, Report, ReportGroup, ReportSource, ReportView, place_of
from dlbench.views.next_step import second_rank

MAX_ROWS = 16  # Rows of a map in a table for people; the slowest ones.
MAX_RECTANGLES = 800  # Of a map; a page of ten maps stays well below five megabytes.
EDGES = (0.9, 0.97, 1.03, 1.1, 1.25, 1.5, 2.0)  # Ratios at which colours change; from 0.97 to 1.03 a cell is blank.
_BLANK = 2  # Index of the blank interval.
_BIN_COLOURS = ("#2166ac", "#92c5de", "", "#fee08b", "#fdae61", "#f46d43", "#b2182b", "#4a0a2b")
MAX_SHOWN = 10  # Late ranks, or hosts, in a table for people (of slow hosts all).
MAX_LISTED = 64  # Late ranks in a table for programs, at each rank count.


def ratio_cell(value: float, decimals: int = 3) -> Cell:
    """Returns e.g. ``1.300x``."""
    return Cell(f"{value:.{decimals}f}x", number=value)


@dataclass(frozen=True, kw_only=True)
class MapRow:
    """A row of a map: neighbouring ranks."""

    first_rank: int
    last_rank: int
    hosts: str = field(metadata=column("Hosts", text=lambda hosts: hosts or DASH, limit=140))
    cells: tuple[float, ...]  # Own work over the median of all; the largest mean of a rank over the column's steps.
    mean: float = field(metadata=column("Mean", "mean_ratio", text=ratio_cell))
    largest: float = field(metadata=column("Largest", "largest_ratio", text=ratio_cell))
    largest_first_step: int  # First step of the cell with the largest value.
    largest_last_step: int  # Last step of that cell.


@dataclass(frozen=True, kw_only=True)
class RankMap:
    """Ranks by steps of one run: the run with the middle median step, at the largest rank count."""

    run_id: str
    ranks: int
    nodes: int
    num_runs: int  # Runs among which it is the one in the middle.
    step_starts: tuple[int, ...]  # First step of each column, warm-up steps counted.
    last_step: int
    rows: tuple[MapRow, ...]


def rank_map(point: Point, table: RunTable) -> RankMap:
    """Returns the map of the run in the middle, by its median step; of two in the middle the faster one."""
    ordered = sorted(point.run_ids, key=lambda run_id: (table.digests[run_id].quantiles_s[50], run_id))
    run_id = ordered[(len(ordered) - 1) // 2]
    digest = table.digests[run_id].map
    rank_ends = (*digest.rank_starts[1:], digest.num_ranks)
    step_ends = (*(start - 1 for start in digest.step_starts[1:]), digest.last_step)
    rows = []
    for first, end, hosts, cells in zip(digest.rank_starts, rank_ends, digest.row_hosts, digest.cells, strict=True):
        largest = max(range(len(cells)), key=cells.__getitem__)
        row = MapRow(
            first_rank=first,
            last_rank=end - 1,
            hosts=hosts,
            cells=tuple(float(f"{value:.4g}") for value in cells),
            mean=statistics.fmean(cells),
            largest=cells[largest],
            largest_first_step=digest.step_starts[largest],
            largest_last_step=step_ends[largest],
        )
        rows.append(row)
    return RankMap(
        run_id=run_id,
        ranks=point.ranks,
        nodes=point.nodes,
        num_runs=len(ordered),
        step_starts=digest.step_starts,
        last_step=digest.last_step,
        rows=tuple(rows),
    )


def map_text(rank_map: RankMap) -> str:
    """Returns the meaning of a cell of the map, and its run."""
    num_steps = rank_map.last_step - rank_map.step_starts[0] + 1
    details = []
    if len(rank_map.rows) < rank_map.ranks:
        details.append("the largest of the ranks of a row")
    if len(rank_map.step_starts) < num_steps:
        details.append("means over neighbouring steps")
    definition = "the step without exchange, over the median of all ranks and steps"
    if details:
        definition += f" ({', '.join(details)})"
    return (
        f"Own work: {definition}; of {rank_map.run_id} alone, the median run at {place_of(rank_map)}. Stragglers says "
        "for whom the others wait, step by step in all runs."
    )


def slowest_text(rank_map: RankMap) -> str:
    """Returns which ranks are the slowest on the whole."""
    slowest = max(rank_map.rows, key=attrgetter("mean"))
    return f"{row_title(slowest)} on {slowest.hosts or DASH} slowest on the whole: {slowest.mean:.3f}x the median"


def row_title(row: MapRow) -> str:
    """Returns ``rank 5``, ``ranks 16 to 31``."""
    return f"{plural('rank', row.last_rank - row.first_rank + 1)} {span_text(row.first_rank, row.last_rank)}"


def rank_sheet(rank_map: RankMap, max_rows: int = MAX_ROWS) -> Sheet[MapRow]:
    """Returns mean and largest value of each row of the map; people see the slowest `max_rows`, slowest first."""
    slowest = sorted(rank_map.rows, key=attrgetter("mean"), reverse=True)[:max_rows]
    columns = (
        Column("", "Ranks", row_title),
        constant("run_id", rank_map.run_id),
        constant("ranks", rank_map.ranks),
        constant("nodes", rank_map.nodes),
        *columns_of(MapRow, "first_rank", "last_rank", "hosts", "mean", "largest"),
        Column("", "In steps", lambda row: span_text(row.largest_first_step, row.largest_last_step)),
        *columns_of(MapRow, "largest_first_step", "largest_last_step"),
    )
    return Sheet(
        name="ranks",
        title="Own work by rank, slowest first",
        columns=columns,
        rows=rank_map.rows,
        is_shown=lambda row: row in slowest,
        order=lambda row: -row.mean,
        is_drawn=True,
    )


def rank_charts(group: Subject, rank_map: RankMap) -> list[Chart]:
    """Returns the map of the largest rank count; columns are joined until there are few enough rectangles."""
    joined = 1
    while len(rows := list(_rectangles(rank_map, joined))) > MAX_RECTANGLES and joined < len(rank_map.step_starts):
        joined *= 2
    start, end = rank_map.step_starts[0] - 0.5, rank_map.last_step + 0.5
    x_scale = {"domain": [start, end], "nice": False, "zero": False}
    y_scale = {"domain": [-0.5, rank_map.ranks - 0.5], "reverse": True, "nice": False, "zero": False}
    axis = {"format": "d", "tickCount": 6, "tickMinStep": 1, "grid": False}
    y_axis = {**axis, "tickCount": min(8, rank_map.ranks)}
    ends = {
        "x": channel("x:Q", scale=x_scale, title="step, warm-up steps counted", axis=axis),
        "x2": "x2",
        "y": channel("y:Q", scale=y_scale, title="rank", axis=y_axis),
        "y2": "y2",
    }
    # Behind the map, in both colour schemes: its colours are made for it.
    plate = [{"x": start, "x2": end, "y": -0.5, "y2": rank_map.ranks - 0.5}]
    layers = [layer(plate, "rect", ends, color="#eceff3")]
    if rows:
        colours = {bin_title(number): colour for number, colour in enumerate(_BIN_COLOURS) if number != _BLANK}
        title = f"own work over the median (blank: {bin_title(_BLANK)})"
        bins = Series("bin", colours, columns=4, title=title, legend={"titleOrient": "top", "titleLimit": WIDE})
        tooltip = tooltips({"who": "ranks", "when": "steps", "shown": "own work over the median"})
        layers.append(layer(rows, "rect", {**ends, "color": palette(rows, bins), "tooltip": tooltip}, strokeWidth=0))
    words = f"{slowest_text(rank_map).capitalize()}."
    if joined > 1:
        words += f" {joined} neighbouring columns are drawn as one, with the larger value."
    chart = finish(
        layers,
        group,
        name="ranks",
        title=f"Own work by rank and step at {place_of(rank_map)}",
        alt=words,
        table=rank_sheet(rank_map, len(rank_map.rows)),
        size=(WIDE, min(320, max(70, 22 * len(rank_map.rows)))),
    )
    return [chart]


def _rectangles(rank_map: RankMap, joined: int) -> Iterator[dict[str, Any]]:
    """Yields neighbouring cells of one colour as one rectangle; `joined` columns are drawn as one."""
    starts = rank_map.step_starts[::joined]
    ends = (*starts[1:], rank_map.last_step + 1)
    for row in rank_map.rows:
        cells = [max(row.cells[first : first + joined]) for first in range(0, len(row.cells), joined)]
        bins = [bisect.bisect_right(EDGES, cell) for cell in cells]
        first = 0
        for end in range(1, len(bins) + 1):
            if end < len(bins) and bins[end] == bins[first]:
                continue
            if bins[first] != _BLANK:
                low, high = f"{min(cells[first:end]):.3g}x", f"{max(cells[first:end]):.3g}x"
                yield {
                    "x": starts[first] - 0.5,
                    "x2": ends[end - 1] - 0.5,
                    "y": row.first_rank - 0.5,
                    "y2": row.last_rank + 0.5,
                    "bin": bin_title(bins[first]),
                    "shown": span_text(low, high),
                    "who": f"{row_title(row)} on {row.hosts}",
                    "when": f"{starts[first]} to {ends[end - 1] - 1}",
                }
            first = end


def bin_title(number: int) -> str:
    """Returns the meaning of a colour of the map."""
    if number == 0:
        return f"below {EDGES[0]:g}x"
    if number == len(EDGES):
        return f"{EDGES[-1]:g}x and more"
    return f"{EDGES[number - 1]:g}x to {EDGES[number]:g}x"


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

"""A map of ranks by steps: whose own work takes longer than the others', and when.

One run stands for a group: the one with the middle median step, at the largest rank count.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dlbench.analysis.scaling import Point
from dlbench.analysis.table import RunTable
from dlbench.lazy import alt
from dlbench.report.charts.chart import Chart, Subject, finish, inline, tooltips
from dlbench.report.charts.style import WIDE
from dlbench.report.table import Cell, Column, Sheet, column, columns_of
from dlbench.report.wording import DASH
from dlbench.views.view import place_of

MAX_ROWS = 16  # Rows of a map in a table for people; the slowest ones.
MAX_RECTANGLES = 800  # Of a map; a page of ten maps stays well below five megabytes.
EDGES = (0.9, 0.97, 1.03, 1.1, 1.25, 1.5, 2.0)  # Where a map's colours change; between 0.97 and 1.03 a cell is blank.
_BLANK = 2
_BIN_COLOURS = ("#2166ac", "#92c5de", "", "#fee08b", "#fdae61", "#f46d43", "#b2182b", "#4a0a2b")


def ratio_cell(value: float, decimals: int) -> Cell:
    """E.g. ``1.30x``."""
    return Cell(f"{value:.{decimals}f}x", number=value)


@dataclass(frozen=True, kw_only=True)
class MapRow:
    """One row of a map: neighbouring ranks."""

    first_rank: int
    last_rank: int
    hosts: str = field(metadata=column("Hosts", text=lambda hosts: hosts or DASH, limit=140))
    cells: tuple[float, ...]
    """Own work relative to the median of all ranks and steps (ratio), four digits; the largest mean of any of the ranks
    over the steps of the column."""
    mean: float = field(metadata=column("Mean", "mean_ratio", text=lambda mean: ratio_cell(mean, 3)))
    largest: float = field(metadata=column("Largest", "largest_ratio", text=lambda largest: ratio_cell(largest, 3)))
    largest_first_step: int  # Steps of the cell with the largest value.
    largest_last_step: int


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
    """The map of the run in the middle, by its median step; of two in the middle the faster one."""
    ordered = sorted(point.run_ids, key=lambda run_id: (table.digests[run_id].quantiles_s[50], run_id))
    run_id = ordered[(len(ordered) - 1) // 2]
    found = table.digests[run_id].map
    rank_ends = (*found.rank_starts[1:], found.num_ranks)
    step_ends = (*(start - 1 for start in found.step_starts[1:]), found.last_step)
    rows = []
    for first, end, hosts, cells in zip(found.rank_starts, rank_ends, found.row_hosts, found.cells, strict=True):
        largest = max(range(len(cells)), key=cells.__getitem__)
        row = MapRow(
            first_rank=first,
            last_rank=end - 1,
            hosts=hosts,
            cells=tuple(float(f"{value:.4g}") for value in cells),
            mean=statistics.fmean(cells),
            largest=cells[largest],
            largest_first_step=found.step_starts[largest],
            largest_last_step=step_ends[largest],
        )
        rows.append(row)
    return RankMap(
        run_id=run_id,
        ranks=point.ranks,
        nodes=point.nodes,
        num_runs=len(ordered),
        step_starts=found.step_starts,
        last_step=found.last_step,
        rows=tuple(rows),
    )


def map_text(found: RankMap) -> str:
    """What a cell of the map is, and of which run."""
    columns = found.last_step - found.step_starts[0] + 1
    joined = ["the largest of the ranks of a row"] if len(found.rows) < found.ranks else []
    joined += ["means over neighbouring steps"] if len(found.step_starts) < columns else []
    how = f" ({', '.join(joined)})" if joined else ""
    return (
        f"Own work: the step without exchange, over the median of all ranks and steps{how}; of {found.run_id} alone, "
        f"the median run at {place_of(found)}. Stragglers says for whom the others wait, step by step in all runs."
    )


def slowest_text(found: RankMap) -> str:
    """Says which ranks are the slowest on the whole."""
    slowest = max(found.rows, key=lambda row: row.mean)
    return f"{row_title(slowest)} on {slowest.hosts or DASH} slowest on the whole: {slowest.mean:.3f}x the median"


def row_title(row: MapRow) -> str:
    """``rank 5``, ``ranks 16 to 31``."""
    return f"rank{'s' * (row.first_rank != row.last_rank)} {_span(row.first_rank, row.last_rank)}"


def rank_sheet(found: RankMap, most: int = MAX_ROWS) -> Sheet[MapRow]:
    """Mean and largest value of each row of the map, for people of the `most` slowest, slowest first."""
    slowest = sorted(found.rows, key=lambda row: -row.mean)[:most]
    columns = (
        Column("", "Ranks", row_title),
        *columns_of(RankMap, "run_id", "ranks", "nodes", of=lambda row: found),
        *columns_of(MapRow, "first_rank", "last_rank", "hosts", "mean", "largest"),
        Column("", "In steps", lambda row: _span(row.largest_first_step, row.largest_last_step)),
        *columns_of(MapRow, "largest_first_step", "largest_last_step"),
    )
    return Sheet(
        name="ranks",
        title="Own work by rank, slowest first",
        columns=columns,
        rows=found.rows,
        is_shown=lambda row: row in slowest,
        order=lambda row: -row.mean,
        is_drawn=True,
    )


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def rank_charts(group: Subject, found: RankMap) -> list[Chart]:
    """The map of the largest rank count; columns are joined until there are few enough rectangles."""
    joined = 1
    while len(rows := list(_rectangles(found, joined))) > MAX_RECTANGLES and joined < len(found.step_starts):
        joined *= 2
    start, end = found.step_starts[0] - 0.5, found.last_step + 0.5
    x_scale = alt.Scale(domain=[start, end], nice=False, zero=False)
    y_scale = alt.Scale(domain=[-0.5, found.ranks - 0.5], reverse=True, nice=False, zero=False)
    x_axis = alt.Axis(format="d", tickCount=6, tickMinStep=1, grid=False)
    y_axis = alt.Axis(format="d", tickCount=min(8, found.ranks), tickMinStep=1, grid=False)
    ends = {
        "x": alt.X("x:Q", scale=x_scale, title="step, warm-up steps counted", axis=x_axis),
        "x2": "x2:Q",
        "y": alt.Y("y:Q", scale=y_scale, title="rank", axis=y_axis),
        "y2": "y2:Q",
    }
    # Behind the map, in either colour scheme: its colours are made for it.
    plate = alt.InlineData(values=[{"x": start, "x2": end, "y": -0.5, "y2": found.ranks - 0.5}])
    layers = [alt.Chart(plate).mark_rect(color="#eceff3").encode(**ends)]
    if rows:
        colours = {bin_title(number): colour for number, colour in enumerate(_BIN_COLOURS) if number != _BLANK}
        present = [title for title in colours if any(row["bin"] == title for row in rows)]
        colour = alt.Color(
            "bin:N",
            title=f"own work over the median (blank: {bin_title(_BLANK)})",
            scale=alt.Scale(domain=present, range=[colours[title] for title in present]),
            legend=alt.Legend(orient="bottom", columns=4, titleOrient="top", titleLimit=WIDE),
        )
        tooltip = tooltips({"who": "ranks", "when": "steps", "shown": "own work over the median"})
        cells = alt.Chart(inline(rows)).mark_rect(strokeWidth=0)
        layers.append(cells.encode(**ends, color=colour, tooltip=tooltip))
    note = f" {joined} neighbouring columns are drawn as one, with the larger value." if joined > 1 else ""
    drawn = finish(
        alt.layer(*layers),
        group,
        name="ranks",
        title=f"Own work by rank and step at {place_of(found)}",
        alt=f"{slowest_text(found).capitalize()}.{note}",
        table=rank_sheet(found, len(found.rows)),
        size=(WIDE, min(320, max(70, 22 * len(found.rows)))),
    )
    return [drawn]


def _rectangles(found: RankMap, joined: int) -> Iterator[dict[str, Any]]:
    """Neighbouring cells of one colour as one rectangle; `joined` columns are drawn as one."""
    starts = found.step_starts[::joined]
    ends = (*starts[1:], found.last_step + 1)
    for row in found.rows:
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
                    "shown": low if low == high else f"{low} to {high}",
                    "who": f"{row_title(row)} on {row.hosts}",
                    "when": f"{starts[first]} to {ends[end - 1] - 1}",
                }
            first = end


def bin_title(number: int) -> str:
    """What a colour of the map means."""
    if number == 0:
        return f"below {EDGES[0]:g}x"
    if number == len(EDGES):
        return f"{EDGES[-1]:g}x and more"
    return f"{EDGES[number - 1]:g}x to {EDGES[number]:g}x"

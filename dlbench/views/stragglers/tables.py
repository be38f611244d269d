"""Tables of who is waited for: late ranks and hosts; see `view.Sheet`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dlbench.report.model import Group
from dlbench.report.tabular import Table
from dlbench.report.view import Sheet
from dlbench.report.wording import number_text, percent, runs_text
from dlbench.stats.figure import Cell
from dlbench.views.causes.tables import WHERE, account_of, where
from dlbench.views.causes.words import place
from dlbench.views.stragglers.numbers import Straggler

_STRAGGLER_TITLES = ("last in", "waited a step", "of all waiting", "late by")

MAX_SHOWN = 10
"""Late ranks, or hosts, in a table for people and in a chart."""
MAX_LISTED = 64
"""The same in a table for programs, at each rank count."""


def straggler_sheets(group: Group) -> list[Sheet]:
    """Ranks, and hosts where there are several, that the others waited for; the largest rank count for people."""
    points = account_of(group).diagnosed.points
    largest = points[-1]
    if not any(point.waiting_ranks for point in points):
        return []
    caption = (
        f"{group.parts_caption}. Means over {runs_text(len(largest.run_ids))} at {place(largest)}. Last in: share of "
        "the steps in which it came last. Waited a step: waiting that it owes, mean over all ranks. Late by: its own "
        "time beyond that of the ranks in time, a step"
    )
    left = len(largest.waiting_ranks) - MAX_SHOWN
    more = f" {left} more ranks were late at times." if left > 0 else ""
    made = [
        Sheet(
            name="stragglers",
            title=f"Ranks that were waited for, at {place(largest)}",
            text=late_ranks(largest.waiting_ranks[:MAX_SHOWN]),
            caption=f"{caption}.{more}",
            columns=_STRAGGLER_COLUMNS,
            rows=tuple(_straggler_rows(group, hosts=False)),
        )
    ]
    if any(point.num_hosts > 1 for point in points):
        made.append(
            Sheet(
                name="straggler-hosts",
                title=f"The same by host, at {place(largest)}",
                text=late_hosts(largest.waiting_hosts[:MAX_SHOWN]),
                caption=f"{caption}, mean over the ranks of a host.",
                columns=tuple(name for name in _STRAGGLER_COLUMNS if name != "rank"),
                rows=tuple(_straggler_rows(group, hosts=True)),
            )
        )
    return made


_STRAGGLER_COLUMNS = (
    *(*WHERE, "position", "rank", "host", "last_share_fraction", "waited_s_per_step", "waited_share_fraction"),
    *("late_input_s_per_step", "late_compute_s_per_step", "late_host_s_per_step", "late_by", "runs"),
)


def _straggler_rows(group: Group, *, hosts: bool) -> Iterator[Mapping[str, Cell]]:
    for point in account_of(group).diagnosed.points:
        found = point.waiting_hosts if hosts else point.waiting_ranks
        for position, late in enumerate(found[:MAX_LISTED], start=1):
            yield {**where(group, point), "position": position, **_late_columns(late), "runs": len(point.run_ids)}


def _late_columns(late: Straggler) -> dict[str, Cell]:
    return {
        "rank": late.rank,
        "host": late.host,
        "last_share_fraction": late.last_share,
        "waited_s_per_step": late.waited_s,
        "waited_share_fraction": late.waited_share,
        "late_input_s_per_step": late.input_s,
        "late_compute_s_per_step": late.compute_s,
        "late_host_s_per_step": late.host_s,
        "late_by": late.late_by,
    }


def late_ranks(found: Sequence[Straggler]) -> Table:
    """Ranks that were waited for."""
    return [("rank", "host", *_STRAGGLER_TITLES), *((str(late.rank), late.host, *_cells(late)) for late in found)]


def late_hosts(found: Sequence[Straggler]) -> Table:
    """Hosts whose ranks were waited for."""
    return [("host", *_STRAGGLER_TITLES), *((late.host, *_cells(late)) for late in found)]


def _cells(late: Straggler) -> tuple[str, ...]:
    times = {"input": late.input_s, "compute": late.compute_s, "host": late.host_s}
    own = f"{late.late_by} {number_text(times[late.late_by], 's')}" if late.late_by in times else late.late_by
    return (percent(late.last_share, 0), number_text(late.waited_s, "s"), percent(late.waited_share, 0), own)

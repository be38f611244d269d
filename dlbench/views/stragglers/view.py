"""The view `stragglers`: who keeps the others waiting."""

from __future__ import annotations

from collections.abc import Iterator

from dlbench.report.document import Section
from dlbench.report.wording import basis_text, percent, place_text
from dlbench.views.causes.numbers import CausePoint, LostPercent
from dlbench.views.causes.view import VARIANT
from dlbench.views.model import Group
from dlbench.views.rerun import rerun
from dlbench.views.slow_nodes import ratio_text
from dlbench.views.stragglers.charts import straggler_charts, who
from dlbench.views.stragglers.tables import host_sheet, rank_sheet
from dlbench.views.view import GroupView


class StragglersView(GroupView):
    """Ranks and hosts for which the others wait."""

    id = "stragglers"
    title = "Stragglers"

    def section(self, group: Group) -> Section | None:
        """Stragglers at the largest rank count, and hosts where there are several."""
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
            charts=lambda: straggler_charts(group, points[-1]),
            sheets=(*((rank_sheet(points),) if has_late else ()), *((host_sheet(points),) if has_hosts else ())),
        )

    def remedy(self, group: Group) -> str:
        """A second rank."""
        if group.of(LostPercent) is None:
            return VARIANT
        return f"one rank waits for nobody: {rerun(group, '--ranks 1,2 --repeats 5')} adds a second one."


def _words(found: LostPercent) -> Iterator[str]:
    """Who is waited for most at each rank count but the largest (the headline); slow hosts of all runs."""
    yield from (_waited_for(point) for point in reversed(found.diagnosed.points[:-1]) if point.ranks > 1)
    slow = [one for one in found.nodes.hosts if one.verdict == "slow"]
    for one in slow:
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
        f"{where}: {percent(first.waited_share, 0)} of all waiting is for {who(first)}, last in "
        f"{percent(first.last_share, 0)} of the steps, late by {first.late_by}."
    )


def _headline(point: CausePoint) -> str:
    """The rank that is waited for most."""
    if not point.waiting_ranks:
        return "No rank waited for another one"
    first = point.waiting_ranks[0]
    return f"{percent(first.waited_share, 0)} of all waiting is for {who(first)}"[:80] + f", late by {first.late_by}"

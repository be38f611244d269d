"""The view of who is waited for."""

from __future__ import annotations

from dlbench.report.model import Group
from dlbench.report.view import View
from dlbench.report.wording import basis_text, percent
from dlbench.views.causes.numbers import CausePoint
from dlbench.views.causes.tables import account_of
from dlbench.views.causes.view import why_no_causes
from dlbench.views.causes.words import place
from dlbench.views.rerun import rerun
from dlbench.views.slow_nodes.tables import ratio_text, slow_hosts
from dlbench.views.stragglers.charts import straggler_charts, who
from dlbench.views.stragglers.tables import straggler_sheets


def _can_wait(group: Group) -> bool:
    return group.causes is not None and group.largest.ranks > 1


def _cannot_wait(group: Group) -> str:
    if group.causes is None:
        return why_no_causes(group)
    return f"one rank waits for nobody: {rerun(group, '--ranks 1,2 --repeats 5')} adds a second one."


def _straggler_words(group: Group) -> tuple[str, ...]:
    found = account_of(group)
    told = [_waited_for(point) for point in reversed(found.diagnosed.points) if point.ranks > 1]
    told += [
        f"Over all runs of this folder {one.host} is slow: {ratio_text(one.ratio)} times the work of "
        f"the other hosts ({basis_text(one.ratio)})."
        for one in slow_hosts(found.nodes)
    ]
    if found.nodes.option and slow_hosts(found.nodes):
        told.append(f"To keep jobs off all slow hosts: sbatch {found.nodes.option}")
    return tuple(told)


def _waited_for(point: CausePoint) -> str:
    if not point.waiting_ranks:
        return f"{place(point)}: no rank waited for another one."
    first = point.waiting_ranks[0]
    return (
        f"{place(point)}: {percent(first.waited_share, 0)} of all waiting is for {who(first)} (an even share is "
        f"{percent(1 / point.ranks)}), last in {percent(first.last_share, 0)} of the steps, late by {first.late_by}."
    )


VIEW = View(
    id="stragglers",
    title="Who is waited for",
    place="group",
    is_for=_can_wait,
    remedy=_cannot_wait,
    words=_straggler_words,
    charts=straggler_charts,
    sheets=straggler_sheets,
    template="sheets.html.j2",
)

"""Views of single steps: distribution and outliers, ranks by steps."""

from __future__ import annotations

from dlbench.report.model import Group
from dlbench.report.view import View
from dlbench.views.rerun import rerun
from dlbench.views.steps.charts import rank_charts, step_charts
from dlbench.views.steps.tables import rank_sheets, step_sheets, steps_of
from dlbench.views.steps.words import map_text, step_words


def _rank_words(group: Group) -> tuple[str, ...]:
    found = steps_of(group).map
    return (found.finding, map_text(found))


def _no_ranks(group: Group) -> str:
    if group.step_times is None:
        return _no_steps(group)
    return f"one rank only: {rerun(group, '--ranks 1,2 --repeats 5')} adds a second one."


def _no_steps(group: Group) -> str:
    return "not told: this report was made without the single steps of its runs."


VIEWS: tuple[View, ...] = (
    View(
        id="steps",
        title="Step times",
        place="group",
        is_for=lambda group: group.step_times is not None,
        remedy=_no_steps,
        words=lambda group: step_words(steps_of(group)),
        charts=step_charts,
        sheets=step_sheets,
        template="sheets.html.j2",
    ),
    View(
        id="ranks",
        title="Ranks and steps",
        place="group",
        is_for=lambda group: group.step_times is not None and len(group.step_times.map.rows) > 1,
        remedy=_no_ranks,
        words=_rank_words,
        charts=rank_charts,
        sheets=rank_sheets,
        template="sheets.html.j2",
    ),
)

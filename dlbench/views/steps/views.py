"""Views of single steps: distribution and outliers, ranks by steps."""

from __future__ import annotations

from dlbench.report.model import Group
from dlbench.report.view import View
from dlbench.report.wording import PART_TITLES, figure_text, percent, runs_text
from dlbench.views.rerun import rerun
from dlbench.views.steps import charts as steps_charts
from dlbench.views.steps import tables as steps_tables
from dlbench.views.steps.model import StepPoint
from dlbench.views.steps.tables import place, steps_of

CORRELATED = 0.2
"""Autocorrelation of successive steps from which on a reader should know that single steps tell less."""


def _step_words(group: Group) -> tuple[str, ...]:
    found = steps_of(group)
    return (*(_point_text(point) for point in reversed(found.points)), *_outlier_text(found.points[-1]))


def _point_text(point: StepPoint) -> str:
    text = (
        f"{place(point)}: {point.num_steps:,} measured steps of {runs_text(len(point.run_ids))} ({point.num_warmup:,} "
        f"warm-up steps are left out); half of them within {figure_text(point.p50)}, 95 % within "
        f"{figure_text(point.p95)}; {point.num_outliers:,} ({percent(point.num_outliers / point.num_steps, 2)}) beyond "
        "the fence."
    )
    if point.autocorrelation is not None and point.autocorrelation.value >= CORRELATED:
        alike = steps_tables.correlation_text(point.autocorrelation)
        text += (
            f" Successive steps are alike (autocorrelation {alike}): they are no independent measurements: only runs "
            "count as such."
        )
    return text


def _outlier_text(point: StepPoint) -> tuple[str, ...]:
    if not point.outliers:
        return ()
    worst = point.outliers[0]
    title = PART_TITLES.get(worst.phase, worst.phase)
    return (
        f"The longest against its run's median at {place(point)}: step {worst.step} of run {worst.run_id}, "
        f"{worst.ratio:.2f} times as long; the longest own work had rank {worst.rank} on {worst.host}, and most of the "
        f"growth is in {title}.",
    )


def _rank_words(group: Group) -> tuple[str, ...]:
    found = steps_of(group).map
    return (found.finding, steps_tables.map_text(found))


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
        words=_step_words,
        charts=steps_charts.step_charts,
        sheets=steps_tables.step_sheets,
        template="sheets.html.j2",
    ),
    View(
        id="ranks",
        title="Ranks and steps",
        place="group",
        is_for=lambda group: group.step_times is not None and len(group.step_times.map.rows) > 1,
        remedy=_no_ranks,
        words=_rank_words,
        charts=steps_charts.rank_charts,
        sheets=steps_tables.rank_sheets,
        template="sheets.html.j2",
    ),
)

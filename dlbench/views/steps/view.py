"""The views `steps` and `ranks`: distribution and outliers of step times, ranks by steps."""

from __future__ import annotations

from dlbench.report.document import Section
from dlbench.views.model import Group
from dlbench.views.rerun import rerun
from dlbench.views.steps.charts import rank_charts, step_charts
from dlbench.views.steps.numbers import StepTimes, step_times
from dlbench.views.steps.tables import outlier_sheet, quantile_sheet, rank_sheet, steps_sheet
from dlbench.views.steps.words import map_text, step_headline, step_notes
from dlbench.views.view import GroupSource, GroupView

NO_STEPS = "this report was made without the single steps of its runs."


class StepsView(GroupView):
    """How long steps take, and which take far longer."""

    id = "steps"
    title = "Step times"
    key = "step_times"

    def numbers(self, source: GroupSource) -> StepTimes | None:
        """Step times by rank count, and the map of the largest."""
        return step_times(source.group, source.table)

    def section(self, group: Group) -> Section | None:
        """A table by rank count, the outliers if there are any, and the distribution."""
        found = group.of(StepTimes)
        if found is None:
            return None
        outliers = outlier_sheet(found.points)
        return Section(
            id=self.id,
            title=self.title,
            headline=step_headline(found),
            notes=step_notes(found),
            charts=lambda: step_charts(group, found),
            sheets=(steps_sheet(found), *((outliers,) if outliers.rows else ()), quantile_sheet(found)),
        )

    def remedy(self, group: Group) -> str:
        """Single steps are read for each report."""
        return NO_STEPS


class RanksView(GroupView):
    """Which ranks take longer than the others, and when."""

    id = "ranks"
    title = "Ranks and steps"

    def section(self, group: Group) -> Section | None:
        """The map of the run in the middle; None where it has one row."""
        found = group.of(StepTimes)
        if found is None or len(found.map.rows) < 2:
            return None
        return Section(
            id=self.id,
            title=self.title,
            headline=f"{found.map.finding[:1].lower()}{found.map.finding[1:].rstrip('.')}",
            notes=(map_text(found.map),),
            charts=lambda: rank_charts(group, found.map),
            sheets=(rank_sheet(found.map),),
        )

    def remedy(self, group: Group) -> str:
        """A second rank."""
        if group.of(StepTimes) is None:
            return NO_STEPS
        return f"one rank only: {rerun(group, '--ranks 1,2 --repeats 5')} adds a second one."

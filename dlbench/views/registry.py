"""The views of the scaling report, in the order of the page. A new view is a folder and a line here."""

from __future__ import annotations

from typing import Any, cast

from dlbench.history.page.view import history_view
from dlbench.report.document import Missing, Section
from dlbench.views.causes import assemble as causes_assemble
from dlbench.views.causes import views as causes_views
from dlbench.views.exchange.view import ExchangeView
from dlbench.views.forecast.view import ForecastView
from dlbench.views.layers.view import LayersView
from dlbench.views.machine import assemble as machine_assemble
from dlbench.views.machine import views as machine_views
from dlbench.views.model import Group, Report
from dlbench.views.noise.view import NoiseView
from dlbench.views.old_view import View
from dlbench.views.parts.view import PartsView
from dlbench.views.precision import assemble as runs_assemble
from dlbench.views.precision import views as precision_views
from dlbench.views.quality.view import QualityView
from dlbench.views.runs.view import EnvironmentView, RunsView, WithoutFiguresView
from dlbench.views.scaling.view import ScalingView
from dlbench.views.steps import assemble as steps_assemble
from dlbench.views.steps import views as steps_views
from dlbench.views.summary.view import SummaryView
from dlbench.views.sweep.view import SweepView
from dlbench.views.utilisation.view import UtilisationView
from dlbench.views.view import GroupSource, GroupView, ReportSource, ReportView

# Transitional: old-style views behind the new protocol, until each subject is converted.


class _Old(GroupView):
    """An old-style view."""

    def __init__(self, view: View, key: str = "", numbers: Any = None) -> None:
        self.view, self.id, self.title, self.key, self._numbers = view, view.id, view.title, key, numbers  # type: ignore[misc]

    def numbers(self, source: GroupSource) -> object:
        return self._numbers(source)

    def section(self, group: Group) -> Section | None:
        if not self.view.is_for(group):
            return None
        return Section(
            id=self.id,
            title=self.title,
            words=self.view.words(group),
            charts=lambda: self.view.charts(group),
            sheets=cast(Any, tuple(self.view.sheets(group))),
        )

    def remedy(self, group: Group) -> str:
        return str(self.view.remedy(group))


class _OldReport(ReportView):
    """The same for the whole report."""

    def __init__(self, view: View, key: str = "", numbers: Any = None) -> None:
        self.view, self.id, self.title, self.key, self._numbers = view, view.id, view.title, key, numbers  # type: ignore[misc]

    def numbers(self, source: ReportSource) -> object:
        return self._numbers(source)

    def sections(self, report: Report) -> tuple[Section, ...]:
        if not self.view.is_shown(report):
            return ()
        return (
            Section(
                id=self.id,
                title=self.title,
                words=self.view.report_words(report),
                charts=lambda: self.view.report_charts(report),
                sheets=cast(Any, tuple(self.view.report_sheets(report))),
            ),
        )

    def remedy(self, report: Report) -> str:
        return str(self.view.report_remedy(report))


_CAUSES = {view.id: view for view in causes_views.VIEWS}
_MACHINE = {view.id: view for view in machine_views.VIEWS}
_STEPS = {view.id: view for view in steps_views.VIEWS}
_RUNS = {view.id: view for view in precision_views.VIEWS}

GROUP_VIEWS: tuple[GroupView, ...] = (
    QualityView(),
    ScalingView(),
    ForecastView(),
    _Old(_CAUSES["waterfall"]),
    _Old(_CAUSES["causes"], "causes", lambda source: causes_assemble.causes(source.group, source.table)),
    _Old(_CAUSES["stragglers"]),
    PartsView(),
    _Old(_STEPS["steps"], "step_times", lambda source: steps_assemble.step_times(source.group, source.table)),
    _Old(_STEPS["ranks"]),
    ExchangeView(),
    _Old(_MACHINE["data-path"], "data_path", lambda source: machine_assemble.data_path(source.group, source.table)),
    _Old(_MACHINE["memory"], "memory", lambda source: machine_assemble.memory(source.group, source.table)),
    _Old(_MACHINE["telemetry"], "telemetry", lambda source: machine_assemble.telemetry(source.group, source.table)),
    _Old(_MACHINE["energy"], "energy", lambda source: machine_assemble.energy(source.group, source.table)),
    NoiseView(),
    UtilisationView(),
)

OPENING: tuple[ReportView, ...] = (
    SummaryView(),
    SweepView(),
)
"""Before the groups."""

CLOSING: tuple[ReportView, ...] = (
    _OldReport(_CAUSES["slow-nodes"]),
    _OldReport(_RUNS["precision"], "precisions", lambda source: runs_assemble.precisions(source.groups, source.table)),
    _OldReport(_RUNS["differences"], "differences", lambda source: runs_assemble.differences(source.table)),
    _OldReport(_RUNS["systems"], "systems", lambda source: runs_assemble.systems(source.table)),
    _OldReport(history_view(lambda report: report.history), "history", lambda source: source.history),
    LayersView(),
    RunsView(),
    WithoutFiguresView(),
    EnvironmentView(),
)
"""After the groups."""

REPORT_VIEWS = (*OPENING, *CLOSING)


def missing_of_group(group: Group) -> tuple[Missing, ...]:
    """Views without a section for a group, with what would produce it."""
    return tuple(
        Missing(view=view.id, title=view.title, text=text)
        for view in GROUP_VIEWS
        if view.section(group) is None and (text := view.remedy(group))
    )


def missing_of_report(report: Report) -> tuple[Missing, ...]:
    """The same of the whole report."""
    return tuple(
        Missing(view=view.id, title=view.title, text=text)
        for view in REPORT_VIEWS
        if not view.sections(report) and (text := view.remedy(report))
    )

"""The views of the scaling report, in the order of the page. A new view is a folder and a line here."""

from __future__ import annotations

from typing import Any, cast

from dlbench.history.page.view import history_view
from dlbench.report.document import Section
from dlbench.views.causes.view import CausesView
from dlbench.views.data_path.view import DataPathView
from dlbench.views.differences.view import DifferencesView
from dlbench.views.energy.view import EnergyView
from dlbench.views.exchange import assemble as exchange_assemble
from dlbench.views.exchange.charts import exchange_charts
from dlbench.views.forecast import assemble as forecast_assemble
from dlbench.views.forecast import views as forecast_views
from dlbench.views.memory.view import MemoryView
from dlbench.views.model import Group, Report
from dlbench.views.old_view import Sheet as OldSheet
from dlbench.views.old_view import View
from dlbench.views.parts.view import PartsView
from dlbench.views.precision.view import PrecisionView
from dlbench.views.quality import assemble as training_assemble
from dlbench.views.quality import tables as training_tables
from dlbench.views.quality.charts import quality_charts
from dlbench.views.runs.view import EnvironmentView, RunsView, WithoutFiguresView
from dlbench.views.scaling.view import ScalingView
from dlbench.views.slow_nodes.view import SlowNodesView
from dlbench.views.steps.view import RanksView, StepsView
from dlbench.views.stragglers.view import StragglersView
from dlbench.views.summary.view import SummaryView
from dlbench.views.sweep import assemble as sweep_assemble
from dlbench.views.sweep.charts import sweep_charts
from dlbench.views.systems.view import SystemsView
from dlbench.views.telemetry.view import TelemetryView
from dlbench.views.view import GroupSource, GroupView, ReportSource, ReportView, Views
from dlbench.views.waterfall.view import WaterfallView

# Transitional: old-style views behind the new protocol, until each subject is converted.


def _no_sweep(report: Report) -> str:
    return "no series was swept: --sweep KEY=A,B with five repeats or more sets settings side by side."


def _no_quality(group: Group) -> str:
    return (
        "not measured: these runs measure speed. To train to the workload's target, run it on real data with "
        "--to-quality (that is --set measure.until=quality)."
    )


def _no_exchange(group: Group) -> str:
    if group.largest.ranks == 1:
        return "one rank exchanges nothing: add rank counts, for example --ranks 1,2."
    return (
        "not recorded: these runs do not tell what their exchange did; --engine horovod and --engine ddp of this "
        "version do, unless measure.warmup_steps is 0."
    )


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


def _training(titles: tuple[str, ...]) -> Any:
    """Tables of people only of the old training tables, by title."""

    def sheets(group: Group) -> Any:
        return [
            OldSheet(name=title.lower().replace(" ", "-").replace(",", ""), title=title, text=table, caption=caption)
            for title, table, caption in training_tables.sections(group)
            if any(title.startswith(wanted) for wanted in titles)
        ]

    return sheets


_FORECAST = {view.id: view for view in forecast_views.VIEWS}

GROUP_VIEWS: tuple[GroupView, ...] = (
    _Old(
        View(
            id="quality",
            title="Quality",
            place="group",
            is_for=lambda group: group.quality is not None,
            remedy=_no_quality,
            charts=quality_charts,
            sheets=_training(("Quality", "Faster", "Where the time", "Throughput, ep", "What each")),
        ),
        "quality",
        lambda source: training_assemble.quality(source.group, source.table),
    ),
    ScalingView(),
    _Old(
        _FORECAST["outlook"],
        "outlook",
        lambda source: forecast_assemble.outlook(source.group, source.table, is_crowded=source.is_crowded),
    ),
    WaterfallView(),
    CausesView(),
    StragglersView(),
    PartsView(),
    StepsView(),
    RanksView(),
    _Old(
        View(
            id="exchange",
            title="Gradient exchange",
            place="group",
            is_for=lambda group: bool(group.exchange),
            remedy=_no_exchange,
            charts=exchange_charts,
            sheets=_training(("Gradient exchange", "Communication", "Exposed")),
        ),
        "exchange",
        lambda source: exchange_assemble.exchange(source.group),
    ),
    DataPathView(),
    MemoryView(),
    TelemetryView(),
    EnergyView(),
    _Old(
        View(
            id="noise",
            title="Gradient noise scale",
            place="group",
            is_for=lambda group: bool(group.noise),
            remedy=lambda group: "not measured: --set measure.noise_scale=true estimates it, at the cost of speed.",
            sheets=_training(("Gradient noise",)),
        ),
        "noise",
        lambda source: training_assemble.noise(source.group),
    ),
    _Old(
        View(
            id="utilisation",
            title="Utilisation and time to train",
            place="group",
            is_for=lambda group: group.utilisation is not None,
            remedy=lambda group: (
                "not known: these runs do not record the FLOPs of a sample, and their recipe tells no "
                "length of a training; runs of this version of dlbench record the FLOPs."
            ),
            sheets=_training(("Utilisation",)),
        ),
        "utilisation",
        lambda source: training_assemble.utilisation(source.group),
    ),
)

OPENING: tuple[ReportView, ...] = (
    SummaryView(),
    _OldReport(
        View(
            id="sweep",
            title="Settings compared",
            place="opening",
            is_shown=lambda report: bool(report.sweeps),
            report_remedy=_no_sweep,
            report_charts=sweep_charts,
        ),
        "sweeps",
        lambda source: sweep_assemble.sweeps(source.table),
    ),
)
"""Before the groups."""

CLOSING: tuple[ReportView, ...] = (
    SlowNodesView(),
    PrecisionView(),
    DifferencesView(),
    SystemsView(),
    _OldReport(history_view(lambda report: report.history), "history", lambda source: source.history),
    _OldReport(
        View(
            id="layers",
            title="Layers",
            place="closing",
            is_shown=lambda report: bool(report.layers),
            report_remedy=lambda report: "not recorded by these runs; runs of this version of dlbench record them.",
        ),
        "layers",
        lambda source: training_assemble.layer_tables(source.groups),
    ),
    RunsView(),
    WithoutFiguresView(),
    EnvironmentView(),
)
"""After the groups."""

SCALING = Views(opening=OPENING, group=GROUP_VIEWS, closing=CLOSING)
"""The views of the scaling report."""

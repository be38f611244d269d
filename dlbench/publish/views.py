"""The views of the HTML report, in order. A new view is a line here and a template in `reports/views/`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from dlbench.publish import exchange_tables, sweep_tables
from dlbench.publish.charts import Chart
from dlbench.publish.exchange_charts import exchange_charts
from dlbench.publish.model import Group, Report
from dlbench.publish.part_charts import part_charts
from dlbench.publish.quality_charts import quality_charts
from dlbench.publish.scaling_charts import scaling_charts
from dlbench.publish.sweep_charts import sweep_charts


@dataclass(frozen=True, kw_only=True)
class View:
    """One view: about the whole report (before or after the groups), or about each group."""

    id: str
    """Stable: the anchor in the page, and the name of the template `reports/views/<id>.html.j2`."""
    title: str
    place: Literal["opening", "group", "closing"]
    is_shown: Callable[[Report], bool] = lambda report: True
    is_for: Callable[[Group], bool] = lambda group: True
    """Whether a view about groups has anything to say of one."""
    charts: Callable[[Group], list[Chart]] = lambda group: []
    """Charts of a group that the view draws."""
    report_charts: Callable[[Report], list[Chart]] = lambda report: []
    """Charts of the whole report that the view draws."""
    tables: ModuleType | None = None
    """The module whose tables its template prints, beside those that every template has."""


VIEWS: tuple[View, ...] = (
    View(id="summary", title="Summary", place="opening"),
    View(
        id="sweep",
        title="Settings compared",
        place="opening",
        is_shown=lambda report: bool(report.sweeps),
        report_charts=sweep_charts,
        tables=sweep_tables,
    ),
    View(
        id="quality",
        title="Quality",
        place="group",
        is_for=lambda group: group.quality is not None,
        charts=quality_charts,
    ),
    View(id="scaling", title="Scaling", place="group", charts=scaling_charts),
    View(id="parts", title="Where the time goes", place="group", charts=part_charts),
    View(
        id="exchange",
        title="Gradient exchange",
        place="group",
        is_for=lambda group: bool(group.exchange),
        charts=exchange_charts,
        tables=exchange_tables,
    ),
    View(id="noise", title="Gradient noise scale", place="group", is_for=lambda group: bool(group.noise)),
    View(
        id="utilisation",
        title="Utilisation and time to train",
        place="group",
        is_for=lambda group: group.utilisation is not None,
    ),
    View(id="layers", title="Layers", place="closing", is_shown=lambda report: bool(report.layers)),
    View(id="runs", title="Runs", place="closing", is_shown=lambda report: bool(report.runs)),
    View(
        id="without-figures",
        title="Runs without figures",
        place="closing",
        is_shown=lambda report: bool(report.without_figures or report.damaged),
    ),
    View(
        id="environment",
        title="Environment",
        place="closing",
        is_shown=lambda report: report.environment.num_runs > 0,
    ),
    View(id="methods", title="How the numbers are made", place="closing"),
    View(id="missing", title="Not in this report", place="closing"),
)

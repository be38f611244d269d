"""The views of the HTML report, in order. A new view is a line here and a template in `reports/views/`."""

from __future__ import annotations

from dlbench.publish import (
    causes_views,
    exchange_tables,
    machine_views,
    outlook_views,
    runs_views,
    steps_views,
    sweep_tables,
)
from dlbench.publish.exchange_charts import exchange_charts
from dlbench.publish.part_charts import part_charts
from dlbench.publish.quality_charts import quality_charts
from dlbench.publish.scaling_charts import scaling_charts
from dlbench.publish.sweep_charts import sweep_charts
from dlbench.publish.view import View

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
    *outlook_views.VIEWS,
    *causes_views.VIEWS,
    View(id="parts", title="Where the time goes", place="group", charts=part_charts),
    *steps_views.VIEWS,
    View(
        id="exchange",
        title="Gradient exchange",
        place="group",
        is_for=lambda group: bool(group.exchange),
        charts=exchange_charts,
        tables=exchange_tables,
    ),
    *machine_views.VIEWS,
    View(id="noise", title="Gradient noise scale", place="group", is_for=lambda group: bool(group.noise)),
    View(
        id="utilisation",
        title="Utilisation and time to train",
        place="group",
        is_for=lambda group: group.utilisation is not None,
    ),
    *runs_views.VIEWS,
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

"""The views of the HTML report, in order. A new view is a line here and a template in `reports/views/`."""

from __future__ import annotations

from dlbench.history.page.view import history_view
from dlbench.report.model import Group, Report
from dlbench.report.view import View
from dlbench.views.causes import views as causes_views
from dlbench.views.exchange import tables as exchange_tables
from dlbench.views.exchange.charts import exchange_charts
from dlbench.views.forecast import views as forecast_views
from dlbench.views.machine import views as machine_views
from dlbench.views.parts.charts import part_charts
from dlbench.views.precision import views as runs_views
from dlbench.views.quality.charts import quality_charts
from dlbench.views.scaling.charts import scaling_charts
from dlbench.views.steps import views as steps_views
from dlbench.views.sweep import tables as sweep_tables
from dlbench.views.sweep.charts import sweep_charts


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


VIEWS: tuple[View, ...] = (
    View(id="summary", title="Summary", place="opening"),
    View(
        id="sweep",
        title="Settings compared",
        place="opening",
        is_shown=lambda report: bool(report.sweeps),
        report_remedy=_no_sweep,
        report_charts=sweep_charts,
        tables=sweep_tables,
    ),
    View(
        id="quality",
        title="Quality",
        place="group",
        is_for=lambda group: group.quality is not None,
        remedy=_no_quality,
        charts=quality_charts,
    ),
    View(id="scaling", title="Scaling", place="group", charts=scaling_charts),
    *forecast_views.VIEWS,
    *causes_views.VIEWS,
    View(id="parts", title="Where the time goes", place="group", charts=part_charts),
    *steps_views.VIEWS,
    View(
        id="exchange",
        title="Gradient exchange",
        place="group",
        is_for=lambda group: bool(group.exchange),
        remedy=_no_exchange,
        charts=exchange_charts,
        tables=exchange_tables,
    ),
    *machine_views.VIEWS,
    View(
        id="noise",
        title="Gradient noise scale",
        place="group",
        is_for=lambda group: bool(group.noise),
        remedy=lambda group: "not measured: --set measure.noise_scale=true estimates it, at the cost of speed.",
    ),
    View(
        id="utilisation",
        title="Utilisation and time to train",
        place="group",
        is_for=lambda group: group.utilisation is not None,
        remedy=lambda group: (
            "not known: these runs do not record the FLOPs of a sample, and their recipe tells no "
            "length of a training; runs of this version of dlbench record the FLOPs."
        ),
    ),
    *runs_views.VIEWS,
    history_view(lambda report: report.history),
    View(
        id="layers",
        title="Layers",
        place="closing",
        is_shown=lambda report: bool(report.layers),
        report_remedy=lambda report: "not recorded by these runs; runs of this version of dlbench record them.",
    ),
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

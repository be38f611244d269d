"""The view `causes`: the account of the lost percent, and what to try next."""

from __future__ import annotations

from dlbench.reading.hosts.core_load import LOAD_CODES
from dlbench.report.document import Section
from dlbench.specs.collectives.network import NetworkModel
from dlbench.views.causes.charts import account_charts
from dlbench.views.causes.numbers import LostPercent, lost_percent
from dlbench.views.causes.tables import account_sheet, experiment_sheet
from dlbench.views.causes.words import findings, remarks
from dlbench.views.model import Group
from dlbench.views.view import GroupSource, GroupView

MOST_ALONE = 2
"""Rank counts up to which the waterfall is the only chart."""

VARIANT = (
    "not shown: in these runs something was taken away on purpose; the plain runs beside them have this view, and "
    "dlbench diagnose says what the difference is."
)
"""Why a group has no causes."""


class CausesView(GroupView):
    """Where the time of a step goes, and what is lost to it."""

    id = "causes"
    title = "Where the time goes"
    level = "answer"
    key = "causes"

    def __init__(self, network: NetworkModel | None = None) -> None:
        """The view; with fitted costs of the network it forecasts what other exchanges would give."""
        self.network = network

    def numbers(self, source: GroupSource) -> LostPercent | None:
        """The account of each rank count, and who was waited for."""
        return lost_percent(source.group, source.table, self.network)

    def section(self, group: Group) -> Section | None:
        """The waterfall, one table, and experiments."""
        found = group.of(LostPercent)
        if found is None:
            return None
        points = found.diagnosed.points
        experiments = experiment_sheet(points)
        is_loaded = any(doubt.code in LOAD_CODES for doubt in group.doubts)
        return Section(
            id=self.id,
            title=self.title,
            caption=f"{group.parts_caption}.",
            words=tuple(findings(found.diagnosed, is_loaded=is_loaded)),
            charts=lambda: account_charts(group, points),
            charts_per_row=2 if len(points) > MOST_ALONE else 1,
            sheets=(account_sheet(points), *((experiments,) if experiments.rows else ())),
            notes=tuple(remarks(found.diagnosed)),
            where={
                "sample_unit": group.sample_unit,
                "scaling": group.scaling,
                "baseline_ranks": group.baseline.ranks,
            },
        )

    def remedy(self, group: Group) -> str:
        """Why runs with something taken away have none."""
        return VARIANT

"""The view `waterfall`: efficiency as a product of factors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dlbench.report.document import Section
from dlbench.report.wording import figure_text, percent, place_text
from dlbench.views.causes.numbers import LostPercent
from dlbench.views.causes.view import VARIANT
from dlbench.views.model import Group
from dlbench.views.rerun import rerun
from dlbench.views.view import GroupView
from dlbench.views.waterfall.charts import waterfall_charts
from dlbench.views.waterfall.numbers import FactoredPoint
from dlbench.views.waterfall.tables import FACTOR_TITLES, factor_sheet, own_sheet


class WaterfallView(GroupView):
    """What each factor alone keeps of the ideal."""

    id = "waterfall"
    title = "Efficiency, factor by factor"
    level = "answer"

    def section(self, group: Group) -> Section | None:
        """Factors against the baseline, and each rank count's own efficiencies."""
        lost = group.of(LostPercent)
        found = [point for point in lost.waterfall if point.factors] if lost else []
        if lost is None or len(lost.waterfall) == 1 or not found:
            return None
        has_others = any(not point.is_baseline for point in found)
        return Section(
            id=self.id,
            title=self.title,
            caption=f"{group.parts_caption}.",
            words=tuple(_words(found)),
            charts=lambda: waterfall_charts(group, lost.waterfall[-1]),
            sheets=(*((factor_sheet(found),) if has_others else ()), own_sheet(found)),
        )

    def remedy(self, group: Group) -> str:
        """A second rank count, or runs that compute."""
        found = group.of(LostPercent)
        if found is None:
            return VARIANT
        if len(found.waterfall) == 1:
            ranks = group.baseline.ranks
            return f"one rank count only: {rerun(group, f'--ranks {ranks},{2 * ranks} --repeats 5')} adds another."
        return "not known: these runs computed nothing, and factors need a step that computes."


def _words(found: Sequence[FactoredPoint]) -> Iterator[str]:
    """The product at each rank count but the baseline, the largest first."""
    for point in reversed(found):
        if point.is_baseline:
            continue
        product = " x ".join(f"{FACTOR_TITLES[one.name]} {percent(one.relative.value)}" for one in point.factors)
        least = min(point.factors, key=lambda one: one.relative.value)
        text = f"{place_text(point.ranks, point.nodes)}: {product} = {figure_text(point.efficiency)} of the ideal"
        more = f"; the smallest factor is {FACTOR_TITLES[least.name]}" if least.relative.value < 1 else ""
        yield f"{text}{more}."

"""The view `exchange`: what the gradient exchange did, what of it was exposed, and how little must be."""

from __future__ import annotations

from dlbench.report.document import Section
from dlbench.report.wording import place_text
from dlbench.views.exchange.charts import exchange_charts
from dlbench.views.exchange.numbers import ExchangePoint, exchange_points
from dlbench.views.exchange.tables import predicted, times, ways_text, what_ran
from dlbench.views.model import Group
from dlbench.views.view import GroupSource, GroupView


class ExchangeView(GroupView):
    """Messages, their times, and the overlap with the backward pass."""

    id = "exchange"
    title = "Gradient exchange"
    key = "exchange"

    def numbers(self, source: GroupSource) -> tuple[ExchangePoint, ...]:
        """Points whose runs record their exchange."""
        return exchange_points(source.group, source.table)

    def section(self, group: Group) -> Section | None:
        """What ran, what it took, what would be possible."""
        points = group.all_of(ExchangePoint)
        if not points:
            return None
        places = [f"At {place_text(point.ranks, point.nodes)}" for point in points]
        ran = [f"{place}: {ways_text(point)}." for place, point in zip(places, points, strict=True)]
        why = [
            f"{place}, model of the best merging: {point.why}."
            for place, point in zip(places, points, strict=True)
            if point.prediction is None
        ]
        contradictions = [
            f"{place}: {point.prediction.contradiction}."
            for place, point in zip(places, points, strict=True)
            if point.prediction is not None and point.prediction.contradiction
        ]
        return Section(
            id=self.id,
            title=self.title,
            notes=(*contradictions, *_cores(points)),
            caption=f"{group.caption}. In brackets: the interval.",
            charts=lambda: exchange_charts(group, points),
            charts_per_row=1,
            sheets=(what_ran(points), times(points), predicted(points)),
            brief=(*ran, *why, *contradictions),
        )

    def remedy(self, group: Group) -> str:
        """More ranks, or another engine."""
        if group.largest.ranks == 1:
            return "one rank exchanges nothing: add rank counts, for example --ranks 1,2."
        return (
            "not recorded: these runs do not say what their exchange did; runs of this version with --engine horovod "
            "or --engine ddp do, unless measure.warmup_steps is 0."
        )


def _cores(points: tuple[ExchangePoint, ...]) -> list[str]:
    """What communication takes from the cores, of the point with most ranks that has a model."""
    known = [point for point in points if point.prediction is not None and point.cores]
    return [f"At {place_text(point.ranks, point.nodes)}, {point.cores}." for point in known[-1:]]

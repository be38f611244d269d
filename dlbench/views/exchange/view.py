"""The view `exchange`: what the gradient exchange did, how long its messages took, and how little they could take."""

from __future__ import annotations

from dlbench.report.document import Section
from dlbench.report.wording import place_text, value_text
from dlbench.views.exchange.charts import exchange_charts
from dlbench.views.exchange.numbers import ExchangePoint, exchange_points
from dlbench.views.exchange.tables import times, ways_text, what_ran
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
        """What its messages took and could take, and what ran."""
        points = group.all_of(ExchangePoint)
        if not points:
            return None
        places = [f"At {place_text(point.ranks, point.nodes)}" for point in points]
        ran = [f"{place}: {ways_text(point)}." for place, point in zip(places, points, strict=True)]
        why = [
            f"{place}: {point.why}."
            for place, point in zip(places, points, strict=True)
            if point.prediction is None and point.why
        ]
        return Section(
            id=self.id,
            title=self.title,
            headline=_headline(points[-1]),
            notes=(*why, *_cores(points)),
            caption=f"{group.caption}. In brackets: the interval.",
            charts=lambda: exchange_charts(group, points),
            charts_per_row=1,
            sheets=(times(points), what_ran(points)),
            brief=(*ran, *why),
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
    """What messages take from the cores, of the point with most ranks that tells."""
    known = [point for point in points if point.cores]
    return [f"At {place_text(point.ranks, point.nodes)}, {point.cores}." for point in known[-1:]]


def _headline(point: ExchangePoint) -> str:
    """How long messages are under way, and how much of it the backward pass hides."""
    if point.communication is None or point.hidden is None:
        return f"{len(point.run_ids)} runs say what ran, and not how long"
    took, hidden = value_text(point.communication), value_text(point.hidden)
    return f"Messages take {took} per step at {place_text(point.ranks, point.nodes)}, {hidden} of it during backward"

"""The view `summary`: a card for each group with its headline, its verdict and the next step."""

from __future__ import annotations

from dlbench.report.document import Card, Section
from dlbench.report.wording import basis_text, interval_text, place_text, value_text
from dlbench.stats.estimates import Estimate
from dlbench.views.forecast.numbers import Forecast
from dlbench.views.model import Group, Report
from dlbench.views.quality.numbers import Quality
from dlbench.views.view import ReportView

_CHIPS = ("preset", "engine", "precision", "data", "batch_per_rank", "global_batch")


class SummaryView(ReportView):
    """What the report says, at a glance."""

    id = "summary"
    title = "Summary"
    level = "answer"

    def sections(self, report: Report) -> tuple[Section, ...]:
        """One section of cards."""
        words: tuple[str, ...] = ()
        if not report.groups:
            more = "Below, each run with the reason." if report.runs else "There are no runs here."
            words = (f"No run has figures. {more}",)
        return (
            Section(
                id=self.id,
                title=self.title,
                words=words,
                cards=tuple(map(_card, report.groups)),
                brief=("No run has figures.",) if not report.groups else (),
            ),
        )


def _card(group: Group) -> Card:
    big, small = _headline(group)
    serious = tuple(doubt.text for doubt in group.doubts if doubt.severity == "serious")
    forecast = group.of(Forecast)
    chips = [
        (f"{one.title.lower()}: {one.value}", one.name == "data" and one.value == "synthetic")
        for one in group.conditions
        if one.name in _CHIPS
    ]
    if forecast and forecast.forecasts:
        chips.append((f"forecast to {forecast.forecasts[-1].ranks} ranks, not measured", False))
    return Card(
        title=group.label,
        link=f"group-{group.id}",
        big=big,
        small=small,
        chips=tuple(chips),
        words=(group.verdict,),
        next_step=group.next_step,
        warnings=serious,
        warnings_link=f"marks-group-{group.id}",
        is_clear=True,
        note=f"{group.notice}.",
    )


def _headline(group: Group) -> tuple[str, tuple[str, ...]]:
    """The one number, and what it is."""
    quality = group.of(Quality)
    if quality is not None:
        return quality.headline[0], (quality.headline[1],)
    last = group.largest
    place = place_text(last.ranks, last.nodes)
    if len(group.points) > 1:
        return value_text(last.efficiency), (f"of the ideal at {place}", *_interval(last.efficiency))
    return value_text(last.throughput), (f"{last.throughput.unit} at {place}", *_interval(last.throughput))


def _interval(estimate: Estimate) -> tuple[str, ...]:
    return tuple(text for text in (interval_text(estimate), basis_text(estimate)) if text)

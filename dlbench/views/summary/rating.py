"""Whether a group's efficiency is good: against a model, a published figure, or the history of the same runs."""

from __future__ import annotations

from typing import Literal

from dlbench.history.page.report import TrendsReport
from dlbench.history.page.words import percent_change, since_text
from dlbench.history.trends.change_points import MIN_NIGHTS
from dlbench.history.trends.series import Trend
from dlbench.reading.scaling import Point
from dlbench.report.document import Rating
from dlbench.report.wording import percent, ranks_text, runs_text
from dlbench.stats.verdicts import placed
from dlbench.views.causes.diagnosis import WORTH_EXPLAINING
from dlbench.views.exchange.numbers import ExchangePoint
from dlbench.views.forecast.numbers import Forecast
from dlbench.views.model import Group, Report

STEP = "step_median_s"
"""The metric of the history that says most of a group's speed."""


def rating(group: Group, report: Report) -> Rating:
    """How good the efficiency at the largest point is, against the first reference that there is.

    References in order: what the exchange model leaves attainable, a published figure of the same work, the usual range
    of the same point in the history of the report.
    """
    last = group.largest
    if len(group.points) > 1:
        for text, reference in _references(group, last):
            return _against(last, reference, text)
    trend = _trend(report, group.id, last)
    if trend is not None:
        return _usual(trend)
    if len(group.points) == 1:
        return Rating(tone="unknown", text="no reference (run more rank counts)")
    return Rating(tone="unknown", text="no reference (make one: dlbench history)")


def _references(group: Group, last: Point) -> list[tuple[str, float]]:
    """References for a point: what they are, and their efficiency (fraction)."""
    found = [
        ("against the exchange model's bound of", one.prediction.efficiency.value)
        for one in group.all_of(ExchangePoint)
        if (one.ranks, one.nodes) == (last.ranks, last.nodes) and one.prediction is not None
    ]
    forecast = group.of(Forecast)
    same_work = forecast.same_work if forecast else ()
    published = [(f"against the published efficiency at {ranks_text(one.ranks)},", one.efficiency) for one in same_work]
    return [*found, *published]


def _against(point: Point, reference: float, text: str) -> Rating:
    """By the interval where it decides, else by the value, which is said; a loss not worth explaining is none."""
    least = reference - WORTH_EXPLAINING
    where = placed(point.efficiency, least, max(1.0, reference))
    if where == "insufficient":
        few = runs_text(point.efficiency.n)
        return Rating(tone="unknown", text=f"not rated ({few} only) {text} {percent(reference)}")
    is_good = where in ("within", "above") or (where != "below" and point.efficiency.value >= least)
    word: Literal["good", "low"] = "good" if is_good else "low"
    doubt = " (within the noise)" if where == "undecided" else ""
    return Rating(tone=word, text=f"{word}{doubt} {text} {percent(reference)}")


def _trend(report: Report, group: str, point: Point) -> Trend | None:
    """The series of step times of a point, if it has an earlier night to compare with."""
    history = report.of(TrendsReport)
    wanted = (group, point.ranks, point.nodes, STEP)
    for trend in history.series if history else ():
        if (trend.group, trend.ranks, trend.nodes, trend.metric) == wanted and len(trend.nights) > 1:
            return trend
    return None


def _usual(trend: Trend) -> Rating:
    """By `Trend.standing`, by which `dlbench history trends --fail-on-regression` goes, too."""
    nights = len(trend.nights)
    newest = trend.newest
    if trend.standing == "too few nights":
        return Rating(tone="unknown", text=f"unknown: {nights} of the {MIN_NIGHTS} nights that tell what is usual")
    if trend.standing == "worse":
        change = trend.open_regressions[-1]
        text = f"slower: step {percent_change(change.ratio.value)} {since_text(change)}, not acknowledged"
        return Rating(tone="low", text=text)
    if trend.standing == "odd" and newest is not None:
        which = "newest night" if newest.num_beyond == 1 else f"newest {newest.num_beyond} nights"
        text = f"unknown: {which} {newest.ratio:.2f}x the usual step; {newest.wait_for} more decide"
        return Rating(tone="unknown", text=text)
    known = next((one for one in reversed(trend.changes) if one.acknowledged), None)
    since = f"; {percent_change(known.ratio.value)} {since_text(known)}, acknowledged" if known else ""
    return Rating(tone="good", text=f"{'as' if newest is None else 'faster than'} usual in {nights} nights{since}")

"""Scaling laws, published anchors and forecasts of a group become part of the `Report`; none of them is measured."""

from __future__ import annotations

from dlbench.reading.run_table import RunTable
from dlbench.reading.scaling import Group
from dlbench.report.wording import clean, ranks_text
from dlbench.stats.figure import figure_of, optional_figure_of
from dlbench.views.forecast import anchors, laws, model

FORMULAS = {
    "Amdahl": "S = 1 / (f + (1 - f) / k)",
    "Gustafson": "S = k - f (k - 1)",
}

GROWING = 1.2
"""The serial fraction of the largest point over that of the smallest, from which it is said to grow."""


def outlook(group: Group, table: RunTable, *, is_crowded: bool = False) -> model.Outlook | None:
    """Fits, anchors and forecasts; None for a group of one point, which scales against nothing.

    Args:
        group: comparable runs.
        table: all runs.
        is_crowded: whether ranks shared cores: such points say nothing of a machine with more ranks.
    """
    if len(group.points) == 1:
        return None
    law = laws.law_of(group, table)
    forecasts = () if law is None or is_crowded else laws.forecasts(group, law)
    known = anchors.beside(group.sample)
    return model.Outlook(
        law=None if law is None else _law(law, group),
        why_no_law="" if law else _why_no_law(group),
        forecasts=tuple(
            model.Forecast(
                ranks=one.ranks,
                efficiency=one.efficiency,
                low=one.low,
                high=one.high,
                throughput=one.throughput,
                throughput_low=one.throughput_low,
                throughput_high=one.throughput_high,
            )
            for one in forecasts
        ),
        why_no_forecast="" if forecasts else _why_no_forecast(law, is_crowded),
        anchors=tuple(map(_anchor, known)),
        why_no_anchor="" if any(not one.differences for one in known) else _why_no_anchor(known),
        notes=_notes(group, law) if forecasts else (),
    )


def _law(law: laws.Law, group: Group) -> model.Law:
    alone = {(point.ranks, point.nodes): point.serial_fraction for point in group.points}
    return model.Law(
        name=law.name,
        formula=FORMULAS[law.name],
        fraction=figure_of(law.fraction, "fraction"),
        worst_residual=law.worst_residual,
        hindcast_ranks=None if law.hindcast is None else law.hindcast.ranks,
        hindcast_error=None if law.hindcast is None else law.hindcast.error,
        doubt=laws.doubts_of(law),
        points=tuple(
            model.LawPoint(
                ranks=point.ranks,
                nodes=point.nodes,
                measured=figure_of(point.efficiency, "fraction"),
                fitted=point.fitted,
                residual=point.residual,
                serial_fraction=optional_figure_of(alone[point.ranks, point.nodes], "fraction"),
            )
            for point in law.points
        ),
    )


def _why_no_law(group: Group) -> str:
    counts = sorted({point.ranks for point in group.points})
    more = ",".join(map(str, [*counts, counts[-1] * 2, counts[-1] * 4][: max(laws.MIN_POINTS, len(counts) + 1)]))
    return (
        f"No law is fitted: {len(counts)} rank count{'s' * (len(counts) > 1)} measured, and a law needs "
        f"{laws.MIN_POINTS} before the points can contradict it; run the same workload with --ranks {more}."
    )


def _why_no_forecast(law: laws.Law | None, is_crowded: bool) -> str:
    if law is None:
        return "Nothing is extrapolated without a law."
    if is_crowded:
        return "Nothing is extrapolated: ranks shared cores, which more ranks on more cores would not."
    return f"Nothing is extrapolated: {laws.doubts_of(law)}."


def _notes(group: Group, law: laws.Law | None) -> tuple[str, ...]:
    notes = []
    if group.points[-1].nodes == 1:
        notes.append("All points were measured on one node: what a network between nodes costs is not in the law.")
    alone = [point.serial_fraction for point in group.points[1:]]
    first, last = alone[0], alone[-1]
    if first is not None and last is not None and first.value > 0 and last.value > GROWING * first.value:
        notes.append(
            "The serial fraction grows with the ranks: overhead grows too, and the law, which holds it constant, "
            "promises too much."
        )
    if law is not None and law.fraction.kind == "single run":
        notes.append("Single runs: the interval shows only how far the law missed the measured points.")
    return tuple(notes)


def _anchor(found: anchors.Beside) -> model.Anchor:
    anchor = found.anchor
    return model.Anchor(
        title=anchor.title,
        efficiency=anchor.efficiency,
        ranks=anchor.ranks,
        baseline=anchor.baseline,
        hardware=anchor.hardware,
        recipe=anchor.recipe,
        source=anchor.source,
        address=anchor.address,
        differences=tuple(
            f"{one.what} {clean(one.theirs, 80)} there, {clean(one.ours, 80)} here" for one in found.differences
        ),
    )


def _why_no_anchor(known: tuple[anchors.Beside, ...]) -> str:
    if not known:
        return "No published scaling efficiency of this kind of network is on file, so there is no reference line."
    nearest = min(known, key=lambda one: len(one.differences))
    what = ", ".join(clean(difference.what, 80) for difference in nearest.differences)
    return (
        f"No published figure is drawn, because none is of the same work; the nearest is {nearest.anchor.title} "
        f"({nearest.anchor.efficiency * 100:.1f} % at {ranks_text(nearest.anchor.ranks)}), which differs in {what}."
    )

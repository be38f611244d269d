"""Tables of the lost percent: seconds and lost points by cause, and what to try; see `view.Sheet`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from dlbench.report.model import Group
from dlbench.report.tabular import Table
from dlbench.report.view import Sheet
from dlbench.report.wording import DASH, basis_text, figure_text, lost_text, percent
from dlbench.stats.estimates import Estimate
from dlbench.stats.figure import Cell, figure_columns
from dlbench.views.causes.diagnosis import gain_text
from dlbench.views.causes.numbers import CauseAccount, CausePoint, CauseShare, GroupCauses
from dlbench.views.causes.words import CAUSE_TITLES, NOT_MEASURED, place
from dlbench.views.waterfall.numbers import FactoredPoint

WHERE = ("group", "label", "ranks", "nodes", "is_baseline")
"""Columns that say of which rank count of which group a row is."""

_ENDS = ("", "_low", "_high")


def account_of(group: Group) -> CauseAccount:
    """Of a group that has one."""
    assert group.causes is not None
    return group.causes


def where(group: Group, point: FactoredPoint | CausePoint) -> dict[str, Cell]:
    """The columns `WHERE` of a row."""
    return {
        "group": group.id,
        "label": group.label,
        "ranks": point.ranks,
        "nodes": point.nodes,
        "is_baseline": point.is_baseline,
    }


def bases(figures: Iterable[tuple[CausePoint, Estimate]]) -> str:
    """What the intervals of a table are, each kind once, with the places where they are not all alike."""
    places: dict[str, list[str]] = {}
    for point, figure in figures:
        places.setdefault(basis_text(figure), []).append(place(point))
    if len(places) == 1:
        return next(iter(places))
    return "; ".join(f"{basis} ({', '.join(where)})" for basis, where in places.items())


def seconds(group: GroupCauses) -> Table:
    """Seconds a step of each cause, a column a point; the last line is the sum."""
    rows: Table = [("cause", *map(place, group.points))]
    for index, share in enumerate(group.points[0].causes):
        rows.append((CAUSE_TITLES[share.name], *(_time(point.causes[index]) for point in group.points)))
    rows.append(("sum: mean step", *(figure_text(point.whole.seconds) for point in group.points)))
    return rows


def _time(share: CauseShare) -> str:
    return figure_text(share.seconds) if share.is_measured else NOT_MEASURED


def lost(group: GroupCauses) -> Table:
    """Points of the ideal lost to each cause, a column for each point but the baseline."""
    others = group.points[1:]
    rows: Table = [("cause", *map(place, others))]
    for index, share in enumerate(group.points[0].causes):
        rows.append((CAUSE_TITLES[share.name], *(_lost(point.causes[index]) for point in others)))
    rows.append(("sum: lost", *(lost_text(point.whole.lost) for point in others)))
    rows.append(("efficiency (of means)", *(percent(1 - point.whole.lost.value) for point in others)))
    return rows


def _lost(share: CauseShare) -> str:
    return lost_text(share.lost) if share.is_measured else NOT_MEASURED


def cause_sheets(group: Group) -> list[Sheet]:
    """Lost points and seconds by cause, and what to try."""
    found = account_of(group).diagnosed
    intervals = bases([(point, point.whole.seconds) for point in found.points])
    made = [
        Sheet(
            name="cause-seconds",
            title="Mean step by cause",
            text=seconds(found),
            caption=f"{group.parts_caption}. Intervals: {intervals}. The causes sum to the mean step.",
        )
    ]
    if len(found.points) > 1:
        made.insert(0, _lost_sheet(group, bases([(point, point.whole.lost) for point in found.points[1:]])))
    else:
        made = [_with_rows(group, made[0])]
    if any(point.verdict.experiments for point in found.points):
        made.append(_experiments(group))
    return made


def _with_rows(group: Group, sheet: Sheet) -> Sheet:
    """A single rank count has no lost points, but its causes are for programs too."""
    return Sheet(
        name="causes",
        title=sheet.title,
        text=sheet.text,
        caption=sheet.caption,
        columns=_CAUSE_COLUMNS,
        rows=tuple(_cause_rows(group)),
    )


def _lost_sheet(group: Group, intervals: str) -> Sheet:
    return Sheet(
        name="causes",
        title="Points of the ideal lost to each cause",
        text=lost(account_of(group).diagnosed),
        caption=f"{group.parts_caption}. Intervals: {intervals}. Causes sum to the loss, 100 % - efficiency of means.",
        columns=_CAUSE_COLUMNS,
        rows=tuple(_cause_rows(group)),
    )


_CAUSE_COLUMNS = (
    *(*WHERE, "cause", "is_measured", "why_not_measured"),
    *(f"seconds{end}" for end in _ENDS),
    *("ideal_seconds", *(f"lost_fraction{end}" for end in _ENDS)),
    *("runs", "seconds_interval", "lost_interval", "remarks"),
)


def _cause_rows(group: Group) -> Iterator[Mapping[str, Cell]]:
    for point in account_of(group).diagnosed.points:
        for share in (*point.causes, point.whole):
            yield {**where(group, point), **_share_columns(share)}


def _share_columns(share: CauseShare) -> dict[str, Cell]:
    known = share.is_measured
    return {
        "cause": share.name,
        "is_measured": known,
        "why_not_measured": " | ".join(share.not_measured),
        **figure_columns("seconds", share.seconds if known else None),
        "ideal_seconds": share.ideal_seconds if known else None,
        **figure_columns("lost_fraction", share.lost if known else None),
        "runs": share.seconds.n,
        "seconds_interval": share.seconds.kind,
        "lost_interval": share.lost.kind,
        "remarks": " | ".join(share.notes),
    }


def _experiments(group: Group) -> Sheet:
    found = account_of(group).diagnosed
    told = [one for point in found.points for one in point.verdict.experiments]
    is_forecast = any(one.forecast_gain is not None or one.basis for one in told)
    more = ("Forecast (nothing measured)", "Forecast from, or why there is none")
    text: Table = [("At", "Found", "To try", *(more if is_forecast else ()))]
    rows: list[Mapping[str, Cell]] = []
    for point in found.points:
        for one in point.verdict.experiments:
            gain = DASH if one.forecast_gain is None else f"forecast {gain_text(one.forecast_gain)}"
            cells = (gain, one.basis or DASH) if is_forecast else ()
            text.append((place(point), point.verdict.name, one.text, *cells))
            rows.append(
                {
                    **where(group, point),
                    "finding": point.verdict.name,
                    "cause": point.verdict.cause,
                    "experiment": one.text,
                    "forecast_throughput_gain_fraction": one.forecast_gain,
                    "forecast_basis": one.basis,
                    "limit_throughput_gain_fraction": point.verdict.bound,
                }
            )
    return Sheet(
        name="experiments",
        title="What to try next",
        text=text,
        caption=(
            "Nothing here is measured. A forecast needs fitted costs of the network: dlbench diagnose RUNS --network "
            "FILE; without them only the limit above is known, the gain if all of a cause's time were gone."
        ),
        columns=(
            *(*WHERE, "finding", "cause", "experiment", "forecast_throughput_gain_fraction", "forecast_basis"),
            "limit_throughput_gain_fraction",
        ),
        rows=tuple(rows),
    )

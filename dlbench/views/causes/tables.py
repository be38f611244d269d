"""Tables on the lost percent: factors, causes, experiments; see `view.Sheet`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dlbench.report.model import Group
from dlbench.report.tabular import Table
from dlbench.report.view import Sheet
from dlbench.report.wording import DASH, basis_text, figure_text, place_text
from dlbench.stats.figure import Cell, figure_columns
from dlbench.views.causes import diagnosis_tables
from dlbench.views.causes.diagnosis_model import CauseShare, DiagnosedPoint
from dlbench.views.causes.diagnosis_tables import bases, place
from dlbench.views.causes.diagnosis_words import gain_text
from dlbench.views.causes.model import CauseAccount, FactoredPoint

FACTOR_TITLES = {
    "balance": "load balance",
    "communication": "exposed communication",
    "input": "input",
    "compute": "compute scaling",
    "host": "host between phases",
}
"""What the factors of the efficiency are called, in order."""

HOW_FACTORS_DIFFER = (
    "Factors multiply, causes add: a factor divides by what is left of the step without the factors before it, a "
    "cause's points by the whole step. The product of the factors and 100 % less the causes' sum are the same "
    "efficiency, of means."
)

_INPUT = "Input: waiting for it, and its copy to the device."

WHERE = ("group", "label", "ranks", "nodes", "is_baseline")
"""Columns that say of which rank count of which group a row is."""

_ENDS = ("", "_low", "_high")


def account_of(group: Group) -> CauseAccount:
    """Of a group that has one."""
    assert group.causes is not None
    return group.causes


def where(group: Group, point: FactoredPoint | DiagnosedPoint) -> dict[str, Cell]:
    """The columns `WHERE` of a row."""
    return {
        "group": group.id,
        "label": group.label,
        "ranks": point.ranks,
        "nodes": point.nodes,
        "is_baseline": point.is_baseline,
    }


# Factors


def waterfall_sheets(group: Group) -> list[Sheet]:
    """Factors against the baseline, and each rank count's own efficiencies."""
    found = [point for point in account_of(group).waterfall if point.factors]
    others = [point for point in found if not point.is_baseline]
    own = Sheet(
        name="own-efficiencies",
        title="Each rank count by itself",
        text=_own(found),
        caption=(
            f"{group.parts_caption}. Shares of the step: load balance = (step without exchange and waiting for late "
            "ranks) / (step without exchange); exposed communication = (step without exchange) / step; parallel "
            "efficiency is their product (POP). Input (waiting for it, and its copy to the device) and host: the same "
            "form, one after the other."
        ),
    )
    if not others:
        return [own] if found else []
    intervals = "; ".join(dict.fromkeys(basis_text(point.efficiency) for point in others))
    return [
        Sheet(
            name="waterfall",
            title="Factors against the baseline",
            text=factors(others),
            caption=f"{group.parts_caption}. Intervals: {intervals}. {_INPUT} {HOW_FACTORS_DIFFER}",
            columns=(
                *(*WHERE, "factor", "position"),
                *(f"{name}{end}" for name in ("own_fraction", "relative_fraction") for end in _ENDS),
                *("level_fraction", "step_fraction", "runs", "relative_interval"),
                *(f"efficiency_of_means_fraction{end}" for end in _ENDS),
            ),
            rows=tuple(_factor_rows(group, found)),
        ),
        own,
    ]


def factors(points: list[FactoredPoint]) -> Table:
    """Factors against the baseline, a column a point; the last line is their product."""
    rows: Table = [("Factor", *(place_text(point.ranks, point.nodes) for point in points))]
    for index, factor in enumerate(points[0].factors):
        rows.append((FACTOR_TITLES[factor.name], *(figure_text(point.factors[index].relative) for point in points)))
    rows.append(("product: efficiency (of means)", *(figure_text(point.efficiency) for point in points)))
    return rows


def _own(points: list[FactoredPoint]) -> Table:
    rows: Table = [("Own efficiency", *(place_text(point.ranks, point.nodes) for point in points))]
    for index, factor in enumerate(points[0].factors if points else ()):
        cells = [point.factors[index].own for point in points]
        if factor.own is not None:
            rows.append((FACTOR_TITLES[factor.name], *(DASH if own is None else figure_text(own) for own in cells)))
        if factor.name == "communication":
            parallel = [DASH if point.parallel is None else figure_text(point.parallel) for point in points]
            rows.append(("of it parallel efficiency: load balance x communication", *parallel))
    return rows


def _factor_rows(group: Group, points: list[FactoredPoint]) -> Iterator[Mapping[str, Cell]]:
    for point in points:
        for position, factor in enumerate(point.factors, start=1):
            yield {
                **where(group, point),
                "factor": factor.name,
                "position": position,
                **figure_columns("own_fraction", factor.own),
                **figure_columns("relative_fraction", factor.relative),
                "level_fraction": factor.level,
                "step_fraction": factor.step,
                "runs": factor.relative.n,
                "relative_interval": factor.relative.kind,
                **figure_columns("efficiency_of_means_fraction", point.efficiency),
            }


# Causes


def cause_sheets(group: Group) -> list[Sheet]:
    """Lost points and seconds by cause, and what to try."""
    found = account_of(group).diagnosed
    seconds = bases([(point, point.whole.seconds) for point in found.points])
    made = [
        Sheet(
            name="cause-seconds",
            title="Mean step by cause",
            text=diagnosis_tables.seconds(found),
            caption=f"{group.parts_caption}. Intervals: {seconds}. The causes sum to the mean step.",
        )
    ]
    if len(found.points) > 1:
        lost = bases([(point, point.whole.lost) for point in found.points[1:]])
        made.insert(0, _lost_sheet(group, lost))
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
        text=diagnosis_tables.lost(account_of(group).diagnosed),
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

"""Tables of the factors of efficiency; see `view.Sheet`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dlbench.report.model import Group
from dlbench.report.tabular import Table
from dlbench.report.view import Sheet
from dlbench.report.wording import DASH, basis_text, figure_text, place_text
from dlbench.stats.figure import Cell, figure_columns
from dlbench.views.causes.tables import WHERE, account_of, where
from dlbench.views.waterfall.numbers import FactoredPoint

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

_ENDS = ("", "_low", "_high")


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

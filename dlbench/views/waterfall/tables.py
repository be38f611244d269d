"""Tables of the factors of efficiency: against the baseline, and each rank count by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.report.table import Column, Pivot, RowKind, Sheet
from dlbench.report.wording import basis_text, percent, place_text, points
from dlbench.stats.estimates import Estimate
from dlbench.views.waterfall.numbers import Factor, FactoredPoint

FACTOR_TITLES = {
    "late_ranks": "late ranks",
    "communication": "exposed communication",
    "input": "input",
    "compute": "compute scaling",
    "host": "host between phases",
}
"""What the factors of the efficiency are called, in order."""

HOW_FACTORS_DIFFER = (
    "Factors multiply, causes add: a factor divides by what is left of the step without the factors before it, a "
    "cause's points by the whole step. The product of the factors is the efficiency of geometric means, 100 % "
    "less the causes' sum that of arithmetic means: the same but for the square of the runs' scatter."
)


@dataclass(frozen=True)
class _Row:
    """A factor at one rank count; without a factor their product, for people only."""

    point: FactoredPoint
    factor: Factor | None
    position: int = 0

    @property
    def relative(self) -> Estimate:
        return self.point.efficiency if self.factor is None else self.factor.relative

    @property
    def title(self) -> str:
        return "product: efficiency (of means)" if self.factor is None else FACTOR_TITLES[self.factor.name]


def factor_sheet(found: Sequence[FactoredPoint]) -> Sheet[_Row]:
    """Factors against the baseline; for people a column for each rank count beside it, and their product."""
    others = [point for point in found if not point.is_baseline]
    columns: tuple[Column[_Row], ...] = (
        Column("ranks", "", lambda row: row.point.ranks),
        Column("nodes", "", lambda row: row.point.nodes),
        Column("is_baseline", "", lambda row: row.point.is_baseline),
        Column("factor", "", lambda row: row.factor.name if row.factor else ""),
        Column("position", "", lambda row: row.position),
        Column("own_fraction", "", lambda row: row.factor.own if row.factor else None, has_interval=True),
        Column("relative_fraction", "", lambda row: row.relative, has_interval=True),
        Column("level_fraction", "", lambda row: row.factor.level if row.factor else None),
        Column("step_fraction", "", lambda row: row.factor.step if row.factor else None),
        Column("runs", "", lambda row: row.relative.n),
        Column("relative_interval", "", lambda row: row.relative.kind),
        Column("efficiency_of_means_fraction", "", lambda row: row.point.efficiency, has_interval=True),
    )
    intervals = "; ".join(dict.fromkeys(basis_text(point.efficiency) for point in others))
    return Sheet(
        name="waterfall",
        title="Factors against the baseline",
        columns=columns,
        rows=[row for point in found for row in _rows(point)],
        pivot=Pivot(corner="Factor", down=lambda row: row.title, across=_place, cell=lambda row: row.relative),
        is_data=lambda row: row.factor is not None,
        is_shown=lambda row: not row.point.is_baseline,
        kind=_kind,
        caption=(f"Intervals: {intervals}. Input: waiting for it, and its copy to the device. {HOW_FACTORS_DIFFER}"),
    )


def stairs_sheet(point: FactoredPoint) -> Sheet[_Row]:
    """One rank count with what each factor takes off the ideal, and what is left."""
    columns: tuple[Column[_Row], ...] = (
        Column("", "Factor", lambda row: row.title),
        Column("", place_text(point.ranks, point.nodes), lambda row: row.relative),
        Column("", "Taken off", lambda row: change_text(row.factor.step if row.factor else 1 - row.relative.value)),
        Column("", "Left", lambda row: percent(row.factor.level if row.factor else row.relative.value)),
    )
    return Sheet(name="waterfall-chart", title="Factors", columns=columns, rows=_rows(point), kind=_kind)


def change_text(step: float) -> str:
    """Points a factor takes off, or adds."""
    size = points(abs(step))
    return size if size == points(0.0) else f"{'+' if step < 0 else '-'}{size}"


def _rows(point: FactoredPoint) -> list[_Row]:
    return [*(_Row(point, factor, place) for place, factor in enumerate(point.factors, start=1)), _Row(point, None)]


def _kind(row: _Row) -> RowKind:
    return "sum" if row.factor is None else ""


def _place(row: _Row) -> str:
    return place_text(row.point.ranks, row.point.nodes)


@dataclass(frozen=True)
class _Own:
    """An efficiency of one rank count by itself."""

    point: FactoredPoint
    title: str
    value: Estimate | None
    kind: RowKind = ""


def own_sheet(found: Sequence[FactoredPoint]) -> Sheet[_Own]:
    """What each rank count keeps by itself, for people."""
    return Sheet(
        name="own-efficiencies",
        title="Each rank count by itself",
        columns=(),
        rows=[row for point in found for row in _own_rows(point)],
        pivot=Pivot(
            corner="Own efficiency",
            down=lambda row: row.title,
            across=lambda row: place_text(row.point.ranks, row.point.nodes),
            cell=lambda row: row.value,
        ),
        kind=lambda row: row.kind,
        caption=(
            "Shares of the step: exposed communication = (step without exchange) / step; late ranks = (the same "
            "without waiting for late ranks) / (step without exchange); input (waiting for it, and its copy to the "
            "device) and host: the same form, one after the other. POP's: useful time is all that a rank spends "
            "outside of communication in a whole run; load balance = its mean over ranks / its maximum, communication "
            "= maximum / run time."
        ),
    )


def _own_rows(point: FactoredPoint) -> list[_Own]:
    rows = [_Own(point, FACTOR_TITLES[factor.name], factor.own) for factor in point.factors if factor.name != "compute"]
    if point.pop is not None:
        rows += [
            _Own(point, "POP: load balance", point.pop.load_balance),
            _Own(point, "POP: communication efficiency", point.pop.communication),
            _Own(point, "POP: parallel efficiency, their product", point.pop.parallel, "sum"),
        ]
    return rows

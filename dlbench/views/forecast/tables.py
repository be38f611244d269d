"""Tables of laws, published anchors and forecasts; measured and forecast figures never share a column."""

from __future__ import annotations

from dlbench.report.table import Cell, Column, Sheet
from dlbench.report.wording import figure_text, points
from dlbench.views.forecast.laws import TEXTS, ForecastPoint, Law, LawPoint
from dlbench.views.forecast.numbers import Anchor, Forecast
from dlbench.views.model import Group
from dlbench.views.view import place_columns


def law_title(law: Law) -> str:
    """`Law: Amdahl + linear`."""
    return f"Law: {law.name}"


def coefficients_text(law: Law) -> str:
    """Each coefficient with its interval."""
    letters = [TEXTS[name][0] for name in law.terms]
    # Without a unit, because `ratio` is printed in so many digits as differ from 1.
    texts = [figure_text(one.in_unit("")) for one in law.coefficients]
    return ", ".join(f"{letter} = {text}" for letter, text in zip(letters, texts, strict=True))


def law_sheet(law: Law) -> Sheet[LawPoint]:
    """The law against the measured points."""
    has_fraction = any(point.serial_fraction for point in law.points)
    columns: tuple[Column[LawPoint], ...] = (
        Column("law", "", lambda point: law.name),
        Column("formula", "", lambda point: law.formula),
        Column("coefficients", "", lambda point: " | ".join(f"{one.value:.6g}" for one in law.coefficients)),
        *place_columns(),
        Column("efficiency_measured", "Efficiency, measured", lambda point: point.measured, has_interval=True),
        Column("efficiency_fitted", law_title(law), lambda point: point.fitted, unit="fraction"),
        Column(
            "residual",
            "Residual",
            lambda point: point.residual,
            lambda point: Cell(points(point.residual), number=point.residual),
        ),
        Column(
            "serial_fraction",
            "Karp-Flatt fraction" if has_fraction else "",
            lambda point: point.serial_fraction,
            has_interval=True,
        ),
        Column("runs", "", lambda point: point.measured.n),
    )
    return Sheet(
        name="laws",
        title=f"{law_title(law)} against the measured points",
        columns=columns,
        rows=law.points,
        is_drawn=True,
    )


def forecast_sheet(group: Group, found: Forecast) -> Sheet[ForecastPoint]:
    """What the law says of more ranks."""
    unit = f"{group.sample_unit}/s"
    columns: tuple[Column[ForecastPoint], ...] = (
        Column("law", "", lambda one: law_name),
        Column("ranks", "At", lambda one: one.ranks, lambda one: f"{one.ranks} ranks"),
        Column("forecast_efficiency", "Efficiency by the law", lambda one: one.efficiency, has_interval=True),
        Column(
            "forecast_throughput_per_s",
            f"Throughput by the law, {unit}",
            lambda one: one.throughput,
            has_interval=True,
        ),
    )
    assert found.law is not None
    law_name = found.law.name
    return Sheet(
        name="forecast",
        title="Forecast, not measured",
        columns=columns,
        rows=found.forecasts,
        caption=" ".join(["In brackets: 95 %, if a law that the points do not rule out goes on.", *found.notes]),
    )


ANCHOR_COLUMNS: tuple[Column[Anchor], ...] = (
    Column("title", "Published", lambda anchor: anchor.title),
    Column("published_efficiency", "Efficiency", lambda anchor: anchor.efficiency, unit="fraction"),
    Column("ranks", "At", lambda anchor: anchor.ranks, lambda anchor: f"{anchor.ranks:,} ranks"),
    Column("baseline", "Baseline", lambda anchor: anchor.baseline),
    Column("hardware", "Hardware", lambda anchor: anchor.hardware),
    Column("recipe", "How", lambda anchor: anchor.recipe),
    Column("source", "Source", lambda anchor: anchor.source, lambda anchor: f"{anchor.source}, {anchor.address}"),
    Column("address", "", lambda anchor: anchor.address),
)


def anchor_sheet(same_work: tuple[Anchor, ...]) -> Sheet[Anchor]:
    """Published figures of the same work."""
    return Sheet(
        name="anchors",
        title="Published references of the same work",
        columns=ANCHOR_COLUMNS,
        rows=same_work,
        caption="Weak-scaling efficiency on other hardware.",
    )

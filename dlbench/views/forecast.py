"""The view `forecast`: scaling laws, published figures and forecasts; none of them is measured.

Forecasts never share a line style, a column or a headline with measurements. Published figures are data
(`reports/anchors.yaml`), each with its source; only where a run does the same work may they stand next to its own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from dlbench import bundled
from dlbench.analysis import scaling
from dlbench.analysis.scaling import Point
from dlbench.analysis.table import RunTable
from dlbench.records.scan import Run
from dlbench.report.charts.chart import Chart, Rows, finish, tooltips
from dlbench.report.charts.style import FORECAST, HEIGHT, MEASURED, MUTED, PUBLISHED, WIDE
from dlbench.report.document import Section
from dlbench.report.table import Cell, Column, Sheet
from dlbench.report.wording import basis_text, figure_text, percent, points, ranks_text
from dlbench.specs.base import Count, Fraction, Name, Precision, Spec
from dlbench.specs.files import read_yaml
from dlbench.views.model import Group
from dlbench.views.next_step import most_ranks, rank_counts, second_rank
from dlbench.views.scaling_laws import MIN_POINTS, TEXTS, ForecastPoint, Law, LawPoint, efficiency_at, forecasts, law_of
from dlbench.views.view import GroupSource, GroupView, place_columns, place_of


class Work(Spec):
    """What a published figure was measured on; all of it must agree."""

    preset: Name = Field(description="Preset of the workload that holds the published configuration.")
    scaling: Literal["weak", "strong"] = Field(description="What grew with the ranks.")
    batch_per_rank: Count = Field(description="Samples per rank and step.")
    precision: tuple[Precision, ...] = Field(description="Precisions of its class: any of them.")
    data: Literal["real", "synthetic"] = Field(description="Whether files were read.")
    model: dict[str, Any] = Field(description="Keys of the network; `family` names it.")


class Reference(Spec):
    """One published figure."""

    id: Name = Field(description="Unique in the file.")
    title: str = Field(description="What to call it.")
    efficiency: Fraction = Field(description="Scaling efficiency.")
    ranks: Count = Field(description="At this rank count.")
    baseline: str = Field(description="What it is measured against.")
    hardware: str = Field(description="What it was measured on.")
    recipe: str = Field(description="How.")
    source: str = Field(description="Who says so.")
    address: str = Field(pattern=r"^https://", description="Where.")
    work: Work = Field(description="What a run must agree in.")


class AnchorFile(Spec):
    """All of them."""

    format: Literal["dlbench.anchors"] = Field(description="Says what the file is.")
    version: Literal[1] = Field(description="Version of the format.")
    anchors: tuple[Reference, ...] = Field(description="Published figures.")


@functools.cache
def published() -> tuple[Reference, ...]:
    """All figures of the bundled file."""
    return AnchorFile.model_validate(read_yaml(bundled.folder("reports") / "anchors.yaml")).anchors


def differences(run: Run, work: Work) -> dict[str, tuple[str, str]]:
    """What a run does otherwise than a published figure: theirs and ours, by what it is; empty: the same work."""
    workload = run.plan.workload
    ours = workload.model.model_dump(mode="json")
    asked: dict[str, tuple[object, object]] = {
        "preset": (work.preset, workload.preset),
        "scaling": (work.scaling, run.plan.series.scaling),
        "batch per rank": (work.batch_per_rank, workload.train.batch_per_rank),
        "parts per batch": (1, workload.train.gradient_accumulation),
        "data": (work.data, "synthetic" if workload.data.is_synthetic else "real"),
        **{f"model.{key}": (value, ours.get(key)) for key, value in work.model.items()},
    }
    found = {what: (str(theirs), str(mine)) for what, (theirs, mine) in asked.items() if theirs != mine}
    if workload.train.precision not in work.precision:
        found["precision"] = (" or ".join(work.precision), str(workload.train.precision))
    return found


def references(run: Run) -> list[tuple[Reference, dict[str, tuple[str, str]]]]:
    """The published figures of the run's kind of network, each with its `differences`. Any run of a group will do: the
    group shares what is compared.
    """
    family = run.plan.workload.model.family
    return [(one, differences(run, one.work)) for one in published() if one.work.model.get("family") == family]


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """A published figure for the same kind of network."""

    title: str
    efficiency: float  # Share of the ideal (fraction).
    ranks: int
    baseline: str
    hardware: str
    recipe: str
    source: str
    address: str
    differences: tuple[str, ...]  # What the runs do otherwise; empty: the same work, and only then is it drawn.


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The fit of a scaling law, published figures for the same work, and forecasts."""

    law: Law | None
    why_no_law: str
    forecasts: tuple[ForecastPoint, ...]
    why_no_forecast: str
    anchors: tuple[Anchor, ...]
    why_no_anchor: str
    notes: tuple[str, ...]  # What limits the forecasts.

    @property
    def same_work(self) -> tuple[Anchor, ...]:
        """Published figures that may stand next to the measured ones."""
        return tuple(anchor for anchor in self.anchors if not anchor.differences)


def forecast(group: scaling.Group, table: RunTable, *, is_oversubscribed: bool = False) -> Forecast | None:
    """Fits, anchors and forecasts; None for a group of one point, which scales against nothing. `is_oversubscribed`:
    ranks shared cores; such points say nothing of a machine with more ranks.
    """
    if len(group.points) == 1:
        return None
    fitted = law_of(group, table)
    law = None if fitted is None else fitted.law
    found = () if fitted is None or is_oversubscribed else forecasts(group, fitted)
    doubt = "no law is fitted" if law is None else "ranks shared cores" if is_oversubscribed else law.doubt
    known = references(group.sample)
    return Forecast(
        law=law,
        why_no_law="" if law else _why_no_law(group),
        forecasts=found,
        why_no_forecast="" if found else f"No forecast: {doubt}.",
        anchors=tuple(
            Anchor(
                **one.model_dump(exclude={"id", "work"}),
                differences=tuple(f"{what} {theirs} there, {ours} here" for what, (theirs, ours) in other.items()),
            )
            for one, other in known
        ),
        why_no_anchor="" if any(not other for _, other in known) else _why_no_anchor(known),
        notes=_notes(law) if found and law else (),
    )


def _why_no_law(group: scaling.Group) -> str:
    counts = sorted({point.ranks for point in group.points})
    text = f"No scaling law fitted: needs {MIN_POINTS} rank counts"
    if len(counts) >= MIN_POINTS:
        return f"{text} inside one node or across nodes; measure more, e.g. --nodes 1,2,4."
    text += f" (you have {len(counts)}"
    more = [*counts, *rank_counts(counts[-1], (2, 4), most_ranks(group.sample.plan))]
    if len(more) < MIN_POINTS:
        return f"{text}, and this machine holds no more)."
    return f"{text}); run the same workload with --ranks {','.join(map(str, more[:MIN_POINTS]))}."


def _notes(law: Law) -> tuple[str, ...]:
    notes = []
    if law.alternatives:
        notes.append(f"Not ruled out, and in the interval: {', '.join(law.alternatives)}.")
    if law.points[-1].nodes > 1:
        notes.append(f"No point holds switches beyond {law.points[-1].nodes} nodes.")
    return tuple(notes)


def _why_no_anchor(known: list[tuple[Reference, dict[str, tuple[str, str]]]]) -> str:
    if not known:
        return "No published reference of this kind of network is on file."
    nearest, differs = min(known, key=lambda one: len(one[1]))
    return (
        f"No published reference is of the same work; the nearest, {nearest.title} ({percent(nearest.efficiency)} at "
        f"{ranks_text(nearest.ranks)}), differs in {', '.join(differs)}."
    )


def coefficients_text(law: Law) -> str:
    """Each coefficient with its interval."""
    letters = [TEXTS[name][0] for name in law.terms]
    # Without a unit, because `ratio` is printed in as many digits as differ from 1.
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
        Column("efficiency_fitted", f"Law: {law.name}", lambda point: point.fitted, unit="fraction"),
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
    title = f"Law: {law.name} against the measured points"
    return Sheet(name="laws", title=title, columns=columns, rows=law.points, is_drawn=True)


def forecast_sheet(group: Group, found: Forecast) -> Sheet[ForecastPoint]:
    """What the law says of more ranks."""
    unit = f"{group.sample_unit}/s"
    law = found.law
    assert law is not None
    columns: tuple[Column[ForecastPoint], ...] = (
        Column("law", "", lambda one: law.name),
        Column("ranks", "At", lambda one: one.ranks, lambda one: f"{one.ranks} ranks"),
        Column("forecast_efficiency", "Efficiency by the law", lambda one: one.share, has_interval=True),
        Column("forecast_throughput_per_s", f"Throughput by the law, {unit}", lambda one: one.rate, has_interval=True),
    )
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


CURVE = 33  # Points of the law's line.


def _drawn_sheet(group: Group, found: Forecast) -> Sheet[Point | ForecastPoint]:
    """Measured points, and forecast ones."""

    def basis(row: Point | ForecastPoint) -> str:
        return basis_text(row.efficiency) if isinstance(row, Point) else "forecast, not measured"

    columns: tuple[Column[Point | ForecastPoint], ...] = (
        Column("", "At", lambda row: place_of(row) if isinstance(row, Point) else f"{row.ranks} ranks"),
        Column("", "Efficiency, measured", lambda row: row.efficiency if isinstance(row, Point) else ""),
        Column("", "Efficiency, forecast", lambda row: "" if isinstance(row, Point) else row.share),
        Column("", "Interval", basis),
    )
    rows: list[Point | ForecastPoint] = [*group.points, *found.forecasts]
    return Sheet(name="forecast-chart", title="Efficiency", columns=columns, rows=rows)


def forecast_charts(group: Group, found: Forecast) -> list[Chart]:
    """Efficiency as measured, by the law, and as forecast; none without a law."""
    import altair as alt

    if found.law is None:
        return []
    rows, coming = _measured(group), _forecast(found)
    measured = "; ".join(f"{row['place']}: {row['shown']}" for row in rows)
    then = "; ".join(f"{row['place']}: {row['shown']}" for row in coming) or found.why_no_forecast
    published = "; ".join(f"{anchor.title}: {percent(anchor.efficiency)}" for anchor in found.same_work)
    return [
        finish(
            alt.layer(*_layers(alt, group, found, found.law)),
            group,
            name="forecast",
            title="Efficiency: measured, and by the law" if coming else "Efficiency: measured, against the law",
            alt=f"Measured efficiency over ranks (filled, solid): {measured}. Not measured but by the law "
            f"({found.law.name}; hollow, dotted): {then}."
            + (f" Published for the same work: {published}." if published else ""),
            table=_drawn_sheet(group, found),
            size=(WIDE, HEIGHT),
        )
    ]


def _measured(group: Group) -> Rows:
    return [
        {
            "ranks": point.ranks,
            "value": point.efficiency.value,
            "low": point.efficiency.low,
            "high": point.efficiency.high,
            "place": place_of(point),
            "shown": figure_text(point.efficiency),
            "basis": basis_text(point.efficiency),
        }
        for point in group.points
    ]


def _forecast(found: Forecast) -> Rows:
    return [
        {
            "ranks": one.ranks,
            "value": one.efficiency,
            "low": one.low,
            "high": one.high,
            "place": f"{one.ranks} ranks",
            "shown": f"{figure_text(one.share)}, forecast",
            "basis": "forecast, not measured",
        }
        for one in found.forecasts
    ]


def _curve(group: Group, law: Law, last: int) -> Rows:
    """The law from the baseline to the last rank count drawn."""
    base = group.baseline.ranks
    steps = [base * (last / base) ** (number / (CURVE - 1)) for number in range(CURVE)]
    return [{"ranks": round(ranks, 4), "value": round(efficiency_at(law, ranks / base), 6)} for ranks in steps]


def _layers(alt: Any, group: Group, found: Forecast, law: Law) -> list[Any]:
    rows, coming = _measured(group), _forecast(found)
    counts = sorted({row["ranks"] for row in (*rows, *coming)})
    ends = [counts[0] / 1.2, counts[-1] * max(2.0, counts[-1] / counts[0]) ** 0.2]
    scale = alt.Scale(type="log", base=2, domain=ends, nice=False)
    x = alt.X("ranks:Q", title="ranks", scale=scale, axis=alt.Axis(values=counts, grid=False, format="d"))
    top = max(1.0, *(row["high"] or row["value"] for row in (*rows, *coming)))
    scale = alt.Scale(domain=[0, top * 1.12], nice=False)
    y = alt.Y("value:Q", title="scaling efficiency", scale=scale, axis=alt.Axis(format=".0%", tickCount=6))
    tooltip = tooltips({"place:N": "at", "shown:N": "efficiency", "basis:N": "interval"})
    measured = alt.Chart(alt.InlineData(values=rows)).encode(x=x, y=y)
    curve = alt.Chart(alt.InlineData(values=_curve(group, law, counts[-1]))).encode(x=alt.X("ranks:Q"), y=y)
    layers = [
        curve.mark_line(color=FORECAST, strokeDash=[1, 4], strokeCap="round", strokeWidth=2),
        measured.mark_line(color=MEASURED, strokeWidth=2),
        measured.mark_point(color=MEASURED, filled=True, size=60, opacity=1).encode(tooltip=tooltip),
    ]
    if coming:
        hollow = alt.Chart(alt.InlineData(values=coming)).encode(x=alt.X("ranks:Q"), y=alt.Y("value:Q"))
        layers += [
            hollow.mark_rule(color=FORECAST, strokeDash=[1, 4], strokeWidth=2).encode(y=alt.Y("low:Q"), y2="high:Q"),
            hollow.mark_point(color=FORECAST, filled=False, shape="diamond", size=90, strokeWidth=2, opacity=1).encode(
                tooltip=tooltip
            ),
            alt.Chart(alt.InlineData(values=coming[-1:]))
            .mark_text(color=MUTED, align="right", dx=8, dy=-16, fontSize=12, text="forecast")
            .encode(x=alt.X("ranks:Q"), y=alt.Y("high:Q")),
        ]
    for anchor in found.same_work:
        line = alt.Chart(alt.InlineData(values=[{"value": anchor.efficiency, "title": f"{anchor.title}, published"}]))
        layers += [
            line.mark_rule(color=PUBLISHED, strokeDash=[8, 3, 2, 3], strokeWidth=1.5).encode(y=alt.Y("value:Q")),
            line.mark_text(color=PUBLISHED, align="left", dx=4, dy=-6, fontSize=11, x=0).encode(
                y=alt.Y("value:Q"), text="title:N"
            ),
        ]
    return layers


class ForecastView(GroupView):
    """What the measured points let expect of more ranks."""

    id = "forecast"
    title = "Scaling laws and forecast"
    key = "forecast"

    def numbers(self, source: GroupSource) -> Forecast | None:
        return forecast(source.group, source.table, is_oversubscribed=source.is_oversubscribed)

    def section(self, group: Group) -> Section | None:
        found = group.of(Forecast)
        if found is None or (found.law is None and not found.same_work):
            return None
        sheets: list[Sheet[Any]] = []
        if found.law is not None:
            sheets.append(law_sheet(found.law))
            if found.forecasts:
                sheets.append(forecast_sheet(group, found))
        if found.same_work:
            sheets.append(anchor_sheet(found.same_work))
        return Section(
            id=self.id,
            title=self.title,
            headline=_headline(found),
            words=(found.why_no_law,) if found.law is None else (_law_text(found.law), found.why_no_forecast),
            charts=lambda: forecast_charts(group, found),
            sheets=tuple(sheets),
        )

    def remedy(self, group: Group) -> str:
        found = group.of(Forecast)
        if found is not None:
            return found.why_no_law
        return second_rank(group, "one rank count only")


def _headline(found: Forecast) -> str:
    if found.forecasts:
        last = found.forecasts[-1]
        return f"forecast, not measured: {figure_text(last.share)} efficiency at {last.ranks:,} ranks"
    if found.law is not None:
        return "no law fits the measured points" if found.law.is_ruled_out else f"{found.law.name} fits; no forecast"
    one = found.same_work[0]
    return f"published for the same work: {percent(one.efficiency)} at {one.ranks:,} ranks"


def _law_text(law: Law) -> str:
    """The law, its coefficients, and how well it holds, in one or two sentences."""
    missed = points(law.worst_residual)
    text = f"{law.name}: {law.formula} with {coefficients_text(law)} (k: ranks over the baseline's); within {missed}."
    if law.is_ruled_out:
        text = f"No law fits; the nearest, {law.name}, misses a measured point by {missed}."
    return f"{text} Fitted without {law.hindcast_ranks} ranks it misses them by {points(abs(law.hindcast_error))}."

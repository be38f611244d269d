"""Projections in words, tables and charts: one `Document` for every format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dlbench.lazy import alt
from dlbench.projection.cost import TrainingCost
from dlbench.projection.ingredients import Ingredients, PointFigures
from dlbench.projection.ledger import LedgerRow, Score, line, score
from dlbench.projection.projected import HeldOut, Projection, Refused, Target, counted, figure
from dlbench.projection.strategies.table import StrategyRow
from dlbench.report.charts.chart import Chart, ReportSubject, Rows, Subject, finish, inline
from dlbench.report.charts.shapes import Axis, Series, figure_row, lines
from dlbench.report.charts.style import FORECAST, MEASURED, WIDE
from dlbench.report.document import BaseReport, Card, Document, Mark, Section, methods_section, remark
from dlbench.report.formats.json import HIDDEN
from dlbench.report.table import Column, Sheet, column, columns_of, named_table
from dlbench.report.wording import (
    figure_text,
    interval_text,
    number_text,
    percent,
    place_text,
    ranks_text,
    runs_text,
    sentence,
    value_text,
)
from dlbench.stats.estimates import Estimate, by_definition, geometric_mean_estimate, ratio_estimate
from dlbench.stats.pairing import KnownKey, RunKey
from dlbench.units import format_number

PART_TITLES = {
    "compute": "forward and backward",
    "optimizer": "optimizer",
    "input": "input",
    "host": "host and the rest",
    "straggler": "waiting for stragglers",
    "exchange": "exchange on the wire",
}
_WORK = ("compute", "optimizer")  # What no step of this batch can do without; all else is lost.


@dataclass(frozen=True, kw_only=True)
class MeasuredPoint:
    """A point that a projection is made from."""

    ranks: int
    nodes: int
    runs: int
    step: Estimate  # Seconds; geometric mean over runs.
    throughput: Estimate | None  # Samples per second, all ranks; None: the batch is not known.
    efficiency: Estimate  # Share of the ideal, against the smallest point.


@dataclass(frozen=True, kw_only=True)
class ProjectedGroup:
    """One comparable group: what is known of it, and what is projected."""

    id: str
    label: str  # What is projected, in words.
    basis: str  # What it is made of, in a sentence: runs, anchor, baseline, engine, data, network, source.
    configuration: str
    system: str
    sample_unit: str
    measured: tuple[MeasuredPoint, ...]
    notes: tuple[str, ...]
    projection: Projection
    ledger: tuple[LedgerRow, ...]  # Of its system.
    costs: tuple[TrainingCost, ...] = ()  # Of a training at each target.
    strategies: tuple[StrategyRow, ...] = ()  # Of --strategy.
    more: tuple[Section, ...] = field(default=(), metadata={HIDDEN: False})  # Further subjects, with their tables.


@dataclass(frozen=True, kw_only=True)
class ProjectionReport(BaseReport):
    """What `dlbench project` says."""

    format: str = "dlbench.projection-report"
    title: str = "Projection"
    as_of: str = ""
    groups: tuple[ProjectedGroup, ...]
    ledger: tuple[LedgerRow, ...] = ()  # Every recorded target that was measured since.
    damaged: tuple[str, ...] = ()  # Files that do not count, one line each.


def projected_group(
    group_id: str,
    given: Ingredients,
    projection: Projection,
    *,
    ledger: Sequence[LedgerRow] = (),
    more: Sequence[Section] = (),
) -> ProjectedGroup:
    """A projection with what it is made of. `ledger`: rows of every system; those of its own are shown."""
    rows = [row for one in more for sheet in one.sheets for row in sheet.rows]
    anchor, first, network = given.anchor, given.points[0], given.network
    costs = "not known" if network is None else f"{network.system}, {network.transport}"
    if network is not None and network.num_points:
        costs += f", {network.num_points} points"
    runs, ranks = sum(len(point.runs) for point in given.points), counted([point.ranks for point in given.points])
    said = (
        f"from {runs_text(runs)} at {ranks} ranks",
        f"anchor (the largest measured point) {place_text(anchor.ranks, anchor.nodes)}, {runs_text(len(anchor.runs))}",
        f"baseline {ranks_text(first.ranks)}; projected for {given.scaling} scaling",
        *filter(None, (given.engine, given.data)),
        f"network {costs}; {given.source}",
    )
    return ProjectedGroup(
        id=group_id,
        label=given.title,
        basis=sentence("; ".join(said)),
        configuration=given.configuration,
        system=given.system,
        sample_unit=given.sample_unit,
        measured=measured_points(given),
        notes=given.notes,
        projection=projection,
        ledger=tuple(row for row in ledger if row.system == given.system),
        costs=tuple(row for row in rows if isinstance(row, TrainingCost)),
        strategies=tuple(row for row in rows if isinstance(row, StrategyRow)),
        more=tuple(more),
    )


def measured_points(given: Ingredients) -> tuple[MeasuredPoint, ...]:
    """The measured points, each with its efficiency."""
    first, unit = given.points[0], f"{given.sample_unit}/s"

    def by_run(point: PointFigures) -> dict[RunKey, float]:
        """Mean steps, seconds, by run."""
        return {KnownKey.of(run.run_id, 0, run.session or run.run_id): run.step_s for run in point.runs}

    def rates(point: PointFigures) -> dict[RunKey, float]:
        """Of a rank: samples per second, or where no batch is known a share of the work."""
        work = point.batch_per_rank or (1.0 if given.scaling == "weak" else 1.0 / point.ranks)
        return {key: work / step_s for key, step_s in by_run(point).items()}

    return tuple(
        MeasuredPoint(
            ranks=point.ranks,
            nodes=point.nodes,
            runs=len(point.runs),
            step=geometric_mean_estimate(by_run(point), "s"),
            throughput=geometric_mean_estimate(rates(point)).scaled(point.ranks, unit)
            if point.batch_per_rank
            else None,
            efficiency=by_definition(1.0, len(point.runs), "fraction")
            if point is first
            else ratio_estimate(rates(point), rates(first), "fraction"),
        )
        for point in given.points
    )


def _quantity(targets: Sequence[Target]) -> tuple[str, str]:
    """What a projection is read by: efficiency, or the step where that is not known; name and unit."""
    return ("efficiency", "fraction") if all(one.efficiency for one in targets) else ("step", "s")


def _main(one: Target, name: str, level: Literal[80, 95] = 80) -> Estimate:
    band = one.efficiency if name == "efficiency" else one.step
    assert band is not None
    return figure(band, "fraction" if name == "efficiency" else "s", level)


def target_columns(targets: Sequence[Target], sample_unit: str) -> tuple[Column[Target], ...]:
    """The targets as a table."""
    name, rate = _quantity(targets)[0], f"{sample_unit}/s"

    def of(attribute: str, unit: str, level: Literal[80, 95] = 80) -> Callable[[Target], Estimate | None]:
        return lambda one: None if (band := getattr(one, attribute)) is None else figure(band, unit, level)

    def model_error(one: Target) -> str:
        low, high = one.model_error.middle(80)
        return f"{low - 1:+.1%} to {high - 1:+.1%}".replace("%", " %")

    return (
        Column("ranks", "Ranks", lambda one: one.ranks, lambda one: f"{one.ranks:,}", is_brief=True),
        *columns_of(Target, "nodes", "doublings", titles={"nodes": "Nodes"}),
        Column("efficiency", "", of("efficiency", "fraction"), has_interval=True),
        Column("", name.capitalize(), lambda one: value_text(_main(one, name)), is_brief=True),
        Column("", "80 %", lambda one: interval_text(_main(one, name)) or None, is_brief=True),
        Column("", "95 %", lambda one: interval_text(_main(one, name, 95)) or None, is_brief=True),
        Column("throughput_per_s", "", of("throughput", rate), has_interval=True),
        Column("", rate, lambda one: one.throughput and format_number(one.throughput.median), is_brief=True),
        Column("step_s", "" if name == "step" else "Step", of("step", "s"), has_interval=True),
        Column("step_95_s", "", of("step", "s", 95), has_interval=True),
        Column("model_error", "Model error", of("model_error", "ratio"), model_error, has_interval=True),
        Column("largest_loss", "Most lost to", lambda one: largest_loss(one) or None, is_brief=True),
        Column("flags", "Flags", lambda one: " ".join(flag.code for flag in one.flags) or None, is_brief=True),
    )


def largest_loss(one: Target) -> str:
    """The largest part of a step but its own work, with its share; empty where parts are not known."""
    lost = [part for part in one.parts if part.name not in _WORK]
    most = max(lost, key=lambda part: part.seconds.median, default=None)
    return f"{most.name}, {percent(most.seconds.median / one.step.median, 0)}" if most else ""


@dataclass(frozen=True, kw_only=True)
class PartRow:
    """A part of one target's step."""

    ranks: int = field(metadata=column("Ranks", text=lambda ranks: f"{ranks:,}"))
    part: str = field(metadata=column("Part of the step", text=lambda name: PART_TITLES[name]))
    seconds: Estimate = field(metadata=column("Median, 80 %"))
    seconds_95: Estimate = field(metadata=column("95 %", text=interval_text))
    share: float = field(metadata=column("Of the step", unit="fraction"))


def part_rows(targets: Sequence[Target]) -> list[PartRow]:
    """The parts of all targets that have any."""
    return [
        PartRow(
            ranks=one.ranks,
            part=part.name,
            seconds=figure(part.seconds, "s"),
            seconds_95=figure(part.seconds, "s", 95),
            share=part.seconds.median / one.step.median,
        )
        for one in targets
        for part in one.parts
    ]


def projection_chart(
    subject: Subject, measured: Sequence[MeasuredPoint], targets: Sequence[Target], more: Sequence[Any] = ()
) -> Chart:
    """Efficiency (or the step) over ranks: measured filled, projected hollow with the 80 % band.

    `more`: further layers over the same axes, `ranks` and `value`.
    """
    name = _quantity(targets)[0]
    known: Rows = [{"ranks": one.ranks, "series": "measured", **figure_row(getattr(one, name))} for one in measured]
    foretold: Rows = []
    for one in targets:
        far = interval_text(_main(one, name, 95))
        band = {**figure_row(_main(one, name)), "basis": f"80 %; 95 %: {far}; projected, not measured"}
        foretold.append({"ranks": one.ranks, "series": "projected", **band})
    rows = [*known, *foretold]
    for row in rows:
        row["place"] = ranks_text(row["ranks"])
    y = Axis("seconds per step", scale={"domainMin": 0})
    if name == "efficiency":
        y = y._replace(title="scaling efficiency", format=".0%")
    by = Series("series", {"measured": MEASURED, "projected": FORECAST})
    tooltip = {"place": "at", "series": "is", "shown": name, "basis": "interval"}
    # The line of what was not measured begins at the anchor.
    begin = {**known[-1], "series": "projected", "low": None, "high": None}
    layers: list[Any] = []
    for some, is_forecast in (([begin, *foretold], True), (known, False)):
        # Of all rows, so that all layers have the same axes.
        for layer in lines(rows, y, by, tooltip, is_forecast=is_forecast).layer:
            layer.data = inline(some)
            layers.append(layer)
    return finish(
        alt.layer(*layers, *more),
        subject,
        name="projection",
        title=f"{name.capitalize()}: measured, and projected",
        alt=f"{name.capitalize()} over ranks. "
        + "; ".join(f"{row['place']}, {row['series']}: {row['shown']}" for row in rows)
        + ".",
        table=[
            ("At", "Is", name.capitalize(), "Interval"),
            *((row["place"], row["series"], row["shown"], row["basis"]) for row in rows),
        ],
        size=(WIDE, 260),
    )


METHODS = (
    (
        "Projection",
        "Begins at the largest measured point (the anchor), whose step is split as the account of lost percent does; "
        "the model says what changes from there: messages replayed at the network's costs, the slowest of more nodes, "
        "input by what storage was seen to deliver. docs/projection.md has the equations.",
    ),
    (
        "Bands",
        "The middle 80 and 95 % of draws of runs, of costs of the network, of the slowest nodes, and of the model's "
        "own error, which grows with each doubling and is learnt from measured points held out and from recorded "
        "projections. Parts are medians and need not sum to the median step.",
    ),
    ("Efficiency", "Throughput per rank over that of the smallest measured point."),
    (
        "Ledger",
        "Accuracy is 1 - |projected / measured - 1| of the step. The interval score is that of Gneiting and Raftery "
        "(JASA 102, 2007) for the 80 % band, over the measured step; smaller is better. Only runs that were planned "
        "after a projection was recorded count.",
    ),
)


def document_of(report: ProjectionReport) -> Document:
    """The whole report."""
    empty = () if report.groups or report.ledger else ("Nothing is projected.",)
    unit = report.groups[0].sample_unit if report.groups else "samples"
    cards = tuple(map(_card, report.groups))
    return report.document(
        Section(id="summary", title="Summary", level="answer", words=empty, cards=cards, brief=empty),
        *map(_group, report.groups),
        *_ledger(report),
        *methods_section(METHODS if report.groups else METHODS[-1:], docs_page="docs/projection.md"),
        always=(
            named_table("targets", "Projected, not measured", target_columns((), unit), ("group",)),
            named_table("parts", "Parts of the projected step", columns_of(PartRow), ("group",)),
            named_table("refused", "Not projected", columns_of(Refused), ("group",)),
        ),
        file_prefix="project-",
        command="dlbench project runs RUNS --to RANKS",
        one_group_at_a_time=len(report.groups) > 1,
    )


def _card(group: ProjectedGroup) -> Card:
    targets, refused = group.projection.targets, group.projection.refused
    link, by = f"group-{group.id}", f"projected from {ranks_text(group.measured[-1].ranks)}"
    if not targets:
        words = tuple(refusals(refused)[:1])
        return Card(title=group.label, link=link, big="refused", small=(by,), words=words, is_bad=True)
    last, name = targets[-1], _quantity(targets)[0]
    near, far = _main(last, name), _main(last, name, 95)
    return Card(
        title=group.label,
        link=link,
        big=value_text(near),
        small=(f"{name} at {ranks_text(last.ranks)}, {by}", f"80 %: {interval_text(near)}, 95 %: {interval_text(far)}"),
        words=(sentence(_headline(last, name)),),
        warnings=tuple(f"{one.code}: {one.text}" for one in refused),
        warnings_link=f"refused-{group.id}",
    )


def _headline(last: Target, name: str) -> str:
    return f"{figure_text(_main(last, name))} {name} at {ranks_text(last.ranks)}, projected, not measured"


def held_out_line(held_out: Sequence[HeldOut]) -> str:
    """How far the last measured point was missed from those below it; empty where none was held out."""
    if not held_out:
        return ""
    last = held_out[-1]
    return (
        f"Held out as a test: the step at {ranks_text(last.ranks)}, projected from {last.anchor_ranks:,}, came out "
        f"{percent(abs(last.error))} too {'long' if last.error > 0 else 'short'}: "
        f"{number_text(last.projected_s, 's')}, measured {number_text(last.measured_s, 's')}."
    )


def refusals(refused: Sequence[Refused]) -> list[str]:
    """What is not projected, why and what would mend it; targets of one reason together."""
    return _lines((f"Refused, {one.code}", f"{one.text}. Remedy: {one.remedy}", one.ranks) for one in refused)


def flag_lines(projection: Projection) -> list[str]:
    """What to know beside the figures, a sentence for each flag."""
    of_all = [(flag, None) for flag in projection.flags]
    of_one = [(flag, one.ranks) for one in projection.targets for flag in one.flags if flag not in projection.flags]
    return _lines((flag.code, f"{flag.text}.", ranks) for flag, ranks in (*of_all, *of_one))


def _lines(said: Iterable[tuple[str, str, int | None]]) -> list[str]:
    """Code, text and rank count (None: of all), a line for all counts of one text."""
    found: dict[tuple[str, str], list[int]] = {}
    for code, text, ranks in said:
        found.setdefault((code, text), []).extend([] if ranks is None else [ranks])
    return [f"{code}{f' ({counted(known)} ranks)' if known else ''}: {text}" for (code, text), known in found.items()]


def _group(group: ProjectedGroup) -> Section:
    projection = group.projection
    changes = tuple(f"Projected for another setting than measured: {one}." for one in projection.changes)
    return Section(
        id=f"group-{group.id}",
        title=group.label,
        level="answer",
        caption=group.basis,
        marks=tuple(Mark(severity="note", text=text) for text in (*changes, *group.notes)),
        sections=tuple(_of_group(group)),
        brief=(group.basis,),
        is_group=True,
        overview=(("Targets", str(len(projection.targets))), ("Refused", str(len(projection.refused)))),
        where={"group": group.id},
    )


def _of_group(group: ProjectedGroup) -> Iterator[Section]:
    projection, targets = group.projection, group.projection.targets
    subject, parts = ReportSubject(group.id, group.label), part_rows(targets)
    if targets:
        yield Section(
            id=f"projected-{group.id}",
            title="Projected",
            level="answer",
            headline=_headline(targets[-1], _quantity(targets)[0]),
            words=(held_out_line(projection.held_out), line(group.ledger), *flag_lines(projection)),
            charts=lambda: [projection_chart(subject, group.measured, targets)],
            sheets=(
                Sheet(
                    name="targets",
                    title="Projected, not measured",
                    columns=target_columns(targets, group.sample_unit),
                    rows=targets,
                    caption="Most lost to: largest part of the step but compute and optimizer, and its share.",
                    in_terminal=True,
                ),
            ),
        )
    if projection.refused:
        title = "Not projected, and what would mend it"
        yield Section(
            id=f"refused-{group.id}",
            title="Refused",
            level="answer",
            sheets=(Sheet(name="refused", title=title, columns=columns_of(Refused), rows=projection.refused),),
            brief=tuple(refusals(projection.refused)),
        )
    if parts:
        title = "Parts of the projected step"
        last = next(one for one in reversed(targets) if one.parts)
        yield Section(
            id=f"parts-{group.id}",
            title=title,
            headline=f"most lost at {ranks_text(last.ranks)}: {largest_loss(last)} of the step",
            sheets=(Sheet(name="parts", title=title, columns=columns_of(PartRow), rows=parts),),
        )
    yield from group.more


def _ledger(report: ProjectionReport) -> Iterator[Section]:
    if not (report.ledger or report.damaged):
        return
    is_all = not report.groups
    scores = score(report.ledger)
    yield Section(
        id="ledger",
        title="Recorded projections and what was measured since",
        short_title="Ledger",
        level="answer" if is_all else "evidence",
        headline=line(report.ledger),
        marks=tuple(remark("serious", text) for text in report.damaged),
        sheets=(
            Sheet(
                name="ledger", title="By target", columns=columns_of(LedgerRow), rows=report.ledger, in_terminal=is_all
            ),
            Sheet(name="ledger-score", title="In all", columns=columns_of(Score), rows=scores, in_terminal=is_all),
        ),
    )

"""The report of projections as a `Document`: words, tables and charts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from dlbench.lazy import LazyModule
from dlbench.projection.ingredients import Ingredients, PointFigures
from dlbench.projection.projected import Flag, HeldOut, Projection, Refused, Target, counts_text, figure
from dlbench.report.chart_style import FORECAST, MEASURED, WIDE
from dlbench.report.charts import Axis, Chart, ReportSubject, Rows, Series, Subject, figure_row, finish, lines
from dlbench.report.document import BaseReport, Card, Document, Mark, Section, definitions, methods_section, remark
from dlbench.report.formats.data import HIDDEN
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

if TYPE_CHECKING:
    from dlbench.projection import cost
    from dlbench.projection import ledger as ledger_rows
    from dlbench.projection.strategies import table as strategy_table
else:  # The scaling report needs measured points and the projection alone.
    cost, ledger_rows = LazyModule("dlbench.projection.cost"), LazyModule("dlbench.projection.ledger")
    strategy_table = LazyModule("dlbench.projection.strategies.table")

PART_TITLES = {
    "compute": "forward and backward",
    "optimizer": "optimizer",
    "input": "input",
    "host": "host and other causes",
    "straggler": "waiting for stragglers",
    "exchange": "exposed exchange",
}
_WORK = ("compute", "optimizer")  # Parts that every step needs; the others are losses.


@dataclass(frozen=True, kw_only=True)
class MeasuredPoint:
    """A measured point of a projection."""

    ranks: int
    nodes: int
    runs: int
    step: Estimate  # Seconds; geometric mean over runs.
    throughput: Estimate | None  # Samples per second, all ranks; None: the batch is not known.
    efficiency: Estimate  # Share of the ideal, against the smallest point.


@dataclass(frozen=True, kw_only=True)
class ProjectedGroup:
    """The projection of one comparable group."""

    id: str
    label: str  # Title of the training.
    basis: str  # Runs, anchor, baseline, engine, data, network and source, in a sentence.
    configuration: str
    system: str
    sample_unit: str
    measured: tuple[MeasuredPoint, ...]
    notes: tuple[str, ...]
    projection: Projection
    ledger: tuple[ledger_rows.LedgerRow, ...]  # Rows of its system.
    costs: tuple[cost.TrainingCost, ...] = ()  # Cost of a training at each target.
    strategies: tuple[strategy_table.StrategyRow, ...] = ()  # Rows for --strategy.
    more: tuple[Section, ...] = field(default=(), metadata={HIDDEN: False})  # Further subjects, with their tables.


@dataclass(frozen=True, kw_only=True)
class ProjectionReport(BaseReport):
    """The report of `dlbench project`."""

    format: str = "dlbench.projection-report"
    title: str = "Projection"
    as_of: str = ""
    groups: tuple[ProjectedGroup, ...]
    ledger: tuple[ledger_rows.LedgerRow, ...] = ()  # Recorded targets that were measured since.
    damaged: tuple[str, ...] = ()  # Invalid files, one line each.


def projected_group(
    group_id: str,
    ingredients: Ingredients,
    projection: Projection,
    *,
    ledger: Sequence[ledger_rows.LedgerRow] = (),
    more_sections: Sequence[Section] = (),
) -> ProjectedGroup:
    """Returns a projection with its ingredients. `ledger`: rows of every system; those of its own are shown."""
    sheets = chain.from_iterable(section.sheets for section in more_sections)
    rows = list(chain.from_iterable(sheet.rows for sheet in sheets))
    anchor, first, network = ingredients.anchor, ingredients.points[0], ingredients.network
    costs = "not known"
    if network is not None:
        costs = f"{network.system}, {network.transport}"
        if network.num_points:
            costs += f", {network.points_text}"
    runs = sum(len(point.runs) for point in ingredients.points)
    ranks = counts_text([point.ranks for point in ingredients.points])
    basis = (
        f"from {runs_text(runs)} at {ranks} ranks",
        f"anchor (the largest measured point) {place_text(anchor.ranks, anchor.nodes)}, {runs_text(len(anchor.runs))}",
        f"baseline {ranks_text(first.ranks)}; projected for {ingredients.scaling} scaling",
        *filter(None, (ingredients.engine, ingredients.data)),
        f"network {costs}; {ingredients.source}",
    )
    return ProjectedGroup(
        id=group_id,
        label=ingredients.title,
        basis=sentence("; ".join(basis)),
        configuration=ingredients.configuration,
        system=ingredients.system,
        sample_unit=ingredients.sample_unit,
        measured=measured_points(ingredients),
        notes=ingredients.notes,
        projection=projection,
        ledger=tuple(row for row in ledger if row.system == ingredients.system),
        costs=tuple(row for row in rows if isinstance(row, cost.TrainingCost)),
        strategies=tuple(row for row in rows if isinstance(row, strategy_table.StrategyRow)),
        more=tuple(more_sections),
    )


def measured_points(ingredients: Ingredients) -> tuple[MeasuredPoint, ...]:
    """Returns the measured points, each with its efficiency."""
    first, unit = ingredients.points[0], f"{ingredients.sample_unit}/s"

    def by_run(point: PointFigures) -> dict[RunKey, float]:
        return {KnownKey.of(run.run_id, 0, run.session or run.run_id): run.step_s for run in point.runs}

    def rates(point: PointFigures) -> dict[RunKey, float]:
        """Returns samples per second of a rank by run; without a known batch, the share of the work per second."""
        work = float(point.batch_per_rank or 1)
        if point.batch_per_rank is None and ingredients.scaling == "strong":
            work = 1.0 / point.ranks
        return {key: work / step_s for key, step_s in by_run(point).items()}

    points = []
    for point in ingredients.points:
        measured = MeasuredPoint(
            ranks=point.ranks,
            nodes=point.nodes,
            runs=len(point.runs),
            step=geometric_mean_estimate(by_run(point), "s"),
            throughput=None,
            efficiency=by_definition(1.0, len(point.runs), "fraction"),
        )
        if point.batch_per_rank:
            throughput = geometric_mean_estimate(rates(point)).scaled(point.ranks, unit)
            measured = replace(measured, throughput=throughput)
        if point is not first:
            measured = replace(measured, efficiency=ratio_estimate(rates(point), rates(first), "fraction"))
        points.append(measured)
    return tuple(points)


def _quantity(targets: Sequence[Target]) -> str:
    """Returns the main figure of a projection: the efficiency, or the step if that is not known."""
    return "efficiency" if all(target.efficiency for target in targets) else "step"


def _main(target: Target, name: str, level: Literal[80, 95] = 80) -> Estimate:
    """Returns the efficiency or the step of a target, with the ends of the middle `level` % of its draws."""
    if name == "step":
        return figure(target.step, "s", level)
    assert target.efficiency is not None
    return figure(target.efficiency, "fraction", level)


def target_columns(targets: Sequence[Target], sample_unit: str) -> tuple[Column[Target], ...]:
    """Returns the columns of the table of targets."""
    name, rate = _quantity(targets), f"{sample_unit}/s"
    step_title = "" if name == "step" else "Step"

    def band(attribute: str, unit: str, level: Literal[80, 95] = 80) -> Callable[[Target], Estimate | None]:
        def estimate(target: Target) -> Estimate | None:
            value = getattr(target, attribute)
            return value and figure(value, unit, level)

        return estimate

    def throughput(target: Target) -> str | None:
        return None if target.throughput is None else format_number(target.throughput.median)

    def interval(target: Target, level: Literal[80, 95]) -> str | None:
        return interval_text(_main(target, name, level)) or None

    return (
        Column("ranks", "Ranks", "ranks", lambda target: f"{target.ranks:,}", is_brief=True),
        *columns_of(Target, "nodes", "doublings", titles={"nodes": "Nodes"}),
        Column("efficiency", "", band("efficiency", "fraction"), has_interval=True),
        Column("", name.capitalize(), lambda target: value_text(_main(target, name)), is_brief=True),
        Column("", "80 %", partial(interval, level=80), is_brief=True),
        Column("", "95 %", partial(interval, level=95), is_brief=True),
        Column("throughput_per_s", "", band("throughput", rate), has_interval=True),
        Column("", rate, throughput, is_brief=True),
        Column("step_s", step_title, band("step", "s"), has_interval=True),
        Column("step_95_s", "", band("step", "s", 95), has_interval=True),
        Column("model_error", "Model error", band("model_error", "ratio"), _model_error_text, has_interval=True),
        Column("largest_loss", "Largest loss", lambda target: largest_loss(target) or None, is_brief=True),
        Column("flags", "Flags", lambda target: " ".join(flag.code for flag in target.flags) or None, is_brief=True),
    )


def _model_error_text(target: Target) -> str:
    low, high = target.model_error.middle(80)
    return f"{low - 1:+.1%} to {high - 1:+.1%}".replace("%", " %")


def largest_loss(target: Target) -> str:
    """Returns the largest part of a step but its own work, with its share; empty if parts are not known."""
    losses = [part for part in target.parts if part.name not in _WORK]
    if not losses:
        return ""
    largest = max(losses, key=attrgetter("seconds.median"))
    return f"{largest.name}, {percent(largest.seconds.median / target.step.median, 0)}"


@dataclass(frozen=True)
class PartRow:
    """A part of one target's step."""

    ranks: int = field(metadata=column("Ranks", text="{:,}".format))
    part: str = field(metadata=column("Part of the step", text=PART_TITLES.__getitem__))
    seconds: Estimate = field(metadata=column("Median, 80 %"))
    seconds_95: Estimate = field(metadata=column("95 %", text=interval_text))
    share: float = field(metadata=column("Share of the step", unit="fraction"))


def part_rows(targets: Sequence[Target]) -> list[PartRow]:
    """Returns the parts of all targets."""
    rows = []
    for target in targets:
        for part in target.parts:
            seconds, seconds_95 = figure(part.seconds, "s"), figure(part.seconds, "s", 95)
            share = part.seconds.median / target.step.median
            rows.append(PartRow(target.ranks, part.name, seconds, seconds_95, share))
    return rows


def projection_chart(subject: Subject, measured: Sequence[MeasuredPoint], targets: Sequence[Target]) -> Chart:
    """Returns the chart of efficiency (or step) over ranks: measured filled, projected hollow with the 80 % band."""
    name = _quantity(targets)
    measured_rows: Rows = [
        {"ranks": point.ranks, "series": "measured", **figure_row(getattr(point, name))} for point in measured
    ]
    projected_rows: Rows = []
    for target in targets:
        interval_95 = interval_text(_main(target, name, 95))
        band = {**figure_row(_main(target, name)), "basis": f"80 %; 95 %: {interval_95}; projected, not measured"}
        projected_rows.append({"ranks": target.ranks, "series": "projected", **band})
    rows = [*measured_rows, *projected_rows]
    for row in rows:
        row["place"] = ranks_text(row["ranks"])
    y = Axis("seconds per step", scale={"domainMin": 0})
    if name == "efficiency":
        y = y._replace(title="scaling efficiency", format=".0%")
    by = Series("series", {"measured": MEASURED, "projected": FORECAST})
    tooltip = {"place": "at", "series": "is", "shown": name, "basis": "interval"}
    # The projected line begins at the anchor.
    begin = {**measured_rows[-1], "series": "projected", "low": None, "high": None}
    layers: list[dict[str, Any]] = []
    for series_rows, is_forecast in (([begin, *projected_rows], True), (measured_rows, False)):
        # Made of all rows, so that all layers have the same axes.
        drawn = lines(rows, y, by, tooltip, is_forecast=is_forecast)
        layers.extend({**layer, "data": {"values": series_rows}} for layer in drawn)
    texts = "; ".join(f"{row['place']}, {row['series']}: {row['shown']}" for row in rows)
    return finish(
        layers,
        subject,
        name="projection",
        title=f"{name.capitalize()}: measured, and projected",
        alt=f"{name.capitalize()} over ranks. {texts}.",
        table=[
            ("At", "Is", name.capitalize(), "Interval"),
            *((row["place"], row["series"], row["shown"], row["basis"]) for row in rows),
        ],
        size=(WIDE, 260),
    )


def document_of(report: ProjectionReport) -> Document:
    """Returns the whole report."""
    empty: tuple[str, ...] = ()
    if not report.groups and not report.ledger:
        empty = ("There is no projection.",)
    unit = next((group.sample_unit for group in report.groups), "samples")
    methods = definitions("projection")
    if not report.groups:
        methods = methods[-1:]
    cards = tuple(map(_card, report.groups))
    return report.document(
        Section(id="summary", title="Summary", level="answer", words=empty, cards=cards, brief=empty),
        *map(_group, report.groups),
        *_ledger(report),
        *methods_section(methods, docs_page="docs/projection.md"),
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
    last, name = targets[-1], _quantity(targets)
    near, far = _main(last, name), _main(last, name, 95)
    return Card(
        title=group.label,
        link=link,
        big=value_text(near),
        small=(f"{name} at {ranks_text(last.ranks)}, {by}", f"80 %: {interval_text(near)}, 95 %: {interval_text(far)}"),
        words=(sentence(_headline(last, name)),),
        warnings=tuple(f"{refusal.code}: {refusal.text}" for refusal in refused),
        warnings_link=f"refused-{group.id}",
    )


def _headline(last: Target, name: str) -> str:
    return f"{figure_text(_main(last, name))} {name} at {ranks_text(last.ranks)}, projected, not measured"


def held_out_line(held_out: Sequence[HeldOut]) -> str:
    """Returns the error of the last measured point, projected from those below it; empty if none was held out."""
    if not held_out:
        return ""
    last = held_out[-1]
    direction = "long" if last.error > 0 else "short"
    return (
        f"Held out as a test: the step at {ranks_text(last.ranks)}, projected from {last.anchor_ranks:,}, is "
        f"{percent(abs(last.error))} too {direction}: {number_text(last.projected_s, 's')}, measured "
        f"{number_text(last.measured_s, 's')}."
    )


def refusals(refused: Sequence[Refused]) -> list[str]:
    """Returns a line per reason for refused targets, with the remedy."""
    return _lines(
        (f"Refused, {refusal.code}", f"{refusal.text}. Remedy: {refusal.remedy}", refusal.ranks) for refusal in refused
    )


def flag_lines(projection: Projection) -> list[str]:
    """Returns a line per flag."""
    flags: list[tuple[Flag, int | None]] = [(flag, None) for flag in projection.flags]
    for target in projection.targets:
        flags += [(flag, target.ranks) for flag in target.flags if flag not in projection.flags]
    return _lines((flag.code, f"{flag.text}.", ranks) for flag, ranks in flags)


def _lines(texts: Iterable[tuple[str, str, int | None]]) -> list[str]:
    ranks_by_text: dict[tuple[str, str], list[int]] = {}
    for code, text, ranks in texts:
        counts = ranks_by_text.setdefault((code, text), [])
        if ranks is not None:
            counts.append(ranks)
    lines_of_text = []
    for (code, text), counts in ranks_by_text.items():
        ranks_of_text = f" ({counts_text(counts)} ranks)" if counts else ""
        lines_of_text.append(f"{code}{ranks_of_text}: {text}")
    return lines_of_text


def _group(group: ProjectedGroup) -> Section:
    projection = group.projection
    changes = tuple(f"Projected for a setting that was not measured: {change}." for change in projection.changes)
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
            headline=_headline(targets[-1], _quantity(targets)),
            words=(held_out_line(projection.held_out), ledger_rows.line(group.ledger), *flag_lines(projection)),
            charts=lambda: [projection_chart(subject, group.measured, targets)],
            sheets=(
                Sheet(
                    name="targets",
                    title="Projected, not measured",
                    columns=target_columns(targets, group.sample_unit),
                    rows=targets,
                    caption="Largest loss: largest part of the step except compute and optimizer, with its share.",
                    in_terminal=True,
                ),
            ),
        )
    if projection.refused:
        title = "Not projected, with remedy"
        yield Section(
            id=f"refused-{group.id}",
            title="Refused",
            level="answer",
            sheets=(Sheet(name="refused", title=title, columns=columns_of(Refused), rows=projection.refused),),
            brief=tuple(refusals(projection.refused)),
        )
    if parts:
        title = "Parts of the projected step"
        last = next(target for target in reversed(targets) if target.parts)
        yield Section(
            id=f"parts-{group.id}",
            title=title,
            headline=f"largest loss at {ranks_text(last.ranks)}: {largest_loss(last)} of the step",
            sheets=(Sheet(name="parts", title=title, columns=columns_of(PartRow), rows=parts),),
        )
    yield from group.more


def _ledger(report: ProjectionReport) -> Iterator[Section]:
    if not (report.ledger or report.damaged):
        return
    is_all = not report.groups
    scores = ledger_rows.score(report.ledger)
    yield Section(
        id="ledger",
        title="Recorded projections and later measurements",
        short_title="Ledger",
        level="answer" if is_all else "evidence",
        headline=ledger_rows.line(report.ledger),
        marks=tuple(remark("serious", text) for text in report.damaged),
        sheets=(
            Sheet(
                name="ledger",
                title="By target",
                columns=columns_of(ledger_rows.LedgerRow),
                rows=report.ledger,
                in_terminal=is_all,
            ),
            Sheet(
                name="ledger-score",
                title="Score",
                columns=columns_of(ledger_rows.Score),
                rows=scores,
                in_terminal=is_all,
            ),
        ),
    )

"""The view `energy`: joules per sample and by stage, GPUs and processors apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlbench.analysis import scaling
from dlbench.analysis.scaling import Point
from dlbench.analysis.table import RunTable
from dlbench.analysis.telemetry.energy import KINDS, Kind, RunEnergy
from dlbench.analysis.telemetry.node_samples import STAGES
from dlbench.analysis.telemetry.readings import MachineReading
from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.shapes import Axis, Series, figure_row, lines
from dlbench.report.charts.style import HEIGHT, NARROW
from dlbench.report.document import Section
from dlbench.report.formats.json import HIDDEN
from dlbench.report.table import Column, Pivot, Sheet, column, columns_of, times_cell
from dlbench.report.wording import place_text, value_text
from dlbench.stats.estimates import Estimate, by_definition, median_estimate, ratio_estimate, typical_estimate
from dlbench.stats.pairing import RunKey
from dlbench.views.model import ReportGroup
from dlbench.views.telemetry import not_sampled
from dlbench.views.view import GroupSource, GroupView, place_of

KIND_COLOURS = {"GPUs": "#0072b2", "processors": "#e69f00"}
MAX_DOUBTS = 6  # Warnings that a report prints; the diagnosis prints all of them.


def _sources_text(counts: tuple[int, ...]) -> str | None:
    return " or ".join(map(str, counts)) or None


@dataclass(frozen=True, kw_only=True)
class KindEnergy:
    """GPUs, or processors, at one rank count, over the runs whose samples hold them: a row of the table of energy.

    Energy per sample is a geometric mean, of which the efficiency is a ratio; the others are medians.
    """

    ranks: int = field(metadata={HIDDEN: False})
    nodes: int = field(metadata={HIDDEN: False})
    kind: Kind
    energy_per_sample: Estimate | None = None
    """Joules of the measured window over its samples, all nodes together; None where too little was sampled."""
    efficiency: Estimate | None = field(
        default=None, metadata=column("Efficiency", "energy_efficiency", text=times_cell, is_brief=True)
    )
    """Energy per sample of the baseline over that of this point (ratio); None where one of them is not known."""
    mean_power: Estimate | None = field(default=None, metadata=column("Mean power, W", "mean_power_w"))
    """Of the measured window, all sources of all nodes together, watts."""
    whole: Estimate | None = None
    """Joules from the start of the processes to their end, of what was sampled; None in a row that only says by
    `methods` why the kind was not measured."""
    stages: tuple[tuple[str, Estimate], ...] = ()
    """The same by stage, in the order of `STAGES`; stages that no run was at are missing."""
    num_sources: tuple[int, ...] = field(default=(), metadata=column("Sources", "sources", value=_sources_text))
    """GPUs or processor packages per run, each number once."""
    methods: tuple[str, ...] = field(metadata=column("Method", value="; ".join))  # How it is known, each way once.
    sampled_share: float | None = field(default=None, metadata=column("Sampled", unit="fraction", is_brief=True))
    """Sampled share of the measured window (1), of the run with the least."""


@dataclass(frozen=True, kw_only=True)
class EnergyPoint:
    """One rank count, over the runs whose samples were read."""

    ranks: int
    nodes: int
    kinds: tuple[KindEnergy, ...]
    why: tuple[tuple[Kind, str], ...]  # Why runs have no figure of a kind, each reason once; it may be in `kinds` too.
    doubts: tuple[str, ...]
    num_unread: int  # Runs whose samples were not read.


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Energy of a group of runs."""

    points: tuple[EnergyPoint, ...]
    notes: tuple[str, ...]  # What a reader must know, and what is damaged.


@dataclass(frozen=True, kw_only=True)
class DetailedEnergy(Energy):
    """Energy over all runs, with what it is made of."""

    runs: tuple[RunEnergy, ...]
    damaged: tuple[str, ...]  # Runs whose samples could not be read, one line each.


def detailed_energy(group: scaling.Group, table: RunTable) -> DetailedEnergy:
    """Returns energy over all runs; rank counts without a figure are there, too, with the reason."""
    readings = [reading for point in group.points for reading in _readings(point, table)]
    runs = [reading.energy for reading in readings if reading.energy is not None]
    damaged = [reading.problem for reading in readings if reading.energy is None and reading.problem]
    notes = [note for run in runs for note in run.notes]
    notes += [f"damaged: {problem}" for problem in damaged]
    return DetailedEnergy(
        points=_points(group, table),
        notes=tuple(dict.fromkeys(notes)),
        runs=tuple(runs),
        damaged=tuple(dict.fromkeys(damaged)),
    )


def _readings(point: Point, table: RunTable) -> list[MachineReading]:
    return [table.readings[run_id] for run_id in point.run_ids if run_id in table.readings]


def _points(group: scaling.Group, table: RunTable) -> tuple[EnergyPoint, ...]:
    """Returns the rank counts of which runs were read."""
    points: list[EnergyPoint] = []
    reference: Mapping[Kind, Mapping[RunKey, float]] = {}
    for point in group.points:
        readings = _readings(point, table)
        num_read = sum(not reading.left_out for reading in readings)
        if not num_read:
            continue
        by_key = {table.keys[reading.run_id]: reading.energy for reading in readings if reading.energy is not None}
        per_sample = {kind: _per_sample(kind, by_key) for kind in KINDS}
        if point is group.baseline:
            reference = per_sample
        kinds = [_kind(kind, point, by_key, per_sample[kind], reference.get(kind, {})) for kind in KINDS]
        why = ((kind, energy.why[kind]) for kind in KINDS for energy in by_key.values() if kind in energy.why)
        points.append(
            EnergyPoint(
                ranks=point.ranks,
                nodes=point.nodes,
                kinds=tuple(kind for kind in kinds if kind is not None),
                why=tuple(dict.fromkeys(why)),
                doubts=tuple(dict.fromkeys(text for energy in by_key.values() for text in energy.doubts)),
                num_unread=len(point.run_ids) - num_read,
            )
        )
    return tuple(points)


def _per_sample(kind: Kind, by_key: Mapping[RunKey, RunEnergy]) -> dict[RunKey, float]:
    joules = {key: energy.energy_per_sample_j(kind) for key, energy in by_key.items()}
    return {key: value for key, value in joules.items() if value}


def _kind(
    kind: Kind,
    point: Point,
    by_key: Mapping[RunKey, RunEnergy],
    per_sample: Mapping[RunKey, float],
    reference: Mapping[RunKey, float],
) -> KindEnergy | None:
    energies = {key: energy for key, energy in by_key.items() if energy.of(kind)}
    if not energies:
        return None

    def median(values: Mapping[RunKey, float | None], unit: str) -> Estimate | None:
        known = {key: value for key, value in values.items() if value is not None}
        return median_estimate(known, unit) if known else None

    def joules(*stages: str) -> Estimate | None:
        return median({key: energy.joules(kind, *stages) for key, energy in energies.items()}, "J")

    efficiency = None
    if per_sample and reference is per_sample:
        efficiency = by_definition(1.0, len(per_sample))
    elif per_sample and reference:
        efficiency = ratio_estimate(reference, per_sample)
    by_stage = ((stage, joules(stage)) for stage in STAGES)
    shares = [energy.sampled_share(kind, "measured") for energy in energies.values()]
    return KindEnergy(
        ranks=point.ranks,
        nodes=point.nodes,
        kind=kind,
        energy_per_sample=typical_estimate(per_sample, "J") if per_sample else None,
        efficiency=efficiency,
        mean_power=median({key: energy.mean_power_w(kind, "measured") for key, energy in energies.items()}, "W"),
        whole=joules(),
        stages=tuple((stage, estimate) for stage, estimate in by_stage if estimate is not None),
        num_sources=tuple(sorted({len(energy.of(kind)) for energy in energies.values()})),
        methods=tuple(sorted({method for energy in energies.values() for method in energy.methods(kind)})),
        sampled_share=min(share for share in shares if share is not None),
    )


def _not_measured(kind: Kind, point: EnergyPoint) -> KindEnergy:
    """Returns the row that says why a kind was not measured."""
    reasons = tuple(reason for name, reason in point.why if name == kind)
    return KindEnergy(
        ranks=point.ranks,
        nodes=point.nodes,
        kind=kind,
        methods=reasons or ("no sample holds it",),
    )


def _joules_cell(row: KindEnergy) -> Estimate | str:
    if row.whole is None:
        return "not measured"
    return row.energy_per_sample or "too little sampled"


def _energy_sheet(points: Sequence[EnergyPoint]) -> Sheet[KindEnergy]:
    """Energy per sample; for people with a line for each kind that was not measured, and why."""
    measured = {row.kind for point in points for row in point.kinds}
    rows: list[KindEnergy] = []
    for point in points:
        rows += point.kinds
        # A kind that no rank count measured is one line.
        missing = [kind for kind in KINDS if kind not in {row.kind for row in point.kinds}]
        rows += [_not_measured(kind, point) for kind in missing if kind in measured or point is points[0]]

    def name(row: KindEnergy) -> str:
        return f"{row.kind}, {place_of(row)}" if row.kind in measured else row.kind

    columns = columns_of(
        KindEnergy,
        Column("", "Energy of", name, is_brief=True),
        *("ranks", "nodes", "kind"),
        Column(
            "energy_per_sample_j",
            "J per sample",
            lambda row: row.energy_per_sample,
            _joules_cell,
            has_interval=True,
            is_brief=True,
        ),
        *("efficiency", "mean_power", "runs=whole.n", "num_sources", "methods", "sampled_share"),
    )
    return Sheet(
        name="energy",
        title="Energy per sample",
        columns=columns,
        rows=rows,
        caption="GPUs and processors are never added: processors are those of whole nodes.",
        is_data=lambda row: row.whole is not None,
    )


@dataclass(frozen=True)
class StageRow:
    """One stage, or the whole, of one kind at one rank count."""

    energy: KindEnergy
    stage: str  # Empty for the whole run.
    joules: Estimate


def _stages_sheet(points: Sequence[EnergyPoint]) -> Sheet[StageRow]:
    """Joules by stage; for people a column for each stage, and the whole run as the last."""
    kinds = [kind for point in points for kind in point.kinds]
    rows = [StageRow(kind, stage, joules) for kind in kinds for stage, joules in kind.stages]
    rows += [StageRow(kind, "", kind.whole) for kind in kinds if kind.whole is not None]
    return Sheet(
        name="energy-stages",
        title="Energy by stage",
        columns=columns_of(
            StageRow,
            *("ranks=energy.ranks", "nodes=energy.nodes", "kind=energy.kind", "stage", "joules", "runs=joules.n"),
        ),
        rows=rows,
        pivot=Pivot(
            corner="Energy of",
            down=lambda row: f"{row.energy.kind}, {place_of(row.energy)}",
            across=lambda row: f"{row.stage or 'whole run'}, J",
            cell=lambda row: row.joules,
        ),
        is_data=lambda row: row.stage != "",
    )


def _charts(group: ReportGroup, found: Energy) -> Iterator[Chart]:
    kinds = [kind for point in found.points for kind in point.kinds]
    rows: Rows = [
        {"ranks": kind.ranks, "place": place_of(kind), "kind": kind.kind, **figure_row(kind.energy_per_sample)}
        for kind in kinds
        if kind.energy_per_sample is not None
    ]
    if rows and len(found.points) > 1:
        words = "; ".join(f"{row['place']}: {row['kind']} {row['shown']} J" for row in rows)
        y = Axis("J per sample", unit="J", scale={"domainMin": 0, "nice": True})
        tooltip = {"place": "at", "kind": "of", "shown": "J per sample", "basis": "interval"}
        yield finish(
            lines(rows, y, Series("kind", KIND_COLOURS), tooltip),
            group,
            name="energy",
            title="Energy per sample",
            alt=f"Joules per sample over ranks, in the measured window. {words}.",
            table=_energy_sheet(found.points).to_display(brief=True),
            size=(NARROW, HEIGHT),
        )


class EnergyView(GroupView):
    """What a sample costs."""

    id = "energy"
    title = "Energy"
    key = "energy"
    after = "telemetry"

    def numbers(self, source: GroupSource) -> Energy | None:
        energy = detailed_energy(source.group, source.table)
        has_figures = any(point.kinds for point in energy.points)
        return Energy(points=energy.points, notes=energy.notes) if has_figures else None

    def shown(self, group: ReportGroup, found: Energy) -> Section:
        sheets: list[Sheet[Any]] = [_energy_sheet(found.points), _stages_sheet(found.points)]
        last = found.points[-1]
        known = [f"{value_text(one.energy_per_sample)} J of {one.kind}" for one in last.kinds if one.energy_per_sample]
        energy = " and ".join(known) or "too little sampled"
        return Section(
            headline=f"{energy} per sample at {place_text(last.ranks, last.nodes)}",
            words=tuple(_words(found)),
            charts=lambda: list(_charts(group, found)),
            sheets=tuple(sheet for sheet in sheets if sheet.rows),
        )

    def remedy(self, group: ReportGroup) -> str:
        if group.views.get("telemetry") is None:
            return not_sampled(group)
        return (
            "neither a GPU's power nor a processor's energy counter could be read; dlbench doctor says what is missing."
        )


class DetailedEnergyView(EnergyView):
    """The same over the samples of all runs, with every source of every run."""

    def numbers(self, source: GroupSource) -> DetailedEnergy:
        return detailed_energy(source.group, source.table)


def _words(found: Energy) -> Iterator[str]:
    is_detailed = isinstance(found, DetailedEnergy)
    for point in found.points if is_detailed else ():
        for kind in point.kinds:
            why = "; ".join(reason for name, reason in point.why if name == kind.kind)
            if why:
                where = place_text(point.ranks, point.nodes)
                yield f"At {where} some runs have no figure of {kind.kind}: {why}."
    doubts = list(dict.fromkeys(text for point in found.points for text in point.doubts))
    shown = len(doubts) if is_detailed else MAX_DOUBTS
    yield from (f"Warning: {text}." for text in doubts[:shown])
    if len(doubts) > shown:
        yield f"{len(doubts) - shown} more warnings: dlbench diagnose prints them."
    yield from (f"{note[0].upper()}{note[1:]}." for note in found.notes)

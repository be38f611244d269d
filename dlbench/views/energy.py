"""The view `energy`: joules per sample and by stage, GPUs and processors apart."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlbench.analysis import scaling
from dlbench.analysis.scaling import Point
from dlbench.analysis.table import RunTable
from dlbench.analysis.telemetry.energy import KINDS, Kind, RunEnergy
from dlbench.analysis.telemetry.node_samples import STAGES
from dlbench.errors import IncompleteDataError
from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.shapes import Axis, Series, figure_row, lines
from dlbench.report.charts.style import HEIGHT, NARROW
from dlbench.report.document import Section
from dlbench.report.table import Cell, Column, Pivot, Sheet, column, columns_of, times_cell
from dlbench.report.wording import place_text, value_text
from dlbench.stats.estimates import Estimate, by_definition, median_estimate, ratio_estimate, typical_estimate
from dlbench.stats.pairing import RunKey
from dlbench.views.model import Group
from dlbench.views.telemetry import not_sampled
from dlbench.views.view import GroupSource, GroupView, place_of


@dataclass(frozen=True, kw_only=True)
class KindEnergy:
    """GPUs, or processors, at one rank count, over the runs whose samples hold them.

    Energy per sample is a geometric mean, of which the efficiency is a ratio; the others are medians.
    """

    kind: Kind
    energy_per_sample: Estimate | None
    """Joules of the measured window over its samples, all nodes together; None where too little was sampled."""
    efficiency: Estimate | None = field(
        metadata=column("Efficiency", "energy_efficiency", text=times_cell, is_brief=True)
    )
    """Energy per sample of the baseline over that of this point (ratio); None where one of them is not known."""
    mean_power: Estimate | None = field(metadata=column("Mean power, W", "mean_power_w"))
    """Of the measured window, all sources of all nodes together, watts."""
    whole: Estimate  # Joules from the start of the processes to their end, of what was sampled.
    stages: tuple[tuple[str, Estimate], ...]
    """The same by stage, in the order of `STAGES`; stages that no run was at are missing."""
    num_sources: tuple[int, ...] = field(  # GPUs or processor packages per run, each number once.
        metadata=column("Sources", "sources", value=lambda counts: " or ".join(map(str, counts)))
    )
    methods: tuple[str, ...]  # How the energy is known, each way once.
    sampled_share: float = field(metadata=column("Sampled", unit="fraction", is_brief=True))
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
    """Energy over all runs; rank counts without a figure are there, too, with the reason."""
    points, energies, damaged = _energy(group, table)
    return DetailedEnergy(
        points=points,
        notes=_notes(energies, damaged),
        runs=tuple(energies),
        damaged=tuple(damaged),
    )


def _energy(group: scaling.Group, table: RunTable) -> tuple[tuple[EnergyPoint, ...], list[RunEnergy], list[str]]:
    """Returns points, the runs behind them, and what is damaged."""
    keys, readings = table.keys, table.readings
    runs = {run.plan.run_id: run for run in group.runs}
    points: list[EnergyPoint] = []
    every: list[RunEnergy] = []
    damaged: list[str] = []
    reference: Mapping[Kind, Mapping[RunKey, float]] = {}
    for point in group.points:
        read = [runs[run_id] for run_id in point.run_ids if readings.has_energy(runs[run_id])]
        energies: list[RunEnergy] = []
        for run in read:
            try:
                energies.append(readings.energy_of(run))
            except IncompleteDataError as error:
                damaged.append(str(error))
        if read:
            by_key = {keys[one.run_id]: one for one in energies}
            per_sample = {kind: {key: one.energy_per_sample_j(kind) for key, one in by_key.items()} for kind in KINDS}
            own = {kind: {k: joules for k, joules in found.items() if joules} for kind, found in per_sample.items()}
            if point is group.baseline:
                reference = own
            # Of the kinds that have joules per sample on both sides.
            known = [kind for kind in KINDS if own[kind] and reference.get(kind)]
            efficiency = {kind: ratio_estimate(reference[kind], own[kind]) for kind in known}
            if point is group.baseline:
                efficiency = {kind: by_definition(1.0, len(own[kind])) for kind in known}
            points.append(_point(point, by_key, efficiency, num_unread=len(point.run_ids) - len(read)))
        every += energies
    return tuple(points), every, list(dict.fromkeys(damaged))


def _notes(energies: Iterable[RunEnergy], damaged: Iterable[str]) -> tuple[str, ...]:
    notes = [text for energy in energies for text in energy.notes]
    return tuple(dict.fromkeys([*notes, *(f"damaged: {text}" for text in damaged)]))


def _point(
    point: Point, by_key: Mapping[RunKey, RunEnergy], efficiency: Mapping[Kind, Estimate], *, num_unread: int
) -> EnergyPoint:
    energies = by_key.values()
    kinds = (_kind(kind, {k: one for k, one in by_key.items() if one.of(kind)}, efficiency.get(kind)) for kind in KINDS)
    why = ((kind, energy.why[kind]) for kind in KINDS for energy in energies if kind in energy.why)
    return EnergyPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        kinds=tuple(kind for kind in kinds if kind is not None),
        why=tuple(dict.fromkeys(why)),
        doubts=tuple(dict.fromkeys(text for energy in energies for text in energy.doubts)),
        num_unread=num_unread,
    )


def _kind(kind: Kind, by_key: Mapping[RunKey, RunEnergy], efficiency: Estimate | None) -> KindEnergy | None:
    if not by_key:
        return None

    def known(value: Callable[[RunEnergy], float | None]) -> dict[RunKey, float]:
        return {key: found for key, energy in by_key.items() if (found := value(energy)) is not None}

    def joules(*stages: str) -> Estimate | None:
        found = known(lambda energy: stage.joules if (stage := energy.stage(kind, *stages)) else None)
        return median_estimate(found, "J") if found else None

    energies = by_key.values()
    by_sample = known(lambda energy: energy.energy_per_sample_j(kind))
    each = typical_estimate(by_sample, "J") if by_sample else None
    powers = known(lambda energy: stage.mean_power_w if (stage := energy.stage(kind, "measured")) else None)
    measured = [energy.stage(kind, "measured") for energy in energies]
    stages = ((stage, joules(stage)) for stage in STAGES)
    whole = joules()
    assert whole is not None
    return KindEnergy(
        kind=kind,
        energy_per_sample=each,
        efficiency=efficiency,
        mean_power=median_estimate(powers, "W") if powers else None,
        whole=whole,
        stages=tuple((stage, joules) for stage, joules in stages if joules is not None),
        num_sources=tuple(sorted({len(energy.of(kind)) for energy in energies})),
        methods=tuple(sorted({method for energy in energies for method in energy.methods(kind)})),
        sampled_share=min(stage.sampled_share for stage in measured if stage is not None),
    )


NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class _Row:
    """GPUs, or processors, at one rank count."""

    point: EnergyPoint
    kind: Kind
    energy: KindEnergy | None  # None where it was not measured.


def _energy_sheet(points: Sequence[EnergyPoint]) -> Sheet[_Row]:
    """Energy per sample; for people with a line for each kind that was not measured, and why."""
    # A kind that no rank count measured is one line.
    measured = {energy.kind for point in points for energy in point.kinds}
    rows: list[_Row] = []
    for point in points:
        rows += [_Row(point, one.kind, one) for one in point.kinds]
        left = [kind for kind in KINDS if kind not in {one.kind for one in point.kinds}]
        rows += [_Row(point, kind, None) for kind in left if kind in measured or point is points[0]]
    of_energy = functools.partial(columns_of, KindEnergy, of=lambda row: row.energy)
    columns: tuple[Column[_Row], ...] = (
        Column(
            "",
            "Energy of",
            lambda row: f"{row.kind}, {place_of(row.point)}" if row.kind in measured else row.kind,
            is_brief=True,
        ),
        *columns_of(_Row, "ranks=point.ranks", "nodes=point.nodes", "kind"),
        Column(
            "energy_per_sample_j",
            "J per sample",
            lambda row: row.energy.energy_per_sample if row.energy else None,
            lambda row: (row.energy.energy_per_sample or Cell("too little sampled")) if row.energy else NOT_MEASURED,
            has_interval=True,
            is_brief=True,
        ),
        *of_energy("efficiency", "mean_power", "runs=whole.n", "num_sources"),
        Column("methods", "Method", _method),
        *of_energy("sampled_share"),
    )
    return Sheet(
        name="energy",
        title="Energy per sample",
        columns=columns,
        rows=rows,
        caption="GPUs and processors are never added: processors are those of whole nodes.",
        is_data=lambda row: row.energy is not None,
    )


def _method(row: _Row) -> str:
    """How the energy is known, or why it is not."""
    if row.energy is not None:
        return "; ".join(row.energy.methods)
    return "; ".join(reason for kind, reason in row.point.why if kind == row.kind) or "no sample holds it"


@dataclass(frozen=True)
class _Stage:
    """One stage, or the whole, of one kind at one rank count."""

    point: EnergyPoint
    kind: Kind
    stage: str  # Empty for the whole run.
    joules: Estimate


def _stages_sheet(points: Sequence[EnergyPoint]) -> Sheet[_Stage]:
    """Joules by stage; for people a column for each stage, and the whole run as the last."""
    kinds = [(point, kind) for point in points for kind in point.kinds]
    stages = [_Stage(point, kind.kind, stage, joules) for point, kind in kinds for stage, joules in kind.stages]
    return Sheet(
        name="energy-stages",
        title="Energy by stage",
        columns=columns_of(
            _Stage, "ranks=point.ranks", "nodes=point.nodes", "kind", "stage", "joules", "runs=joules.n"
        ),
        rows=[*stages, *(_Stage(point, kind.kind, "", kind.whole) for point, kind in kinds)],
        pivot=Pivot(
            corner="Energy of",
            down=lambda row: f"{row.kind}, {place_of(row.point)}",
            across=lambda row: f"{row.stage or 'whole run'}, J",
            cell=lambda row: row.joules,
        ),
        is_data=lambda row: row.stage != "",
    )


KIND_COLOURS = {"GPUs": "#0072b2", "processors": "#e69f00"}


def _charts(group: Group, found: Energy) -> Iterator[Chart]:
    kinds = [(place_of(point), point.ranks, kind) for point in found.points for kind in point.kinds]
    rows: Rows = [
        {"ranks": ranks, "place": place, "kind": kind.kind, **figure_row(kind.energy_per_sample)}
        for place, ranks, kind in kinds
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


MAX_DOUBTS = 6  # That a report prints; the diagnosis prints all of them.


class EnergyView(GroupView):
    """What a sample costs."""

    id = "energy"
    title = "Energy"
    key = "energy"
    after = "telemetry"

    def numbers(self, source: GroupSource) -> Energy | None:
        points, energies, damaged = _energy(source.group, source.table)
        has_figures = any(point.kinds for point in points)
        return Energy(points=points, notes=_notes(energies, damaged)) if has_figures else None

    def shown(self, group: Group, found: Energy) -> Section:
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

    def remedy(self, group: Group) -> str:
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

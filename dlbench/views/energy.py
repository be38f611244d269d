"""The view `energy`: joules per sample and by stage, of GPUs and of processors separately."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter

from dlbench.analysis import scaling
from dlbench.analysis.scaling import Point
from dlbench.analysis.table import RunTable
from dlbench.analysis.telemetry.energy import KINDS, Kind, RunEnergy
from dlbench.analysis.telemetry.node_samples import STAGES
from dlbench.analysis.telemetry.readings import MachineReading
from dlbench.report.chart_style import HEIGHT, NARROW
from dlbench.report.charts import Axis, Chart, Rows, Series, figure_row, finish, lines
from dlbench.report.document import Section, with_rows
from dlbench.report.formats.data import HIDDEN
from dlbench.report.table import Column, Pivot, Sheet, column, columns_of, times_cell
from dlbench.report.wording import place_text, value_text
from dlbench.stats.estimates import Estimate, by_definition, median_estimate, of_known, ratio_estimate, typical_estimate
from dlbench.stats.pairing import RunKey
from dlbench.views.model import AtPlace, GroupSource, GroupView, ReportGroup, place_of
from dlbench.views.telemetry import not_sampled

KIND_COLOURS = {"GPUs": "#0072b2", "processors": "#e69f00"}
MAX_DOUBTS = 6  # Warnings that a report prints; the diagnosis prints all of them.


@dataclass(frozen=True, kw_only=True)
class KindEnergy:
    """The energy of GPUs, or of processors, at one rank count, over the runs whose samples have it. Energy per sample
    is a geometric mean over runs, efficiency a ratio of these; other figures are medians.
    """

    ranks: int = field(metadata={HIDDEN: False})
    nodes: int = field(metadata={HIDDEN: False})
    kind: Kind
    energy_per_sample: Estimate | None = None  # Joules of the measured window, all nodes; None: too little sampled.
    efficiency: Estimate | None = field(
        default=None, metadata=column("Efficiency", "energy_efficiency", text=times_cell, is_brief=True)
    )
    mean_power: Estimate | None = field(default=None, metadata=column("Mean power, W", "mean_power_w"))
    whole: Estimate | None = None  # Joules sampled from start to end of the processes; None: not measured.
    stages: tuple[tuple[str, Estimate], ...] = ()  # Joules in the order of `STAGES`.
    num_sources: tuple[int, ...] = field(
        default=(), metadata=column("Sources", "sources", value=lambda counts: " or ".join(map(str, counts)) or None)
    )
    methods: tuple[str, ...] = field(metadata=column("Method", value="; ".join))  # Methods of measurement, each once.
    sampled_share: float | None = field(default=None, metadata=column("Sampled", unit="fraction", is_brief=True))

    @property
    def is_measured(self) -> bool:
        return self.whole is not None


@dataclass(frozen=True, kw_only=True)
class EnergyPoint(AtPlace):
    """The energy at one rank count, over the runs whose samples were read."""

    kinds: tuple[KindEnergy, ...]
    why: tuple[tuple[Kind, str], ...]  # Why some runs have no figure of a kind, each reason once.
    doubts: tuple[str, ...]
    num_unread: int  # Number of runs whose samples were not read.


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Energy of a group of runs."""

    points: tuple[EnergyPoint, ...]
    notes: tuple[str, ...]  # Notes on the measurement, and damaged samples.


@dataclass(frozen=True, kw_only=True)
class DetailedEnergy(Energy):
    """Energy over all runs, with the energy of each run."""

    runs: tuple[RunEnergy, ...]
    damaged: tuple[str, ...]  # Runs whose samples could not be read, one line each.


def detailed_energy(group: scaling.Group, table: RunTable) -> DetailedEnergy:
    """Returns energy over all runs; rank counts without a figure have the reason."""
    readings = list(chain.from_iterable(_readings(point, table) for point in group.points))
    runs = [reading.energy for reading in readings if reading.energy is not None]
    damaged = [reading.problem for reading in readings if reading.energy is None and reading.problem]
    notes = list(chain.from_iterable(run.notes for run in runs))
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
    """Returns the rank counts with runs whose samples were read."""
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
        reasons = [(kind, energy.why[kind]) for kind in KINDS for energy in by_key.values() if kind in energy.why]
        doubts = chain.from_iterable(energy.doubts for energy in by_key.values())
        points.append(
            EnergyPoint(
                ranks=point.ranks,
                nodes=point.nodes,
                kinds=tuple(kind for kind in kinds if kind is not None),
                why=tuple(dict.fromkeys(reasons)),
                doubts=tuple(dict.fromkeys(doubts)),
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

    def joules(*stages: str) -> Estimate | None:
        return of_known(median_estimate, {key: energy.joules(kind, *stages) for key, energy in energies.items()}, "J")

    efficiency = None
    if per_sample and reference is per_sample:
        efficiency = by_definition(1.0, len(per_sample))
    elif per_sample and reference:
        efficiency = ratio_estimate(reference, per_sample)
    by_stage = [(stage, joules(stage)) for stage in STAGES]
    powers_w = {key: energy.mean_power_w(kind, "measured") for key, energy in energies.items()}
    shares = [energy.sampled_share(kind, "measured") for energy in energies.values()]
    methods = chain.from_iterable(energy.methods(kind) for energy in energies.values())
    return KindEnergy(
        ranks=point.ranks,
        nodes=point.nodes,
        kind=kind,
        energy_per_sample=of_known(typical_estimate, per_sample, "J"),
        efficiency=efficiency,
        mean_power=of_known(median_estimate, powers_w, "W"),
        whole=joules(),
        stages=tuple((stage, estimate) for stage, estimate in by_stage if estimate is not None),
        num_sources=tuple(sorted({len(energy.of(kind)) for energy in energies.values()})),
        methods=tuple(sorted(set(methods))),
        sampled_share=min(share for share in shares if share is not None),
    )


def _joules_cell(row: KindEnergy) -> Estimate | str:
    if row.whole is None:
        return "not measured"
    return row.energy_per_sample or "too little sampled"


def _energy_sheet(points: Sequence[EnergyPoint]) -> Sheet[KindEnergy]:
    """Returns the table of energy per sample, for people with a line for each kind that was not measured, and why."""
    measured = {row.kind for row in _kinds(points)}
    rows: list[KindEnergy] = []
    for point in points:
        rows += point.kinds
        kinds = {row.kind for row in point.kinds}
        for kind in KINDS:
            # A kind that no rank count measured is one line.
            if kind not in kinds and (kind in measured or point is points[0]):
                why = tuple(reason for name, reason in point.why if name == kind) or ("no sample holds it",)
                rows.append(KindEnergy(ranks=point.ranks, nodes=point.nodes, kind=kind, methods=why))

    def title(row: KindEnergy) -> str:
        return f"{row.kind}, {place_of(row)}" if row.kind in measured else row.kind

    columns = columns_of(
        KindEnergy,
        Column("", "Energy of", title, is_brief=True),
        *("ranks", "nodes", "kind"),
        Column(
            "energy_per_sample_j", "J per sample", "energy_per_sample", _joules_cell, has_interval=True, is_brief=True
        ),
        *("efficiency", "mean_power", "runs=whole.n", "num_sources", "methods", "sampled_share"),
    )
    return Sheet(
        name="energy",
        title="Energy per sample",
        columns=columns,
        rows=rows,
        caption="GPUs and processors are never added: processors are those of whole nodes.",
        is_data=attrgetter("is_measured"),
    )


@dataclass(frozen=True)
class StageRow:
    """The energy of one stage, or of the whole run, of one kind at one rank count."""

    energy: KindEnergy
    stage: str  # Empty for the whole run.
    joules: Estimate

    @property
    def title(self) -> str:
        return f"{self.energy.kind}, {place_of(self.energy)}"

    @property
    def stage_title(self) -> str:
        return f"{self.stage or 'whole run'}, J"


def _stages_sheet(points: Sequence[EnergyPoint]) -> Sheet[StageRow]:
    """Returns the table of joules by stage; for people a column for each stage, and the whole run last."""
    rows = [StageRow(kind, stage, joules) for kind in _kinds(points) for stage, joules in kind.stages]
    rows += [StageRow(kind, "", kind.whole) for kind in _kinds(points) if kind.whole is not None]
    picks = ("ranks=energy.ranks", "nodes=energy.nodes", "kind=energy.kind", "stage", "joules", "runs=joules.n")
    return Sheet(
        name="energy-stages",
        title="Energy by stage",
        columns=columns_of(StageRow, *picks),
        rows=rows,
        pivot=Pivot(corner="Energy of", down="title", across="stage_title", cell="joules"),
        is_data=lambda row: row.stage != "",
    )


def _kinds(points: Sequence[EnergyPoint]) -> list[KindEnergy]:
    return list(chain.from_iterable(point.kinds for point in points))


def _charts(group: ReportGroup, energy: Energy) -> Iterator[Chart]:
    rows: Rows = [
        {"ranks": kind.ranks, "place": place_of(kind), "kind": kind.kind, **figure_row(kind.energy_per_sample)}
        for kind in _kinds(energy.points)
        if kind.energy_per_sample is not None
    ]
    if rows and len(energy.points) > 1:
        words = "; ".join(f"{row['place']}: {row['kind']} {row['shown']} J" for row in rows)
        y = Axis("J per sample", unit="J", scale={"domainMin": 0, "nice": True})
        tooltip = {"place": "at", "kind": "of", "shown": "J per sample", "basis": "interval"}
        yield finish(
            lines(rows, y, Series("kind", KIND_COLOURS), tooltip),
            group,
            name="energy",
            title="Energy per sample",
            alt=f"Joules per sample over ranks, in the measured window. {words}.",
            table=_energy_sheet(energy.points).to_display(brief=True),
            size=(NARROW, HEIGHT),
        )


class EnergyView(GroupView):
    """The energy of a sample."""

    id = "energy"
    title = "Energy"
    key = "energy"
    after = "telemetry"

    def numbers(self, source: GroupSource) -> Energy | None:
        energy = detailed_energy(source.group, source.table)
        if not any(point.kinds for point in energy.points):
            return None
        return Energy(points=energy.points, notes=energy.notes)

    def shown(self, group: ReportGroup, energy: Energy) -> Section:
        last = energy.points[-1]
        joules = [f"{value_text(row.energy_per_sample)} J of {row.kind}" for row in last.kinds if row.energy_per_sample]
        per_sample = " and ".join(joules) or "too little sampled"
        return Section(
            headline=f"{per_sample} per sample at {place_text(last.ranks, last.nodes)}",
            words=tuple(_words(energy)),
            charts=lambda: list(_charts(group, energy)),
            sheets=with_rows(_energy_sheet(energy.points), _stages_sheet(energy.points)),
        )

    def remedy(self, group: ReportGroup) -> str:
        if group.views.get("telemetry") is None:
            return not_sampled(group)
        return (
            "neither a GPU's power nor a processor's energy counter could be read; dlbench doctor says what is missing."
        )


class DetailedEnergyView(EnergyView):
    """The energy of a sample, from the samples of all runs, with every source of every run."""

    def numbers(self, source: GroupSource) -> DetailedEnergy:
        return detailed_energy(source.group, source.table)


def _words(energy: Energy) -> Iterator[str]:
    doubts = list(dict.fromkeys(chain.from_iterable(point.doubts for point in energy.points)))
    max_doubts = MAX_DOUBTS
    if isinstance(energy, DetailedEnergy):
        max_doubts = len(doubts)
        yield from _incomplete_words(energy)
    yield from (f"Warning: {text}." for text in doubts[:max_doubts])
    if len(doubts) > max_doubts:
        yield f"{len(doubts) - max_doubts} more warnings: dlbench diagnose prints them."
    yield from (f"{note[0].upper()}{note[1:]}." for note in energy.notes)


def _incomplete_words(energy: Energy) -> Iterator[str]:
    for point in energy.points:
        for row in point.kinds:
            reasons = [reason for kind, reason in point.why if kind == row.kind]
            if reasons:
                yield f"At {place_of(point)} some runs have no figure of {row.kind}: {'; '.join(reasons)}."

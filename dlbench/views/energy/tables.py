"""Sheets on energy: per sample, by stage; and for the diagnosis of all runs what Slurm counted, and every source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dlbench.reading.samples.energy import RunEnergy
from dlbench.reading.samples.energy_sources import KINDS, Kind, SourceEnergy
from dlbench.reading.samples.integral import Amount
from dlbench.report.table import Cell, Column, Pivot, Sheet, Value, times_cell
from dlbench.report.wording import place_text
from dlbench.stats.estimates import Estimate
from dlbench.views.energy.numbers import EnergyPoint, KindEnergy, SlurmCheck

NOT_MEASURED = "not measured"

CAPTION = "GPUs and processors are never added: processors are those of whole nodes."
SLURM_CAPTION = "Slurm: ConsumedEnergy of the whole nodes, from the start of the job to its end."


def place_of(point: EnergyPoint, kind: Kind) -> str:
    """``GPUs, 4 ranks on 2 nodes``."""
    return f"{kind}, {place_text(point.ranks, point.nodes)}"


@dataclass(frozen=True)
class _Row:
    """GPUs, or processors, at one rank count."""

    point: EnergyPoint
    kind: Kind
    energy: KindEnergy | None
    """None where it was not measured."""


def energy_sheet(points: Sequence[EnergyPoint]) -> Sheet[_Row]:
    """Energy per sample; for people with a line for each kind that was not measured, and why."""
    # A kind that no rank count measured is one line.
    measured = {energy.kind for point in points for energy in point.kinds}
    rows = [
        _Row(point, kind, energy)
        for point in points
        for kind, energy in _kinds(point)
        if kind in measured or point is points[0]
    ]
    columns: tuple[Column[_Row], ...] = (
        Column(
            "",
            "Energy of",
            lambda row: place_of(row.point, row.kind) if row.kind in measured else row.kind,
            is_brief=True,
        ),
        Column("ranks", "", lambda row: row.point.ranks),
        Column("nodes", "", lambda row: row.point.nodes),
        Column("kind", "", lambda row: row.kind),
        Column(
            "energy_per_sample_j",
            "J per sample",
            _of(lambda energy: energy.energy_per_sample),
            _joules_cell,
            has_interval=True,
            is_brief=True,
        ),
        Column("samples_per_joule", "Samples per J", _of(lambda energy: energy.samples_per_joule), has_interval=True),
        Column(
            "energy_efficiency",
            "Efficiency",
            _of(lambda energy: energy.efficiency),
            lambda row: times_cell(None if row.energy is None else row.energy.efficiency),
            has_interval=True,
            is_brief=True,
        ),
        Column("mean_power_w", "Mean power, W", _of(lambda energy: energy.mean_power), has_interval=True),
        Column("runs", "", _of(lambda energy: energy.whole.n)),
        Column("sources", "Sources", _of(lambda energy: " or ".join(map(str, energy.num_sources)))),
        Column("methods", "Method", _of(lambda energy: "; ".join(energy.methods)), _method),
        Column("sampled_share", "Sampled", _of(lambda energy: energy.sampled_share), unit="fraction", is_brief=True),
    )
    return Sheet(
        name="energy",
        title="Energy per sample",
        columns=columns,
        rows=rows,
        caption=CAPTION,
        is_data=lambda row: row.energy is not None,
        in_terminal=True,
    )


def _kinds(point: EnergyPoint) -> Iterator[tuple[Kind, KindEnergy | None]]:
    """Those that were measured first."""
    for energy in point.kinds:
        yield energy.kind, energy
    for kind in KINDS:
        if all(energy.kind != kind for energy in point.kinds):
            yield kind, None


def _of(value: Callable[[KindEnergy], Value]) -> Callable[[_Row], Value]:
    """A value of what was measured."""
    return lambda row: None if row.energy is None else value(row.energy)


def _joules_cell(row: _Row) -> Estimate | Cell:
    if row.energy is None:
        return Cell(NOT_MEASURED)
    return row.energy.energy_per_sample or Cell("too little sampled")


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
    stage: str
    """Empty for the whole run."""
    joules: Estimate


def stages_sheet(points: Sequence[EnergyPoint]) -> Sheet[_Stage]:
    """Joules by stage; for people a column for each stage, and the whole run as the last."""
    columns: tuple[Column[_Stage], ...] = (
        Column("ranks", "", lambda row: row.point.ranks),
        Column("nodes", "", lambda row: row.point.nodes),
        Column("kind", "", lambda row: row.kind),
        Column("stage", "", lambda row: row.stage),
        Column("joules", "", lambda row: row.joules, has_interval=True),
        Column("runs", "", lambda row: row.joules.n),
    )
    kinds = [(point, kind) for point in points for kind in point.kinds]
    stages = [_Stage(point, kind.kind, stage, joules) for point, kind in kinds for stage, joules in kind.stages]
    return Sheet(
        name="energy-stages",
        title="Energy by stage",
        columns=columns,
        rows=[*stages, *(_Stage(point, kind.kind, "", kind.whole) for point, kind in kinds)],
        pivot=Pivot(
            corner="Energy of",
            down=lambda row: place_of(row.point, row.kind),
            across=lambda row: f"{row.stage or 'whole run'}, J",
            cell=lambda row: row.joules,
        ),
        is_data=lambda row: row.stage != "",
        is_drawn=True,
    )


def slurm_sheet(checks: Sequence[SlurmCheck]) -> Sheet[SlurmCheck]:
    """What Slurm counted beside what was sampled, one job per line."""
    columns: tuple[Column[SlurmCheck], ...] = (
        Column("run_id", "Run", lambda check: check.run_id),
        Column("slurm_j", "Slurm, J", lambda check: check.slurm_j, unit="J"),
        Column("sampled_j", "Sampled, J", lambda check: check.sampled_j, unit="J"),
        Column("sampled_kinds", "Of", lambda check: " and ".join(check.sampled_kinds) or None),
        Column("slurm_over_sampled", "Ratio", lambda check: check.ratio, unit="ratio"),
    )
    return Sheet(
        name="energy-slurm",
        title="Slurm's account beside the samples",
        columns=columns,
        rows=checks,
        caption=SLURM_CAPTION,
    )


@dataclass(frozen=True)
class _Source:
    """One stage of one source in one run."""

    run_id: str
    source: SourceEnergy
    stage: str
    amount: Amount


def sources_sheet(runs: Sequence[RunEnergy]) -> Sheet[_Source]:
    """Every GPU and processor package of every run, stage by stage; for programs only."""
    columns: tuple[Column[_Source], ...] = (
        Column("run_id", "", lambda row: row.run_id),
        Column("node", "", lambda row: row.source.node_rank),
        Column("host", "", lambda row: row.source.host),
        Column("source", "", lambda row: row.source.name),
        Column("kind", "", lambda row: row.source.kind),
        Column("method", "", lambda row: row.source.method),
        Column("counter_over_power", "", lambda row: row.source.counter_over_power),
        Column("samples_in_window", "", lambda row: row.source.samples_in_window),
        Column("stage", "", lambda row: row.stage),
        Column("joules", "", lambda row: row.amount.value),
        Column("seconds", "", lambda row: row.amount.length_ns / 1e9),
        Column("sampled_share", "", lambda row: row.amount.coverage),
    )
    return Sheet(
        name="energy-sources",
        title="Energy of each source",
        columns=columns,
        rows=[
            _Source(run.run_id, source, stage, amount)
            for run in runs
            for source in run.sources
            for stage, amount in source.stages.items()
        ],
        is_shown=lambda row: False,
    )

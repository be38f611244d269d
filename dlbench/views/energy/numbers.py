"""Energy by rank count: joules per sample with an interval over runs, against the baseline, and by stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dlbench.errors import IncompleteDataError
from dlbench.reading.samples.energy import RunEnergy, StageEnergy
from dlbench.reading.samples.energy_sources import KINDS, Kind
from dlbench.reading.samples.node_samples import STAGES
from dlbench.reading.samples.readings import MachineReadings, machine_readings
from dlbench.reading.scaling import Group, Point
from dlbench.reading.table import RunTable
from dlbench.stats.estimates import Estimate, by_definition, median_estimate, ratio_estimate, typical_estimate
from dlbench.stats.pairing import RunKey


@dataclass(frozen=True, kw_only=True)
class KindEnergy:
    """GPUs, or processors, at one rank count, over the runs whose samples hold them.

    Energy per sample is a geometric mean, of which the efficiency is a ratio; the others are medians.
    """

    kind: Kind
    energy_per_sample: Estimate | None
    """Joules of the measured window over its samples, all nodes together; None where too little was sampled."""
    samples_per_joule: Estimate | None
    """Its reciprocal."""
    efficiency: Estimate | None
    """Energy per sample of the baseline over that of this point (ratio); None where one of them is not known."""
    mean_power: Estimate | None
    """Of the measured window, all sources of all nodes together, watts."""
    whole: Estimate
    """Joules from the start of the processes to their end, of what was sampled."""
    stages: tuple[tuple[str, Estimate], ...]
    """The same by stage, in the order of `STAGES`; stages that no run was at are missing."""
    num_sources: tuple[int, ...]
    """GPUs or processor packages per run, each number once."""
    methods: tuple[str, ...]
    """How the energy is known, each way once."""
    sampled_share: float
    """Sampled share of the measured window (1), of the run with the least."""

    @property
    def stages_j(self) -> float:
        """Joules of all stages together."""
        return sum(joules.value for _, joules in self.stages)


@dataclass(frozen=True, kw_only=True)
class EnergyPoint:
    """One rank count, over the runs whose samples were read."""

    ranks: int
    nodes: int
    kinds: tuple[KindEnergy, ...]
    why: tuple[tuple[Kind, str], ...]
    """Why runs have no figure of a kind, each reason once; a kind may be here and in `kinds`."""
    doubts: tuple[str, ...]
    num_unread: int
    """Runs whose samples were not read."""


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Energy of a group of runs."""

    points: tuple[EnergyPoint, ...]
    notes: tuple[str, ...]
    """What a reader must know, and what is damaged."""


@dataclass(frozen=True, kw_only=True)
class SlurmCheck:
    """Slurm's account of a job beside the samples of its run."""

    run_id: str
    slurm_j: float
    """ConsumedEnergyRaw of the whole job."""
    sampled_j: float | None
    """Of the whole run; None where nothing was sampled."""
    sampled_kinds: tuple[Kind, ...]
    """Of what."""
    ratio: float | None
    """slurm_j / sampled_j."""


@dataclass(frozen=True, kw_only=True)
class DetailedEnergy(Energy):
    """Energy over all runs, with what it is made of."""

    runs: tuple[RunEnergy, ...]
    slurm: tuple[SlurmCheck, ...]
    """Of the runs whose jobs Slurm counted; empty where it was not asked."""
    damaged: tuple[str, ...]
    """Runs whose samples could not be read, one line each."""


def energy(group: Group, table: RunTable) -> Energy | None:
    """The energy of each rank count of which a run was read whole; None where none has a figure.

    Args:
        group: comparable runs.
        table: where they are from.
    """
    points, energies, damaged = _energy(group, table, machine_readings(table))
    return Energy(points=points, notes=_notes(energies, damaged)) if any(point.kinds for point in points) else None


def detailed_energy(group: Group, table: RunTable, slurm: Mapping[str, float]) -> DetailedEnergy:
    """The same over all runs; rank counts without a figure are there, too, with the reason.

    Args:
        group: comparable runs.
        table: where they are from.
        slurm: joules that Slurm counted for the job of each run, by run id.
    """
    points, energies, damaged = _energy(group, table, machine_readings(table, None))
    return DetailedEnergy(
        points=points,
        notes=_notes(energies, damaged),
        runs=tuple(energies),
        slurm=tuple(_slurm_check(one, slurm[one.run_id]) for one in energies if one.run_id in slurm),
        damaged=tuple(damaged),
    )


def _energy(
    group: Group, table: RunTable, readings: MachineReadings
) -> tuple[tuple[EnergyPoint, ...], list[RunEnergy], list[str]]:
    """Points, the runs behind them, and what is damaged."""
    keys = table.keys
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
            own = {kind: _by_run(energies, kind, keys) for kind in KINDS}
            if point is group.baseline:
                reference = own
            efficiency = _efficiencies(own, reference, is_baseline=point is group.baseline)
            points.append(_point(point, energies, efficiency, num_unread=len(point.run_ids) - len(read)))
        every += energies
    return tuple(points), every, list(dict.fromkeys(damaged))


def _notes(energies: Iterable[RunEnergy], damaged: Iterable[str]) -> tuple[str, ...]:
    notes = [text for energy in energies for text in energy.notes]
    return tuple(dict.fromkeys([*notes, *(f"damaged: {text}" for text in damaged)]))


def _by_run(energies: Iterable[RunEnergy], kind: Kind, keys: Mapping[str, RunKey]) -> dict[RunKey, float]:
    """Joules per sample of the runs that have a figure."""
    found = ((keys[energy.run_id], energy.energy_per_sample_j(kind)) for energy in energies)
    return {key: joules for key, joules in found if joules is not None and joules > 0}


def _efficiencies(
    own: Mapping[Kind, Mapping[RunKey, float]],
    reference: Mapping[Kind, Mapping[RunKey, float]],
    *,
    is_baseline: bool,
) -> dict[Kind, Estimate]:
    """Of the kinds that have joules per sample on both sides."""
    known = [kind for kind in KINDS if own[kind] and reference.get(kind)]
    return {
        kind: by_definition(1.0, len(own[kind])) if is_baseline else ratio_estimate(reference[kind], own[kind])
        for kind in known
    }


def _point(
    point: Point, energies: Sequence[RunEnergy], efficiency: Mapping[Kind, Estimate], *, num_unread: int
) -> EnergyPoint:
    kinds = (_kind(kind, [one for one in energies if one.of(kind)], efficiency.get(kind)) for kind in KINDS)
    why = ((kind, energy.why[kind]) for kind in KINDS for energy in energies if kind in energy.why)
    return EnergyPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        kinds=tuple(kind for kind in kinds if kind is not None),
        why=tuple(dict.fromkeys(why)),
        doubts=tuple(dict.fromkeys(text for energy in energies for text in energy.doubts)),
        num_unread=num_unread,
    )


def _kind(kind: Kind, energies: Sequence[RunEnergy], efficiency: Estimate | None) -> KindEnergy | None:
    if not energies:
        return None
    joules_each = [joules for energy in energies if (joules := energy.energy_per_sample_j(kind)) is not None]
    each = typical_estimate(joules_each, "J") if joules_each else None
    measured = [energy.stage(kind, "measured") for energy in energies]
    stages = ((stage, _joules(energy.stage(kind, stage) for energy in energies)) for stage in STAGES)
    whole = _joules(energy.stage(kind) for energy in energies)
    assert whole is not None
    return KindEnergy(
        kind=kind,
        energy_per_sample=each,
        # An end of 0 has no reciprocal.
        samples_per_joule=replace(each, low=each.low or None).inverted("samples/J") if each and each.value else None,
        efficiency=efficiency,
        mean_power=_over((stage.mean_power_w if stage else None for stage in measured), "W"),
        whole=whole,
        stages=tuple((stage, joules) for stage, joules in stages if joules is not None),
        num_sources=tuple(sorted({len(energy.of(kind)) for energy in energies})),
        methods=tuple(sorted({method for energy in energies for method in energy.methods(kind)})),
        sampled_share=min(stage.sampled_share for stage in measured if stage is not None),
    )


def _over(values: Iterable[float | None], unit: str) -> Estimate | None:
    known = [value for value in values if value is not None]
    return median_estimate(known, unit) if known else None


def _joules(stages: Iterable[StageEnergy | None]) -> Estimate | None:
    return _over((None if stage is None else stage.joules for stage in stages), "J")


def _slurm_check(energy: RunEnergy, slurm_j: float) -> SlurmCheck:
    sampled = {kind: part.joules for kind in KINDS if (part := energy.stage(kind)) is not None}
    total = sum(sampled.values())
    return SlurmCheck(
        run_id=energy.run_id,
        slurm_j=slurm_j,
        sampled_j=total if sampled else None,
        sampled_kinds=tuple(sampled),
        ratio=slurm_j / total if total else None,
    )

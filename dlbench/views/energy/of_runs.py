"""Energy of comparable runs: a sample's joules with an interval over runs, and Slurm's account beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dlbench.errors import IncompleteDataError
from dlbench.reading.comparability import group_id
from dlbench.reading.samples.energy import RunEnergy, StageEnergy, run_energy
from dlbench.reading.samples.energy_sources import Kind
from dlbench.reading.samples.node_samples import STAGES
from dlbench.records.scan import Run
from dlbench.stats.estimates import Estimate, median_estimate

KINDS: tuple[Kind, ...] = ("GPUs", "processors")


@dataclass(frozen=True, kw_only=True)
class KindEnergy:
    """GPUs, or processors, of all runs of a point that tell; medians over runs."""

    energy_per_sample: Estimate | None
    """Of the measured stage; None where no run was sampled well enough."""
    samples_per_joule: Estimate | None
    """Its reciprocal."""
    mean_power: Estimate | None
    """Mean power of the measured stage, all sources of all nodes together."""
    whole_j: Estimate
    """From the start of the processes to their end, of what was sampled."""
    stages_j: dict[str, Estimate]
    """The same by stage; stages that no run was at are not in it."""
    num_sources: tuple[int, ...]
    """GPUs or packages of a run, each number once."""
    methods: tuple[str, ...]
    sampled_share: float
    """Sampled share of the measured stage (1), of the run with the least."""


@dataclass(frozen=True, kw_only=True)
class EnergyPoint:
    """All comparable runs with one rank and node count."""

    group: str
    """The id of `dlbench.reading.comparability`."""
    variant: str
    """`plain`, or what was taken away from the runs."""
    ranks: int
    nodes: int
    sample: Run
    """One of the runs, to read the common settings from."""
    runs: tuple[RunEnergy, ...]
    kinds: dict[Kind, KindEnergy]
    """Those that a run tells of."""
    why: dict[Kind, tuple[str, ...]]
    """Why runs tell nothing of a kind, each reason once; a kind may be in both."""
    doubts: tuple[str, ...]
    notes: tuple[str, ...]
    damaged: tuple[str, ...]
    """Runs whose samples could not be read, one line each."""


def energy_points(runs: Iterable[Run], energy_of: Callable[[Run], RunEnergy] = run_energy) -> list[EnergyPoint]:
    """The energy of every group of comparable runs and rank count, in the order in which they are first met.

    Args:
        runs: those with figures, each once: `dlbench.reading.run_table.RunTable.runs`.
        energy_of: the energy of one run, for callers that have it already; raises as `run_energy` does.
    """
    found: dict[tuple[str, str, int, int], list[Run]] = {}
    for run in runs:
        layout = run.plan.layout
        key = (group_id(run), run.plan.series.variant, layout.ranks, layout.nodes)
        found.setdefault(key, []).append(run)
    order = {group: number for number, group in enumerate(dict.fromkeys(key[0] for key in found))}
    keys = sorted(found, key=lambda key: (order[key[0]], key[1] != "plain", *key[1:]))
    return [_point(key, found[key], energy_of) for key in keys]


def _point(key: tuple[str, str, int, int], runs: Sequence[Run], energy_of: Callable[[Run], RunEnergy]) -> EnergyPoint:
    energies: list[RunEnergy] = []
    damaged: list[str] = []
    for run in runs:
        try:
            energies.append(energy_of(run))
        except IncompleteDataError as error:
            damaged.append(str(error))
    group, variant, ranks, nodes = key
    why = {kind: tuple(dict.fromkeys(e.why[kind] for e in energies if kind in e.why)) for kind in KINDS}
    kinds = {kind: _kind(kind, [e for e in energies if e.of(kind)]) for kind in KINDS}
    return EnergyPoint(
        group=group,
        variant=variant,
        ranks=ranks,
        nodes=nodes,
        sample=runs[0],
        runs=tuple(energies),
        kinds={kind: told for kind, told in kinds.items() if told is not None},
        why={kind: reasons for kind, reasons in why.items() if reasons},
        doubts=tuple(dict.fromkeys(text for energy in energies for text in energy.doubts)),
        notes=tuple(dict.fromkeys(text for energy in energies for text in energy.notes)),
        damaged=tuple(damaged),
    )


def _kind(kind: Kind, energies: Sequence[RunEnergy]) -> KindEnergy | None:
    if not energies:
        return None
    each = _over(energy.energy_per_sample_j(kind) for energy in energies)
    measured = [energy.stage(kind, "measured") for energy in energies]
    stages = {stage: _joules(energy.stage(kind, stage) for energy in energies) for stage in STAGES}
    whole = _joules(energy.stage(kind) for energy in energies)
    assert whole is not None
    return KindEnergy(
        energy_per_sample=each,
        samples_per_joule=_reciprocal(each),
        mean_power=_over(stage.mean_power_w if stage else None for stage in measured),
        whole_j=whole,
        stages_j={stage: joules for stage, joules in stages.items() if joules is not None},
        num_sources=tuple(sorted({len(energy.of(kind)) for energy in energies})),
        methods=tuple(sorted({method for energy in energies for method in energy.methods(kind)})),
        sampled_share=min(stage.sampled_share for stage in measured if stage is not None),
    )


def _over(values: Iterable[float | None]) -> Estimate | None:
    told = [value for value in values if value is not None]
    return median_estimate(told) if told else None


def _joules(stages: Iterable[StageEnergy | None]) -> Estimate | None:
    return _over(stage.joules if stage is not None else None for stage in stages)


def _reciprocal(estimate: Estimate | None) -> Estimate | None:
    """1 / estimate; its ends change places."""
    if estimate is None or estimate.value <= 0:
        return None
    low = 1 / estimate.high if estimate.high is not None else None
    high = 1 / estimate.low if estimate.low else None
    return Estimate(1 / estimate.value, low, high, estimate.n, estimate.kind)


@dataclass(frozen=True, kw_only=True)
class SlurmCheck:
    """Slurm's account of a job beside the samples of its run."""

    run_id: str
    slurm_j: float
    """ConsumedEnergyRaw of the whole job, joules."""
    sampled_j: float | None
    """GPUs and processors of the whole run, joules; None where nothing was sampled."""
    ratio: float | None
    """slurm_j / sampled_j."""
    text: str
    """Both in a sentence, and what differs between them."""


def check_slurm(energies: Iterable[RunEnergy], slurm: Mapping[str, float]) -> list[SlurmCheck]:
    """Sets what Slurm counted beside what was sampled, for each run that Slurm tells of.

    Args:
        energies: the runs.
        slurm: joules of the job of each run, by run id.
    """
    return [_one_check(energy, slurm[energy.run_id]) for energy in energies if energy.run_id in slurm]


def _one_check(energy: RunEnergy, slurm_j: float) -> SlurmCheck:
    told = {kind: part.joules for kind in KINDS if (part := energy.stage(kind)) is not None}
    sampled = sum(told.values())
    ratio = slurm_j / sampled if sampled else None
    beside = f", {ratio:.2f} times what was sampled of {' and '.join(told)}" if ratio is not None else ""
    text = (
        f"{energy.run_id}: Slurm's ConsumedEnergy is {slurm_j:.4g} J{beside}; Slurm counts whole nodes with all that "
        "ran on them, from the start of the job to its end"
    )
    return SlurmCheck(
        run_id=energy.run_id, slurm_j=slurm_j, sampled_j=sampled if told else None, ratio=ratio, text=text
    )

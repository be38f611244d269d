"""Runs that differ in nothing but the precision of training, beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dlbench.reading.comparability import group_id
from dlbench.reading.run_table import RunTable
from dlbench.reading.samples.energy_sources import KINDS, Kind
from dlbench.reading.samples.readings import MachineReadings
from dlbench.reading.scaling import Group, Point
from dlbench.records.scan import Run
from dlbench.specs.training import TrainSpec
from dlbench.stats.estimates import Estimate, RunKey, are_paired, median_estimate, ratio_estimate

PRECISIONS = ("fp32", "bf16", "fp16")
"""In this order; the first that ran is what others are measured against."""

PRECISION_KEYS = ("precision", "allow_emulation", "initial_loss_scale", "loss_scale_growth_steps")
"""Settings of `train` that belong to a precision."""


@dataclass(frozen=True, kw_only=True)
class PrecisionRow:
    """One precision at one rank count, against the reference at the same."""

    precision: str
    in_force: tuple[str, ...]
    """What records say was in force, each text once."""
    ranks: int
    nodes: int
    is_reference: bool
    run_ids: tuple[str, ...]
    throughput: Estimate
    """Samples a second."""
    ratio: Estimate | None
    """Throughput over the reference's (1); None for the reference itself."""
    is_paired: bool
    """Whether repeats of both ran interleaved."""
    peak_bytes: Estimate
    """Memory of the rank that held most; see `dlbench.views.memory.numbers`."""
    memory_ratio: Estimate | None
    joules: Estimate | None
    """Of a sample; None where not told."""
    joules_kind: Kind | None
    joules_ratio: Estimate | None
    """Over the reference's (1)."""
    loss: Estimate | None
    """Of the last step, mean over ranks; None where it was not finite."""
    num_not_finite: int
    """Runs whose last loss was not finite."""
    quality: Estimate | None
    """Last evaluation of runs to a quality."""
    num_reached: int | None
    """Runs that met their target; None for runs of speed."""
    overflow_steps: Estimate | None
    """Steps left out because a gradient overflowed; fp16 only."""


@dataclass(frozen=True, kw_only=True)
class PrecisionPair:
    """Groups that differ in nothing but precision."""

    id: str
    groups: tuple[Group, ...]
    """By precision, the reference first."""
    rows: tuple[PrecisionRow, ...]
    """By rank count, then precision, where two or more precisions ran."""


def without_precision(run: Run) -> str:
    """A digest that is equal for runs that differ in nothing but the settings of precision."""
    plan = run.plan
    neutral = {key: TrainSpec.model_fields[key].default for key in PRECISION_KEYS}
    train = plan.workload.train.model_copy(update=neutral)
    workload = plan.workload.model_copy(update={"train": train})
    return group_id(replace(run, plan=plan.model_copy(update={"workload": workload})))


def precision_pairs(groups: Sequence[Group], table: RunTable, readings: MachineReadings) -> tuple[PrecisionPair, ...]:
    """All sets of groups with two or more precisions, in the order of the groups."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(without_precision(group.sample), []).append(group)
    pairs = []
    for digest, members in found.items():
        # Two groups of one precision differ in its settings; they are no pair of precisions.
        by_precision = {_precision(group): group for group in reversed(members)}
        if len(by_precision) < 2:
            continue
        ordered = tuple(sorted(by_precision.values(), key=lambda group: PRECISIONS.index(_precision(group))))
        rows = _rows(ordered, readings)
        if rows:
            pairs.append(PrecisionPair(id=digest, groups=ordered, rows=rows))
    return tuple(pairs)


def _precision(group: Group) -> str:
    return group.sample.plan.workload.train.precision


def _rows(groups: Sequence[Group], readings: MachineReadings) -> tuple[PrecisionRow, ...]:
    by_place: dict[tuple[int, int], list[tuple[Group, Point]]] = {}
    for group in groups:
        for point in group.points:
            by_place.setdefault((point.ranks, point.nodes), []).append((group, point))
    rows: list[PrecisionRow] = []
    for place in sorted(by_place):
        members = [_Side(group, point, readings) for group, point in by_place[place]]
        if len(members) > 1:
            rows += [_row(side, members[0]) for side in members]
    return tuple(rows)


class _Side:
    """One precision at one rank count: its runs by block and repeat."""

    def __init__(self, group: Group, point: Point, readings: MachineReadings) -> None:
        self.group, self.point = group, point
        runs = {run.plan.run_id: run for run in group.runs}
        self.runs = [runs[run_id] for run_id in point.run_ids]
        self.peaks = {pairing_key(run): float(_peak(run)) for run in self.runs}
        self.kind: Kind | None = None
        self.joules: dict[RunKey, float] = {}
        energies = [(run, readings.energy_of(run)) for run in self.runs if _tells(run, readings)]
        for kind in KINDS:
            told = ((pairing_key(run), energy.energy_per_sample_j(kind)) for run, energy in energies)
            joules = {key: value for key, value in told if value}
            if joules and self.kind is None:
                self.kind, self.joules = kind, joules

    @property
    def speeds(self) -> dict[RunKey, float]:
        """Samples a second."""
        return {pairing_key(run): _speed(run) for run in self.runs}


def _tells(run: Run, readings: MachineReadings) -> bool:
    reading = readings.by_run.get(run.plan.run_id)
    return reading is not None and reading.energy is not None


def pairing_key(run: Run) -> RunKey:
    """Block and repeat as if the precision had not been swept: runs with equal keys ran interleaved."""
    series = run.plan.series
    axes = {key: value for key, value in series.axes.items() if key.removeprefix("train.") not in PRECISION_KEYS}
    return " ".join([series.id, run.plan.created, *(f"{key}={axes[key]}" for key in sorted(axes))]), series.repeat


def _row(side: _Side, reference: _Side) -> PrecisionRow:
    is_reference = side is reference
    records = [run.record for run in side.runs if run.record is not None]
    losses = [_loss(run) for run in side.runs]
    told = [loss for loss in losses if loss is not None]
    results = [record.quality for record in records if record.quality is not None]
    values = [result.evaluations[-1].value for result in results if result.evaluations]
    last = [value for value in values if value is not None]
    overflows = [float(record.overflow_steps) for record in records if record.overflow_steps is not None]
    has_joules = bool(side.joules and reference.joules and side.kind == reference.kind)
    return PrecisionRow(
        precision=_precision(side.group),
        in_force=tuple(dict.fromkeys(record.precision for record in records if record.precision)),
        ranks=side.point.ranks,
        nodes=side.point.nodes,
        is_reference=is_reference,
        run_ids=side.point.run_ids,
        throughput=side.point.throughput,
        ratio=None if is_reference else ratio_estimate(side.speeds, reference.speeds),
        is_paired=not is_reference and are_paired(side.speeds, reference.speeds),
        peak_bytes=median_estimate(list(side.peaks.values())),
        memory_ratio=None if is_reference or not _positive(side, reference) else _ratio(side.peaks, reference.peaks),
        joules=median_estimate(list(side.joules.values())) if side.joules else None,
        joules_kind=side.kind,
        joules_ratio=_ratio(side.joules, reference.joules) if has_joules and not is_reference else None,
        loss=median_estimate(told) if told else None,
        num_not_finite=len(losses) - len(told),
        quality=median_estimate(last) if last else None,
        num_reached=sum(result.reached for result in results) if results else None,
        overflow_steps=median_estimate(overflows) if overflows else None,
    )


def _positive(side: _Side, reference: _Side) -> bool:
    return min(side.peaks.values()) > 0 and min(reference.peaks.values()) > 0


def _ratio(top: Mapping[RunKey, float], bottom: Mapping[RunKey, float]) -> Estimate:
    return ratio_estimate(top, bottom)


def _peak(run: Run) -> int:
    assert run.record is not None
    return max(rank.peak_memory_bytes for rank in run.record.ranks)


def _speed(run: Run) -> float:
    """As `dlbench.reading.measures.measure`."""
    assert run.record is not None
    ranks = run.record.ranks
    return sum(rank.samples for rank in ranks) / max(rank.measured_s for rank in ranks)


def _loss(run: Run) -> float | None:
    """Mean over ranks; None where a rank's is not finite."""
    assert run.record is not None
    losses = [rank.last_loss for rank in run.record.ranks]
    told = [loss for loss in losses if loss is not None]
    return sum(told) / len(told) if len(told) == len(losses) else None

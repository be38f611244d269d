"""Runs that differ in nothing but the precision of training, beside each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dlbench.reading.comparability import averaged_id
from dlbench.reading.samples.energy_sources import Kind
from dlbench.reading.samples.readings import MachineReadings, machine_readings
from dlbench.reading.scaling import Group, Point
from dlbench.reading.table import RunTable
from dlbench.records.scan import Run
from dlbench.specs.training import TrainSpec
from dlbench.stats.estimates import Estimate, geometric_mean_estimate, median_estimate, ratio_estimate
from dlbench.stats.pairing import RunKey, pairing
from dlbench.views.precision import words

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
"""In this order; the first that ran is the reference."""

PRECISION_KEYS = ("precision", "allow_emulation", "initial_loss_scale", "loss_scale_growth_steps")
"""Settings of `train` that belong to a precision."""


@dataclass(frozen=True, kw_only=True)
class PrecisionRow:
    """One precision at one rank count, compared with the reference at the same rank count."""

    precision: str
    in_force: str
    """The precision that records report, each text once."""
    ranks: int
    nodes: int
    is_reference: bool
    is_paired: bool
    """Whether its repeats and the reference's ran interleaved."""
    throughput: Estimate
    ratio: Estimate | None
    """Throughput over the reference's; None for the reference itself."""
    peak: Estimate
    """Memory of the rank that held most, bytes; see `dlbench.views.memory.numbers`."""
    memory_ratio: Estimate | None
    energy_per_sample: Estimate | None
    """None where it was not measured."""
    energy_of: Kind | Literal[""]
    energy_ratio: Estimate | None
    loss: Estimate | None
    """Of the last step, mean over ranks; None where it was finite in no run."""
    num_not_finite: int
    """Runs whose last loss was not finite."""
    quality: Estimate | None
    """Last evaluation of runs to a quality."""
    num_reached: int | None
    """Runs that reached their target; None for runs that measure speed."""
    num_runs: int
    overflow_steps: Estimate | None
    """Steps that were skipped because a gradient overflowed; fp16 only."""


@dataclass(frozen=True, kw_only=True)
class PrecisionComparison:
    """Groups that differ in nothing but precision."""

    id: str
    label: str
    """What they have in common."""
    reference: str
    groups: tuple[str, ...]
    """Ids of the groups, by precision, the reference first."""
    sample_unit: str
    rows: tuple[PrecisionRow, ...]
    """By rank count, then precision, where two or more precisions ran."""
    caption: str
    verdict: str
    notes: tuple[str, ...]


def without_precision(run: Run) -> str:
    """A digest that is equal for runs that differ in nothing but the settings of precision."""
    plan = run.plan
    neutral = {key: TrainSpec.model_fields[key].default for key in PRECISION_KEYS}
    train = plan.workload.train.model_copy(update=neutral)
    workload = plan.workload.model_copy(update={"train": train})
    return averaged_id(replace(run, plan=plan.model_copy(update={"workload": workload})))


def precisions(groups: Sequence[Group], table: RunTable) -> tuple[PrecisionComparison, ...]:
    """All sets of groups with two or more precisions, in the order of the groups."""
    readings = machine_readings(table)
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(without_precision(group.sample), []).append(group)
    comparisons = []
    for digest, members in found.items():
        # Two groups of one precision differ in its settings; they are no pair of precisions.
        by_precision = {_precision(group): group for group in reversed(members)}
        if len(by_precision) < 2:
            continue
        ordered = sorted(by_precision.values(), key=lambda group: PRECISIONS.index(_precision(group)))
        rows = _rows(ordered, readings)
        if rows:
            comparisons.append(_comparison(digest, ordered, rows))
    return tuple(comparisons)


def _comparison(digest: str, groups: Sequence[Group], rows: tuple[PrecisionRow, ...]) -> PrecisionComparison:
    plan = groups[0].sample.plan
    reference = _precision(groups[0])
    last = rows[-1]
    ratios = {
        row.precision: row.ratio
        for row in rows
        if (row.ranks, row.nodes) == (last.ranks, last.nodes) and row.ratio is not None
    }
    return PrecisionComparison(
        id=digest,
        label=words.label(plan),
        reference=reference,
        groups=tuple(group.id for group in groups),
        sample_unit=plan.workload.sample_unit,
        rows=rows,
        caption=words.caption(plan),
        verdict=words.verdict(last.ranks, last.nodes, ratios, reference),
        notes=words.notes(
            is_interleaved=all(row.is_paired for row in rows if not row.is_reference),
            is_finite=not any(row.num_not_finite for row in rows),
        ),
    )


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
        self.speeds = {pairing_key(run): _speed(run) for run in self.runs}
        self.peaks = {pairing_key(run): float(_peak(run)) for run in self.runs}
        self.energy_of: Kind | Literal[""] = ""
        self.energies: dict[RunKey, float] = {}
        for kind in ("GPUs", "processors"):
            if not self.energies:
                self.energies = _energies(self.runs, readings, kind)
                self.energy_of = kind if self.energies else ""


def _energies(runs: Sequence[Run], readings: MachineReadings, kind: Kind) -> dict[RunKey, float]:
    """Joules per sample of the runs whose samples were read and tell of this kind."""
    found = {}
    for run in runs:
        reading = readings.by_run.get(run.plan.run_id)
        joules = None if reading is None or reading.energy is None else reading.energy.energy_per_sample_j(kind)
        if joules:
            found[pairing_key(run)] = joules
    return found


def pairing_key(run: Run) -> RunKey:
    """Block and repeat without the swept precision: runs with equal keys ran interleaved."""
    series = run.plan.series
    axes = {key: value for key, value in series.axes.items() if key.removeprefix("train.") not in PRECISION_KEYS}
    return " ".join([series.id, run.plan.created, *(f"{key}={axes[key]}" for key in sorted(axes))]), series.repeat


def _row(side: _Side, reference: _Side) -> PrecisionRow:
    is_reference = side is reference
    records = [run.record for run in side.runs if run.record is not None]
    losses = [_loss(run) for run in side.runs]
    finite = [loss for loss in losses if loss is not None]
    results = [record.quality for record in records if record.quality is not None]
    values = [result.evaluations[-1].value for result in results if result.evaluations]
    overflows = [float(record.overflow_steps) for record in records if record.overflow_steps is not None]
    same_kind = side.energy_of == reference.energy_of
    return PrecisionRow(
        precision=_precision(side.group),
        in_force="; ".join(dict.fromkeys(record.precision for record in records if record.precision)),
        ranks=side.point.ranks,
        nodes=side.point.nodes,
        is_reference=is_reference,
        is_paired=not is_reference and pairing(side.speeds, reference.speeds).is_paired,
        throughput=side.point.throughput,
        ratio=None if is_reference else ratio_estimate(side.speeds, reference.speeds),
        peak=median_estimate(list(side.peaks.values()), "bytes"),
        memory_ratio=None if is_reference else _ratio(side.peaks, reference.peaks),
        energy_per_sample=geometric_mean_estimate(list(side.energies.values()), "J") if side.energies else None,
        energy_of=side.energy_of,
        energy_ratio=_ratio(side.energies, reference.energies) if same_kind and not is_reference else None,
        loss=_median(finite, "loss"),
        num_not_finite=len(losses) - len(finite),
        quality=_median([value for value in values if value is not None], "ratio"),
        num_reached=sum(result.reached for result in results) if results else None,
        num_runs=len(side.runs),
        overflow_steps=_median(overflows, "steps"),
    )


def _median(values: Collection[float], unit: str) -> Estimate | None:
    return median_estimate(list(values), unit) if values else None


def _ratio(top: Mapping[RunKey, float], bottom: Mapping[RunKey, float]) -> Estimate | None:
    """None where a side is empty, or holds a value that is not positive."""
    is_known = all(side and min(side.values()) > 0 for side in (top, bottom))
    return ratio_estimate(top, bottom) if is_known else None


def _peak(run: Run) -> int:
    assert run.record is not None
    return max(rank.peak_memory_bytes for rank in run.record.ranks)


def _speed(run: Run) -> float:
    """Samples per second, as `dlbench.reading.measures.measure` computes it."""
    assert run.record is not None
    ranks = run.record.ranks
    return sum(rank.samples for rank in ranks) / max(rank.measured_s for rank in ranks)


def _loss(run: Run) -> float | None:
    """Of the last step, mean over ranks; None where a rank's is not finite."""
    assert run.record is not None
    losses = [rank.last_loss for rank in run.record.ranks]
    finite = [loss for loss in losses if loss is not None]
    return sum(finite) / len(finite) if len(finite) == len(losses) else None

"""The shuffle audit of a group, and groups that differ only in how they shuffle against global shuffling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.reading.scaling import Group, Point
from dlbench.reading.table import RunTable
from dlbench.records.data_path import ShuffleEpoch, ShuffleResult
from dlbench.records.scan import Run
from dlbench.stats.estimates import Estimate, by_definition, geometric_mean_estimate, median_estimate, ratio_estimate
from dlbench.stats.pairing import pairing
from dlbench.views.data_path.epochs import SHUFFLE_KEYS, STAGING_KEYS, alike, epoch_times

MAX_EPOCHS = 50
"""Epochs of a table, of each rank count."""
MAX_ERRORS = 20
"""Errors that are listed."""
MAX_CURVES = 8
"""Runs of one setting that are drawn."""


@dataclass(frozen=True, kw_only=True)
class AuditRow:
    """One epoch of the run in the middle of a rank count."""

    ranks: int
    nodes: int
    run_id: str
    audit: ShuffleEpoch


@dataclass(frozen=True, kw_only=True)
class AuditPoint:
    """The audit of all runs of one rank count."""

    ranks: int
    nodes: int
    num_runs: int
    num_bad: int
    """Runs with errors."""
    whole_epochs: int
    """Epochs that were read whole, over all runs."""
    twice: int
    """Samples read more than once in an epoch, over all runs."""
    never: int
    sent: int
    received: int
    exchanged_share: float
    """Q in force, mean over runs."""
    novelty: float | None
    """Mean over whole epochs and runs; None where there is none."""
    label_distance: float | None
    held_samples_peak: int | None
    exchange_wait_s: float
    """Longest wait of any run."""
    audit_s: Estimate
    """What the audit cost, mean over ranks."""
    audit_share: float | None
    """The same over the time of the measured steps, largest of any run; None: not known."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Who read what in a group of runs."""

    shuffle: str
    partition: str | None
    points: tuple[AuditPoint, ...]
    epochs: tuple[AuditRow, ...]
    errors: tuple[str, ...]
    """Samples read twice or never, by name, with the run; at most `MAX_ERRORS`."""
    num_errors: int


def audit(group: Group, table: RunTable) -> Audit | None:
    """The audit at each rank count; None where no run has one."""
    found = [(point, runs) for point in group.points if (runs := _runs(point, table))]
    if not found:
        return None
    first = _result(found[0][1][0])
    errors = [f"{run.plan.run_id}: {text}" for _, runs in found for run in runs for text in _result(run).errors]
    return Audit(
        shuffle=first.shuffle,
        partition=first.partition,
        points=tuple(_point(point, runs, table) for point, runs in found),
        epochs=tuple(
            AuditRow(ranks=point.ranks, nodes=point.nodes, run_id=runs[0].plan.run_id, audit=one)
            for point, runs in found
            for one in _result(runs[0]).epochs[:MAX_EPOCHS]
        ),
        errors=tuple(errors[:MAX_ERRORS]),
        num_errors=len(errors),
    )


def _runs(point: Point, table: RunTable) -> list[Run]:
    """Runs with an audit, one with errors first."""
    runs = [table.runs[run_id] for run_id in point.run_ids]
    known = [run for run in runs if run.record is not None and run.record.shuffle is not None]
    return sorted(known, key=lambda run: not _result(run).errors)


def _result(run: Run) -> ShuffleResult:
    assert run.record is not None
    assert run.record.shuffle is not None
    return run.record.shuffle


def _point(point: Point, runs: Sequence[Run], table: RunTable) -> AuditPoint:
    results = [_result(run) for run in runs]
    epochs = [one for result in results for one in result.epochs]
    held = [result.held_samples_peak for result in results if result.held_samples_peak is not None]
    return AuditPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        num_runs=len(runs),
        num_bad=sum(bool(result.errors) for result in results),
        whole_epochs=sum(one.is_whole for one in epochs),
        twice=sum(one.twice for one in epochs),
        never=sum(one.never for one in epochs),
        sent=sum(one.sent for one in epochs),
        received=sum(one.received for one in epochs),
        exchanged_share=sum(result.exchanged_share for result in results) / len(results),
        novelty=_mean([one.novelty for one in epochs if one.is_whole]),
        label_distance=_mean([one.label_distance for one in epochs if one.is_whole]),
        held_samples_peak=max(held, default=None),
        exchange_wait_s=max(result.exchange_wait_s for result in results),
        audit_s=median_estimate({table.keys[run.plan.run_id]: _result(run).audit_s for run in runs}, "s"),
        audit_share=max((share for run in runs if (share := _audit_share(run)) is not None), default=None),
    )


def _audit_share(run: Run) -> float | None:
    """Of the measured time: an upper limit, as the audit also covers warm-up steps."""
    measured = max((rank.measured_s for rank in run.record.ranks), default=0.0) if run.record is not None else 0.0
    return _result(run).audit_s / measured if measured else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


# Against global shuffling


@dataclass(frozen=True, kw_only=True)
class Learning:
    """The metric of one run after each evaluation."""

    run_id: str
    epochs: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class ShuffleRow:
    """One way of shuffling at one rank count."""

    group: str
    ranks: int
    nodes: int
    shuffle: str
    partition: str
    """Empty under global shuffling."""
    staging: str
    is_reference: bool
    """Whether it is global shuffling."""
    epoch_s: Estimate | None
    """None where the record names no size of the data set."""
    factor: Estimate | None
    """Epoch of global shuffling over epoch here: above 1, epochs are faster here."""
    is_paired: bool
    novelty: float | None
    label_distance: float | None
    metric: str
    """Of runs to a quality; empty otherwise."""
    final: Estimate | None
    """Last value of the metric, median over runs."""
    curves: tuple[Learning, ...]
    """At most `MAX_CURVES`."""


@dataclass(frozen=True, kw_only=True)
class ShuffleComparison:
    """Groups that differ in nothing but shuffling, and the staging that it needs."""

    id: str
    """In the page: `shuffling-1`."""
    label: str
    rows: tuple[ShuffleRow, ...]
    """By rank count, global shuffling first."""
    has_global: bool


def comparisons(groups: Sequence[Group], table: RunTable) -> tuple[ShuffleComparison, ...]:
    """All sets of groups with two or more ways of shuffling."""
    made: list[ShuffleComparison] = []
    for members in alike(groups, (*SHUFFLE_KEYS, *STAGING_KEYS)):
        if len({_way(group) for group in members}) < 2:
            continue
        rows = _rows(members, table)
        if rows:
            plan = members[0].sample.plan
            made.append(
                ShuffleComparison(
                    id=f"shuffling-{len(made) + 1}",
                    label=f"{plan.workload.name}, {plan.workload.preset} preset, {plan.series.scaling} scaling",
                    rows=tuple(rows),
                    has_global=any(row.is_reference for row in rows),
                )
            )
    return tuple(made)


def _way(group: Group) -> tuple[str, str]:
    data = group.sample.plan.workload.data
    return data.shuffle, "" if data.shuffle == "global" else data.partition


def _order(group: Group) -> tuple[int, float, str, str, str]:
    """Global first, then local, then partial by Q."""
    data = group.sample.plan.workload.data
    kind = ("global", "local").index(data.shuffle) if data.shuffle in ("global", "local") else 2
    return kind, data.exchanged_share, data.partition, data.staging, group.id


def _rows(members: Sequence[Group], table: RunTable) -> list[ShuffleRow]:
    by_place: dict[tuple[int, int], list[tuple[Group, Point]]] = {}
    for group in sorted(members, key=_order):
        for point in group.points:
            by_place.setdefault((point.ranks, point.nodes), []).append((group, point))
    rows = []
    for place in sorted(by_place):
        sides = by_place[place]
        if len({_way(group) for group, _ in sides}) < 2:
            continue
        # In place rather than staged, where both ran.
        reference = next(((group, point) for group, point in sides if _way(group)[0] == "global"), None)
        rows += [_row(group, point, reference, table) for group, point in sides]
    return rows


def _row(group: Group, point: Point, reference: tuple[Group, Point] | None, table: RunTable) -> ShuffleRow:
    data = group.sample.plan.workload.data
    is_reference = reference is not None and reference[0] is group
    own = epoch_times(point, table)
    base = epoch_times(reference[1], table) if reference is not None else {}
    factor = None
    if own and base:
        factor = by_definition(1.0, len(own)) if is_reference else ratio_estimate(base, own)
    runs = [table.runs[run_id] for run_id in point.run_ids]
    audited = _runs(point, table)
    found = _point(point, audited, table) if audited else None
    curves = [curve for run in runs if (curve := _curve(run)) is not None]
    quality = next((run.record.quality for run in runs if run.record and run.record.quality), None)
    return ShuffleRow(
        group=group.id,
        ranks=point.ranks,
        nodes=point.nodes,
        shuffle=data.shuffle,
        partition=_way(group)[1],
        staging=data.staging,
        is_reference=is_reference,
        epoch_s=geometric_mean_estimate(own, "s") if own else None,
        factor=factor,
        is_paired=bool(own) and pairing(own, base).is_paired,
        novelty=found.novelty if found else None,
        label_distance=found.label_distance if found else None,
        metric=quality.metric if quality is not None else "",
        final=median_estimate(
            {table.keys[curve.run_id]: curve.values[-1] for curve in curves},
            "error" if quality.metric == "mae" else "fraction",
        )
        if curves and quality is not None
        else None,
        curves=tuple(curves[:MAX_CURVES]),
    )


def _curve(run: Run) -> Learning | None:
    quality = None if run.record is None else run.record.quality
    known = [] if quality is None else [(one.epoch, one.value) for one in quality.evaluations if one.value is not None]
    if not known:
        return None
    return Learning(
        run_id=run.plan.run_id,
        epochs=tuple(epoch for epoch, _ in known),
        values=tuple(float(value) for _, value in known),
    )

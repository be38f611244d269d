"""Shuffling: the audit of the samples that ranks read, and epoch times of other shuffling against global shuffling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from dlbench.analysis import scaling
from dlbench.analysis.comparability import averaged_id_without
from dlbench.analysis.scaling import ComparedFigure, ComparedRow, Comparison, Point, at_last_place, best_at_last
from dlbench.analysis.table import RunTable
from dlbench.records.data_path import ShuffleResult
from dlbench.records.scan import Run
from dlbench.report.charts import Chart
from dlbench.report.document import Mark, Section
from dlbench.report.table import Cell, Column, Sheet, column, columns_of, constant, drop_empty_columns, times_cell
from dlbench.report.wording import number_text, percent, runs_text, times_value
from dlbench.stats.estimates import Estimate, by_definition, geometric_mean_estimate, median_estimate, of_known
from dlbench.stats.pairing import RunKey
from dlbench.units import plural
from dlbench.views.data_path import SHUFFLE_KEYS, STAGING_KEYS, epoch_times, with_real_data
from dlbench.views.model import (
    AtPlace,
    GroupSource,
    GroupView,
    Report,
    ReportGroup,
    ReportSource,
    ReportView,
    known_mean,
    optional_text,
    place_columns,
    place_of,
)
from dlbench.views.time_to_train import times_over

MAX_ERRORS = 20  # Number of errors that are listed.
POINTS_CAPTION = (
    "Novelty: share of a rank's samples that it did not read in the epoch before, over that of global shuffling. Label "
    "distance: total variation between the classes of a rank and of all; 0: the same mix."
)
MAX_CHARTS = 4
MIN_AUDIT_SHARE = 0.001  # Share of the steps below which the cost of the audit is not mentioned.


def _three_decimals(value: float) -> Cell:
    return Cell(f"{value:.3f}", number=value)


@dataclass(frozen=True, kw_only=True)
class AuditPoint(AtPlace):
    """The audit of all runs of one rank count."""

    num_runs: int = field(metadata=column("Runs", "audited_runs"))
    num_bad: int = field(metadata=column("With errors", "bad_runs"))
    whole_epochs: int = field(metadata=column("Whole epochs"))
    twice: int = field(metadata=column("Read twice"))  # Samples read more than once in an epoch, over all runs.
    never: int = field(metadata=column("Never read"))  # Samples not read in an epoch, over all runs.
    sent: int = field(metadata=column("Sent"))  # Samples sent to other ranks, over all runs.
    received: int = field(metadata=column("Received"))  # Samples received from other ranks, over all runs.
    exchanged_share: float = field(metadata=column("Exchanged per epoch", unit="fraction"))
    novelty: float | None = field(metadata=column("Novelty", text=_three_decimals))
    label_distance: float | None = field(metadata=column("Label distance", text=_three_decimals, missing="no classes"))
    held_samples_peak: int | None = field(metadata=column("Held per rank at most"))
    exchange_wait_s: float = field(metadata=column("Longest wait for samples", unit="s"))
    audit_s: Estimate = field(metadata=column())  # Seconds that the audit took, mean over ranks.
    audit_share: float | None  # Of the measured steps (1), the largest of any run; None: not known.


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The audit of the samples that ranks read, for a group of runs."""

    shuffle: str
    partition: str | None
    points: tuple[AuditPoint, ...]
    errors: tuple[str, ...]  # Samples read twice or never, by name, with the run; at most `MAX_ERRORS`.
    num_errors: int


def audit(group: scaling.Group, table: RunTable) -> Audit | None:
    """Returns the audit at each rank count; None if no run has one."""
    points: list[AuditPoint] = []
    errors: list[str] = []
    first: ShuffleResult | None = None
    for point in group.points:
        audited = _audited(point, table)
        if not audited:
            continue
        points.append(_point(point, audited, table))
        for run, result in audited:
            first = first or result
            errors += [f"{run.plan.run_id}: {error}" for error in result.errors]
    if first is None:
        return None
    return Audit(
        shuffle=first.shuffle,
        partition=first.partition,
        points=tuple(points),
        errors=tuple(errors[:MAX_ERRORS]),
        num_errors=len(errors),
    )


def _audited(point: Point, table: RunTable) -> list[tuple[Run, ShuffleResult]]:
    """Returns runs with an audit, those with errors first."""
    runs = [table.runs[run_id] for run_id in point.run_ids]
    audited = [(run, run.record.shuffle) for run in runs if run.record is not None and run.record.shuffle is not None]
    return sorted(audited, key=lambda pair: not pair[1].errors)


def _point(point: Point, audited: Sequence[tuple[Run, ShuffleResult]], table: RunTable) -> AuditPoint:
    results = [result for _, result in audited]
    epochs = list(chain.from_iterable(result.epochs for result in results))
    held = [result.held_samples_peak for result in results if result.held_samples_peak is not None]
    shares = []
    for run, result in audited:
        assert run.record is not None
        measured_s = max((rank.measured_s for rank in run.record.ranks), default=0.0)
        if measured_s:
            shares.append(result.audit_s / measured_s)
    return AuditPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        num_runs=len(results),
        num_bad=sum(bool(result.errors) for result in results),
        whole_epochs=sum(epoch.is_whole for epoch in epochs),
        exchanged_share=sum(result.exchanged_share for result in results) / len(results),
        novelty=known_mean(epoch.novelty for epoch in epochs if epoch.is_whole),
        label_distance=known_mean(epoch.label_distance for epoch in epochs if epoch.is_whole),
        held_samples_peak=max(held, default=None),
        exchange_wait_s=max(result.exchange_wait_s for result in results),
        audit_s=median_estimate({table.keys[run.plan.run_id]: result.audit_s for run, result in audited}, "s"),
        audit_share=max(shares, default=None),
        **{name: sum(getattr(epoch, name) for epoch in epochs) for name in ("twice", "never", "sent", "received")},
    )


@dataclass(frozen=True, kw_only=True)
class ShuffleRow:
    """One shuffling at one rank count."""

    group: str
    ranks: int
    nodes: int
    shuffle: str = field(metadata=column("Shuffling"))
    partition: str = field(metadata=column("First parts", text=optional_text))  # Before the first epoch.
    staging: str = field(metadata=column("Staging"))
    staging_tier: str  # Empty without staging.
    is_reference: bool  # Whether it is global shuffling, with which others are compared.
    epoch_s: Estimate | None = field(metadata=column("Epoch"))  # None: size not recorded.
    factor: Estimate | None = field(metadata=column("Against global", text=times_cell))  # Above 1: faster.
    is_paired: bool
    novelty: float | None = field(metadata=column("Novelty", text=_three_decimals))
    label_distance: float | None = field(metadata=column("Label distance", text=_three_decimals))
    metric: str  # Metric of runs to a quality; empty for other runs.
    final: Estimate | None = field(metadata=column("Last value", "final_value"))  # Last value of the metric.

    @property
    def title(self) -> str:
        """The shuffling in words, e.g. ``local, contiguous parts``."""
        return f"{self.shuffle}, {self.partition} parts" if self.partition else self.shuffle


@dataclass(frozen=True, kw_only=True)
class ShuffleComparison:
    """Groups that differ only in shuffling and in the staging that it needs."""

    id: str  # Id in the page: `shuffling-1`.
    label: str
    rows: tuple[ShuffleRow, ...]  # By rank count, global shuffling first.
    has_global: bool


def comparisons(groups: Sequence[scaling.Group], table: RunTable) -> tuple[ShuffleComparison, ...]:
    """Returns all sets of groups with two or more kinds of shuffling."""
    comparison = Comparison(
        common_digest=lambda run: averaged_id_without(run, (*SHUFFLE_KEYS, *STAGING_KEYS)),
        kind=_shuffling,
        reference=lambda group: group.sample.plan.workload.data.shuffle == "global",
        order=_order,  # Without staging first.
        figures={"epoch": ComparedFigure(lambda side: epoch_times(side.point, table), is_time=True)},
    )
    sets = []
    for number, compared in enumerate(comparison.of(with_real_data(groups)), 1):
        plan = next(group.sample.plan for group in groups if group in compared.groups)
        rows = tuple(_row(row, table) for row in compared.rows)
        sets.append(
            ShuffleComparison(
                id=f"shuffling-{number}",
                label=f"{plan.workload.name}, {plan.workload.preset} preset, {plan.series.scaling} scaling",
                rows=rows,
                has_global=any(row.is_reference for row in rows),
            )
        )
    return tuple(sets)


def _shuffling(group: scaling.Group) -> tuple[str, str]:
    data = group.sample.plan.workload.data
    return data.shuffle, "" if data.shuffle == "global" else data.partition


def _order(group: scaling.Group) -> tuple[int, float, str, str, str]:
    data = group.sample.plan.workload.data
    kind = {"global": 0, "local": 1}.get(data.shuffle, 2)
    return kind, data.exchanged_share, data.partition, data.staging, group.id


def _row(row: ComparedRow, table: RunTable) -> ShuffleRow:
    group, point = row.side.group, row.side.point
    data = group.sample.plan.workload.data
    epochs_s = epoch_times(point, table)
    factor, is_paired = row.ratio("epoch")
    if row.is_reference and epochs_s:
        factor, is_paired = by_definition(1.0, len(epochs_s)), True
    novelty = label_distance = None
    audited = _audited(point, table)
    if audited:
        audit_point = _point(point, audited, table)
        novelty, label_distance = audit_point.novelty, audit_point.label_distance
    metric, final = _final_value(point, table)
    return ShuffleRow(
        group=group.id,
        ranks=point.ranks,
        nodes=point.nodes,
        shuffle=data.shuffle,
        partition=_shuffling(group)[1],
        staging=data.staging,
        staging_tier="" if data.staging == "none" else data.staging_tier,
        is_reference=row.is_reference,
        epoch_s=of_known(geometric_mean_estimate, epochs_s, "s"),
        factor=factor,
        is_paired=is_paired,
        novelty=novelty,
        label_distance=label_distance,
        metric=metric,
        final=final,
    )


def _final_value(point: Point, table: RunTable) -> tuple[str, Estimate | None]:
    """Returns the metric of runs to a quality and its last value, median over runs."""
    metric = ""
    values: dict[RunKey, float] = {}
    for run_id in point.run_ids:
        record = table.runs[run_id].record
        if record is None or not record.quality:
            continue
        metric = metric or record.quality.metric
        evaluated = [evaluation.value for evaluation in record.quality.evaluations if evaluation.value is not None]
        if evaluated:
            values[table.keys[run_id]] = float(evaluated[-1])
    return metric, of_known(median_estimate, values, "error" if metric == "mae" else "fraction")


def points_sheet(audit: Audit) -> Sheet[AuditPoint]:
    """Returns the audit by rank count; people see it if there are errors, exchanged samples, or whole epochs."""
    points = audit.points
    is_shown = any(point.num_bad or point.whole_epochs or point.sent for point in points)
    caption, titles = "", {"novelty": ""}
    if any(point.novelty is not None for point in points):
        is_shown, caption, titles = True, POINTS_CAPTION, {}
    columns = columns_of(
        AuditPoint,
        *place_columns(),
        constant("shuffle", audit.shuffle),
        constant("partition", audit.partition),
        *("exchanged_share", "num_runs", "num_bad", "whole_epochs", "twice", "never", "sent", "received"),
        *("novelty", "label_distance", "held_samples_peak", "exchange_wait_s", "audit_s", "audit_share"),
        titles=titles,
    )
    return Sheet(
        name="shuffle-audit",
        title="Shuffle audit",
        columns=drop_empty_columns(columns, points),
        rows=points,
        caption=caption,
        is_shown=lambda row: is_shown,
    )


def compared_sheet(comparison: ShuffleComparison) -> Sheet[ShuffleRow]:
    """Returns the table of kinds of shuffling side by side."""
    titles = {"final_value": ""} if all(row.final is None for row in comparison.rows) else {}

    def paired(row: ShuffleRow) -> bool | None:
        return None if row.is_reference else row.is_paired

    columns = columns_of(
        ShuffleRow,
        *place_columns(),
        *("group", "shuffle", "partition", "staging", "epoch_s", "factor", "novelty", "label_distance", "metric"),
        *("final", Column("is_paired", "In pairs", "is_paired", paired)),
        titles=titles,
    )
    title = f"Kinds of shuffling: {comparison.label}"
    caption = "Runs that differ only in shuffling and its staging. Above 1: faster than with global shuffling."
    return Sheet(name="shuffling", title=title, columns=columns, rows=comparison.rows, caption=caption)


def samples_text(count: int) -> str:
    """Returns ``1 sample``, ``2 samples``."""
    return f"{number_text(count, 'count')} {plural('sample', count)}"


def _charts(comparisons: Sequence[ShuffleComparison]) -> Iterator[Chart]:
    for comparison in comparisons[:MAX_CHARTS]:
        epochs = []
        for row in comparison.rows:
            name = row.title
            if row.staging_tier:
                name += f", {row.staging} to {row.staging_tier}"
            epochs.append((name, row, row.epoch_s))
        yield from times_over("nodes", comparison, "Epoch", epochs, compared_sheet(comparison))


def _audit_headline(points: Sequence[AuditPoint]) -> str:
    num_runs, num_bad = sum(point.num_runs for point in points), sum(point.num_bad for point in points)
    if num_bad:
        twice, never = sum(point.twice for point in points), sum(point.never for point in points)
        samples = f"{samples_text(twice)} read more than once, {samples_text(never)} never"
        return f"errors in {num_bad} of {num_runs} runs: {samples}"
    if any(point.whole_epochs for point in points):
        return f"no sample read twice or missed in an epoch ({runs_text(num_runs)})"
    return f"no sample read twice ({runs_text(num_runs)}); no complete epoch was read"


def _factor_over_global(row: ShuffleRow) -> Estimate | None:
    return None if row.shuffle == "global" else row.factor


class ShuffleAuditView(GroupView):
    """The audit of the samples that ranks read in each epoch, and of their mix."""

    id = "shuffle-audit"
    title = "Shuffle audit"
    key = "shuffle_audit"
    after = "reading"

    def numbers(self, source: GroupSource) -> Audit | None:
        return audit(source.group, source.table)

    def shown(self, group: ReportGroup, audit: Audit) -> Section:
        errors = list(audit.errors)
        if audit.num_errors > len(errors):
            errors.append(f"{audit.num_errors - len(errors)} more errors; the records have all of them")
        audit_share = max(point.audit_share or 0.0 for point in audit.points)
        note = f"The audit costs {percent(audit_share)} of the steps."
        return Section(
            headline=_audit_headline(audit.points),
            marks=tuple(Mark(severity="serious", label="Error", text=error) for error in errors),
            notes=(note,) if audit_share >= MIN_AUDIT_SHARE else (),
            sheets=(points_sheet(audit),),
        )


class ShufflingView(ReportView):
    """Local and partial shuffling compared with global shuffling."""

    id = "shuffling"
    title = "Kinds of shuffling compared"
    key = "shuffling"
    after = "break-even"

    def numbers(self, source: ReportSource) -> tuple[ShuffleComparison, ...]:
        return comparisons(source.groups, source.table)

    def shown(self, report: Report, comparisons: tuple[ShuffleComparison, ...]) -> Section:
        best = best_at_last(comparisons[0].rows, _factor_over_global)
        headline = "nothing to compare: there are no runs with global shuffling, or none with other shuffling"
        if best is not None:
            factor, row = best
            headline = (
                f"{place_of(row)}: epochs {times_value(factor)} as fast with {row.title} as with global shuffling"
            )
        without_global = [
            comparison.label
            for comparison in comparisons
            if not any(row.is_reference for row in at_last_place(comparison.rows))
        ]
        why = "no runs with global shuffling, so there is nothing to compare with."
        return Section(
            headline=headline,
            words=tuple(f"{label}: {why}" for label in without_global),
            charts=lambda: list(_charts(comparisons)),
            sheets=tuple(map(compared_sheet, comparisons)),
        )

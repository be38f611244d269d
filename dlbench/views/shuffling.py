"""Shuffling: the audit of who read what, and epoch times of local and partial against global shuffling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dlbench.analysis import scaling
from dlbench.analysis.comparability import averaged_id_without
from dlbench.analysis.scaling import Point
from dlbench.analysis.side_by_side import ComparedFigure, ComparedRow, Comparison, at_last_place, best_at_last
from dlbench.analysis.table import RunTable
from dlbench.records.data_path import ShuffleResult
from dlbench.records.scan import Run
from dlbench.report.charts.chart import Chart
from dlbench.report.document import Mark, Section
from dlbench.report.table import Cell, Column, Sheet, column, columns_of, drop_empty_columns, times_cell
from dlbench.report.wording import number_text, percent, runs_text, times_value
from dlbench.stats.estimates import Estimate, by_definition, geometric_mean_estimate, median_estimate
from dlbench.views.data_path import SHUFFLE_KEYS, STAGING_KEYS, epoch_times, with_real_data
from dlbench.views.model import Report, ReportGroup
from dlbench.views.time_to_train import times_over
from dlbench.views.view import GroupSource, GroupView, ReportSource, ReportView, place_columns, place_of

MAX_ERRORS = 20  # Errors that are listed.
POINTS_CAPTION = (
    "Novelty: share of a rank's samples that it did not read in the epoch before, over that of global shuffling. Label "
    "distance: total variation between the classes of a rank and of all; 0: the same mix."
)
MAX_CHARTS = 4
WORTH_SAYING = 0.001  # Share of the steps below which the cost of the audit is not mentioned.


def _three(value: float) -> Cell:
    return Cell(f"{value:.3f}", number=value)


@dataclass(frozen=True, kw_only=True)
class AuditPoint:
    """The audit of all runs of one rank count."""

    ranks: int
    nodes: int
    num_runs: int = field(metadata=column("Runs", "audited_runs"))
    num_bad: int = field(metadata=column("With errors", "bad_runs"))
    whole_epochs: int = field(metadata=column("Whole epochs"))
    twice: int = field(metadata=column("Read twice"))  # Samples read so in an epoch, over all runs.
    never: int = field(metadata=column("Never read"))
    sent: int = field(metadata=column("Sent"))
    received: int = field(metadata=column("Received"))
    exchanged_share: float = field(metadata=column("Exchanged per epoch", unit="fraction"))
    """Q in force, mean over runs."""
    novelty: float | None = field(metadata=column("Novelty", text=_three))
    label_distance: float | None = field(metadata=column("Label distance", text=_three, missing="no classes"))
    held_samples_peak: int | None = field(metadata=column("Held per rank at most"))
    exchange_wait_s: float = field(metadata=column("Longest wait for samples", unit="s"))  # Longest wait of any run.
    audit_s: Estimate = field(metadata=column())  # What the audit cost, mean over ranks.
    audit_share: float | None  # The same over the time of the measured steps, largest of any run; None: not known.


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Who read what in a group of runs."""

    shuffle: str
    partition: str | None
    points: tuple[AuditPoint, ...]
    errors: tuple[str, ...]  # Samples read twice or never, by name, with the run; at most `MAX_ERRORS`.
    num_errors: int


def audit(group: scaling.Group, table: RunTable) -> Audit | None:
    """The audit at each rank count; None where no run has one."""
    found = [(point, audited) for point in group.points if (audited := _audited(point, table))]
    if not found:
        return None
    first = found[0][1][0][1]
    errors = [f"{run.plan.run_id}: {text}" for _, audited in found for run, one in audited for text in one.errors]
    return Audit(
        shuffle=first.shuffle,
        partition=first.partition,
        points=tuple(_point(point, audited, table) for point, audited in found),
        errors=tuple(errors[:MAX_ERRORS]),
        num_errors=len(errors),
    )


def _audited(point: Point, table: RunTable) -> list[tuple[Run, ShuffleResult]]:
    """Runs with an audit, one with errors first."""
    runs = [table.runs[run_id] for run_id in point.run_ids]
    found = [(run, run.record.shuffle) for run in runs if run.record is not None and run.record.shuffle is not None]
    return sorted(found, key=lambda one: not one[1].errors)


def _point(point: Point, audited: Sequence[tuple[Run, ShuffleResult]], table: RunTable) -> AuditPoint:
    results = [result for _, result in audited]
    epochs = [one for result in results for one in result.epochs]
    held = [result.held_samples_peak for result in results if result.held_samples_peak is not None]
    # Of the measured time: an upper limit, as the audit also covers warm-up steps.
    measured = [max((rank.measured_s for rank in run.record.ranks), default=0.0) for run, _ in audited if run.record]
    shares = [result.audit_s / seconds for result, seconds in zip(results, measured, strict=True) if seconds]
    return AuditPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        num_runs=len(results),
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
        audit_s=median_estimate({table.keys[run.plan.run_id]: result.audit_s for run, result in audited}, "s"),
        audit_share=max(shares, default=None),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


@dataclass(frozen=True, kw_only=True)
class ShuffleRow:
    """One way of shuffling at one rank count."""

    group: str
    ranks: int
    nodes: int
    shuffle: str = field(metadata=column("Shuffling"))
    partition: str = field(metadata=column("First parts", text=lambda found: found or None))
    """Empty under global shuffling."""
    staging: str = field(metadata=column("Staging"))
    staging_tier: str  # Empty where nothing is staged.
    is_reference: bool
    epoch_s: Estimate | None = field(metadata=column("Epoch"))
    """None where the record names no size of the data set."""
    factor: Estimate | None = field(metadata=column("Against global", text=times_cell))
    """Epoch of global shuffling over epoch here: above 1, epochs are faster here."""
    is_paired: bool
    novelty: float | None = field(metadata=column("Novelty", text=_three))
    label_distance: float | None = field(metadata=column("Label distance", text=_three))
    metric: str  # Of runs to a quality; empty otherwise.
    final: Estimate | None = field(metadata=column("Last value", "final_value"))

    @property
    def way(self) -> str:
        """``local, contiguous parts``."""
        return f"{self.shuffle}, {self.partition} parts" if self.partition else self.shuffle


@dataclass(frozen=True, kw_only=True)
class ShuffleComparison:
    """Groups that differ in nothing but shuffling, and the staging that it needs."""

    id: str  # In the page: `shuffling-1`.
    label: str
    rows: tuple[ShuffleRow, ...]  # By rank count, global shuffling first.
    has_global: bool


def comparisons(groups: Sequence[scaling.Group], table: RunTable) -> tuple[ShuffleComparison, ...]:
    """All sets of groups with two or more ways of shuffling."""
    # In place rather than staged, where both ran.
    comparison = Comparison(
        differ_in=lambda run: averaged_id_without(run, (*SHUFFLE_KEYS, *STAGING_KEYS)),
        kind=_way,
        reference=lambda group: _way(group)[0] == "global",
        order=_order,
        figures={"epoch": ComparedFigure(lambda side: epoch_times(side.point, table), is_time=True)},
    )
    made = []
    for number, one in enumerate(comparison.of(with_real_data(groups)), 1):
        plan = next(group.sample.plan for group in groups if group in one.groups)
        rows = [_row(row, table) for row in one.rows]
        label = f"{plan.workload.name}, {plan.workload.preset} preset, {plan.series.scaling} scaling"
        made.append(
            ShuffleComparison(
                id=f"shuffling-{number}", label=label, rows=tuple(rows), has_global=any(r.is_reference for r in rows)
            )
        )
    return tuple(made)


def _way(group: scaling.Group) -> tuple[str, str]:
    data = group.sample.plan.workload.data
    return data.shuffle, "" if data.shuffle == "global" else data.partition


def _order(group: scaling.Group) -> tuple[int, float, str, str, str]:
    """Global first, then local, then partial by Q."""
    data = group.sample.plan.workload.data
    kind = ("global", "local").index(data.shuffle) if data.shuffle in ("global", "local") else 2
    return kind, data.exchanged_share, data.partition, data.staging, group.id


def _row(one: ComparedRow, table: RunTable) -> ShuffleRow:
    group, point = one.side.group, one.side.point
    data = group.sample.plan.workload.data
    own = epoch_times(point, table)
    factor, is_paired = one.ratio("epoch")
    if one.is_reference and own:
        factor, is_paired = by_definition(1.0, len(own)), True
    runs = [table.runs[run_id] for run_id in point.run_ids]
    audited = _audited(point, table)
    found = _point(point, audited, table) if audited else None
    qualities = {table.keys[run.plan.run_id]: run.record.quality for run in runs if run.record and run.record.quality}
    finals = {}
    for key, result in qualities.items():
        known = [evaluation.value for evaluation in result.evaluations if evaluation.value is not None]
        if known:
            finals[key] = float(known[-1])
    quality = next(iter(qualities.values()), None)
    return ShuffleRow(
        group=group.id,
        ranks=point.ranks,
        nodes=point.nodes,
        shuffle=data.shuffle,
        partition=_way(group)[1],
        staging=data.staging,
        staging_tier="" if data.staging == "none" else data.staging_tier,
        is_reference=one.is_reference,
        epoch_s=geometric_mean_estimate(own, "s") if own else None,
        factor=factor,
        is_paired=is_paired,
        novelty=found.novelty if found else None,
        label_distance=found.label_distance if found else None,
        metric=quality.metric if quality is not None else "",
        final=median_estimate(finals, "error" if quality.metric == "mae" else "fraction")
        if finals and quality is not None
        else None,
    )


def points_sheet(found: Audit) -> Sheet[AuditPoint]:
    """The audit of all runs by rank count; people see it where there are errors, exchange, or whole epochs."""
    points = found.points
    mixed = any(point.novelty is not None for point in points)
    is_telling = mixed or any(point.num_bad or point.whole_epochs or point.sent for point in points)
    columns = columns_of(
        AuditPoint,
        *place_columns(),
        Column("shuffle", "", lambda point: found.shuffle),
        Column("partition", "", lambda point: found.partition),
        *("exchanged_share", "num_runs", "num_bad", "whole_epochs", "twice", "never", "sent", "received"),
        *("novelty", "label_distance", "held_samples_peak", "exchange_wait_s", "audit_s", "audit_share"),
        titles={} if mixed else {"novelty": ""},
    )
    return Sheet(
        name="shuffle-audit",
        title="Shuffle audit",
        columns=drop_empty_columns(columns, points),
        rows=points,
        caption=POINTS_CAPTION if mixed else "",
        is_shown=lambda point: is_telling,
    )


def compared_sheet(found: ShuffleComparison) -> Sheet[ShuffleRow]:
    """Ways of shuffling side by side."""

    def paired(row: ShuffleRow) -> str | None:
        return None if row.is_reference else "yes" if row.is_paired else "no"

    columns = columns_of(
        ShuffleRow,
        *place_columns(),
        *("group", "shuffle", "partition", "staging", "epoch_s", "factor", "novelty", "label_distance", "metric"),
        "final",
        Column("is_paired", "In pairs", lambda row: row.is_paired, paired),
        titles={} if any(row.final is not None for row in found.rows) else {"final_value": ""},
    )
    return Sheet(
        name="shuffling",
        title=f"Ways of shuffling: {found.label}",
        columns=columns,
        rows=found.rows,
        caption="Runs alike but for shuffling and its staging. Above 1: faster than with global shuffling.",
    )


def samples_text(count: int) -> str:
    """``1 sample``, ``2 samples``."""
    return f"{number_text(count, 'count')} sample{'' if count == 1 else 's'}"


def _charts(found: Sequence[ShuffleComparison]) -> Iterator[Chart]:
    for comparison in found[:MAX_CHARTS]:
        epochs = [
            (f"{row.way}, {row.staging} to {row.staging_tier}" if row.staging_tier else row.way, row, row.epoch_s)
            for row in comparison.rows
        ]
        yield from times_over("nodes", comparison, "Epoch", epochs, compared_sheet(comparison))


class ShuffleAuditView(GroupView):
    """Whether each sample was read once an epoch, and how well samples were mixed."""

    id = "shuffle-audit"
    title = "Shuffle audit"
    key = "shuffle_audit"
    after = "reading"

    def numbers(self, source: GroupSource) -> Audit | None:
        return audit(source.group, source.table)

    def shown(self, group: ReportGroup, found: Audit) -> Section:
        left, cost = found.num_errors - len(found.errors), max(point.audit_share or 0.0 for point in found.points)
        more = [f"{left} more errors; the records hold all of them"] * bool(left)
        bad, runs, whole, twice, never = (
            sum(getattr(point, name) for point in found.points)
            for name in ("num_bad", "num_runs", "whole_epochs", "twice", "never")
        )
        headline = f"no sample read twice ({runs_text(runs)}); no epoch was read whole"
        if bad:
            headline = f"errors in {bad} of {runs} runs: {samples_text(twice)} read more than once, "
            headline += f"{samples_text(never)} never"
        elif whole:
            headline = f"no sample read twice or missed in an epoch ({runs_text(runs)})"
        return Section(
            headline=headline,
            marks=tuple(Mark(severity="serious", label="Error", text=text) for text in (*found.errors, *more)),
            notes=(f"The audit costs {percent(cost)} of the steps.",) if cost >= WORTH_SAYING else (),
            sheets=(points_sheet(found),),
        )


class ShufflingView(ReportView):
    """Local and partial shuffling against global shuffling."""

    id = "shuffling"
    title = "Ways of shuffling compared"
    key = "shuffling"
    after = "break-even"

    def numbers(self, source: ReportSource) -> tuple[ShuffleComparison, ...]:
        return comparisons(source.groups, source.table)

    def shown(self, report: Report, found: tuple[ShuffleComparison, ...]) -> Section:
        best = best_at_last(found[0].rows, lambda row: None if row.shuffle == "global" else row.factor)
        headline = "nothing to compare: other shuffling, or global shuffling, did not run"
        if best is not None:
            factor, row = best
            headline = f"{place_of(row)}: epochs {times_value(factor)} as fast with {row.way} as with global shuffling"
        return Section(
            headline=headline,
            words=tuple(
                f"{one.label}: global shuffling did not run: there is nothing to compare with."
                for one in found
                if not any(row.is_reference for row in at_last_place(one.rows))
            ),
            charts=lambda: list(_charts(found)),
            sheets=tuple(map(compared_sheet, found)),
        )

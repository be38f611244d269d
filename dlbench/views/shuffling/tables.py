"""Sheets on shuffling: the audit by rank count and by epoch, and ways of shuffling against global shuffling."""

from __future__ import annotations

from collections.abc import Sequence

from dlbench.report.table import Cell, Column, Sheet, times_cell
from dlbench.report.wording import number_text, percent
from dlbench.views.columns import telling
from dlbench.views.shuffling.numbers import Audit, AuditPoint, AuditRow, ShuffleComparison, ShuffleRow
from dlbench.views.view import place_columns

POINTS_CAPTION = (
    "Novelty: share of a rank's samples that it did not read in the epoch before, over that of global shuffling. Label "
    "distance: total variation between the classes of a rank and of all; 0: the same mix."
)
EPOCHS_CAPTION = "One run of each rank count. Left out: because they fill no batch on every rank."
COMPARED_CAPTION = "Runs alike but for shuffling and its staging. Above 1: faster than with global shuffling."


def points_sheet(found: Audit) -> Sheet[AuditPoint]:
    """The audit of all runs by rank count; people see it where there are errors, exchange, or whole epochs."""
    points = found.points
    mixed = any(point.novelty is not None for point in points)
    is_telling = mixed or any(point.num_bad or point.whole_epochs or point.sent for point in points)

    columns: tuple[Column[AuditPoint], ...] = (
        *place_columns(),
        Column("shuffle", "", lambda point: found.shuffle),
        Column("partition", "", lambda point: found.partition),
        Column(
            "exchanged_share",
            "Exchanged per epoch",
            lambda point: point.exchanged_share,
            unit="fraction",
        ),
        Column("audited_runs", "Runs", lambda point: point.num_runs, is_brief=True),
        Column("bad_runs", "With errors", lambda point: point.num_bad, is_brief=True),
        Column("whole_epochs", "Whole epochs", lambda point: point.whole_epochs),
        Column("twice", "Read twice", lambda point: point.twice, is_brief=True),
        Column("never", "Never read", lambda point: point.never, is_brief=True),
        Column("sent", "Sent", lambda point: point.sent),
        Column("received", "Received", lambda point: point.received),
        Column(
            "novelty",
            "Novelty" if mixed else "",
            lambda point: point.novelty,
            lambda point: _three(point.novelty),
            is_brief=True,
        ),
        Column(
            "label_distance",
            "Label distance",
            lambda point: point.label_distance,
            _distance,
            is_brief=True,
        ),
        Column(
            "held_samples_peak",
            "Held by a rank at most",
            lambda point: point.held_samples_peak,
        ),
        Column(
            "exchange_wait_s",
            "Longest wait for samples",
            lambda point: point.exchange_wait_s,
            unit="s",
        ),
        Column("audit_s", "", lambda point: point.audit_s, has_interval=True),
        Column("audit_share", "", lambda point: point.audit_share, unit="fraction"),
    )
    return Sheet(
        name="shuffle-audit",
        title="Shuffle audit",
        columns=telling(columns, points),
        rows=points,
        caption=POINTS_CAPTION if mixed else "",
        is_shown=lambda point: is_telling,
    )


def _three(value: float | None) -> Cell | None:
    return None if value is None else Cell(f"{value:.3f}", number=value)


def _distance(row: AuditPoint) -> Cell:
    return _three(row.label_distance) or Cell("no classes")


def epochs_sheet(rows: Sequence[AuditRow]) -> Sheet[AuditRow]:
    """Epoch by epoch."""
    columns: tuple[Column[AuditRow], ...] = (
        *place_columns(),
        Column("run_id", "", lambda row: row.run_id),
        Column("epoch", "Epoch", lambda row: row.audit.epoch, _epoch, is_brief=True),
        Column("is_whole", "", lambda row: row.audit.is_whole),
        Column("visits", "Read", lambda row: row.audit.visits, is_brief=True),
        Column("left_out", "Left out", lambda row: row.audit.left_out),
        Column("twice", "Twice", lambda row: row.audit.twice, is_brief=True),
        Column("never", "Never", lambda row: row.audit.never, is_brief=True),
        Column("sent", "Sent", lambda row: row.audit.sent),
        Column("received", "Received", lambda row: row.audit.received),
        Column("sent_bytes", "Bytes sent", lambda row: row.audit.sent_bytes, unit="bytes"),
        Column("novelty", "Novelty", lambda row: row.audit.novelty, lambda row: _three(row.audit.novelty)),
        Column(
            "label_distance",
            "Label distance",
            lambda row: row.audit.label_distance,
            lambda row: _three(row.audit.label_distance),
        ),
    )
    return Sheet(
        name="shuffle-epochs",
        title="Who read what, epoch by epoch",
        columns=telling(columns, rows, keep=("epoch",)),
        rows=rows,
        caption=EPOCHS_CAPTION,
        is_folded=True,
    )


def _epoch(row: AuditRow) -> Cell:
    return Cell(str(row.audit.epoch) + ("" if row.audit.is_whole else " (a part)"), number=row.audit.epoch)


def compared_sheet(found: ShuffleComparison) -> Sheet[ShuffleRow]:
    """Ways of shuffling beside each other."""
    has_metric = any(row.final is not None for row in found.rows)
    columns: tuple[Column[ShuffleRow], ...] = (
        *place_columns(),
        Column("group", "", lambda row: row.group),
        Column("shuffle", "Shuffling", lambda row: row.shuffle, is_brief=True),
        Column("partition", "First parts", lambda row: row.partition, lambda row: row.partition or None),
        Column("staging", "Staging", lambda row: row.staging, is_brief=True),
        Column("epoch_s", "Epoch", lambda row: row.epoch_s, has_interval=True, is_brief=True),
        Column(
            "factor",
            "Against global",
            lambda row: row.factor,
            lambda row: times_cell(row.factor),
            has_interval=True,
            is_brief=True,
        ),
        Column("novelty", "Novelty", lambda row: row.novelty, lambda row: _three(row.novelty)),
        Column(
            "label_distance", "Label distance", lambda row: row.label_distance, lambda row: _three(row.label_distance)
        ),
        Column("metric", "", lambda row: row.metric),
        Column("final_value", "Last value" if has_metric else "", lambda row: row.final, has_interval=True),
        Column("is_paired", "In pairs", lambda row: row.is_paired, _paired),
    )
    return Sheet(
        name="shuffling",
        title=f"Ways of shuffling: {found.label}",
        columns=columns,
        rows=found.rows,
        caption=COMPARED_CAPTION,
    )


def _paired(row: ShuffleRow) -> str | None:
    return None if row.is_reference else "yes" if row.is_paired else "no"


def exchanged_text(share: float) -> str:
    """Q in words."""
    return "nothing is exchanged" if not share else f"{percent(share)} of a rank's samples per epoch"


def samples_text(count: int) -> str:
    """``1 sample``, ``2 samples``."""
    return f"{number_text(count, 'count')} sample{'' if count == 1 else 's'}"

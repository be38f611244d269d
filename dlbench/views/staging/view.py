"""The views `staging` (of a group) and `break-even` (staged against read in place)."""

from __future__ import annotations

from collections.abc import Sequence

from dlbench.report.document import Section
from dlbench.report.table import Cell, Column, Sheet, times_cell
from dlbench.report.wording import DASH, number_text, place_text, times_value, value_text
from dlbench.units import format_bytes
from dlbench.views.model import Group, Report
from dlbench.views.staging.numbers import BreakEven, Staged, StagingPoint, break_evens, staged
from dlbench.views.view import GroupSource, GroupView, ReportSource, ReportView, place_columns

STRATEGY_TITLES = {
    "replicate": "the whole data set on each node (replicate)",
    "shard": "each rank's samples on its node (shard)",
    "lazy": "kept on the node when first read (lazy)",
}
CAPTION = "Needed and free: on the node that needs most, and that had least. Staging is outside the measured steps."
BREAK_EVEN_CAPTION = "Break-even: staging time over what an epoch gains; no upper end: the gain may be none."


class StagingView(GroupView):
    """How samples were brought to the nodes."""

    id = "staging"
    title = "Staging"
    key = "staging"

    def numbers(self, source: GroupSource) -> Staged | None:
        """By rank count; None where samples were read in place."""
        return staged(source.group, source.table)

    def section(self, group: Group) -> Section | None:
        """One table."""
        found = group.of(Staged)
        if found is None:
            return None
        last = found.points[-1]
        return Section(
            id=self.id,
            title=self.title,
            headline=_finding(last),
            sheets=(_sheet(found.points),),
            notes=_notes(found.points),
        )


def _finding(point: StagingPoint) -> str:
    what = STRATEGY_TITLES.get(point.strategy, point.strategy)
    if point.strategy == "lazy":
        return f"{what}, to {point.tier}; no time before training"
    return f"{what}, to {point.tier}: {value_text(point.seconds)} at {place_text(point.ranks, point.nodes)}"


def _notes(points: Sequence[StagingPoint]) -> tuple[str, ...]:
    notes = []
    reused = [point for point in points if point.num_reused]
    for point in reused:
        left = "" if point.num_reused < point.num_runs else ": the time above is not that of copying everything"
        notes.append(
            f"{place_text(point.ranks, point.nodes)}: {point.num_reused} of {point.num_runs} runs found samples of an "
            f"earlier run{left}."
        )
    verified = dict.fromkeys(point.verified for point in points if point.verified)
    notes += [f"Copies compared with their source: {text}." for text in verified]
    paths = dict.fromkeys(path for point in points for path in point.paths)
    shown = ", ".join(list(paths)[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
    kept = "kept for the next run" if any(point.kept for point in points) else "removed when the run ended"
    return (*notes, *((f"In {shown}; {kept}.",) if paths else ()))


def _sheet(points: Sequence[StagingPoint]) -> Sheet[StagingPoint]:
    columns: tuple[Column[StagingPoint], ...] = (
        *place_columns(),
        Column("strategy", "Strategy", lambda point: point.strategy, is_brief=True),
        Column("tier", "To", lambda point: point.tier, is_brief=True),
        Column("method", "Copied by", lambda point: point.method),
        Column("streams", "Streams", lambda point: point.streams),
        Column("staging_s", "Until all were ready", lambda point: point.seconds, has_interval=True, is_brief=True),
        Column("runs", "", lambda point: point.seconds.n),
        Column("node_bytes_per_s_slowest", "Rate of a node", lambda point: point.slowest_bytes_per_s, _rate),
        Column("node_bytes_per_s_fastest", "", lambda point: point.fastest_bytes_per_s),
        Column("copied_bytes", "Copied, all nodes", lambda point: point.copied_bytes, unit="bytes"),
        Column("needed_bytes", "Needed on a node", lambda point: point.needed_bytes, unit="bytes", is_brief=True),
        Column("free_bytes", "Free there", lambda point: point.free_bytes, unit="bytes"),
        Column("reused_runs", "", lambda point: point.num_reused),
        Column("kept", "Kept", lambda point: point.kept),
    )
    return Sheet(name="staging", title="Staging by rank count", columns=columns, rows=points, caption=CAPTION)


def _rate(point: StagingPoint) -> Cell:
    low, high = point.slowest_bytes_per_s, point.fastest_bytes_per_s
    if low is None or high is None:
        return Cell(DASH)
    text = f"{format_bytes(low)}/s"
    return Cell(text if high <= low * 1.005 else f"{text} to {format_bytes(high)}/s", number=low)


class BreakEvenView(ReportView):
    """After how many epochs staging has paid."""

    id = "break-even"
    title = "Staged against read in place"
    key = "break_even"

    def numbers(self, source: ReportSource) -> tuple[BreakEven, ...]:
        """Of groups that differ in nothing but staging."""
        return break_evens(source.groups, source.table)

    def sections(self, report: Report) -> tuple[Section, ...]:
        """One table; empty where no two groups are such a pair."""
        found = report.all_of(BreakEven)
        if not found:
            return ()
        return (
            Section(
                id=self.id,
                title=self.title,
                headline=_pays_briefly(found[-1]),
                sheets=(_pairs_sheet(found),),
            ),
        )


def break_even_text(row: BreakEven) -> str:
    """``3.2 [2.9, 3.6]``, ``never``, ``3.2 [2.9, no upper end]``."""
    if row.is_lazy:
        return "nothing to pay back"
    if row.epochs is None:
        least = "" if row.epochs_low is None else f" (at best {number_text(row.epochs_low, 'epochs')})"
        return f"never{least}"
    text = number_text(row.epochs, "epochs")
    if row.epochs_low is None or row.gain.low is None:
        return text
    end = "no upper end" if row.epochs_high is None else number_text(row.epochs_high, "epochs")
    return f"{text} [{number_text(row.epochs_low, 'epochs')}, {end}]"


def _pays_briefly(row: BreakEven) -> str:
    how = f"{row.strategy} to {row.tier} at {place_text(row.ranks, row.nodes)}"
    if row.is_lazy:
        return f"{how}: epochs in place take {times_value(row.factor)} as long; nothing to pay back"
    if row.epochs is None:
        return f"{how} never pays: staged epochs are not faster"
    return f"{how} has paid after {number_text(row.epochs, 'epochs')} epochs"


def _pairs_sheet(rows: Sequence[BreakEven]) -> Sheet[BreakEven]:
    columns: tuple[Column[BreakEven], ...] = (
        Column("", "Runs", lambda row: row.label),
        *place_columns(),
        Column("group", "", lambda row: row.staged_group),
        Column("unstaged_group", "", lambda row: row.unstaged_group),
        Column("strategy", "Strategy", lambda row: row.strategy, is_brief=True),
        Column("tier", "To", lambda row: row.tier, is_brief=True),
        Column("staging_s", "Staging", lambda row: row.staging, has_interval=True, is_brief=True),
        Column("unstaged_epoch_s", "Epoch in place", lambda row: row.unstaged_epoch, has_interval=True),
        Column("staged_epoch_s", "Epoch staged", lambda row: row.staged_epoch, has_interval=True),
        Column("gain_s", "Gain of an epoch", lambda row: row.gain, has_interval=True),
        Column("factor", "Factor", lambda row: row.factor, lambda row: times_cell(row.factor), has_interval=True),
        Column("break_even_epochs", "Break-even epochs", lambda row: row.epochs, _epochs_cell, is_brief=True),
        Column("break_even_epochs_low", "", lambda row: row.epochs_low),
        Column("break_even_epochs_high", "", lambda row: row.epochs_high),
        Column("is_paired", "", lambda row: row.is_paired),
    )
    return Sheet(name="break-even", title="Break-even epochs", columns=columns, rows=rows, caption=BREAK_EVEN_CAPTION)


def _epochs_cell(row: BreakEven) -> Cell:
    return Cell(break_even_text(row), number=row.epochs)

"""The views `shuffle-audit` (of a group) and `shuffling` (ways of shuffling compared)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dlbench.report.document import Mark, Section
from dlbench.report.wording import figure_text, number_text, percent, place_text, runs_text, times_text, times_value
from dlbench.views.model import Group, Report
from dlbench.views.shuffling.charts import learning_charts, way_text
from dlbench.views.shuffling.numbers import Audit, ShuffleComparison, audit, comparisons
from dlbench.views.shuffling.tables import compared_sheet, epochs_sheet, exchanged_text, points_sheet, samples_text
from dlbench.views.view import GroupSource, GroupView, ReportSource, ReportView

WORTH_SAYING = 0.001
"""Share of the steps below which the cost of the audit is not mentioned."""


class ShuffleAuditView(GroupView):
    """Whether each sample was read once an epoch, and how well samples were mixed."""

    id = "shuffle-audit"
    title = "Shuffle audit"
    key = "shuffle_audit"

    def numbers(self, source: GroupSource) -> Audit | None:
        """By rank count and epoch; None for synthetic data."""
        return audit(source.group, source.table)

    def section(self, group: Group) -> Section | None:
        """Errors first, then both tables."""
        found = group.of(Audit)
        if found is None:
            return None
        return Section(
            id=self.id,
            title=self.title,
            headline=_headline(found),
            marks=tuple(_marks(found)),
            notes=(_finding(found),),
            sheets=(points_sheet(found), *((epochs_sheet(found.epochs),) if found.epochs else ())),
        )


def _marks(found: Audit) -> Iterator[Mark]:
    for text in found.errors:
        yield Mark(severity="serious", label="Error", text=text)
    left = found.num_errors - len(found.errors)
    if left:
        yield Mark(severity="serious", label="Error", text=f"{left} more errors; the records hold all of them")


def _headline(found: Audit) -> str:
    bad = sum(point.num_bad for point in found.points)
    runs = sum(point.num_runs for point in found.points)
    if bad:
        twice, never = (sum(getattr(point, name) for point in found.points) for name in ("twice", "never"))
        return f"errors in {bad} of {runs} runs: {samples_text(twice)} read more than once, {samples_text(never)} never"
    if any(point.whole_epochs for point in found.points):
        return f"no sample read twice or missed in an epoch ({runs_text(runs)})"
    return f"no sample read twice ({runs_text(runs)}); no epoch was read whole"


def _finding(found: Audit) -> str:
    last = found.points[-1]
    parts = f", first parts {found.partition}" if found.partition else ""
    how = f"Shuffling {found.shuffle}{parts}"
    if found.shuffle.startswith("partial"):
        how += f" ({exchanged_text(last.exchanged_share)})"
    cost = max(point.audit_share or 0.0 for point in found.points)
    # Global shuffling is the default, and not worth a line.
    text = "" if found.shuffle == "global" else f"{how}."
    if cost >= WORTH_SAYING:
        text += f" The audit costs {percent(cost)} of the steps."
    if last.novelty is not None:
        text += f" At {place_text(last.ranks, last.nodes)} novelty is {last.novelty:.2f} of global shuffling's"
        text += "." if last.label_distance is None else f", label distance {last.label_distance:.2f}."
    if last.sent:
        wait = number_text(last.exchange_wait_s, "s")
        text += f" {samples_text(last.sent)} sent, {samples_text(last.received)} received; longest wait for one {wait}."
    return text.lstrip()


class ShufflingView(ReportView):
    """Local and partial shuffling against global shuffling."""

    id = "shuffling"
    title = "Ways of shuffling compared"
    key = "shuffling"

    def numbers(self, source: ReportSource) -> tuple[ShuffleComparison, ...]:
        """Of groups that differ in shuffling and the staging that it needs."""
        return comparisons(source.groups, source.table)

    def sections(self, report: Report) -> tuple[Section, ...]:
        """A table for each set of groups, and how they learn."""
        found = report.all_of(ShuffleComparison)
        if not found:
            return ()
        return (
            Section(
                id=self.id,
                title=self.title,
                headline=_compared(found),
                words=tuple(text for one in found for text in _findings(one)),
                charts=lambda: learning_charts(found),
                sheets=tuple(map(compared_sheet, found)),
            ),
        )


def _compared(found: Sequence[ShuffleComparison]) -> str:
    """The way that gains most against global shuffling at the largest rank count of the first set."""
    first = found[0]
    last = (first.rows[-1].ranks, first.rows[-1].nodes)
    rows = [
        (row.factor, row)
        for row in first.rows
        if (row.ranks, row.nodes) == last and row.factor is not None and row.shuffle != "global"
    ]
    if not rows:
        return "nothing to compare: other shuffling, or global shuffling, did not run"
    factor, row = max(rows, key=lambda item: item[0].value)
    return f"{place_text(*last)}: epochs {times_value(factor)} as fast with {way_text(row)} as with global shuffling"


def _findings(found: ShuffleComparison) -> Iterator[str]:
    """At the largest rank count: each way against global shuffling."""
    last = (found.rows[-1].ranks, found.rows[-1].nodes)
    rows = [row for row in found.rows if (row.ranks, row.nodes) == last]
    if not any(row.is_reference for row in rows):
        yield f"{found.label}, {place_text(*last)}: global shuffling did not run: there is nothing to compare with."
        return
    told = []
    for row in rows:
        if row.factor is not None and not row.is_reference:
            value = "" if row.final is None else f", last value {figure_text(row.final)}"
            staged = "" if row.staging == "none" else f" ({row.staging} staging)"
            told.append(f"{times_text(row.factor)} the time of one with {way_text(row)}{staged}{value}")
    if told:
        yield (f"{found.label}, {place_text(*last)}: an epoch with global shuffling takes {'; '.join(told)}.")

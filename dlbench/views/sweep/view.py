"""The view `sweep`: settings of a swept series against each other, at each rank count."""

from __future__ import annotations

from dlbench.report.document import Card, Mark, Section
from dlbench.report.wording import place_text, times_value
from dlbench.views.model import Report
from dlbench.views.sweep.charts import MARKS, settings_chart
from dlbench.views.sweep.numbers import Sweep, SweepCell, sweeps
from dlbench.views.sweep.tables import axes_sheet, losses_sheet, remark_lines, settings_sheet
from dlbench.views.view import ReportSource, ReportView


class SweepView(ReportView):
    """Settings compared."""

    id = "sweep"
    title = "Settings compared"
    key = "sweeps"

    def numbers(self, source: ReportSource) -> tuple[Sweep, ...]:
        """All swept series with figures."""
        return sweeps(source.table)

    def sections(self, report: Report) -> tuple[Section, ...]:
        """A section for each series, with one for each rank count."""
        return tuple(self._section(sweep) for sweep in report.all_of(Sweep))

    def _section(self, sweep: Sweep) -> Section:
        last = sweep.cells[-1] if sweep.cells else None
        card = Card(
            title=sweep.label,
            big=sweep.headline[0],
            small=(sweep.headline[1],),
            words=(sweep.verdict,),
            next_step=last.advice if last else "",
        )
        return Section(
            id=sweep.id,
            title=f"{self.title}: {sweep.label}",
            headline=_headline(sweep),
            cards=(card,),
            sections=tuple(_cell(sweep, cell) for cell in sweep.cells),
            notes=sweep.idle,
            brief=sweep.idle,
            where={"series": sweep.series},
        )

    def remedy(self, report: Report) -> str:
        """An option."""
        return "no series was swept: --sweep KEY=A,B with five repeats or more sets settings side by side."


def _headline(sweep: Sweep) -> str:
    if not sweep.cells:
        return "no figures"
    last = sweep.cells[-1]
    place = place_text(last.ranks, last.nodes)
    best = last.best_setting
    if best is None or best.ratio is None:
        return f"no setting is faster than the baseline for certain, at {place}"
    return f"fastest at {place}: {best.label[:50]}, {times_value(best.ratio)} the baseline"


def _cell(sweep: Sweep, cell: SweepCell) -> Section:
    place = place_text(cell.ranks, cell.nodes)
    return Section(
        id=f"{sweep.id}-{sweep.cells.index(cell) + 1}",
        title=place,
        marks=tuple(Mark(severity="note", text=text) for text in cell.notes),
        caption=f"{cell.conditions}; {sweep.caption}. Baseline: {cell.baseline}.",
        # The card of the series says it of the largest rank count.
        words=(cell.verdict, f"Next: {cell.advice}") if cell is not sweep.cells[-1] else (),
        charts=lambda: settings_chart(sweep, cell),
        charts_per_row=1,
        sheets=tuple(
            sheet for sheet in (settings_sheet(sweep, cell), axes_sheet(cell), losses_sheet(cell)) if sheet.rows
        ),
        notes=(cell.interaction, MARKS),
        brief=(
            f"Baseline: {cell.baseline}.",
            cell.verdict,
            cell.interaction,
            *remark_lines(cell),
            f"Next: {cell.advice}",
        ),
        where={"ranks": cell.ranks, "nodes": cell.nodes},
    )

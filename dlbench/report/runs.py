"""What several reports say of runs: those without figures, and how many warnings each has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dlbench.report.document import Mark, Section
from dlbench.report.table import Cell, Column, Sheet
from dlbench.report.wording import runs_text

MAX_LISTED = 500
"""Runs listed in a page, so that it stays small."""


class ListedRun(Protocol):
    """What a report says of each run."""

    @property
    def run_id(self) -> str:
        """Its name."""

    @property
    def state(self) -> str:
        """valid, invalid, failed ..."""

    @property
    def ranks(self) -> int:
        """How many."""

    @property
    def story(self) -> str:
        """Why there is no figure."""


def without_figures(runs: Sequence[ListedRun], damaged: Sequence[str]) -> tuple[Section, ...]:
    """Runs that yield no figure, each with the reason, and damaged files; none where there is neither."""
    if not (runs or damaged):
        return ()
    columns: tuple[Column[ListedRun], ...] = (
        Column("", "Run", lambda run: run.run_id),
        Column("", "State", lambda run: run.state),
        Column("", "Ranks", lambda run: run.ranks),
        Column("", "Why", lambda run: run.story),
    )
    title = "Excluded runs"
    sheet = Sheet(
        name="without-figures", title=title, columns=columns, rows=runs, is_sortable=True, max_rows=MAX_LISTED
    )
    listed = (f"- {run.run_id}: {run.state}: {run.story}" for run in runs)
    return (
        Section(
            id="without-figures",
            title=title,
            headline=f"{runs_text(len(runs))} in no figure, each with the reason" if runs else "damaged files",
            level="appendix",
            marks=tuple(Mark(severity="serious", label="Damaged", text=line) for line in damaged),
            sheets=(sheet,),
            brief=(f"{runs_text(len(runs))} excluded:", *listed) if runs else (),
        ),
    )


def warnings_cell(texts: tuple[str, ...]) -> Cell:
    """How many warnings a run has; the texts behind the number."""
    return Cell(str(len(texts) or "none"), items=texts, number=len(texts))

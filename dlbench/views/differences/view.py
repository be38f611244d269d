"""The view `differences`: in what the runs differ, and which group has what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dlbench.report.document import Section
from dlbench.report.table import Column, Pivot, Sheet
from dlbench.report.wording import DASH
from dlbench.views.differences.numbers import DifferentValue, Kind, RunDifference, differences
from dlbench.views.model import Group, Report
from dlbench.views.view import ReportSource, ReportView

MAX_GROUPS = 10
"""Groups that have a column, or are named behind a value; programs get all."""
MAX_SHOWN = 60
"""Keys that people see; programs get all."""

_KIND_TITLES: Mapping[Kind, str] = {
    "registered": "setting",
    "setting": "setting",
    "tag": "tag",
    "environment": "environment",
}


class DifferencesView(ReportView):
    """What differs, the most telling first."""

    id = "differences"
    title = "Differences between runs"
    level = "appendix"
    key = "differences"

    def numbers(self, source: ReportSource) -> tuple[RunDifference, ...]:
        """Keys with more than one value."""
        return differences([run for group in source.results for run in group.runs])

    def sections(self, report: Report) -> tuple[Section, ...]:
        """What differs, and where there are several groups, which of them has what."""
        found = report.all_of(RunDifference)
        if not found:
            return ()
        names = group_names(report.groups)
        matrix = (_matrix_sheet(found, report.groups, names),) if len(report.groups) > 1 else ()
        return (
            Section(
                id=self.id,
                title=self.title,
                headline=_headline(found),
                words=_words(found),
                sheets=(_differences_sheet(found, names), *matrix),
            ),
        )

    def remedy(self, report: Report) -> str:
        """Nothing to do: runs are alike."""
        return "No two runs differ in a setting, a tag or the environment." if len(report.runs) > 1 else ""


def group_names(groups: Sequence[Group]) -> dict[str, str]:
    """A letter or two for each group, by id: A, B, ..., Z, AA, AB."""
    return {group.id: _letters(place) for place, group in enumerate(groups)}


def _letters(place: int) -> str:
    head, last = divmod(place, 26)
    return (_letters(head - 1) if head else "") + chr(ord("A") + last)


def _headline(found: Sequence[RunDifference]) -> str:
    within = [item.key for item in found if _is_unexpected(item)]
    if within:
        return f"runs of one group differ in {_listed([key[:25] for key in within], 2)}"
    return "runs of one group differ in nothing but hosts, jobs and rank counts"


def _is_unexpected(item: RunDifference) -> bool:
    """Whether runs of one group differ in it though they should not."""
    return not item.expected and not item.keeps_apart and item.is_within_a_group


def _words(found: Sequence[RunDifference]) -> tuple[str, ...]:
    within = [item.key for item in found if _is_unexpected(item)]
    if not within:
        return ()
    return (f"Runs of one group differ in {_listed(within)}: look here first where repeats scatter.",)


def _listed(keys: Sequence[str], most: int = 8) -> str:
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(keys[:most]) + more


# Tables


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One value of one key."""

    item: RunDifference
    value: DifferentValue | None
    """None for the line that counts further values, which is for people only."""


def _differences_sheet(found: Sequence[RunDifference], names: Mapping[str, str]) -> Sheet[_Row]:
    rows = []
    for item in found:
        rows += [_Row(item=item, value=value) for value in item.values]
        if item.num_values > len(item.values):
            rows.append(_Row(item=item, value=None))
    shown = found[:MAX_SHOWN]
    hidden = len(found) - len(shown)
    columns: tuple[Column[_Row], ...] = (
        Column("key", "Key", lambda row: row.item.key, limit=200),
        Column("kind", "Kind", lambda row: row.item.kind, _kind),
        Column("value", "Value", lambda row: row.value.value if row.value else None, _value, limit=300),
        Column("runs", "Runs", lambda row: row.value.num_runs if row.value else None),
        Column(
            "groups",
            "Groups",
            lambda row: " ".join(row.value.groups) if row.value else None,
            lambda row: _named(row.value.groups, names) if row.value else DASH,
        ),
        Column("expected", "", lambda row: row.item.expected),
        Column(
            "keeps_apart",
            "Compared across it",
            lambda row: row.item.keeps_apart,
            lambda row: "no" if row.item.keeps_apart else "yes",
        ),
    )
    return Sheet(
        name="differences",
        title="What differs",
        columns=columns,
        rows=rows,
        is_data=lambda row: row.value is not None,
        is_shown=lambda row: row.item in shown,
        caption=f"{hidden} more keys stand in the CSV alone." if hidden else "",
        is_folded=True,
    )


def _kind(row: _Row) -> str:
    return _KIND_TITLES[row.item.kind] + (", differs by nature" if row.item.expected else "")


def _value(row: _Row) -> str:
    if row.value is None:
        return f"and {row.item.num_values - len(row.item.values)} more values"
    return row.value.value or "empty"


def _named(groups: Sequence[str], names: Mapping[str, str]) -> str:
    more = f" and {len(groups) - MAX_GROUPS} more" if len(groups) > MAX_GROUPS else ""
    return ", ".join(sorted(names.get(group, "?") for group in groups)[:MAX_GROUPS]) + more


def _matrix_sheet(
    found: Sequence[RunDifference], groups: Sequence[Group], names: Mapping[str, str]
) -> Sheet[tuple[RunDifference, Group]]:
    """Keys by groups, for people only."""
    hidden = len(groups) - MAX_GROUPS
    more = f"{hidden} more groups have no column." if hidden > 0 else ""
    keys = Counter(item.key for item in found)
    return Sheet(
        name="differences-matrix",
        title="Which group has what",
        columns=(),
        rows=[(item, group) for item in found[:MAX_SHOWN] for group in groups[:MAX_GROUPS]],
        pivot=Pivot(
            corner="Key",
            # A tag may be called like a setting.
            down=lambda row: row[0].key if keys[row[0].key] == 1 else f"{row[0].key} ({row[0].kind})",
            across=lambda row: f"{names[row[1].id]}: {row[1].label}",
            cell=lambda row: _of_group(row[0], row[1].id),
        ),
        caption=more,
        is_folded=True,
    )


def _of_group(item: RunDifference, group: str) -> str:
    values = [value.value or "empty" for value in item.values if group in value.groups]
    if len(values) > 3:
        return f"{len(values)} values"
    return "; ".join(values) if values else DASH

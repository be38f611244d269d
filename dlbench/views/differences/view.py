"""The view `differences`: in what the runs differ, and which group has what."""

from __future__ import annotations

from dlbench.report.model import Report
from dlbench.report.tabular import Table
from dlbench.report.view import Sheet, View
from dlbench.report.wording import DASH, runs_text
from dlbench.views.differences.numbers import RunDifference

MAX_GROUPS = 10
"""Columns of the matrix; further groups are in the table for programs."""
MAX_SHOWN = 60
"""Keys that are printed."""

_KIND_TITLES = {"registered": "setting", "setting": "setting", "tag": "tag", "environment": "environment"}


def _difference_words(report: Report) -> tuple[str, ...]:
    unexpected = [item for item in report.differences if not item.expected]
    runs = runs_text(report.environment.num_runs)
    if not unexpected:
        return (f"The {runs} differ only in what differs by nature: hosts, jobs, rank counts.",)
    apart = [item.key for item in unexpected if item.keeps_apart]
    within = [item.key for item in unexpected if not item.keeps_apart and item.is_within_a_group]
    between = [item.key for item in unexpected if not item.keeps_apart and not item.is_within_a_group]
    words = [f"The {runs} differ in {len(unexpected)} key{'s' * (len(unexpected) != 1)}."]
    if within:
        words.append(
            f"Runs of one group differ in {_listed(within)}: look here first where repeats scatter more than usual."
        )
    if apart:
        words.append(f"Runs are not compared across {_listed(apart)}.")
    if between:
        words.append(f"Groups, but no runs of one group, differ in {_listed(between)} too.")
    return tuple(words)


def _listed(keys: list[str], most: int = 8) -> str:
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(keys[:most]) + more


def group_names(report: Report) -> dict[str, str]:
    """A letter or two for each group, by id: A, B, ..., Z, AA, AB."""
    return {group.id: _letters(place) for place, group in enumerate(report.groups)}


def _letters(place: int) -> str:
    head, last = divmod(place, 26)
    return (_letters(head - 1) if head else "") + chr(ord("A") + last)


def difference_sheets(report: Report) -> list[Sheet]:
    """What differs, and which group has what."""
    names = group_names(report)
    sheets = [
        Sheet(
            name="differences",
            title="What differs",
            text=_differences(report, names),
            caption="The most telling first: settings, tags, environment, and last what differs by nature (hosts, "
            "jobs, rank counts). Groups by letter; their names stand in the next table. For two runs or two sets of "
            "runs: dlbench compare A B.",
            columns=("kind", "key", "value", "runs", "groups", "expected", "keeps_apart"),
            rows=tuple(
                {
                    "kind": item.kind,
                    "key": item.key,
                    "value": value.value,
                    "runs": value.num_runs,
                    "groups": " ".join(value.groups),
                    "expected": item.expected,
                    "keeps_apart": item.keeps_apart,
                }
                for item in report.differences
                for value in item.values
            ),
        )
    ]
    if len(report.groups) > 1:
        sheets.append(_matrix(report, names))
    return sheets


def _differences(report: Report, names: dict[str, str]) -> Table:
    rows: Table = [("Key", "Kind", "Value", "Runs", "Groups", "Runs are compared")]
    for item in report.differences[:MAX_SHOWN]:
        kind = _KIND_TITLES[item.kind] + (", differs by nature" if item.expected else "")
        compared = "not across it" if item.keeps_apart else "across it"
        for value in item.values:
            groups = ", ".join(sorted(names.get(group, "?") for group in value.groups)[:MAX_GROUPS])
            more = f" and {len(value.groups) - MAX_GROUPS} more" if len(value.groups) > MAX_GROUPS else ""
            rows.append((item.key, kind, value.value or "empty", str(value.num_runs), groups + more, compared))
        if item.num_values > len(item.values):
            more_values = f"and {item.num_values - len(item.values)} values more"
            rows.append((item.key, kind, more_values, DASH, DASH, compared))
    if len(report.differences) > MAX_SHOWN:
        rows.append((f"and {len(report.differences) - MAX_SHOWN} keys more", *([DASH] * 5)))
    return rows


def _matrix(report: Report, names: dict[str, str]) -> Sheet:
    groups = report.groups[:MAX_GROUPS]
    rows: Table = [("Key", *(f"{names[group.id]}: {group.label}" for group in groups))]
    for item in report.differences[:MAX_SHOWN]:
        rows.append((item.key, *(_of_group(item, group.id) for group in groups)))
    hidden = len(report.groups) - len(groups)
    more = f" {hidden} groups more have no column; the table of what differs names them." if hidden else ""
    return Sheet(
        name="differences-matrix",
        title="Which group has what",
        text=rows,
        caption=f"A cell names the values of the group's runs, the most frequent of all runs first.{more}",
    )


def _of_group(item: RunDifference, group: str) -> str:
    values = [value.value or "empty" for value in item.values if group in value.groups]
    if len(values) > 3:
        return f"{len(values)} values"
    return "; ".join(values) if values else DASH


VIEWS: tuple[View, ...] = (
    View(
        id="differences",
        title="Differences between runs",
        place="closing",
        is_shown=lambda report: bool(report.differences),
        report_remedy=lambda report: (
            "No two runs differ in a setting, a tag or the environment." * (len(report.runs) > 1)
        ),
        report_words=_difference_words,
        report_sheets=difference_sheets,
        template="sheets.html.j2",
    ),
)

"""Views of runs beside each other: precision, differences, systems."""

from __future__ import annotations

from dlbench.report.model import Report
from dlbench.report.view import View
from dlbench.report.wording import runs_text
from dlbench.views.precision.charts import precision_charts
from dlbench.views.precision.model import RunDifference
from dlbench.views.precision.tables import difference_sheets, precision_sheets, system_sheets


def _precision_words(report: Report) -> tuple[str, ...]:
    return tuple(
        f"{found.label}. {text}" for found in report.precisions for text in (found.verdict, *_sentences(found.notes))
    )


def _sentences(notes: tuple[str, ...]) -> list[str]:
    return [f"{note[0].upper()}{note[1:]}." for note in notes]


def _no_precision(report: Report) -> str:
    if not report.groups:
        return ""
    first = report.groups[0]
    preset = next(condition.value for condition in first.conditions if condition.name == "preset")
    name = f"{first.label.partition(',')[0]} --preset {preset}"
    return (
        "No two groups differ in nothing but precision. One sweep runs them interleaved: dlbench run "
        f"{name} --sweep train.precision=fp32,bf16."
    )


def _difference_words(report: Report) -> tuple[str, ...]:
    unexpected = [item for item in report.differences if not item.expected]
    runs = runs_text(report.environment.num_runs)
    if not unexpected:
        return (f"The {runs} differ only in what differs by nature: hosts, jobs, rank counts.",)
    apart = [item.key for item in unexpected if item.keeps_apart]
    within = [item.key for item in unexpected if not item.keeps_apart and _is_within_a_group(item)]
    between = [item.key for item in unexpected if not item.keeps_apart and not _is_within_a_group(item)]
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


def _is_within_a_group(item: RunDifference) -> bool:
    """Whether runs that are compared with each other have different values."""
    groups = [group for value in item.values for group in value.groups]
    return len(groups) > len(set(groups))


def _listed(keys: list[str], most: int = 8) -> str:
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(keys[:most]) + more


def _system_words(report: Report) -> tuple[str, ...]:
    count = len(report.systems)
    hosts = sum(system.num_hosts for system in report.systems)
    return (f"The runs ran on {count} system{'s' * (count != 1)} and {hosts} host{'s' * (hosts != 1)}.",)


VIEWS: tuple[View, ...] = (
    View(
        id="precision",
        title="Precision compared",
        place="closing",
        is_shown=lambda report: bool(report.precisions),
        report_remedy=_no_precision,
        report_words=_precision_words,
        report_charts=precision_charts,
        report_sheets=precision_sheets,
        template="sheets.html.j2",
    ),
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
    View(
        id="systems",
        title="Systems",
        place="closing",
        is_shown=lambda report: bool(report.systems),
        report_words=_system_words,
        report_sheets=system_sheets,
        template="sheets.html.j2",
    ),
)

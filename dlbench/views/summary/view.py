"""The view `summary`: all groups against the ideal in one picture, and what each says at a glance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dlbench.report.document import Card, Section
from dlbench.report.wording import (
    ENGINE_TITLES,
    basis_text,
    interval_text,
    lost_value,
    place_text,
    runs_text,
    value_text,
)
from dlbench.views.causes.experiments import CAUSE_TITLES
from dlbench.views.causes.numbers import LostPercent
from dlbench.views.model import Group, Report
from dlbench.views.quality.numbers import Quality
from dlbench.views.summary.charts import efficiency_chart
from dlbench.views.summary.rating import rating
from dlbench.views.systems import SystemDescription
from dlbench.views.view import ReportView

_TELLING = ("preset", "engine", "scaling", "precision")
"""Conditions that a short name of a group has where groups of its workload differ in them."""
_TELLING_REST = ("goal", "system", "device", "data", "batch_per_rank", "global_batch")
"""The same where groups are else not told apart."""

_NO_GPU = "none"


class SummaryView(ReportView):
    """What the report says, at a glance."""

    id = "summary"
    title = "Summary"
    level = "answer"

    def sections(self, report: Report) -> tuple[Section, ...]:
        """One section: the picture and the cards."""
        if not report.groups:
            more = "Below, each run with the reason." if report.runs else "There are no runs here."
            words = (f"No run has figures. {more}",)
            return (Section(id=self.id, title=self.title, words=words, brief=("No run has figures.",)),)
        names = short_names(report.groups)
        return (
            Section(
                id=self.id,
                title=self.title,
                about=_shared(report.groups),
                charts=lambda: efficiency_chart(report.groups, names),
                charts_per_row=1,
                cards=tuple(_card(group, name, report) for group, name in zip(report.groups, names, strict=True)),
                brief=(),
            ),
        )


def _shared(groups: Sequence[Group]) -> tuple[str, ...]:
    """What holds for all groups, since their names do not say it."""
    found = [
        _value(name, value)
        for name in ("preset", "engine", "precision", "scaling", "goal")
        if (value := groups[0].condition(name)) and all(one.condition(name) == value for one in groups)
    ]
    return (f"{'All groups: ' * (len(groups) > 1)}{', '.join(found)}.",) if found else ()


def short_names(groups: Sequence[Group]) -> list[str]:
    """The workload of each group and what tells it from others of that workload; the labels, where that does not."""
    names = [_name(group, [one for one in groups if _workload(one) == _workload(group)]) for group in groups]
    return names if len(set(names)) == len(names) else [group.label for group in groups]


def _workload(group: Group) -> str:
    return group.condition("workload")


def _name(group: Group, alike: Sequence[Group]) -> str:
    """Of a group among those of the same workload, itself included."""
    settings = Counter(setting for one in alike for setting in one.settings)
    chosen = [f"{key}={value}" for key, value in group.settings if settings[key, value] < len(alike)]
    left = [one for one in alike if one.settings == group.settings]
    telling = []
    for name in (*_TELLING, *_TELLING_REST):
        value = group.condition(name)
        same = [one for one in left if one.condition(name) == value]
        if value and (
            len(same) < len(left) or (name in _TELLING and {one.condition(name) for one in alike} != {value})
        ):
            telling.append(_value(name, value))
        left = same
    return ", ".join((_workload(group), *telling, *chosen))


def _value(name: str, value: str) -> str:
    if name == "engine":
        return ENGINE_TITLES.get(value, value)
    words = {
        "preset": "{} preset",
        "scaling": "{} scaling",
        "batch_per_rank": "batch {}",
        "global_batch": "batch {} in all",
    }
    return words.get(name, "{}").format(value)


def _card(group: Group, name: str, report: Report) -> Card:
    big, small = _headline(group)
    last = group.largest
    cause = _cause(group)
    return Card(
        title=name,
        link=f"group-{group.id}",
        big=big,
        small=small,
        rating=rating(group, report),
        facts=(
            ("Machine", _machine(group, report)),
            ("Throughput", f"{value_text(last.throughput)} {last.throughput.unit}"),
            *([("Largest cause", cause)] if cause else []),
        ),
        next_step=group.next_step,
        warnings=tuple(doubt.text for doubt in group.doubts if doubt.severity == "serious"),
        warnings_link=f"marks-group-{group.id}",
        is_clear=True,
    )


def _headline(group: Group) -> tuple[str, tuple[str, ...]]:
    """The one number, and what it is."""
    quality = group.of(Quality)
    if quality is not None:
        return quality.headline[0], (quality.headline[1],)
    last = group.largest
    place = place_text(last.ranks, last.nodes)
    if len(group.points) == 1:
        return value_text(last.throughput), (f"{last.throughput.unit} at {place}",)
    interval = interval_text(last.efficiency) or f"({basis_text(last.efficiency)})"
    return value_text(last.efficiency), (interval, f"scaling efficiency at {place}")


def _machine(group: Group, report: Report) -> str:
    """Nodes, GPU or CPU model and cores, as far as the runs' records say."""
    name = group.condition("system")
    found = next((one for one in report.all_of(SystemDescription) if one.name == name), None)
    nodes = group.largest.nodes
    counted = f"{nodes} node" if nodes == 1 else f"{nodes} nodes"
    if found is None:
        return f"{counted} of {name}" if name else counted
    fields = dict(found.fields)
    gpu, cpu, threads = fields.get("GPU", ""), fields.get("Processor", ""), fields.get("Processor threads per node", "")
    if gpu and not gpu.startswith(_NO_GPU):
        each = fields.get("GPUs in use per node", "")
        return f"{counted}, {f'{each} x ' if each else ''}{gpu}"
    return ", ".join((counted, *([cpu] if cpu else []), *([f"{threads} threads"] if threads else [])))


def _cause(group: Group) -> str:
    """The cause that costs most at the largest point, and how much of what is lost; empty where none is known."""
    found = group.of(LostPercent)
    point = found.at(group.largest) if found else None
    if point is None or point.is_baseline or not point.verdict.cause:
        return ""
    doubts = {"within noise": ", within the noise", "too few runs": f", in {runs_text(point.largest.lost.n)} only"}
    doubt = doubts.get(point.verdict.finding, "")
    return f"{CAUSE_TITLES[point.largest.name]}: {lost_value(point.largest.lost)}{doubt}"

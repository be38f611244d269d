"""The view `differences`: differences between runs that are compared, and those that prevent a comparison."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dlbench.analysis.comparability import averaged_id, comparable_values, is_shaping
from dlbench.analysis.environments import compare, order_of
from dlbench.records.registry import KEYS
from dlbench.records.scan import Run
from dlbench.report.document import Section
from dlbench.report.table import Column, Sheet, column, columns_of
from dlbench.units import first_of
from dlbench.views.model import Report, ReportSource, ReportView

Kind = Literal["registered", "setting", "tag", "environment"]

NOT_SET = "not set"

MAX_VALUES = 12  # Values of a key that are listed; the rest are counted.
MAX_DIFFERENCES = 200
MAX_SHOWN = 60  # Keys that people see; programs get all.

_LEFT_OUT = frozenset({"run_id", "created", "format", "version", "overrides", "tags", "series", "layout"})
"""Parts of a plan that name the run, its place in its series or its size, or that are compared elsewhere."""

_APART = (  # Settings that prevent a comparison, by themselves or through a registered key.
    *("model.", "data.", "train.", "quality.", "measure.", "engine.", "sync.", "watch.", "fault."),
    *("checkpoint.every_",),
)

_REGISTERED = frozenset(  # Settings with a registered key.
    {
        *("workload.name", "workload.preset", "engine.name", "train.precision", "data.source", "train.batch_per_rank"),
        *("train.gradient_accumulation", "model.memory_format", "system.launch.launcher", "system.name"),
        "measure.phases",
        *("data.staging", "data.staging_tier", "data.shuffle", "data.partition", "data.cache"),
    }
)

_SIZES = frozenset({"ranks", "nodes"})  # Registered keys that a series varies on purpose.

_SHARE = "batch_per_rank"  # The registered key that strong scaling varies with the rank count.

Values = Sequence[tuple[str, Sequence[str]]]  # Each value of a key with the ids of its runs, the most frequent first.

_KIND_ORDER: dict[Kind, int] = {"registered": 0, "setting": 1, "tag": 2, "environment": 3}


@dataclass(frozen=True, kw_only=True)
class DifferentValue:
    """A value of a key."""

    value: str
    num_runs: int = field(metadata=column("Runs", "runs"))
    groups: tuple[str, ...] = field(metadata=column(value=" ".join))  # Ids of the groups with runs that have it.


@dataclass(frozen=True, kw_only=True)
class RunDifference:
    """A key with more than one value."""

    kind: Kind
    key: str = field(metadata=column("Key", limit=200))
    expected: bool  # Whether it is bound to differ: host, job, rank count.
    keeps_apart: bool = field(metadata=column("Compared across it", text=lambda keeps_apart: not keeps_apart))
    values: tuple[DifferentValue, ...]  # The most frequent first, at most `MAX_VALUES`.
    num_values: int

    @property
    def kind_text(self) -> str:
        title = "setting" if self.kind == "registered" else self.kind
        return f"{title}, differs by nature" if self.expected else title


def run_differences(runs: Sequence[Run]) -> tuple[RunDifference, ...]:
    """Returns the differences between runs with a record, the most informative first and the expected ones last."""
    runs = [run for run in runs if run.record is not None]
    if not runs:
        return ()
    groups = {run.plan.run_id: averaged_id(run) for run in runs}
    tags = _several_values({run.plan.run_id: dict(run.plan.tags) for run in runs})
    differences = [*_registered(runs, groups), *_settings(runs, groups)]
    differences += [_difference("tag", key, values, groups) for key, values in tags]
    for item in sorted(compare(runs).differences, key=lambda item: order_of(item.key)):
        differences.append(_difference("environment", item.key, item.values, groups, expected=item.expected))
    # Sorting keeps the order of equal ones: that of the registry, of the plan, of the table above.
    return tuple(sorted(differences, key=lambda item: (item.expected, _KIND_ORDER[item.kind])))


def _difference(
    kind: Kind,
    key: str,
    values: Values,
    groups: Mapping[str, str],
    *,
    expected: bool = False,
    keeps_apart: bool = False,
) -> RunDifference:
    different_values = []
    for value, run_ids in values:
        value_groups = tuple(dict.fromkeys(groups[run_id] for run_id in run_ids))
        different_values.append(DifferentValue(value=value, num_runs=len(run_ids), groups=value_groups))
    return RunDifference(
        kind=kind,
        key=key,
        expected=expected,
        # A difference within a group prevents no comparison.
        keeps_apart=keeps_apart and not _overlap([value.groups for value in different_values]),
        values=tuple(different_values[:MAX_VALUES]),
        num_values=len(values),
    )


def _overlap(groups_of_values: Sequence[tuple[str, ...]]) -> bool:
    groups = list(itertools.chain.from_iterable(groups_of_values))
    return len(groups) > len(set(groups))


def _registered(runs: Sequence[Run], groups: Mapping[str, str]) -> Iterator[RunDifference]:
    comparable: set[str] = set()
    strong = {run.plan.run_id for run in runs if run.plan.series.scaling == "strong"}
    values_of_runs = {}
    for run in runs:
        # All registered keys, and the global batch if it has to agree.
        values = {key.name: key.value(run) for key in KEYS} | comparable_values(run)
        values_of_runs[run.plan.run_id] = {name: value or "none" for name, value in values.items()}
        comparable.update(comparable_values(run))
    for key, by_value in _several_values(values_of_runs):
        expected, keeps_apart = key in _SIZES, key in comparable
        if key == _SHARE and strong:
            # Under strong scaling a rank's share of the global batch follows from the rank count.
            chosen = [value for value, run_ids in by_value if not strong.issuperset(run_ids)]
            expected, keeps_apart = len(chosen) < 2, len(chosen) > 1
        yield _difference("registered", key, by_value, groups, expected=expected, keeps_apart=keeps_apart)


def _settings(runs: Sequence[Run], groups: Mapping[str, str]) -> Iterator[RunDifference]:
    values_of_runs = {}  # By the names that `--set` has.
    for run in runs:
        content = run.plan.model_dump(mode="json", exclude=set(_LEFT_OUT))
        workload = content.pop("workload")
        nested = {key: workload.pop(key) for key in list(workload) if isinstance(workload[key], dict)}
        values_of_runs[run.plan.run_id] = dict(_leaves({**content, "workload": workload, **nested}, ""))
    system_settings = []
    for key, values in _several_values(values_of_runs):
        if key in _REGISTERED:
            continue
        difference = _difference("setting", key, values, groups, keeps_apart=_keeps_apart(key))
        if key.startswith("system.") and not _keeps_apart(key):
            system_settings.append(difference)
        else:
            yield difference
    # Settings of a system's file besides the launcher explain least.
    yield from system_settings


def _keeps_apart(key: str) -> bool:
    """Returns whether `dlbench.analysis.comparability` does not compare runs that differ in this setting."""
    if key.startswith("system."):
        return is_shaping(key)
    return key.startswith(_APART) and key != "measure.stall_timeout_s"


def _leaves(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}".lstrip("."))
    elif value is None:
        yield name, "none"
    else:
        yield name, str(value)


def _several_values(values_of_runs: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, Values]]:
    for key in dict.fromkeys(itertools.chain.from_iterable(values_of_runs.values())):
        by_value: dict[str, list[str]] = {}
        for run_id, values in values_of_runs.items():
            by_value.setdefault(values.get(key, NOT_SET), []).append(run_id)
        if len(by_value) > 1:
            yield key, sorted(by_value.items(), key=lambda item: (-len(item[1]), item[0]))


class DifferencesView(ReportView):
    """Differences between runs, the most informative first."""

    id = "differences"
    title = "Differences between runs"
    level = "appendix"
    key = "differences"
    after = "out-of-core"

    def numbers(self, source: ReportSource) -> tuple[RunDifference, ...]:
        runs = list(itertools.chain.from_iterable(group.runs for group in source.results))
        return run_differences(runs)[:MAX_DIFFERENCES]

    def shown(self, report: Report, differences: tuple[RunDifference, ...]) -> Section:
        # Keys in which runs of one group differ though they should not.
        candidates = [item for item in differences if not item.expected and not item.keeps_apart]
        unexpected = [item.key for item in candidates if _overlap([value.groups for value in item.values])]
        headline, words = "runs of one group differ in nothing but hosts, jobs and rank counts", ""
        if unexpected:
            headline = f"runs of one group differ in {first_of([key[:25] for key in unexpected], 2)}"
            words = f"Runs of one group differ in {first_of(unexpected, 8)}: the first suspects if repeats scatter."
        return Section(headline=headline, words=(words,), sheets=(_differences_sheet(differences),))

    def remedy(self, report: Report) -> str:
        if len(report.runs) < 2:
            return ""
        return "No two runs differ in a setting, a tag or the environment."


@dataclass(frozen=True)
class DifferenceRow:
    """A value of a key."""

    item: RunDifference
    value: DifferentValue | None = None  # None for the line that counts further values, which is for people only.

    @property
    def text(self) -> str:
        if self.value is None:
            return f"and {self.item.num_values - len(self.item.values)} more values"
        return self.value.value or "empty"


def _differences_sheet(differences: Sequence[RunDifference]) -> Sheet[DifferenceRow]:
    rows: list[DifferenceRow] = []
    for item in differences:
        rows += [DifferenceRow(item, value) for value in item.values]
        if item.num_values > len(item.values):
            rows.append(DifferenceRow(item))
    visible = differences[:MAX_SHOWN]
    num_hidden = len(differences) - len(visible)
    return Sheet(
        name="differences",
        title="What differs",
        columns=(
            *columns_of(RunDifference, "key", of="item"),
            Column("kind", "Kind", "item.kind", "item.kind_text"),
            Column("value", "Value", "value.value", "text", limit=300),
            *columns_of(DifferentValue, of="value"),
            *columns_of(RunDifference, "expected", "keeps_apart", of="item"),
        ),
        rows=rows,
        is_data=lambda row: row.value is not None,
        is_shown=lambda row: row.item in visible,
        caption=f"{num_hidden} more keys are in the CSV alone." if num_hidden else "",
        is_folded=True,
    )

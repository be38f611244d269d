"""The view `differences`: in what runs differ that are compared with each other, and what keeps others apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dlbench.analysis.comparability import averaged_id, comparable_values, is_shaping
from dlbench.analysis.environments import compare, order_of
from dlbench.records.registry import KEYS
from dlbench.records.scan import Run
from dlbench.report.document import Section
from dlbench.report.table import Column, Sheet, column, columns_of
from dlbench.views.model import Report
from dlbench.views.view import ReportSource, ReportView

Kind = Literal["registered", "setting", "tag", "environment"]

NOT_SET = "not set"

MAX_VALUES = 12  # Values of a key that are listed; the rest are counted.
MAX_DIFFERENCES = 200
MAX_SHOWN = 60  # Keys that people see; programs get all.

_LEFT_OUT = frozenset({"run_id", "created", "format", "version", "overrides", "tags", "series", "layout"})
"""Parts of a plan that name the run, its place in its series or its size, or that are compared elsewhere."""

_APART = (  # Settings that keep runs apart, by themselves or through a registered key.
    *("model.", "data.", "train.", "quality.", "measure.", "engine.", "sync.", "watch.", "fault."),
    *("checkpoint.every_",),
)

_SHOWN = frozenset(  # Settings that a registered key shows.
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


def _no_or_yes(keeps_apart: bool) -> str:
    return "no" if keeps_apart else "yes"


@dataclass(frozen=True, kw_only=True)
class DifferentValue:
    """One value of a key."""

    value: str
    num_runs: int = field(metadata=column("Runs", "runs"))
    groups: tuple[str, ...] = field(metadata=column(value=" ".join))
    """Ids of the groups that have it in all or some of their runs."""


@dataclass(frozen=True, kw_only=True)
class RunDifference:
    """A key with more than one value."""

    kind: Kind
    key: str = field(metadata=column("Key", limit=200))
    expected: bool  # Whether it differs by nature: host, job, rank count.
    keeps_apart: bool = field(metadata=column("Compared across it", text=_no_or_yes))
    """Whether runs that differ here are not compared."""
    values: tuple[DifferentValue, ...]  # The most frequent first, at most `MAX_VALUES`.
    num_values: int

    @property
    def is_within_a_group(self) -> bool:
        """Whether runs that are compared with each other have different values."""
        return _overlap([value.groups for value in self.values])


def run_differences(runs: Sequence[Run]) -> tuple[RunDifference, ...]:
    """In what runs with a record differ, the most telling first.

    Registered keys come first, then settings of the plan that no registered key shows, tags, the environment, and last
    what differs by nature.
    """
    known = [run for run in runs if run.record is not None]
    groups = {run.plan.run_id: averaged_id(run) for run in known}
    tags = _several_values({run.plan.run_id: dict(run.plan.tags) for run in known})
    found = [
        *_registered(known, groups),
        *_settings(known, groups),
        *(_difference("tag", key, values, groups) for key, values in tags),
        *(
            _difference("environment", item.key, item.values, groups, expected=item.expected)
            for item in sorted(compare(known).differences if known else (), key=lambda item: order_of(item.key))
        ),
    ]
    order: dict[Kind, int] = {"registered": 0, "setting": 1, "tag": 2, "environment": 3}
    # Sorting keeps the order of what is equal: that of the registry, of the plan, of the table above.
    return tuple(sorted(found, key=lambda item: (item.expected, order[item.kind])))


def _difference(
    kind: Kind,
    key: str,
    values: Values,
    groups: Mapping[str, str],
    *,
    expected: bool = False,
    keeps_apart: bool = False,
) -> RunDifference:
    """`groups` holds the group of each run, by run id."""
    of_values = [tuple(dict.fromkeys(groups[run_id] for run_id in run_ids)) for _, run_ids in values]
    listed = zip(values[:MAX_VALUES], of_values, strict=False)
    return RunDifference(
        kind=kind,
        key=key,
        expected=expected,
        # What differs within a group keeps no runs apart: its runs are compared across it.
        keeps_apart=keeps_apart and not _overlap(of_values),
        values=tuple(
            DifferentValue(value=value, num_runs=len(run_ids), groups=own) for (value, run_ids), own in listed
        ),
        num_values=len(values),
    )


def _overlap(of_values: Sequence[tuple[str, ...]]) -> bool:
    """Whether a group has more than one of the values."""
    groups = [group for own in of_values for group in own]
    return len(groups) > len(set(groups))


def _registered(runs: Sequence[Run], groups: Mapping[str, str]) -> Iterator[RunDifference]:
    comparable = {name for run in runs for name in comparable_values(run)}
    strong = {run.plan.run_id for run in runs if run.plan.series.scaling == "strong"}
    # All registered keys, and the global batch where it has to agree.
    of_runs = {run.plan.run_id: {key.name: key.value(run) for key in KEYS} | comparable_values(run) for run in runs}
    shown = {run_id: {name: value or "none" for name, value in own.items()} for run_id, own in of_runs.items()}
    for key, values in _several_values(shown):
        expected, keeps_apart = key in _SIZES, key in comparable
        if key == _SHARE and strong:
            # Under strong scaling a rank's share of the global batch follows from the rank count.
            chosen = [value for value, run_ids in values if not strong.issuperset(run_ids)]
            expected, keeps_apart = len(chosen) < 2, len(chosen) > 1
        yield _difference("registered", key, values, groups, expected=expected, keeps_apart=keeps_apart)


def _settings(runs: Sequence[Run], groups: Mapping[str, str]) -> Iterator[RunDifference]:
    of_runs = {}  # as `--set` names them
    for run in runs:
        content = run.plan.model_dump(mode="json", exclude=set(_LEFT_OUT))
        workload = content.pop("workload")
        nested = {key: workload.pop(key) for key in list(workload) if isinstance(workload[key], dict)}
        of_runs[run.plan.run_id] = dict(_leaves({**content, "workload": workload, **nested}, ""))
    found = _several_values(of_runs)
    # What a system's file says apart from the launcher explains least.
    for key, values in sorted(found, key=lambda item: item[0].startswith("system.") and not _keeps_apart(item[0])):
        if key not in _SHOWN:
            yield _difference("setting", key, values, groups, keeps_apart=_keeps_apart(key))


def _keeps_apart(key: str) -> bool:
    """Whether `dlbench.analysis.comparability` keeps runs apart that differ in this setting of their plans."""
    if key.startswith("system."):
        return is_shaping(key)
    return key.startswith(_APART) and key != "measure.stall_timeout_s"


def _leaves(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, "none" if value is None else str(value)


def _several_values(of_runs: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, Values]]:
    """Keys that have several values among the runs (by run id), in the order in which they are first met."""
    for key in dict.fromkeys(key for own in of_runs.values() for key in own):
        by_value: dict[str, list[str]] = {}
        for run_id, own in of_runs.items():
            by_value.setdefault(own.get(key, NOT_SET), []).append(run_id)
        if len(by_value) > 1:
            yield key, sorted(by_value.items(), key=lambda item: (-len(item[1]), item[0]))


class DifferencesView(ReportView):
    """What differs, the most telling first."""

    id = "differences"
    title = "Differences between runs"
    level = "appendix"
    key = "differences"
    after = "out-of-core"

    def numbers(self, source: ReportSource) -> tuple[RunDifference, ...]:
        return run_differences([run for group in source.results for run in group.runs])[:MAX_DIFFERENCES]

    def shown(self, report: Report, found: tuple[RunDifference, ...]) -> Section:
        # In what runs of one group differ though they should not.
        within = [item.key for item in found if not item.expected and not item.keeps_apart and item.is_within_a_group]
        headline, words = "runs of one group differ in nothing but hosts, jobs and rank counts", ""
        if within:
            headline = f"runs of one group differ in {listed([key[:25] for key in within], 2)}"
            words = f"Runs of one group differ in {listed(within)}: look here first where repeats scatter."
        return Section(headline=headline, words=(words,), sheets=(_differences_sheet(found),))

    def remedy(self, report: Report) -> str:
        return "No two runs differ in a setting, a tag or the environment." if len(report.runs) > 1 else ""


def listed(keys: Sequence[str], most: int = 8) -> str:
    """Returns some names in a line, and how many there are more."""
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(keys[:most]) + more


@dataclass(frozen=True)
class DifferenceRow:
    """One value of one key."""

    item: RunDifference
    value: DifferentValue | None = None  # None for the line that counts further values, which is for people only.


def _differences_sheet(differences: Sequence[RunDifference]) -> Sheet[DifferenceRow]:
    rows: list[DifferenceRow] = []
    for item in differences:
        rows += [DifferenceRow(item, value) for value in item.values]
        if item.num_values > len(item.values):
            rows.append(DifferenceRow(item))
    shown = differences[:MAX_SHOWN]
    num_hidden = len(differences) - len(shown)

    def kind(row: DifferenceRow) -> str:
        title = "setting" if row.item.kind == "registered" else row.item.kind
        return f"{title}, differs by nature" if row.item.expected else title

    def value(row: DifferenceRow) -> str:
        if row.value is None:
            return f"and {row.item.num_values - len(row.item.values)} more values"
        return row.value.value or "empty"

    return Sheet(
        name="differences",
        title="What differs",
        columns=(
            *columns_of(RunDifference, "key", of=lambda row: row.item),
            Column("kind", "Kind", lambda row: row.item.kind, kind),
            Column("value", "Value", lambda row: row.value.value if row.value else None, value, limit=300),
            *columns_of(DifferentValue, of=lambda row: row.value),
            *columns_of(RunDifference, "expected", "keeps_apart", of=lambda row: row.item),
        ),
        rows=rows,
        is_data=lambda row: row.value is not None,
        is_shown=lambda row: row.item in shown,
        caption=f"{num_hidden} more keys stand in the CSV alone." if num_hidden else "",
        is_folded=True,
    )

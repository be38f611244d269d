"""The entry of a run in the index of a history, and its selection by `--where KEY=VALUE`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlbench.errors import UserError, nearest
from dlbench.report.table import column

PLAIN = (
    *("run_id", "folder", "state", "created", "finished", "series", "repeat", "side", "variant", "group", "label"),
    *("system", "workload", "preset", "engine", "ranks", "nodes", "slurm_job_id", "commit"),
)

_EXAMPLES = {"tag": "commit", "environment": "host"}


def parse_where(texts: Iterable[str]) -> dict[str, str]:
    """Returns the values of `--where KEY=VALUE` by key."""
    value_by_key: dict[str, str] = {}
    for text in texts:
        key, mark, value = text.partition("=")
        if not mark:
            raise UserError(f"--where {text}: must be KEY=VALUE, e.g. workload=resnet50")
        _require_key(key)
        if key in value_by_key:
            raise UserError(f"--where {key}: given twice; a run has one value of each key")
        value_by_key[key] = value
    return value_by_key


def matches(entry: HistoryEntry, where: Mapping[str, str]) -> bool:
    """Returns whether a run has all these values. Raises `UserError`: an unknown key."""
    return all(_holds(entry, key, value) for key, value in where.items())


def _holds(entry: HistoryEntry, key: str, value: str) -> bool:
    _require_key(key)
    if key == "host":
        return any(host.host == value for host in entry.hosts) or (not value and not entry.hosts)
    if key.startswith("tag."):
        return entry.tags.get(key.removeprefix("tag."), "") == value
    if key.startswith("environment."):
        return entry.environment.get(key.removeprefix("environment."), "") == value
    return str(getattr(entry, key)) == value


def _require_key(key: str) -> None:
    if key in PLAIN or key == "host":
        return
    kind, mark, name = key.partition(".")
    if mark and kind in ("tag", "environment"):
        if not name:
            raise UserError(f"--where {key}: must be {kind}.NAME, e.g. {kind}.{_EXAMPLES[kind]}")
        return
    names = [*PLAIN, "host", "tag.NAME", "environment.NAME"]
    raise UserError(f"--where {key}: runs have no such key: {nearest(key, names)}")


@dataclass(frozen=True, kw_only=True)
class HostEntry:
    """A host of a run."""

    host: str
    num_ranks: int
    work_ratio: float | None
    """Own work of its slowest rank over other hosts' (median, 1), see `slow_nodes`; None for one host, or a fault."""
    later: float | None = None
    """Share of the step by which it leaves exchanges later (1); None as above, or without clocks."""
    later_at_least: float | None = None  # `later` minus the error bounds of the clocks (1).


def _host_names(hosts: Iterable[HostEntry]) -> str:
    return " ".join(host.host for host in hosts)


def _sorted_json(tags: Mapping[str, str]) -> str:
    return json.dumps(dict(tags), sort_keys=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryEntry:
    """A run of a history; with slots a hundred thousand take half the memory."""

    run_id: str
    folder: str  # Path of the run's folder below the store; without a store its path.
    state: str  # valid, invalid, failed, incomplete, damaged.
    why: str  # Why there is no figure; empty for valid runs.
    created: str = ""
    finished: str = ""  # End of the run, UTC, ISO 8601; empty if it did not end.
    series: str = ""
    repeat: int = 0
    side: str = ""
    variant: str = ""
    group: str = ""  # Equal for comparable runs (`dlbench.analysis.comparability.group_id`); empty without a record.
    label: str = ""  # The group in words; not escaped, which is the reader's task.
    system: str = ""
    workload: str = ""
    preset: str = ""
    engine: str = ""
    ranks: int = 0
    nodes: int = 0
    slurm_job_id: str = ""  # Empty outside of Slurm.
    commit: str = ""  # Tag `commit` of the plan, or the commit of dlbench's own checkout; empty: neither is known.
    tags: Mapping[str, str] = field(default_factory=dict, metadata=column(value=_sorted_json))
    environment: Mapping[str, str] = field(default_factory=dict)  # Of rank 0, and settings of the system.
    figures: Mapping[str, float] = field(default_factory=dict)  # By name of `METRICS`; may be empty.
    hosts: tuple[HostEntry, ...] = field(default=(), metadata=column(value=_host_names))  # Sorted by name.
    content_digest: str  # SHA-256 of the files that figures are made of, see `content_digest`.

    @property
    def key(self) -> tuple[str, int, int]:
        return self.group, self.ranks, self.nodes

    def figure(self, metric: str) -> float | None:
        return self.figures.get(metric)

    def to_dict(self) -> dict[str, Any]:
        content = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return content | {"hosts": [dict(vars(host)) for host in self.hosts]}


def to_line(entries: Sequence[HistoryEntry]) -> str:
    """Returns entries as one line of JSON: by field its different values and, unless it has one or each entry its own,
    for each entry the position of its value.
    """
    rows = [entry.to_dict() for entry in entries]
    columns = {name: _column([row[name] for row in rows]) for name in _FIELDS}
    return json.dumps(columns, sort_keys=True, allow_nan=False, separators=(",", ":"))


def _column(values: Sequence[Any]) -> list[Any]:
    # Texts as keys distinguish 1 from 1.0, and not every value is hashable.
    texts = list(map(repr, values))
    value_by_text = dict(zip(texts, values, strict=True))
    different = list(value_by_text.values())
    if len(different) == 1:
        return [different]
    # Positions of values that are nearly all different would only be more to read.
    if 2 * len(different) > len(values):
        return [list(values)]
    position_by_text = {text: position for position, text in enumerate(value_by_text)}
    return [different, [position_by_text[text] for text in texts]]


def from_line(text: str, count: int) -> list[HistoryEntry]:
    """Returns the `count` entries of a `to_line`. Raises `ValueError`, `TypeError`, `AttributeError`, `IndexError`: the
    text is no such line.
    """
    columns = json.loads(text)
    if columns.keys() != _FIELDS:
        raise TypeError(f"not entries: {sorted(columns.keys() ^ _FIELDS)}")
    entries = [object.__new__(HistoryEntry) for _ in range(count)]
    for name, (values, *positions) in columns.items():
        if name == "environment":
            values = list(map(_interned, values))
        elif name == "hosts":
            values = [tuple(HostEntry(**host) for host in hosts) for hosts in values]
        if positions:
            values = [values[position] for position in positions[0]]
        elif len(values) == 1:
            values *= count
        # The constructor of a frozen dataclass takes several times as long.
        set_value = getattr(HistoryEntry, name).__set__
        for entry, value in zip(entries, values, strict=True):
            set_value(entry, value)
    return entries


def _interned(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment with interned texts: a hundred thousand runs would otherwise take a gigabyte."""
    return {sys.intern(name): sys.intern(value) for name, value in environment.items()}


_FIELDS = frozenset(item.name for item in dataclasses.fields(HistoryEntry))

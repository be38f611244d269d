"""One run as the index of a history knows it: who, what, where, and its figures at a glance.

Runs are chosen by KEY=VALUE, all of which must hold. Keys are the plain fields of `HistoryEntry` (`workload`, `ranks`,
`state`, `commit`, ...), `host` for a host of the run, `tag.NAME` and `environment.NAME`. Values are compared as text,
whole; an empty one means that there is none.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dlbench.errors import UserError, nearest
from dlbench.report.table import column

PLAIN = (
    *("run_id", "folder", "state", "created", "finished", "series", "repeat", "side", "variant", "group", "label"),
    *("system", "workload", "preset", "engine", "ranks", "nodes", "slurm_job_id", "commit"),
)

# What runs of one job mostly share, besides their environment and hosts: of many entries it is read once.
_OF_JOB = ("label", "nodes", "preset", "ranks", "side", "slurm_job_id", "state", "system", "tags", "variant", "why")
_EXAMPLES = {"tag": "commit", "environment": "host"}


def parse_where(texts: Iterable[str]) -> dict[str, str]:
    """Options `--where KEY=VALUE` by key."""
    found: dict[str, str] = {}
    for text in texts:
        key, mark, value = text.partition("=")
        if not mark:
            raise UserError(f"--where {text}: must be KEY=VALUE, e.g. workload=resnet50")
        _require_key(key)
        if key in found:
            raise UserError(f"--where {key}: given twice; a run has one value of it")
        found[key] = value
    return found


def matches(entry: HistoryEntry, where: Mapping[str, str]) -> bool:
    """Whether a run has all these values. Raises `UserError`: an unknown key."""
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
    """One host of a run."""

    host: str
    num_ranks: int
    work_ratio: float | None
    """Own work of its slowest rank over that of the other hosts' slowest ranks (median), as `slow_nodes` counts it (1);
    None for runs on one host, for runs without figures and for runs with an injected fault, which would accuse
    a host of it."""
    later: float | None = None
    """By how much later than the other hosts it leaves an exchange, as a share of the step (1), as
    `dlbench.analysis.late_hosts` counts it; None for the same runs, and where the clocks do not say."""
    later_at_least: float | None = None  # The same, as far as it is certain for all that the clocks may be off.


def _host_names(hosts: Iterable[HostEntry]) -> str:
    return " ".join(host.host for host in hosts)


def _sorted_json(tags: Mapping[str, str]) -> str:
    return json.dumps(dict(tags), sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class HistoryEntry:
    """One run."""

    run_id: str
    folder: str  # Path of the run's folder below the store; where the entry is not of a store, the folder's path.
    state: str  # valid, invalid, failed, incomplete, damaged.
    why: str  # Why there is no figure; empty for valid runs.
    created: str = ""
    finished: str = ""  # UTC, ISO 8601; empty where the run did not end.
    series: str = ""
    repeat: int = 0
    side: str = ""
    variant: str = ""
    group: str = ""  # Equal for comparable runs (`dlbench.analysis.comparability.group_id`); empty without a record.
    label: str = ""  # The group in words, without foreign markup being made harmless: that is the reader's business.
    system: str = ""
    workload: str = ""
    preset: str = ""
    engine: str = ""
    ranks: int = 0
    nodes: int = 0
    slurm_job_id: str = ""  # Empty where it was no Slurm job.
    commit: str = ""  # Tag `commit` of the plan; else the commit of dlbench's own checkout; empty: neither is known.
    tags: Mapping[str, str] = field(default_factory=dict, metadata=column(value=_sorted_json))
    environment: Mapping[str, str] = field(default_factory=dict)
    """What rank 0 recorded, and what was asked of the system (`system.modules`, ...), where it shapes speed."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """By name of `dlbench.analysis.metrics.METRICS`; empty for runs without figures."""
    hosts: tuple[HostEntry, ...] = field(default=(), metadata=column(value=_host_names))  # By name.
    content_digest: str
    """SHA-256 over names and contents of the files that figures are made of (plan, record, step files, samples); see
    `dlbench.history.run_files.content_digest`."""

    @property
    def key(self) -> tuple[str, int, int]:
        """Runs with equal keys are repeats or history of one point."""
        return self.group, self.ranks, self.nodes

    def figure(self, metric: str) -> float | None:
        """Returns the figure of a metric; None where the run has none."""
        return self.figures.get(metric)

    def to_dict(self) -> dict[str, Any]:
        """The entry as JSON holds it."""
        content = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return content | {"hosts": [dataclasses.asdict(host) for host in self.hosts]}

    def to_text(self) -> str:
        """Returns the entry as a line: JSON of what other runs of its job share, then of its own, with tabs between."""
        content = self.to_dict()
        shared = [content.pop("environment"), content.pop("hosts"), {name: content.pop(name) for name in _OF_JOB}]
        return "\t".join(json.dumps(part, sort_keys=True, allow_nan=False) for part in [*shared, content])

    @classmethod
    def from_text(cls, text: str) -> HistoryEntry:
        """Returns the entry of a `to_text`. Raises `ValueError`, `KeyError`, `TypeError`: it is none."""
        environment, hosts, of_job, own = text.split("\t")
        made = object.__new__(cls)
        # What is frozen sets its fields one by one otherwise, which takes as long as reading their JSON. First single
        # ones: a whole dictionary put into an empty one brings its own table of keys, three times as large.
        fields = vars(made)
        fields["environment"], fields["hosts"] = _environment(environment), _hosts(hosts)
        fields.update(_of_job(of_job))
        fields.update(json.loads(own))
        if fields.keys() != _FIELDS:
            raise TypeError(f"no entry: {sorted(fields.keys() ^ _FIELDS)}")
        return made


@functools.lru_cache(maxsize=64)
def _environment(text: str) -> dict[str, str]:
    """An environment, which the other runs of its job have, too.

    Of a hundred thousand runs nearly all texts of their environments are equal: a gigabyte if each were kept.
    """
    return {sys.intern(name): sys.intern(value) for name, value in json.loads(text).items()}


@functools.lru_cache(maxsize=64)
def _hosts(text: str) -> tuple[HostEntry, ...]:
    """Hosts; those without ratios other runs have, too."""
    return tuple(HostEntry(**host) for host in json.loads(text))


@functools.lru_cache(maxsize=64)
def _of_job(text: str) -> dict[str, Any]:
    """Fields that the other runs of its job have, too."""
    return dict(json.loads(text))


_FIELDS = frozenset(one.name for one in dataclasses.fields(HistoryEntry))

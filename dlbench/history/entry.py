"""One run as the index of a history knows it: who, what, where, and its figures at a glance.

The immutable run folders are the truth; entries can be made anew from them at any time.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class HostEntry:
    """One host of a run."""

    host: str
    num_ranks: int
    work_ratio: float | None
    """Own work of its slowest rank over that of the other hosts' slowest ranks (median), as `slow_nodes` counts it (1);
    None for runs on one host, for runs without figures and for runs with a planted fault, which would accuse a host of
    it."""
    later: float | None = None
    """By how much later than the other hosts it leaves an exchange, as a share of the step (1), as
    `dlbench.reading.hosts.leaving` counts it; None for the same runs, and where the clocks do not say."""
    later_at_least: float | None = None
    """The same, as far as it is certain for all that the clocks may be off."""


@dataclass(frozen=True, kw_only=True)
class HistoryEntry:
    """One run."""

    run_id: str
    folder: str
    """Path of the run's folder below the store; where the entry is not of a store, the folder's path."""
    state: str
    """valid, invalid, failed, incomplete, damaged."""
    why: str
    """Why there is no figure; empty for valid runs."""
    created: str
    finished: str
    """UTC, ISO 8601; empty where the run did not end."""
    series: str
    repeat: int
    side: str
    variant: str
    group: str
    """Equal for runs that may be compared (`dlbench.reading.comparability.group_id`); empty without a record."""
    label: str
    """The group in words, without foreign markup being made harmless: that is the reader's business."""
    system: str
    workload: str
    preset: str
    engine: str
    ranks: int
    nodes: int
    slurm_job_id: str
    """Empty where it was no Slurm job."""
    commit: str
    """Tag `commit` of the plan; else the commit of dlbench's own checkout; empty: neither is known."""
    tags: Mapping[str, str]
    environment: Mapping[str, str]
    """What rank 0 recorded, and what was asked of the system (`system.modules`, ...), where it shapes speed."""
    figures: Mapping[str, float]
    """By name of `dlbench.reading.metrics.METRICS`; empty for runs without figures."""
    hosts: tuple[HostEntry, ...]
    """By name."""
    content_digest: str
    """SHA-256 over names and contents of the files that figures are made of (plan, record, step files, samples); see
    `dlbench.history.content.content_digest`."""
    dropped: tuple[str, ...] = ()
    """What `dlbench history prune --traces-only` has taken out of the folder: spans, profiles, checkpoints, logs."""

    @property
    def key(self) -> tuple[str, int, int]:
        """Runs with equal keys are repeats or history of one point."""
        return self.group, self.ranks, self.nodes

    @property
    def age_from(self) -> str:
        """The moment from which its age counts: when it finished, else when it was planned."""
        return self.finished or self.created

    def to_dict(self) -> dict[str, Any]:
        """The entry as JSON holds it."""
        content = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("tags", "environment", "figures"):
            content[name] = dict(content[name])
        content["hosts"] = [dataclasses.asdict(host) for host in self.hosts]
        content["dropped"] = list(self.dropped)
        return content

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> HistoryEntry:
        """The entry that `to_dict` wrote.

        Raises:
            KeyError, TypeError: it is not one.
        """
        content = dict(content)
        hosts = tuple(HostEntry(**host) for host in content.pop("hosts"))
        dropped = tuple(content.pop("dropped"))
        # Of a hundred thousand runs nearly all texts of their environments are equal: a gigabyte if each were kept.
        environment = {sys.intern(name): sys.intern(value) for name, value in content.pop("environment").items()}
        return cls(**content, hosts=hosts, dropped=dropped, environment=environment)

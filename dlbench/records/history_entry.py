"""One run as the index of a history knows it: who, what, where, and its figures at a glance.

The immutable run folders are the truth; entries can be made anew from them at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HostEntry:
    """One host of a run."""

    host: str
    num_ranks: int
    work_ratio: float | None
    """Own work of its slowest rank over that of the other hosts' slowest ranks (median), as `slow_nodes` counts it (1);
    None for runs on one host and for runs without figures."""


@dataclass(frozen=True, kw_only=True)
class HistoryEntry:
    """One run."""

    run_id: str
    folder: str
    """Path of the run's folder below the store."""
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
    """Equal for runs that may be compared (`dlbench.analysis.comparability.group_id`); empty without a record."""
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
    """What rank 0 recorded."""
    figures: Mapping[str, float]
    """By name of `dlbench.analysis.run_metrics.METRICS`; empty for runs without figures."""
    hosts: tuple[HostEntry, ...]
    content_digest: str
    """SHA-256 over names and contents of the files that figures are made of (plan, record, step files)."""

    @property
    def key(self) -> tuple[str, int, int]:
        """Runs with equal keys are repeats or history of one point."""
        return self.group, self.ranks, self.nodes

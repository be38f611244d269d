"""The report's plain data on runs beside each other: precision, differences, systems; see `model`."""

from __future__ import annotations

from dataclasses import dataclass

from dlbench.stats.estimates import Estimate


@dataclass(frozen=True, kw_only=True)
class PrecisionRow:
    """One precision at one rank count."""

    precision: str
    in_force: str
    """What records say was in force."""
    ranks: int
    nodes: int
    is_reference: bool
    is_paired: bool
    """Whether its repeats and the reference's ran interleaved."""
    throughput: Estimate
    ratio: Estimate | None
    """Throughput over the reference's."""
    peak: Estimate
    """Memory of the rank that held most, bytes."""
    memory_ratio: Estimate | None
    energy_per_sample: Estimate | None
    energy_of: str
    """`GPU` or `host`; empty where not told."""
    energy_ratio: Estimate | None
    loss: Estimate | None
    num_not_finite: int
    quality: Estimate | None
    num_reached: int | None
    num_runs: int
    overflow_steps: Estimate | None


@dataclass(frozen=True, kw_only=True)
class PrecisionComparison:
    """Runs that differ in nothing but precision."""

    id: str
    label: str
    """What they have in common."""
    reference: str
    groups: tuple[str, ...]
    """Ids of the groups, by precision."""
    sample_unit: str
    rows: tuple[PrecisionRow, ...]
    caption: str
    verdict: str
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DifferentValue:
    """One value of a key."""

    value: str
    num_runs: int
    groups: tuple[str, ...]
    """Ids of the groups that have it in all or some of their runs."""


@dataclass(frozen=True, kw_only=True)
class RunDifference:
    """A setting or a property of the environment in which runs differ."""

    kind: str
    """`registered`, `setting`, `tag` or `environment`."""
    key: str
    expected: bool
    """Whether it differs by nature: host, job, rank count."""
    keeps_apart: bool
    """Whether runs that differ here are not compared."""
    values: tuple[DifferentValue, ...]
    """The most frequent first; at most `dlbench.views.precision.assemble.MAX_VALUES`."""
    num_values: int


@dataclass(frozen=True, kw_only=True)
class SystemDescription:
    """One system that runs of the report ran on."""

    id: str
    name: str
    title: str
    num_runs: int
    hosts: tuple[str, ...]
    """Those of the records, at most `dlbench.views.precision.assemble.MAX_HOSTS`."""
    num_hosts: int
    fields: tuple[tuple[str, str], ...]
    """What it is: title and text; several texts where runs differ."""
    unknown: tuple[str, ...]
    """What nobody recorded."""

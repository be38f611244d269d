"""The points of a series: its name, the order of its runs, nodes and cores of each. The same for every kind of run."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeVar

from dlbench.errors import UserError
from dlbench.specs.base import MAX_RANKS, MAX_RUNS
from dlbench.specs.plan import LayoutSpec
from dlbench.specs.system.system import SystemSpec

PointT = TypeVar("PointT")


def refuse_too_many(runs: int, option: str) -> None:
    """Refuses a series that nobody can plan, run or read.

    `option`: what asked for them.
    Raises `UserError`: more than `MAX_RUNS`.
    """
    if runs > MAX_RUNS:
        raise UserError(
            f"{option}: makes a series of {shown_count(runs)} runs; {MAX_RUNS:,} is the most, because all are planned "
            "before the first starts: split it into several --series"
        )


def shown_count(count: int) -> str:
    """A count with separators; of a monstrous one its size."""
    return f"{count:,}" if count < 10**12 else f"more than {10**12:,}"


def new_series_id(now: datetime) -> str:
    """A name for a series: UTC time and four random hexadecimal digits."""
    return f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def series_name(asked: str | None, now: datetime) -> str:
    """The series' name: what `--series` says, or a new one.

    Raises `UserError`: the name cannot be part of a folder's name.
    """
    if asked is None:
        return new_series_id(now)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", asked):
        raise UserError(
            f"--series {asked!a}: must hold up to 64 letters, digits and . _ -, the first a letter or digit"
        )
    return asked


def interleaved(points: Sequence[PointT], repeats: int) -> Iterator[tuple[int, int, PointT]]:
    """Repeat, index and point of each run, in the order in which they should run."""
    for repeat in range(repeats):
        # There and back again: a drift of the machine falls on all points alike.
        order = list(enumerate(points))
        for index, point in order if repeat % 2 == 0 else reversed(order):
            yield repeat, index, point


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The numbers of ranks or nodes of a series, and what a node holds."""

    values: tuple[int, ...]
    are: Literal["ranks", "nodes"] = "ranks"
    ranks_per_node: int | None = None
    """None: the system's."""

    def ranks(self, system: SystemSpec, count: int) -> int:
        """Ranks of one point."""
        return count if self.are == "ranks" else count * self._per_node(system)

    def layout(self, system: SystemSpec, count: int, *, cores_per_rank: int | None, machine_cores: int) -> LayoutSpec:
        """Nodes and cores of one point; the cores a rank gets are those of the largest point of the series.

        `cores_per_rank`: what was asked for; none: an even share. `machine_cores`: cores of this machine, for a system
        that leaves a node's cores open and has no scheduler.
        Raises `UserError`: ranks do not divide, or the system does not say how many cores a node has.
        """
        ranks, nodes = self.ranks(system, count), self._nodes(system, count)
        if ranks > MAX_RANKS:
            raise UserError(
                f"{shown_count(ranks)} ranks: a run may have up to {MAX_RANKS:,}, each writes its own files"
            )
        if ranks % nodes:
            raise UserError(
                f"{ranks} ranks cannot be spread evenly over {nodes} nodes of {self._per_node(system)} ranks"
            )
        densest = max(self.ranks(system, value) // self._nodes(system, value) for value in self.values)
        cores = system.node.cores
        if cores is None and system.scheduler == "slurm":
            raise UserError(f"system {system.name}: node.cores: is missing; it decides how many cores each rank gets")
        known = cores or machine_cores
        share = max(1, known // densest)
        return LayoutSpec(nodes=nodes, ranks=ranks, cores_per_rank=cores_per_rank or share, node_cores=known)

    def refuse_without_effect(self, system: SystemSpec) -> None:
        """`--ranks-per-node` says nothing about one machine. Raises `UserError`: it was given for one."""
        if self.ranks_per_node and self.are == "ranks" and system.scheduler == "none":
            raise UserError(f"--ranks-per-node: has no effect on system {system.name}, which is one machine")

    def _per_node(self, system: SystemSpec) -> int:
        return self.ranks_per_node or system.node.default_ranks

    def _nodes(self, system: SystemSpec, count: int) -> int:
        if self.are == "nodes":
            return count
        return -(-count // self._per_node(system)) if system.scheduler == "slurm" else 1

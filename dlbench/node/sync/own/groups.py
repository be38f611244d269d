"""Some ranks that exchange among themselves: the few collectives of which every exchange of gradients is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn


class Group(Protocol):
    """A communicator. All its ranks make every call in the same order; it returns when this rank's part is done.

    Vectors are one-dimensional, contiguous and of a floating type; sums are not divided by the number of ranks.
    """

    ranks: tuple[int, ...]
    """Its ranks in the run, ascending."""
    index: int
    """Position of this rank among them."""
    carrier: str
    """What moves the bytes, e.g. gloo, mpi, nccl, shared memory."""

    def sum(self, vector: torch.Tensor) -> None:
        """All-reduce: `vector` becomes the sum over ranks, in place."""

    def reduce_scatter(self, vector: torch.Tensor) -> torch.Tensor:
        """This rank's share (shape: n / ranks) of the sum; n must divide by the number of ranks."""

    def all_gather(self, share: torch.Tensor, vector: torch.Tensor) -> None:
        """`vector` (n) becomes the shares (n / ranks each) of all ranks, by index."""

    def reduce(self, vector: torch.Tensor, root: int) -> None:
        """`vector` becomes the sum on the rank with index `root`; undefined elsewhere."""

    def broadcast(self, vector: torch.Tensor, root: int) -> None:
        """`vector` becomes that of the rank with index `root`."""

    def gather_all(self, tensor: torch.Tensor, *, equal: bool = False) -> list[torch.Tensor]:
        """The tensors of all ranks, by index; their lengths may differ, unless they are said to be equal."""


class Communicators(Protocol):
    """A started library that makes groups of its ranks."""

    carrier: str
    """What moves the bytes, e.g. gloo, mpi, nccl."""
    reduce_is_sum: bool
    """Whether the library knows no reduce to one rank and its groups sum on every rank instead."""

    def group(self, ranks: Sequence[int]) -> Group | None:
        """A group of some ranks, ascending; None where this rank is not among them.

        All ranks of the run make all groups, in the same order.
        """

    def broadcast_parameters(self, model: nn.Module) -> None:
        """All ranks' parameters and buffers become those of rank 0."""


@dataclass(frozen=True, kw_only=True)
class GroupRanks:
    """Who is in which group, for ranks laid out in blocks: rank = group x group size + place in the group."""

    size: int
    """Ranks of the run."""
    group_size: int
    """Ranks of a group; divides `size`."""

    @property
    def world(self) -> tuple[int, ...]:
        """All ranks."""
        return tuple(range(self.size))

    @property
    def inside(self) -> tuple[tuple[int, ...], ...]:
        """The groups."""
        step = self.group_size
        return tuple(tuple(range(first, first + step)) for first in range(0, self.size, step))

    @property
    def across(self) -> tuple[tuple[int, ...], ...]:
        """For each place in a group, the ranks with that place; the first are the leaders."""
        return tuple(tuple(range(place, self.size, self.group_size)) for place in range(self.group_size))


@dataclass(frozen=True, kw_only=True)
class RankGroups:
    """The groups that one rank is in."""

    world: Group
    inside: Group
    """Ranks of its group."""
    across: Group
    """Ranks with its place in every group. That of place 0 is the group of leaders."""


def make_world(communicators: Communicators, who: GroupRanks) -> Group:
    """All ranks."""
    world = communicators.group(who.world)
    assert world is not None  # every rank is in it
    return world


def make_groups(communicators: Communicators, who: GroupRanks, inside: Group | None = None) -> RankGroups:
    """Every group of the run, made by all ranks in the same order; returns those of this rank.

    Args:
        communicators: what makes them.
        who: who is in which.
        inside: this rank's own group, where something else than the library carries it.
    """
    world = make_world(communicators, who)
    if inside is None:
        inside = _own([communicators.group(ranks) for ranks in who.inside])
    across = _own([communicators.group(ranks) for ranks in who.across])
    return RankGroups(world=world, inside=inside, across=across)


def _own(groups: Sequence[Group | None]) -> Group:
    return next(group for group in groups if group is not None)

"""How one message is summed over all ranks: flat, in two levels, through leaders, or by size one way or the other.

In what follows g is the number of ranks of a group, m of groups, p = g m, and n the bytes of the message. Every rank
ends with the same bits: each element is summed by one rank (or, in an all-reduce, by the library in one order) and
then only copied.

Bytes are those of the ring and of the least that a reduce, a scatter or a broadcast can send, as means over ranks; a
library may send more. Ranks lie in blocks, so a flat ring crosses from group to group m times and g - 1 of g ranks send
inside theirs.
"""

from __future__ import annotations

from typing import Protocol

import torch

from dlbench.node.sync.own.groups import Group, RankGroups

Sent = tuple[float, float]
"""Bytes that a rank sends inside its group and to other groups, mean over ranks."""


class Method(Protocol):
    """One exchange."""

    name: str

    def sum(self, vector: torch.Tensor) -> str:
        """`vector` becomes the sum over all ranks, in place. Returns how it went: flat, hierarchical or leader.

        Args:
            vector: (n,), floating; n must be a multiple of the group size where the method has groups.
        """

    def way(self, num_bytes: float) -> str:
        """How a vector of so many bytes goes."""

    def sent(self, num_bytes: float) -> Sent:
        """What a rank sends for a vector of so many bytes."""


class Flat:
    """One all-reduce over all ranks: 2 (p - 1) / p n bytes leave each rank (Patarasuk and Yuan 2009)."""

    name = "flat"

    def __init__(self, world: Group, group_size: int) -> None:
        """`group_size` only tells bytes inside a group from those across."""
        self._world = world
        self._group_size = group_size

    def sum(self, vector: torch.Tensor) -> str:
        self._world.sum(vector)
        return self.name

    def way(self, num_bytes: float) -> str:
        return self.name

    def sent(self, num_bytes: float) -> Sent:
        size = len(self._world.ranks)
        total = 2 * (size - 1) / size * num_bytes
        crossing = 1 / self._group_size if size > self._group_size else 0.0
        return total * (1 - crossing), total * crossing


class Hierarchical:
    """Two levels: reduce-scatter inside, all-reduce of each share across groups, all-gather inside.

    2 (g - 1) / g n bytes inside and 2 (m - 1) / m n / g across for each rank (the 2D form; Horovod's hierarchical and
    torus all-reduce on GPUs).
    """

    name = "hierarchical"

    def __init__(self, groups: RankGroups) -> None:
        self._groups = groups

    def sum(self, vector: torch.Tensor) -> str:
        share = self._groups.inside.reduce_scatter(vector)
        self._groups.across.sum(share)
        self._groups.inside.all_gather(share, vector)
        return self.name

    def way(self, num_bytes: float) -> str:
        return self.name

    def sent(self, num_bytes: float) -> Sent:
        g, m = len(self._groups.inside.ranks), len(self._groups.across.ranks)
        return 2 * (g - 1) / g * num_bytes, 2 * (m - 1) / m * num_bytes / g


class Leader:
    """Jia et al. 2018 (arXiv 1807.11205), grouped all-reduce: reduce to the group's first rank, ring among these,
    broadcast.

    2 (g - 1) n bytes inside a group and 2 (m - 1) / m n from each leader across.
    """

    name = "leader"

    def __init__(self, groups: RankGroups, *, reduce_is_sum: bool) -> None:
        """`reduce_is_sum`: the library has no reduce and sums on every rank of the group instead."""
        self._groups = groups
        self._reduce_share = 2.0 if reduce_is_sum else 1.0

    def sum(self, vector: torch.Tensor) -> str:
        groups = self._groups
        groups.inside.reduce(vector, 0)
        if groups.inside.index == 0:
            groups.across.sum(vector)
        groups.inside.broadcast(vector, 0)
        return self.name

    def way(self, num_bytes: float) -> str:
        return self.name

    def sent(self, num_bytes: float) -> Sent:
        g, m = len(self._groups.inside.ranks), len(self._groups.across.ranks)
        inside = (self._reduce_share + 1) * (g - 1) / g * num_bytes
        return inside, 2 * (m - 1) / m * num_bytes / g


class Hybrid:
    """Small messages hierarchical, where start-ups decide, large ones flat (Jia et al. 2018, hybrid all-reduce)."""

    name = "hybrid"

    def __init__(self, flat: Flat, hierarchical: Hierarchical, threshold_bytes: int) -> None:
        """`threshold_bytes`: size from which a message goes flat."""
        self.parts = (flat, hierarchical)
        self.threshold_bytes = threshold_bytes

    def sum(self, vector: torch.Tensor) -> str:
        return self._chosen(vector.numel() * vector.element_size()).sum(vector)

    def way(self, num_bytes: float) -> str:
        return self._chosen(num_bytes).name

    def sent(self, num_bytes: float) -> Sent:
        return self._chosen(num_bytes).sent(num_bytes)

    def _chosen(self, num_bytes: float) -> Method:
        flat, hierarchical = self.parts
        return hierarchical if num_bytes < self.threshold_bytes else flat

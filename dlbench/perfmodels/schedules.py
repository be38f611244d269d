"""Steps of collectives, layouts of ranks and blocks of vectors; without numpy.

A schedule is one rank's list of steps; `dlbench.node.comm` executes it. In a step all sends read the buffer as it was
when the step began, and received elements are applied when all messages have arrived. Every rank has the same number of
steps; what one rank sends in a step the other receives in it, in the same order.

Broadcast, scatter, reduce and gather are from and to rank 0. Reduce-scatter ends, and all-gather begins, with
`block(elements, ranks, rank)`; other elements are undefined. All-to-all sends read the input (`from_input`); the
executor copies a rank's piece to itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dlbench.errors import nearest
from dlbench.specs.comm import ALGORITHMS, DEDICATED_SERVERS, GROUPED_ALGORITHMS, Collective, LevelName

MOST_CHUNKS = 64
CHUNK_ELEMENTS = 8192  # Elements that are sent in the time of one start-up, as `pipeline_chunks` assumes.


@dataclass(frozen=True)
class Transfer:
    """Consecutive elements that are sent or received in one message."""

    peer: int  # The other rank.
    first: int  # First element in the buffer.
    count: int  # Number of elements.
    is_added: bool = False  # Whether received elements are added (True) or put in place (False).


@dataclass(frozen=True)
class ScheduleStep:
    """One step of one rank."""

    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()
    from_input: bool = False  # Whether sends read the untouched input instead of the working buffer (all-to-all).


Schedule = tuple[ScheduleStep, ...]


def block(elements: int, parts: int, index: int) -> tuple[int, int]:
    """Returns first element and number of elements of one of nearly equal parts; the first parts are longer."""
    share, num_longer = divmod(elements, parts)
    return index * share + min(index, num_longer), share + (index < num_longer)


def all_to_all_block(elements: int, ranks: int, source: Any, target: Any) -> tuple[Any, Any, Any]:
    """Returns a piece of an all-to-all: first element in the source's input, first in the target's output, elements.

    `source` and `target` are ranks, or arrays of ranks. The remainder, elements % ranks, is divided so that outputs are
    as long as inputs: as many of rank i's pieces, to ranks i, i + 1, ... (modulo ranks), are one element longer.
    """
    share, num_longer = divmod(elements, ranks)
    # In the matrix of pieces, with a row per source and a column per target, pieces are longer where (target - source)
    # mod ranks < num_longer: in a row from column `source` on, in a column up to row `target`.
    before_in_row = _marked_below(target, ranks, source, num_longer)
    before_in_column = _marked_below(source, ranks, target - num_longer + 1, num_longer)
    is_longer = (target - source) % ranks < num_longer
    return target * share + before_in_row, source * share + before_in_column, share + is_longer


def _marked_below(limit: Any, ranks: int, start: Any, length: int) -> Any:
    """Returns how many of the places start, ..., start + length - 1, counted around `ranks`, are below `limit`."""

    def below(end: Any) -> Any:  # Of places 0, ..., end - 1.
        turns, remainder = end // ranks, end % ranks
        return turns * limit + limit + (remainder - limit) * (remainder < limit)

    return below(start % ranks + length) - below(start % ranks)


def power_below(ranks: int) -> int:
    """Returns the largest power of two that is not above `ranks`."""
    return 1 << (ranks.bit_length() - 1)


def invalid(collective: Collective, algorithm: str, ranks: int, *, group_size: int, shards: int | None) -> str | None:
    """Returns in one line why there is no such schedule; None if there is one."""
    if (collective, algorithm) == ("allreduce", DEDICATED_SERVERS):
        if not 1 <= (shards or 1) < ranks:
            return f"algorithm {algorithm}: {shards or 1} servers of {ranks} ranks; needs at least one worker besides"
        return None
    if algorithm not in ALGORITHMS[collective]:
        return f"algorithm {algorithm!r} of {collective}: {nearest(algorithm, ALGORITHMS[collective])}"
    if ranks < 1:
        return f"{ranks} ranks: needs at least 1"
    if algorithm in GROUPED_ALGORITHMS and (group_size < 1 or ranks % group_size):
        return f"algorithm {algorithm}: groups of {group_size} do not divide {ranks} ranks"
    if algorithm == "parameter-server" and shards is not None and not 1 <= shards <= ranks:
        return f"algorithm parameter-server: {shards} shards; needs 1 to {ranks}, one server per rank"
    return None


def pipeline_chunks(collective: Collective, algorithm: str, layout: Layout, elements: int) -> int:
    """Returns the number of chunks of a vector in hierarchical, double-binary-tree and chain; 1 for other algorithms.

    For a vector of n bytes the optimum of a pipeline is sqrt((links - 1) n beta / alpha) chunks, with alpha the time of
    a start-up (that of `CHUNK_ELEMENTS` elements) and beta that of a byte. It is rounded down to a power of two. For
    hierarchical, where chunks save half a message at most, it is rounded to the nearest, as too few cost more than too
    many: the factors sqrt(1/2) of the half and sqrt(2) of the rounding cancel.
    """
    ranks = layout.ranks
    if (collective, algorithm) == ("allreduce", "hierarchical") and 1 < layout.group_size < ranks:
        links, message = 2, elements
    elif (collective, algorithm) == ("allreduce", "double-binary-tree"):
        links, message = ranks.bit_length() - 1, elements // 2
    elif (collective, algorithm) == ("broadcast", "chain"):
        links, message = ranks - 1, elements
    else:
        return 1
    best = max(1, math.isqrt(max(0, links - 1) * message // CHUNK_ELEMENTS))
    return min(MOST_CHUNKS, power_below(best))


def level_chunks(engine: str, carrier: str, layout: Layout, num_bytes: int) -> int:
    """Returns the number of chunks in which training sends a message of the hierarchical exchange.

    It is computed for fp32, whatever the format. It is 1 if `carrier`, the library that sends the bytes, is NCCL, whose
    communicators should not work at the same time, and with Horovod, where one thread serves both levels.
    """
    if "nccl" in carrier or engine == "horovod":
        return 1
    return pipeline_chunks("allreduce", "hierarchical", layout, num_bytes // 4)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The division of ranks into groups, nodes and leaf switches. Rank r is in group `r // group_size`, on node `r //
    node_size`, below leaf switch `r // leaf_size`, or that of its node in `leaves`.
    """

    ranks: int
    group_size: int
    leaf_size: int | None = None  # Ranks below a leaf switch; None: all, or switches are not known.
    node_size: int = 0  # Ranks of a node whose parts are the groups; 0: groups are nodes.
    leaves: tuple[int, ...] | None = None
    """Number of the leaf switch of each node, in the order of ranks; None: nodes are in the order of switches."""

    def __post_init__(self) -> None:
        if not self.node_size:
            object.__setattr__(self, "node_size", self.group_size)
        if self.ranks < 1 or self.group_size < 1:
            raise ValueError(f"{self.ranks} ranks in groups of {self.group_size}: both must be at least 1")
        if self.leaf_size is not None and (self.leaf_size < 1 or self.leaf_size % self.node_size):
            raise ValueError(f"{self.leaf_size} ranks below a leaf switch are no whole groups of {self.node_size}")
        nodes = -(-self.ranks // self.node_size)
        if self.leaves is not None and len(self.leaves) != nodes:
            raise ValueError(f"leaf switches of {len(self.leaves)} nodes are given, and the ranks are on {nodes}")

    @property
    def num_groups(self) -> int:
        return -(-self.ranks // self.group_size)

    @property
    def num_leaves(self) -> int:
        if self.leaves is not None:
            return len(set(self.leaves))
        return -(-self.ranks // (self.leaf_size or self.ranks))

    def leaf(self, rank: int) -> int:
        """Returns the number of the leaf switch above a rank."""
        if self.leaves is not None:
            return self.leaves[rank // self.node_size]
        return rank // (self.leaf_size or self.ranks)

    def level(self, rank: int, other: int) -> LevelName:
        if rank // self.node_size == other // self.node_size:
            return "inside"
        return "across" if self.leaf(rank) == self.leaf(other) else "beyond"

"""What a collective's algorithms are asked for: ranks and groups, and how vectors are cut; free of numpy.

A schedule is one rank's list of steps (`dlbench.perfmodels.algorithms.schedule`); `dlbench.node.comm` executes it.

In a step all sends read the buffer as it was when the step began; what arrives is applied when all of the step's
messages are through: added to the elements at its place, or put there (`Transfer.is_added`). Steps of all ranks
correspond, also those without a message of a rank: what one rank sends in a step the other receives in the same step,
between two ranks in the same order. Empty runs do not travel, and no rank sends to itself.

Buffers:

- allreduce and broadcast: the whole vector on each rank; broadcast from rank 0.
- reduce: the whole vector in; afterwards rank 0 holds the sum, the others are undefined.
- scatter: the whole vector on rank 0; afterwards each rank holds its block. gather: as all-gather, but on rank 0 alone.
- reduce-scatter: the whole vector in; afterwards `block(elements, ranks, rank)` holds the sum, the rest is undefined.
- all-gather: `block(elements, ranks, rank)` in; afterwards the whole vector.
- all-to-all: an input and an output of `elements` elements each. The piece from rank i to rank j lies as
  `all_to_all_block` says: block j of the input and block i of the output where the ranks divide the elements. Sends
  read the input (`ScheduleStep.from_input`), what arrives is put into the output; the executor copies a rank's piece to
  itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dlbench.errors import nearest
from dlbench.specs.comm import ALGORITHMS, GROUPED_ALGORITHMS, Collective, LevelName

MOST_CHUNKS = 64
CHUNK_ELEMENTS = 8192  # Elements whose transfer is taken to cost as much as a start-up, for the number of chunks.


@dataclass(frozen=True)
class Transfer:
    """A run of elements that travels."""

    peer: int  # The other rank.
    first: int  # First element, in the buffer.
    count: int  # Elements.
    is_added: bool = False  # Of what arrives: whether it is added (True) or put in place (False).


@dataclass(frozen=True)
class ScheduleStep:
    """What one rank does at a time."""

    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()
    from_input: bool = False  # Whether sends read the untouched input instead of the working buffer (all-to-all).


Schedule = tuple[ScheduleStep, ...]


def block(elements: int, parts: int, index: int) -> tuple[int, int]:
    """First element and number of elements of one of nearly equal parts, by its number from 0; the first parts are the
    longer ones.
    """
    share, rest = divmod(elements, parts)
    return index * share + min(index, rest), share + (index < rest)


def all_to_all_block(elements: int, ranks: int, source: Any, target: Any) -> tuple[Any, Any, Any]:
    """Where a piece of an all-to-all lies: first element in the source's input, in the target's output, elements.
    `source`, `target`: ranks, or arrays of them.

    Every input and every output has `elements` elements. If the ranks divide them, these are the equal blocks
    `target` of the input and `source` of the output. Otherwise rank i sends one element more to itself and to the
    next elements % ranks - 1 ranks, so that outputs are as long as inputs.
    """
    share, rest = divmod(elements, ranks)
    # Element by element of a row: longer where (target - source) mod ranks < rest; of a column: the same mirrored.
    before_in_row = _marked_below(target, ranks, source, rest)
    before_in_column = _marked_below(source, ranks, target - rest + 1, rest)
    longer = (target - source) % ranks < rest
    return target * share + before_in_row, source * share + before_in_column, share + longer


def _marked_below(limit: Any, ranks: int, start: Any, length: int) -> Any:
    """How many of the places start, ..., start + length - 1, counted around `ranks`, lie below `limit`."""

    def below(end: Any) -> Any:  # of places 0, ..., end - 1
        turns, rest = end // ranks, end % ranks
        return turns * limit + limit + (rest - limit) * (rest < limit)

    return below(start % ranks + length) - below(start % ranks)


def power_below(ranks: int) -> int:
    """The largest power of two that is not above `ranks`."""
    return 1 << (ranks.bit_length() - 1)


def invalid(collective: Collective, algorithm: str, ranks: int, *, group_size: int, shards: int | None) -> str | None:
    """Why there is no such schedule, in one line; None if there is one."""
    if algorithm not in ALGORITHMS[collective]:
        return f"algorithm {algorithm!r} of {collective}: {nearest(algorithm, ALGORITHMS[collective])}"
    if ranks < 1:
        return f"{ranks} ranks: at least 1 takes part"
    if algorithm in GROUPED_ALGORITHMS and (group_size < 1 or ranks % group_size):
        return f"algorithm {algorithm}: groups of {group_size} do not divide {ranks} ranks"
    if algorithm == "parameter-server" and shards is not None and not 1 <= shards <= ranks:
        return f"algorithm parameter-server: {shards} shards; takes 1 to {ranks}, one server on a rank"
    return None


def pipeline_chunks(collective: Collective, algorithm: str, layout: Layout, elements: int) -> int:
    """In how many chunks hierarchical, double-binary-tree and chain send their vectors; 1 for all other algorithms.

    The optimum of a pipeline of this many links is sqrt((links - 1) n beta / alpha) chunks of a message of n bytes. As
    alpha and beta are not known here, the time of `CHUNK_ELEMENTS` elements is taken for a start-up; the number is
    rounded down to a power of two, and at most `MOST_CHUNKS`. It depends on these arguments alone: all ranks cut alike.
    Of hierarchical only the time inside groups, of the first chunk and the last, is left to save: half a message, if
    inside takes half as long as between. Too few chunks cost more than too many, so there the number is rounded to the
    nearest power, which is the power below sqrt(2) times as much: the half and the two leave `elements` as it is.
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
    """In how many chunks training sends a message of the hierarchical exchange: one over NCCL, whose communicators
    should not work at once, and where Horovod's one thread serves both levels; else as fp32 of so many bytes, whatever
    the wire's type.
    """
    if "nccl" in carrier or engine == "horovod":
        return 1
    return pipeline_chunks("allreduce", "hierarchical", layout, num_bytes // 4)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How ranks are grouped: rank r is in group r // group_size (of grouped algorithms), on node r // node_size (as
    launchers number ranks) and below leaf switch r // leaf_size, or that of its node in `leaves`. A message belongs to
    the innermost level that holds both of its ranks.
    """

    ranks: int
    group_size: int
    leaf_size: int | None = None  # Ranks below a leaf switch; None: all, or switches are not known.
    node_size: int = 0  # Ranks of a node, where groups are parts of it; 0: groups are nodes.
    leaves: tuple[int, ...] | None = None
    """Number of the leaf switch of each node, in the order of ranks; None: nodes lie in the order of switches."""

    def __post_init__(self) -> None:
        if not self.node_size:
            object.__setattr__(self, "node_size", self.group_size)
        if self.ranks < 1 or self.group_size < 1:
            raise ValueError(f"{self.ranks} ranks in groups of {self.group_size}: both are at least 1")
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

"""Collective algorithms as schedules: who sends which elements to whom in which step.

Pure; `node.collectives` executes them, `costs.predictions` prices them.

A schedule is one rank's list of steps. In a step all sends read the buffer as it was when the step
began; what arrives is applied when all of the step's messages are through: added to the elements at
its place, or put there. A step without messages for this rank is kept, so that steps of all ranks
correspond: they are equally many, and what one rank sends in a step the other receives in the same
step, between two ranks in the same order. Empty runs do not travel, and no rank sends to itself.

Buffers:

- allreduce and broadcast: the whole vector on each rank; broadcast from rank 0.
- reduce-scatter: the whole vector in; afterwards `block(elements, ranks, rank)` holds the sum, the rest is undefined.
- all-gather: `block(elements, ranks, rank)` in; afterwards the whole vector.
- all-to-all: an input and an output of `elements` elements each. The piece from rank i to rank j lies as
  `all_to_all_block` says: block j of the input and block i of the output where the ranks divide the elements. Sends
  read the input (`Step.from_input`), what arrives is put into the output; the executor copies a rank's piece to itself.

The phases that algorithms are made of, with their sources, are in `schedules_ring`, `schedules_halving` and
`schedules_tree`. Every algorithm takes any number of ranks and elements.

Steps, messages and bytes of collectives, counted from their schedules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dlbench.errors import UserError, nearest
from dlbench.perfmodels.algorithms import (
    Schedule,
    Span,
    Step,
    Team,
    Transfer,
    all_to_all_block,
    binomial_broadcast,
    binomial_reduce,
    binomial_scatter,
    block,
    chain_broadcast,
    direct_all_gather,
    direct_all_to_all,
    direct_reduce_scatter,
    double_binary_tree,
    doubling_all_gather,
    folded,
    gather_to_first,
    halving_doubling,
    halving_reduce_scatter,
    pairwise_all_to_all,
    parameter_server,
    power_below,
    recursive_doubling,
    ring_all_gather,
    ring_allreduce,
    ring_reduce_scatter,
    scatter_from_first,
    shifted_halving_doubling,
)
from dlbench.specs.comm import ALGORITHMS, GROUPED_ALGORITHMS, Collective, LevelName

__all__ = ["Schedule", "Step", "Transfer", "all_to_all_block", "block", "pipeline_chunks", "schedule"]

MOST_CHUNKS = 64
CHUNK_ELEMENTS = 8192  # Elements whose transfer is taken to cost as much as a start-up, for the number of chunks.

_Phases = Callable[[Team, Span], list[Step]]

_UNGROUPED: dict[tuple[Collective, str], _Phases] = {
    ("allreduce", "ring"): ring_allreduce,
    ("allreduce", "binomial-tree"): lambda t, s: [*binomial_reduce(t, s), *binomial_broadcast(t, s)],
    ("allreduce", "recursive-doubling"): lambda t, s: folded(t, s, recursive_doubling),
    ("allreduce", "recursive-halving-doubling"): lambda t, s: folded(t, s, halving_doubling),
    ("allreduce", "shifted-halving-doubling"): lambda t, s: folded(t, s, shifted_halving_doubling),
    ("allreduce", "direct"): lambda t, s: [*direct_reduce_scatter(t, s), *direct_all_gather(t, s)],
    ("reduce-scatter", "ring"): ring_reduce_scatter,
    ("reduce-scatter", "recursive-halving"): halving_reduce_scatter,
    ("reduce-scatter", "direct"): direct_reduce_scatter,
    ("all-gather", "ring"): ring_all_gather,
    ("all-gather", "recursive-doubling"): doubling_all_gather,
    ("all-gather", "direct"): direct_all_gather,
    ("broadcast", "binomial-tree"): binomial_broadcast,
    ("broadcast", "scatter-all-gather"): lambda t, s: [*binomial_scatter(t, s), *ring_all_gather(t, s)],
    ("all-to-all", "pairwise"): lambda t, s: pairwise_all_to_all(t.size, t.index, s.count),
    ("all-to-all", "direct"): lambda t, s: direct_all_to_all(t.size, t.index, s.count),
}


def schedule(
    collective: Collective,
    algorithm: str,
    rank: int,
    ranks: int,
    elements: int,
    *,
    group_size: int = 1,
    shards: int | None = None,
    chunks: int | None = None,
) -> Schedule:
    """The steps of one rank; () for one rank alone.

    `collective`: which collective. `algorithm`: one of `ALGORITHMS[collective]`. `rank`: whose steps, from 0. `ranks`:
    how many take part. `elements`: of the vector, 0 or more. `group_size`: ranks of a group, for hierarchical and
    leader; rank r is in group r // group_size. `shards`: servers of parameter-server, on the first ranks; none: every
    rank is one. `chunks`: for double-binary-tree and chain; none: `pipeline_chunks`. Raises `UserError`: no such
    algorithm; groups that do not divide the ranks; more servers than ranks; `ValueError`: no such rank, a negative
    number of elements, or no chunk.
    """
    problem = invalid(collective, algorithm, ranks, group_size=group_size, shards=shards)
    if problem:
        raise UserError(problem)
    if not 0 <= rank < ranks or elements < 0 or (chunks is not None and chunks < 1):
        raise ValueError(f"no schedule for rank {rank} of {ranks}, {elements} elements in {chunks} chunks")
    if ranks == 1:
        return ()
    team, span = Team(range(ranks), rank), Span(0, elements)
    pieces = pipeline_chunks(collective, algorithm, ranks, elements) if chunks is None else chunks
    if (collective, algorithm) in _UNGROUPED:
        return tuple(_UNGROUPED[collective, algorithm](team, span))
    if algorithm == "double-binary-tree":
        return tuple(double_binary_tree(team, span, pieces))
    if algorithm == "chain":
        return tuple(chain_broadcast(team, span, pieces))
    if algorithm == "parameter-server":
        return tuple(parameter_server(team, span, shards or ranks))
    grouped = _hierarchical if algorithm == "hierarchical" else _leader
    return tuple(grouped(rank, ranks, group_size, span))


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


def pipeline_chunks(collective: Collective, algorithm: str, ranks: int, elements: int) -> int:
    """In how many chunks double-binary-tree and chain send their vectors; 1 for all other algorithms.

    The optimum of a pipeline of this many links is sqrt((links - 1) n beta / alpha) chunks of a message of n bytes. As
    alpha and beta are not known here, the time of `CHUNK_ELEMENTS` elements is taken for a start-up; the number is
    rounded down to a power of two, and at most `MOST_CHUNKS`. It depends on these arguments alone: all ranks cut alike.
    """
    if (collective, algorithm) == ("allreduce", "double-binary-tree"):
        links, message = ranks.bit_length() - 1, elements // 2
    elif (collective, algorithm) == ("broadcast", "chain"):
        links, message = ranks - 1, elements
    else:
        return 1
    best = max(1, math.isqrt(max(0, links - 1) * message // CHUNK_ELEMENTS))
    return min(MOST_CHUNKS, power_below(best))


def _hierarchical(rank: int, ranks: int, group_size: int, span: Span) -> list[Step]:
    """Reduce-scatter in the group, all-reduce across groups of ranks of one place, all-gather in the group; all rings.
    Horovod's hierarchical and torus all-reduce (2D ring, Mikami et al. 2018).
    """
    group, place = divmod(rank, group_size)
    inside = Team(range(group * group_size, (group + 1) * group_size), place)
    across = Team(range(place, ranks, group_size), group)
    own = span.part(group_size, place)
    return [*ring_reduce_scatter(inside, span), *ring_allreduce(across, own), *ring_all_gather(inside, span)]


def _leader(rank: int, ranks: int, group_size: int, span: Span) -> list[Step]:
    """Reduction to the first rank of each group, ring of these, broadcast in the group (Jia et al. 2018).

    Reduction: ring reduce-scatter, then parts to the first rank; broadcast: parts from it, then ring all-gather. Each
    2 (g - 1) steps for a group of g.
    """
    group, place = divmod(rank, group_size)
    inside = Team(range(group * group_size, (group + 1) * group_size), place)
    leaders = Team(range(0, ranks, group_size), group)
    ring = ring_allreduce(leaders, span)
    return [
        *ring_reduce_scatter(inside, span),
        *gather_to_first(inside, span),
        *(ring if place == 0 else [Step() for _ in ring]),
        *scatter_from_first(inside, span),
        *ring_all_gather(inside, span),
    ]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How ranks are grouped: rank r is in group r // group_size (ranks of a node, as launchers number them) and below
    leaf switch r // leaf_size. A message belongs to the innermost level that holds both of its ranks.
    """

    ranks: int
    group_size: int
    leaf_size: int | None = None  # Ranks below a leaf switch; None: all, or switches are not known.

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.group_size < 1:
            raise ValueError(f"{self.ranks} ranks in groups of {self.group_size}: both are at least 1")
        if self.leaf_size is not None and (self.leaf_size < 1 or self.leaf_size % self.group_size):
            raise ValueError(f"{self.leaf_size} ranks below a leaf switch are no whole groups of {self.group_size}")

    @property
    def num_groups(self) -> int:
        return -(-self.ranks // self.group_size)

    @property
    def num_leaves(self) -> int:
        return -(-self.ranks // (self.leaf_size or self.ranks))

    def group(self, rank: int) -> int:
        return rank // self.group_size

    def level(self, rank: int, other: int) -> LevelName:
        """The level that messages between two ranks belong to."""
        if self.group(rank) == self.group(other):
            return "inside"
        leaf = self.leaf_size or self.ranks
        return "across" if rank // leaf == other // leaf else "beyond"


@dataclass(frozen=True, kw_only=True)
class RankCounts:
    """What one rank does in one collective."""

    steps: int  # Steps of its schedule, those without a message of its own included: equal on all ranks.
    messages: int  # Messages it sends.
    bytes_sent: int  # Bytes it sends.
    bytes_across: int  # Those of them that leave its group.


def counts(
    collective: Collective,
    algorithm: str,
    layout: Layout,
    elements: int,
    element_bytes: int,
    *,
    shards: int | None = None,
) -> tuple[RankCounts, ...]:
    """Counts of every rank, from the schedules. `collective`: which collective. `algorithm`: one of
    `ALGORITHMS[collective]`. `layout`: ranks and groups. `elements`: of the vector. `element_bytes`: bytes of an
    element. `shards`: servers of parameter-server; none: every rank is one. Raises `UserError`: as `schedule`.
    """
    result = []
    for rank in range(layout.ranks):
        steps = schedule(
            collective, algorithm, rank, layout.ranks, elements, group_size=layout.group_size, shards=shards
        )
        sends = [send for step in steps for send in step.sends]
        across = [send for send in sends if layout.group(send.peer) != layout.group(rank)]
        result.append(
            RankCounts(
                steps=len(steps),
                messages=len(sends),
                bytes_sent=sum(send.count for send in sends) * element_bytes,
                bytes_across=sum(send.count for send in across) * element_bytes,
            )
        )
    return tuple(result)

"""Ranks' places among others."""

from __future__ import annotations

from dlbench.node.ranks import RankPlace


def rank_place(
    rank: int = 0, size: int = 1, per_node: int | None = None, *, host: str | None = None, token: str = "t"
) -> RankPlace:
    """Where every node has `per_node` ranks, by default all; hosts are n0, n1, ... unless one is named."""
    local = per_node or size
    node = rank // local
    return RankPlace(
        rank=rank,
        size=size,
        local_rank=rank % local,
        local_size=local,
        node_rank=node,
        num_nodes=-(-size // local),
        host=host or f"n{node}",
        token=token,
    )

"""Phases in rings, along a chain, and straight to everyone.

A phase is the list of one rank's steps over a team of ranks and a span of elements. After a reduce-scatter the member
at place i holds the sum of part i of the span; before an all-gather it holds part i.
"""

from __future__ import annotations

from dlbench.costs.schedules.transfers import Span, Step, Team, Transfer, moves


def ring_reduce_scatter(team: Team, span: Span) -> list[Step]:
    """In p - 1 steps; each rank sends (p - 1) / p of the span (Patarasuk & Yuan 2009)."""
    p, i = team.size, team.index
    return [
        Step(
            sends=moves(team.rank(i + 1), span.part(p, (i - s - 1) % p)),
            receives=moves(team.rank(i - 1), span.part(p, (i - s - 2) % p)),
            reduce=True,
        )
        for s in range(p - 1)
    ]


def ring_all_gather(team: Team, span: Span) -> list[Step]:
    """In p - 1 steps; each rank sends (p - 1) / p of the span."""
    p, i = team.size, team.index
    return [
        Step(
            sends=moves(team.rank(i + 1), span.part(p, (i - s) % p)),
            receives=moves(team.rank(i - 1), span.part(p, (i - s - 1) % p)),
        )
        for s in range(p - 1)
    ]


def ring_allreduce(team: Team, span: Span) -> list[Step]:
    """Reduce-scatter, then all-gather: 2 (p - 1) steps."""
    return [*ring_reduce_scatter(team, span), *ring_all_gather(team, span)]


def direct_reduce_scatter(team: Team, span: Span) -> list[Step]:
    """One step: everyone sends each other its part. Partners are taken in turn, so that not all reach for one."""
    return _straight(team, span, sends_own=False, reduce=True)


def direct_all_gather(team: Team, span: Span) -> list[Step]:
    """One step: everyone sends its part to all others."""
    return _straight(team, span, sends_own=True, reduce=False)


def _straight(team: Team, span: Span, *, sends_own: bool, reduce: bool) -> list[Step]:
    p, i = team.size, team.index
    if p == 1:
        return []
    sends: list[Transfer] = []
    receives: list[Transfer] = []
    for distance in range(1, p):
        to, origin = (i + distance) % p, (i - distance) % p
        sends += moves(team.rank(to), span.part(p, i if sends_own else to))
        receives += moves(team.rank(origin), span.part(p, origin if sends_own else i))
    return [Step(sends=tuple(sends), receives=tuple(receives), reduce=reduce)]


def parameter_server(team: Team, span: Span, shards: int) -> list[Step]:
    """Two steps: each server adds up its shard of the span and sends the sum to all.

    Servers stand on the first `shards` ranks, beside the worker there (co-located): what a server's own worker adds
    does not travel.
    """
    p, i = team.size, team.index
    if p == 1:
        return []
    to_servers = tuple(t for s in _others(i, shards) for t in moves(team.rank(s), span.part(shards, s)))
    own = [span.part(shards, i)] if i < shards else []
    to_workers = tuple(t for w in _others(i, p) for t in moves(team.rank(w), *own))
    return [Step(sends=to_servers, receives=to_workers, reduce=True), Step(sends=to_workers, receives=to_servers)]


def _others(index: int, count: int) -> list[int]:
    """Places below `count` without `index`, beginning after it."""
    return [(index + 1 + k) % count for k in range(count) if (index + 1 + k) % count != index]


def gather_to_first(team: Team, span: Span) -> list[Step]:
    """In p - 1 steps: in step s the member s + 1 sends its part to the first."""
    return _one_by_one(team, span, inwards=True)


def scatter_from_first(team: Team, span: Span) -> list[Step]:
    """In p - 1 steps: in step s the first sends its part to the member s + 1."""
    return _one_by_one(team, span, inwards=False)


def _one_by_one(team: Team, span: Span, *, inwards: bool) -> list[Step]:
    steps = []
    for other in range(1, team.size):
        part = span.part(team.size, other)
        if team.index == 0:
            transfers, sends = moves(team.rank(other), part), not inwards
        else:
            transfers, sends = moves(team.rank(0), part) if team.index == other else (), inwards
        steps.append(Step(sends=transfers) if sends else Step(receives=transfers))
    return steps


def chain_broadcast(team: Team, span: Span, chunks: int) -> list[Step]:
    """From each to the next, in chunks one behind the other: p - 2 + chunks steps."""
    p, i = team.size, team.index
    steps = []
    for s in range(p - 2 + chunks if p > 1 else 0):
        out, into = s - i, s - i + 1  # member i receives chunk c in step i - 1 + c and sends it on in the next
        steps.append(
            Step(
                sends=moves(team.rank(i + 1), span.part(chunks, out)) if i < p - 1 and 0 <= out < chunks else (),
                receives=moves(team.rank(i - 1), span.part(chunks, into)) if i > 0 and 0 <= into < chunks else (),
            )
        )
    return steps


def pairwise_all_to_all(ranks: int, rank: int, elements: int) -> list[Step]:
    """In p - 1 steps: in step s every rank sends to the one s + 1 further."""
    return [
        Step(
            sends=_piece(elements, ranks, rank, (rank + d) % ranks, sent=True),
            receives=_piece(elements, ranks, (rank - d) % ranks, rank, sent=False),
            from_input=True,
        )
        for d in range(1, ranks)
    ]


def direct_all_to_all(ranks: int, rank: int, elements: int) -> list[Step]:
    """The same messages in one step."""
    steps = pairwise_all_to_all(ranks, rank, elements)
    if not steps:
        return []
    return [
        Step(
            sends=tuple(t for step in steps for t in step.sends),
            receives=tuple(t for step in steps for t in step.receives),
            from_input=True,
        )
    ]


def _piece(elements: int, ranks: int, source: int, target: int, *, sent: bool) -> tuple[Transfer, ...]:
    out, into, count = all_to_all_block(elements, ranks, source, target)
    return moves(target, Span(out, count)) if sent else moves(source, Span(into, count))


def all_to_all_block(elements: int, ranks: int, source: int, target: int) -> tuple[int, int, int]:
    """Where a piece of an all-to-all lies: first element in the source's input, in the target's output, elements.

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


def _marked_below(limit: int, ranks: int, start: int, length: int) -> int:
    """How many of the places start, ..., start + length - 1, counted around `ranks`, lie below `limit`."""
    start %= ranks
    end = start + length
    return max(0, min(limit, end) - start) + max(0, min(limit, end - ranks))

"""Phases of algorithms as steps and transfers: rings, chains, trees, straight to everyone, and halving and doubling.

A phase is the list of one rank's steps over a team of ranks and a span of elements. After a reduce-scatter the member
at place i holds the sum of part i of the span; before an all-gather it holds part i.

Halving and doubling take log2 p steps; surplus ranks are folded onto a power of two first. With p = 2^k + r ranks,
member 2j < 2r sends its vector to member 2j + 1, rests, and gets the result at the end (Rabenseifner 2004; Thakur,
Rabenseifner & Gropp 2005): 2 alpha + 2 n beta + n gamma on top.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Transfer:
    """A run of elements that travels."""

    peer: int  # The other rank.
    first: int  # First element, in the buffer.
    count: int  # Elements.


@dataclass(frozen=True)
class Step:
    """What one rank does at a time."""

    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()
    reduce: bool = False  # Whether what arrives is added (True) or put in place (False).
    from_input: bool = False  # Whether sends read the untouched input instead of the working buffer (all-to-all).


Schedule = tuple[Step, ...]


def block(elements: int, parts: int, index: int) -> tuple[int, int]:
    """First element and number of elements of one of nearly equal parts; the first parts are the longer ones.
    `elements`: of the whole, 0 or more. `parts`: into how many it is cut. `index`: which part, from 0.
    """
    share, rest = divmod(elements, parts)
    return index * share + min(index, rest), share + (index < rest)


@dataclass(frozen=True)
class Span:
    """A run of elements that a phase works on."""

    first: int
    count: int

    def part(self, parts: int, index: int) -> Span:
        first, count = block(self.count, parts, index)
        return Span(self.first + first, count)

    def cover(self, parts: int, low: int, high: int) -> Span:
        """Parts low, ..., high - 1 as one run."""
        first = block(self.count, parts, low)[0]
        end = block(self.count, parts, high)[0]
        return Span(self.first + first, end - first)


@dataclass(frozen=True)
class Team:
    """The ranks of a phase in order, and which of them this one is."""

    members: Sequence[int]
    index: int

    @property
    def size(self) -> int:
        return len(self.members)

    def rank(self, index: int) -> int:
        """The rank at a place, counted around the end."""
        return self.members[index % len(self.members)]


def moves(peer: int, *spans: Span) -> tuple[Transfer, ...]:
    """Runs of elements to or from a rank; empty runs do not travel."""
    return tuple(Transfer(peer, span.first, span.count) for span in spans if span.count)


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
    """Two steps: each server adds up its shard of the span and sends the sum to all. Servers stand on the first
    `shards` ranks, next to the worker there (co-located): what a server's own worker adds does not travel.
    """
    p, i = team.size, team.index
    if p == 1:
        return []
    to_servers = tuple(t for s in _others(i, shards) for t in moves(team.rank(s), span.part(shards, s)))
    own = [span.part(shards, i)] if i < shards else []
    to_workers = tuple(t for w in _others(i, p) for t in moves(team.rank(w), *own))
    return [Step(sends=to_servers, receives=to_workers, reduce=True), Step(sends=to_workers, receives=to_servers)]


def _others(index: int, count: int) -> list[int]:
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


def power_below(ranks: int) -> int:
    """The largest power of two that is not above `ranks`."""
    return 1 << (ranks.bit_length() - 1)


def folded(team: Team, span: Span, core: Callable[[Team, Span], list[Step]]) -> list[Step]:
    """An allreduce for a power of two of ranks, `core`, for any number of ranks."""
    whole = moves(team.rank(_partner(team)), span)
    return _between(team, core, span, Step(sends=whole), Step(receives=whole))


def _between(
    team: Team, core: Callable[[Team, Span], list[Step]], span: Span, give: Step, take: Step, *, reduce: bool = True
) -> list[Step]:
    """The core between the steps in which surplus members give their data away and take the result. `give` and `take`
    are seen by the surplus member; its partner does the opposite.
    """
    surplus = team.size - power_below(team.size)
    rests = team.index < 2 * surplus and team.index % 2 == 0
    helps = team.index < 2 * surplus and team.index % 2 == 1
    steps = core(_core_team(team), span)
    if rests:
        return [give, *[Step() for _ in steps], take]
    if helps:
        return [
            Step(sends=give.receives, receives=give.sends, reduce=reduce),
            *steps,
            Step(sends=take.receives, receives=take.sends),
        ]
    return [Step(), *steps, Step()] if surplus else steps


def _partner(team: Team) -> int:
    return team.index + 1 if team.index % 2 == 0 else team.index - 1


def _core_team(team: Team) -> Team:
    surplus = team.size - power_below(team.size)
    members = [team.members[i] for i in range(team.size) if i >= 2 * surplus or i % 2 == 1]
    index = team.index // 2 if team.index < 2 * surplus else team.index - surplus
    return Team(members, index)


def recursive_doubling(team: Team, span: Span) -> list[Step]:
    """log2 p steps; in each, partners exchange and add whole vectors. For a power of two of ranks."""
    steps = []
    distance = 1
    while distance < team.size:
        whole = moves(team.rank(team.index ^ distance), span)
        steps.append(Step(sends=whole, receives=whole, reduce=True))
        distance *= 2
    return steps


def halving_doubling(team: Team, span: Span) -> list[Step]:
    """Rabenseifner's allreduce: 2 log2 p steps, 2 (p - 1) / p of the span sent. For a power of two of ranks. Neighbours
    exchange the largest halves, so that these stay inside groups.
    """
    p, low, high = team.size, 0, team.size
    scatter: list[Step] = []
    gather: list[Step] = []
    distance = 1
    while distance < p:
        peer, middle = team.rank(team.index ^ distance), (low + high) // 2
        lower, upper = moves(peer, span.cover(p, low, middle)), moves(peer, span.cover(p, middle, high))
        if team.index & distance:
            kept, given, low = upper, lower, middle
        else:
            kept, given, high = lower, upper, middle
        scatter.append(Step(sends=given, receives=kept, reduce=True))
        gather.append(Step(sends=kept, receives=given))
        distance *= 2
    return [*scatter, *reversed(gather)]


def shifted_halving_doubling(team: Team, span: Span) -> list[Step]:
    """Halving and doubling by cyclic shifts instead of exchanges (Nguyen & Wahib, CCGRID 2021). For a power of two.

    Each step uses one length of shortcut of a distributed loop network, in one direction; steps and bytes are those
    of halving and doubling. Runs of parts that go around the end travel as two transfers.
    """
    p, i = team.size, team.index
    scatter: list[Step] = []
    gather: list[Step] = []
    distance = p // 2
    while distance:
        after, before = team.rank(i + distance), team.rank(i - distance)
        far, near = _around(span, p, i + distance, distance), _around(span, p, i, distance)
        scatter.append(Step(sends=moves(after, *far), receives=moves(before, *near), reduce=True))
        gather.append(Step(sends=moves(before, *near), receives=moves(after, *far)))
        distance //= 2
    return [*scatter, *reversed(gather)]


def _around(span: Span, parts: int, start: int, length: int) -> list[Span]:
    """Parts start, ..., start + length - 1 counted around the end, as one or two runs."""
    start %= parts
    end = start + length
    if end <= parts:
        return [span.cover(parts, start, end)]
    return [span.cover(parts, start, parts), span.cover(parts, 0, end - parts)]


def halving_reduce_scatter(team: Team, span: Span) -> list[Step]:
    """log2 p steps, (p - 1) / p of the span sent, for a power of two of ranks; others fold. A member that takes over a
    surplus one works for both of their parts, and sends its part back at the end.
    """
    partner = team.rank(_partner(team))
    own = span.part(team.size, team.index - team.index % 2)
    give, take = Step(sends=moves(partner, span)), Step(receives=moves(partner, own))
    return _between(team, lambda core, _: _halve(team, core, span)[0], span, give, take)


def doubling_all_gather(team: Team, span: Span) -> list[Step]:
    """log2 p steps, (p - 1) / p of the span sent, for a power of two of ranks; others fold. A surplus member gives its
    part away at the start and gets all others at the end.
    """
    p, partner = team.size, team.rank(_partner(team))
    surplus_index = team.index - team.index % 2
    own = span.part(p, surplus_index)
    rest = (span.cover(p, 0, surplus_index), span.cover(p, surplus_index + 1, p))
    give, take = Step(sends=moves(partner, own)), Step(receives=moves(partner, *rest))
    return _between(team, lambda core, _: _halve(team, core, span)[1], span, give, take, reduce=False)


def _halve(team: Team, core: Team, span: Span) -> tuple[list[Step], list[Step]]:
    """Halving over the members of the core, each for its own part and that of the member it took over; and back."""
    p, low, high = team.size, 0, core.size
    surplus = p - core.size

    def first_part(place: int) -> int:
        return 2 * place if place < surplus else place + surplus

    halving: list[Step] = []
    doubling: list[Step] = []
    distance = core.size // 2
    while distance:
        peer, middle = core.rank(core.index ^ distance), (low + high) // 2
        lower = moves(peer, span.cover(p, first_part(low), first_part(middle)))
        upper = moves(peer, span.cover(p, first_part(middle), first_part(high)))
        if core.index & distance:
            kept, given, low = upper, lower, middle
        else:
            kept, given, high = lower, upper, middle
        halving.append(Step(sends=given, receives=kept, reduce=True))
        doubling.append(Step(sends=kept, receives=given))
        distance //= 2
    return halving, doubling[::-1]


def binomial_reduce(team: Team, span: Span) -> list[Step]:
    """ceil(log2 p) steps; the first member then holds the sum."""
    i, steps = team.index, []
    distance = 1
    while distance < team.size:
        step = Step()
        if i % (2 * distance) == distance:
            step = Step(sends=moves(team.rank(i - distance), span))
        elif i % (2 * distance) == 0 and i + distance < team.size:
            step = Step(receives=moves(team.rank(i + distance), span), reduce=True)
        steps.append(step)
        distance *= 2
    return steps


def binomial_broadcast(team: Team, span: Span) -> list[Step]:
    """ceil(log2 p) steps: the reduction backwards."""
    return [Step(sends=step.receives, receives=step.sends) for step in reversed(binomial_reduce(team, span))]


def binomial_scatter(team: Team, span: Span) -> list[Step]:
    """ceil(log2 p) steps; member i then holds part i, sent with all parts of the members behind it."""
    p, i = team.size, team.index
    steps = []
    distance = 1 << (p - 1).bit_length() >> 1
    while distance:
        step = Step()
        if i % (2 * distance) == distance:
            step = Step(receives=moves(team.rank(i - distance), span.cover(p, i, min(i + distance, p))))
        elif i % (2 * distance) == 0 and i + distance < p:
            behind = span.cover(p, i + distance, min(i + 2 * distance, p))
            step = Step(sends=moves(team.rank(i + distance), behind))
        steps.append(step)
        distance //= 2
    return steps


@dataclass(frozen=True)
class Tree:
    """A binary tree over places 0 to p - 1: for each its parent (the root's is -1), its children and its depth."""

    parents: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]
    depths: tuple[int, ...]


@cache
def in_order_tree(size: int) -> Tree:
    """The tree whose in-order walk is 0, 1, ...: even places are leaves and odd ones are not; depth floor(log2 p)."""
    parents, depths = [-1] * size, [0] * size
    children: list[list[int]] = [[] for _ in range(size)]
    ranges = [(0, size, -1, 0)]
    while ranges:
        low, high, parent, depth = ranges.pop()
        if low == high:
            continue
        root = low + (1 << ((high - low).bit_length() - 1)) - 1
        parents[root], depths[root] = parent, depth
        if parent >= 0:
            children[parent].append(root)
        ranges += [(root + 1, high, root, depth + 1), (low, root, root, depth + 1)]
    return Tree(tuple(parents), tuple(tuple(c) for c in children), tuple(depths))


def double_tree_place(ranks: int, tree: int, index: int) -> int:
    """Place of a member in the first (0) or second (1) of the two trees.

    The second is the mirror image of the first for an even number of members, and the first shifted by one for an odd
    number: then what is inside one tree is a leaf of the other. Of an odd number one member is a leaf of both.
    """
    if tree == 0:
        return index
    return ranks - 1 - index if ranks % 2 == 0 else (index - 1) % ranks


def _member(ranks: int, tree: int, place: int) -> int:
    if tree == 0:
        return place
    return ranks - 1 - place if ranks % 2 == 0 else (place + 1) % ranks


def double_binary_tree(team: Team, span: Span, chunks: int) -> list[Step]:
    """Two trees, each for one half of the span, in chunks one behind the other (Sanders, Speck & Träff 2009).

    Reduction to both roots, then broadcast: 2 (depth + chunks - 1) steps with depth floor(log2 p). In a step a member
    takes from two children in the one tree and gives to its parents in both, so that both directions are used.
    """
    p = team.size
    if p == 1:
        return []
    shape = in_order_tree(p)
    depth = max(shape.depths)
    length = depth + chunks - 1
    sends: list[list[Transfer]] = [[] for _ in range(length)]
    receives: list[list[Transfer]] = [[] for _ in range(length)]
    for tree in range(2):
        half = span.part(2, tree)
        place = double_tree_place(p, tree, team.index)
        for chunk in range(chunks):
            piece = half.part(chunks, chunk)
            # A member at depth d passes chunk c on in step depth - d + c, one step after its children did.
            start = depth - shape.depths[place] + chunk
            if shape.parents[place] >= 0:
                sends[start] += moves(team.rank(_member(p, tree, shape.parents[place])), piece)
            for child in shape.children[place]:
                receives[start - 1] += moves(team.rank(_member(p, tree, child)), piece)
    up = [Step(sends=tuple(s), receives=tuple(r), reduce=True) for s, r in zip(sends, receives, strict=True)]
    return [*up, *_back(up)]


def _back(up: list[Step]) -> list[Step]:
    return [Step(sends=step.receives, receives=step.sends) for step in reversed(up)]

"""Collective algorithms: which rank sends which elements to which rank in which step, for any number of both.

Halving and doubling fold surplus ranks onto a power of two first: with p = 2^k + r ranks, member 2j < 2r sends its
vector to member 2j + 1, rests, and gets the result at the end (Rabenseifner 2004; Thakur, Rabenseifner & Gropp 2005).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import chain

import numpy as np
import numpy.typing as npt

from dlbench.errors import UserError
from dlbench.perfmodels.schedules import (
    Layout,
    Schedule,
    ScheduleStep,
    Transfer,
    all_to_all_block,
    invalid,
    pipeline_chunks,
    power_below,
)
from dlbench.specs.comm import DEDICATED_SERVERS, Collective

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pattern:
    """The messages of one step of a collective, or of `repeat` steps that are alike."""

    source: Numbers  # Sending rank of each message.
    target: Numbers  # Receiving rank of each message.
    first: Numbers  # First element of each message; a message continues at the start of the vector after its end.
    count: Numbers  # Elements of each message; a message without elements is not sent.
    reduce: bool | Numbers = False  # Whether the receiver adds the elements; or how many elements of each it adds.
    repeat: int = 1
    weight: Numbers | None = None  # Messages that each entry stands for, to as many ranks of the same level; None: one.
    into: Numbers | None = None  # First element at the target, of all-to-all; None: as at the source.

    @property
    def added(self) -> Numbers:
        """The number of elements of each message that the receiver adds."""
        if isinstance(self.reduce, bool):
            return self.count * self.reduce
        return self.reduce

    def backwards(self) -> Pattern:
        """Returns the messages in the opposite direction; the receiver puts them in place instead of adding."""
        return replace(self, source=self.target, target=self.source, reduce=False)

    def runs(self, elements: int) -> Numbers:
        """Returns the messages as runs of consecutive elements; one around the end of the vector is two runs. Shape (6,
        runs); rows: source, target, first element at the source and at the target, elements, whether they are added.
        """
        first = self.first % max(1, elements)
        into = first if self.into is None else self.into
        beyond_end = np.maximum(first + self.count - elements, 0)
        is_added = self.added > 0
        runs = np.stack([self.source, self.target, first, into, self.count, is_added])
        if beyond_end.any():
            start = 0 * first
            runs[4] -= beyond_end
            at_start = np.stack([self.source, self.target, start, start, beyond_end, is_added])
            runs = np.concatenate([runs, at_start], axis=1)
        return runs[:, runs[4] > 0]


def schedule(  # noqa: PLR0913  # A collective has this many properties.
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
    """Returns the steps of one rank; () if it is the only one. `shards` are the servers of parameter-server, None: all
    ranks; `chunks` are for pipelined algorithms, None: `pipeline_chunks`.
    """
    problem = invalid(collective, algorithm, ranks, group_size=group_size, shards=shards)
    if problem:
        raise UserError(problem)
    layout = Layout(ranks=ranks, group_size=max(1, group_size))
    if chunks is None:
        chunks = pipeline_chunks(collective, algorithm, layout, elements)
    steps = []
    for pattern in patterns(collective, algorithm, layout, elements, shards=shards, chunks=chunks):
        source, target, first, into, count, is_added = pattern.runs(elements)
        is_sent, is_received = source == rank, target == rank
        sends = (target[is_sent], first[is_sent], count[is_sent])
        receives = (source[is_received], into[is_received], count[is_received], is_added[is_received] > 0)
        steps.append(
            ScheduleStep(
                sends=tuple(map(Transfer, *(column.tolist() for column in sends))),
                receives=tuple(map(Transfer, *(column.tolist() for column in receives))),
                from_input=pattern.into is not None,
            )
        )
    return tuple(steps)


@dataclass(frozen=True, kw_only=True)
class RankCounts:
    """The messages and bytes of one rank in one collective."""

    steps: int  # Steps of its schedule, those without a message of its own included: equal on all ranks.
    messages: int  # Messages it sends.
    bytes_sent: int  # Bytes it sends.
    bytes_across: int  # Bytes it sends to other groups.


@lru_cache(maxsize=4096)
def counts(
    collective: Collective,
    algorithm: str,
    layout: Layout,
    elements: int,
    element_bytes: int,
    *,
    shards: int | None = None,
    chunks: int | None = None,
) -> tuple[RankCounts, ...]:
    """Returns the counts of every rank; arguments and errors are those of `schedule`."""
    if chunks is None:
        chunks = pipeline_chunks(collective, algorithm, layout, elements)
    steps = 0
    totals = np.zeros((3, layout.ranks), np.int64)  # Rows: messages, elements, elements that leave the group.
    for pattern in patterns(collective, algorithm, layout, elements, shards=shards, chunks=chunks):
        source, target, _, _, count, _ = pattern.runs(elements)
        leaves_group = source // layout.node_size != target // layout.node_size
        for total, weights in zip(totals, (count > 0, count, count * leaves_group), strict=True):
            np.add.at(total, source, weights)
        steps += 1
    return tuple(
        RankCounts(steps=steps, messages=messages, bytes_sent=sent * element_bytes, bytes_across=across * element_bytes)
        for messages, sent, across in totals.T.tolist()
    )


def patterns(
    collective: Collective,
    algorithm: str,
    layout: Layout,
    elements: int,
    *,
    shards: int | None = None,
    chunks: int = 1,
    lumped: bool = False,
) -> Iterator[Pattern]:
    """Yields the messages of each step of a collective; none for one rank. Arguments and errors as for `schedule`. With
    `lumped`, steps and messages that load a network equally are one with `repeat` or `weight`, for thousands of ranks.
    """
    p, g = layout.ranks, layout.group_size
    problem = invalid(collective, algorithm, p, group_size=g, shards=shards)
    if problem:
        raise UserError(problem)
    if p == 1:
        return iter(())
    servers = shards or (1 if algorithm == DEDICATED_SERVERS else p)
    return _patterns(collective, algorithm, layout, elements, servers, chunks, lumped)


def _patterns(
    collective: Collective, algorithm: str, layout: Layout, elements: int, servers: int, chunks: int, lumped: bool
) -> Iterator[Pattern]:
    p, g = layout.ranks, layout.group_size
    n, ranks = elements, np.arange(p)[None]
    groups = ranks if p % g else ranks.reshape(-1, g)

    def ring(phases: str, teams: Numbers = ranks, parts: int = 1) -> Iterator[Pattern]:
        return _ring(teams, n, parts, phases, lumped)

    # Generators: only the steps of the one that is returned are computed.
    steps: dict[str, Iterator[Pattern]] = {
        "allreduce naive": _everything(layout, n, lumped),
        "allreduce ring": ring("both"),
        "allreduce binomial-tree": _there_and_back(_binomial_reduce(p, n)),
        "allreduce double-binary-tree": _there_and_back(_double_tree(p, n, chunks, lumped)),
        "allreduce recursive-doubling": _folded(p, n, _recursive_doubling),
        "allreduce recursive-halving-doubling": _folded(p, n, _halving_doubling),
        "allreduce shifted-halving-doubling": _folded(p, n, _shifted),
        "allreduce direct": _there_and_back(_to_servers(layout, n, p, lumped)),
        "allreduce parameter-server": _there_and_back(_to_servers(layout, n, servers, lumped)),
        f"allreduce {DEDICATED_SERVERS}": _there_and_back(_to_dedicated(p, n, servers)),
        "allreduce hierarchical": _hierarchical(groups, n, chunks, lumped),
        # To the first rank of each group, ring of these, from it in the group (Jia et al. 2018).
        "allreduce leader": chain(
            ring("scatter", groups),
            (pattern.backwards() for pattern in _from_first(groups, n)),
            ring("both", groups.T[:1]),
            _from_first(groups, n),
            ring("gather", groups),
        ),
        "reduce-scatter ring": ring("scatter"),
        "reduce-scatter recursive-halving": _halved(p, n, gather=False),
        "reduce-scatter direct": _to_servers(layout, n, p, lumped),
        "all-gather ring": ring("gather"),
        "all-gather recursive-doubling": _halved(p, n, gather=True),
        "all-gather direct": _back(_to_servers(layout, n, p, lumped)),
        "broadcast binomial-tree": _back(_binomial_reduce(p, n)),
        "broadcast chain": _chain(layout, n, chunks, lumped),
        "broadcast scatter-all-gather": chain(_binomial_scatter(p, n), ring("gather")),
        "reduce binomial-tree": _binomial_reduce(p, n),
        # For long vectors (Rabenseifner 2004).
        "reduce scatter-gather": chain(ring("scatter"), _back(_binomial_scatter(p, n))),
        "scatter binomial-tree": _binomial_scatter(p, n),
        "scatter linear": _from_first(ranks, n),
        "gather binomial-tree": _back(_binomial_scatter(p, n)),
        "gather linear": _back(_from_first(ranks, n)),
        "all-to-all pairwise": _pairwise(layout, n, lumped),
        "all-to-all direct": _all_to_all(layout, n, lumped),
    }
    return steps[f"{collective} {algorithm}"]


def rank_leaves(layout: Layout) -> Numbers:
    """Returns the number of the leaf switch above each rank."""
    ranks = np.arange(layout.ranks)
    if layout.leaves is None:
        return ranks // (layout.leaf_size or layout.ranks)
    numbers: Numbers = np.unique(layout.leaves, return_inverse=True)[1]
    return numbers[ranks // layout.node_size]


def _outer_block(layout: Layout) -> int:
    """Returns the ranks of the largest equal blocks that some messages leave; all ranks if nodes are in any order."""
    if layout.leaves is not None:
        return layout.ranks
    if layout.leaf_size and layout.leaf_size < layout.ranks:
        return layout.leaf_size
    if layout.node_size < layout.ranks:
        return layout.node_size
    return 1


def _begin(elements: int | Numbers, parts: int, index: int | Numbers) -> Numbers:
    """Returns the first element of parts of nearly equal length, cut as `block` does."""
    return np.asarray(index * (elements // parts) + np.minimum(index, elements % parts))


def _cut(elements: int | Numbers, parts: int, index: int | Numbers) -> Numbers:
    return np.asarray(elements // parts + (index < elements % parts))


def _there_and_back(phase: Iterator[Pattern]) -> Iterator[Pattern]:
    patterns = list(phase)
    yield from patterns
    yield from _back(iter(patterns))


def _back(phase: Iterator[Pattern]) -> Iterator[Pattern]:
    for pattern in reversed(list(phase)):
        yield pattern.backwards()


def _whole(source: Numbers, target: Numbers, elements: int, *, reduce: bool) -> Pattern:
    return Pattern(source, target, np.zeros(len(source), int), np.full(len(source), elements), reduce)


def _ring(teams: Numbers, elements: int, parts: int, phases: str, lumped: bool) -> Iterator[Pattern]:
    """Yields the steps of simultaneous rings (Patarasuk & Yuan 2009), one for each row of `teams`, each over one of
    `parts`. `phases` is scatter, gather or both, each of p - 1 steps in which a rank sends 1 / p of the elements.
    """
    size = teams.shape[1]
    part = np.arange(len(teams)) % parts
    source, target = teams.ravel(), np.roll(teams, -1, axis=1).ravel()
    begins, lengths = _begin(elements, parts, part)[:, None], _cut(elements, parts, part)[:, None]
    num_steps, repeat = size - 1, 1
    if lumped and not (lengths % size).any():
        num_steps, repeat = min(1, size - 1), size - 1
    reduces = {"both": (True, False), "scatter": (True,), "gather": (False,)}[phases]
    for reduce in reduces:
        for step in range(num_steps):
            index = (np.arange(size) - step - reduce)[None] % size
            first, count = begins + _begin(lengths, size, index), _cut(lengths, size, index)
            yield Pattern(source, target, first.ravel(), count.ravel(), reduce, repeat)


def _hierarchical(groups: Numbers, elements: int, chunks: int, lumped: bool) -> Iterator[Pattern]:
    """Yields reduce-scatter in groups, all-reduce across groups, all-gather in groups (2D ring, Mikami et al. 2018).
    Chunk c goes through its three rings from step c on, so that messages inside and across groups overlap.
    """
    p = groups.size
    is_equal = lumped and elements % (chunks * p) == 0
    patterns: list[list[Pattern]] = []  # Of each chunk; if all are equal, of the first only.
    for chunk in range(1 if is_equal else chunks):
        length, begin = int(_cut(elements, chunks, chunk)), _begin(elements, chunks, chunk)
        rings = chain(
            _ring(groups, length, 1, "scatter", is_equal),
            _ring(groups.T, length, groups.shape[1], "both", is_equal),
            _ring(groups, length, 1, "gather", is_equal),
        )
        patterns.append([replace(pattern, first=pattern.first + begin) for pattern in rings])
    order: list[int] = []  # The pattern of each step of a chunk.
    for number, pattern in enumerate(patterns[0]):
        order += [number] * pattern.repeat
    # Steps by the patterns that are under way: (chunk, number of the pattern) and how often.
    kinds: Counter[tuple[tuple[tuple[int, int], int], ...]] = Counter()
    for step in range(len(order) + chunks - 1):
        first = max(0, step - chunks + 1)
        under_way = order[first : step + 1]  # Of the last chunk under way first.
        if is_equal:
            active = [((0, number), times) for number, times in Counter(under_way).items()]
        else:
            active = [((step - first - place, number), 1) for place, number in enumerate(under_way)]
        kinds[tuple(active)] += 1
    merged: _Merged = {}
    for together, repeat in kinds.items():
        columns = []
        for (chunk, number), times in together:
            pattern = patterns[chunk][number]
            columns.append(
                [pattern.source, pattern.target, pattern.first, pattern.count * times, pattern.added * times]
            )
        source, target, first, count, added = np.concatenate(columns, axis=1)
        combined = Pattern(source, target, first, count, added, repeat)
        if lumped:
            combined = _merge_pairs(combined, p, merged)
        yield combined


_Merged = dict[bytes, tuple[Numbers, Numbers]]  # Different pairs of ranks, and the place of each message, by its pairs.


def _merge_pairs(pattern: Pattern, p: int, merged: _Merged) -> Pattern:
    pairs = pattern.source * p + pattern.target
    key = pairs.tobytes()
    if key not in merged:
        merged[key] = np.unique(pairs, return_inverse=True)
    pair, index = merged[key]
    count = np.bincount(index, pattern.count).astype(np.int64)
    added = np.bincount(index, pattern.added).astype(np.int64)
    return replace(pattern, source=pair // p, target=pair % p, first=0 * pair, count=count, reduce=added)


def _from_first(teams: Numbers, elements: int) -> Iterator[Pattern]:
    """Yields p - 1 steps in which the first of each team sends its part to each of the others in turn."""
    size, equal = teams.shape[1], np.ones(len(teams), int)
    for place in range(1, size):
        first, count = equal * _begin(elements, size, place), equal * _cut(elements, size, place)
        yield Pattern(teams[:, 0], teams[:, place], first, count)


def _binomial_reduce(p: int, elements: int) -> Iterator[Pattern]:
    """Yields ceil(log2 p) steps, after which the first member holds the sum."""
    distance = 1
    while distance < p:
        source = np.arange(distance, p, 2 * distance)
        yield _whole(source, source - distance, elements, reduce=True)
        distance *= 2


def _binomial_scatter(p: int, elements: int) -> Iterator[Pattern]:
    """Yields ceil(log2 p) steps, after which member i holds part i; parts travel with those of all members behind."""
    distance = 1 << (p - 1).bit_length() >> 1
    while distance:
        target = np.arange(distance, p, 2 * distance)
        first, end = _begin(elements, p, target), _begin(elements, p, np.minimum(target + distance, p))
        yield Pattern(target - distance, target, first, end - first)
        distance //= 2


def _folded(p: int, elements: int, core: Callable[[Numbers, int], Iterator[Pattern]]) -> Iterator[Pattern]:
    """Yields `core`, an all-reduce for a power of two of ranks, extended to any number of ranks."""
    members, resting = _core(p)
    if not len(resting):
        yield from core(members, elements)
        return
    fold = _whole(resting, resting + 1, elements, reduce=True)
    yield fold
    yield from core(members, elements)
    yield fold.backwards()


def _core(p: int) -> tuple[Numbers, Numbers]:
    """Returns the members of the power of two that takes part, and the surplus members, which rest."""
    ranks, surplus = np.arange(p), p - power_below(p)
    is_surplus = (ranks < 2 * surplus) & (ranks % 2 == 0)
    return ranks[~is_surplus], ranks[is_surplus]


def _recursive_doubling(members: Numbers, elements: int) -> Iterator[Pattern]:
    """Yields log2 p steps in which partners exchange and add whole vectors."""
    place = np.arange(len(members))
    for bit in range(len(members).bit_length() - 1):
        yield _whole(members, members[place ^ (1 << bit)], elements, reduce=True)


def _halving_doubling(members: Numbers, elements: int) -> Iterator[Pattern]:
    """Yields Rabenseifner's all-reduce; neighbours exchange the largest halves, so that these stay inside groups."""
    distances = [1 << bit for bit in range(len(members).bit_length() - 1)]
    return _there_and_back(_halving(members, elements, np.arange(len(members) + 1), distances))


def _halving(members: Numbers, elements: int, bounds: Numbers, distances: Sequence[int]) -> Iterator[Pattern]:
    """Yields steps in which a member gives half of its elements to its partner; `bounds` are the first part of each
    place.
    """
    begins = _begin(elements, int(bounds[-1]), bounds)
    place, low, high = np.arange(len(members)), np.zeros(len(members), int), np.full(len(members), len(members))
    for distance in distances:
        middle, takes_upper = (low + high) // 2, (place & distance) > 0
        first, end = begins[np.where(takes_upper, low, middle)], begins[np.where(takes_upper, middle, high)]
        yield Pattern(members, members[place ^ distance], first, end - first, reduce=True)
        low, high = np.where(takes_upper, middle, low), np.where(takes_upper, high, middle)


def _halved(p: int, elements: int, *, gather: bool) -> Iterator[Pattern]:
    """Yields reduce-scatter by halving, or all-gather by doubling, in log2 p steps. A member that takes over a surplus
    one works for the parts of both, and sends it back its own or all others.
    """
    members, resting = _core(p)
    surplus = len(resting)
    place = np.arange(len(members) + 1)
    bounds = np.where(place < surplus, 2 * place, place + surplus)
    distances = [1 << bit for bit in reversed(range(len(members).bit_length() - 1))]
    halving = _halving(members, elements, bounds, distances)
    first, count = _begin(elements, p, resting), _cut(elements, p, resting)
    if gather:
        fold = Pattern(resting, resting + 1, first, count)
        unfold = Pattern(resting + 1, resting, first + count, elements - count)
        halving = _back(halving)
    else:
        fold = _whole(resting, resting + 1, elements, reduce=True)
        unfold = Pattern(resting + 1, resting, first, count)
    if surplus:
        yield fold
    yield from halving
    if surplus:
        yield unfold


def _shifted(members: Numbers, elements: int) -> Iterator[Pattern]:
    """Yields halving and doubling by cyclic shifts instead of exchanges (Nguyen & Wahib, CCGRID 2021)."""
    p = len(members)
    place = np.arange(p)
    scatter = []
    for distance in (1 << bit for bit in reversed(range(p.bit_length() - 1))):
        start, end = (place + distance) % p, (place + 2 * distance) % p
        first = _begin(elements, p, start)
        count = _begin(elements, p, end) - first + elements * (end <= start)
        scatter.append(Pattern(members, members[start], first, count, reduce=True))
    return _there_and_back(iter(scatter))


def _to_servers(layout: Layout, elements: int, servers: int, lumped: bool) -> Iterator[Pattern]:
    """Yields one step in which each server, on the first ranks, gets its part from all, which take turns."""
    equal = _equal_messages(layout, elements, lumped and servers == layout.ranks)
    if equal is not None:
        yield replace(equal, reduce=True)
        return
    source, target = _pairs(layout.ranks, servers)
    yield Pattern(source, target, _begin(elements, servers, target), _cut(elements, servers, target), reduce=True)


def _to_dedicated(ranks: int, elements: int, servers: int) -> Iterator[Pattern]:
    """Yields one step in which each server, on the last ranks, gets its part from all other ranks, which take turns."""
    turn, source = np.indices((servers, ranks - servers)).reshape(2, -1)
    part = (source + turn) % servers
    target = ranks - servers + part
    yield Pattern(source, target, _begin(elements, servers, part), _cut(elements, servers, part), reduce=True)


def _everything(layout: Layout, elements: int, lumped: bool) -> Iterator[Pattern]:
    """Yields one step in which every rank sends its whole vector to all others, which add it."""
    equal = _equal_messages(layout, elements * layout.ranks, lumped)
    if equal is not None:
        yield replace(equal, reduce=True)
        return
    yield _whole(*_pairs(layout.ranks, layout.ranks), elements, reduce=True)


def _pairs(p: int, targets: int) -> tuple[Numbers, Numbers]:
    """Returns source and target of messages from every rank to the first ranks; each begins with the next rank."""
    turn, source = np.indices((targets, p)).reshape(2, -1)
    target = (source + 1 + turn) % targets
    return source[source != target], target[source != target]


def _equal_messages(layout: Layout, elements: int, lumped: bool) -> Pattern | None:
    """Returns messages from every rank to all others, one of each level; None unless lumped and all ranks are equal."""
    p, group = layout.ranks, min(layout.node_size, layout.ranks)
    by_leaf = rank_leaves(layout)
    leaf, *others = np.unique(by_leaf, return_counts=True)[1].tolist()
    if not lumped or elements % p or any(other != leaf for other in others) or leaf % group:
        return None
    ranks = np.arange(p)
    targets, weights = [], []  # By level: the target of each rank, and the targets that it stands for.
    in_group = ranks // group * group + (ranks + 1) % group
    in_leaf = ranks // leaf * leaf + (ranks + group) % leaf
    elsewhere = (ranks + leaf) % p
    for target, weight in ((in_group, group - 1), (in_leaf, leaf - group), (elsewhere, p - leaf)):
        if weight:
            targets.append(target)
            weights.append(weight)
    source = np.repeat(ranks, len(weights))
    target = np.stack(targets, axis=1).ravel()
    order = np.argsort(by_leaf, kind="stable")  # Ranks, sorted by leaf.
    count = np.full(len(source), elements // p)
    return Pattern(order[source], order[target], 0 * source, count, weight=np.tile(weights, p))


def _all_to_all(layout: Layout, elements: int, lumped: bool) -> Iterator[Pattern]:
    equal = _equal_messages(layout, elements, lumped)
    if equal is not None:
        yield equal
        return
    source, target = _pairs(layout.ranks, layout.ranks)
    first, into, count = all_to_all_block(elements, layout.ranks, source, target)
    yield Pattern(source, target, first, count, into=into)


def _pairwise(layout: Layout, elements: int, lumped: bool) -> Iterator[Pattern]:
    """Yields p - 1 steps; in step s every rank sends to the rank s + 1 further. Distances beyond the outermost block
    load a network equally, and so do distances d and p - d.
    """
    p, block, ranks = layout.ranks, _outer_block(layout), np.arange(layout.ranks)
    kinds: Counter[tuple[int, int]] = Counter()  # Steps by distance and elements of a message.
    for distance in range(1, p):
        count = int(_cut(elements, p, distance))
        if lumped:
            distance = min(distance, p - distance, block)
        kinds[distance, count] += 1
    for (distance, count), repeat in kinds.items():
        target = (ranks + distance) % p
        first, into, _ = all_to_all_block(elements, p, ranks, target)
        yield Pattern(ranks, target, first, np.full(p, count), repeat=repeat, into=into)


def _chain(layout: Layout, elements: int, chunks: int, lumped: bool) -> Iterator[Pattern]:
    """Yields p - 2 + chunks steps; in step s member i sends chunk s - i to the next member. A full window of chunks
    loads a network as one that is a block further.
    """
    p, block = layout.ranks, _outer_block(layout)
    kinds: Counter[int] = Counter()
    for step in range(p - 2 + chunks):
        if lumped and chunks - 1 <= step <= p - 2:
            kinds[chunks - 1 + (step - chunks + 1) % block] += 1
        else:
            kinds[step] += 1
    for step, repeat in kinds.items():
        source = np.arange(max(0, step - chunks + 1), min(step, p - 2) + 1)
        first, count = _begin(elements, chunks, step - source), _cut(elements, chunks, step - source)
        yield Pattern(source, source + 1, first, count, repeat=repeat)


@cache
def in_order_tree(size: int) -> tuple[Numbers, Numbers]:
    """Returns parents (-1: root) and depths of the binary tree whose in-order walk is 0, 1, ...; even places are
    leaves.
    """
    parents, depths = np.full(size, -1), np.zeros(size, int)
    ranges = [(0, size, -1, 0)]
    while ranges:
        low, high, parent, depth = ranges.pop()
        if low < high:
            root = low + (1 << ((high - low).bit_length() - 1)) - 1
            parents[root], depths[root] = parent, depth
            ranges += [(root + 1, high, root, depth + 1), (low, root, root, depth + 1)]
    return parents, depths


def _double_tree(p: int, elements: int, chunks: int, lumped: bool) -> Iterator[Pattern]:
    """Yields a reduction in two trees, each of half the vector, in depth + chunks - 1 steps (Sanders, Speck & Träff
    2009).

    The second tree is the first mirrored or shifted by one, so that an inner member of one is a leaf of the other.
    """
    parents, depths = in_order_tree(p)
    depth, places, ranks = int(depths.max()), np.flatnonzero(parents >= 0), np.arange(p)
    second = (ranks + 1) % p if p % 2 else p - 1 - ranks
    members = (ranks, second)  # The rank at each place of the two trees.
    is_equal = lumped and elements % (2 * chunks) == 0
    kinds: Counter[tuple[int, int, int]] = Counter()  # Steps by first depth, last depth, and step unless all are equal.
    for step in range(depth + chunks - 1):
        # A member at depth d passes chunk c on in step depth - d + c, one step after its children did.
        low, high = max(1, depth - step), min(depth, depth - step + chunks - 1)
        kinds[low, high, -1 if is_equal else step] += 1
    halves = [int(_cut(elements, 2, tree)) for tree in (0, 1)]
    for (low, high, step), repeat in kinds.items():
        active = places[(depths[places] >= low) & (depths[places] <= high)]
        chunk = np.zeros(len(active), int)
        if not is_equal:
            chunk = step - depth + depths[active]
        source = np.concatenate([member[active] for member in members])
        target = np.concatenate([member[parents[active]] for member in members])
        first = np.concatenate([tree * halves[0] + _begin(half, chunks, chunk) for tree, half in enumerate(halves)])
        count = np.concatenate([_cut(half, chunks, chunk) for half in halves])
        pattern = Pattern(source, target, first, count, reduce=True, repeat=repeat)
        if lumped:
            pattern = _merge_pairs(pattern, p, {})
        yield pattern

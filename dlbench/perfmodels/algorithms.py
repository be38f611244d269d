"""Collective algorithms: who sends which elements to whom in which step, over all ranks at once.

A collective is a list of patterns of messages, arrays of source, target and elements. One rank's share of them is its
schedule, which the node executes (`dlbench.perfmodels.schedules` says how); what they load a network with is its price
(`dlbench.perfmodels.patterns`). After a reduce-scatter the member at place i holds the sum of part i of the vector;
before an all-gather it holds part i. Every algorithm takes any number of ranks and elements.

Halving and doubling take log2 p steps; surplus ranks are folded onto a power of two first. With p = 2^k + r ranks,
member 2j < 2r sends its vector to member 2j + 1, rests, and gets the result at the end (Rabenseifner 2004; Thakur,
Rabenseifner & Gropp 2005): 2 alpha + 2 n beta + n gamma on top.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

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
from dlbench.specs.comm import Collective

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pattern:
    """The messages of a step, of which a collective has `repeat`."""

    source: Numbers  # Ranks.
    target: Numbers
    first: Numbers  # First element of each message; it goes on around the end of the vector.
    count: Numbers  # Elements of each message; those without any do not travel.
    reduce: bool | Numbers = False  # Whether what arrives is added; or how many elements of each message are.
    repeat: int = 1
    weight: Numbers | None = None
    """Messages that each entry stands for, to as many ranks of the same level; None: one."""
    into: Numbers | None = None  # First element at the target, of all-to-all; None: as at the source.

    @property
    def added(self) -> Numbers:
        """Elements of each message that are added."""
        return self.count * self.reduce if isinstance(self.reduce, bool) else self.reduce

    def backwards(self) -> Pattern:
        """What was received is sent back, and put in place."""
        return replace(self, source=self.target, target=self.source, reduce=False)

    def runs(self, elements: int) -> Numbers:
        """Source, target, first element there and there, elements, whether they are added, (6, runs), of what travels
        in a vector of this many elements: messages around its end are two.
        """
        first = self.first % max(1, elements)
        around = np.maximum(first + self.count - elements, 0)
        added = self.added > 0
        runs = np.stack([self.source, self.target, first, first if self.into is None else self.into, self.count, added])
        if around.any():
            rest = np.stack([self.source, self.target, 0 * first, 0 * first, around, added])
            runs[4] -= around
            runs = np.concatenate([runs, rest], axis=1)
        return runs[:, runs[4] > 0]


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

    `group_size`: ranks of a group, for hierarchical and leader; rank r is in group r // group_size. `shards`: servers
    of parameter-server, on the first ranks; none: every rank is one. `chunks`: for hierarchical, double-binary-tree and
    chain; none: `pipeline_chunks`.
    """
    problem = invalid(collective, algorithm, ranks, group_size=group_size, shards=shards)
    if problem:
        raise UserError(problem)
    layout = Layout(ranks=ranks, group_size=max(1, group_size))
    pieces = pipeline_chunks(collective, algorithm, layout, elements) if chunks is None else chunks
    found = []
    for pattern in patterns(collective, algorithm, layout, elements, shards=shards, chunks=pieces):
        runs = pattern.runs(elements)
        source, target, first, into, count, added = runs
        sends, receives = source == rank, target == rank
        arriving = (source[receives], into[receives], count[receives], added[receives] > 0)
        found.append(
            ScheduleStep(
                sends=tuple(map(Transfer, target[sends].tolist(), first[sends].tolist(), count[sends].tolist())),
                receives=tuple(map(Transfer, *(one.tolist() for one in arriving))),
                from_input=pattern.into is not None,
            )
        )
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class RankCounts:
    """What one rank does in one collective."""

    steps: int  # Steps of its schedule, those without a message of its own included: equal on all ranks.
    messages: int  # Messages it sends.
    bytes_sent: int  # Bytes it sends.
    bytes_across: int  # Those of them that leave its group.


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
    """Counts of every rank; arguments and errors as `schedule`."""
    ranks, steps = layout.ranks, 0
    chunks = pipeline_chunks(collective, algorithm, layout, elements) if chunks is None else chunks
    totals = np.zeros((3, ranks), np.int64)  # messages, elements, elements that leave the group
    for pattern in patterns(collective, algorithm, layout, elements, shards=shards, chunks=chunks):
        source, target, _, _, count, _ = pattern.runs(elements)
        away = source // layout.node_size != target // layout.node_size
        for total, weights in zip(totals, (count > 0, count, count * away), strict=True):
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
    """The messages of all steps of a collective, in turn; none for one rank. Arguments and errors as `schedule`.

    `lumped`: steps that load a network alike are given as one that is repeated, messages that do as one with a weight;
    thousands of ranks are priced so.
    """
    p, g = layout.ranks, layout.group_size
    problem = invalid(collective, algorithm, p, group_size=g, shards=shards)
    if problem:
        raise UserError(problem)
    return iter(()) if p == 1 else _patterns(collective, algorithm, layout, elements, shards or p, chunks, lumped)


def _patterns(
    collective: Collective, algorithm: str, layout: Layout, elements: int, servers: int, chunks: int, lumped: bool
) -> Iterator[Pattern]:
    p, g = layout.ranks, layout.group_size
    n, ranks = elements, np.arange(p)[None]
    groups = ranks.reshape(-1, g) if p % g == 0 else ranks

    def ring(phases: str, teams: Numbers = ranks, parts: int = 1) -> Iterator[Pattern]:
        return _ring(teams, n, parts, phases, lumped)

    made: dict[str, Callable[[], Iterator[Pattern]]] = {
        "allreduce naive": lambda: _everything(layout, n, lumped),
        "allreduce ring": lambda: ring("both"),
        "allreduce binomial-tree": lambda: _there_and_back(_binomial_reduce(p, n)),
        "allreduce double-binary-tree": lambda: _there_and_back(_double_tree(p, n, chunks, lumped)),
        "allreduce recursive-doubling": lambda: _folded(p, n, _recursive_doubling),
        "allreduce recursive-halving-doubling": lambda: _folded(p, n, _halving_doubling),
        "allreduce shifted-halving-doubling": lambda: _folded(p, n, _shifted),
        "allreduce direct": lambda: _there_and_back(_to_servers(layout, n, p, lumped)),
        "allreduce parameter-server": lambda: _there_and_back(_to_servers(layout, n, servers, lumped)),
        "allreduce hierarchical": lambda: _hierarchical(groups, n, chunks, lumped),
        # To the first rank of each group, ring of these, from it in the group (Jia et al. 2018).
        "allreduce leader": lambda: _chained(
            ring("scatter", groups),
            (one.backwards() for one in _from_first(groups, n)),
            ring("both", groups.T[:1]),
            _from_first(groups, n),
            ring("gather", groups),
        ),
        "reduce-scatter ring": lambda: ring("scatter"),
        "reduce-scatter recursive-halving": lambda: _halved(p, n, gather=False),
        "reduce-scatter direct": lambda: _to_servers(layout, n, p, lumped),
        "all-gather ring": lambda: ring("gather"),
        "all-gather recursive-doubling": lambda: _halved(p, n, gather=True),
        "all-gather direct": lambda: _back(_to_servers(layout, n, p, lumped)),
        "broadcast binomial-tree": lambda: _back(_binomial_reduce(p, n)),
        "broadcast chain": lambda: _chain(layout, n, chunks, lumped),
        "broadcast scatter-all-gather": lambda: _chained(_binomial_scatter(p, n), ring("gather")),
        "reduce binomial-tree": lambda: _binomial_reduce(p, n),
        # For long vectors (Rabenseifner 2004).
        "reduce scatter-gather": lambda: _chained(ring("scatter"), _back(_binomial_scatter(p, n))),
        "scatter binomial-tree": lambda: _binomial_scatter(p, n),
        "scatter linear": lambda: _from_first(ranks, n),
        "gather binomial-tree": lambda: _back(_binomial_scatter(p, n)),
        "gather linear": lambda: _back(_from_first(ranks, n)),
        "all-to-all pairwise": lambda: _pairwise(layout, n, lumped),
        "all-to-all direct": lambda: _all_to_all(layout, n, lumped),
    }
    return made[f"{collective} {algorithm}"]()


def rank_leaves(layout: Layout) -> Numbers:
    """Returns the number of the leaf switch above each rank."""
    ranks = np.arange(layout.ranks)
    if layout.leaves is None:
        return ranks // (layout.leaf_size or layout.ranks)
    numbers: Numbers = np.unique(layout.leaves, return_inverse=True)[1]
    return numbers[ranks // layout.node_size]


def _outer_block(layout: Layout) -> int:
    """Ranks of the largest blocks that some messages leave, one like the other; 1 where all ranks are in one, and all
    ranks where nodes lie in any order.
    """
    if layout.leaves is not None:
        return layout.ranks
    sizes = [size for size in (layout.leaf_size or layout.ranks, layout.node_size) if size < layout.ranks]
    return sizes[0] if sizes else 1


def _begin(elements: int | Numbers, parts: int, index: int | Numbers) -> Numbers:
    """First elements of some of nearly equal parts, as `block` cuts them."""
    return np.asarray(index * (elements // parts) + np.minimum(index, elements % parts))


def _cut(elements: int | Numbers, parts: int, index: int | Numbers) -> Numbers:
    return np.asarray(elements // parts + (index < elements % parts))


def _chained(*phases: Iterator[Pattern]) -> Iterator[Pattern]:
    for phase in phases:
        yield from phase


def _there_and_back(phase: Iterator[Pattern]) -> Iterator[Pattern]:
    there = list(phase)
    return iter([*there, *_back(iter(there))])


def _back(phase: Iterator[Pattern]) -> Iterator[Pattern]:
    """What was sent last comes back first."""
    return (one.backwards() for one in reversed(list(phase)))


def _whole(source: Numbers, target: Numbers, elements: int, *, reduce: bool) -> Pattern:
    return Pattern(source, target, np.zeros(len(source), int), np.full(len(source), elements), reduce)


def _ring(teams: Numbers, elements: int, parts: int, phases: str, lumped: bool) -> Iterator[Pattern]:
    """Rings at once (Patarasuk & Yuan 2009), one a row of `teams`, each over all elements, or over one of `parts`;
    `phases`: scatter, gather or both, of p - 1 steps each in which a rank sends (p - 1) / p.
    """
    size, place = teams.shape[1], np.arange(len(teams)) if parts > 1 else np.zeros(len(teams), int)
    source, target = teams.ravel(), np.roll(teams, -1, axis=1).ravel()
    begins, vectors = _begin(elements, parts, place)[:, None], _cut(elements, parts, place)[:, None]
    is_one = lumped and not (vectors % size).any()
    for reduce in (True, False) if phases == "both" else (phases == "scatter",):
        for step in range(min(1, size - 1) if is_one else size - 1):
            index = (np.arange(size) - step - reduce)[None] % size
            first, count = begins + _begin(vectors, size, index), _cut(vectors, size, index)
            yield Pattern(source, target, first.ravel(), count.ravel(), reduce, size - 1 if is_one else 1)


def _hierarchical(groups: Numbers, elements: int, chunks: int, lumped: bool) -> Iterator[Pattern]:
    """In the group, across groups among ranks of one place, in the group: Horovod's hierarchical and torus all-reduce
    (2D ring, Mikami et al. 2018). In chunks one behind the other: chunk c goes through the steps of its three rings
    from step c on, so that messages inside groups and across them are on their way at once.
    """
    p = groups.size
    is_equal = lumped and elements % (chunks * p) == 0
    made: list[list[Pattern]] = []  # Of each chunk; of the first alone where all are alike.
    for chunk in range(1 if is_equal else chunks):
        length, begin = int(_cut(elements, chunks, chunk)), _begin(elements, chunks, chunk)
        rings = ((groups, 1, "scatter"), (groups.T, groups.shape[1], "both"), (groups, 1, "gather"))
        found = _chained(*(_ring(teams, length, parts, phases, is_equal) for teams, parts, phases in rings))
        made.append([replace(one, first=one.first + begin) for one in found])
    order = [number for number, one in enumerate(made[0]) for _ in range(one.repeat)]
    kinds: Counter[tuple[tuple[tuple[int, int], int], ...]] = Counter()
    for step in range(len(order) + chunks - 1):
        under_way = range(max(0, step - len(order) + 1), min(chunks, step + 1))
        kinds[tuple(Counter((0 if is_equal else c, order[step - c]) for c in under_way).items())] += 1
    for together, repeat in kinds.items():
        parts = [(made[chunk][number], times) for (chunk, number), times in together]
        source, target, first, count, added = np.concatenate(
            [[one.source, one.target, one.first, one.count * times, one.added * times] for one, times in parts], axis=1
        )
        whole = Pattern(source, target, first, count, added, repeat)
        yield _as_one(whole, p) if lumped else whole


def _as_one(pattern: Pattern, p: int) -> Pattern:
    """Messages of a step between two ranks as one message."""
    pair, index = np.unique(pattern.source * p + pattern.target, return_inverse=True)
    count, added = (np.bincount(index, one).astype(np.int64) for one in (pattern.count, pattern.added))
    return replace(pattern, source=pair // p, target=pair % p, first=0 * pair, count=count, reduce=added)


def _from_first(teams: Numbers, elements: int) -> Iterator[Pattern]:
    """The first of each team sends the others their parts, one after the other: p - 1 steps."""
    size, equal = teams.shape[1], np.ones(len(teams), int)
    for place in range(1, size):
        first, count = equal * _begin(elements, size, place), equal * _cut(elements, size, place)
        yield Pattern(teams[:, 0], teams[:, place], first, count)


def _binomial_reduce(p: int, elements: int) -> Iterator[Pattern]:
    """ceil(log2 p) steps; the first member then holds the sum."""
    distance = 1
    while distance < p:
        source = np.arange(distance, p, 2 * distance)
        yield _whole(source, source - distance, elements, reduce=True)
        distance *= 2


def _binomial_scatter(p: int, elements: int) -> Iterator[Pattern]:
    """ceil(log2 p) steps; member i then holds part i, sent with all parts of the members behind it."""
    distance = 1 << (p - 1).bit_length() >> 1
    while distance:
        target = np.arange(distance, p, 2 * distance)
        first, end = _begin(elements, p, target), _begin(elements, p, np.minimum(target + distance, p))
        yield Pattern(target - distance, target, first, end - first)
        distance //= 2


def _folded(p: int, elements: int, core: Callable[[Numbers, int], Iterator[Pattern]]) -> Iterator[Pattern]:
    """An all-reduce for a power of two of ranks, `core`, for any number of ranks."""
    members, rests = _core(p)
    surplus = [_whole(rests, rests + 1, elements, reduce=True)] if len(rests) else []
    yield from _chained(iter(surplus), core(members, elements), (one.backwards() for one in surplus))


def _core(p: int) -> tuple[Numbers, Numbers]:
    """The members of the power of two that works, and the surplus members, which rest."""
    ranks, surplus = np.arange(p), p - power_below(p)
    is_surplus = (ranks < 2 * surplus) & (ranks % 2 == 0)
    return ranks[~is_surplus], ranks[is_surplus]


def _recursive_doubling(members: Numbers, elements: int) -> Iterator[Pattern]:
    """log2 p steps; in each, partners exchange and add whole vectors."""
    place = np.arange(len(members))
    for bit in range(len(members).bit_length() - 1):
        yield _whole(members, members[place ^ (1 << bit)], elements, reduce=True)


def _halving_doubling(members: Numbers, elements: int) -> Iterator[Pattern]:
    """Rabenseifner's all-reduce: 2 log2 p steps, 2 (p - 1) / p of the vector sent. Neighbours exchange the largest
    halves, so that these stay inside groups.
    """
    bits = range(len(members).bit_length() - 1)
    bounds = np.arange(len(members) + 1)
    return _there_and_back(_halving(members, elements, bounds, [1 << bit for bit in bits]))


def _halving(members: Numbers, elements: int, bounds: Numbers, distances: Sequence[int]) -> Iterator[Pattern]:
    """Of what a member still works on it gives one half to its partner. `bounds`: first part of each place, of as many
    parts as the last bound says.
    """
    begins = _begin(elements, int(bounds[-1]), bounds)
    place, low, high = np.arange(len(members)), np.zeros(len(members), int), np.full(len(members), len(members))
    for distance in distances:
        middle, takes_upper = (low + high) // 2, (place & distance) > 0
        first, end = begins[np.where(takes_upper, low, middle)], begins[np.where(takes_upper, middle, high)]
        yield Pattern(members, members[place ^ distance], first, end - first, reduce=True)
        low, high = np.where(takes_upper, middle, low), np.where(takes_upper, high, middle)


def _halved(p: int, elements: int, *, gather: bool) -> Iterator[Pattern]:
    """Reduce-scatter by halving, or all-gather by doubling, in log2 p steps. A member that takes over a surplus one
    works for both of their parts, and sends its part back at the end, or all others.
    """
    members, rests = _core(p)
    surplus = len(rests)
    place = np.arange(len(members) + 1)
    bounds = np.where(place < surplus, 2 * place, place + surplus)
    distances = [1 << bit for bit in reversed(range(len(members).bit_length() - 1))]
    halving = list(_halving(members, elements, bounds, distances))
    first, own = _begin(elements, p, rests), _cut(elements, p, rests)
    there, back = [_whole(rests, rests + 1, elements, reduce=True)], [Pattern(rests + 1, rests, first, own)]
    if gather:
        there, back = [Pattern(rests, rests + 1, first, own)], [Pattern(rests + 1, rests, first + own, elements - own)]
        halving = [one.backwards() for one in reversed(halving)]
    yield from [*there * bool(surplus), *halving, *back * bool(surplus)]


def _shifted(members: Numbers, elements: int) -> Iterator[Pattern]:
    """Halving and doubling by cyclic shifts instead of exchanges (Nguyen & Wahib, CCGRID 2021): each step uses one
    length of shortcut of a distributed loop network, in one direction.
    """
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
    """One step: each server, on the first ranks, gets its part from everyone; direct where every rank is one. Partners
    are taken in turn, so that not all reach for one.
    """
    if servers == layout.ranks and lumped and (alike := _alike(layout, elements)):
        yield replace(alike, reduce=True)
        return
    source, target = _pairs(layout.ranks, servers)
    yield Pattern(source, target, _begin(elements, servers, target), _cut(elements, servers, target), reduce=True)


def _everything(layout: Layout, elements: int, lumped: bool) -> Iterator[Pattern]:
    """One step: everyone sends all others the whole vector, and adds what comes."""
    if lumped and (alike := _alike(layout, elements * layout.ranks)):
        yield replace(alike, reduce=True)
        return
    yield _whole(*_pairs(layout.ranks, layout.ranks), elements, reduce=True)


def _pairs(p: int, targets: int) -> tuple[Numbers, Numbers]:
    """Everyone to the first ranks; each begins with the one behind it."""
    turn, source = (one.ravel() for one in np.indices((targets, p)))
    target = (source + 1 + turn) % targets
    return source[source != target], target[source != target]


def _alike(layout: Layout, elements: int) -> Pattern | None:
    """Everyone to all others where all ranks are alike: one message of each level; None where they are not."""
    p, group = layout.ranks, min(layout.node_size, layout.ranks)
    by_leaf = rank_leaves(layout)
    leaf, *others = np.unique(by_leaf, return_counts=True)[1].tolist()
    if elements % p or any(other != leaf for other in others) or leaf % group:
        return None
    ranks = np.arange(p)
    near, far = ranks // group * group, ranks // leaf * leaf
    targets = (near + (ranks + 1) % group, far + (ranks + group) % leaf, (ranks + leaf) % p)
    many = (group - 1, leaf - group, p - leaf)
    source = np.repeat(ranks, [sum(n > 0 for n in many)] * p)
    target = np.stack([one for one, n in zip(targets, many, strict=True) if n], axis=1).ravel()
    weight = np.tile([n for n in many if n], p)
    order = np.argsort(by_leaf, kind="stable")  # Ranks, one leaf after the other.
    return Pattern(order[source], order[target], 0 * source, np.full(len(source), elements // p), weight=weight)


def _all_to_all(layout: Layout, elements: int, lumped: bool) -> Iterator[Pattern]:
    if lumped and (alike := _alike(layout, elements)):
        yield alike
        return
    source, target = _pairs(layout.ranks, layout.ranks)
    first, into, count = all_to_all_block(elements, layout.ranks, source, target)
    yield Pattern(source, target, first, count, into=into)


def _pairwise(layout: Layout, elements: int, lumped: bool) -> Iterator[Pattern]:
    """In p - 1 steps: in step s every rank sends to the one s + 1 further. Beyond the ranks of an outermost block all
    distances load a network alike, and so do d and p - d.
    """
    p, block, ranks = layout.ranks, _outer_block(layout), np.arange(layout.ranks)
    kinds = Counter((min(d, p - d, block) if lumped else d, int(_cut(elements, p, d))) for d in range(1, p))
    for (distance, count), repeat in kinds.items():
        target = (ranks + distance) % p
        first, into, _ = all_to_all_block(elements, p, ranks, target)
        yield Pattern(ranks, target, first, np.full(p, count), repeat=repeat, into=into)


def _chain(layout: Layout, elements: int, chunks: int, lumped: bool) -> Iterator[Pattern]:
    """From each to the next, in chunks one behind the other, p - 2 + chunks steps: in step s member i sends chunk
    s - i. A full window of chunks loads a network as one a block further.
    """
    p, block = layout.ranks, _outer_block(layout)
    kinds: Counter[int] = Counter()
    for step in range(p - 2 + chunks):
        is_full = lumped and chunks - 1 <= step <= p - 2
        kinds[chunks - 1 + (step - chunks + 1) % block if is_full else step] += 1
    for step, repeat in kinds.items():
        source = np.arange(max(0, step - chunks + 1), min(step, p - 2) + 1)
        first, count = _begin(elements, chunks, step - source), _cut(elements, chunks, step - source)
        yield Pattern(source, source + 1, first, count, repeat=repeat)


@cache
def in_order_tree(size: int) -> tuple[Numbers, Numbers]:
    """Parents (the root's is -1) and depths of the binary tree over places 0, 1, ... whose in-order walk these are:
    even places are leaves and odd ones are not; depth floor(log2 p).
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
    """Reduction in two trees, each of one half of the vector, in chunks one behind the other (Sanders, Speck & Träff
    2009): depth + chunks - 1 steps. In a step a member takes from two children in the one tree and gives to its parents
    in both, so that both directions are used.

    The second tree is the mirror image of the first for an even number of members, and the first shifted by one for an
    odd number: then what is inside one tree is a leaf of the other. Of an odd number one member is a leaf of both.
    """
    parents, depths = in_order_tree(p)
    depth, places, ranks = int(depths.max()), np.flatnonzero(parents >= 0), np.arange(p)
    member = [ranks, p - 1 - ranks if p % 2 == 0 else (ranks + 1) % p]  # at each place of the trees
    is_equal = lumped and elements % (2 * chunks) == 0
    kinds: Counter[tuple[int, int, int]] = Counter()
    for step in range(depth + chunks - 1):
        # A member at depth d passes chunk c on in step depth - d + c, one step after its children did.
        low, high = max(1, depth - step), min(depth, depth - step + chunks - 1)
        kinds[low, high, -1 if is_equal else step] += 1
    for (low, high, step), repeat in kinds.items():
        active = places[(depths[places] >= low) & (depths[places] <= high)]
        chunk = np.zeros(len(active), int) if is_equal else step - depth + depths[active]
        source = np.concatenate([member[tree][active] for tree in (0, 1)])
        target = np.concatenate([member[tree][parents[active]] for tree in (0, 1)])
        halves = [int(_cut(elements, 2, tree)) for tree in (0, 1)]
        first = np.concatenate([tree * halves[0] + _begin(halves[tree], chunks, chunk) for tree in (0, 1)])
        count = np.concatenate([_cut(halves[tree], chunks, chunk) for tree in (0, 1)])
        both = Pattern(source, target, first, count, reduce=True, repeat=repeat)
        yield _as_one(both, p) if lumped else both

"""What goes through the ports and links of a network in each step of a collective.

A collective is a few patterns of messages, each repeated: arrays of source, target and elements over all ranks at once,
so that thousands of ranks are priced in milliseconds. They are those of the schedules (`dlbench.perfmodels.algorithms`
has the sources of each), which the tests walk rank by rank to compare.

A port is a rank's way into a level or out of it, in one direction; messages of one step through it follow each other.
Where the ranks of a block share n links at a level (`Level.links`), all bytes that leave the block (or enter it) in a
step are spread over these, while ranks pay for their start-ups in parallel: beta is multiplied by the flows of a link
(the contention coefficient phi of Kahira et al., HPDC 2021, section 4). Inside a group the same holds of the bytes that
its ranks send where they share the memory or the processors that move them.

A message belongs to the innermost level that holds both of its ranks, and starts up as that level says. Its bytes load
every link on its way: those of a message between leaf switches the link of its node and the uplinks of its switch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from dlbench.errors import UserError
from dlbench.perfmodels.algorithms import in_order_tree, power_below
from dlbench.perfmodels.schedules import Layout, invalid, pipeline_chunks
from dlbench.specs.comm import LEVELS, Collective, LevelName

Starts = tuple[tuple[LevelName, int, int], ...]  # Level and size in elements, ascending, and how many messages.
Flows = tuple[tuple[int, int], ...]  # Size in elements, ascending, and how many messages.
Numbers = npt.NDArray[np.int64]

MOST_SHORT_RANKS = 512
"""Up to here a vector shorter than one element per rank is cut as the schedules cut it; beyond, where it is a few
kilobytes, ranks count as having equal parts of an element."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Links that the ranks of a block share at each level; None: a port per rank."""

    inside: int | None = None  # Ranks of a group: what moves messages inside it.
    across: int | None = 1  # Ranks of a group: adapters.
    beyond: int | None = 1  # Ranks below a leaf switch: uplinks.


ONE_LINK = Sharing()  # One network adapter per node, ports of their own inside it, one uplink per leaf switch.


@dataclass(frozen=True)
class Load:
    """What goes through one port or link in one step."""

    level: LevelName  # Whose bytes these are.
    starts: Starts  # Messages whose start-ups follow each other: those of one rank.
    flows: Flows  # Messages whose bytes share the port or links.
    links: int = 1

    @property
    def phi(self) -> float:
        """Bytes on each link over those of the rank whose start-ups count: flows a link carries at once."""
        return sum(count * n for count, n in self.flows) / self.links / sum(count * n for _, count, n in self.starts)


@dataclass(frozen=True)
class StepLoads:
    """One kind of step."""

    loads: tuple[Load, ...]
    reduced: int  # Most elements that a rank adds in it.


@dataclass(frozen=True)
class Summary:
    """A collective over all ranks: its kinds of steps, each with how many there are."""

    elements: int  # Elements of the vector that loads are counted for; they grow with it in proportion.
    steps: tuple[tuple[StepLoads, int], ...]

    @cached_property
    def levels(self) -> tuple[LevelName, ...]:
        """Levels whose costs the loads need."""
        loads = [load for step, _ in self.steps for load in step.loads]
        needed = {load.level for load in loads} | {name for load in loads for name, _, _ in load.starts}
        return tuple(name for name in LEVELS if name in needed)


@dataclass(frozen=True)
class Pattern:
    """The messages of a step, of which a collective has `repeat`."""

    source: Numbers  # Ranks.
    target: Numbers
    count: Numbers  # Elements of each message; those without any do not travel.
    reduce: bool = False  # Whether what arrives is added.
    repeat: int = 1
    weight: Numbers | None = None
    """Messages that each entry stands for, to as many ranks of the same level; None: one."""

    def backwards(self) -> Pattern:
        """What was received is sent back, and put in place."""
        return replace(self, source=self.target, target=self.source, reduce=False)

    def loads(self, layout: Layout, sharing: Sharing) -> StepLoads:
        """The distinct loads of a step."""
        travels = self.count > 0
        source, target, count = self.source[travels], self.target[travels], self.count[travels]
        weight = np.ones(len(count), np.int64) if self.weight is None else self.weight[travels]
        group, leaf = layout.group_size, layout.leaf_size or layout.ranks
        level = np.where(source // group == target // group, 0, np.where(source // leaf == target // leaf, 1, 2))
        sizes, index = np.unique(count, return_inverse=True)
        loads: set[Load] = set()
        for ranks in (source, target):
            shape = (layout.ranks, len(LEVELS), len(sizes))
            flat = np.ravel_multi_index((ranks, level, index), shape)
            messages = np.bincount(flat, weight, int(np.prod(shape))).astype(np.int64).reshape(shape)
            for inner, name, block in ((0, "inside", group), (1, "across", group), (2, "beyond", leaf)):
                links: int | None = getattr(sharing, name)
                through = messages[:, inner:] if inner else messages[:, :1]  # those that leave the group, or the leaf
                busy = np.flatnonzero(through.any(axis=(1, 2)))
                if not len(busy):
                    continue
                through = through[busy]
                own = through.sum(axis=1)
                if links != 1:
                    loads.update(_distinct(LEVELS[inner:], sizes, through, own, 1))
                # A message inside a group is sent and received through the same memory.
                if links is not None and (inner or ranks is source):
                    flows = np.zeros((-(-layout.ranks // block), len(sizes)), np.int64)
                    np.add.at(flows, busy // block, own)
                    flows = flows[busy // block]
                    loads.update(_distinct(LEVELS[inner:], sizes, through, flows, links))
        reduced = int(np.bincount(target, count * weight).max(initial=0)) if self.reduce else 0
        order = sorted(loads, key=lambda load: (load.level, load.starts, load.flows, load.links))
        return StepLoads(tuple(order), reduced)


def summarise(
    collective: Collective,
    algorithm: str,
    layout: Layout,
    elements: int,
    *,
    shards: int | None = None,
    sharing: Sharing = ONE_LINK,
) -> Summary:
    """The loads of a collective of this many elements.

    From one element per rank on, parts count as exact fractions of the vector, so that one summary serves all such
    sizes; below, empty parts matter (up to `MOST_SHORT_RANKS`). Summaries are kept.

    Raises `UserError`: as `schedule`.
    """
    chunks = pipeline_chunks(collective, algorithm, layout.ranks, elements)
    if elements >= layout.ranks or layout.ranks > MOST_SHORT_RANKS:
        servers = shards if shards and algorithm == "parameter-server" else 1
        elements = 2 * layout.ranks * power_below(layout.ranks) * servers * chunks  # every part is whole
    return _summary(collective, algorithm, layout, elements, shards, chunks, sharing)


@lru_cache(maxsize=2048)
def _summary(
    collective: Collective,
    algorithm: str,
    layout: Layout,
    elements: int,
    shards: int | None,
    chunks: int,
    sharing: Sharing,
) -> Summary:
    kinds: Counter[StepLoads] = Counter()
    for pattern in patterns(collective, algorithm, layout, elements, shards=shards, chunks=chunks):
        kinds[pattern.loads(layout, sharing)] += pattern.repeat
    return Summary(elements, tuple((step, times) for step, times in kinds.items() if step.loads))


def patterns(
    collective: Collective, algorithm: str, layout: Layout, elements: int, *, shards: int | None = None, chunks: int = 1
) -> Iterator[Pattern]:
    """The messages of all steps of a collective; none for one rank. Steps that load a network alike may be given as one
    that is repeated. Arguments as of `schedule`, whose steps these are. Raises `UserError`: as `schedule`.
    """
    p, g = layout.ranks, layout.group_size
    problem = invalid(collective, algorithm, p, group_size=g, shards=shards)
    if problem:
        raise UserError(problem)
    if p == 1:
        return iter(())
    ranks, whole = np.arange(p)[None], np.array([elements])
    groups = ranks.reshape(-1, g) if p % g == 0 else ranks
    of_groups = np.full(len(groups), elements)
    own, block = _cut(elements, g, np.arange(g)), _outer_block(layout)
    made: dict[str, Callable[[], Iterator[Pattern]]] = {
        "allreduce ring": lambda: _ring(ranks, whole, "both"),
        "allreduce binomial-tree": lambda: _there_and_back(_binomial_reduce(p, elements)),
        "allreduce double-binary-tree": lambda: _there_and_back(_double_tree(p, elements, chunks)),
        "allreduce recursive-doubling": lambda: _folded(p, elements, _recursive_doubling),
        "allreduce recursive-halving-doubling": lambda: _folded(p, elements, _halving_doubling),
        "allreduce shifted-halving-doubling": lambda: _folded(p, elements, _shifted),
        "allreduce direct": lambda: _served(layout, elements, p),
        "allreduce parameter-server": lambda: _served(layout, elements, shards or p),
        "allreduce hierarchical": lambda: _chained(
            _ring(groups, of_groups, "scatter"), _ring(groups.T, own, "both"), _ring(groups, of_groups, "gather")
        ),
        "allreduce leader": lambda: _chained(
            _ring(groups, of_groups, "scatter"),
            (one.backwards() for one in _from_first(groups, elements)),
            _ring(groups.T[:1], whole, "both"),
            _from_first(groups, elements),
            _ring(groups, of_groups, "gather"),
        ),
        "reduce-scatter ring": lambda: _ring(ranks, whole, "scatter"),
        "reduce-scatter recursive-halving": lambda: _halved(p, elements, gather=False),
        "reduce-scatter direct": lambda: _to_servers(layout, elements, p),
        "all-gather ring": lambda: _ring(ranks, whole, "gather"),
        "all-gather recursive-doubling": lambda: _halved(p, elements, gather=True),
        "all-gather direct": lambda: (one.backwards() for one in _to_servers(layout, elements, p)),
        "broadcast binomial-tree": lambda: (one.backwards() for one in _binomial_reduce(p, elements)),
        "broadcast chain": lambda: _chain(p, elements, chunks, block),
        "broadcast scatter-all-gather": lambda: _chained(_binomial_scatter(p, elements), _ring(ranks, whole, "gather")),
        "all-to-all pairwise": lambda: _pairwise(p, elements, block),
        "all-to-all direct": lambda: _all_pairs(layout, elements, lambda s, t: _cut(elements, p, (t - s) % p)),
    }
    return made[f"{collective} {algorithm}"]()


def _outer_block(layout: Layout) -> int:
    """Ranks of the largest blocks that some messages leave; 1 where all ranks are in one."""
    sizes = [size for size in (layout.leaf_size or layout.ranks, layout.group_size) if size < layout.ranks]
    return sizes[0] if sizes else 1


def _cut(elements: int | Numbers, parts: int, index: int | Numbers) -> Numbers:
    """Elements of some of nearly equal parts, as `block` cuts them."""
    return np.asarray(elements // parts + (index < elements % parts))


def _cover(elements: int, parts: int, low: int | Numbers, high: int | Numbers) -> Numbers:
    """Elements of parts low, ..., high - 1."""
    share, rest = divmod(elements, parts)
    return np.asarray((high - low) * share + np.minimum(high, rest) - np.minimum(low, rest))


def _chained(*phases: Iterator[Pattern]) -> Iterator[Pattern]:
    for phase in phases:
        yield from phase


def _there_and_back(phase: Iterator[Pattern]) -> Iterator[Pattern]:
    there = list(phase)
    return iter([*there, *(one.backwards() for one in reversed(there))])


def _ring(teams: Numbers, elements: Numbers, phases: str) -> Iterator[Pattern]:
    """Rings at once, one a row of `teams`, over vectors of these lengths; `phases`: scatter, gather or both."""
    size = teams.shape[1]
    source, target = teams.ravel(), np.roll(teams, -1, axis=1).ravel()
    equal = not (elements % size).any()
    for reduce in (True, False) if phases == "both" else (phases == "scatter",):
        for step in range(min(1, size - 1) if equal else size - 1):
            index = (np.arange(size) - step - reduce) % size
            count = _cut(elements[:, None], size, index[None]).ravel()
            yield Pattern(source, target, count, reduce, size - 1 if equal else 1)


def _from_first(teams: Numbers, elements: int) -> Iterator[Pattern]:
    size = teams.shape[1]
    for place in range(1, size):
        yield Pattern(teams[:, 0], teams[:, place], np.full(len(teams), _cut(elements, size, place)))


def _binomial_reduce(p: int, elements: int) -> Iterator[Pattern]:
    distance = 1
    while distance < p:
        source = np.arange(distance, p, 2 * distance)
        yield Pattern(source, source - distance, np.full(len(source), elements), reduce=True)
        distance *= 2


def _binomial_scatter(p: int, elements: int) -> Iterator[Pattern]:
    distance = 1 << (p - 1).bit_length() >> 1
    while distance:
        target = np.arange(distance, p, 2 * distance)
        count = _cover(elements, p, target, np.minimum(target + distance, p))
        yield Pattern(target - distance, target, count)
        distance //= 2


def _folded(p: int, elements: int, core: Callable[[Numbers, int], Iterator[Pattern]]) -> Iterator[Pattern]:
    members, rests = _core(p)
    surplus = Pattern(rests, rests + 1, np.full(len(rests), elements), reduce=True)
    yield from _chained(iter([surplus]), core(members, elements), iter([surplus.backwards()]))


def _core(p: int) -> tuple[Numbers, Numbers]:
    """The members of the power of two that works, and the surplus members, which rest."""
    ranks, surplus = np.arange(p), p - power_below(p)
    is_surplus = (ranks < 2 * surplus) & (ranks % 2 == 0)
    return ranks[~is_surplus], ranks[is_surplus]


def _recursive_doubling(members: Numbers, elements: int) -> Iterator[Pattern]:
    place = np.arange(len(members))
    for bit in range(len(members).bit_length() - 1):
        yield Pattern(members, members[place ^ (1 << bit)], np.full(len(members), elements), reduce=True)


def _halving_doubling(members: Numbers, elements: int) -> Iterator[Pattern]:
    bits = range(len(members).bit_length() - 1)
    bounds = np.arange(len(members) + 1)
    return _there_and_back(_halving(members, elements, bounds, [1 << bit for bit in bits]))


def _halving(members: Numbers, elements: int, bounds: Numbers, distances: Sequence[int]) -> Iterator[Pattern]:
    """Of what a member still works on it gives one half to its partner. `bounds`: first part of each place, of as many
    parts as the last bound says.
    """
    place, low, high = np.arange(len(members)), np.zeros(len(members), int), np.full(len(members), len(members))
    for distance in distances:
        middle, takes_upper = (low + high) // 2, (place & distance) > 0
        given_low, given_high = np.where(takes_upper, low, middle), np.where(takes_upper, middle, high)
        count = _cover(elements, int(bounds[-1]), bounds[given_low], bounds[given_high])
        yield Pattern(members, members[place ^ distance], count, reduce=True)
        low, high = np.where(takes_upper, middle, low), np.where(takes_upper, high, middle)


def _halved(p: int, elements: int, *, gather: bool) -> Iterator[Pattern]:
    """Reduce-scatter by halving, or all-gather by doubling, with surplus members folded."""
    members, rests = _core(p)
    surplus = len(rests)
    place = np.arange(len(members) + 1)
    bounds = np.where(place < surplus, 2 * place, place + surplus)
    distances = [1 << bit for bit in reversed(range(len(members).bit_length() - 1))]
    halving = list(_halving(members, elements, bounds, distances))
    own = _cut(elements, p, rests)
    if gather:
        yield Pattern(rests, rests + 1, own)
        yield from (one.backwards() for one in reversed(halving))
        yield Pattern(rests + 1, rests, elements - own)
    else:
        yield Pattern(rests, rests + 1, np.full(surplus, elements), reduce=True)
        yield from halving
        yield Pattern(rests + 1, rests, own)


def _shifted(members: Numbers, elements: int) -> Iterator[Pattern]:
    p = len(members)
    place = np.arange(p)

    def around(start: Numbers, length: int) -> Numbers:
        start = start % p
        end = start + length
        return _cover(elements, p, start, np.minimum(end, p)) + _cover(elements, p, 0, np.maximum(end - p, 0))

    distances = [1 << bit for bit in reversed(range(p.bit_length() - 1))]
    scatter = (Pattern(members, members[(place + d) % p], around(place + d, d), reduce=True) for d in distances)
    return _there_and_back(scatter)


def _served(layout: Layout, elements: int, servers: int) -> Iterator[Pattern]:
    """To the servers of the parts and back; direct where every rank is one."""
    return _there_and_back(_to_servers(layout, elements, servers))


def _to_servers(layout: Layout, elements: int, servers: int) -> Iterator[Pattern]:
    if servers == layout.ranks:
        pairs = _all_pairs(layout, elements, lambda _, target: _cut(elements, servers, target))
        yield from (replace(one, reduce=True) for one in pairs)
        return
    source, target = (one.ravel() for one in np.indices((layout.ranks, servers)))
    travels = source != target
    source, target = source[travels], target[travels]
    yield Pattern(source, target, _cut(elements, servers, target), reduce=True)


def _all_pairs(layout: Layout, elements: int, count: Callable[[Numbers, Numbers], Numbers]) -> Iterator[Pattern]:
    """One step in which everyone sends to all others."""
    p, group = layout.ranks, min(layout.group_size, layout.ranks)
    leaf = min(layout.leaf_size or p, p)
    if elements % p == 0 and p % leaf == 0 and leaf % group == 0:  # all ranks are alike: one message of each level
        ranks = np.arange(p)
        near, far = ranks // group * group, ranks // leaf * leaf
        targets = (near + (ranks + 1) % group, far + (ranks + group) % leaf, (ranks + leaf) % p)
        many = (group - 1, leaf - group, p - leaf)
        source = np.repeat(ranks, [sum(n > 0 for n in many)] * p)
        target = np.stack([one for one, n in zip(targets, many, strict=True) if n], axis=1).ravel()
        weight = np.tile([n for n in many if n], p)
        yield Pattern(source, target, np.full(len(source), elements // p), weight=weight)
        return
    source, target = (one.ravel() for one in np.indices((p, p)))
    travels = source != target
    source, target = source[travels], target[travels]
    yield Pattern(source, target, count(source, target))


def _pairwise(p: int, elements: int, block: int) -> Iterator[Pattern]:
    """Beyond the ranks of an outermost block all distances load a network alike, and so do d and p - d."""
    ranks = np.arange(p)
    kinds = Counter((min(d, p - d, block), int(_cut(elements, p, d))) for d in range(1, p))
    for (distance, count), repeat in kinds.items():
        yield Pattern(ranks, (ranks + distance) % p, np.full(p, count), repeat=repeat)


def _chain(p: int, elements: int, chunks: int, block: int) -> Iterator[Pattern]:
    """In step s member i sends chunk s - i. A full window of chunks loads a network as one a block further."""
    kinds: Counter[int] = Counter()
    for step in range(p - 2 + chunks):
        is_full = chunks - 1 <= step <= p - 2
        kinds[chunks - 1 + (step - chunks + 1) % block if is_full else step] += 1
    for step, repeat in kinds.items():
        source = np.arange(max(0, step - chunks + 1), min(step, p - 2) + 1)
        yield Pattern(source, source + 1, _cut(elements, chunks, step - source), repeat=repeat)


def _double_tree(p: int, elements: int, chunks: int) -> Iterator[Pattern]:
    """Reduction in both trees; steps in which the same depths pass on chunks of one size are one."""
    shape = in_order_tree(p)
    depth, parents, depths = max(shape.depths), np.array(shape.parents), np.array(shape.depths)
    places = np.flatnonzero(parents >= 0)
    ranks = np.arange(p)
    member = [ranks, p - 1 - ranks if p % 2 == 0 else (ranks + 1) % p]  # at each place of the trees
    equal = elements % (2 * chunks) == 0
    kinds: Counter[tuple[int, int, int]] = Counter()
    for step in range(depth + chunks - 1):
        low, high = max(1, depth - step), min(depth, depth - step + chunks - 1)
        kinds[low, high, -1 if equal else step] += 1
    for (low, high, step), repeat in kinds.items():
        active = places[(depths[places] >= low) & (depths[places] <= high)]
        chunk = np.zeros(len(active), int) if equal else step - depth + depths[active]
        counts = [_cut(_cut(elements, 2, tree), chunks, chunk) for tree in (0, 1)]
        source = np.concatenate([member[tree][active] for tree in (0, 1)])
        target = np.concatenate([member[tree][parents[active]] for tree in (0, 1)])
        pair, index = np.unique(source * p + target, return_inverse=True)  # between two ranks it is one message
        count = np.bincount(index, np.concatenate(counts)).astype(np.int64)
        yield Pattern(pair // p, pair % p, count, reduce=True, repeat=repeat)


def _distinct(
    levels: Sequence[LevelName], sizes: Numbers, through: Numbers, flows: Numbers, links: int
) -> Iterator[Load]:
    """Loads that differ, of as many ranks: their own messages (ranks, levels, sizes), and all of their block."""
    rows = np.concatenate([through.reshape(len(through), -1), flows], axis=1)
    radix = [1, *(rows.max(axis=0) + 1).tolist()]  # one number for each row, if that is small enough
    is_small = math.prod(radix) < np.iinfo(np.int64).max
    key = rows @ np.cumprod(radix[:-1]) if is_small else np.unique(rows, axis=0, return_inverse=True)[1].ravel()
    _, first = np.unique(key, return_index=True)
    known = sizes.tolist()
    for row in rows[first].tolist():
        *starts, together = (row[i : i + len(known)] for i in range(0, len(row), len(known)))
        own = tuple(zip(levels, starts, strict=False))
        yield Load(
            levels[0],
            tuple((name, size, n) for name, many in own for size, n in zip(known, many, strict=True) if n),
            tuple((size, n) for size, n in zip(known, together, strict=True) if n),
            links,
        )

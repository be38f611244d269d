"""What goes through the ports and links of a network in each step of a collective.

A collective is a few patterns of messages over all ranks at once (`dlbench.perfmodels.algorithms`), each repeated, so
that thousands of ranks are priced in milliseconds; tests walk the steps of all ranks one by one to compare.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from dlbench.perfmodels.algorithms import Numbers, Pattern, patterns, rank_leaves
from dlbench.perfmodels.schedules import Layout, pipeline_chunks, power_below
from dlbench.specs.comm import LEVELS, Collective, LevelName

Starts = tuple[tuple[LevelName, int, int], ...]  # Level and size in elements, ascending, and how many messages.
Flows = tuple[tuple[int, int], ...]  # Size in elements, ascending, and how many messages.

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
        loads = [load for step, _ in self.steps for load in step.loads]
        needed = {load.level for load in loads} | {name for load in loads for name, _, _ in load.starts}
        return tuple(name for name in LEVELS if name in needed)


def loads_of(pattern: Pattern, layout: Layout, sharing: Sharing) -> StepLoads:
    """The distinct loads of a step."""
    travels = pattern.count > 0
    source, target, count = pattern.source[travels], pattern.target[travels], pattern.count[travels]
    weight = np.ones(len(count), np.int64) if pattern.weight is None else pattern.weight[travels]
    node, leaf = np.arange(layout.ranks) // layout.node_size, rank_leaves(layout)
    level = np.where(node[source] == node[target], 0, np.where(leaf[source] == leaf[target], 1, 2))
    sizes, index = np.unique(count, return_inverse=True)
    loads: set[Load] = set()
    for ranks in (source, target):
        shape = (layout.ranks, len(LEVELS), len(sizes))
        flat = np.ravel_multi_index((ranks, level, index), shape)
        messages = np.bincount(flat, weight, int(np.prod(shape))).astype(np.int64).reshape(shape)
        for inner, name, block in ((0, "inside", node), (1, "across", node), (2, "beyond", leaf)):
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
                flows = np.zeros((block.max() + 1, len(sizes)), np.int64)
                np.add.at(flows, block[busy], own)
                flows = flows[block[busy]]
                loads.update(_distinct(LEVELS[inner:], sizes, through, flows, links))
    reduced = int(np.bincount(target, pattern.added[travels] * weight).max(initial=0))
    order = sorted(loads, key=lambda load: (load.level, load.starts, load.flows, load.links))
    return StepLoads(tuple(order), reduced)


def summarise(
    collective: Collective,
    algorithm: str,
    layout: Layout,
    elements: int,
    *,
    shards: int | None = None,
    chunks: int | None = None,
    sharing: Sharing = ONE_LINK,
) -> Summary:
    """The loads of a collective of this many elements.

    From one element per rank on, parts count as exact fractions of the vector, so that one summary serves all such
    sizes; below, empty parts matter (up to `MOST_SHORT_RANKS`). Summaries are kept.
    """
    chunks = pipeline_chunks(collective, algorithm, layout, elements) if chunks is None else chunks
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
    for pattern in patterns(collective, algorithm, layout, elements, shards=shards, chunks=chunks, lumped=True):
        kinds[loads_of(pattern, layout, sharing)] += pattern.repeat
    return Summary(elements, tuple((step, times) for step, times in kinds.items() if step.loads))


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

"""Loads of the ports and links of a network in each step of a collective.

A port is a rank's way into a level or out of it. If the ranks of a block share n links at a level (`Level.links`), all
bytes that leave or enter the block are spread over these, while ranks pay for their start-ups in parallel: beta is
multiplied by the flows of a link (the contention coefficient phi of Kahira et al., HPDC 2021, section 4). A message has
the start-up of the innermost level that holds both of its ranks; its bytes load every link on its way.

Collectives on networks given by their cables: a fat tree, and a loop with shortcuts. Nothing here is measured. A
step takes as long as its busiest link: the longest start-up of a message on it, then its bytes one after the other.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter
from pathlib import Path

import numpy as np
from pydantic import Field, ValidationError

from dlbench.errors import UserError, nearest
from dlbench.perfmodels.algorithms import Numbers, Pattern, patterns, rank_leaves
from dlbench.perfmodels.schedules import Layout, pipeline_chunks, power_below
from dlbench.specs.base import Count, NonNegative, Positive, Ranks, Spec
from dlbench.specs.comm import DEDICATED_SERVERS, LEVELS, Collective, LevelName
from dlbench.specs.files import read_yaml
from dlbench.specs.problems import problem_of

Starts = tuple[tuple[LevelName, int, int], ...]  # Level and size in elements, ascending, and how many messages.
Flows = tuple[tuple[int, int], ...]  # Size in elements, ascending, and how many messages.
_Shape = tuple[bytes, bytes, bytes, bytes, bool]  # Sources, targets, order of sizes, weights, whether all are sent.
_StepsByShape = dict[_Shape, tuple[list[int], tuple["Load", ...]]]  # Sizes of messages, and the loads.
MOST_SHORT_RANKS = 512  # Beyond, vectors shorter than one element per rank are cut into equal fractions.
MOST_RANKS = 512  # Every message of every rank is computed.
Link = tuple[object, ...]
Messages = frozenset[tuple[int, int, int]]  # Source, target, elements.


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Links that the ranks of a block share at each level; None: a port per rank."""

    inside: int | None = None  # Shared by the ranks of a group for messages inside it: memory or processors.
    across: int | None = 1  # Shared by the ranks of a group: network adapters.
    beyond: int | None = 1  # Shared by the ranks below a leaf switch: uplinks.


ONE_LINK = Sharing()  # One network adapter per node, a port per rank inside it, one uplink per leaf switch.


@dataclass(frozen=True)
class Load:
    """The messages through one port or link in one step."""

    level: LevelName  # Level of the port or link.
    starts: Starts  # Messages of one rank, whose start-ups follow each other.
    flows: Flows  # Messages whose bytes share the port or links.
    links: int = 1  # Links that share the bytes.

    @property
    def phi(self) -> float:
        """Flows that a link carries at once: its bytes over those of the rank whose start-ups count."""
        link_elements = sum(count * n for count, n in self.flows) / self.links
        return link_elements / sum(count * n for _, count, n in self.starts)


@dataclass(frozen=True)
class StepLoads:
    """The loads of one kind of step."""

    loads: tuple[Load, ...]
    reduced: int  # Most elements that a rank adds in it.


@dataclass(frozen=True)
class Summary:
    """A collective over all ranks: its kinds of steps, each with how many there are."""

    elements: int  # Elements of the vector for which loads are counted; loads are proportional to it.
    steps: tuple[tuple[StepLoads, int], ...]

    @cached_property
    def levels(self) -> tuple[LevelName, ...]:
        needed: set[LevelName] = set()
        for step, _ in self.steps:
            for load in step.loads:
                needed.add(load.level)
                needed.update(name for name, _, _ in load.starts)
        return tuple(name for name in LEVELS if name in needed)


def loads_of(pattern: Pattern, layout: Layout, sharing: Sharing) -> StepLoads:
    """Returns the distinct loads of a step."""
    is_sent = pattern.count > 0
    source, target, count = pattern.source[is_sent], pattern.target[is_sent], pattern.count[is_sent]
    weight = np.ones(len(count), np.int64) if pattern.weight is None else pattern.weight[is_sent]
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
            through = messages[:, :1] if name == "inside" else messages[:, inner:]  # The latter leave group or leaf.
            busy = np.flatnonzero(through.any(axis=(1, 2)))
            if not len(busy):
                continue
            through = through[busy]
            of_rank = through.sum(axis=1)
            if links != 1:
                loads.update(_distinct(LEVELS[inner:], sizes, through, of_rank, 1))
            # A message inside a group is sent and received through the same memory.
            if links is not None and (inner or ranks is source):
                flows = np.zeros((block.max() + 1, len(sizes)), np.int64)
                np.add.at(flows, block[busy], of_rank)
                flows = flows[block[busy]]
                loads.update(_distinct(LEVELS[inner:], sizes, through, flows, links))
    order = sorted(loads, key=attrgetter("level", "starts", "flows", "links"))
    return StepLoads(tuple(order), _most_reduced(pattern))


def _most_reduced(pattern: Pattern) -> int:
    added = pattern.added if pattern.weight is None else pattern.added * pattern.weight
    return int(np.bincount(pattern.target, added).max(initial=0))


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
    """Returns the loads of a collective of a vector of `elements`; results are cached. From one element per rank on,
    parts are exact fractions of the vector, so that one summary serves all sizes.
    """
    if chunks is None:
        chunks = pipeline_chunks(collective, algorithm, layout, elements)
    if elements >= layout.ranks or layout.ranks > MOST_SHORT_RANKS:
        # Every part has a whole number of elements.
        elements = 2 * layout.ranks * power_below(layout.ranks) * chunks
        if shards and algorithm in ("parameter-server", DEDICATED_SERVERS):
            elements *= shards
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
    earlier: _StepsByShape = {}
    for pattern in patterns(collective, algorithm, layout, elements, shards=shards, chunks=chunks, lumped=True):
        kinds[_in_sizes(pattern, layout, sharing, earlier)] += pattern.repeat
    return Summary(elements, tuple((step, times) for step, times in kinds.items() if step.loads))


def _in_sizes(pattern: Pattern, layout: Layout, sharing: Sharing, earlier: _StepsByShape) -> StepLoads:
    """Returns the loads of a step: those of an earlier one in its sizes, if their messages differ in sizes alone."""
    sizes, index = np.unique(pattern.count, return_inverse=True)
    weight = b"" if pattern.weight is None else pattern.weight.tobytes()
    shape = (pattern.source.tobytes(), pattern.target.tobytes(), index.tobytes(), weight, bool(sizes.all()))
    if shape not in earlier:
        earlier[shape] = sizes.tolist(), loads_of(pattern, layout, sharing).loads
    earlier_sizes, earlier_loads = earlier[shape]
    size_of = dict(zip(earlier_sizes, sizes.tolist(), strict=True))
    loads = [
        Load(
            load.level,
            tuple((name, size_of[size], count) for name, size, count in load.starts),
            tuple((size_of[size], count) for size, count in load.flows),
            load.links,
        )
        for load in earlier_loads
    ]
    return StepLoads(tuple(loads), _most_reduced(pattern))


def _distinct(
    levels: Sequence[LevelName], sizes: Numbers, through: Numbers, flows: Numbers, links: int
) -> Iterator[Load]:
    """Yields distinct loads; `through` are messages, shape (ranks, levels, sizes), `flows` those of a rank's block,
    (ranks, sizes).
    """
    rows = np.concatenate([through.reshape(len(through), -1), flows], axis=1)
    radix = [1, *(rows.max(axis=0) + 1).tolist()]
    if math.prod(radix) < np.iinfo(np.int64).max:
        key = rows @ np.cumprod(radix[:-1])  # One number for each row is faster to compare.
    else:
        key = np.unique(rows, axis=0, return_inverse=True)[1].ravel()
    _, first = np.unique(key, return_index=True)
    elements = sizes.tolist()
    for row in rows[first].reshape(len(first), -1, len(elements)).tolist():
        starts: list[tuple[LevelName, int, int]] = []
        for name, counts in zip(levels, row[:-1], strict=False):
            starts += [(name, size, n) for size, n in zip(elements, counts, strict=True) if n]
        sums = tuple((size, n) for size, n in zip(elements, row[-1], strict=True) if n)
        yield Load(levels[0], tuple(starts), sums, links)


class Cables(Spec):
    """The costs of messages and links that all topologies have."""

    hosts: Ranks = Field(description="Hosts, with a rank each.")
    alpha_s: NonNegative = Field(description="Start-up of a message, seconds; those of one rank follow each other.")
    hop_s: NonNegative = Field(0.0, description="Delay of each link on the way, seconds.")
    beta_s_per_byte: Positive = Field(description="Seconds per byte of a link, in each direction.")
    gamma_s_per_byte: NonNegative = Field(0.0, description="Seconds per byte that a rank adds.")

    @abstractmethod
    def between(self, source: int, target: int) -> Iterator[Link]:
        """Returns the links between the switches of two hosts."""

    def links(self, source: int, target: int) -> list[Link]:
        return [("up", source), *self.between(source, target), ("down", target)]

    def step_s(self, messages: Messages, width: float) -> float:
        """Returns the seconds of a step of messages of elements of `width` bytes."""
        num_sent = Counter(source for source, _, _ in messages)
        loads, starts_s = Counter[Link](), dict[Link, float]()
        for source, target, count in messages:
            path = self.links(source, target)
            start_s = num_sent[source] * self.alpha_s + len(path) * self.hop_s
            for link in path:
                loads[link] += count
                starts_s[link] = max(starts_s.get(link, 0.0), start_s)
        return max((starts_s[link] + load * width * self.beta_s_per_byte for link, load in loads.items()), default=0.0)


class FatTree(Cables):
    """Two levels of switches: every leaf switch has one link to each of some spine switches."""

    hosts_per_leaf: Ranks = Field(description="Hosts below a leaf switch.")
    uplinks: Ranks = Field(description="Links of a leaf switch upwards, one to each spine switch.")

    def between(self, source: int, target: int) -> Iterator[Link]:
        leaf, other_leaf = source // self.hosts_per_leaf, target // self.hosts_per_leaf
        spine = target % self.uplinks
        if leaf != other_leaf:
            yield "to spine", leaf, spine
            yield "from spine", other_leaf, spine


class Loop(Cables):
    """Distributed loop network: a ring of switches with shortcuts of some lengths (Nguyen & Wahib, CCGRID 2021)."""

    shortcuts: tuple[Count, ...] = Field((), description="Lengths of shortcuts, e.g. 2, 4, 8, in addition to the ring.")

    def between(self, source: int, target: int) -> Iterator[Link]:
        ahead = (target - source) % self.hosts
        direction = -1 if 2 * ahead > self.hosts else 1
        distance = direction * ahead % self.hosts
        while distance:
            length = max(length for length in (1, *self.shortcuts) if length <= distance)
            yield "loop", source, direction * length
            source, distance = (source + direction * length) % self.hosts, distance - length


KINDS: dict[str, type[Cables]] = {"fat-tree": FatTree, "loop": Loop}


def read_topology(path: Path) -> Cables:
    """Reads a topology from a file that has `kind`, one of `KINDS`, and its values; raises `UserError` if it is not
    valid.
    """
    content = read_yaml(path)
    kind = content.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise UserError(f"{path}: kind: {kind!r} is no topology: {nearest(str(kind), KINDS)}")
    try:
        return KINDS[kind].model_validate(content)
    except ValidationError as error:
        raise UserError(f"{path}: {problem_of(KINDS[kind], error)}") from None


def seconds(
    topology: Cables,
    collective: Collective,
    algorithm: str,
    num_bytes: int,
    layout: Layout,
    *,
    element_bytes: int = 4,
    shards: int | None = None,
) -> float:
    """Returns the seconds of a collective on the first hosts; arguments as for `predictions.predict`."""
    ranks = layout.ranks
    if ranks > min(topology.hosts, MOST_RANKS):
        raise UserError(f"{ranks} ranks: the topology has {topology.hosts} hosts, and at most {MOST_RANKS} can be used")
    elements = num_bytes // element_bytes
    if not elements:
        return 0.0
    chunks = pipeline_chunks(collective, algorithm, layout, elements)
    if elements >= ranks:  # Then parts are exact fractions of the vector, and the same steps serve all sizes.
        elements = 2 * ranks * power_below(ranks) * (shards or 1) * chunks
    width = num_bytes / elements
    total_s = 0.0
    seconds_by_step: dict[Messages, float] = {}
    for messages, reduced in steps_of(collective, algorithm, layout, elements, shards, chunks):
        if messages not in seconds_by_step:
            seconds_by_step[messages] = topology.step_s(messages, width)
        total_s += seconds_by_step[messages] + reduced * width * topology.gamma_s_per_byte
    return total_s


@lru_cache(maxsize=64)
def steps_of(
    collective: Collective, algorithm: str, layout: Layout, elements: int, shards: int | None, chunks: int
) -> list[tuple[Messages, int]]:
    """Returns the messages of all ranks in each step, and the most elements that a rank adds in it."""
    steps = []
    for pattern in patterns(collective, algorithm, layout, elements, shards=shards, chunks=chunks):
        sizes: Counter[tuple[int, int]] = Counter()
        added: Counter[int] = Counter()
        for source, target, count, is_added in zip(*pattern.runs(elements)[[0, 1, 4, 5]].tolist(), strict=True):
            sizes[source, target] += count  # Runs to one rank are sent as one message.
            added[target] += count * is_added
        messages = frozenset((source, target, count) for (source, target), count in sizes.items())
        steps.append((messages, max(added.values(), default=0)))
    return steps

"""Networks by their cables: collectives on a fat tree, and on a loop with shortcuts.

A topology is one function, `links`: what a message between two hosts passes. Each step of a schedule takes as long as
its busiest link: the longest start-up of a message on it, then its bytes one after the other. Where the messages of a
step are equally long, that is when max-min fair sharing ends: on the link with the largest load over capacity no flow
is slower, and no flow elsewhere ends later. `tests/perfmodels/test_topology.py` compares it with SimGrid. Rank r is on
host r, which has one link to its switch. Nothing here is measured.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from pydantic import Field, ValidationError

from dlbench.errors import UserError, nearest
from dlbench.perfmodels.algorithms import patterns
from dlbench.perfmodels.schedules import Layout, pipeline_chunks, power_below
from dlbench.removed import removed_key
from dlbench.specs.base import Count, NonNegative, Positive, Ranks, Spec
from dlbench.specs.comm import Collective
from dlbench.specs.files import read_yaml
from dlbench.specs.problems import problem_of

MOST_RANKS = 512  # Every message of every rank is walked.

Link = tuple[object, ...]
Messages = frozenset[tuple[int, int, int]]  # From which host to which, elements.


class Cables(Spec):
    """What all topologies share."""

    hosts: Ranks = Field(description="Hosts, with a rank each.")
    alpha_s: NonNegative = Field(description="Start-up of a message, seconds; those of one rank follow each other.")
    hop_s: NonNegative = Field(0.0, description="Delay of each link on the way, seconds.")
    beta_s_per_byte: Positive = Field(description="Seconds per byte of a link, in each direction.")
    gamma_s_per_byte: NonNegative = Field(0.0, description="Seconds per byte that a rank adds.")

    @abstractmethod
    def between(self, source: int, target: int) -> Iterator[Link]:
        """Links between the switches of two hosts."""

    def links(self, source: int, target: int) -> list[Link]:
        return [("up", source), *self.between(source, target), ("down", target)]

    def step_s(self, messages: Messages, width: float) -> float:
        """Seconds of a step. `width`: bytes of an element."""
        own, loads, starts = Counter(source for source, _, _ in messages), Counter[Link](), dict[Link, float]()
        for source, target, count in messages:
            path = self.links(source, target)
            start = own[source] * self.alpha_s + len(path) * self.hop_s
            for link in path:
                loads[link] += count
                starts[link] = max(starts.get(link, 0.0), start)
        return max((starts[one] + load * width * self.beta_s_per_byte for one, load in loads.items()), default=0.0)


class FatTree(Cables):
    """Two levels of switches: every leaf switch has one link to each of some spine switches."""

    hosts_per_leaf: Ranks = Field(description="Hosts below a leaf switch.")
    uplinks: Ranks = Field(description="Links of a leaf switch upwards, one to each spine switch.")

    def between(self, source: int, target: int) -> Iterator[Link]:
        here, there = source // self.hosts_per_leaf, target // self.hosts_per_leaf
        if here != there:
            yield from (("to spine", here, target % self.uplinks), ("from spine", there, target % self.uplinks))


class Loop(Cables):
    """Distributed loop network: a ring of switches with shortcuts of some lengths (Nguyen & Wahib, CCGRID 2021)."""

    shortcuts: tuple[Count, ...] = Field((), description="Lengths of shortcuts, e.g. 2, 4, 8, beside the ring itself.")

    def between(self, source: int, target: int) -> Iterator[Link]:
        ahead = (target - source) % self.hosts
        way = 1 if 2 * ahead <= self.hosts else -1
        left = min(ahead, self.hosts - ahead)
        while left:
            length = max(one for one in (1, *self.shortcuts) if one <= left)
            yield ("loop", source, way * length)
            source, left = (source + way * length) % self.hosts, left - length


KINDS: dict[str, type[Cables]] = {"fat-tree": FatTree, "loop": Loop}


def read_topology(path: Path) -> Cables:
    """A file: `kind`, one of `KINDS`, and its values."""
    content = read_yaml(path)
    kind = content.pop("kind", None)
    removed = removed_key(("kind",), kind)
    if removed is not None:
        raise UserError(f"{path}: kind: {kind} {removed}")
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
    """Seconds of a collective on the first hosts; arguments as `predictions.predict`."""
    ranks = layout.ranks
    if ranks > min(topology.hosts, MOST_RANKS):
        raise UserError(f"{ranks} ranks: the topology has {topology.hosts} hosts, of which {MOST_RANKS} at most count")
    elements = num_bytes // element_bytes
    chunks = pipeline_chunks(collective, algorithm, layout, elements)
    # From one element a rank on, parts are exact shares of the vector: one walk serves all sizes.
    walked = 2 * ranks * power_below(ranks) * (shards or 1) * chunks if elements >= ranks else elements
    width = num_bytes / walked if walked else 0.0
    total = 0.0
    took: dict[Messages, float] = {}
    for messages, reduced in steps_of(collective, algorithm, layout, walked, shards, chunks):
        if messages not in took:
            took[messages] = topology.step_s(messages, width)
        total += took[messages] + reduced * width * topology.gamma_s_per_byte
    return total


@lru_cache(maxsize=64)
def steps_of(
    collective: Collective, algorithm: str, layout: Layout, elements: int, shards: int | None, chunks: int
) -> list[tuple[Messages, int]]:
    """Messages of all ranks in each step, and the most elements that a rank adds."""
    found = []
    for pattern in patterns(collective, algorithm, layout, elements, shards=shards, chunks=chunks):
        sizes: Counter[tuple[int, int]] = Counter()
        added: Counter[int] = Counter()
        for source, target, count, is_added in zip(*pattern.runs(elements)[[0, 1, 4, 5]].tolist(), strict=True):
            sizes[source, target] += count  # Those to one rank travel as one message.
            added[target] += count * is_added
        found.append((frozenset((*pair, count) for pair, count in sizes.items()), max(added.values(), default=0)))
    return found

"""Collectives on networks given by their cables: a fat tree, and a loop with shortcuts. Nothing here is measured. A
step takes as long as its busiest link: the longest start-up of a message on it, then its bytes one after the other.
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

MOST_RANKS = 512  # Every message of every rank is computed.

Link = tuple[object, ...]
Messages = frozenset[tuple[int, int, int]]  # Source, target, elements.


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

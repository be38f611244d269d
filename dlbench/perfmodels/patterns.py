"""What goes through the ports and links of a network in each step of a collective.

A port is a rank's way into a level or out of it, in one direction; messages of one step through it follow each other.
Where the ranks of a block share n links at a level (`Level.links`), all bytes that leave the block (or enter it) in a
step are spread over these, while ranks pay for their start-ups in parallel: beta is multiplied by the flows of a link
(the contention coefficient phi of Kahira et al., HPDC 2021, section 4). Inside a group the same holds of the bytes that
its ranks send where they share the memory or the processors that move them.

A message belongs to the innermost level that holds both of its ranks, and starts up as that level says. Its bytes load
every link on its way: those of a message between leaf switches the link of its node and the uplinks of its switch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from dlbench.perfmodels.algorithms import Schedule, Transfer, power_below
from dlbench.perfmodels.schedules import Layout, pipeline_chunks, schedule
from dlbench.specs.comm import Collective, LevelName

Starts = tuple[tuple[LevelName, int, int], ...]  # Level and size in elements, ascending, and how many messages.
Flows = tuple[tuple[int, int], ...]  # Size in elements, ascending, and how many messages.


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
    sizes; below, empty parts matter and the schedule is taken as it is. Summaries are kept.

    Raises `UserError`: as `schedule`.
    """
    chunks = pipeline_chunks(collective, algorithm, layout.ranks, elements)
    if elements >= layout.ranks:
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
    schedules = [
        schedule(
            collective,
            algorithm,
            rank,
            layout.ranks,
            elements,
            group_size=layout.group_size,
            shards=shards,
            chunks=chunks,
        )
        for rank in range(layout.ranks)
    ]
    kinds = Counter(_step_loads(schedules, number, layout, sharing) for number in range(len(schedules[0])))
    return Summary(elements, tuple(kinds.items()))


def _step_loads(schedules: list[Schedule], number: int, layout: Layout, sharing: Sharing) -> StepLoads:
    loads: set[Load] = set()
    shared: dict[tuple[LevelName, int, bool], list[Starts]] = {}
    reduced = 0
    leaf_size = layout.leaf_size or layout.ranks
    for rank, steps in enumerate(schedules):
        step = steps[number]
        if step.reduce:
            reduced = max(reduced, sum(t.count for t in step.receives))
        for outwards, transfers in ((True, step.sends), (False, step.receives)):
            starts = _starts(transfers, layout, rank)
            crossing: dict[LevelName, tuple[Starts, int | None, int]] = {
                "inside": (tuple(one for one in starts if one[0] == "inside"), sharing.inside, layout.group_size),
                "across": (tuple(one for one in starts if one[0] != "inside"), sharing.across, layout.group_size),
                "beyond": (tuple(one for one in starts if one[0] == "beyond"), sharing.beyond, leaf_size),
            }
            for level, (through, links, block) in crossing.items():
                if through and links != 1:
                    loads.add(Load(level, through, _flows([through])))
                # A message inside a group is sent and received through the same memory.
                if through and links is not None and (outwards or level != "inside"):
                    shared.setdefault((level, rank // block, outwards), []).append(through)
    for (level, _, _), together in shared.items():
        links = getattr(sharing, level)
        loads.update(Load(level, starts, _flows(together), links) for starts in set(together))
    return StepLoads(tuple(sorted(loads, key=lambda load: (load.level, load.starts, load.flows, load.links))), reduced)


def _flows(together: Sequence[Starts]) -> Flows:
    found: Counter[int] = Counter()
    for starts in together:
        for _, count, how_many in starts:
            found[count] += how_many
    return tuple(sorted(found.items()))


def _starts(transfers: Sequence[Transfer], layout: Layout, rank: int) -> Starts:
    """Messages of a rank; transfers of a step with one rank are one message."""
    sizes: Counter[int] = Counter()
    for transfer in transfers:
        sizes[transfer.peer] += transfer.count
    return tuple(
        sorted(
            (level, count, n)
            for (level, count), n in Counter((layout.level(rank, peer), size) for peer, size in sizes.items()).items()
        )
    )

"""What the steps of a schedule load: the ports of ranks and the links of groups, as few distinct steps as there are.

A step takes as long as its most loaded port or link. A port is a rank's way into its group or out of it, in one
direction; messages of one step through it follow each other. Where the ranks of a group share one link to other
groups, all bytes that leave the group (or enter it) in a step follow each other on it, while ranks pay for their
start-ups side by side: beta is multiplied by the flows that share the link (the contention coefficient phi of
Kahira et al., HPDC 2021, section 4). Inside a group the same holds of the bytes that its ranks send where they share
the memory or the processors that move them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from dlbench.costs.collectives import Layout
from dlbench.costs.schedules.halving import power_below
from dlbench.costs.schedules.schedule import pipeline_chunks, schedule
from dlbench.costs.schedules.transfers import Schedule, Transfer
from dlbench.specs.collectives.network import LevelName
from dlbench.specs.collectives.plan import Collective

Messages = tuple[tuple[int, int], ...]
"""Sizes in elements, ascending, each with how many messages have it."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """What the ranks of a group share."""

    link: bool = True
    """One link to other groups."""
    memory: bool = False
    """What moves messages inside the group."""


ONE_LINK = Sharing()
"""One network adapter a node, and ports of their own inside it."""


@dataclass(frozen=True)
class Load:
    """What goes through one port or link in one step."""

    level: LevelName
    starts: Messages
    """Messages whose start-ups follow each other: those of one rank."""
    flows: Messages
    """Messages whose bytes follow each other: those of the port or link."""


@dataclass(frozen=True)
class StepLoads:
    """One kind of step."""

    loads: tuple[Load, ...]
    reduced: int
    """Most elements that a rank adds in it."""


@dataclass(frozen=True)
class Summary:
    """A collective over all ranks: its kinds of steps, each with how many there are."""

    elements: int
    """Elements of the vector that loads are counted for; they grow with it in proportion."""
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
    """The loads of a collective of so many elements.

    From one element a rank on, parts count as exact fractions of the vector, so that one summary serves all such
    sizes; below, empty parts matter and the schedule is taken as it is. Summaries are kept.

    Raises:
        UserError: as `schedule`.
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
    shared: dict[tuple[LevelName, int, bool], _Shared] = {}
    reduced = 0
    for rank, steps in enumerate(schedules):
        step, group = steps[number], layout.group(rank)
        if step.reduce:
            reduced = max(reduced, sum(t.count for t in step.receives))
        for outwards, transfers in ((True, step.sends), (False, step.receives)):
            inside, across = _ports(transfers, layout, group)
            if inside and sharing.memory and outwards:  # a message inside is sent and received through the same memory
                shared.setdefault(("inside", group, True), _Shared()).add(inside)
            elif inside and not sharing.memory:
                loads.add(Load("inside", inside, inside))
            if across and sharing.link:
                shared.setdefault(("across", group, outwards), _Shared()).add(across)
            elif across:
                loads.add(Load("across", across, across))
    for (level, _, _), one in shared.items():
        flows = tuple(sorted(one.flows.items()))
        loads.update(Load(level, messages, flows) for messages in one.starts)
    return StepLoads(tuple(sorted(loads, key=lambda load: (load.level, load.starts, load.flows))), reduced)


class _Shared:
    """What the ranks of a group put on something they share: start-ups side by side, bytes one after the other."""

    def __init__(self) -> None:
        self.starts: set[Messages] = set()
        self.flows: Counter[int] = Counter()

    def add(self, messages: Messages) -> None:
        self.starts.add(messages)
        self.flows.update(dict(messages))


def _ports(transfers: Sequence[Transfer], layout: Layout, group: int) -> tuple[Messages, Messages]:
    """Messages inside the group and across groups; transfers of a step with one rank are one message."""
    if not transfers:
        return (), ()
    if len(transfers) == 1:
        only: Messages = ((transfers[0].count, 1),)
        return (only, ()) if layout.group(transfers[0].peer) == group else ((), only)
    sizes: Counter[int] = Counter()
    for transfer in transfers:
        sizes[transfer.peer] += transfer.count
    inside = Counter(size for peer, size in sizes.items() if layout.group(peer) == group)
    across = Counter(size for peer, size in sizes.items() if layout.group(peer) != group)
    return tuple(sorted(inside.items())), tuple(sorted(across.items()))

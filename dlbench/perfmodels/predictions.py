"""How long a collective takes on a fitted network, and which algorithm is best at which size.

A collective is walked step by step, all ranks in step (bulk-synchronous): a step takes as long as its most loaded
port or link, priced by Hockney's alpha and beta for the size of each message, and gamma for every byte that its busiest
rank adds.

A port is a rank's way into its group or out of it, in one direction; messages of one step through it follow each other.
Where the ranks of a group share one link to other groups, all bytes that leave the group (or enter it) in a step follow
each other on it, while ranks pay for their start-ups side by side: beta is multiplied by the flows that share the link
(the contention coefficient phi of Kahira et al., HPDC 2021, section 4). Inside a group the same holds of the bytes that
its ranks send where they share the memory or the processors that move them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from dlbench.errors import UserError
from dlbench.perfmodels.algorithms import Schedule, Transfer, power_below
from dlbench.perfmodels.schedules import Layout, pipeline_chunks, schedule
from dlbench.specs.comm import Collective, Level, LevelName, NetworkModel

GRID_PER_OCTAVE = 4
"""Sizes at which the best algorithm is looked up before bisection; what changes twice in between stays unseen."""


def bus_factor(collective: Collective, ranks: int) -> float:
    """What nccl-tests multiplies algbw = bytes / time with for busbw (its doc/PERFORMANCE.md). Bytes are those of each
    rank's whole buffer: for all-gather the output, for reduce-scatter the input.
    """
    if collective == "broadcast":
        return 1.0
    share = (ranks - 1) / ranks
    return 2 * share if collective == "allreduce" else share


def whole_elements(num_bytes: int, element_bytes: int) -> int:
    """Elements of this many bytes. Raises `UserError`: less than nothing, or no whole number of elements."""
    if num_bytes < 0 or num_bytes % element_bytes:
        raise UserError(f"{num_bytes} bytes are no whole number of elements of {element_bytes} bytes")
    return num_bytes // element_bytes


@dataclass(frozen=True)
class Features:
    """A prediction taken apart: seconds = sum of coefficients x costs of the network."""

    starts: dict[tuple[LevelName, int], float]  # Start-ups by level and number of the piece.
    num_bytes: dict[tuple[LevelName, int], float]  # Bytes by level and number of the piece.
    reduced_bytes: float  # Bytes added.

    def seconds(self, network: NetworkModel) -> float:
        total = self.reduced_bytes * network.gamma_s_per_byte
        for (name, index), count in self.starts.items():
            total += count * level_of(network, name).pieces[index].alpha_s
        for (name, index), size in self.num_bytes.items():
            total += size * level_of(network, name).pieces[index].beta_s_per_byte
        return total

    def drawn(self, network: NetworkModel) -> list[float]:
        """The prediction by each of the network's `draws`, seconds: the same ports and links decide; none for none."""
        first = {"inside": 0, "across": 0 if network.inside is None else 2 * len(network.inside.pieces)}
        counts = [
            *((first[name] + 2 * index, count) for (name, index), count in self.starts.items()),
            *((first[name] + 2 * index + 1, size) for (name, index), size in self.num_bytes.items()),
            (-1, self.reduced_bytes),
        ]
        return [sum(draw[column] * count for column, count in counts) for draw in network.draws]


def level_of(network: NetworkModel, name: LevelName) -> Level:
    """One level of a network. Raises `UserError`: it was never measured."""
    level = network.inside if name == "inside" else network.across
    if level is None:
        where = "inside a group" if name == "inside" else "across groups"
        raise UserError(
            f"network {network.system} over {network.transport}: messages {where} were never measured; "
            "run dlbench comm on a layout that has them and fit again"
        )
    return level


def predict(
    collective: Collective,
    algorithm: str,
    num_bytes: int,
    layout: Layout,
    network: NetworkModel,
    *,
    element_bytes: int = 4,
    shards: int | None = None,
) -> float:
    """Seconds of a collective.

    `collective`: which collective. `algorithm`: one of `ALGORITHMS[collective]`. `num_bytes`: of each rank's whole
    buffer. `layout`: ranks and groups. `network`: fitted costs. `element_bytes`: bytes of an element; sizes are whole
    numbers of them. `shards`: servers of parameter-server; none: every rank is one. Raises `UserError`: a level that is
    needed was never measured; no whole number of elements; otherwise as `schedule`.
    """
    return features(
        collective, algorithm, num_bytes, layout, network, element_bytes=element_bytes, shards=shards
    ).seconds(network)


def features(
    collective: Collective,
    algorithm: str,
    num_bytes: int,
    layout: Layout,
    network: NetworkModel,
    *,
    element_bytes: int = 4,
    shards: int | None = None,
) -> Features:
    """How often each cost of the network counts in a prediction; arguments and errors as `predict`. The network decides
    which port or link is the most loaded of a step, and which piece a message belongs to.
    """
    elements = whole_elements(num_bytes, element_bytes)
    starts: dict[tuple[LevelName, int], float] = {}
    sizes: dict[tuple[LevelName, int], float] = {}
    reduced = 0.0
    if elements:
        sharing = Sharing(link=network.shared_link, memory=network.shared_memory)
        summary = summarise(collective, algorithm, layout, elements, shards=shards, sharing=sharing)
        scale = num_bytes / summary.elements if summary.elements else 0.0
        for step, times in summary.steps:
            reduced += times * step.reduced * scale
            load = _slowest(step, scale, network)
            if load is None:
                continue
            pieces = level_of(network, load.level)
            for count, how_many in load.starts:
                key = (load.level, _piece(pieces, count * scale))
                starts[key] = starts.get(key, 0.0) + times * how_many
            for count, how_many in load.flows:
                key = (load.level, _piece(pieces, count * scale))
                sizes[key] = sizes.get(key, 0.0) + times * how_many * count * scale
    return Features(starts, sizes, reduced)


def _slowest(step: StepLoads, scale: float, network: NetworkModel) -> Load | None:
    def seconds(load: Load) -> float:
        level = level_of(network, load.level)
        starts = sum(n * level.piece(count * scale).alpha_s for count, n in load.starts)
        return starts + sum(n * count * scale * level.piece(count * scale).beta_s_per_byte for count, n in load.flows)

    return max(step.loads, key=seconds, default=None)


def _piece(level: Level, num_bytes: float) -> int:
    return level.pieces.index(level.piece(num_bytes))


def recommend(
    collective: Collective,
    algorithms: Sequence[str],
    num_bytes: int,
    layout: Layout,
    network: NetworkModel,
    *,
    element_bytes: int = 4,
    shards: int | None = None,
) -> str:
    """The best of some algorithms at one size; of equal ones the first. Raises `ValueError`: no algorithm is given;
    `UserError`: as `predict`.
    """
    times = {
        name: predict(collective, name, num_bytes, layout, network, element_bytes=element_bytes, shards=shards)
        for name in algorithms
    }
    return min(times, key=lambda name: times[name])


def crossovers(
    collective: Collective,
    algorithms: Sequence[str],
    layout: Layout,
    network: NetworkModel,
    low: int,
    high: int,
    *,
    element_bytes: int = 4,
    shards: int | None = None,
) -> list[tuple[int, str, str]]:
    """Where the best algorithm changes between two sizes: first size of the new one in bytes, from which, to which.

    Looked up at `GRID_PER_OCTAVE` sizes an octave, then bisected to the element.

    Raises `ValueError`: no algorithm, or no range of sizes; `UserError`: as `predict`.
    """
    first, last = -(-low // element_bytes), high // element_bytes
    if not 1 <= first <= last:
        raise ValueError(f"no sizes from {low} to {high} bytes")
    found: dict[int, str] = {}

    def best(elements: int) -> str:
        if elements not in found:
            size = elements * element_bytes
            found[elements] = recommend(
                collective, algorithms, size, layout, network, element_bytes=element_bytes, shards=shards
            )
        return found[elements]

    octaves = math.log2(last / first)
    points = max(1, math.ceil(octaves * GRID_PER_OCTAVE))
    grid = sorted({round(first * 2 ** (octaves * i / points)) for i in range(points)} | {first, last})
    changes = []
    for left, right in pairwise(grid):
        while best(left) != best(right):
            start, below, above = left, left, right
            while above - below > 1:
                middle = (below + above) // 2
                below, above = (middle, above) if best(middle) == best(start) else (below, middle)
            changes.append((above * element_bytes, best(below), best(above)))
            left = above
    return changes


Messages = tuple[tuple[int, int], ...]  # Sizes in elements, ascending, each with how many messages have it.


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """What the ranks of a group share."""

    link: bool = True  # One link to other groups.
    memory: bool = False  # What moves messages inside the group.


ONE_LINK = Sharing()  # One network adapter per node, and ports of their own inside it.


@dataclass(frozen=True)
class Load:
    """What goes through one port or link in one step."""

    level: LevelName
    starts: Messages  # Messages whose start-ups follow each other: those of one rank.
    flows: Messages  # Messages whose bytes follow each other: those of the port or link.


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

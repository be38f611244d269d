"""How long a collective takes on a fitted network, and which algorithm is best at which size.

A collective is walked step by step, all ranks in step (bulk-synchronous): a step takes as long as its most loaded
port or link (`costs.step_loads`), priced by Hockney's alpha and beta for the size of each message, and gamma for
every byte that its busiest rank adds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dlbench.costs.collectives import Layout
from dlbench.costs.fit.step_loads import Load, Sharing, StepLoads, summarise
from dlbench.errors import UserError
from dlbench.specs.collectives.network import Level, LevelName, NetworkModel
from dlbench.specs.collectives.plan import Collective

GRID_PER_OCTAVE = 4
"""Sizes at which the best algorithm is looked up before bisection; what changes twice in between stays unseen."""


def bus_factor(collective: Collective, ranks: int) -> float:
    """What nccl-tests multiplies algbw = bytes / time with for busbw (its doc/PERFORMANCE.md).

    Bytes are those of each rank's whole buffer: for all-gather the output, for reduce-scatter the input.
    """
    if collective == "broadcast":
        return 1.0
    share = (ranks - 1) / ranks
    return 2 * share if collective == "allreduce" else share


def whole_elements(num_bytes: int, element_bytes: int) -> int:
    """Elements of so many bytes.

    Raises:
        UserError: less than nothing, or no whole number of elements.
    """
    if num_bytes < 0 or num_bytes % element_bytes:
        raise UserError(f"{num_bytes} bytes are no whole number of elements of {element_bytes} bytes")
    return num_bytes // element_bytes


@dataclass(frozen=True)
class Features:
    """A prediction taken apart: seconds = sum of coefficients x costs of the network."""

    starts: dict[tuple[LevelName, int], float]
    """Start-ups by level and number of the piece."""
    num_bytes: dict[tuple[LevelName, int], float]
    """Bytes by level and number of the piece."""
    reduced_bytes: float
    """Bytes added."""

    def seconds(self, network: NetworkModel) -> float:
        """The prediction."""
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
    """One level of a network.

    Raises:
        UserError: it was never measured.
    """
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

    Args:
        collective: which collective.
        algorithm: one of `ALGORITHMS[collective]`.
        num_bytes: of each rank's whole buffer.
        layout: ranks and groups.
        network: fitted costs.
        element_bytes: bytes of an element; sizes are whole numbers of them.
        shards: servers of parameter-server; none: every rank is one.

    Raises:
        UserError: a level that is needed was never measured; no whole number of elements; otherwise as `schedule`.
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
    """How often each cost of the network counts in a prediction; arguments and errors as `predict`.

    The network decides which port or link is the most loaded of a step, and which piece a message belongs to.
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


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The algorithm with the least predicted time."""

    algorithm: str
    seconds: float


def recommend(
    collective: Collective,
    algorithms: Sequence[str],
    num_bytes: int,
    layout: Layout,
    network: NetworkModel,
    *,
    element_bytes: int = 4,
    shards: int | None = None,
) -> Recommendation:
    """The best of some algorithms at one size; of equal ones the first.

    Raises:
        ValueError: no algorithm is given.
        UserError: as `predict`.
    """
    times = {
        name: predict(collective, name, num_bytes, layout, network, element_bytes=element_bytes, shards=shards)
        for name in algorithms
    }
    best = min(times, key=lambda name: times[name])
    return Recommendation(algorithm=best, seconds=times[best])


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

    Raises:
        ValueError: no algorithm, or no range of sizes.
        UserError: as `predict`.
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
            ).algorithm
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


def ring_doubling_crossover(alpha_s: float, beta_s_per_byte: float, ranks: int) -> float | None:
    """Size from which a ring beats recursive doubling, bytes; None for two ranks, where it never does.

    n* = alpha (2 (p - 1) - log2 p) / (beta (log2 p - 2 (p - 1) / p)), for a power of two of ranks and without gamma,
    from the closed forms of both.

    Raises:
        ValueError: the ranks are no power of two above 1, or beta is not positive.
    """
    log2 = ranks.bit_length() - 1
    if ranks < 2 or ranks != 1 << log2 or beta_s_per_byte <= 0:
        raise ValueError(f"no closed form for {ranks} ranks and {beta_s_per_byte} s/byte")
    if ranks == 2:
        return None
    return alpha_s * (2 * (ranks - 1) - log2) / (beta_s_per_byte * (log2 - 2 * (ranks - 1) / ranks))

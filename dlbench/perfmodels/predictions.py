"""How long a collective takes on a fitted network, and which algorithm is best at which size.

A collective is priced step by step, all ranks in step (bulk-synchronous): a step takes as long as its most loaded port
or link (`dlbench.perfmodels.patterns`), priced by Hockney's alpha and beta for the size of each message, and gamma for
every byte that its busiest rank adds. Where all messages of a step are equally long this is their time under max-min
fair sharing: the flows through the busiest link get an equal share of it, and every other flow has a link on its way
where its share is no smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from dlbench.errors import UserError
from dlbench.lazy import np, npt
from dlbench.perfmodels.schedules import Layout
from dlbench.specs.comm import Collective, Level, LevelName, NetworkModel

if TYPE_CHECKING:
    from dlbench.perfmodels.patterns import Load


STAND_INS = ("ring", "double-binary-tree", "recursive-halving-doubling", "hierarchical")
"""What a library's own all-reduce may be, which it chooses by itself: NCCL has rings and double binary trees, MPI rings
and halving and doubling, both with a hierarchy on top."""
_WHERE: dict[LevelName, str] = {
    "inside": "inside a group",
    "across": "across groups",
    "beyond": "between leaf switches",
}


def bus_factor(collective: Collective, ranks: int) -> float:
    """What nccl-tests multiplies algbw = bytes / time with for busbw (its doc/PERFORMANCE.md). Bytes are those of each
    rank's whole buffer: for all-gather the output, for reduce-scatter the input.
    """
    if collective in ("broadcast", "reduce", "p2p"):
        return 1.0
    share = (ranks - 1) / ranks
    return 2 * share if collective == "allreduce" else share


def whole_elements(num_bytes: int, element_bytes: int) -> int:
    """Elements of this many bytes."""
    if num_bytes < 0 or num_bytes % element_bytes:
        raise UserError(f"{num_bytes} bytes are no whole number of elements of {element_bytes} bytes")
    return num_bytes // element_bytes


@dataclass(frozen=True)
class Features:
    """A prediction taken apart: seconds = sum of coefficients x costs of the network."""

    starts: dict[tuple[LevelName, int], float]  # Start-ups by level and number of the piece.
    num_bytes: dict[tuple[LevelName, int], float]  # Bytes by level and number of the piece, over the links for them.
    reduced_bytes: float  # Bytes added.
    phi: dict[LevelName, float]
    """By level, how many flows of the busiest rank's size each link carries at once where that decides a step: the
    contention coefficient of Kahira et al. (HPDC 2021, section 4). 1 for a port or link of one's own."""

    def seconds(self, network: NetworkModel) -> float:
        by_level: dict[LevelName, float] = {}
        for (name, index), count in self.starts.items():
            by_level[name] = by_level.get(name, 0.0) + count * level_of(network, name).pieces[index].alpha_s
        for (name, index), size in self.num_bytes.items():
            by_level[name] = by_level.get(name, 0.0) + size * level_of(network, name).pieces[index].beta_s_per_byte
        return self.reduced_bytes * network.gamma_s_per_byte + sum(by_level.values())

    def drawn(self, network: NetworkModel) -> npt.NDArray[np.float64]:
        """The prediction by each of the network's `draws`, seconds: the same ports and links decide; none for none."""
        counts = np.zeros(2 * sum(len(level.pieces) for level in network.levels.values()) + 1)
        counts[-1] = self.reduced_bytes
        first = 0
        for name, level in network.levels.items():
            for index in range(len(level.pieces)):
                counts[first] = self.starts.get((name, index), 0.0)
                counts[first + 1] = self.num_bytes.get((name, index), 0.0)
                first += 2
        found: npt.NDArray[np.float64] = _costs_drawn(network.draws) @ counts if network.draws else np.zeros(0)
        return found


@lru_cache(maxsize=4)
def _costs_drawn(draws: tuple[tuple[float, ...], ...]) -> npt.NDArray[np.float64]:
    return np.array(draws)


def level_of(network: NetworkModel, name: LevelName) -> Level:
    """One level of a network."""
    level = network.levels.get(name)
    if level is None:
        raise UserError(
            f"network {network.system} over {network.transport}: messages {_WHERE[name]} were never measured; "
            "measure with --ranks and --group-size that have them (dlbench comm run), and fit again"
        )
    return level


def predict(
    collective: Collective, algorithm: str, num_bytes: int, layout: Layout, network: NetworkModel, **options: Any
) -> float:
    """Returns the seconds of a collective; arguments as of `features`."""
    return features(collective, algorithm, num_bytes, layout, network, **options).seconds(network)


def features(
    collective: Collective,
    algorithm: str,
    num_bytes: int,
    layout: Layout,
    network: NetworkModel,
    *,
    element_bytes: int = 4,
    shards: int | None = None,
    chunks: int | None = None,
) -> Features:
    """How often each cost of the network counts in a prediction. The network decides which port or link is the most
    loaded of a step, and which piece a message belongs to. `num_bytes`: of each rank's whole buffer, a whole number of
    elements; other arguments as of `schedule`.
    """
    from dlbench.perfmodels.patterns import Sharing, summarise

    elements = whole_elements(num_bytes, element_bytes)
    starts: dict[tuple[LevelName, int], float] = {}
    sizes: dict[tuple[LevelName, int], float] = {}
    phi: dict[LevelName, float] = {}
    reduced = 0.0
    if elements:
        sharing = Sharing(**{name: level.links for name, level in network.levels.items()})
        summary = summarise(collective, algorithm, layout, elements, shards=shards, chunks=chunks, sharing=sharing)
        scale = num_bytes / summary.elements if summary.elements else 0.0
        levels = {name: level_of(network, name) for name in summary.levels}

        def seconds(load: Load) -> float:
            level = levels[load.level]
            starts = sum(n * levels[name].piece(count * scale).alpha_s for name, count, n in load.starts)
            flows = sum(n * count * scale * level.piece(count * scale).beta_s_per_byte for count, n in load.flows)
            return starts + flows / load.links

        for step, times in summary.steps:
            reduced += times * step.reduced * scale
            load = max(step.loads, key=seconds)
            for name, count, how_many in load.starts:
                key = (name, _piece(levels[name], count * scale))
                starts[key] = starts.get(key, 0.0) + times * how_many
            for count, how_many in load.flows:
                key = (load.level, _piece(levels[load.level], count * scale))
                sizes[key] = sizes.get(key, 0.0) + times * how_many * count * scale / load.links
            phi[load.level] = max(load.phi, phi.get(load.level, 1.0))
    return Features(starts, sizes, reduced, phi)


def _piece(level: Level, num_bytes: float) -> int:
    return level.pieces.index(level.piece(num_bytes))

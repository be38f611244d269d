"""Predicted times of collectives on a fitted network, step by step, all ranks in step (bulk-synchronous).

A step takes as long as its most loaded port or link (`dlbench.perfmodels.topology`), by Hockney's alpha and beta, plus
gamma for every byte that its busiest rank adds: for messages of one size, their time under max-min fair sharing.
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
    from dlbench.perfmodels.topology import Load


STAND_INS = ("ring", "double-binary-tree", "recursive-halving-doubling", "hierarchical")
"""Algorithms that a library may choose: NCCL rings and trees, MPI rings and halving, both with a hierarchy."""
_WHERE: dict[LevelName, str] = {
    "inside": "inside a group",
    "across": "across groups",
    "beyond": "between leaf switches",
}


def bus_factor(collective: Collective, ranks: int) -> float:
    """Returns busbw over algbw as nccl-tests defines them (doc/PERFORMANCE.md); bytes are those of a rank's whole
    buffer.
    """
    if collective in ("broadcast", "reduce", "p2p"):
        return 1.0
    if collective == "allreduce":
        return 2 * ((ranks - 1) / ranks)
    return (ranks - 1) / ranks


def whole_elements(num_bytes: int, element_bytes: int) -> int:
    """Returns the number of elements in `num_bytes`; raises `UserError` if an element would be cut."""
    if num_bytes < 0 or num_bytes % element_bytes:
        raise UserError(f"{num_bytes} bytes are no whole number of elements of {element_bytes} bytes")
    return num_bytes // element_bytes


@dataclass(frozen=True)
class Features:
    """A prediction as a linear function of the network's costs: seconds = sum of coefficients x costs."""

    starts: dict[tuple[LevelName, int], float]  # Start-ups by level and number of the piece.
    num_bytes: dict[tuple[LevelName, int], float]  # Bytes per link by level and number of the piece.
    reduced_bytes: float  # Bytes that the busiest rank adds.
    phi: dict[LevelName, float]
    """Flows of a link at once in the steps that it decides, the contention coefficient; 1: not shared."""

    def seconds(self, network: NetworkModel) -> float:
        by_level = self.link_seconds(network)
        for (name, piece), count in self.starts.items():
            by_level[name] = by_level.get(name, 0.0) + count * level_of(network, name).pieces[piece].alpha_s
        return self.reduced_bytes * network.gamma_s_per_byte + sum(by_level.values())

    def link_seconds(self, network: NetworkModel) -> dict[LevelName, float]:
        """Returns the seconds of the bytes on the links that decide, by level."""
        by_level: dict[LevelName, float] = {}
        for (name, piece), num_bytes in self.num_bytes.items():
            by_level[name] = by_level.get(name, 0.0) + num_bytes * level_of(network, name).pieces[piece].beta_s_per_byte
        return by_level

    def drawn(self, network: NetworkModel) -> npt.NDArray[np.float64]:
        """Returns the seconds by the costs of each of the network's `draws`, shape (draws,); the slowest links are the
        same in all.
        """
        if not network.draws:
            return np.zeros(0)
        counts: list[float] = []
        for name, level in network.levels.items():
            for piece in range(len(level.pieces)):
                counts += [self.starts.get((name, piece), 0.0), self.num_bytes.get((name, piece), 0.0)]
        seconds: npt.NDArray[np.float64] = _costs_drawn(network.draws) @ np.array([*counts, self.reduced_bytes])
        return seconds


@lru_cache(maxsize=4)
def _costs_drawn(draws: tuple[tuple[float, ...], ...]) -> npt.NDArray[np.float64]:
    return np.array(draws)


def level_of(network: NetworkModel, name: LevelName) -> Level:
    """Returns one level of a network; raises `UserError` if its messages were never measured."""
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
    """Returns the seconds of a collective; arguments as for `features`."""
    return features(collective, algorithm, num_bytes, layout, network, **options).seconds(network)


def features(  # noqa: PLR0913  # A collective has this many properties.
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
    """Returns how often each cost of the network counts in a prediction, for its most loaded ports and links.
    `num_bytes` is the size of each rank's whole buffer; other arguments as for `algorithms.schedule`.
    """
    from dlbench.perfmodels.topology import Sharing, summarise

    elements = whole_elements(num_bytes, element_bytes)
    if not elements:
        return Features({}, {}, 0.0, {})
    sharing = Sharing(**{name: level.links for name, level in network.levels.items()})
    summary = summarise(collective, algorithm, layout, elements, shards=shards, chunks=chunks, sharing=sharing)
    scale = num_bytes / summary.elements
    levels = {name: level_of(network, name) for name in summary.levels}

    def seconds(load: Load) -> float:
        level = levels[load.level]
        starts_s = sum(n * levels[name].piece(count * scale).alpha_s for name, count, n in load.starts)
        flows_s = sum(n * count * scale * level.piece(count * scale).beta_s_per_byte for count, n in load.flows)
        return starts_s + flows_s / load.links

    starts: dict[tuple[LevelName, int], float] = {}
    bytes_sent: dict[tuple[LevelName, int], float] = {}
    phi: dict[LevelName, float] = {}
    reduced = 0.0
    for step, times in summary.steps:
        reduced += times * step.reduced * scale
        load = max(step.loads, key=seconds)
        for name, count, n in load.starts:
            key = (name, _piece(levels[name], count * scale))
            starts[key] = starts.get(key, 0.0) + times * n
        for count, n in load.flows:
            key = (load.level, _piece(levels[load.level], count * scale))
            bytes_sent[key] = bytes_sent.get(key, 0.0) + times * n * count * scale / load.links
        phi[load.level] = max(load.phi, phi.get(load.level, 1.0))
    return Features(starts, bytes_sent, reduced, phi)


def _piece(level: Level, num_bytes: float) -> int:
    return level.pieces.index(level.piece(num_bytes))

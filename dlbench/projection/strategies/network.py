"""Prices messages of groups of ranks while all groups send at once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import NamedTuple

from dlbench.perfmodels.predictions import features, level_of
from dlbench.perfmodels.schedules import Layout, invalid
from dlbench.specs.comm import DATA_SHEET, Collective, Level, LevelName, NetworkModel, Piece


class MessagePrice(NamedTuple):
    """The price of a message or collective while all groups send theirs."""

    seconds: float = 0.0
    link_seconds: Mapping[LevelName, float] = {}  # Seconds of its bytes on the links that decide, by level.
    phi: float = 1.0  # Flows of a link at once, at least 1.

    def then(self, other: MessagePrice) -> MessagePrice:
        """Returns the price of both, one after the other."""
        link_seconds = dict(self.link_seconds)
        for name, seconds in other.link_seconds.items():
            link_seconds[name] = link_seconds.get(name, 0.0) + seconds
        return MessagePrice(self.seconds + other.seconds, link_seconds, max(self.phi, other.phi))

    def shared_with(self, other: MessagePrice) -> float:
        """Returns the seconds of another message on links that this message uses, by how much of its time it does."""
        if not self.seconds:
            return 0.0
        use = self.link_seconds
        return sum(seconds * use.get(name, 0.0) for name, seconds in other.link_seconds.items()) / self.seconds


Prices = dict[
    tuple[Collective, float, int, int, int], MessagePrice
]  # By collective, bytes, element bytes, size, stride.


class Groups:
    """Groups of `size` ranks, `stride` apart: 1 for neighbours, more for equal indexes in neighbouring groups."""

    def __init__(
        self, layout: Layout, network: NetworkModel, size: int, stride: int = 1, prices: Prices | None = None
    ) -> None:
        self.size, self._stride = size, stride
        self._network = network
        self._prices: Prices = {} if prices is None else prices
        links = tuple((name, level.links) for name, level in network.levels.items())
        self._own, self._phi = _flows_per_link(layout, links, size, stride)
        self.phi = max([1.0, *self._phi.values()])
        """Flows that cross the busiest link at once, at least 1, of a ring and of the priced messages: the contention
        coefficient of Kahira et al., HPDC 2021, section 4."""
        group = max(1, layout.group_size // stride)
        leaf = None
        if layout.leaf_size is not None:
            leaf = max(group, layout.leaf_size // stride // group * group)
        self._layout = Layout(ranks=size, group_size=group, leaf_size=leaf)

    def seconds(self, collective: Collective, num_bytes: float, element_bytes: int) -> float:
        """Returns seconds of a collective of each group, see `message`."""
        return self.message(collective, num_bytes, element_bytes).seconds

    def message(self, collective: Collective, num_bytes: float, element_bytes: int) -> MessagePrice:
        """Returns the price of a collective of each group: by a ring, or, if groups share no link, the fastest."""
        if self.size == 1 or not num_bytes:
            return MessagePrice()
        key = (collective, num_bytes, element_bytes, self.size, self._stride)
        if key not in self._prices:
            self._prices[key] = self._priced(collective, num_bytes, element_bytes)
        price = self._prices[key]
        self.phi = max(self.phi, price.phi)
        return price

    def _priced(self, collective: Collective, num_bytes: float, element_bytes: int) -> MessagePrice:
        whole_bytes = round(num_bytes / element_bytes) * element_bytes
        names = ["ring"]
        if self._own == self._phi:
            measured = (error for error in self._network.errors if error.collective == collective and not error.is_poor)
            names += [error.algorithm for error in measured if error.algorithm not in ("ring", "parameter-server")]
            if self._network.transport == DATA_SHEET and collective == "allreduce":
                names += ["hierarchical", "double-binary-tree"]
        group, network = self._layout.group_size, self._contended
        loads = [
            features(collective, name, whole_bytes, self._layout, network, element_bytes=element_bytes)
            for name in names
            if invalid(collective, name, self.size, group_size=group, shards=None) is None
        ]
        best = min(loads, key=lambda candidate: candidate.seconds(network))
        return MessagePrice(best.seconds(network), best.link_seconds(network), max([1.0, *best.phi.values()]))

    def send(self, num_bytes: float) -> MessagePrice:
        """Returns the price of a message from each rank to the next of its group, over the slowest level."""
        slowest = MessagePrice()
        for name, phi in self._phi.items():
            piece = level_of(self._network, name).piece(num_bytes)
            link_seconds = num_bytes * piece.beta_s_per_byte * phi
            if piece.alpha_s + link_seconds > slowest.seconds:
                slowest = MessagePrice(piece.alpha_s + link_seconds, {name: link_seconds}, phi)
        return slowest

    @cached_property
    def _contended(self) -> NetworkModel:
        """Returns the network for one group: bytes take longer by the flows of the other groups, start-ups do not."""
        longer = {name: phi / self._own.get(name, 1.0) for name, phi in self._phi.items()}
        return scaled(self._network, 1.0, longer)


def scaled(network: NetworkModel, factor: float, longer: Mapping[LevelName, float] | None = None) -> NetworkModel:
    """Returns the network with all costs times a factor, and costs per byte also times `longer` by level."""
    changed: dict[str, Level] = {}
    for name, level in network.levels.items():
        slower = factor * (longer or {}).get(name, 1.0)
        costs = [(piece.alpha_s * factor, piece.beta_s_per_byte * slower, piece.up_to_bytes) for piece in level.pieces]
        pieces = tuple(Piece(alpha_s=alpha, beta_s_per_byte=beta, up_to_bytes=up_to) for alpha, beta, up_to in costs)
        changed[name] = level.model_copy(update={"pieces": pieces})
    return network.model_copy(update={**changed, "gamma_s_per_byte": network.gamma_s_per_byte * factor})


@lru_cache(maxsize=4096)
def _flows_per_link(
    layout: Layout, links: tuple[tuple[LevelName, int | None], ...], size: int, stride: int
) -> tuple[dict[LevelName, float], dict[LevelName, float]]:
    """Returns flows per link by level, at least 1, of one group alone and of all, if each rank sends to the next."""
    import numpy as np

    from dlbench.perfmodels.algorithms import Pattern
    from dlbench.perfmodels.patterns import Sharing, loads_of

    rank, sharing = np.arange(layout.ranks), Sharing(**dict(links))
    index = rank // stride % size
    target = rank + np.where(index < size - 1, stride, (1 - size) * stride)
    flows: list[dict[LevelName, float]] = []
    for members in ((rank < size * stride) & (rank % stride == 0), target != rank):
        source = rank[members]
        phi: dict[LevelName, float] = {}
        if size > 1:
            ring = Pattern(source, target[members], 0 * source, np.ones_like(source))
            for load in loads_of(ring, layout, sharing).loads:
                phi[load.level] = max(phi.get(load.level, 1.0), load.phi)
        flows.append(phi)
    return flows[0], flows[1]

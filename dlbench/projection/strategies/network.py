"""What messages of groups of ranks cost while all groups of their kind send at once."""

from __future__ import annotations

from functools import cached_property, lru_cache

from dlbench.perfmodels.predictions import features, level_of
from dlbench.perfmodels.schedules import Layout, invalid
from dlbench.specs.comm import LEVELS, Collective, Level, LevelName, NetworkModel

_Flows = tuple[tuple[LevelName, int, int], ...]  # By level: most messages of one group on a block's links, and of all.


class Groups:
    """All ranks of a layout in groups of `size` ranks, `stride` apart: 1 for neighbours, who are on the same node as
    far as it has room; larger for ranks of the same place in neighbouring groups.
    """

    def __init__(self, layout: Layout, network: NetworkModel, size: int, stride: int = 1) -> None:
        self.size = size
        self._network = network
        self._flows = _flows(layout, size, stride)
        group = max(1, layout.group_size // stride)
        leaf = None if layout.leaf_size is None else max(group, layout.leaf_size // stride // group * group)
        self._layout = Layout(ranks=size, group_size=group, leaf_size=leaf)

    @cached_property
    def phi(self) -> float:
        """Flows that cross the busiest link at once, over the links that carry them, least 1: the contention
        coefficient of Kahira et al., HPDC 2021, section 4.
        """
        return max([1.0, *(self._contention(name, num) for name, _, num in self._flows)])

    def seconds(self, collective: Collective, num_bytes: float, element_bytes: int) -> float:
        """A collective of each group; its ring, or of one group alone what the network was measured to do better."""
        if self.size == 1 or not num_bytes:
            return 0.0
        whole = round(num_bytes / element_bytes) * element_bytes
        names = ["ring"]
        if all(own == num for _, own, num in self._flows):
            measured = (one for one in self._network.errors if one.collective == collective and not one.is_poor)
            names += [one.algorithm for one in measured if one.algorithm not in ("ring", "parameter-server")]
        group = self._layout.group_size
        return min(
            features(collective, name, whole, self._layout, self._contended, element_bytes=element_bytes).seconds(
                self._contended
            )
            for name in names
            if invalid(collective, name, self.size, group_size=group, shards=None) is None
        )

    def send_seconds(self, num_bytes: float) -> float:
        """A message from each rank to the next of its group, over the slowest way between two of them."""
        times = []
        for name, _, num in self._flows:
            piece = level_of(self._network, name).piece(num_bytes)
            times.append(piece.alpha_s + num_bytes * piece.beta_s_per_byte * max(1.0, self._contention(name, num)))
        return max(times, default=0.0)

    def _contention(self, name: LevelName, flows: int) -> float:
        links = level_of(self._network, name).links
        return flows / links if links else 1.0

    @cached_property
    def _contended(self) -> NetworkModel:
        """The network as one group sees it: bytes take longer by the flows of the other groups, start-ups do not."""
        factors = {
            name: max(1.0, self._contention(name, num)) / max(1.0, self._contention(name, own))
            for name, own, num in self._flows
        }
        changed: dict[str, Level] = {}
        for name, factor in factors.items():
            level = level_of(self._network, name)
            if factor > 1:
                pieces = tuple(
                    piece.model_copy(update={"beta_s_per_byte": piece.beta_s_per_byte * factor})
                    for piece in level.pieces
                )
                changed[name] = level.model_copy(update={"pieces": pieces})
        return self._network.model_copy(update=changed) if changed else self._network


@lru_cache(maxsize=4096)
def _flows(layout: Layout, size: int, stride: int) -> _Flows:
    """Messages from each rank to the next of its group, the last to the first, counted on the way out of each block."""
    one: dict[tuple[LevelName, int], int] = {}
    every: dict[tuple[LevelName, int], int] = {}
    if size > 1:
        for rank in range(layout.ranks):
            block, within = divmod(rank, size * stride)
            place, column = divmod(within, stride)
            target = block * size * stride + (place + 1) % size * stride + column
            name = layout.level(rank, target)
            width = (layout.leaf_size or layout.ranks) if name == "beyond" else layout.group_size
            key = (name, rank // width)
            every[key] = every.get(key, 0) + 1
            if block == 0 and column == 0:
                one[key] = one.get(key, 0) + 1
    return tuple(
        (
            name,
            max((num for (level, _), num in one.items() if level == name), default=0),
            max(num for (level, _), num in every.items() if level == name),
        )
        for name in LEVELS
        if any(level == name for level, _ in every)
    )

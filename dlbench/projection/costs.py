"""What the messages of the runs cost at other rank counts, by draw: algorithm, order of nodes, network costs and trend.

The fitted costs of the network are priced by each algorithm that may be the library's own, each order of nodes below
leaf switches and each draw of the costs. Together they are drawn by how likely the measured points make them: messages
there were under way as long as the price says, times a level and a trend of so much per doubling of the ranks, which
goes on beyond the anchor as congestion does.

Ranks in the order of switches send one flow of a ring over a leaf's uplinks, ranks in another order several. How far a
launcher's order is from that of switches is told by the largest measured point on several leaf switches; where none was
recorded, it is drawn between sorted and shuffled.

Nodes of one machine (a one-box cluster) share its cores, and messages of more ranks wait for these: what is measured of
that (`Ingredients.shared_cores`) lengthens messages by the CPU time that they take.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dlbench.lazy import Array, Times, np, npt
from dlbench.perfmodels.extrapolation import free_running
from dlbench.perfmodels.predictions import STAND_INS
from dlbench.perfmodels.schedules import Layout
from dlbench.projection.exchange import (
    FASTEST,
    Cycle,
    ExchangeMethod,
    Messages,
    NoModelError,
    Price,
    messages_of,
    price_of,
    priced_as,
    way_of,
)
from dlbench.projection.ingredients import Ingredients
from dlbench.projection.slopes import lines, normal_slopes
from dlbench.specs.comm import NetworkModel
from dlbench.specs.sync import GROUPED
from dlbench.stats.resampling import SEED

_SORTED: Order = (0.0, 0)
_NUM_ORDERS = 8  # That stand for a launcher's; a price is made of each.
_SHARES = (0.0, 0.5, 1.0)  # Sorted, half shuffled, shuffled: as likely as each other before anything was recorded.
_NEVER = 1e-300  # A chance by which another is divided.
_SEEDS = 100  # Random orders of each share that are held against a recorded one.
LIBRARY = (*STAND_INS, FASTEST)  # What a library's all-reduce may be.
RINGS = ("gloo",)  # Carriers whose all-reduce is a ring.
CHANGES = 0.25  # How likely a library is beforehand to change its algorithm with the ranks, over keeping one.
HARDLY = 0.02  # A chance below which an algorithm is left out.
ALIKE = 0.01  # Deviation of times from those of the right algorithm and a trend, as logarithm, that is expected.
TREND = 0.1
"""Deviation, before any was seen, of what messages take longer with each doubling of the ranks than their costs say, as
logarithm: congestion, or an algorithm of which the model knows nothing."""
OVERLAP = (0.1, 0.7)
"""Ends of the inverse norm that joins the time of messages on the wire with the time of the ranks' work for them on
shared cores: 0 is the longer of both, 1 their sum. 16 paced ranks on two cores: 0.3 to 0.6 (bench `projection`)."""

Order = tuple[float, int]  # Share of the nodes that are in random order among themselves, and its seed.


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What messages of the runs cost, by draw."""

    ingredients: Ingredients
    network: NetworkModel
    ran: ExchangeMethod
    orders: tuple[Order, ...]  # Orders of nodes below leaf switches, equally likely.
    algorithms: tuple[str, ...]  # That may stand for the exchange of the runs.
    placed: npt.NDArray[np.int64]  # Which of the orders, by draw.
    chosen: npt.NDArray[np.int64]  # Which of the algorithms, by draw.
    rows: npt.NDArray[np.int64]  # Which draw of the network's costs, by draw; 0: the fitted costs.
    trend: Array  # Logarithm of what messages take longer with each doubling of the ranks, by draw.
    crowding: float  # CPU time of messages over their time on the wire at the anchor, where nodes share cores; else 0.

    @classmethod
    def of(cls, ingredients: Ingredients, draws: int, names: Sequence[str] = LIBRARY) -> Costs | None:
        """None where nothing is known of an exchange. `names`: what a library may choose by itself. Raises
        `NoModelError`: that of the runs has no model.
        """
        network, result = ingredients.network, ingredients.exchange
        if network is None or result is None or ingredients.anchor.ranks == 1:
            return None
        ran = way_of(result, ingredients.engine)
        own = priced_as(ran)
        # A library chooses by itself; Gloo's all-reduce is a ring.
        if own != "ring" or result.carrier in RINGS:
            names = (own,)
        costs = cls(
            ingredients=ingredients,
            network=_with_uplinks(ingredients, network),
            ran=ran,
            orders=orders_of(ingredients),
            algorithms=tuple(names),
            placed=np.zeros(draws, dtype=np.int64),
            chosen=np.zeros(draws, dtype=np.int64),
            rows=np.zeros(draws, dtype=np.int64),
            trend=np.zeros(draws),
            crowding=_crowding(ingredients),
        )
        missed: dict[str, Array] = {}
        doublings = np.zeros(0)
        for name in names:
            try:
                doublings, missed[name] = replace(costs, algorithms=(name,))._missed()
            except NoModelError:
                if len(names) == 1:
                    raise
        # Shape (points, orders, algorithms, rows of costs).
        errors = np.stack(list(missed.values()), axis=2)
        if costs.crowding:  # Costs of the network hold some of it, too, so that what they miss is no trend.
            doublings, errors = doublings[:0], errors[:0]
        slopes, prior = normal_slopes(TREND)
        line = lines(doublings, errors.reshape(len(doublings), math.prod(errors.shape[1:])), slopes, prior, ALIKE**2)
        chances = np.exp(line.evidence - line.evidence.max()).reshape(errors.shape[1:])
        chances = levelled(costs.orders, chances)
        if FASTEST in missed:
            chances[:, list(missed).index(FASTEST)] *= CHANGES
        # What is hardly possible is left out, and so never named.
        by_algorithm = chances.sum(axis=(0, 2)) / chances.sum()
        chances[:, by_algorithm < HARDLY] = 0.0
        columns = np.random.default_rng([SEED, 16]).choice(chances.size, draws, p=chances.ravel() / chances.sum())
        placed, chosen, rows = np.unravel_index(columns, chances.shape)
        standing = np.flatnonzero(by_algorithm >= HARDLY)
        return replace(
            costs,
            algorithms=tuple(list(missed)[number] for number in standing),
            placed=placed,
            chosen=np.searchsorted(standing, chosen),
            rows=rows,
            trend=line.drawn(columns),
        )

    def elsewhere(self, there: Ingredients) -> Costs | None:
        """The same on another system: how its network's costs go on is not known."""
        if there.network is None or there.exchange is None:
            return None
        network = _with_uplinks(there, there.network)
        trend = self.trend if network == self.network else self.trend - np.median(self.trend)
        ran = replace(self.ran, group_size=there.exchange.group_size)
        orders = orders_of(there)
        placed = np.random.default_rng([SEED, 24]).integers(0, len(orders), len(self.placed))
        rows = self.rows % max(1, len(network.draws))
        return replace(
            self, ingredients=there, network=network, ran=ran, orders=orders, placed=placed, rows=rows, trend=trend
        )

    def _missed(self) -> tuple[Array, Array]:
        """Returns the doublings from the anchor of points on several nodes whose runs say how long messages were under
        way, shape (points,), and the logarithm of that over what they cost, shape (points, orders, rows of costs).
        """
        doublings, missed = [], []
        for point in self.ingredients.points:
            times = [run.communication_s for run in point.runs if run.communication_s]
            if point.nodes > 1 and len(times) == len(point.runs):
                backward = np.array([np.mean([run.parts.get("backward", 0.0) for run in point.runs])])
                messages = self.messages(point.ranks, None, {"backward": backward}, 1.0)
                prices = self._prices(point.ranks, None)
                doublings.append(math.log2(point.ranks / self.ingredients.anchor.ranks))
                costs = np.array([sum(self._rows(price(size)) for size in messages.sizes) for price in prices])
                missed.append(np.log(np.mean(times) / costs))
        num_rows = max(1, len(self.network.draws))
        return np.array(doublings), np.array(missed).reshape(-1, len(self.orders), num_rows)

    def _rows(self, price: Array) -> Array:
        """Returns a price by draw of the network's costs; by the fitted costs where there are none."""
        return price[1:] if self.network.draws else price

    def names(self, way: ExchangeMethod | None) -> tuple[str, ...]:
        """What stands for a way of exchanging."""
        own = priced_as(way or self.ran)
        return self.algorithms if way is None or way.exchange == self.ran.exchange else (own,)

    def _layout(self, ranks: int, way: ExchangeMethod | None, order: Order) -> Layout:
        way, full, leaf = way or self.ran, self.ingredients.per_node, self.ingredients.nodes_per_leaf
        group = way.group_size if way.exchange in GROUPED else full
        if full % group:
            raise NoModelError(f"groups of {group} ranks do not divide the {full} ranks of a node")
        leaf_size = leaf * full if leaf and ranks > full else None
        leaves = None
        if leaf_size is not None and self.network.beyond is not None:
            leaves = leaves_at(self.ingredients, ranks, order)
        node = min(ranks, full)
        return Layout(ranks=ranks, group_size=min(ranks, group), leaf_size=leaf_size, node_size=node, leaves=leaves)

    def _prices(self, ranks: int, way: ExchangeMethod | None) -> list[Price]:
        """Of each order of nodes, each algorithm in turn; orders that are one layout share them."""
        prices: list[Price] = []
        made: dict[Layout, list[Price]] = {}
        for order in self.orders:
            layout = self._layout(ranks, way, order)
            if layout not in made:
                made[layout] = [price_of(self.network, layout, way or self.ran, name) for name in self.names(way)]
            prices += made[layout]
        return prices

    def is_order_open(self, ranks: int) -> bool:
        """Returns whether nodes of a run may well lie in the order of leaf switches, and may well lie out of it."""
        layouts = [self._layout(ranks, None, order) for order in self.orders]
        is_in_order = np.array([layout.leaves is None for layout in layouts])
        chance = float(np.mean(is_in_order[self.placed]))
        return HARDLY < chance < 1 - HARDLY

    def messages(
        self, ranks: int, way: ExchangeMethod | None, computing: Mapping[str, Array], scale: float
    ) -> Messages:
        """The messages of a step: those of the runs, or what the engine fuses at that many ranks. `scale`: of costs."""
        found, result = self.ingredients, self.ingredients.exchange
        assert result is not None
        fusion = (way or self.ran).fusion
        ran = result.fusion_rule
        if fusion is None and ran is not None and ran.rule == "mgwfbp" and ranks != found.anchor.ranks:
            fusion = ran
        cycle = None
        if found.engine == "horovod" and result.by == "backend" and result.gradients:
            threshold = found.fusion_threshold_bytes if fusion is None else fusion.bytes
            if threshold is not None and (fusion is None or fusion.by == "library"):
                cycle = Cycle(threshold_bytes=threshold, cycle_s=found.cycle_s or 0.0)
        price = self._prices(ranks, way)[0]
        backward = float(np.median(computing["backward"]))
        return messages_of(
            result, fusion, lambda size: float(price(size)[0]) * scale, ranks, backward_s=backward, cycle=cycle
        )

    def drawn(self, ranks: int, way: ExchangeMethod | None, messages: Messages) -> list[Array]:
        """Seconds of each message by draw, as the network has them."""
        prices, names, draws = self._prices(ranks, way), self.names(way), len(self.chosen)
        algorithm = self.chosen
        if names != self.algorithms:
            algorithm = np.zeros_like(algorithm)
        longer = np.array([free_running(name, ranks, draws) for name in names])[algorithm, np.arange(draws)]
        longer *= np.exp(self.trend * math.log2(ranks / self.ingredients.anchor.ranks))
        norms = 1 / np.random.default_rng([SEED, 26]).uniform(*OVERLAP, draws)
        # Messages take longer where ranks of all nodes share cores.
        share = self.crowding * ranks / self.ingredients.anchor.ranks
        longer *= (1 + share**norms) ** (1 / norms)
        picks = len(names) * self.placed + algorithm  # Prices are those of each order, algorithm by algorithm.
        return [
            longer * np.array([self._rows(price(size)) for price in prices])[picks, self.rows]
            for size in messages.sizes
        ]


def _crowding(ingredients: Ingredients) -> float:
    """Returns the CPU time of messages over their time on the wire at the anchor, where all nodes share cores: the CPU
    time that the ranks of the smallest point do not need, on so many cores. It grows with the ranks. 0 elsewhere.
    """
    anchor, cores, first = ingredients.anchor, ingredients.shared_cores, ingredients.points[0]
    times = [run.communication_s for run in anchor.runs if run.communication_s]
    if cores is None or anchor.cpu_s is None or len(times) < len(anchor.runs):
        return 0.0
    alone_s = 0.0 if first is anchor or first.cpu_s is None else first.cpu_s
    cores_s = max(0.0, anchor.cpu_s - alone_s) * anchor.ranks / cores
    norm = 2 / sum(OVERLAP)
    wire_s = max(0.0, statistics.fmean(times) ** norm - cores_s**norm) ** (1 / norm)
    share: float = cores_s / max(wire_s, cores_s)
    return share


def _with_uplinks(ingredients: Ingredients, network: NetworkModel) -> NetworkModel:
    """With a level beyond leaves where that was not measured but their taper is known: uplinks as fast as the nodes'
    links, and so many fewer of them. R3 and its flag say that it is assumed.
    """
    leaf, taper = ingredients.nodes_per_leaf, ingredients.leaf_taper
    if network.beyond is not None or network.across is None or leaf is None or taper is None:
        return network
    links = max(1, round((network.across.links or ingredients.per_node) * leaf / taper))
    beyond = network.across.model_copy(update={"links": links})
    columns, width = 2 * sum(len(level.pieces) for level in network.levels.values()), 2 * len(beyond.pieces)
    drawn = tuple((*one[:columns], *one[columns - width : columns], *one[columns:]) for one in network.draws)
    return network.model_copy(update={"beyond": beyond, "draws": drawn})


def orders_of(ingredients: Ingredients) -> tuple[Order, ...]:
    """Returns orders of nodes that may be the launcher's, equally likely, from sorted to shuffled: those that cross
    leaf switches as often as the recorded one.
    """
    if ingredients.nodes_per_leaf is None:
        return (_SORTED,)
    orders = [(share, seed) for share in _SHARES for seed in range(_SEEDS)]
    off = np.zeros(len(orders))
    recorded = [np.array(point.leaves) for point in ingredients.points if len(set(point.leaves or ())) > 1]
    if recorded:
        leaves = recorded[-1]
        crossings = np.array([_crossings(_reordered(np.sort(leaves), order)) for order in orders])
        off = np.abs(crossings - _crossings(leaves))
    likely = np.flatnonzero(off == off.min())
    middles = (np.arange(_NUM_ORDERS) + 0.5) / _NUM_ORDERS * len(likely)
    return tuple(orders[index] for index in likely[middles.astype(int)])


def leaves_at(ingredients: Ingredients, ranks: int, order: Order) -> tuple[int, ...] | None:
    """Returns the number of the leaf switch above each node of a run, as recorded at a measured rank count; None: nodes
    lie in the order of switches.
    """
    for point in ingredients.points:
        if point.ranks == ranks and point.leaves is not None:
            return point.leaves
    nodes, leaf = ingredients.nodes_of(ranks), ingredients.nodes_per_leaf
    if leaf is None or nodes <= leaf or not order[0]:
        return None
    return tuple(_reordered(np.arange(nodes) // leaf, order).tolist())


def levelled(orders: tuple[Order, ...], chances: Array) -> Array:
    """Returns chances of orders of nodes, the first axis, alike within a share: the launcher's own is none of them."""
    shares = np.array([share for share, _ in orders])
    of_order = chances.reshape(len(orders), -1).sum(axis=1)
    of_share = np.array([of_order[shares == share].mean() for share in shares])
    levels: Array = chances * (of_share / np.maximum(of_order, _NEVER))[:, None, None]
    return levels


def _reordered(by_switch: Times, order: Order) -> Times:
    """Returns leaf numbers of nodes in an order, given those in the order of switches."""
    share, seed = order
    rng = np.random.default_rng([SEED, 23, seed])
    moved = rng.permutation(len(by_switch))[: round(share * len(by_switch))]
    leaves = by_switch.copy()
    leaves[moved] = by_switch[rng.permutation(moved)]
    return leaves


def _crossings(leaves: Times) -> int:
    """Returns how many nodes of a ring have their next one below another leaf switch."""
    return int(np.count_nonzero(leaves != np.roll(leaves, -1)))

"""Prices the messages of the runs at other rank counts, by draw of algorithm, order of nodes, network costs and trend.
Draws follow the measured points, where the time of messages is the price times a level and a trend per doubling. Slopes
of lines over these points are drawn by their likelihood, with level and variance integrated out (Gelman et al.,
Bayesian Data Analysis, 3rd edition, 2013, section 14.2); without points the prior remains, and bands are wide.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product

from dlbench.analysis.causes import CAUSES
from dlbench.lazy import Array, Times, np, npt
from dlbench.perfmodels.predictions import PRIOR_POINTS, STAND_INS, free_running
from dlbench.perfmodels.schedules import Layout
from dlbench.projection.exchange import (
    FASTEST,
    Cycle,
    ExchangeMethod,
    Messages,
    NoModelError,
    Price,
    messages_of,
    method_of_run,
    price_of,
    priced_as,
)
from dlbench.projection.ingredients import Ingredients
from dlbench.specs.comm import NetworkModel
from dlbench.specs.sync import GROUPED
from dlbench.stats.multiplicity import SEED

MOST_SLOWED = 0.6
"""Largest increase of the backward pass, in seconds, for each second of exchange hidden in it; the prior is uniform up
to it. Over four models of GPUs it was 18.9 % on average, at most 40 % (arXiv 2507.03114)."""

SESSIONS = (0.004, 0.012)
"""Prior deviation of computing between sessions, as a share: if the points are of one session, and if of several."""

_RATIO = 0.002  # Expected deviation of backward over forward between points, as a share.
HOST = 0.01
"""Prior deviation of the growth of causes without a model per doubling, as a share of the step."""

_HOST_SCATTER = 0.002  # Expected deviation of these causes between points, as a share of the step.
WITHOUT_MODEL = tuple(name for name in CAUSES if name not in ("exchange", "straggler", "input", "compute"))
"""Causes without a model; they only grow over the points."""

_SLOPES = 201  # Values of a slope on the grid.
Order = tuple[float, int]  # Share of the nodes that are shuffled, and the seed.
_SORTED: Order = (0.0, 0)
_NUM_ORDERS = 8  # Orders that are priced in place of the launcher's.
_SHARES = (0.0, 0.5, 1.0)  # Sorted, half shuffled, shuffled; equally likely a priori.
_NEVER = 1e-300  # Least divisor of a chance.
_SEEDS = 100  # Random orders of each share that are compared with the recorded one.
LIBRARY = (*STAND_INS, FASTEST)  # Algorithms that a library's all-reduce may use.
RINGS = ("gloo",)  # Carriers whose all-reduce is a ring.
CHANGES = 0.25  # Prior odds that a library changes its algorithm with the ranks.
HARDLY = 0.02  # A chance below which an algorithm is left out.
ALIKE = 0.01  # Expected deviation of times from those of the right algorithm and a trend, as logarithm.
TREND = 0.1
"""Prior deviation of the logarithm of measured over priced times per doubling of the ranks: congestion, or an algorithm
that the model does not have."""

OVERLAP = (0.1, 0.7)
"""Ends of the inverse norm that combines the time of messages on the wire with the ranks' CPU time for them on shared
cores: 0 is the longer of both, 1 their sum. 16 paced ranks on two cores: 0.3 to 0.6 (bench `projection`)."""


@dataclass(frozen=True)
class Lines:
    """Slopes of lines of y over x, one for each column of y."""

    evidence: Array  # Log likelihood of each column plus a constant, shape (columns,).
    slopes: Array  # Values of a slope, ascending.
    chances: Array  # Cumulative chances of the slopes, shape (slopes, columns).

    def drawn(self, columns: npt.NDArray[np.int64]) -> Array:
        """Returns slopes of these columns by draw, shape (draws,)."""
        draws = len(columns)
        shares = np.random.default_rng([SEED, 18]).permutation((np.arange(draws) + 0.5) / draws)
        drawn = np.zeros(draws)
        for column in np.unique(columns):
            is_drawn = columns == column
            drawn[is_drawn] = np.interp(shares[is_drawn], self.chances[:, column], self.slopes)
        return drawn


def lines(x: Array, y: Array, slopes: Array, prior: Array, expected: float) -> Lines:
    """Returns lines through points with x of shape (points,), y of shape (points, columns). `slopes`, `prior`: values
    of a slope and logs of their chances; `expected`: variance of the error, with the weight of `PRIOR_POINTS` points.
    """
    x, y = x - x.sum() / max(1, len(x)), y - y.sum(axis=0) / max(1, len(y))
    squares = (y**2).sum(axis=0) - 2 * slopes[:, None] * (x @ y) + slopes[:, None] ** 2 * (x @ x)
    total = PRIOR_POINTS * expected + np.maximum(0.0, squares)
    freedom = PRIOR_POINTS + max(0, len(x) - 1)
    logs = prior[:, None] - freedom / 2 * np.log(total)
    chances = np.exp(logs - logs.max(axis=0))
    evidence = np.log(chances.sum(axis=0)) + logs.max(axis=0)
    return Lines(evidence, slopes, np.cumsum(chances, axis=0) / chances.sum(axis=0))


def normal_slopes(deviation: float) -> tuple[Array, Array]:
    """Returns values of a slope and the logarithms of their chances by a normal prior about 0."""
    slopes = np.linspace(-5 * deviation, 5 * deviation, _SLOPES)
    return slopes, -((slopes / deviation) ** 2) / 2


def slowed_by_hidden(ingredients: Ingredients, draws: int) -> tuple[Array, Array]:
    """Returns the slowdown of the backward pass per second of exchange hidden in it, and the deviation of computing
    between sessions (a share), both (draws,). The forward pass hides nothing, so it corrects for sessions.
    """
    forward, backward, hidden, run_variances = [], [], [], []
    for point in ingredients.points:
        runs = [run for run in point.runs if run.parts.get("forward") and run.communication_s is not None]
        if point.batch_per_rank != ingredients.anchor.batch_per_rank or len(runs) < len(point.runs):
            continue
        passes = [run.parts["forward"] for run in runs]
        forward.append(statistics.fmean(passes))
        backward.append(statistics.fmean(run.parts.get("backward", 0.0) for run in runs))
        hidden_s = [max(0.0, (run.communication_s or 0.0) - run.parts.get("exchange", 0.0)) for run in runs]
        hidden.append(statistics.fmean(hidden_s))
        if len(runs) > 1:
            run_variances.append(statistics.variance(passes) / len(runs) / forward[-1] ** 2)
    names = {run.session for run in chain.from_iterable(point.runs for point in ingredients.points)}
    one_session, several_sessions = SESSIONS
    session = one_session if len(names) == 1 else several_sessions
    rng = np.random.default_rng([SEED, 20])
    if not forward:
        return rng.uniform(0.0, MOST_SLOWED, draws), np.full(draws, session)
    common = np.array(forward) / statistics.fmean(forward)
    slopes, expected = np.linspace(0.0, MOST_SLOWED, _SLOPES), (_RATIO * statistics.fmean(backward)) ** 2
    line = lines(hidden / common, (backward / common)[:, None], slopes, np.zeros(_SLOPES), expected)
    # Runs are drawn separately, so their share of the variance is left out.
    of_runs, of_sessions = statistics.fmean(run_variances or [0.0]), session**2
    squares = PRIOR_POINTS * (of_runs + of_sessions) + ((np.log(common) - np.log(common).mean()) ** 2).sum()
    variances = squares / rng.chisquare(PRIOR_POINTS + len(common) - 1, draws) * of_sessions / (of_runs + of_sessions)
    return line.drawn(np.zeros(draws, dtype=np.int64)), np.sqrt(variances)


def host_growth(ingredients: Ingredients, draws: int) -> Array:
    """Returns the growth of causes without a model per doubling of the ranks, in seconds, shape (draws,)."""
    points = [point for point in ingredients.points if point.nodes > 1 and all(run.parts for run in point.runs)]
    if not points:
        return np.zeros(draws)
    host = []
    for point in points:
        seconds = 0.0
        for run in point.runs:
            seconds += sum(run.parts.get(name, 0.0) for name in WITHOUT_MODEL)
        host.append(seconds / len(point.runs))
    doublings = [math.log2(point.ranks / ingredients.anchor.ranks) for point in points]
    step = statistics.fmean(run.step_s for run in ingredients.anchor.runs)
    slopes, prior = normal_slopes(HOST * step)
    line = lines(np.array(doublings), np.array(host)[:, None], slopes, prior, (_HOST_SCATTER * step) ** 2)
    return line.drawn(np.zeros(draws, dtype=np.int64))


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of the messages of the runs, by draw."""

    ingredients: Ingredients
    network: NetworkModel
    run_method: ExchangeMethod
    orders: tuple[Order, ...]  # Orders of nodes below leaf switches, equally likely.
    algorithms: tuple[str, ...]  # Algorithms that the runs may have used.
    order_indexes: npt.NDArray[np.int64]  # Index of the order, by draw.
    algorithm_indexes: npt.NDArray[np.int64]  # Index of the algorithm, by draw.
    rows: npt.NDArray[np.int64]  # Index of the network's draw of costs, by draw.
    trend: Array  # Logarithm of the factor on times per doubling of the ranks, by draw.
    crowding: float  # CPU time of messages over time on the wire at the anchor, if nodes share cores.

    @classmethod
    def of(cls, ingredients: Ingredients, draws: int, names: Sequence[str] = LIBRARY) -> Costs | None:
        """Returns the costs; None without a recorded exchange. `names`: of a library. Raises `NoModelError`."""
        network, result = ingredients.network, ingredients.exchange
        if network is None or result is None or ingredients.anchor.ranks == 1:
            return None
        run_method = method_of_run(result, ingredients.engine)
        algorithm = priced_as(run_method)
        # A library chooses its algorithm, but Gloo's all-reduce is a ring.
        if algorithm != "ring" or result.carrier in RINGS:
            names = (algorithm,)
        costs = cls(
            ingredients=ingredients,
            network=_with_uplinks(ingredients, network),
            run_method=run_method,
            orders=orders_of(ingredients),
            algorithms=tuple(names),
            order_indexes=np.zeros(draws, dtype=np.int64),
            algorithm_indexes=np.zeros(draws, dtype=np.int64),
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
        if costs.crowding:  # Fitted costs include some of it, so their errors are not a trend.
            doublings, errors = doublings[:0], errors[:0]
        slopes, prior = normal_slopes(TREND)
        line = lines(doublings, errors.reshape(len(doublings), math.prod(errors.shape[1:])), slopes, prior, ALIKE**2)
        chances = np.exp(line.evidence - line.evidence.max()).reshape(errors.shape[1:])
        chances = levelled(costs.orders, chances)
        if FASTEST in missed:
            chances[:, list(missed).index(FASTEST)] *= CHANGES
        # Hardly possible algorithms are left out, so that they are never named.
        by_algorithm = chances.sum(axis=(0, 2)) / chances.sum()
        chances[:, by_algorithm < HARDLY] = 0.0
        columns = np.random.default_rng([SEED, 16]).choice(chances.size, draws, p=chances.ravel() / chances.sum())
        order_indexes, algorithm_indexes, rows = np.unravel_index(columns, chances.shape)
        standing = np.flatnonzero(by_algorithm >= HARDLY)
        return replace(
            costs,
            algorithms=tuple(list(missed)[number] for number in standing),
            order_indexes=order_indexes,
            algorithm_indexes=np.searchsorted(standing, algorithm_indexes),
            rows=rows,
            trend=line.drawn(columns),
        )

    def elsewhere(self, ingredients: Ingredients) -> Costs | None:
        """Returns the costs on another system, whose trend is not known."""
        if ingredients.network is None or ingredients.exchange is None:
            return None
        network = _with_uplinks(ingredients, ingredients.network)
        trend = self.trend
        if network != self.network:
            trend = trend - np.median(trend)
        orders = orders_of(ingredients)
        return replace(
            self,
            ingredients=ingredients,
            network=network,
            run_method=replace(self.run_method, group_size=ingredients.exchange.group_size),
            orders=orders,
            order_indexes=np.random.default_rng([SEED, 24]).integers(0, len(orders), len(self.order_indexes)),
            rows=self.rows % max(1, len(network.draws)),
            trend=trend,
        )

    def _missed(self) -> tuple[Array, Array]:
        """Returns doublings from the anchor, (points,), and log measured over priced times, (points, orders, rows)."""
        doublings, missed = [], []
        for point in self.ingredients.points:
            times = [run.communication_s for run in point.runs if run.communication_s]
            if point.nodes > 1 and len(times) == len(point.runs):
                backward = np.array([np.mean([run.parts.get("backward", 0.0) for run in point.runs])])
                messages = self.messages(point.ranks, None, {"backward": backward}, 1.0)
                prices = self._prices(point.ranks, None)
                doublings.append(math.log2(point.ranks / self.ingredients.anchor.ranks))
                costs = [self._rows(sum(map(price, messages.sizes), np.zeros(1))) for price in prices]
                missed.append(np.log(np.mean(times) / np.array(costs)))
        num_rows = max(1, len(self.network.draws))
        return np.array(doublings), np.array(missed).reshape(-1, len(self.orders), num_rows)

    def _rows(self, price: Array) -> Array:
        """Returns a price by draw of the network's costs; by the fitted costs if there are no draws."""
        return price[1:] if self.network.draws else price

    def names(self, method: ExchangeMethod | None) -> tuple[str, ...]:
        algorithm = priced_as(method or self.run_method)
        if method is None or method.exchange == self.run_method.exchange:
            return self.algorithms
        return (algorithm,)

    def _layout(self, ranks: int, method: ExchangeMethod | None, order: Order) -> Layout:
        method, full, leaf = method or self.run_method, self.ingredients.per_node, self.ingredients.nodes_per_leaf
        group = method.group_size if method.exchange in GROUPED else full
        if full % group:
            raise NoModelError(f"groups of {group} ranks do not divide the {full} ranks of a node")
        leaf_size = leaves = None
        if leaf and ranks > full:
            leaf_size = leaf * full
            if self.network.beyond is not None:
                leaves = leaves_at(self.ingredients, ranks, order)
        node = min(ranks, full)
        return Layout(ranks=ranks, group_size=min(ranks, group), leaf_size=leaf_size, node_size=node, leaves=leaves)

    def _prices(self, ranks: int, method: ExchangeMethod | None) -> list[Price]:
        """Returns the price by each algorithm for each order of nodes; orders of equal layout share them."""
        prices: list[Price] = []
        by_layout: dict[Layout, list[Price]] = {}
        for order in self.orders:
            layout = self._layout(ranks, method, order)
            if layout not in by_layout:
                by_layout[layout] = [
                    price_of(self.network, layout, method or self.run_method, name) for name in self.names(method)
                ]
            prices += by_layout[layout]
        return prices

    def is_order_open(self, ranks: int) -> bool:
        """Returns whether it is open if the nodes of a run are in the order of leaf switches."""
        layouts = [self._layout(ranks, None, order) for order in self.orders]
        is_in_order = np.array([layout.leaves is None for layout in layouts])
        chance = float(np.mean(is_in_order[self.order_indexes]))
        return HARDLY < chance < 1 - HARDLY

    def messages(
        self, ranks: int, method: ExchangeMethod | None, computing: Mapping[str, Array], scale: float
    ) -> Messages:
        """Returns the messages of a step: those of the runs, or those fused at that many ranks. `scale`: of costs."""
        ingredients, result = self.ingredients, self.ingredients.exchange
        assert result is not None
        fusion = (method or self.run_method).fusion
        run_fusion = result.fusion_rule
        is_other_count = ranks != ingredients.anchor.ranks
        if fusion is None and is_other_count and run_fusion is not None and run_fusion.rule == "mgwfbp":
            fusion = run_fusion
        cycle = None
        if ingredients.engine == "horovod" and result.by == "backend" and result.gradients:
            threshold = ingredients.fusion_threshold_bytes
            if fusion is not None:
                threshold = fusion.bytes
            if threshold is not None and (fusion is None or fusion.by == "library"):
                cycle = Cycle(threshold_bytes=threshold, cycle_s=ingredients.cycle_s or 0.0)
        price = self._prices(ranks, method)[0]

        def seconds(size: float) -> float:
            return float(price(size)[0]) * scale

        backward = float(np.median(computing["backward"]))
        return messages_of(result, fusion, seconds, ranks, backward_s=backward, cycle=cycle)

    def drawn(self, ranks: int, method: ExchangeMethod | None, messages: Messages) -> list[Array]:
        """Returns the seconds of each message by draw."""
        prices, names, draws = self._prices(ranks, method), self.names(method), len(self.algorithm_indexes)
        algorithm = self.algorithm_indexes
        if names != self.algorithms:
            algorithm = np.zeros_like(algorithm)
        longer = np.array([free_running(name, ranks, draws) for name in names])[algorithm, np.arange(draws)]
        longer *= np.exp(self.trend * math.log2(ranks / self.ingredients.anchor.ranks))
        norms = 1 / np.random.default_rng([SEED, 26]).uniform(*OVERLAP, draws)
        # Messages take longer if ranks of all nodes share cores.
        share = self.crowding * ranks / self.ingredients.anchor.ranks
        longer *= (1 + share**norms) ** (1 / norms)
        picks = len(names) * self.order_indexes + algorithm  # Prices are ordered by order of nodes, then by algorithm.
        seconds = []
        for size in messages.sizes:
            rows = np.array([self._rows(price(size)) for price in prices])
            seconds.append(longer * rows[picks, self.rows])
        return seconds


def _crowding(ingredients: Ingredients) -> float:
    """Returns the CPU time of messages over their wire time at the anchor if all nodes share cores, else 0."""
    anchor, cores, first = ingredients.anchor, ingredients.shared_cores, ingredients.points[0]
    times = [run.communication_s for run in anchor.runs if run.communication_s]
    if cores is None or anchor.cpu_s is None or len(times) < len(anchor.runs):
        return 0.0
    alone_s = 0.0 if first is anchor else first.cpu_s or 0.0
    cores_s = max(0.0, anchor.cpu_s - alone_s) * anchor.ranks / cores
    norm = 2 / sum(OVERLAP)
    wire_s = max(0.0, statistics.fmean(times) ** norm - cores_s**norm) ** (1 / norm)
    share: float = cores_s / max(wire_s, cores_s)
    return share


def _with_uplinks(ingredients: Ingredients, network: NetworkModel) -> NetworkModel:
    """Returns the network with a level beyond leaves if only their taper is known: as `across`, with fewer links."""
    leaf, taper = ingredients.nodes_per_leaf, ingredients.leaf_taper
    if network.beyond is not None or network.across is None or leaf is None or taper is None:
        return network
    links = max(1, round((network.across.links or ingredients.per_node) * leaf / taper))
    beyond = network.across.model_copy(update={"links": links})
    columns, width = 2 * sum(len(level.pieces) for level in network.levels.values()), 2 * len(beyond.pieces)
    drawn = tuple((*draw[:columns], *draw[columns - width : columns], *draw[columns:]) for draw in network.draws)
    return network.model_copy(update={"beyond": beyond, "draws": drawn})


def orders_of(ingredients: Ingredients) -> tuple[Order, ...]:
    """Returns equally likely orders of nodes, from sorted to shuffled, with as many crossings as the recorded order."""
    if ingredients.nodes_per_leaf is None:
        return (_SORTED,)
    orders = list(product(_SHARES, range(_SEEDS)))
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
    """Returns the index of each node's leaf switch, recorded or by `order`; None: nodes are in order of switches."""
    for point in ingredients.points:
        if point.ranks == ranks and point.leaves is not None:
            return point.leaves
    nodes, leaf = ingredients.nodes_of(ranks), ingredients.nodes_per_leaf
    if leaf is None or nodes <= leaf or not order[0]:
        return None
    return tuple(_reordered(np.arange(nodes) // leaf, order).tolist())


def levelled(orders: tuple[Order, ...], chances: Array) -> Array:
    """Returns chances of orders of nodes, the first axis, made equal within a share of shuffled nodes."""
    shares = np.array([share for share, _ in orders])
    of_order = chances.reshape(len(orders), -1).sum(axis=1)
    of_share = np.array([of_order[shares == share].mean() for share in shares])
    levels: Array = chances * (of_share / np.maximum(of_order, _NEVER))[:, None, None]
    return levels


def _reordered(by_switch: Times, order: Order) -> Times:
    share, seed = order
    rng = np.random.default_rng([SEED, 23, seed])
    moved = rng.permutation(len(by_switch))[: round(share * len(by_switch))]
    leaves = by_switch.copy()
    leaves[moved] = by_switch[rng.permutation(moved)]
    return leaves


def _crossings(leaves: Times) -> int:
    """Returns how many nodes of a ring have their next one below another leaf switch."""
    return int(np.count_nonzero(leaves != np.roll(leaves, -1)))

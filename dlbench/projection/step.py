"""The step at rank counts that were not measured: the equations of a projection, for all draws at once.

Of the largest measured point, the anchor, with its account by causes (`dlbench.analysis.causes`): In input, F forward,
B backward, U optimizer, H all causes without a model; A = In + F + B. At p ranks, with c_j the price of message j, and
beta_j when it is ready as a share of the backward pass,

    B(p)  = B + kappa (G(p) - G(anchor))                      G: hidden exchange, sum of rho c_j less X
    S(p)  = straggler + A (L(p) - L(anchor))                  L: lateness of the slowest node (`nodes`)
    a_j   = (In + F + beta_j B) (1 + S / A)                   when message j is ready on the slowest rank
    s_j   = max(a_j, e_{j-1}),  e_j = s_j + rho c_j(p)
    X(p)  = max(0, e_J - (A + S))                             what shows behind the backward pass
    E(p)  = max(0, X(p) + exchange - X(anchor))
    T(p)  = A + U + H + S(p) + E(p) + I(p)                    I: waiting for storage

rho = communication / sum of c_j at the anchor (where the run does not say it: such that X is the measured exchange).
kappa is what computing takes longer for each second of exchange hidden in it: its slope over the measured points, with a
prior (`_slowed`). So at the anchor all parts are the account's, whatever the models say of it, and they only say what changes from there.
Under strong scaling A is scaled by the own work at the batch that a rank then has.

c_j is the price of the network's fitted costs, by an algorithm that may stand for the library's own: one whose times
over the measured rank counts have the shape of the measured ones. What is left of that shape, the trend, goes on, as
congestion does: costs grow by exp(trend log2(p / anchor)) more.

A draw has its own runs, network costs, algorithm, order of nodes, nodes, and error of the model; these seeds are fixed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dlbench.analysis.causes import CAUSES
from dlbench.lazy import Array, np, npt
from dlbench.perfmodels.extrapolation import PRIOR_POINTS, Miss, ModelError, free_running, model_error
from dlbench.perfmodels.predictions import STAND_INS
from dlbench.perfmodels.schedules import Layout
from dlbench.projection.batch import own_work
from dlbench.projection.exchange import (
    AS_IT_RAN,
    FASTEST,
    Cycle,
    Messages,
    NoModelError,
    Price,
    Way,
    bisected,
    last_end,
    last_stretch,
    messages_of,
    price_of,
    priced_as,
    taken_apart,
    way_of,
)
from dlbench.projection.ingredients import Ingredients, PointFigures, RunFigures, Supply
from dlbench.projection.ledger import LEAST_ROWS
from dlbench.projection.nodes import lateness
from dlbench.projection.placement import Order, leaves_at, levelled, orders_of
from dlbench.projection.points_only import DRAWS, points_only
from dlbench.projection.projected import PARTS, Band, Flag, HeldOut, Part, Projection, Refused, Target
from dlbench.projection.refusals import (
    LEAST_EXPLAINED,
    MIN_POINTS,
    SCALE,
    SMALL,
    UNEXPLAINED,
    flagged,
    flags,
    reasons,
    refused,
)
from dlbench.report.wording import percent
from dlbench.specs.comm import NetworkModel
from dlbench.specs.sync import GROUPED, fusion_bytes
from dlbench.stats.pairing import LEAST_RUNS, SEED, stretch
from dlbench.units import format_bytes, format_seconds

_ENDS = (1e-3, 1e3)  # Of a scale of costs that is looked for.
LIBRARY = (*STAND_INS, FASTEST)  # What a library's all-reduce may be.
RINGS = ("gloo",)  # Carriers whose all-reduce is a ring.
CHANGES = (
    0.25  # How likely it is beforehand that a library changes its algorithm with the ranks, over that it keeps one.
)
HARDLY = 0.02  # A chance below which an algorithm is left out.
ALIKE = 0.01  # Deviation of times from those of the right algorithm and a trend, as logarithm, that is expected.
STEP_SCALE = 0.002
"""Error of a projected step per square root of a doubling before any was seen. Less than `PRIOR_SCALE`, which is of
costs of messages alone: these are part of a step, and what they miss is drawn by itself (`_trend`). With 0.03, 90 %
bands are 1.8 times as wide as an oracle's and hold 96 to 99 % (`make bench AREA=truth.projection`)."""
SLOWED = 0.19
"""Mean, before any was seen, of the seconds that computing takes longer for each second of exchange hidden in it: over
GPUs of five kinds 18.9 % on average, at most 40 % (arXiv 2507.03114). The prior is exponential."""
TREND = 0.1
"""Deviation, before any was seen, of what messages take longer with each doubling of the ranks than their costs say, as
logarithm: congestion, or an algorithm of which the model knows nothing."""
_OVERLAP = (0.1, 0.7)
"""Ends of the inverse norm that joins the time of messages on the wire with that of their ranks' work on shared cores: 0
is the longer of both, 1 their sum. Of 16 paced ranks on two cores, 0.3 to 0.6 (`make bench AREA=projection`)."""
_SLOPES = 201  # Values that a slope may have, between its ends.
HOST = 0.01
"""Deviation, before any was seen, of what the causes without a model grow by with each doubling, a share of the step."""
_HOST_SCATTER = 0.002  # Of these from point to point, a share of the step, that is expected.
SESSIONS = 0.004  # Deviation of computing from session to session, a share of it, before any was seen.
_HIDDEN_ROUNDS = 3  # Until what is hidden and what it slows down agree.
_MODELLED = ("exchange", "straggler", "input", "compute")  # Causes that have a model; the others stay as they are.


def project(
    ingredients: Ingredients,
    ranks: Sequence[int],
    *,
    way: Way | None = None,
    misses: Sequence[Miss] = (),
    there: Ingredients | None = None,
    draws: int = DRAWS,
) -> Projection:
    """What these rank counts would do, or why nothing is said of them; equal ingredients give equal answers.

    `way`: another way of exchanging gradients than that of the runs. `there`: the same ingredients with the nodes,
    leaves and network of another system (`dlbench.projection.spec_machine.elsewhere`), for targets alone. `misses`: of
    earlier projections of the system, by its ledger.
    """
    place = there or ingredients
    model: _Model | Refused | None = None
    held_out: list[HeldOut] = []
    seen = list(misses)
    if not place.is_series and not all(reasons(place, count) for count in ranks):
        model = _model(ingredients, draws)
    if isinstance(model, _Model):
        for one, miss in _held_out(model):
            held_out.append(one)
            seen.append(miss)
        if there is not None:
            costs_there = model.costs and model.costs.elsewhere(there)
            model = replace(model, ingredients=there, costs=costs_there, is_home=False)
    error = model_error(seen, prior_scale=STEP_SCALE, prior_points=0.0 if len(misses) >= LEAST_ROWS else PRIOR_POINTS)
    changes, of_all = [], []
    if way is not None:
        groups = f", groups of {way.group_size} ranks" if way.exchange in GROUPED else ""
        density = f", density {way.topk_density:g}" if way.topk_density else ""
        changes.append(f"exchange {way.exchange}{groups}, fusion {way.fusion}, wire {way.wire}{density}")
    if there is not None:
        changes.append(f"nodes, leaves and network of {there.system}; computing as measured on {ingredients.system}")
        costs = there.network
        by = "no costs" if costs is None else costs.transport
        if costs is not None and costs.num_points:  # A data sheet has none.
            by += f" ({costs.num_points} points)"
        of_all.append(flagged("F8", system=ingredients.system, there=there.system, by=by))
    targets: list[Target] = []
    not_told: list[Refused] = []
    for count in ranks:
        why = reasons(place, count)
        if isinstance(model, Refused) and not why:
            why = (model,)
        points = None if changes else points_only(ingredients, count, draws=draws)
        if isinstance(model, _Model) and not why:
            try:
                found = model.at(count, error, way)
            except NoModelError as problem:
                why = (refused("R8", count, what=str(problem)),)
            else:
                if points is not None:
                    second = Band.of(points.step_s)
                    found = replace(
                        found, second=second, is_disputed=found.doublings > 0 and _is_apart(found.step, second)
                    )
                targets.append(found)
                continue
        if points is None:
            not_told += why
        else:
            cause = "; ".join(one.text for one in why) or "nothing else is known"
            remedy = "; ".join(one.remedy for one in why) or "Measure larger rank counts"
            alone = flagged("F7", law=points.law, why=cause, remedy=remedy)
            told = (alone, *points.flags, *flags(ingredients, count, by="points"))
            targets.append(_target(ingredients, count, points.step_s, points.error, {}, told))
    return Projection(
        digest=ingredients.digest,
        anchor_ranks=ingredients.anchor.ranks,
        anchor_nodes=ingredients.anchor.nodes,
        changes=tuple(changes),
        targets=tuple(targets),
        # What is refused of all targets is said once.
        refused=tuple(dict.fromkeys(not_told)),
        held_out=tuple(held_out),
        flags=tuple(of_all),
        cost_scale=statistics.median(model.rho.tolist()) if isinstance(model, _Model) else 1.0,
    )


def _is_apart(one: Band, other: Band) -> bool:
    """Whether two middle 80 % have nothing in common."""
    (low, high), (least, most) = one.middle(80), other.middle(80)
    return high < least or most < low


def _held_out(model: _Model) -> list[tuple[HeldOut, Miss]]:
    """Every point from the third on, projected from those below it: from their runs and nodes, by the same network and
    the algorithms that all points leave open.

    What runs, costs and nodes scatter is drawn by itself in every projection, so it counts as scatter of the miss.
    """
    ingredients, found = model.ingredients, []
    names = LIBRARY if model.costs is None else model.costs.algorithms
    for place in range(2, len(ingredients.points)):
        point, known = ingredients.points[place], ingredients.points[:place]
        nodes, supply, batch = ingredients.nodes, ingredients.supply, known[-1].batch_per_rank
        changed: dict[str, object] = {
            "points": known,
            "ranks_per_node": ingredients.per_node,
            "nodes": nodes and nodes.model_copy(update={"hosts": nodes.hosts[: known[-1].nodes]}),
            # What more nodes showed of storage is not known below; messages and scatter of steps stay the anchor's.
            "supply": supply if supply is not None and (supply.nodes or math.inf) <= known[-1].nodes else None,
        }
        if ingredients.scaling == "strong":
            changed["batches"] = tuple(one for one in ingredients.batches if batch and one.batch_per_rank >= batch)
        below = ingredients.model_copy(update=changed)
        less = None if reasons(below, point.ranks) else _model(below, len(model.rho), names)
        if not isinstance(less, _Model):
            continue
        try:
            told = less.at(point.ranks, model_error((), prior_scale=0.0), None)
        except NoModelError:
            continue
        steps = [run.step_s for run in point.runs]
        one = HeldOut(
            ranks=point.ranks,
            anchor_ranks=known[-1].ranks,
            doublings=told.doublings,
            projected_s=told.step.median,
            measured_s=statistics.fmean(steps),
        )
        low, high = np.quantile(np.log(told.drawn["step"]), [0.159, 0.841])  # One standard deviation of a normal one.
        scatter = ((high - low) / 2) ** 2
        if len(steps) > 1:
            scatter += statistics.variance(steps) / len(steps) / one.measured_s**2
        error = -math.log1p(one.error)
        found.append((one, Miss(error=error, doublings=one.doublings, scatter=math.sqrt(scatter))))
    return found


def _run_weights(runs: Sequence[RunFigures], draws: int, seed: int) -> Array:
    """How much each run counts in each draw, shape (draws, runs); rows sum to 1. Sessions are drawn with replacement,
    and runs within them; of fewer sessions than `LEAST_RUNS` only runs. Stretched as those of `dlbench.stats.pairing`.
    """
    names = sorted({run.session for run in runs})
    members = [[place for place, run in enumerate(runs) if run.session == name] for name in names]
    if len(names) < LEAST_RUNS:
        members = [list(range(len(runs)))]
    count = len(members)
    # Points that share their sessions draw the same of them.
    sessions = np.random.default_rng([SEED, 12]).multinomial(count, [1 / count] * count, draws)
    rng = np.random.default_rng([SEED, 13, seed])
    centre, drawn = np.zeros(len(runs)), np.zeros((draws, len(runs)))
    for place, own in enumerate(members):
        picks = rng.multinomial(len(own), [1 / len(own)] * len(own), draws) / len(own)
        drawn[:, own] = picks * sessions[:, [place]] / count
        centre[own] = 1 / len(own) / count
    units = count if count > 1 else len(runs)
    weights: Array = centre + (stretch(units) if units > 1 else 0.0) * (drawn - centre)
    return weights


@dataclass(frozen=True, kw_only=True)
class _Costs:
    """What messages of the runs cost, by draw."""

    ingredients: Ingredients
    network: NetworkModel
    ran: Way
    orders: tuple[Order, ...]  # Orders of nodes below leaf switches, equally likely.
    algorithms: tuple[str, ...]  # That may stand for the exchange of the runs.
    picks: npt.NDArray[np.int64]  # Which of them in which order, by draw: order x number of algorithms + algorithm.
    rows: npt.NDArray[np.int64]  # Which draw of the network's costs, by draw; 0: the fitted costs.
    trend: Array  # Logarithm of what messages take longer with each doubling of the ranks, by draw.
    crowding: float  # CPU time of messages over their time on the wire at the anchor, where nodes share cores; else 0.

    @classmethod
    def of(cls, ingredients: Ingredients, draws: int, names: Sequence[str] = LIBRARY) -> _Costs | None:
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
            algorithms=names,
            picks=np.zeros(draws, dtype=np.int64),
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
        slopes = np.linspace(-5 * TREND, 5 * TREND, _SLOPES)
        line = _line(
            doublings,
            errors.reshape(len(doublings), math.prod(errors.shape[1:])),
            slopes,
            -((slopes / TREND) ** 2) / 2,
            ALIKE**2,
        )
        chances = np.exp(line.evidence - line.evidence.max()).reshape(errors.shape[1:])
        chances = levelled(costs.orders, chances)
        if FASTEST in missed:
            chances[:, list(missed).index(FASTEST)] *= CHANGES
        # What is hardly possible is left out, and so never named.
        by_algorithm = chances.sum(axis=(0, 2)) / chances.sum()
        chances[:, by_algorithm < HARDLY] = 0.0
        columns = np.random.default_rng([SEED, 16]).choice(chances.size, draws, p=chances.ravel() / chances.sum())
        order, algorithm, rows = np.unravel_index(columns, chances.shape)
        standing = np.flatnonzero(by_algorithm >= HARDLY)
        picks = order * len(standing) + np.searchsorted(standing, algorithm)
        algorithms = tuple(list(missed)[number] for number in standing)
        return replace(costs, algorithms=algorithms, picks=picks, rows=rows, trend=line.drawn(columns))

    def elsewhere(self, there: Ingredients) -> _Costs | None:
        """The same on another system: how its network's costs go on is not known."""
        if there.network is None or there.exchange is None:
            return None
        network = _with_uplinks(there, there.network)
        trend = self.trend if network == self.network else self.trend - np.median(self.trend)
        ran = replace(self.ran, group_size=there.exchange.group_size)
        orders = orders_of(there)
        placed = np.random.default_rng([SEED, 24]).integers(0, len(orders), len(self.picks))
        picks = placed * len(self.algorithms) + self.picks % len(self.algorithms)
        rows = self.rows % max(1, len(network.draws))
        return replace(
            self, ingredients=there, network=network, ran=ran, orders=orders, picks=picks, rows=rows, trend=trend
        )

    def _missed(self) -> tuple[Array, Array]:
        """Returns doublings from the anchor, shape (points,), of points on several nodes whose runs say how long messages
        were under way, and the logarithm of that over what they cost, shape (points, orders, rows of costs). Raises
        `NoModelError`: no such algorithm.
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

    def _crowded(self, ranks: int, norms: Array) -> Array:
        """Returns what messages take longer because ranks of all nodes share cores (1), by draw."""
        share = self.crowding * ranks / self.ingredients.anchor.ranks
        longer: Array = (1 + share**norms) ** (1 / norms)
        return longer

    def _rows(self, price: Array) -> Array:
        """Returns a price by draw of the network's costs; by the fitted costs where there are none."""
        return price[1:] if self.network.draws else price

    def names(self, way: Way | None) -> tuple[str, ...]:
        """What stands for a way of exchanging."""
        own = priced_as(way or self.ran)
        return self.algorithms if way is None or way.exchange == self.ran.exchange else (own,)

    def _layout(self, ranks: int, way: Way | None, order: Order) -> Layout:
        """Raises `NoModelError`: groups that no node holds."""
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

    def _prices(self, ranks: int, way: Way | None) -> list[Price]:
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
        chance = float(np.mean(is_in_order[self.picks // len(self.algorithms)]))
        return HARDLY < chance < 1 - HARDLY

    def messages(self, ranks: int, way: Way | None, computing: Mapping[str, Array], scale: float) -> Messages:
        """The messages of a step: those of the runs, or what the engine fuses at that many ranks. `scale`: of costs."""
        found, result = self.ingredients, self.ingredients.exchange
        assert result is not None
        fusion = (way or self.ran).fusion
        if fusion == AS_IT_RAN and result.fusion == "own:mgwfbp" and ranks != found.anchor.ranks:
            fusion = "mgwfbp"
        cycle = None
        if found.engine == "horovod" and result.by == "backend" and result.gradients:
            threshold = found.fusion_threshold_bytes if fusion == AS_IT_RAN else fusion_bytes(fusion)
            if threshold is not None and not fusion.startswith("own:"):
                cycle = Cycle(threshold_bytes=threshold, cycle_s=found.cycle_s or 0.0)
        price = self._prices(ranks, way)[0]
        backward = float(np.median(computing["backward"]))
        return messages_of(
            result, fusion, lambda size: float(price(size)[0]) * scale, ranks, backward_s=backward, cycle=cycle
        )

    def drawn(self, ranks: int, way: Way | None, messages: Messages) -> list[Array]:
        """Seconds of each message by draw, as the network has them."""
        prices, names, draws = self._prices(ranks, way), self.names(way), len(self.picks)
        order, algorithm = np.divmod(self.picks, len(self.algorithms))
        if names != self.algorithms:
            algorithm = np.zeros_like(algorithm)
        longer = np.array([free_running(name, ranks, draws) for name in names])[algorithm, np.arange(draws)]
        longer *= np.exp(self.trend * math.log2(ranks / self.ingredients.anchor.ranks))
        norms = 1 / np.random.default_rng([SEED, 26]).uniform(*_OVERLAP, draws)
        longer *= self._crowded(ranks, norms)
        picks, rows = len(names) * order + algorithm, self.rows
        return [
            longer * np.array([self._rows(price(size)) for price in prices])[picks, rows] for size in messages.sizes
        ]

    def by_level(
        self, ranks: int, way: Way | None, messages: Messages, costs: Sequence[Array], computing: Mapping[str, Array]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """By level of the network, of the last busy stretch: its seconds in the middle of the draws, and the most flows
        that a link carries at once. `costs`: of messages.
        """
        taken, ready = ([float(np.median(one)) for one in all_of] for all_of in (costs, _ready(messages, computing)))
        first = last_stretch(ready, taken)
        layout = self._layout(ranks, way, self.orders[len(self.orders) // 2])
        levels: dict[str, float] = {}
        phi: dict[str, float] = {}
        for size, seconds in zip(messages.sizes[first:], taken[first:], strict=True):
            apart = taken_apart(self.network, layout, way or self.ran, self.names(way)[0], size)
            whole = apart.seconds(self.network)
            for level, part in apart.by_level(self.network).items():
                levels[level] = levels.get(level, 0.0) + seconds * part / whole
            phi |= {level: max(flows, phi.get(level, 0.0)) for level, flows in apart.phi.items()}
        return levels, phi


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
    norm = 2 / sum(_OVERLAP)
    wire_s = max(0.0, statistics.fmean(times) ** norm - cores_s**norm) ** (1 / norm)
    return cores_s / max(wire_s, cores_s)


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


@dataclass(frozen=True, kw_only=True)
class _Model:
    """What all targets share: the draws of the anchor, and what anchors the models there."""

    ingredients: Ingredients  # Of the targets' system.
    costs: _Costs | None  # Of messages there; None: nothing is exchanged.
    figures: Mapping[str, Array]  # `input`, `forward`, `backward`, `optimizer`, `host`, `straggler`, `exchange`.
    late: Array  # Lateness of the slowest of the anchor's own nodes.
    rho: Array
    shown: Array  # X at the anchor, seconds.
    hidden: Array  # G at the anchor, seconds.
    slowed: Array  # kappa.
    host_growth: Array  # Seconds per doubling of the ranks.
    session: Array  # Factor between the sessions of the anchor and of a target (1).
    is_home: bool = True  # Whether targets are of the system that was measured.

    def at(self, ranks: int, error: ModelError, way: Way | None) -> Target:
        """Without its second opinion. Raises `NoModelError`: the exchange has no model."""
        found, at = self.ingredients, self.figures
        draws, anchor, nodes = len(self.rho), found.anchor, found.nodes_of(ranks)
        begun, updating = at["input"] + at["forward"] + at["backward"], at["optimizer"]
        scale = np.ones(draws)
        batch, measured = found.batch_at(ranks), anchor.batch_per_rank
        if found.scaling == "strong" and batch is not None and measured is not None and batch != measured:
            work, before = (own_work(found.batches, one, draws, (SEED, 14)) for one in (batch, measured))
            # Optimizer and host do not shrink with the batch, so what does shrinks by more than the whole.
            scale = np.maximum(0.0, 1 + (begun + updating + at["host"]) / begun * (work / before - 1))
        computing = {name: at[name] * scale for name in ("input", "forward", "backward")}
        straggler, late = at["straggler"], np.zeros(draws)
        if nodes != anchor.nodes:
            late = lateness(found.nodes, nodes, draws, slow_hosts=found.slow_hosts) - self.late
            straggler = np.maximum(0.0, straggler + begun * scale * late)
        shown = np.zeros(draws)
        whole, unknown = float(np.median(at["exchange"])), float(np.median(at["exchange"] - self.shown))
        if way is not None and unknown > (1 - LEAST_EXPLAINED) * whole:
            share = percent(1 - unknown / whole, 0)
            raise NoModelError(f"the network's costs are {share} of the measured exchange, too little for another one")
        levels: dict[str, float] = {}
        phi: dict[str, float] = {}
        if ranks > 1:
            if self.costs is None:
                raise NoModelError("an exchange of which one rank alone says nothing")
            messages = self.costs.messages(ranks, way, computing, float(np.median(self.rho)))
            costs = [one * self.rho for one in self.costs.drawn(ranks, way, messages)]
            shown = _shown(messages, costs, computing, straggler)
            alone = computing["backward"] - self.slowed * self.hidden
            for _ in range(_HIDDEN_ROUNDS):
                computing["backward"] = np.maximum(0.0, alone + self.slowed * (sum(costs) - shown))
                begun_here = sum(computing.values(), np.zeros(draws))
                straggler = np.maximum(0.0, at["straggler"] + begun_here * late)
                shown = _shown(messages, costs, computing, straggler)
            levels, phi = self.costs.by_level(ranks, way, messages, costs, computing)
        parts = {
            "compute": computing["forward"] + computing["backward"],
            "optimizer": updating,
            "input": computing["input"],
            "host": np.maximum(0.0, at["host"] + self.host_growth * math.log2(ranks / anchor.ranks)),
            "straggler": straggler,
            "exchange": np.maximum(0.0, shown + at["exchange"] - self.shown),
        }
        assert tuple(parts) == PARTS
        told = flags(found, ranks)
        if found.supply is not None and batch and measured:
            took = anchor.ranks * measured / sum(at.values(), np.zeros(draws))
            step = sum(parts.values(), np.zeros(draws))
            wait, more = _input_wait(found.supply, nodes, anchor.nodes, samples=ranks * batch, step_s=step, proven=took)
            parts["input"] = parts["input"] + wait
            told = (*told, *more)
        step = sum(parts.values(), np.zeros(draws))
        # What lies between measured points is known from both sides.
        doublings = min(abs(math.log2(ranks / point.ranks)) for point in found.points)
        factor = self.session * error.drawn(doublings, draws, (SEED, 15))
        # Nothing is faster than its computing, however far off the model may be.
        ended = np.maximum(step * factor, parts["compute"] + computing["input"] + updating)
        factor = ended / step
        point = found.measured_at(ranks) if way is None and self.is_home else None
        if point is not None:  # What was measured needs no model.
            weights = _run_weights(point.runs, draws, point.ranks)
            ended, factor = weights @ np.array([run.step_s for run in point.runs]), np.ones(draws)
            account = _account(point.runs, weights)
            account["compute"] = account["forward"] + account["backward"]
            whole_step = sum(account[name] for name in PARTS)
            is_known = all(run.parts for run in point.runs)
            parts = {name: account[name] * ended / whole_step for name in PARTS} if is_known else {}
        else:
            if unknown > SMALL * float(np.median(sum(at.values(), np.zeros(draws)))):
                told = (*told, flagged("F10", seconds=format_seconds(unknown)))
            if self.costs is not None and self.costs.is_order_open(ranks):
                told = (*told, flagged("F12"))
        return replace(
            _target(found, ranks, ended, factor, parts, told),
            exchange_by_level=tuple(levels.items()),
            phi=tuple(phi.items()),
            algorithms=() if self.costs is None or ranks == 1 else self.costs.names(way),
        )


@dataclass(frozen=True)
class _Line:
    """Slopes of lines of y over x, one for each column of y."""

    evidence: Array  # Logarithm of how likely a column is, but for a constant, shape (columns,).
    slopes: Array  # Values that a slope may have, ascending.
    chances: Array  # Of each, summed up, shape (slopes, columns).
    variances: Array  # That the errors about a line of each slope are expected to have, shape (slopes, columns).

    def drawn(self, columns: npt.NDArray[np.int64]) -> Array:
        """Returns slopes of these columns by draw, shape (draws,)."""
        draws = len(columns)
        shares = np.random.default_rng([SEED, 18]).permutation((np.arange(draws) + 0.5) / draws)
        found = np.zeros(draws)
        for column in np.unique(columns):
            is_drawn = columns == column
            found[is_drawn] = np.interp(shares[is_drawn], self.chances[:, column], self.slopes)
        return found


def _line(x: Array, y: Array, slopes: Array, prior: Array, expected: float) -> _Line:
    """Returns lines through points of x, shape (points,), and y, shape (points, columns).

    Their error is normal of unknown variance, expected to be `expected` with the weight of `PRIOR_POINTS` points
    (Gelman et al., section 14.2); level and variance are integrated out. `slopes`, `prior`: values that a slope may
    have, and the logarithm of how likely each was before.
    """
    x, y = x - x.sum() / max(1, len(x)), y - y.sum(axis=0) / max(1, len(y))
    squares = (y**2).sum(axis=0) - 2 * slopes[:, None] * (x @ y) + slopes[:, None] ** 2 * (x @ x)
    total = PRIOR_POINTS * expected + np.maximum(0.0, squares)
    freedom = PRIOR_POINTS + max(0, len(x) - 1)
    logs = prior[:, None] - freedom / 2 * np.log(total)
    chances = np.exp(logs - logs.max(axis=0))
    evidence = np.log(chances.sum(axis=0)) + logs.max(axis=0)
    return _Line(evidence, slopes, np.cumsum(chances, axis=0) / chances.sum(axis=0), total / freedom)


def _ready(messages: Messages, computing: Mapping[str, Array]) -> list[Array]:
    """When messages are ready on a median rank, after the start of the step; all at the end of the backward pass where
    that was not recorded.
    """
    shares = [1.0] * len(messages.sizes)
    if messages.ready_s is not None and messages.backward_s > 0:
        shares = [min(1.0, one / messages.backward_s) for one in messages.ready_s]
    return [computing["input"] + computing["forward"] + share * computing["backward"] for share in shares]


def _shown(messages: Messages, costs: Sequence[Array], computing: Mapping[str, Array], straggler: Array) -> Array:
    """What of the exchange shows behind the backward pass of the slowest rank, seconds by draw."""
    begun = computing["input"] + computing["forward"] + computing["backward"]
    ready = [one * (1 + straggler / begun) for one in _ready(messages, computing)]
    return np.maximum(0.0, last_end(ready, costs) - (begun + straggler))


def _account(runs: Sequence[RunFigures], weights: Array) -> dict[str, Array]:
    """Seconds of a step by draw: what the model knows of by its own name, all else as `host`."""

    def part(name: str) -> Array:
        found: Array = np.maximum(0.0, weights @ np.array([run.parts.get(name, 0.0) for run in runs]))
        return found

    figures = {name: part(name) for name in ("input", "forward", "backward", "optimizer", "straggler", "exchange")}
    figures["host"] = sum((part(name) for name in CAUSES if name not in _MODELLED), np.zeros(len(weights)))
    return figures


def _model(ingredients: Ingredients, draws: int, names: Sequence[str] = LIBRARY) -> _Model | Refused:
    """The models anchored at the largest measured point; refused where the network's costs cannot be its (R5, R8).
    `names`: algorithms that may stand for a library's own.
    """
    anchor = ingredients.anchor
    weights = _run_weights(anchor.runs, draws, anchor.ranks)

    def drawn(values: Sequence[float]) -> Array:
        found: Array = np.maximum(0.0, weights @ np.array(values))
        return found

    figures = _account(anchor.runs, weights)
    shown, rho, hidden = np.zeros(draws), np.ones(draws), np.zeros(draws)
    try:
        costs = _Costs.of(ingredients, draws, names)
        if costs is not None:
            messages = costs.messages(anchor.ranks, None, figures, 1.0)
            prices = costs.drawn(anchor.ranks, None, messages)

            def shown_of(scale: Array) -> Array:
                return _shown(messages, [one * scale for one in prices], figures, figures["straggler"])

            rho = _calibrated(prices, anchor, drawn, shown_of, figures["exchange"])
            shown = shown_of(rho)
            hidden = rho * sum(prices) - shown
            scale = float(np.median(rho))
            whole, off = (float(np.median(one)) for one in (figures["exchange"], figures["exchange"] - shown))
            step = float(np.median(sum(figures.values(), np.zeros(draws))))
            if not 1 / SCALE <= scale <= SCALE:
                return refused("R5", None, what=f"they must be multiplied by {scale:.3g} to give the measured exchange")
            if abs(off) > max(UNEXPLAINED * whole, SMALL * step):
                told = f"{format_seconds(whole)} of a step are exchange, by them {format_seconds(whole - off)}"
                return refused("R5", None, what=told)
    except NoModelError as problem:
        return refused("R8", None, what=str(problem))
    late = np.full(draws, lateness(ingredients.nodes, anchor.nodes, draws, is_measured=True).mean())
    slowed, scatter = _slowed(ingredients, draws)
    return _Model(
        ingredients=ingredients,
        costs=costs,
        figures=figures,
        late=late,
        rho=rho,
        shown=shown,
        hidden=hidden,
        slowed=slowed,
        host_growth=_host_growth(ingredients, draws),
        session=np.exp(math.sqrt(2) * scatter * np.random.default_rng([SEED, 21]).standard_normal(draws)),
    )


def _slowed(ingredients: Ingredients, draws: int) -> tuple[Array, Array]:
    """Returns how many seconds computing takes longer for each second of exchange hidden in it, and by how much it differs
    from session to session (standard deviation, a share of it), both of shape (draws,).

    Forward and backward are taken to be linear in the hidden seconds over the points of one batch. Where these do not
    tell, the prior of `SLOWED` is left.
    """
    computing, hidden, variances = [], [], []
    points = [point for point in ingredients.points if point.nodes > 2]
    if len(points) < MIN_POINTS:  # On two nodes the middle of all ranks follows the late one.
        points = list(ingredients.points)
    for point in points:
        runs = [run for run in point.runs if run.parts and run.communication_s is not None]
        if point.batch_per_rank != ingredients.anchor.batch_per_rank or len(runs) < len(point.runs):
            continue
        passes = [run.parts.get("forward", 0.0) + run.parts.get("backward", 0.0) for run in runs]
        computing.append(statistics.fmean(passes))
        hidden.append(statistics.fmean(_hidden(run) for run in runs))
        if len(runs) > 1:
            variances.append(statistics.variance(passes) / len(runs))
    if not computing:
        return np.random.default_rng([SEED, 20]).exponential(SLOWED, draws), np.full(draws, SESSIONS)
    middle = statistics.fmean(computing)
    expected = statistics.fmean(variances or [0.0]) + (SESSIONS * middle) ** 2
    slopes = np.linspace(0.0, 1.0, _SLOPES)
    line = _line(np.array(hidden), np.array(computing)[:, None], slopes, -slopes / SLOWED, expected)
    slowed = line.drawn(np.zeros(draws, dtype=np.int64))
    freedom = PRIOR_POINTS + len(computing) - 1
    chi2 = np.random.default_rng([SEED, 20]).chisquare(freedom, draws)
    scatter: Array = np.sqrt(np.interp(slowed, slopes, line.variances[:, 0]) * freedom / chi2) / middle
    return slowed, scatter


def _host_growth(ingredients: Ingredients, draws: int) -> Array:
    """Returns how many seconds the causes without a model grow with each doubling of the ranks over the points on several
    nodes, shape (draws,).
    """
    points = [point for point in ingredients.points if point.nodes > 1 and all(run.parts for run in point.runs)]
    if not points:
        return np.zeros(draws)
    host = [
        float(_account(point.runs, np.full((1, len(point.runs)), 1 / len(point.runs)))["host"][0]) for point in points
    ]
    doublings = [math.log2(point.ranks / ingredients.anchor.ranks) for point in points]
    step = statistics.fmean(run.step_s for run in ingredients.anchor.runs)
    slopes = np.linspace(-5 * HOST * step, 5 * HOST * step, _SLOPES)
    prior = -((slopes / (HOST * step)) ** 2) / 2
    line = _line(np.array(doublings), np.array(host)[:, None], slopes, prior, (_HOST_SCATTER * step) ** 2)
    return line.drawn(np.zeros(draws, dtype=np.int64))


def _hidden(run: RunFigures) -> float:
    """Returns the exchange of a run that computing hid, seconds per step."""
    return max(0.0, (run.communication_s or 0.0) - run.parts.get("exchange", 0.0))


def _calibrated(
    prices: Sequence[Array],
    anchor: PointFigures,
    drawn: Callable[[Sequence[float]], Array],
    shown: Callable[[Array], Array],
    measured: Array,
) -> Array:
    """rho: what costs are multiplied with so that messages are under way as long as measured, by draw; where the runs
    do not say how long that was, so that the model shows the measured exchange, and 1 where both show nothing.
    """
    under_way = [run.communication_s for run in anchor.runs if run.communication_s is not None]
    if len(under_way) == len(anchor.runs):
        ratio: Array = drawn(under_way) / sum(prices)
        return ratio
    low, _ = bisected(lambda scale: shown(np.exp(scale)), measured, *map(math.log, _ENDS))
    is_right = np.isclose(shown(np.ones_like(measured)), measured, rtol=1e-9, atol=0.0)
    return np.where(is_right, 1.0, np.exp(low))


def _target(
    ingredients: Ingredients, ranks: int, step: Array, error: Array, parts: Mapping[str, Array], told: tuple[Flag, ...]
) -> Target:
    """Of a step by draw, and what follows from it."""
    base, batch = ingredients.points[0], ingredients.batch_at(ranks)

    def efficiency(count: int, own: int | None, first: Array | float, seconds: Array | float) -> Array:
        work = base.ranks / count if ingredients.scaling == "strong" else 1.0
        # By samples where they are known: runs of weak scaling may be asked for the strong one.
        return np.asarray(first / seconds * (own / base.batch_per_rank if own and base.batch_per_rank else work))

    means = [statistics.fmean(run.step_s for run in point.runs) for point in ingredients.points]
    measured = [
        float(efficiency(point.ranks, point.batch_per_rank, means[0], mean))
        for point, mean in zip(ingredients.points, means, strict=True)
    ]
    first = _run_weights(base.runs, len(step), base.ranks) @ np.array([run.step_s for run in base.runs])
    return Target(
        ranks=ranks,
        nodes=ingredients.nodes_of(ranks),
        batch_per_rank=batch,
        doublings=math.log2(ranks / ingredients.anchor.ranks),
        step=Band.of(step),
        throughput=None if batch is None else Band.of(ranks * batch / step),
        # No rank is faster beside others, unless that was measured.
        efficiency=Band.of(np.minimum(max(1.0, *measured), efficiency(ranks, batch, first, step))),
        parts=tuple(Part(name=name, seconds=Band.of(seconds)) for name, seconds in parts.items()),
        model_error=Band.of(error),
        exchange_by_level=(),
        algorithms=(),
        flags=told,
        second=None,
        is_disputed=False,
        drawn={"step": step, "error": error, **parts},
    )


def _input_wait(
    supply: Supply, nodes: int, anchor_nodes: int, *, samples: int, step_s: Array, proven: Array
) -> tuple[Array, tuple[Flag, ...]]:
    """What a step is longer because storage does not deliver, seconds by draw, and what to know of it. Only where it
    was seen to give no more for more demand is its rate a limit; elsewhere more may come than was asked for.

    `samples`: of a step, all ranks; `step_s`: the step without that wait; `proven`: samples/s that the anchor's runs
    took, which cannot be more than there is.
    """
    size, rate, none = supply.sample_bytes, supply.bytes_per_s, np.zeros_like(step_s)
    if size is None or rate is None:
        return none, ()
    share, more = (nodes / (supply.nodes or nodes), nodes / anchor_nodes) if supply.is_per_node else (1.0, 1.0)
    there, wanted = np.maximum(rate * share, proven * size * more), samples * size
    if supply.is_saturated:
        return np.maximum(0.0, wanted / there - step_s), ()
    asked, limit = float(np.median(wanted / step_s)), float(np.median(there))
    if asked <= limit:
        return none, ()
    needed, seen = (f"{format_bytes(round(one))}/s" for one in (asked, limit))
    nodes_seen = supply.nodes or "some"
    return none, (flagged("F5", needed=needed, proven=seen, nodes=nodes_seen, longest=wanted / limit),)

"""The step at rank counts that were not measured: the equations of a projection, for all draws at once.

Of the largest measured point, the anchor, with its account by causes (`dlbench.analysis.causes`): In input, F forward,
B backward, U optimizer, H all causes without a model; A = In + F + B. At p ranks, with c_j the price of message j, and
beta_j when it is ready as a share of the backward pass,

    S(p)  = straggler + A (L(p) - L(anchor))                  L: lateness of the slowest node (`nodes`)
    a_j   = (In + F + beta_j B) (1 + S / A)                   when message j is ready on the slowest rank
    s_j   = max(a_j, e_{j-1}),  e_j = s_j + rho c_j(p)
    X(p)  = max(0, e_J - (A + S))                             what shows behind the backward pass
    E(p)  = max(0, X(p) + exchange - X(anchor))
    T(p)  = A + U + H + S(p) + E(p) + I(p)                    I: waiting for storage

rho = communication / sum of c_j at the anchor (where the run does not say it: such that X is the measured exchange).
So at the anchor all parts are the account's, whatever the models say of it, and they only say what changes from there.
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
from dlbench.perfmodels.extrapolation import PRIOR_POINTS, PRIOR_SCALE, Miss, ModelError, free_running, model_error
from dlbench.perfmodels.predictions import STAND_INS
from dlbench.perfmodels.schedules import Layout
from dlbench.projection.batch import own_work
from dlbench.projection.exchange import (
    AS_IT_RAN,
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
from dlbench.projection.placement import Order, leaves_at, orders_of
from dlbench.projection.points_only import DRAWS, points_only
from dlbench.projection.projected import PARTS, Band, Flag, HeldOut, Part, Projection, Refused, Target
from dlbench.projection.refusals import LEAST_EXPLAINED, SCALE, SMALL, UNEXPLAINED, flagged, flags, reasons, refused
from dlbench.report.wording import percent
from dlbench.specs.comm import NetworkModel
from dlbench.specs.sync import GROUPED, fusion_bytes
from dlbench.stats.pairing import LEAST_RUNS, SEED, stretch
from dlbench.units import format_bytes, format_seconds

_ENDS = (1e-3, 1e3)  # Of a scale of costs that is looked for.
RINGS = ("gloo",)  # Carriers whose all-reduce is a ring.
_ALIKE = 0.01  # Deviation of times from a model's, as logarithm, below which algorithms are not told apart.
_ORDERLY = 0.1  # The same of orders of nodes below leaf switches, whose crossings look much like congestion.
STEP_SCALE = 0.015
"""Error of a projected step per square root of a doubling before any was seen. Less than `PRIOR_SCALE`, which is of
costs of messages alone: these are part of a step, and what they miss is drawn by itself (`_trend`). With 0.03, 90 %
bands are 1.8 times as wide as an oracle's and hold 96 to 99 % (`make bench AREA=truth.projection`)."""
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
            words = "; ".join(f"{one.text} ({one.remedy})" for one in why) or "nothing else is known"
            told = (flagged("F7", why=words), *flags(ingredients, count, by="points"))
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
    """Every point from the third on, projected from those below it: from their runs and nodes, by the same network. Not
    where these leave more algorithms open than all points do, because then they know less of it than the projection.

    What runs, costs and nodes scatter is drawn by itself in every projection. So a miss is what is left of the
    difference when their share in it is taken away; else it would be in the bands twice.
    """
    ingredients, found = model.ingredients, []
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
        less = None if reasons(below, point.ranks) else _model(below, len(model.rho))
        if not isinstance(less, _Model):
            continue
        try:
            told = less.at(point.ranks, model_error((), prior_scale=0.0), None)
        except NoModelError:
            continue
        if model.costs is not None and not set(told.algorithms) <= set(model.costs.algorithms):
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
        left = math.sqrt(max(0.0, math.log1p(one.error) ** 2 - scatter))
        found.append((one, Miss(error=left, doublings=one.doublings)))
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
    picks: npt.NDArray[np.int64]  # Which of them, by draw.
    trend: Array  # Logarithm of what messages take longer with each doubling of the ranks, by draw.

    @classmethod
    def of(cls, ingredients: Ingredients, draws: int) -> _Costs | None:
        """None where nothing is known of an exchange. Raises `NoModelError`: that of the runs has no model."""
        network, result = ingredients.network, ingredients.exchange
        if network is None or result is None or ingredients.anchor.ranks == 1:
            return None
        ran = way_of(result, ingredients.engine)
        own = priced_as(ran)
        # A library chooses by itself; Gloo's all-reduce is a ring.
        names = STAND_INS if own == "ring" and result.carrier not in RINGS else (own,)
        picks, costly = np.zeros(draws, dtype=np.int64), _with_uplinks(ingredients, network)
        costs = cls(
            ingredients=ingredients,
            network=costly,
            ran=ran,
            algorithms=names,
            orders=orders_of(ingredients),
            picks=picks,
            trend=np.zeros(draws),
        )
        missed = {}
        for name in names:
            try:
                missed[name] = replace(costs, algorithms=(name,))._missed()
            except NoModelError:
                if len(names) == 1:
                    raise
        scatter = {}  # Of each algorithm, by order of nodes.
        for name, (_, errors) in missed.items():
            scatter[name] = np.zeros(len(costs.orders))
            if len(errors):
                scatter[name] = np.abs(errors - errors.mean(axis=0)).mean(axis=0)
        least = min(float(one.min()) for one in scatter.values())
        standing = tuple(name for name in missed if scatter[name].min() <= 2 * least + _ALIKE)
        likely = np.flatnonzero(np.min([scatter[name] for name in standing], axis=0) <= 2 * least + _ORDERLY)
        costs = replace(costs, orders=tuple(costs.orders[place] for place in likely))
        picks = np.random.default_rng([SEED, 16]).integers(0, len(standing), draws)
        trend = np.zeros(draws)
        for pick, name in enumerate(standing):
            doublings, errors = missed[name]
            for placed, order in enumerate(likely):
                is_drawn = (picks == pick) & (costs.placed == placed)
                trend[is_drawn] = _trend(doublings, errors[:, order], draws)[is_drawn]
        return replace(costs, algorithms=standing, picks=picks, trend=trend)

    def elsewhere(self, there: Ingredients) -> _Costs | None:
        """The same on another system: how its network's costs go on is not known."""
        if there.network is None or there.exchange is None:
            return None
        network = _with_uplinks(there, there.network)
        trend = self.trend if network == self.network else self.trend - np.median(self.trend)
        ran = replace(self.ran, group_size=there.exchange.group_size)
        return replace(self, ingredients=there, network=network, ran=ran, orders=orders_of(there), trend=trend)

    @property
    def placed(self) -> npt.NDArray[np.int64]:
        """Which order of nodes is drawn, by draw."""
        order: npt.NDArray[np.int64] = np.random.default_rng([SEED, 24]).permutation(len(self.picks)) % len(self.orders)
        return order

    def _missed(self) -> tuple[Array, Array]:
        """Of each point on several nodes whose runs say how long messages were under way: doublings from the anchor,
        and the logarithm of that over what they cost by the fitted costs, by order of nodes. Raises `NoModelError`: no
        such algorithm.
        """
        doublings, missed = [], []
        for point in self.ingredients.points:
            times = [run.communication_s for run in point.runs if run.communication_s]
            if point.nodes > 1 and len(times) == len(point.runs):
                backward = np.array([np.mean([run.parts.get("backward", 0.0) for run in point.runs])])
                messages = self.messages(point.ranks, None, {"backward": backward}, 1.0)
                prices = self._prices(point.ranks, None)
                doublings.append(math.log2(point.ranks / self.ingredients.anchor.ranks))
                costs = np.array([sum(float(price(size)[0]) for size in messages.sizes) for price in prices])
                missed.append(np.log(np.mean(times) / costs))
        return np.array(doublings), np.array(missed).reshape(-1, len(self.orders))

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
        """Returns whether nodes of a run may lie in the order of leaf switches, and may lie out of it."""
        return len({self._layout(ranks, None, order).leaves is None for order in self.orders}) > 1

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
        prices, draws, known = self._prices(ranks, way), len(self.picks), len(self.network.draws)
        # Row 0 of a price is the fitted costs, the others are their draws.
        rows = 1 + np.random.default_rng([SEED, 19]).integers(0, known, draws) if known else np.zeros(draws, dtype=int)
        names = self.names(way)
        picks = self.picks if len(names) == len(self.algorithms) else 0 * self.picks
        longer = np.array([free_running(name, ranks, draws) for name in names])[picks, np.arange(draws)]
        longer *= np.exp(self.trend * math.log2(ranks / self.ingredients.anchor.ranks))
        picks = picks + len(names) * self.placed
        return [longer * np.array([price(size) for price in prices])[picks, rows] for size in messages.sizes]

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
        straggler = at["straggler"]
        if nodes != anchor.nodes:
            late = lateness(found.nodes, nodes, draws) - self.late
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
            levels, phi = self.costs.by_level(ranks, way, messages, costs, computing)
        parts = {
            "compute": computing["forward"] + computing["backward"],
            "optimizer": updating,
            "input": computing["input"],
            "host": at["host"],
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
        factor = error.drawn(doublings, draws, (SEED, 15))
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


def _trend(doublings: Array, missed: Array, draws: int) -> Array:
    """What messages take longer with each doubling than their costs have it, as logarithm, by draw: congestion, or an
    algorithm of which the model knows nothing. Of the changes from point to point, normal with unknown mean and
    variance (Gelman et al., section 3.3), with one change of 0 and the prior of the model's error before any was seen.
    """
    changes = np.diff(missed) / np.diff(doublings)
    if not len(changes):
        return np.zeros(draws)
    n, mean = len(changes), changes.mean()
    freedom = PRIOR_POINTS + n
    total = PRIOR_POINTS * PRIOR_SCALE**2 + ((changes - mean) ** 2).sum() + n / (n + 1) * mean**2
    rng = np.random.default_rng([SEED, 18])
    sigma = np.sqrt(total / rng.chisquare(freedom, draws) / (n + 1))
    found: Array = n * mean / (n + 1) + sigma * rng.standard_normal(draws)
    return found


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


def _model(ingredients: Ingredients, draws: int) -> _Model | Refused:
    """The models anchored at the largest measured point; refused where the network's costs cannot be its (R5, R8)."""
    anchor = ingredients.anchor
    weights = _run_weights(anchor.runs, draws, anchor.ranks)

    def drawn(values: Sequence[float]) -> Array:
        found: Array = np.maximum(0.0, weights @ np.array(values))
        return found

    figures = _account(anchor.runs, weights)
    shown, rho = np.zeros(draws), np.ones(draws)
    try:
        costs = _Costs.of(ingredients, draws)
        if costs is not None:
            messages = costs.messages(anchor.ranks, None, figures, 1.0)
            prices = costs.drawn(anchor.ranks, None, messages)

            def shown_of(scale: Array) -> Array:
                return _shown(messages, [one * scale for one in prices], figures, figures["straggler"])

            rho = _calibrated(prices, anchor, drawn, shown_of, figures["exchange"])
            shown = shown_of(rho)
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
    return _Model(ingredients=ingredients, costs=costs, figures=figures, late=late, rho=rho, shown=shown)


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
    flag = flagged("F5", needed=needed, proven=seen, nodes=supply.nodes or "some")
    if_all = f"; if that is all there is, a step takes {wanted / limit:.4g} s"
    return none, (Flag(code=flag.code, text=flag.text + if_all),)

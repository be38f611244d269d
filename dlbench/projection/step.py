"""The step at rank counts that were not measured: the equations of a projection, for all draws at once.

Of the largest measured point, the anchor, with its account by causes (`dlbench.analysis.causes`): In input, F forward,
B backward, U optimizer, H all causes without a model; A = In + F + B. At p ranks, with c_j the price of message j, and
beta_j when it is ready as a share of the backward pass,

    S(p)  = straggler + A (L(p) - L(anchor))                  L: lateness of the slowest node (`nodes`)
    a_j   = (In + F + beta_j B) (1 + S / A)                   when message j is ready on the slowest rank
    s_j   = max(a_j, e_{j-1}),  e_j = s_j + rho c_j(p)
    X(p)  = max(0, e_J - (A + S))                             what shows behind the backward pass
    E(p)  = max(0, X(p) + exchange - X(anchor))
    T(p)  = A + U + H + S(p) + E(p) + I(p)                    I: waiting for storage (`input`)

rho = communication / sum of c_j at the anchor (where the run does not say it: such that X is the measured exchange).
So at the anchor all parts are the account's, whatever the models say of it, and they only say what changes from there.
Under strong scaling A is scaled by the own work at the batch that a rank then has.

c_j is the price of the network's fitted costs, by an algorithm that may stand for the library's own: one whose times
over the measured rank counts have the shape of the measured ones. What is left of that shape, the trend, goes on, as
congestion does: costs grow by exp(trend log2(p / anchor)) more.

A draw has its own runs, network costs, algorithm, nodes, and error of the model; these seeds are fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dlbench.analysis.causes import CAUSES
from dlbench.perfmodels.extrapolation import PRIOR_POINTS, PRIOR_SCALE, Miss, ModelError, model_error
from dlbench.perfmodels.schedules import Layout
from dlbench.projection.batch import own_work
from dlbench.projection.exchange import (
    AS_IT_RAN,
    Cycle,
    Messages,
    NoModelError,
    Price,
    Way,
    last_end,
    last_stretch,
    messages_of,
    price_of,
    priced_as,
    taken_apart,
)
from dlbench.projection.ingredients import Ingredients, PointFigures, RunFigures
from dlbench.projection.input import delivered, input_wait
from dlbench.projection.nodes import lateness
from dlbench.projection.points_only import points_only
from dlbench.projection.projected import PARTS, Band, Flag, HeldOut, Part, Projection, Refused, Target, is_apart
from dlbench.projection.refusals import LEAST_EXPLAINED, SCALE, SMALL, UNEXPLAINED, flagged, flags, refusal, refused
from dlbench.records.exchange import ExchangeResult
from dlbench.report.wording import percent
from dlbench.specs.comm import NetworkModel
from dlbench.specs.sync import GROUPED, fusion_bytes
from dlbench.stats.pairing import LEAST_RUNS, SEED, stretch
from dlbench.units import format_seconds

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]

DRAWS = 1000
_HALVINGS = 50  # Of a scale of costs, in logarithms between the two ends below: beyond what is printed.
_ENDS = (1e-3, 1e3)
STANDING = ("ring", "double-binary-tree", "recursive-halving-doubling", "hierarchical")
"""What may stand for a library's own all-reduce, as far as its measured times at several rank counts fit."""
RINGS = ("gloo",)  # Carriers whose all-reduce is a ring.
_ALIKE = 0.01  # Deviation of times from a model's, as logarithm, below which algorithms are not told apart.
STEP_SCALE = 0.015
"""Error of a projected step per square root of a doubling before any was seen. Less than `PRIOR_SCALE`, which is of
costs of messages alone: these are part of a step, and what they miss is drawn by itself (`_trend`). With 0.03, 90 %
bands are 1.8 times as wide as an oracle's and hold 96 to 99 % (`make bench AREA=truth.projection`)."""
_ENOUGH = 10  # Projections of a ledger that replace the prior of the model's error.
_MODELLED = ("exchange", "straggler", "input", "compute")  # Causes that have a model; the others stay as they are.


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A projected step by draw."""

    ranks: int
    parts: Mapping[str, Array]  # Seconds by `PARTS`; they sum to the step before the model's own error.
    error: Array  # Factor that the model's own error puts on the step.
    step: Array  # Seconds.
    exchange_by_level: tuple[tuple[str, float], ...]
    phi: tuple[tuple[str, float], ...]
    algorithms: tuple[str, ...]
    flags: tuple[Flag, ...]


def project(
    ingredients: Ingredients,
    ranks: Sequence[int],
    *,
    way: Way | None = None,
    misses: Sequence[Miss] = (),
    there: Ingredients | None = None,
    draws: int = DRAWS,
) -> Projection:
    """What these rank counts would do, or why nothing is said of them.

    `way`: another way of exchanging gradients than that of the runs. `there`: the same ingredients with the nodes,
    leaves and network of another system (`dlbench.projection.spec_machine.elsewhere`), for targets alone. `misses`: of
    earlier projections of the system, by its ledger. `draws`: how many; seeds are fixed, so that equal ingredients give
    equal answers.
    """
    place = there or ingredients
    model: _Model | Refused | None = None
    if any(refusal(place, count) is None for count in ranks):
        model = _model(ingredients, draws, there)
    held_out = _held_out(ingredients, model, draws) if isinstance(model, _Model) else ()
    seen = [Miss(error=-math.log1p(one.error), doublings=one.doublings) for one in held_out]
    if len(misses) >= _ENOUGH:
        scale = math.sqrt(sum(one.error**2 / one.doublings for one in misses) / len(misses))
        error = model_error(seen, prior_scale=scale, prior_points=len(misses))
    else:
        error = model_error([*seen, *misses], prior_scale=STEP_SCALE)
    targets, refusals = [], []
    changes = () if way is None else (f"exchange {way.exchange}, fusion {way.fusion}, wire {way.wire}",)
    if there is not None:
        changes = (
            *changes,
            f"nodes, leaves and network of {there.system}; computing as measured on {ingredients.system}",
        )
    for count in ranks:
        why = refusal(place, count)
        if why is None:
            assert model is not None
            if isinstance(model, Refused):
                why = model
            else:
                try:
                    targets.append(_target(place, model.at(count, error, way), changes, draws))
                    continue
                except NoModelError as problem:
                    why = refused("R8", count, what=str(problem))
        found = None if changes else _by_points(ingredients, count, why, draws)
        if found is None:
            refusals.append(why)
        else:
            targets.append(found)
    return Projection(
        digest=ingredients.digest,
        anchor_ranks=ingredients.anchor.ranks,
        anchor_nodes=ingredients.anchor.nodes,
        changes=changes,
        targets=tuple(targets),
        # What is refused of all targets is said once.
        refused=tuple(dict.fromkeys(refusals)),
        held_out=held_out,
        flags=() if there is None else (flagged("F8", system=ingredients.system, there=there.system, by=_by(there)),),
    )


def _by(there: Ingredients) -> str:
    return "no costs" if there.network is None else f"{there.network.transport} ({there.network.num_points} points)"


def drawn_step(
    ingredients: Ingredients, ranks: int, *, way: Way | None = None, misses: Sequence[Miss] = (), draws: int = DRAWS
) -> Drawn | Refused:
    """The draws behind one rank count by the model, with the error that `misses` show; else as `project`."""
    if (why := refusal(ingredients, ranks)) is not None:
        return why
    model = _model(ingredients, draws)
    if isinstance(model, Refused):
        return model
    try:
        return model.at(ranks, model_error(misses, prior_scale=STEP_SCALE), way)
    except NoModelError as problem:
        return refused("R8", ranks, what=str(problem))


def _held_out(ingredients: Ingredients, model: _Model, draws: int) -> tuple[HeldOut, ...]:
    """Every point from the third on, projected from those below it: from their runs and nodes, by the same network. Not
    where these leave more algorithms open than all points do, because then they know less of it than the projection.
    """
    import numpy as np

    found = []
    for place in range(2, len(ingredients.points)):
        point, known = ingredients.points[place], ingredients.points[:place]
        nodes, batch = ingredients.nodes, known[-1].batch_per_rank
        below = ingredients.model_copy(
            update={
                "points": known,
                "ranks_per_node": ingredients.per_node,
                "nodes": nodes and nodes.model_copy(update={"hosts": nodes.hosts[: known[-1].nodes]}),
                "batches": tuple(one for one in ingredients.batches if batch and one.batch_per_rank >= batch)
                if ingredients.scaling == "strong"
                else ingredients.batches,
            }
        )
        told = drawn_step(below, point.ranks, draws=draws)
        open_before = set() if isinstance(told, Refused) else set(told.algorithms)
        if not isinstance(told, Refused) and (model.costs is None or open_before <= set(model.costs.algorithms)):
            found.append(
                HeldOut(
                    ranks=point.ranks,
                    anchor_ranks=known[-1].ranks,
                    doublings=math.log2(point.ranks / known[-1].ranks),
                    projected_s=float(np.median(sum(told.parts.values()))),
                    measured_s=float(np.mean([run.step_s for run in point.runs])),
                )
            )
    return tuple(found)


def run_weights(runs: Sequence[RunFigures], draws: int, seed: int) -> Array:
    """How much each run counts in each draw, shape (draws, runs); rows sum to 1. Sessions are drawn with replacement,
    and runs within them; of fewer sessions than `LEAST_RUNS` only runs. Stretched as those of `dlbench.stats.pairing`.
    """
    import numpy as np

    names = sorted({run.session for run in runs})
    if len(names) < LEAST_RUNS:
        names, members = [""], [list(range(len(runs)))]
    else:
        members = [[place for place, run in enumerate(runs) if run.session == name] for name in names]
    units = len(names) if len(names) > 1 else len(runs)
    # Points that share their sessions draw the same of them.
    sessions = np.random.default_rng([SEED, 12]).multinomial(len(names), [1 / len(names)] * len(names), draws)
    rng = np.random.default_rng([SEED, 13, seed])
    centre, drawn = np.zeros(len(runs)), np.zeros((draws, len(runs)))
    for place, own in enumerate(members):
        picks = rng.multinomial(len(own), [1 / len(own)] * len(own), draws) / len(own)
        drawn[:, own] = picks * sessions[:, [place]] / len(names)
        centre[own] = 1 / len(own) / len(names)
    factor = stretch(units) if units > 1 else 0.0
    weights: Array = centre + factor * (drawn - centre)
    return weights


@dataclass(frozen=True, kw_only=True)
class _Costs:
    """What messages of the runs cost, by draw."""

    ingredients: Ingredients
    network: NetworkModel
    result: ExchangeResult
    ran: Way
    algorithms: tuple[str, ...]  # That may stand for the exchange of the runs.
    picks: npt.NDArray[np.int64]  # Which of them, by draw.
    rows: npt.NDArray[np.int64]  # Which costs of the network, by draw: 0 the fitted ones, then its draws.
    trend: Array  # Logarithm of what messages take longer with each doubling of the ranks, by draw.

    @classmethod
    def of(cls, ingredients: Ingredients, draws: int, home: _Costs | None = None) -> _Costs | None:
        """None where the anchor is one rank. `home`: those of the runs, where these are of another system: algorithms
        are as there, and how a network's costs go on is not known of another one. Raises `NoModelError`: the exchange
        of the runs has no model.
        """
        import numpy as np

        network, result = ingredients.network, ingredients.exchange
        if network is None or result is None or ingredients.anchor.ranks == 1:
            return None
        leaf, taper = ingredients.nodes_per_leaf, ingredients.leaf_taper
        if network.beyond is None and network.across is not None and leaf is not None and taper is not None:
            # Uplinks as fast as the nodes' links, and so many fewer of them; R3 and its flag say that it is assumed.
            links = max(1, round((network.across.links or ingredients.per_node) * leaf / taper))
            beyond = network.across.model_copy(update={"links": links})
            columns = 2 * sum(len(level.pieces) for level in network.levels.values())
            width = 2 * len(beyond.pieces)
            drawn = tuple((*one[:columns], *one[columns - width : columns], *one[columns:]) for one in network.draws)
            network = network.model_copy(update={"beyond": beyond, "draws": drawn})
        ran = Way(exchange=result.exchange, fusion=AS_IT_RAN, wire=result.wire, group_size=result.group_size)
        rng = np.random.default_rng([SEED, 16])
        known = len(network.draws)
        rows = 1 + rng.integers(0, known, draws) if known else np.zeros(draws, dtype=np.int64)
        zeros = np.zeros(draws, dtype=np.int64)
        own = priced_as(ran)
        # A library chooses by itself; Gloo's all-reduce is a ring.
        names = STANDING if own == "ring" and result.carrier not in RINGS else (own,)
        alone = {
            name: cls(
                ingredients=ingredients,
                network=network,
                result=result,
                ran=ran,
                algorithms=(name,),
                picks=zeros,
                rows=rows,
                trend=np.zeros(draws),
            )
            for name in names
        }
        if home is not None:
            trend = home.trend - (0.0 if network == home.network else np.median(home.trend))
            return replace(alone[home.algorithms[0]], algorithms=home.algorithms, picks=home.picks, trend=trend)
        missed = {}
        for name, costs in alone.items():
            try:
                missed[name] = costs._missed()
            except NoModelError:
                if len(names) == 1:
                    raise
        scatter = {
            name: float(np.mean(np.abs(one - one.mean()))) if len(one) else 0.0 for name, (_, one) in missed.items()
        }
        most = 2 * min(scatter.values()) + _ALIKE
        standing = tuple(name for name in missed if scatter.get(name, 0.0) <= most)
        picks = rng.integers(0, len(standing), draws)
        trends = [_trend(*missed[name], draws) for name in standing]
        return replace(alone[standing[0]], algorithms=standing, picks=picks, trend=np.choose(picks, trends))

    def _missed(self) -> tuple[Array, Array]:
        """Of each point on several nodes whose runs say how long messages were under way: doublings from the anchor,
        and the logarithm of that over what they cost by the fitted costs. Raises `NoModelError`: no such algorithm.
        """
        import numpy as np

        found = self.ingredients
        doublings, missed = [], []
        for point in found.points:
            times = [run.communication_s for run in point.runs if run.communication_s]
            if point.nodes > 1 and len(times) == len(point.runs):
                backward = np.array([np.mean([run.parts.get("backward", 0.0) for run in point.runs])])
                messages = self.messages(point.ranks, None, {"backward": backward}, 1.0)
                (price,) = self._prices(point.ranks, None)
                doublings.append(math.log2(point.ranks / found.anchor.ranks))
                missed.append(math.log(np.mean(times) / sum(float(price(size)[0]) for size in messages.sizes)))
        return np.array(doublings), np.array(missed)

    def _names(self, way: Way | None) -> tuple[str, ...]:
        own = priced_as(way or self.ran)
        return self.algorithms if way is None or way.exchange == self.ran.exchange else (own,)

    def _layout(self, ranks: int, way: Way | None) -> Layout:
        """Raises `NoModelError`: groups that no node holds."""
        way, full, leaf = way or self.ran, self.ingredients.per_node, self.ingredients.nodes_per_leaf
        group = way.group_size if way.exchange in GROUPED else full
        if full % group:
            raise NoModelError(f"groups of {group} ranks do not divide the {full} ranks of a node")
        leaf = leaf if ranks > full else None
        return Layout(
            ranks=ranks, group_size=min(ranks, group), leaf_size=leaf and leaf * full, node_size=min(ranks, full)
        )

    def _prices(self, ranks: int, way: Way | None) -> list[Price]:
        layout = self._layout(ranks, way)
        return [price_of(self.network, layout, way or self.ran, name) for name in self._names(way)]

    def messages(self, ranks: int, way: Way | None, computing: Mapping[str, Array], scale: float) -> Messages:
        """The messages of a step: those of the runs, or what the engine fuses at that many ranks. `scale`: of costs."""
        import numpy as np

        found, result = self.ingredients, self.result
        fusion = self.ran.fusion if way is None else way.fusion
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

    def drawn(self, ranks: int, way: Way | None, messages: Messages) -> tuple[list[Array], tuple[str, ...]]:
        """Seconds of each message by draw, as the network has them, and the algorithms that stand for it."""
        import numpy as np

        names, prices = self._names(way), self._prices(ranks, way)
        picks = self.picks if len(names) == len(self.algorithms) else 0 * self.picks
        found = []
        longer = np.exp(self.trend * math.log2(ranks / self.ingredients.anchor.ranks))
        for size in messages.sizes:
            taken = [price(size)[self.rows] for price in prices]
            found.append(longer * (taken[0] if len(taken) == 1 else np.choose(picks, taken)))
        return found, names

    def by_level(
        self, ranks: int, way: Way | None, messages: Messages, costs: Sequence[Array], computing: Mapping[str, Array]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """By level of the network, of the last busy stretch: its seconds in the middle of the draws, and the most flows
        that a link carries at once. `costs`: of messages.
        """
        import numpy as np

        middle = {name: float(np.median(one)) for name, one in computing.items()}
        taken = [float(np.median(one)) for one in costs]
        ready = [middle["input"] + middle["forward"] + share * middle["backward"] for share in _shares(messages)]
        first = last_stretch(ready, taken)
        levels: dict[str, float] = {}
        phi: dict[str, float] = {}
        for size, seconds in zip(messages.sizes[first:], taken[first:], strict=True):
            apart = taken_apart(self.network, self._layout(ranks, way), way or self.ran, self._names(way)[0], size)
            whole = apart.seconds(self.network)
            for level, part in apart.by_level(self.network).items():
                levels[level] = levels.get(level, 0.0) + seconds * part / whole
            phi |= {level: max(flows, phi.get(level, 0.0)) for level, flows in apart.phi.items()}
        return levels, phi


@dataclass(frozen=True, kw_only=True)
class _Model:
    """What all targets share: the draws of the anchor, and what anchors the models there."""

    ingredients: Ingredients  # Of the targets' system.
    costs: _Costs | None  # Of messages there; None: nothing is exchanged.
    figures: Mapping[str, Array]  # `input`, `forward`, `backward`, `optimizer`, `host`, `straggler`, `exchange`.
    late: Array  # Lateness of the slowest of the anchor's own nodes.
    rho: Array
    shown: Array  # X at the anchor, seconds.
    is_home: bool  # Whether targets are of the system that was measured.

    def at(self, ranks: int, error: ModelError, way: Way | None) -> Drawn:
        """Raises `NoModelError`: the exchange has no model."""
        import numpy as np

        found, at = self.ingredients, self.figures
        draws, anchor, nodes = len(self.rho), found.anchor, found.nodes_of(ranks)
        begun, updating = at["input"] + at["forward"] + at["backward"], at["optimizer"]
        scale = np.ones(draws)
        batch = found.batch_at(ranks)
        if found.scaling == "strong" and batch is not None and batch != anchor.batch_per_rank:
            assert anchor.batch_per_rank is not None
            seed = (SEED, 14)
            change = own_work(found.batches, batch, draws, seed) / own_work(
                found.batches, anchor.batch_per_rank, draws, seed
            )
            # Optimizer and host do not shrink with the batch, so what does shrinks by more than the whole.
            scale = np.maximum(0.0, 1 + (begun + updating + at["host"]) / begun * (change - 1))
        computing = {name: at[name] * scale for name in ("input", "forward", "backward")}
        begun = begun * scale
        straggler = at["straggler"]
        if nodes != anchor.nodes:
            late = lateness(found.nodes, nodes, draws)
            straggler = np.maximum(0.0, straggler + begun * (late - self.late))
        shown = np.zeros(draws)
        whole, unknown = float(np.median(at["exchange"])), float(np.median(at["exchange"] - self.shown))
        if way is not None and unknown > (1 - LEAST_EXPLAINED) * whole:
            share = percent(1 - unknown / whole, 0)
            raise NoModelError(f"the network's costs are {share} of the measured exchange, too little for another one")
        levels: dict[str, float] = {}
        phi: dict[str, float] = {}
        names: tuple[str, ...] = ()
        if ranks > 1:
            if self.costs is None:
                raise NoModelError("an exchange of which one rank alone says nothing")
            messages = self.costs.messages(ranks, way, computing, float(np.median(self.rho)))
            costs, names = self.costs.drawn(ranks, way, messages)
            costs = [one * self.rho for one in costs]
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
        told = flags(found, ranks)
        supply, size = found.supply, None if found.supply is None else found.supply.sample_bytes
        if supply is not None and size is not None and batch and anchor.batch_per_rank:
            taken = anchor.ranks * anchor.batch_per_rank * size / sum(at.values(), np.zeros(draws))
            there = delivered(supply, nodes, taken * (nodes / anchor.nodes if supply.is_per_node else 1.0))
            if there is not None:
                waits, more = input_wait(supply, there, ranks * batch * size, sum(parts.values(), np.zeros(draws)))
                parts["input"] = parts["input"] + waits
                told = (*told, *more)
        measured = found.measured_at(ranks) if way is None and self.is_home else None
        if measured is None and unknown > SMALL * float(np.median(sum(at.values(), np.zeros(draws)))):
            told = (*told, flagged("F10", seconds=format_seconds(unknown)))
        # What lies between measured points is known from both sides.
        doublings = min(abs(math.log2(ranks / point.ranks)) for point in found.points)
        factor = error.drawn(doublings, draws, (SEED, 15))
        step = sum(parts.values(), np.zeros(draws))
        # Nothing is faster than its computing, however far off the model may be.
        ended = np.maximum(step * factor, parts["compute"] + computing["input"] + updating)
        drawn = Drawn(
            ranks=ranks,
            parts={name: parts[name] for name in PARTS},
            error=ended / step,
            step=ended,
            exchange_by_level=tuple(levels.items()),
            phi=tuple(phi.items()),
            algorithms=names,
            flags=told,
        )
        return drawn if measured is None else replace(drawn, **_measured(measured, draws))


def _trend(doublings: Array, missed: Array, draws: int) -> Array:
    """What messages take longer with each doubling than their costs have it, as logarithm, by draw: congestion, or an
    algorithm of which the model knows nothing. Of the changes from point to point, normal with unknown mean and
    variance (Gelman et al., section 3.3), with one change of 0 and the prior of the model's error before any was seen.
    """
    import numpy as np

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


def _shares(messages: Messages) -> list[float]:
    """When messages are ready, as shares of the backward pass; at its end where that was not recorded."""
    if messages.ready_s is None or messages.backward_s <= 0:
        return [1.0] * len(messages.sizes)
    return [min(1.0, one / messages.backward_s) for one in messages.ready_s]


def _shown(messages: Messages, costs: Sequence[Array], computing: Mapping[str, Array], straggler: Array) -> Array:
    """What of the exchange shows behind the backward pass of the slowest rank, seconds by draw."""
    import numpy as np

    before, backward = computing["input"] + computing["forward"], computing["backward"]
    slower = 1 + straggler / (before + backward)
    ready = [(before + share * backward) * slower for share in _shares(messages)]
    return np.maximum(0.0, last_end(ready, costs) - (before + backward) * slower)


def _account(runs: Sequence[RunFigures], weights: Array) -> dict[str, Array]:
    """Seconds of a step by draw: what the model knows of by its own name, all else as `host`."""
    import numpy as np

    def part(name: str) -> Array:
        found: Array = np.maximum(0.0, weights @ np.array([run.parts.get(name, 0.0) for run in runs]))
        return found

    figures = {name: part(name) for name in ("input", "forward", "backward", "optimizer", "straggler", "exchange")}
    figures["host"] = sum((part(name) for name in CAUSES if name not in _MODELLED), np.zeros(len(weights)))
    return figures


def _measured(point: PointFigures, draws: int) -> dict[str, Any]:
    """Fields of a `Drawn` that a measured point has: what its runs did, and no error of a model."""
    import numpy as np

    weights = run_weights(point.runs, draws, point.ranks)
    figures = _account(point.runs, weights)
    figures["compute"] = figures["forward"] + figures["backward"]
    step = weights @ np.array([run.step_s for run in point.runs])
    whole = sum(figures[name] for name in PARTS)
    parts = {name: figures[name] * step / whole for name in PARTS} if all(run.parts for run in point.runs) else {}
    return {"parts": parts, "error": np.ones(draws), "step": step}


def _model(ingredients: Ingredients, draws: int, there: Ingredients | None = None) -> _Model | Refused:
    """The models anchored at the largest measured point; refused where the network's costs cannot be its (R5, R8).
    `there`: as of `project`.
    """
    import numpy as np

    anchor = ingredients.anchor
    weights = run_weights(anchor.runs, draws, anchor.ranks)

    def drawn(values: Sequence[float]) -> Array:
        found: Array = np.maximum(0.0, weights @ np.array(values))
        return found

    figures = _account(anchor.runs, weights)
    computing = {name: figures[name] for name in ("input", "forward", "backward")}
    step = sum(figures.values(), np.zeros(draws))
    late = np.full(draws, lateness(ingredients.nodes, anchor.nodes, draws, is_measured=True).mean())
    shown, rho = np.zeros(draws), np.ones(draws)
    try:
        costs = _Costs.of(ingredients, draws)
        elsewhere = costs if there is None else _Costs.of(there, draws, costs)
        if costs is not None:
            messages = costs.messages(anchor.ranks, None, computing, 1.0)
            prices, _ = costs.drawn(anchor.ranks, None, messages)
            rho = _calibrated(
                prices,
                anchor,
                drawn,
                lambda scale: _shown(messages, [one * scale for one in prices], computing, figures["straggler"]),
                figures["exchange"],
            )
            shown = _shown(messages, [one * rho for one in prices], computing, figures["straggler"])
            scale = float(np.median(rho))
            whole, off = (float(np.median(one)) for one in (figures["exchange"], figures["exchange"] - shown))
            if not 1 / SCALE <= scale <= SCALE:
                return refused("R5", None, what=f"they must be multiplied by {scale:.3g} to give the measured exchange")
            if abs(off) > max(UNEXPLAINED * whole, SMALL * float(np.median(step))):
                told = f"{format_seconds(whole)} of a step are exchange, by them {format_seconds(whole - off)}"
                return refused("R5", None, what=told)
    except NoModelError as problem:
        return refused("R8", None, what=str(problem))
    return _Model(
        ingredients=there or ingredients,
        costs=elsewhere,
        figures=figures,
        late=late,
        rho=rho,
        shown=shown,
        is_home=there is None,
    )


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
    import numpy as np

    under_way = [run.communication_s for run in anchor.runs if run.communication_s is not None]
    if len(under_way) == len(anchor.runs):
        ratio: Array = drawn(under_way) / sum(prices)
        return ratio
    low, high = np.full_like(measured, math.log(_ENDS[0])), np.full_like(measured, math.log(_ENDS[1]))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_above = shown(np.exp(middle)) > measured
        low, high = np.where(is_above, low, middle), np.where(is_above, middle, high)
    is_right = np.isclose(shown(np.ones_like(measured)), measured, rtol=1e-9, atol=0.0)
    return np.where(is_right, 1.0, np.exp(low))


def _target(ingredients: Ingredients, drawn: Drawn, changes: Sequence[str], draws: int) -> Target:
    points = None if changes else points_only(ingredients, drawn.ranks, draws=draws)
    second = None if points is None else Band.of(points.step_s)
    step = Band.of(drawn.step)
    return Target(
        **_rates(ingredients, drawn.ranks, drawn.step),
        step=step,
        parts=tuple(Part(name=name, seconds=Band.of(seconds)) for name, seconds in drawn.parts.items()),
        model_error=Band.of(drawn.error),
        exchange_by_level=drawn.exchange_by_level,
        phi=drawn.phi,
        algorithms=drawn.algorithms,
        flags=drawn.flags,
        second=second,
        is_disputed=second is not None and drawn.ranks > ingredients.anchor.ranks and is_apart(step, second),
    )


def _by_points(ingredients: Ingredients, ranks: int, why: Refused, draws: int) -> Target | None:
    """A target of which the model says nothing, by the points alone; None where these do not say either."""
    points = points_only(ingredients, ranks, draws=draws)
    if points is None:
        return None
    return Target(
        **_rates(ingredients, ranks, points.step_s),
        step=Band.of(points.step_s),
        parts=(),
        model_error=Band.of(points.error),
        exchange_by_level=(),
        algorithms=(),
        flags=(flagged("F7", why=why.text, remedy=why.remedy), *flags(ingredients, ranks, by="points")),
        second=None,
        is_disputed=False,
    )


def _rates(ingredients: Ingredients, ranks: int, step: Array) -> dict[str, Any]:
    """Fields of a `Target` that follow from its step."""
    import numpy as np

    base, batch = ingredients.points[0], ingredients.batch_at(ranks)

    def efficiency(count: int, seconds: Array, first: Array, own: int | None) -> Array:
        work = base.ranks / count if ingredients.scaling == "strong" else 1.0
        # By samples where they are known: runs of weak scaling may be asked for the strong one.
        return first / seconds * (own / base.batch_per_rank if own and base.batch_per_rank else work)

    def mean(point: PointFigures) -> Array:
        return np.array(np.mean([run.step_s for run in point.runs]))

    # No rank is faster beside others, unless that was measured.
    most = max(
        1.0, *(float(efficiency(one.ranks, mean(one), mean(base), one.batch_per_rank)) for one in ingredients.points)
    )
    first = run_weights(base.runs, len(step), base.ranks) @ np.array([run.step_s for run in base.runs])
    return {
        "ranks": ranks,
        "nodes": ingredients.nodes_of(ranks),
        "batch_per_rank": batch,
        "doublings": math.log2(ranks / ingredients.anchor.ranks),
        "drawn": step,
        "throughput": None if batch is None else Band.of(ranks * batch / step),
        "efficiency": Band.of(np.minimum(most, efficiency(ranks, step, first, batch))),
    }

"""The step at rank counts that were not measured: the equations of a projection, for all draws at once.

Of the largest measured point, the anchor, with its account by causes (`dlbench.analysis.causes`): In input, F forward,
B backward, U optimizer, H all causes without a model; A = In + F + B. At p ranks, with c_j the price of message j, and
beta_j when it is ready as a share of the backward pass,

    B(p)  = B + kappa (G(p) - G(anchor))                      G: hidden exchange, sum of rho c_j less X
    S(p)  = straggler + A' (L(p) - L(anchor))                 L: lateness of the slowest node (`nodes`)
    a_j   = (In + F + beta_j B) (1 + S / A)                   when message j is ready on the slowest rank
    s_j   = max(a_j, e_{j-1}),  e_j = s_j + rho c_j(p)
    X(p)  = max(0, e_J - (A + S))                             what shows behind the backward pass
    E(p)  = max(0, X(p) + exchange - X(anchor))
    T(p)  = A + U + H + S(p) + E(p) + I(p)                    I: waiting for storage

rho = communication / sum of c_j at the anchor (where the run does not say it: such that X is the measured exchange).
kappa is what the backward pass takes longer for each second of exchange hidden in it (`slopes`); A' is A where all
messages but the last one hide, as they do while a node is late. So at the anchor all parts are
the account's, whatever the models say of it, and they only say what changes from there. H grows by its slope over the
points. Under strong scaling A is scaled by the own work at the batch that a rank then has. c_j is drawn by `costs`.

A draw has its own runs, network costs, algorithm, order of nodes, nodes, and error of the model; these seeds are fixed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dlbench.lazy import Array, np
from dlbench.perfmodels.extrapolation import PRIOR_POINTS, Miss, ModelError, model_error
from dlbench.projection.batch import own_work
from dlbench.projection.costs import LIBRARY, Costs
from dlbench.projection.exchange import ExchangeMethod, Messages, NoModelError, bisected, last_end, ready_at
from dlbench.projection.ingredients import Ingredients, PointFigures, RunFigures
from dlbench.projection.ledger import LEAST_ROWS
from dlbench.projection.nodes import lateness
from dlbench.projection.points_only import DRAWS, points_only
from dlbench.projection.projected import PARTS, Band, Flag, HeldOut, Projection, Refused, StepPart, Target
from dlbench.projection.refusals import LEAST_EXPLAINED, SCALE, SMALL, UNEXPLAINED, flagged, flags, reasons, refused
from dlbench.projection.slopes import WITHOUT_MODEL, host_growth, slowed_by_hidden
from dlbench.report.wording import percent
from dlbench.specs.sync import GROUPED
from dlbench.stats.resampling import LEAST_RUNS, SEED, stretch
from dlbench.units import format_bytes, format_seconds

_ENDS = (1e-3, 1e3)  # Of a scale of costs that is looked for.
STEP_SCALE = 0.002
"""Error of a projected step per square root of a doubling before any was seen. Less than `PRIOR_SCALE`, which is of
costs of messages alone: what costs, nodes, hidden exchange, sessions and host miss is drawn by itself."""
_HIDDEN_ROUNDS = 4  # Until what is hidden and what it slows down agree.


def project(
    ingredients: Ingredients,
    ranks: Sequence[int],
    *,
    way: ExchangeMethod | None = None,
    misses: Sequence[Miss] = (),
    there: Ingredients | None = None,
    draws: int = DRAWS,
) -> Projection:
    """Returns the projection to these rank counts, or why there is none; equal ingredients give equal answers.

    `way`: another way of exchanging gradients than that of the runs. `there`: the same ingredients with the nodes,
    leaves and network of another system (`dlbench.projection.spec_machine.elsewhere`), for targets alone. `misses`: of
    earlier projections of the system, by its ledger.
    """
    target_system = there or ingredients
    model: AnchoredModel | Refused | None = None
    held_out: tuple[HeldOut, ...] = ()
    prior_points = 0.0 if len(misses) >= LEAST_ROWS else PRIOR_POINTS
    if not target_system.is_series and not all(reasons(target_system, count) for count in ranks):
        model = anchored(ingredients, draws)
    if isinstance(model, AnchoredModel):
        held_out, missed = _held_out(model)
        misses = (*misses, *missed)
        if there is not None:
            costs_there = model.costs and model.costs.elsewhere(there)
            model = replace(model, ingredients=there, costs=costs_there, is_home=False)
    error = model_error(misses, prior_scale=STEP_SCALE, prior_points=prior_points)
    changes = _changes(ingredients, there, way)
    system_flags: tuple[Flag, ...] = ()
    if there is not None:
        by = "no costs" if there.network is None else there.network.transport
        if there.network is not None and there.network.num_points:  # A data sheet has none.
            by += f" ({there.network.num_points} points)"
        system_flags = (flagged("F8", system=ingredients.system, there=there.system, by=by),)
    targets: list[Target] = []
    refusals: list[Refused] = []
    for count in ranks:
        why = reasons(target_system, count)
        if isinstance(model, Refused) and not why:
            why = (model,)
        if isinstance(model, AnchoredModel) and not why:
            try:
                targets.append(model.at(count, error, way))
                continue
            except NoModelError as problem:
                why = (refused("R8", count, what=str(problem)),)
        by_points = None if changes else _by_points(ingredients, count, why, draws)
        if by_points is None:
            refusals += why
        else:
            targets.append(by_points)
    return Projection(
        digest=ingredients.digest,
        anchor_ranks=ingredients.anchor.ranks,
        anchor_nodes=ingredients.anchor.nodes,
        changes=changes,
        targets=tuple(targets),
        # What is refused of all targets is said once.
        refused=tuple(dict.fromkeys(refusals)),
        held_out=held_out,
        flags=system_flags,
        cost_scale=statistics.median(model.rho.tolist()) if isinstance(model, AnchoredModel) else 1.0,
    )


def _changes(ingredients: Ingredients, there: Ingredients | None, way: ExchangeMethod | None) -> tuple[str, ...]:
    """Returns what differs from what was measured, in words."""
    changes = []
    if way is not None:
        groups = f", groups of {way.group_size} ranks" if way.exchange in GROUPED else ""
        density = f", density {way.topk_density:g}" if way.topk_density else ""
        changes.append(f"exchange {way.exchange}{groups}, fusion {way.fusion or 'as it ran'}, wire {way.wire}{density}")
    if there is not None:
        changes.append(f"nodes, leaves and network of {there.system}; computing as measured on {ingredients.system}")
    return tuple(changes)


def _by_points(ingredients: Ingredients, ranks: int, why: Sequence[Refused], draws: int) -> Target | None:
    """Returns what the points alone say of a rank count, of which no model does, and `why`; None: they do not say."""
    points = points_only(ingredients, ranks, draws=draws)
    if points is None:
        return None
    cause = "; ".join(refusal.text for refusal in why) or "nothing else is known"
    remedy = "; ".join(refusal.remedy for refusal in why) or "Measure larger rank counts"
    alone = flagged("F7", law=points.law, why=cause, remedy=remedy[:1].upper() + remedy[1:])
    target_flags = (alone, *points.flags, *flags(ingredients, ranks, by="points"))
    return _target(ingredients, ranks, points.step_s, points.error, {}, target_flags)


def _held_out(model: AnchoredModel) -> tuple[tuple[HeldOut, ...], tuple[Miss, ...]]:
    """Returns every point from the third on as projected from those below it, and by how much that missed it."""
    points, misses = [], []
    for number in range(2, len(model.ingredients.points)):
        point, below = model.ingredients.points[number], _below(model, number)
        if below is None:
            continue
        try:
            target = below.at(point.ranks, model_error((), prior_scale=0.0), None)
        except NoModelError:
            continue
        steps = [run.step_s for run in point.runs]
        held_out = HeldOut(
            ranks=point.ranks,
            anchor_ranks=below.ingredients.anchor.ranks,
            doublings=target.doublings,
            projected_s=target.step.median,
            measured_s=statistics.fmean(steps),
        )
        # What runs, costs and nodes scatter is drawn by itself in every projection, so it is scatter of the miss.
        low, high = np.quantile(np.log(target.drawn["step"]), [0.159, 0.841])  # One standard deviation of a normal one.
        variance = ((high - low) / 2) ** 2
        if len(steps) > 1:
            variance += statistics.variance(steps) / len(steps) / held_out.measured_s**2
        points.append(held_out)
        error = -math.log1p(held_out.error)
        misses.append(Miss(error=error, doublings=held_out.doublings, scatter=math.sqrt(variance)))
    return tuple(points), tuple(misses)


def _below(model: AnchoredModel, number: int) -> AnchoredModel | None:
    """Returns the model by the first `number` points: by their runs and nodes, by the same network and the algorithms
    that all points leave open; None: there is none.
    """
    ingredients = model.ingredients
    points, nodes, supply = ingredients.points[:number], ingredients.nodes, ingredients.supply
    batch = points[-1].batch_per_rank
    changed: dict[str, object] = {
        "points": points,
        "ranks_per_node": ingredients.per_node,
        "nodes": nodes and nodes.model_copy(update={"hosts": nodes.hosts[: points[-1].nodes]}),
        # What more nodes showed of storage is not known below; messages and scatter of steps stay the anchor's.
        "supply": supply if supply is not None and (supply.nodes or math.inf) <= points[-1].nodes else None,
    }
    if ingredients.scaling == "strong":
        changed["batches"] = tuple(work for work in ingredients.batches if batch and work.batch_per_rank >= batch)
    below = ingredients.model_copy(update=changed)
    if reasons(below, ingredients.points[number].ranks):
        return None
    names = LIBRARY if model.costs is None else model.costs.algorithms
    smaller = anchored(below, len(model.rho), names)
    return smaller if isinstance(smaller, AnchoredModel) else None


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
class AnchoredModel:
    """What all targets share: the draws of the anchor, and what anchors the models there."""

    ingredients: Ingredients  # Of the targets' system.
    costs: Costs | None  # Of messages there; None: nothing is exchanged.
    figures: Mapping[str, Array]
    """Seconds of the anchor's step: `input`, `forward`, `backward`, `optimizer`, `host`, `straggler`, `exchange`."""
    late: Array  # Lateness of the slowest of the anchor's own nodes.
    rho: Array
    shown: Array  # X at the anchor, seconds.
    hidden: Array  # G at the anchor, seconds.
    slowed: Array  # kappa.
    host_growth: Array  # Seconds per doubling of the ranks.
    session: Array  # Factor between the sessions of the anchor and of a target (1).
    is_home: bool = True  # Whether targets are of the system that was measured.

    @property
    def unexplained_s(self) -> float:
        """Seconds of the anchor's exchange that the network's costs do not give, median."""
        return float(np.median(self.figures["exchange"] - self.shown))

    @property
    def anchor_step(self) -> Array:
        return sum(self.figures.values(), np.zeros(len(self.rho)))

    def at(self, ranks: int, error: ModelError, way: ExchangeMethod | None) -> Target:
        """Returns the projection to a rank count. Raises `NoModelError`: the exchange has no model."""
        ingredients = self.ingredients
        exchange_s = float(np.median(self.figures["exchange"]))
        if way is not None and self.unexplained_s > (1 - LEAST_EXPLAINED) * exchange_s:
            share = percent(1 - self.unexplained_s / exchange_s, 0)
            raise NoModelError(f"the network's costs are {share} of the measured exchange, too little for another one")
        at = StepAt(model=self, ranks=ranks, way=way)
        parts = at.parts()
        step = sum(parts.values())
        # What lies between measured points is known from both sides.
        doublings = min(abs(math.log2(ranks / point.ranks)) for point in ingredients.points)
        factor = self.session * error.drawn(doublings, len(self.rho), (SEED, 15))
        # Nothing is faster than its computing, however far off the model may be.
        ended = np.maximum(step * factor, at.compute() + at.computing["input"] + self.figures["optimizer"])
        factor = ended / step
        target_flags = (*flags(ingredients, ranks), *at.waiting[1])
        point = ingredients.measured_at(ranks) if way is None and self.is_home else None
        if point is not None:  # What was measured needs no model.
            ended, parts = _measured(point, len(self.rho))
            factor = np.ones(len(self.rho))
        else:
            if self.unexplained_s > SMALL * float(np.median(self.anchor_step)):
                target_flags = (*target_flags, flagged("F10", seconds=format_seconds(self.unexplained_s)))
            if self.costs is not None and self.costs.is_order_open(ranks):
                target_flags = (*target_flags, flagged("F12"))
        names = () if self.costs is None or ranks == 1 else self.costs.names(way)
        return replace(_target(ingredients, ranks, ended, factor, parts, target_flags), algorithms=names)


@dataclass(frozen=True, kw_only=True)
class StepAt:
    """The modelled step at one rank count: its terms, each by draw. What needs the exchange raises `NoModelError`: it
    has no model.
    """

    model: AnchoredModel
    ranks: int
    way: ExchangeMethod | None  # Another way of exchanging gradients than that of the runs.

    def parts(self) -> dict[str, Array]:
        """Returns seconds of the terms that sum to the step, in the order of `PARTS`."""
        update = self.model.figures["optimizer"]
        terms = (self.compute(), update, self.input(), self.host(), self.straggler(), self.exchange())
        return dict(zip(PARTS, terms, strict=True))

    def compute(self) -> Array:
        """Returns forward and backward pass, the latter slowed down by the exchange that hides in it."""
        return self.computing["forward"] + self.overlapped[0]

    def input(self) -> Array:
        """Returns input as at the anchor, and the wait for storage."""
        return self.computing["input"] + self.waiting[0]

    def host(self) -> Array:
        """Returns the causes without a model, which grow by their slope over the points."""
        growth = self.model.host_growth * math.log2(self.ranks / self.model.ingredients.anchor.ranks)
        return np.maximum(0.0, self.model.figures["host"] + growth)

    def straggler(self) -> Array:
        """Returns the wait for the slowest of all nodes. While a node is late all messages but the last one hide, and
        slow the backward pass down.
        """
        computing, at = self.computing, self.model.figures["straggler"]
        if self.ranks == 1:
            begun = self.anchor_begun * self.scale
        else:
            slowed = self.model.slowed * sum(self.costs[:-1])
            begun = computing["input"] + computing["forward"] + self.backward_alone + slowed
        return np.maximum(0.0, at + begun * self.late)

    def exchange(self) -> Array:
        """Returns what of the exchange shows behind the backward pass, with what costs do not explain at the anchor."""
        shown = self.overlapped[1] + self.model.figures["exchange"] - self.model.shown
        return np.maximum(0.0, shown)

    @property
    def draws(self) -> int:
        return len(self.model.rho)

    @property
    def anchor_begun(self) -> Array:
        """A at the anchor, seconds."""
        at = self.model.figures
        return at["input"] + at["forward"] + at["backward"]

    @cached_property
    def scale(self) -> Array:
        """Computing at the batch of these ranks over that at the anchor's batch (1)."""
        model, ingredients, draws = self.model, self.model.ingredients, self.draws
        batch, measured = ingredients.batch_at(self.ranks), ingredients.anchor.batch_per_rank
        if ingredients.scaling != "strong" or batch is None or measured is None or batch == measured:
            return np.ones(draws)
        work, before = (own_work(ingredients.batches, size, draws, (SEED, 14)) for size in (batch, measured))
        # Optimizer and host do not shrink with the batch, so what does shrinks by more than the whole.
        whole = self.anchor_begun + model.figures["optimizer"] + model.figures["host"]
        return np.maximum(0.0, 1 + whole / self.anchor_begun * (work / before - 1))

    @cached_property
    def computing(self) -> dict[str, Array]:
        """Seconds of input, forward and backward pass with as much hidden exchange as at the anchor."""
        return {name: self.model.figures[name] * self.scale for name in ("input", "forward", "backward")}

    @cached_property
    def late(self) -> Array:
        """Lateness of the slowest node, less that of the anchor's."""
        ingredients, draws = self.model.ingredients, self.draws
        nodes = ingredients.nodes_of(self.ranks)
        if nodes == ingredients.anchor.nodes:
            return np.zeros(draws)
        return lateness(ingredients.nodes, nodes, draws, slow_hosts=ingredients.slow_hosts) - self.model.late

    @cached_property
    def messages(self) -> Messages:
        return self._priced().messages(self.ranks, self.way, self.computing, float(np.median(self.model.rho)))

    @cached_property
    def costs(self) -> list[Array]:
        """Seconds of each message."""
        return [cost * self.model.rho for cost in self._priced().drawn(self.ranks, self.way, self.messages)]

    def _priced(self) -> Costs:
        if self.model.costs is None:
            raise NoModelError("an exchange of which one rank alone says nothing")
        return self.model.costs

    @property
    def backward_alone(self) -> Array:
        """Seconds of a backward pass in which no exchange hides."""
        return self.computing["backward"] - self.model.slowed * self.model.hidden

    @cached_property
    def overlapped(self) -> tuple[Array, Array]:
        """Seconds of the backward pass, and of the exchange that shows behind it."""
        shown, computing = np.zeros(self.draws), dict(self.computing)
        if self.ranks > 1:
            straggler, hidden = self.straggler(), self.model.hidden
            for _ in range(_HIDDEN_ROUNDS):
                computing["backward"] = np.maximum(0.0, self.backward_alone + self.model.slowed * hidden)
                shown = _shown(self.messages, self.costs, computing, straggler)
                hidden = sum(self.costs) - shown
        return computing["backward"], shown

    @cached_property
    def waiting(self) -> tuple[Array, tuple[Flag, ...]]:
        """Seconds that a step is longer because storage does not deliver, and what to know of it. Only where storage
        was seen to give no more for more demand is its rate a limit; elsewhere more may come than was asked for.
        """
        ingredients, supply, no_wait = self.model.ingredients, self.model.ingredients.supply, np.zeros(self.draws)
        anchor, batch = ingredients.anchor, ingredients.batch_at(self.ranks)
        if supply is None or supply.sample_bytes is None or supply.bytes_per_s is None:
            return no_wait, ()
        if not batch or not anchor.batch_per_rank:
            return no_wait, ()
        nodes = ingredients.nodes_of(self.ranks)
        step_s = self.compute() + self.model.figures["optimizer"] + self.computing["input"]
        step_s = step_s + self.host() + self.straggler() + self.exchange()
        # What the anchor's runs took cannot be more than there is.
        proven = anchor.ranks * anchor.batch_per_rank / self.model.anchor_step * supply.sample_bytes
        rate: float = supply.bytes_per_s
        if supply.is_per_node:
            rate, proven = rate * (nodes / (supply.nodes or nodes)), proven * (nodes / anchor.nodes)
        supplied, wanted = np.maximum(rate, proven), self.ranks * batch * supply.sample_bytes
        if supply.is_saturated:
            return np.maximum(0.0, wanted / supplied - step_s), ()
        asked, limit = float(np.median(wanted / step_s)), float(np.median(supplied))
        if asked <= limit:
            return no_wait, ()
        needed, seen = (f"{format_bytes(round(rate))}/s" for rate in (asked, limit))
        nodes_seen = supply.nodes or "some"
        return no_wait, (flagged("F5", needed=needed, proven=seen, nodes=nodes_seen, longest=wanted / limit),)


def _measured(point: PointFigures, draws: int) -> tuple[Array, dict[str, Array]]:
    """Returns the step of a measured point by draw, and its parts; none where they are not known."""
    weights = _run_weights(point.runs, draws, point.ranks)
    step = weights @ np.array([run.step_s for run in point.runs])
    if not all(run.parts for run in point.runs):
        return step, {}
    account = _account(point.runs, weights)
    account["compute"] = account["forward"] + account["backward"]
    whole = sum(account[name] for name in PARTS)
    return step, {name: account[name] * step / whole for name in PARTS}


def _shown(messages: Messages, costs: Sequence[Array], computing: Mapping[str, Array], straggler: Array) -> Array:
    """What of the exchange shows behind the backward pass of the slowest rank, seconds by draw."""
    begun = computing["input"] + computing["forward"] + computing["backward"]
    ready = [one * (1 + straggler / begun) for one in ready_at(messages, computing)]
    return np.maximum(0.0, last_end(ready, costs) - (begun + straggler))


def _mean(weights: Array, seconds: Sequence[float]) -> Array:
    """Returns the mean over runs by draw. Stretched weights may be below 0, and no mean is."""
    mean: Array = np.maximum(0.0, weights @ np.array(seconds))
    return mean


def _account(runs: Sequence[RunFigures], weights: Array) -> dict[str, Array]:
    """Seconds of a step by draw: what the model knows of by its own name, all else as `host`."""

    def part(name: str) -> Array:
        return _mean(weights, [run.parts.get(name, 0.0) for run in runs])

    figures = {name: part(name) for name in ("input", "forward", "backward", "optimizer", "straggler", "exchange")}
    figures["host"] = sum((part(name) for name in WITHOUT_MODEL), np.zeros(len(weights)))
    return figures


def anchored(ingredients: Ingredients, draws: int, names: Sequence[str] = LIBRARY) -> AnchoredModel | Refused:
    """The models anchored at the largest measured point; refused where the network's costs cannot be its (R5, R8).
    `names`: algorithms that may stand for a library's own.
    """
    anchor = ingredients.anchor
    weights = _run_weights(anchor.runs, draws, anchor.ranks)
    figures = _account(anchor.runs, weights)
    shown, rho, hidden = np.zeros(draws), np.ones(draws), np.zeros(draws)
    try:
        costs = Costs.of(ingredients, draws, names)
        if costs is not None:
            messages = costs.messages(anchor.ranks, None, figures, 1.0)
            prices = costs.drawn(anchor.ranks, None, messages)

            def shown_of(scale: Array) -> Array:
                return _shown(messages, [one * scale for one in prices], figures, figures["straggler"])

            # Messages are under way as long as measured, where all runs say how long that was.
            under_way = [run.communication_s for run in anchor.runs if run.communication_s is not None]
            if len(under_way) == len(anchor.runs):
                rho = _mean(weights, under_way) / sum(prices)
            else:
                rho = _calibrated(shown_of, figures["exchange"])
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
    slowed, scatter = slowed_by_hidden(ingredients, draws)
    return AnchoredModel(
        ingredients=ingredients,
        costs=costs,
        figures=figures,
        late=late,
        rho=rho,
        shown=shown,
        hidden=hidden,
        slowed=slowed,
        host_growth=host_growth(ingredients, draws),
        session=np.exp(math.sqrt(2) * scatter * np.random.default_rng([SEED, 21]).standard_normal(draws)),
    )


def _calibrated(shown: Callable[[Array], Array], measured: Array) -> Array:
    """Returns the rho with which the model shows the measured exchange, by draw; 1 where both show nothing."""
    low, _ = bisected(lambda scale: shown(np.exp(scale)), measured, *map(math.log, _ENDS))
    is_right = np.isclose(shown(np.ones_like(measured)), measured, rtol=1e-9, atol=0.0)
    return np.where(is_right, 1.0, np.exp(low))


def _target(
    ingredients: Ingredients,
    ranks: int,
    step: Array,
    error: Array,
    parts: Mapping[str, Array],
    target_flags: tuple[Flag, ...],
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
        parts=tuple(StepPart(name=name, seconds=Band.of(seconds)) for name, seconds in parts.items()),
        model_error=Band.of(error),
        algorithms=(),
        flags=target_flags,
        drawn={"step": step, "error": error, **parts},
    )

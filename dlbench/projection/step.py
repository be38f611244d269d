"""Projects the step to rank counts that were not measured, for all draws at once; docs/projection.md has the equations.

A is input + forward + backward, X the exposed and G the hidden exchange, L the lateness of the slowest node, kappa the
slowdown of the backward pass by G (`slopes`), and rho the time of messages over their prices at the anchor (`costs`),
the largest measured point. There all parts are measured; models only give the changes. Each draw has its own runs,
network costs, algorithm, order of nodes, nodes and error of the model, with fixed seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dlbench.lazy import Array, np
from dlbench.perfmodels.predictions import PRIOR_POINTS, Miss, ModelError, model_error
from dlbench.projection.cost import own_work
from dlbench.projection.costs import LIBRARY, WITHOUT_MODEL, Costs, host_growth, slowed_by_hidden
from dlbench.projection.exchange import ExchangeMethod, Messages, NoModelError, bisected, last_end, ready_at
from dlbench.projection.ingredients import Ingredients, PointFigures, RunFigures
from dlbench.projection.nodes import lateness
from dlbench.projection.points_only import DRAWS, points_only
from dlbench.projection.projected import (
    LEAST_EXPLAINED,
    LEAST_ROWS,
    PARTS,
    SCALE,
    SMALL,
    UNEXPLAINED,
    Band,
    Flag,
    HeldOut,
    Projection,
    Refused,
    StepPart,
    Target,
    flagged,
    flags,
    reasons,
    refused,
)
from dlbench.report.wording import percent
from dlbench.specs.sync import GROUPED
from dlbench.stats.multiplicity import LEAST_RUNS, SEED, stretch
from dlbench.units import format_bytes, format_seconds

_ENDS = (1e-3, 1e3)  # Range in which the scale of costs is searched.
STEP_SCALE = 0.002
"""Prior error of a projected step per square root of a doubling. It is less than `PRIOR_SCALE`, which is for costs of
messages: errors of costs, nodes, hidden exchange, sessions and host are drawn separately."""
_HIDDEN_ROUNDS = 4  # Rounds until the hidden exchange and the backward pass that it slows down agree.


def project(
    ingredients: Ingredients,
    ranks: Sequence[int],
    *,
    method: ExchangeMethod | None = None,
    misses: Sequence[Miss] = (),
    other_system: Ingredients | None = None,
    draws: int = DRAWS,
) -> Projection:
    """Returns the projection to these rank counts, or why there is none; equal ingredients give equal answers.
    `method`, `other_system`: if not those of the runs. `misses`: errors of earlier projections, by the ledger.
    """
    target_system = other_system or ingredients
    model: AnchoredModel | Refused | None = None
    held_out: tuple[HeldOut, ...] = ()
    prior_points = 0.0 if len(misses) >= LEAST_ROWS else PRIOR_POINTS
    cost_scale = 1.0
    if not target_system.is_series and not all(reasons(target_system, count) for count in ranks):
        model = anchored(ingredients, draws)
    if isinstance(model, AnchoredModel):
        cost_scale = statistics.median(model.rho.tolist())
        held_out, missed = _held_out(model)
        misses = (*misses, *missed)
        if other_system is not None:
            model = model.on_system(other_system)
    error = model_error(misses, prior_scale=STEP_SCALE, prior_points=prior_points)
    changes = _changes(ingredients, other_system, method)
    targets: list[Target] = []
    refusals: list[Refused] = []
    for count in ranks:
        why = reasons(target_system, count)
        if isinstance(model, Refused) and not why:
            why = (model,)
        if isinstance(model, AnchoredModel) and not why:
            try:
                targets.append(model.at(count, error, method))
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
        # A refusal of all targets is listed once.
        refused=tuple(dict.fromkeys(refusals)),
        held_out=held_out,
        flags=_system_flags(ingredients, other_system),
        cost_scale=cost_scale,
    )


def _system_flags(ingredients: Ingredients, other_system: Ingredients | None) -> tuple[Flag, ...]:
    if other_system is None:
        return ()
    network, costs = other_system.network, "no costs"
    if network is not None:
        costs = network.transport
        if network.num_points:  # A data sheet has none.
            costs += f" ({network.points_text})"
    return (flagged("F8", system=ingredients.system, other_system=other_system.system, costs=costs),)


def _changes(
    ingredients: Ingredients, other_system: Ingredients | None, method: ExchangeMethod | None
) -> tuple[str, ...]:
    changes = []
    if method is not None:
        exchange = f"exchange {method.exchange}"
        if method.exchange in GROUPED:
            exchange += f", groups of {method.group_size} ranks"
        exchange += f", fusion {method.fusion or 'of the runs'}, wire {method.wire}"
        if method.topk_density:
            exchange += f", density {method.topk_density:g}"
        changes.append(exchange)
    if other_system is not None:
        changes.append(
            f"nodes, leaves and network of {other_system.system}; computing as measured on {ingredients.system}"
        )
    return tuple(changes)


def _by_points(ingredients: Ingredients, ranks: int, why: Sequence[Refused], draws: int) -> Target | None:
    """Returns a projection by the points only, as the model is refused (`why`); None: that is refused too."""
    points = points_only(ingredients, ranks, draws=draws)
    if points is None:
        return None
    cause = "; ".join(refusal.text for refusal in why) or "only step times are known"
    remedy = "; ".join(refusal.remedy for refusal in why) or "Measure larger rank counts"
    alone = flagged("F7", law=points.law, why=cause, remedy=remedy[:1].upper() + remedy[1:])
    target_flags = (alone, *points.flags, *flags(ingredients, ranks, by="points"))
    return _target(ingredients, ranks, points.step_s, points.error, {}, target_flags)


def _held_out(model: AnchoredModel) -> tuple[tuple[HeldOut, ...], tuple[Miss, ...]]:
    """Returns the projection of every point from the third on from the points below it, and its errors."""
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
        # Scatter of runs, costs and nodes is drawn separately in every projection, so here it is scatter of the error.
        low, high = np.quantile(np.log(target.drawn["step"]), [0.159, 0.841])  # One standard deviation of a normal one.
        variance = ((high - low) / 2) ** 2
        if len(steps) > 1:
            variance += statistics.variance(steps) / len(steps) / held_out.measured_s**2
        points.append(held_out)
        error = -math.log1p(held_out.error)
        misses.append(Miss(error=error, doublings=held_out.doublings, scatter=math.sqrt(variance)))
    return tuple(points), tuple(misses)


def _below(model: AnchoredModel, number: int) -> AnchoredModel | None:
    """Returns the model by the first `number` points, with the same network and algorithms; None: it is refused."""
    ingredients = model.ingredients
    points, nodes, supply = ingredients.points[:number], ingredients.nodes, ingredients.supply
    batch = points[-1].batch_per_rank
    changed: dict[str, object] = {
        "points": points,
        "ranks_per_node": ingredients.per_node,
        "nodes": nodes and nodes.model_copy(update={"hosts": nodes.hosts[: points[-1].nodes]}),
    }
    # Storage that more nodes measured is not known here; messages and scatter of steps stay those of the anchor.
    if supply is not None and (supply.nodes or math.inf) > points[-1].nodes:
        changed["supply"] = None
    if ingredients.scaling == "strong":
        changed["batches"] = tuple(work for work in ingredients.batches if batch and work.batch_per_rank >= batch)
    below = ingredients.model_copy(update=changed)
    if reasons(below, ingredients.points[number].ranks):
        return None
    names = LIBRARY if model.costs is None else model.costs.algorithms
    smaller = anchored(below, len(model.rho), names)
    return None if isinstance(smaller, Refused) else smaller


def _run_weights(runs: Sequence[RunFigures], draws: int, seed: int) -> Array:
    """Returns the weight of each run in each draw, shape (draws, runs); rows sum to 1. Sessions are drawn, and runs in
    them; with fewer than `LEAST_RUNS` sessions only runs. They are stretched as in `dlbench.stats.pairing`.
    """
    by_session: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        by_session.setdefault(run.session, []).append(index)
    members = [indexes for _, indexes in sorted(by_session.items())]
    if len(members) < LEAST_RUNS:
        members = [list(range(len(runs)))]
    count = len(members)
    # Points with the same sessions draw the same ones.
    sessions = np.random.default_rng([SEED, 12]).multinomial(count, [1 / count] * count, draws)
    rng = np.random.default_rng([SEED, 13, seed])
    centre, drawn = np.zeros(len(runs)), np.zeros((draws, len(runs)))
    for index, session_runs in enumerate(members):
        size = len(session_runs)
        picks = rng.multinomial(size, [1 / size] * size, draws) / size
        drawn[:, session_runs] = picks * sessions[:, [index]] / count
        centre[session_runs] = 1 / size / count
    units = count if count > 1 else len(runs)
    if units == 1:
        return np.broadcast_to(centre, drawn.shape)
    weights: Array = centre + stretch(units) * (drawn - centre)
    return weights


@dataclass(frozen=True, kw_only=True)
class AnchoredModel:
    """The draws of the anchor, which all targets share, and the scales of the models there."""

    ingredients: Ingredients  # With the system of the targets.
    costs: Costs | None  # Costs of messages; None: nothing is exchanged.
    figures: Mapping[str, Array]
    """Seconds of the anchor's step: `input`, `forward`, `backward`, `optimizer`, `host`, `straggler`, `exchange`."""
    late: Array  # Lateness of the slowest node of the anchor (a share).
    rho: Array  # Factor on the network's costs.
    exposed: Array  # X at the anchor, seconds.
    hidden: Array  # G at the anchor, seconds.
    slowed: Array  # kappa.
    host_growth: Array  # Seconds per doubling of the ranks.
    session: Array  # Factor between the sessions of the anchor and of a target (1).
    is_home: bool = True  # Whether targets are on the measured system.

    def on_system(self, other: Ingredients) -> AnchoredModel:
        costs = self.costs and self.costs.elsewhere(other)
        return replace(self, ingredients=other, costs=costs, is_home=False)

    @property
    def unexplained_s(self) -> float:
        """Returns the exchange of the anchor that the network's costs do not explain, median, seconds."""
        return float(np.median(self.figures["exchange"] - self.exposed))

    @property
    def anchor_step(self) -> Array:
        return sum(self.figures.values(), np.zeros(len(self.rho)))

    def at(self, ranks: int, error: ModelError, method: ExchangeMethod | None) -> Target:
        """Returns the projection to a rank count. Raises `NoModelError`: the exchange has no model."""
        ingredients = self.ingredients
        exchange_s = float(np.median(self.figures["exchange"]))
        if method is not None and self.unexplained_s > (1 - LEAST_EXPLAINED) * exchange_s:
            share = percent(1 - self.unexplained_s / exchange_s, 0)
            raise NoModelError(f"the network's costs explain only {share} of the measured exchange")
        step_at = StepAt(model=self, ranks=ranks, method=method)
        parts = step_at.parts()
        step = sum(parts.values())
        # A count between measured points is close to both.
        doublings = min(abs(math.log2(ranks / point.ranks)) for point in ingredients.points)
        factor = self.session * error.drawn(doublings, len(self.rho), (SEED, 15))
        # No step is faster than its computing, however large the error of the model is.
        bounded = np.maximum(step * factor, step_at.compute() + step_at.computing["input"] + self.figures["optimizer"])
        factor = bounded / step
        target_flags = (*flags(ingredients, ranks), *step_at.waiting[1])
        point = None
        if method is None and self.is_home:
            point = ingredients.measured_at(ranks)
        if point is not None:  # A measured point needs no model.
            bounded, parts = _measured(point, len(self.rho))
            factor = np.ones(len(self.rho))
        else:
            if self.unexplained_s > SMALL * float(np.median(self.anchor_step)):
                target_flags = (*target_flags, flagged("F10", seconds=format_seconds(self.unexplained_s)))
            if self.costs is not None and self.costs.is_order_open(ranks):
                target_flags = (*target_flags, flagged("F12"))
        target = _target(ingredients, ranks, bounded, factor, parts, target_flags)
        if self.costs is None or ranks == 1:
            return target
        return replace(target, algorithms=self.costs.names(method))


@dataclass(frozen=True, kw_only=True)
class StepAt:
    """The modelled step at one rank count: its terms by draw, in seconds. They may raise `NoModelError`."""

    model: AnchoredModel
    ranks: int
    method: ExchangeMethod | None  # Exchange of gradients if it differs from that of the runs.

    def parts(self) -> dict[str, Array]:
        """Returns the terms that sum to the step, in the order of `PARTS`."""
        update = self.model.figures["optimizer"]
        terms = (self.compute(), update, self.input(), self.host(), self.straggler(), self.exchange())
        return dict(zip(PARTS, terms, strict=True))

    def compute(self) -> Array:
        """Returns forward and backward pass, the latter slowed down by the hidden exchange."""
        return self.computing["forward"] + self.overlapped[0]

    def input(self) -> Array:
        """Returns the input of the anchor and the wait for storage."""
        return self.computing["input"] + self.waiting[0]

    def host(self) -> Array:
        """Returns the causes without a model, which grow by their slope over the points."""
        growth = self.model.host_growth * math.log2(self.ranks / self.model.ingredients.anchor.ranks)
        return np.maximum(0.0, self.model.figures["host"] + growth)

    def straggler(self) -> Array:
        """Returns the wait for the slowest node; while it is late, all messages but the last are hidden."""
        computing, at_anchor = self.computing, self.model.figures["straggler"]
        if self.ranks == 1:
            begun = self.anchor_begun * self.scale
        else:
            slowed = self.model.slowed * sum(self.costs[:-1])
            begun = computing["input"] + computing["forward"] + self.backward_alone + slowed
        return np.maximum(0.0, at_anchor + begun * self.late)

    def exchange(self) -> Array:
        """Returns the exposed exchange, with the part that costs do not explain at the anchor."""
        exposed = self.overlapped[1] + self.model.figures["exchange"] - self.model.exposed
        return np.maximum(0.0, exposed)

    @property
    def draws(self) -> int:
        return len(self.model.rho)

    @property
    def anchor_begun(self) -> Array:
        figures = self.model.figures
        return figures["input"] + figures["forward"] + figures["backward"]

    @cached_property
    def scale(self) -> Array:
        """Returns the computing at the batch of these ranks over that at the anchor's batch."""
        model, ingredients, draws = self.model, self.model.ingredients, self.draws
        batch, measured = ingredients.batch_at(self.ranks), ingredients.anchor.batch_per_rank
        if ingredients.scaling != "strong" or batch is None or measured is None or batch == measured:
            return np.ones(draws)
        work, before = (own_work(ingredients.batches, size, draws, (SEED, 14)) for size in (batch, measured))
        # Optimizer and host do not shrink with the batch, so the other parts shrink by more than the step.
        scaled_s = self.anchor_begun + model.figures["optimizer"] + model.figures["host"]
        return np.maximum(0.0, 1 + scaled_s / self.anchor_begun * (work / before - 1))

    @cached_property
    def computing(self) -> dict[str, Array]:
        """Returns input, forward and backward pass with as much hidden exchange as at the anchor."""
        return {name: self.model.figures[name] * self.scale for name in ("input", "forward", "backward")}

    @cached_property
    def late(self) -> Array:
        """Returns the lateness of the slowest node minus that at the anchor (a share)."""
        ingredients, draws = self.model.ingredients, self.draws
        nodes = ingredients.nodes_of(self.ranks)
        if nodes == ingredients.anchor.nodes:
            return np.zeros(draws)
        return lateness(ingredients.nodes, nodes, draws, slow_hosts=ingredients.slow_hosts) - self.model.late

    @cached_property
    def messages(self) -> Messages:
        return self._priced().messages(self.ranks, self.method, self.computing, float(np.median(self.model.rho)))

    @cached_property
    def costs(self) -> list[Array]:
        return [cost * self.model.rho for cost in self._priced().drawn(self.ranks, self.method, self.messages)]

    def _priced(self) -> Costs:
        if self.model.costs is None:
            raise NoModelError("runs of one rank do not show the exchange")
        return self.model.costs

    @property
    def backward_alone(self) -> Array:
        return self.computing["backward"] - self.model.slowed * self.model.hidden

    @cached_property
    def overlapped(self) -> tuple[Array, Array]:
        exposed, computing = np.zeros(self.draws), dict(self.computing)
        if self.ranks > 1:
            straggler, hidden = self.straggler(), self.model.hidden
            for _ in range(_HIDDEN_ROUNDS):
                computing["backward"] = np.maximum(0.0, self.backward_alone + self.model.slowed * hidden)
                exposed = _exposed_exchange(self.messages, self.costs, computing, straggler)
                hidden = sum(self.costs) - exposed
        return computing["backward"], exposed

    @cached_property
    def waiting(self) -> tuple[Array, tuple[Flag, ...]]:
        """Returns the wait for storage and flags. The measured rate is a limit only if more demand did not raise it."""
        ingredients, supply, no_wait = self.model.ingredients, self.model.ingredients.supply, np.zeros(self.draws)
        anchor, batch = ingredients.anchor, ingredients.batch_at(self.ranks)
        if supply is None or supply.sample_bytes is None or supply.bytes_per_s is None:
            return no_wait, ()
        if not batch or not anchor.batch_per_rank:
            return no_wait, ()
        nodes = ingredients.nodes_of(self.ranks)
        step_s = self.compute() + self.model.figures["optimizer"] + self.computing["input"]
        step_s = step_s + self.host() + self.straggler() + self.exchange()
        # Storage delivers at least the rate of the anchor's runs.
        proven = anchor.ranks * anchor.batch_per_rank / self.model.anchor_step * supply.sample_bytes
        rate: float = supply.bytes_per_s
        if supply.is_per_node:
            rate, proven = rate * (nodes / (supply.nodes or nodes)), proven * (nodes / anchor.nodes)
        supplied, step_bytes = np.maximum(rate, proven), self.ranks * batch * supply.sample_bytes
        if supply.is_saturated:
            return np.maximum(0.0, step_bytes / supplied - step_s), ()
        needed_rate, limit = float(np.median(step_bytes / step_s)), float(np.median(supplied))
        if needed_rate <= limit:
            return no_wait, ()
        needed, proven_text = (f"{format_bytes(round(rate))}/s" for rate in (needed_rate, limit))
        nodes_text = supply.nodes or "some"
        return no_wait, (
            flagged("F5", needed=needed, proven=proven_text, nodes=nodes_text, longest=step_bytes / limit),
        )


def _measured(point: PointFigures, draws: int) -> tuple[Array, dict[str, Array]]:
    weights = _run_weights(point.runs, draws, point.ranks)
    step = weights @ np.array([run.step_s for run in point.runs])
    if not all(run.parts for run in point.runs):
        return step, {}
    account = _account(point.runs, weights)
    account["compute"] = account["forward"] + account["backward"]
    total = sum(account[name] for name in PARTS)
    return step, {name: account[name] * step / total for name in PARTS}


def _exposed_exchange(
    messages: Messages, costs: Sequence[Array], computing: Mapping[str, Array], straggler: Array
) -> Array:
    """Returns the exposed exchange of the slowest rank, seconds by draw."""
    begun = computing["input"] + computing["forward"] + computing["backward"]
    ready = [ready_s * (1 + straggler / begun) for ready_s in ready_at(messages, computing)]
    return np.maximum(0.0, last_end(ready, costs) - (begun + straggler))


def _mean(weights: Array, seconds: Sequence[float]) -> Array:
    """Returns the mean over runs by draw. Stretched weights may be below 0; means are not."""
    mean: Array = np.maximum(0.0, weights @ np.array(seconds))
    return mean


def _account(runs: Sequence[RunFigures], weights: Array) -> dict[str, Array]:
    """Returns the parts of a step by draw, seconds: those with a model by name, all others as `host`."""

    def part(name: str) -> Array:
        return _mean(weights, [run.parts.get(name, 0.0) for run in runs])

    figures = {name: part(name) for name in ("input", "forward", "backward", "optimizer", "straggler", "exchange")}
    figures["host"] = sum((part(name) for name in WITHOUT_MODEL), np.zeros(len(weights)))
    return figures


def anchored(ingredients: Ingredients, draws: int, names: Sequence[str] = LIBRARY) -> AnchoredModel | Refused:
    """Returns the model anchored at the largest measured point, or the refusal. `names`: algorithms of a library."""
    anchor = ingredients.anchor
    weights = _run_weights(anchor.runs, draws, anchor.ranks)
    figures = _account(anchor.runs, weights)
    exposed, rho, hidden = np.zeros(draws), np.ones(draws), np.zeros(draws)
    try:
        costs = Costs.of(ingredients, draws, names)
        if costs is not None:
            messages = costs.messages(anchor.ranks, None, figures, 1.0)
            prices = costs.drawn(anchor.ranks, None, messages)

            def exposed_at(scale: Array) -> Array:
                return _exposed_exchange(messages, [price * scale for price in prices], figures, figures["straggler"])

            # The measured time of messages counts if all runs recorded it.
            under_way = [run.communication_s for run in anchor.runs if run.communication_s is not None]
            if len(under_way) == len(anchor.runs):
                rho = _mean(weights, under_way) / sum(prices)
            else:
                rho = _calibrated(exposed_at, figures["exchange"])
            exposed = exposed_at(rho)
            hidden = rho * sum(prices) - exposed
            scale = float(np.median(rho))
            exchange_s, off = float(np.median(figures["exchange"])), float(np.median(figures["exchange"] - exposed))
            step = float(np.median(sum(figures.values(), np.zeros(draws))))
            if not 1 / SCALE <= scale <= SCALE:
                return refused("R5", None, what=f"its costs must be multiplied by {scale:.3g} to give the exchange")
            if abs(off) > max(UNEXPLAINED * exchange_s, SMALL * step):
                by_network = format_seconds(exchange_s - off)
                what = f"the exchange took {format_seconds(exchange_s)} of a step, and {by_network} by its costs"
                return refused("R5", None, what=what)
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
        exposed=exposed,
        hidden=hidden,
        slowed=slowed,
        host_growth=host_growth(ingredients, draws),
        session=np.exp(math.sqrt(2) * scatter * np.random.default_rng([SEED, 21]).standard_normal(draws)),
    )


def _calibrated(exposed_at: Callable[[Array], Array], measured: Array) -> Array:
    """Returns the rho that gives the measured exchange, by draw; 1 if both are 0."""
    low, _ = bisected(lambda scale: exposed_at(np.exp(scale)), measured, *map(math.log, _ENDS))
    is_right = np.isclose(exposed_at(np.ones_like(measured)), measured, rtol=1e-9, atol=0.0)
    return np.where(is_right, 1.0, np.exp(low))


def _target(
    ingredients: Ingredients,
    ranks: int,
    step: Array,
    error: Array,
    parts: Mapping[str, Array],
    target_flags: tuple[Flag, ...],
) -> Target:
    base, batch = ingredients.points[0], ingredients.batch_at(ranks)

    def efficiency(count: int, batch_per_rank: int | None, first: Array | float, seconds: Array | float) -> Array:
        work = base.ranks / count if ingredients.scaling == "strong" else 1.0
        # By samples if they are known, as strong scaling may be projected from runs of weak scaling.
        if batch_per_rank and base.batch_per_rank:
            work = batch_per_rank / base.batch_per_rank
        return np.asarray(first / seconds * work)

    means = [statistics.fmean(run.step_s for run in point.runs) for point in ingredients.points]
    measured = [
        float(efficiency(point.ranks, point.batch_per_rank, means[0], mean))
        for point, mean in zip(ingredients.points, means, strict=True)
    ]
    first = _run_weights(base.runs, len(step), base.ranks) @ np.array([run.step_s for run in base.runs])
    throughput = None if batch is None else Band.of(ranks * batch / step)
    return Target(
        ranks=ranks,
        nodes=ingredients.nodes_of(ranks),
        batch_per_rank=batch,
        doublings=math.log2(ranks / ingredients.anchor.ranks),
        step=Band.of(step),
        throughput=throughput,
        # A rank is not faster next to others, unless that was measured.
        efficiency=Band.of(np.minimum(max(1.0, *measured), efficiency(ranks, batch, first, step))),
        parts=tuple(StepPart(name=name, seconds=Band.of(seconds)) for name, seconds in parts.items()),
        model_error=Band.of(error),
        algorithms=(),
        flags=target_flags,
        drawn={"step": step, "error": error, **parts},
    )

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

from dlbench.lazy import Array, np
from dlbench.perfmodels.extrapolation import PRIOR_POINTS, Miss, ModelError, model_error
from dlbench.projection.batch import own_work
from dlbench.projection.costs import LIBRARY, Costs
from dlbench.projection.exchange import Messages, NoModelError, Way, bisected, last_end, ready_at
from dlbench.projection.ingredients import Ingredients, PointFigures, RunFigures, Supply
from dlbench.projection.ledger import LEAST_ROWS
from dlbench.projection.nodes import lateness
from dlbench.projection.points_only import DRAWS, points_only
from dlbench.projection.projected import PARTS, Band, Flag, HeldOut, Part, Projection, Refused, Target
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
        changes.append(f"exchange {way.exchange}{groups}, fusion {way.fusion or 'as it ran'}, wire {way.wire}{density}")
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
        if isinstance(model, _Model) and not why:
            try:
                targets.append(model.at(count, error, way))
                continue
            except NoModelError as problem:
                why = (refused("R8", count, what=str(problem)),)
        points = None if changes else points_only(ingredients, count, draws=draws)
        if points is None:
            not_told += why
        else:
            cause = "; ".join(one.text for one in why) or "nothing else is known"
            remedy = "; ".join(one.remedy for one in why) or "Measure larger rank counts"
            alone = flagged("F7", law=points.law, why=cause, remedy=remedy[:1].upper() + remedy[1:])
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
class _Model:
    """What all targets share: the draws of the anchor, and what anchors the models there."""

    ingredients: Ingredients  # Of the targets' system.
    costs: Costs | None  # Of messages there; None: nothing is exchanged.
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
        """Raises `NoModelError`: the exchange has no model."""
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
        late = np.zeros(draws)
        if nodes != anchor.nodes:
            late = lateness(found.nodes, nodes, draws, slow_hosts=found.slow_hosts) - self.late
        straggler, shown = np.maximum(0.0, at["straggler"] + begun * scale * late), np.zeros(draws)
        whole, unknown = float(np.median(at["exchange"])), float(np.median(at["exchange"] - self.shown))
        if way is not None and unknown > (1 - LEAST_EXPLAINED) * whole:
            share = percent(1 - unknown / whole, 0)
            raise NoModelError(f"the network's costs are {share} of the measured exchange, too little for another one")
        if ranks > 1:
            if self.costs is None:
                raise NoModelError("an exchange of which one rank alone says nothing")
            messages = self.costs.messages(ranks, way, computing, float(np.median(self.rho)))
            costs = [one * self.rho for one in self.costs.drawn(ranks, way, messages)]
            alone, hidden = computing["backward"] - self.slowed * self.hidden, self.hidden
            # While a node is late all messages but the last one hide, and slow the backward pass down.
            begun_late = computing["input"] + computing["forward"] + alone + self.slowed * sum(costs[:-1])
            straggler = np.maximum(0.0, at["straggler"] + begun_late * late)
            for _ in range(_HIDDEN_ROUNDS):
                computing["backward"] = np.maximum(0.0, alone + self.slowed * hidden)
                shown = _shown(messages, costs, computing, straggler)
                hidden = sum(costs) - shown
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
        names = () if self.costs is None or ranks == 1 else self.costs.names(way)
        return replace(_target(found, ranks, ended, factor, parts, told), algorithms=names)


def _shown(messages: Messages, costs: Sequence[Array], computing: Mapping[str, Array], straggler: Array) -> Array:
    """What of the exchange shows behind the backward pass of the slowest rank, seconds by draw."""
    begun = computing["input"] + computing["forward"] + computing["backward"]
    ready = [one * (1 + straggler / begun) for one in ready_at(messages, computing)]
    return np.maximum(0.0, last_end(ready, costs) - (begun + straggler))


def _account(runs: Sequence[RunFigures], weights: Array) -> dict[str, Array]:
    """Seconds of a step by draw: what the model knows of by its own name, all else as `host`."""

    def part(name: str) -> Array:
        found: Array = np.maximum(0.0, weights @ np.array([run.parts.get(name, 0.0) for run in runs]))
        return found

    figures = {name: part(name) for name in ("input", "forward", "backward", "optimizer", "straggler", "exchange")}
    figures["host"] = sum((part(name) for name in WITHOUT_MODEL), np.zeros(len(weights)))
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
        costs = Costs.of(ingredients, draws, names)
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
    slowed, scatter = slowed_by_hidden(ingredients, draws)
    return _Model(
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
        algorithms=(),
        flags=told,
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

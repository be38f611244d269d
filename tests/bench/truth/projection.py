"""Projections of simulated machines that break the model: do bands hold what they say, and is every term needed?

Each machine is fitted at 1, 2, 4 and 8 nodes and asked at 16, 32, 64 and 128. Its costs of messages are known to a few
per cent, and its target is measured by runs of another session on nodes of which only eight were seen. What is held
against the band is what was measured there, as `dlbench project --against` does it.

The oracle knows the generator: of all these machines together it knows how far the projected median is off at so many
doublings, and gives the narrowest band about that median of equal relative width that holds 90 % of them. It does not
know which kind of machine it is asked of, because nobody is told that either.

A mutation takes a term out of the model, or gets it wrong. One that does not make the bands worse (interval score:
Gneiting and Raftery, JASA 102, 2007, section 6.2) shows a term that is not needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np

from dlbench.perfmodels.extrapolation import ModelError, model_error
from dlbench.projection import step as module
from dlbench.specs.comm import Level, NetworkModel, Piece
from tests.bench.figures import Figure
from tests.bench.gate import share
from tests.support.training_machine import Machine, network_of

SEED = 20_261_124
MEASURED, ASKED = (1, 2, 4, 8), (16, 32, 64, 128)
TRIALS, QUICK = 60, 12  # Machines of each kind.
RANKS = 2  # Of a node.
FIT_SD = 0.03  # By which fitted costs are off, and by which their draws say so.
LEVEL = 0.9


def hosts_of(kind: str, sd: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    def drawn(rng: np.random.Generator, nodes: int) -> np.ndarray:
        own = sd * rng.standard_normal(nodes)
        if kind == "correlated":  # Racks of eight share half of the variance.
            return (own + sd * np.repeat(rng.standard_normal(-(-nodes // 8)), 8)[:nodes]) / math.sqrt(2)
        if kind == "bimodal":  # A tenth of the hosts is slow.
            return 0.3 * own + 3 * sd * (rng.random(nodes) < 0.1)
        return own

    return drawn


KINDS: Mapping[str, Mapping[str, Any]] = {
    "the model is right": {},
    "congestion of up to 10 % a doubling": {"congestion": 0.1},
    "correlated hosts": {"hosts": "correlated"},
    "a tenth of the hosts is slow": {"hosts": "bimodal"},
    "sessions drift by 2 %": {"session_sd": 0.02},
    "the library's algorithm is another": {"algorithm": "double-binary-tree"},
    "what has no model grows by up to 4 % a doubling": {"unmodelled": 0.04},
    "messages start up to 10 ms late, which no record says": {"delay_s": 0.01},
}


def machine_of(rng: np.random.Generator, kind: Mapping[str, Any]) -> Machine:
    """One machine: from an exchange that is hidden to one that is half of the step."""
    messages = int(rng.integers(4, 9))
    whole = math.exp(rng.uniform(math.log(0.3), math.log(2.0))) * 0.06
    shares = np.sort(rng.uniform(0.1, 1.0, messages))
    shares[-1] = 1.0
    # A ring of 16 ranks sends 15/8 of a message through each adapter.
    num_bytes = 4_000_000 * int(rng.integers(1, 8))
    beta = whole / messages / num_bytes * 8 / 15
    sd = rng.uniform(0.0, 0.03)
    return Machine(
        ranks_per_node=RANKS,
        sizes=(num_bytes,) * messages,
        shares=tuple(float(one) for one in shares),
        network=network_of((5e-6, beta / 8), (rng.uniform(5e-6, 5e-5), beta)),
        algorithm=kind.get("algorithm", "ring"),
        carrier="nccl",
        congestion=rng.uniform(0, kind.get("congestion", 0.0)),
        slowed=rng.uniform(0, 0.2),
        hosts=hosts_of(kind.get("hosts", "normal"), sd),
        jitter=rng.uniform(0.005, 0.03),
        spikes=rng.choice([0.0, 0.005]),
        session_sd=kind.get("session_sd", 0.005),
        run_sd=0.005,
        unmodelled=rng.uniform(0, kind.get("unmodelled", 0.0)),
        delay_s=rng.uniform(0, kind.get("delay_s", 0.0)),
    )


def fitted(rng: np.random.Generator, network: NetworkModel) -> NetworkModel:
    """The costs as a fit would have them, off by `FIT_SD`, with draws that say so."""

    def level(found: Level | None, off: np.ndarray) -> Level:
        assert found is not None
        (piece,) = found.pieces
        alpha, beta = piece.alpha_s * off[0], piece.beta_s_per_byte * off[1]
        return Level(pieces=(Piece(alpha_s=alpha, beta_s_per_byte=beta),), links=found.links)

    inside, across = (level(one, np.exp(FIT_SD * rng.standard_normal(2))) for one in network.levels.values())
    costs = [x for one in (inside, across) for x in (one.pieces[0].alpha_s, one.pieces[0].beta_s_per_byte)]
    draws = tuple((*(float(one) for one in costs * np.exp(FIT_SD * rng.standard_normal(4))), 0.0) for _ in range(100))
    return network.model_copy(update={"inside": inside, "across": across, "draws": draws})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A machine at one node count, in logarithms over what was measured there."""

    kind: str
    doublings: int
    low: float
    middle: float
    high: float

    @property
    def is_held(self) -> bool:
        return self.low <= 0 <= self.high

    @property
    def score(self) -> float:
        missed = max(self.low, 0.0) + max(-self.high, 0.0)
        return self.high - self.low + 2 / (1 - LEVEL) * missed


@dataclass(frozen=True, kw_only=True)
class Case:
    """A machine, what was measured of it, and what it then did."""

    kind: str
    ingredients: Any
    truth: Mapping[int, float]  # By nodes, seconds.


def cases(trials: int) -> Iterator[Case]:
    for number, (name, kind) in enumerate(KINDS.items()):
        for trial in range(trials):
            rng = np.random.default_rng([SEED, number, trial])
            machine = machine_of(rng, kind)
            effects = machine.hosts(rng, ASKED[-1])
            known = replace(machine, hosts=lambda _, nodes, all_of=effects: all_of[:nodes])
            # Points are interleaved in one session; targets are of sessions of their own.
            session = replace(known, session_sd=0.0) if machine.session_sd < 0.01 else known
            ingredients = session.ingredients(rng, MEASURED, network=fitted(rng, machine.network))
            truth = {
                nodes: float(np.mean([run.step_s for run in known.point(rng, nodes, runs=3)[0].runs]))
                for nodes in ASKED
            }
            yield Case(kind=name, ingredients=ingredients, truth=truth)


def outcomes(found: Case, draws: int) -> Iterator[Outcome]:
    told = module.project(found.ingredients, [RANKS * nodes for nodes in ASKED], draws=draws)
    for one in told.targets:
        if one.parts:
            (low, high), truth = one.step.middle(90), found.truth[one.nodes]
            logs = [math.log(value / truth) for value in (low, one.step.median, high)]
            yield Outcome(kind=found.kind, doublings=round(one.doublings), low=logs[0], middle=logs[1], high=logs[2])


Mutation = AbstractContextManager[Any]
lateness, prices = module.lateness, module._Costs._prices


def patched(name: str, mutated: Any, owner: Any = module) -> Callable[[], Mutation]:
    return lambda: mock.patch.object(owner, name, mutated)


def changed(**fields: Callable[[Any], Any]) -> Callable[[], Mutation]:
    """A model with fields that are made of it."""
    model = module._model

    def mutated(*given: Any) -> Any:
        found = model(*given)
        is_model = isinstance(found, module._Model)
        return replace(found, **{name: made(found) for name, made in fields.items()}) if is_model else found

    return patched("_model", mutated)


def with_double_beta(costs: Any) -> Any:
    """Costs of which those between nodes are twice as dear per byte."""
    network = costs.network
    (piece,) = network.across.pieces
    dearer = piece.model_copy(update={"beta_s_per_byte": 2 * piece.beta_s_per_byte})
    update = {
        "across": network.across.model_copy(update={"pieces": (dearer,)}),
        "draws": tuple((*one[:3], 2 * one[3], one[4]) for one in network.draws),
    }
    return replace(costs, network=network.model_copy(update=update))


def beta_doubled(self: Any, ranks: int, way: Any) -> Any:
    return prices(with_double_beta(self) if ranks > self.ingredients.anchor.ranks else self, ranks, way)


def measured_hosts(scatter: Any, nodes: int, draws: int, **_: bool) -> np.ndarray:
    return lateness(scatter, min(nodes, MEASURED[-1]), draws, is_measured=True)


def no_jitter(scatter: Any, nodes: int, draws: int, **more: bool) -> np.ndarray:
    return lateness(scatter.model_copy(update={"maxima": ()}), nodes, draws, **more)


MUTATIONS: Mapping[str, Callable[[], Mutation]] = {
    "stragglers stay as they are": patched("lateness", lambda scatter, nodes, draws, **_: np.zeros(draws)),
    "no hosts but those that were measured": patched("lateness", measured_hosts),
    "no jitter of nodes": patched("lateness", no_jitter),
    "the model has no error of its own": patched(
        "drawn", lambda self, doublings, draws, seed: np.ones(draws), ModelError
    ),
    "the model's error does not learn": patched(
        "model_error", lambda seen, **_: model_error((), prior_scale=module.STEP_SCALE)
    ),
    "messages cost what they did": patched(
        "_prices", lambda self, ranks, way: prices(self, self.ingredients.anchor.ranks, way), module._Costs
    ),
    "costs have no trend": changed(costs=lambda found: replace(found.costs, trend=0 * found.costs.trend)),
    "a ring stands for every library": patched("STAND_INS", ("ring",)),
    "the outer beta is doubled beyond the anchor": patched("_prices", beta_doubled, module._Costs),
    "costs are not scaled to the measured exchange": patched(
        "_calibrated", lambda prices, anchor, drawn, shown, exchange: np.ones_like(exchange)
    ),
    "the exchange is the model's, not the account's": changed(shown=lambda found: found.figures["exchange"]),
    "costs of messages are certain": changed(
        costs=lambda found: replace(found.costs, network=found.costs.network.model_copy(update={"draws": ()}))
    ),
}


def quick() -> Iterator[Figure]:
    """The same of few machines and draws, in two minutes."""
    yield from figures(QUICK, 200)


def figures(trials: int = TRIALS, draws: int = 500) -> Iterator[Figure]:
    """Coverage by doublings and by kind, width against the oracle, then every mutation."""
    known = list(cases(trials))
    found = [one for case in known for one in outcomes(case, draws)]

    def held(of: str, here: list[Outcome], goal: str, *, is_asked: bool) -> Figure:
        value, low, high = share(sum(one.is_held for one in here), len(here))
        return Figure(
            name=f"90 % bands hold the measured step, {of}",
            value=value,
            low=low,
            high=high,
            n=len(here),
            unit="% of steps",
            goal=goal,
            met=(low <= 95 and high >= 87) if is_asked else None,
            reason=f"median of projected over measured {100 * float(np.median([one.middle for one in here])):+.1f} %",
        )

    for doublings in sorted({one.doublings for one in found}):
        here, is_asked = [one for one in found if one.doublings == doublings], doublings <= 3
        goal = "87 to 95, within the scatter of the trials" if is_asked else "none"
        yield held(f"{doublings} doublings beyond 8 nodes, all kinds", here, goal, is_asked=is_asked)
        wide = float(np.median([one.high - one.low for one in here]))
        least, most = np.quantile([-one.middle for one in here], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        error = float(np.median([abs(one.middle) for one in here]))
        yield Figure(
            name=f"width of 90 % bands over an oracle's, {doublings} doublings beyond 8 nodes",
            value=wide / float(most - least),
            n=len(here),
            unit="ratio of median widths",
            goal="at most 1.5" if is_asked else "none",
            met=wide / float(most - least) <= 1.5 if is_asked else None,
            reason=f"told of {len(here)} of {len(known)}; width {100 * wide:.1f} %, median error {100 * error:.1f} %",
        )
    for kind in KINDS:
        here = [one for one in found if one.kind == kind and one.doublings <= 3]
        yield held(f"1 to 3 doublings, {kind}", here, "none: nobody is told the kind", is_asked=False)
    yield from mutations(known, found, draws)


def mutations(known: list[Case], found: list[Outcome], draws: int) -> Iterator[Figure]:
    """By how much each mutation makes the interval score worse, at 1 to 3 doublings."""

    def scores(outcomes: list[Outcome]) -> np.ndarray:
        """Of each machine."""
        return np.array([one.score for one in outcomes]).reshape(-1, len(ASKED))[:, :3].mean(axis=1)

    for name, mutation in MUTATIONS.items():
        with mutation():
            told = [one for case in known for one in outcomes(case, draws)]
        if len(told) != len(found):
            yield Figure(name=f"mutation: {name}", value=None, unit="", goal="worse", reason="refuses other machines")
            continue
        worse = 100 * (scores(told) - scores(found)) / scores(found).mean()
        value, error = float(worse.mean()), 1.96 * float(worse.std(ddof=1)) / math.sqrt(len(worse))
        yield Figure(
            name=f"mutation: {name}: interval score grows by",
            value=value,
            low=value - error,
            high=value + error,
            n=len(worse),
            unit="%",
            goal="above 0",
            met=value > error,
            reason=f"{100 * np.mean([one.is_held for one in told if one.doublings <= 3]):.1f} % held",
        )

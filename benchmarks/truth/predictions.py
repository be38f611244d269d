"""Predictions against truths that are planted: fitted costs, times at more ranks.

Runs scatter as runs do: everything that one run measures is slow or fast by a factor of its own (lognormal), and each
point by some 2 % besides. The truth is known, because the model's own costs made the times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.figures import Figure
from benchmarks.gate import share
from dlbench.comm.predictions import PredictionRequest, predict_all
from dlbench.perfmodels.link_fit import Observation, fit_network, hold_out_largest
from dlbench.perfmodels.predictions import features, predict
from dlbench.perfmodels.schedules import Layout
from dlbench.specs.comm import Collective, Level, NetworkModel, Piece
from dlbench.stats.multiplicity import resampled

SEED = 20_260_401
NOMINAL = 95.0

ALGORITHMS: tuple[tuple[Collective, str], ...] = (
    ("allreduce", "ring"),
    ("allreduce", "recursive-doubling"),
    ("allreduce", "hierarchical"),
    ("broadcast", "binomial-tree"),
)
SIZES = tuple(2**k for k in range(10, 27, 4))
POINT_SD = 0.02
FITS = 80
GROUP = 2
MEASURED, BEYOND = (4, 8), 16
"""Rank counts that fits see, and one that they do not."""
CASES: dict[str, Callable[[int], float]] = {
    "the model is right": lambda ranks: 1.0,
    "links congest by 5 % a doubling": lambda ranks: 1.05 ** math.log2(ranks / 4),
    "links congest by 15 % a doubling": lambda ranks: 1.15 ** math.log2(ranks / 4),
    "a switch beyond the points": lambda ranks: 2.0 if ranks > 16 else 1.0,
}
"""What a byte between groups costs at so many ranks, over what it costs at 4; `predicted_times` fits 4, 8 and 16."""


def figures() -> Iterator[Figure]:
    """Costs and predicted times."""
    for scatter in (0.05, 0.1):
        yield from fitted_costs(scatter)
    yield congested()
    for case in CASES:
        yield from predicted_times(case)


def covered(name: str, hits: Sequence[bool], *, unit: str = "% of trials", goal: float = NOMINAL - 1.5) -> Figure:
    """A coverage: met unless its interval lies below the goal."""
    value, low, high = share(sum(hits), len(hits))
    return Figure(
        name=name,
        value=value,
        low=low,
        high=high,
        n=len(hits),
        unit=unit,
        goal=f"at least {goal:g}, within the scatter of the trials",
        met=high >= goal,
    )


def network(inside: tuple[float, float] = (2e-5, 3e-10), across: tuple[float, float] = (1e-4, 4e-8)) -> NetworkModel:
    """One piece at each level."""

    def level(alpha: float, beta: float, links: int | None = None) -> Level:
        return Level(pieces=(Piece(alpha_s=alpha, beta_s_per_byte=beta),), links=links)

    return NetworkModel(system="simulated", transport="none", inside=level(*inside), across=level(*across, 1))


def measured(
    generator: np.random.Generator,
    ranks: Sequence[int],
    *,
    runs: int,
    scatter: float,
    slow: Callable[[int], float] = lambda ranks: 1.0,
) -> tuple[list[Observation], list[dict[int, float]]]:
    """Observed medians, and the times of each run; bytes between groups cost so many times more at each rank count."""
    observations, by_run = [], []
    for count in ranks:
        layout = Layout(ranks=count, group_size=GROUP)
        truth = network(across=(1e-4, 4e-8 * slow(count)))
        effect = np.exp(generator.normal(0, scatter, runs))
        for collective, algorithm in ALGORITHMS:
            for size in SIZES:
                seconds = predict(collective, algorithm, size, layout, truth)
                times = seconds * effect * np.exp(generator.normal(0, POINT_SD, runs))
                by_run.append({count * 1000 + run: float(one) for run, one in enumerate(times)})
                observations.append(
                    Observation(
                        collective=collective,
                        algorithm=algorithm,
                        layout=layout,
                        num_bytes=size,
                        element_bytes=4,
                        shards=None,
                        seconds=float(np.median(times)),
                    )
                )
    return observations, by_run


def fit(observations: Sequence[Observation], by_run: Sequence[dict[int, float]], runs: int) -> NetworkModel:
    """As `dlbench comm fit` does it."""
    return fit_network(
        observations,
        system="simulated",
        transport="none",
        sources=(),
        fitted="",
        resampled=resampled(by_run, centre="median"),
        runs=runs,
    )


def fitted_costs(scatter: float, *, trials: int = FITS, runs: int = 5) -> Iterator[Figure]:
    """Coverage of alpha and beta, and of times at a rank count that was not measured; the model is right."""
    truth, layout = network(), Layout(ranks=BEYOND, group_size=GROUP)
    assert truth.inside is not None
    assert truth.across is not None
    costs: dict[str, list[bool]] = {}
    for trial in range(trials):
        generator = np.random.default_rng([SEED, round(1000 * scatter), trial])
        found = fit(*measured(generator, MEASURED, runs=runs, scatter=scatter), runs)
        for where, level, true in (("inside", found.inside, truth.inside), ("across", found.across, truth.across)):
            assert level is not None
            one, right = level.pieces[0], true.pieces[0]
            assert one.alpha_interval_s is not None
            assert one.beta_interval_s_per_byte is not None
            low, high = one.alpha_interval_s
            costs.setdefault(f"alpha {where}", []).append(low <= right.alpha_s <= high)
            low, high = one.beta_interval_s_per_byte
            costs.setdefault(f"beta {where}", []).append(low <= right.beta_s_per_byte <= high)
        for size in (SIZES[0], SIZES[-1]):
            drawn = features("allreduce", "ring", size, layout, found).drawn(found)
            low, high = np.percentile(drawn, [2.5, 97.5])
            seconds = predict("allreduce", "ring", size, layout, truth)
            name = f"time of a ring of {size:,} bytes at {BEYOND} ranks, fitted at {MEASURED[0]} and {MEASURED[1]}"
            costs.setdefault(name, []).append(bool(low <= seconds <= high))
    for name, hits in costs.items():
        yield covered(f"interval holds {name}, run sd {scatter:.0%}, {runs} runs", hits)


def congested(*, trials: int = 10) -> Figure:
    """Links that lose 15 % with each doubling: the error printed over the true one, a doubling beyond the points."""
    size, ratios = SIZES[-1], []
    for trial in range(trials):
        generator = np.random.default_rng([SEED, 3, trial])
        observations, by_run = measured(
            generator, (4, 8, 16), runs=5, scatter=0.02, slow=CASES["links congest by 15 % a doubling"]
        )
        found = fit(observations, by_run, 5)
        told = hold_out_largest(observations)
        assert told is not None
        truth = network(across=(1e-4, 4e-8 * 1.15**3))
        layout = Layout(ranks=32, group_size=GROUP)
        true = predict("allreduce", "ring", size, layout, found) / predict("allreduce", "ring", size, layout, truth)
        ratios.append((1 - told.by_size[-1].ratio) / (1 - true))
    low, value, high = np.percentile(ratios, [2.5, 50, 97.5])
    return Figure(
        name="links that congest by 15 % a doubling: error printed over the true one a doubling beyond the points",
        value=float(value),
        low=float(low),
        high=float(high),
        n=trials,
        unit="ratio, median and middle 95 % of trials",
        goal="0.5 to 2",
        met=bool(0.5 <= value <= 2),
    )


def predicted_times(case: str, *, trials: int = 10, runs: int = 5, scatter: float = 0.02) -> Iterator[Figure]:
    """Coverage of `dlbench comm predict` at the largest fitted rank count and beyond, and width of its intervals."""
    slow, sizes = CASES[case], (SIZES[0], SIZES[2], SIZES[-1])
    wanted = PredictionRequest(sizes=sizes, group_size=GROUP, algorithms=("ring", "recursive-doubling", "hierarchical"))
    hits: dict[int, list[bool]] = {16: [], 32: [], 64: []}
    widths: dict[int, list[float]] = {ranks: [] for ranks in hits}
    for trial in range(trials):
        generator = np.random.default_rng([SEED, 6, trial])
        observations, by_run = measured(generator, (4, 8, 16), runs=runs, scatter=scatter, slow=slow)
        found = fit(observations, by_run, runs).model_copy(update={"largest_held_out": hold_out_largest(observations)})
        for one in predict_all(found, tuple(hits), wanted).predictions:
            truth = network(across=(1e-4, 4e-8 * slow(one.ranks)))
            layout = Layout(ranks=one.ranks, group_size=GROUP)
            for series in one.series:
                assert series.low is not None
                assert series.high is not None
                for size, low, high in zip(sizes, series.low, series.high, strict=True):
                    hits[one.ranks].append(low <= predict("allreduce", series.name, size, layout, truth) <= high)
                    widths[one.ranks].append(math.sqrt(high / low))
    for ranks, found_here in hits.items():
        name = f"comm predict holds the true time at {ranks} ranks, fitted at 4, 8 and 16: {case}"
        reason = f"median half width: a factor of {np.median(widths[ranks]):.2f}"
        one = replace(covered(name, found_here, unit="% of times"), reason=reason)
        is_hidden = "switch" in case and ranks > 16
        yield replace(one, goal="none: no point tells of it", met=None) if is_hidden else one

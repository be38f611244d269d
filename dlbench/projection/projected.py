"""The result of a projection: step, throughput and efficiency of each target with bands and flags, or reasons to refuse
it, each with a code, a sentence and a remedy.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dlbench import bundled
from dlbench.lazy import Array, np
from dlbench.projection.ingredients import Ingredients, PointFigures
from dlbench.report.formats.data import HIDDEN
from dlbench.report.table import column
from dlbench.report.wording import percent, ranks_text, sentence
from dlbench.specs.files import read_yaml
from dlbench.stats.estimates import Estimate
from dlbench.stats.multiplicity import LEAST_RUNS
from dlbench.units import and_text

QUANTILES = (0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.975)
"""Quantiles of a band: ends of the middle 95, 90, 80 and 50 % of the draws, and their median."""

PARTS = ("compute", "optimizer", "input", "host", "straggler", "exchange")
"""Parts of a projected step in the order of printing; they sum to the step in every draw. `compute` is forward and
backward, `host` all causes that have no model (host, launch, throttling, memory, rest)."""

FARTHEST = 64  # Largest projected rank count over the largest measured one.
FAR = 8  # Rank count over the largest measured one above which a figure is flagged.
FARTHEST_BY_POINTS = 4
"""`FARTHEST` for points only: series of large machines were 4 to 14 % off at 8 to 16 times the ranks, some 40 %."""

LEAST_ROWS = 10  # Rows of a system from which its ledger replaces the prior error of the model.
MIN_POINTS = 3  # Rank counts of a curve through points only; every curve passes through two.
UNSTABLE = 0.15  # Scatter of runs (standard deviation over mean) above which the machine changed between them.
SMALLEST_BATCH = 4  # Smallest measured batch over the smallest projected one, at most.
LEAST_HOSTS = 4  # Hosts needed to estimate their scatter.
LEAST_SLOWER = 0.03  # Log of a slow host's work over that of the median host, at least.
TAIL = 4  # Observed node-steps per node below which the slowest node is slower than any observed one.
MOST_BUSY = 0.6  # Share of time of shared cores above which steps mostly wait for a core.
SCALE = 3.0  # Factor by which network costs may be too high or too low for the measured exchange.
UNEXPLAINED = 0.5
"""Share of the measured exchange that the network's costs may leave unexplained."""

SMALL = 0.05  # Share of a step below which unexplained exchange does not matter.
WITH_MODEL = ("serial", "data", "out-of-core")  # Strategies that the model of the step covers.
LEAST_EXPLAINED = 0.2  # Share of the exchange that costs must explain for a projection to another exchange.


@dataclass(frozen=True, kw_only=True)
class Band:
    """A projected figure: quantiles of its draws."""

    quantiles: tuple[float, ...]  # By `QUANTILES`.

    @classmethod
    def of(cls, draws: Array) -> Band:
        return cls(quantiles=tuple(float(quantile) for quantile in np.quantile(draws, QUANTILES)))

    @property
    def median(self) -> float:
        return self.quantiles[QUANTILES.index(0.5)]

    def middle(self, percent: Literal[50, 80, 90, 95]) -> tuple[float, float]:
        index = {95: 0, 90: 1, 80: 2, 50: 3}[percent]
        return self.quantiles[index], self.quantiles[-1 - index]


def figure(band: Band, unit: str, level: Literal[80, 95] = 80) -> Estimate:
    """Returns the median of a band with the ends of its middle `level` %."""
    low, high = band.middle(level)
    return Estimate(band.median, low, high, 1, "fit", unit, level=level / 100)


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """A part of a step, seconds."""

    name: str  # One of `PARTS`.
    seconds: Band


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A warning on a projected figure."""

    code: str  # F1, F2, ...
    text: str


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The reason why a target, or all, are not projected."""

    code: str = field(metadata=column("Code"))  # R1, R2, ...
    ranks: int | None = field(metadata=column("Ranks", text="{:,}".format, missing="all"))  # None: all targets.
    text: str = field(metadata=column("Why", value=sentence))
    remedy: str = field(metadata=column("Remedy"))  # What to measure or to change.


@dataclass(frozen=True, kw_only=True)
class Target:
    """The projection of one rank count."""

    ranks: int
    nodes: int
    batch_per_rank: int | None
    doublings: float  # log2(ranks / ranks of the anchor).
    step: Band  # Seconds.
    throughput: Band | None  # Samples per second, all ranks; None: the batch is not known.
    efficiency: Band | None  # Share of the ideal, against the smallest measured point.
    parts: tuple[StepPart, ...]  # Empty for points only.
    model_error: Band  # Factor on the step by the error of the model.
    algorithms: tuple[str, ...]  # Algorithms that the library may use, in words.
    flags: tuple[Flag, ...]
    drawn: Any = field(default_factory=dict, repr=False, compare=False, metadata={HIDDEN: False})
    """Arrays of shape (draws,): `step`, the model's `error` on it, and its parts; empty if written by hand."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A measured point, projected from the points below it."""

    ranks: int
    anchor_ranks: int
    doublings: float
    projected_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.projected_s / self.measured_s - 1


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A projection of all targets."""

    digest: str  # Digest of the ingredients.
    anchor_ranks: int
    anchor_nodes: int
    changes: tuple[str, ...]  # Changes by `--set` and `--system`, in words.
    targets: tuple[Target, ...]
    refused: tuple[Refused, ...]
    held_out: tuple[HeldOut, ...]
    flags: tuple[Flag, ...]  # Flags of all targets.
    # Median of rho of `step`, the factor on the network's costs.
    cost_scale: float = field(default=1.0, metadata={HIDDEN: False})


def counts_text(values: Sequence[int]) -> str:
    """Returns rank counts in words, e.g. `2, 4 and 8`."""
    return and_text([f"{value:,}" for value in values])


@functools.cache
def code_texts() -> dict[str, Any]:
    """Returns the tables of `reports/projection.yaml`: texts by code, with names in braces for values."""
    return read_yaml(bundled.folder("reports") / "projection.yaml")


def refused(code: str, target: int | None, /, **words: object) -> Refused:
    """Returns a refusal of the table. `target`: its rank count; None: all."""
    texts = code_texts()["refusals"][code]
    text, remedy = texts["text"].format(**words), texts["remedy"].format(**words)
    return Refused(code=code, ranks=target, text=text, remedy=remedy)


def flagged(code: str, /, **words: object) -> Flag:
    """Returns a flag of the table."""
    return Flag(code=code, text=code_texts()["flags"][code].format(**words))


def reasons(ingredients: Ingredients, ranks: int, *, by: Literal["model", "points"] = "model") -> tuple[Refused, ...]:
    """Returns all reasons of the ingredients to refuse a rank count; empty: none. `by`: the model, or points only."""
    without_model = tuple(_of_kind(ingredients, ranks))
    if by == "model" and not without_model:
        return (*_of_any(ingredients, ranks, FARTHEST), *_of_model(ingredients, ranks))
    by_points = (*_of_any(ingredients, ranks, FARTHEST_BY_POINTS), *_of_points(ingredients, ranks))
    if ingredients.is_series:
        texts = code_texts()["series_remedies"]
        values = {"least_runs": LEAST_RUNS, "least_points": MIN_POINTS}
        remedies = {code: text.format(**values) for code, text in texts.items()}
        return tuple(replace(refusal, remedy=remedies.get(refusal.code, refusal.remedy)) for refusal in by_points)
    if by == "points":
        return by_points
    return (*by_points, *without_model)


def usable_points(ingredients: Ingredients, ranks: int, least_runs: int = LEAST_RUNS) -> list[PointFigures]:
    """Returns the points for a curve to a rank count. For several nodes these are on several nodes, and a single full
    node if there are too few, as steps inside a node differ.
    """
    points = [
        point
        for point in ingredients.points
        if len(point.runs) >= least_runs and point.batch_per_rank == ingredients.batch_at(point.ranks)
    ]
    if ingredients.nodes_of(ranks) == 1:
        return points
    beyond = [point for point in points if point.nodes > 1]
    if len(beyond) >= MIN_POINTS:
        return beyond
    return [point for point in points if point.nodes > 1 or point.ranks == ingredients.per_node]


def _of_any(ingredients: Ingredients, ranks: int, farthest: int) -> Iterator[Refused]:
    first, anchor, per_node = ingredients.points[0].ranks, ingredients.anchor, ingredients.per_node
    if ingredients.is_crowded:
        yield refused("R4", None, what="ranks shared cores, so the points do not show the step of more ranks")
    for point in ingredients.points:
        steps = [run.step_s for run in point.runs]
        if len(steps) > 1 and statistics.stdev(steps) / statistics.fmean(steps) > UNSTABLE:
            scatter = percent(statistics.stdev(steps) / statistics.fmean(steps))
            yield refused("R6", None, ranks=ranks_text(point.ranks), scatter=scatter, most=percent(UNSTABLE, 0))

    def out_of_range(reason: str, remedy: str) -> Refused:
        return refused("R7", ranks, what=reason, other=remedy)

    if ranks < first:
        reason = f"{ranks_text(ranks)} are fewer than the smallest measured count, {first:,}"
        yield out_of_range(reason, "choose a larger count, or measure this one")
    if ranks > farthest * anchor.ranks:
        reason = f"{ranks_text(ranks)} are more than {farthest} times the largest measured count, {anchor.ranks:,}"
        yield out_of_range(reason, f"measure {ranks_text(-(-ranks // farthest))} or more")
    if ranks > per_node and ranks % per_node:
        reason = f"{ranks_text(ranks)} do not fill nodes of {per_node}"
        yield out_of_range(reason, f"choose {ingredients.nodes_of(ranks) * per_node:,}")
    if ingredients.nodes_of(ranks) > 1 and anchor.nodes == 1:
        yield refused("R2", ranks)
    if ingredients.scaling == "strong" and anchor.batch_per_rank and ingredients.batch_at(ranks) is None:
        global_batch = anchor.batch_per_rank * anchor.ranks
        reason = f"a global batch of {global_batch:,} samples cannot be divided among {ranks_text(ranks)}"
        yield out_of_range(reason, "choose a divisor of the batch")


def _of_points(ingredients: Ingredients, ranks: int) -> Iterator[Refused]:
    anchor, is_beyond = ingredients.anchor, ingredients.nodes_of(ranks) > 1
    points = usable_points(ingredients, ranks, least_runs=1)
    is_long_enough = len(points) >= MIN_POINTS
    short = [point.ranks for point in points if len(point.runs) < LEAST_RUNS]
    if len(anchor.runs) < LEAST_RUNS or (is_long_enough and len(usable_points(ingredients, ranks)) < MIN_POINTS):
        yield refused("R1", None, ranks=f"{counts_text(short or [anchor.ranks])} ranks", least=LEAST_RUNS)
    if is_long_enough or (is_beyond and anchor.nodes == 1):  # The latter is R2.
        return
    counts = "rank counts"
    if is_beyond:
        counts = f"counts of full nodes ({ranks_text(ingredients.per_node)} each)"
    reason = f"a curve needs at least {MIN_POINTS} {counts}, and there are {len(points)}"
    if points:
        reason += f": {counts_text([point.ranks for point in points])} ranks"
    yield refused("R7", ranks, what=reason, other=f"measure {MIN_POINTS - len(points)} more")


def _of_kind(ingredients: Ingredients, ranks: int) -> Iterator[Refused]:
    anchor, exchange = ingredients.anchor, ingredients.exchange
    if not anchor.runs[0].parts:
        yield refused("R8", ranks, what="the parts of the step are not known")
    if anchor.strategy not in ("", *WITH_MODEL):
        reason = f"the model of the step does not include the collectives of {anchor.strategy}"
        yield refused("R8", ranks, what=reason)
    elif any(run.parts.get("gather") for run in anchor.runs):
        yield refused("R8", ranks, what="steps include waiting for parameters, which the model does not include")
    if anchor.ranks > 1 and exchange is None:
        yield refused("R8", ranks, what="the exchange was not recorded")
    elif exchange is not None and exchange.averages_parameters:
        yield refused("R8", ranks, what="ranks averaged parameters, and the model exchanges gradients in each step")


def _of_model(ingredients: Ingredients, ranks: int) -> Iterator[Refused]:
    anchor, network, nodes = ingredients.anchor, ingredients.network, ingredients.nodes_of(ranks)
    if len(anchor.runs) < LEAST_RUNS:
        yield refused("R1", None, ranks=ranks_text(anchor.ranks), least=LEAST_RUNS)
    cores, core_use = ingredients.shared_cores, (anchor.core_use or 0.0) * ranks / anchor.ranks
    if cores is not None and core_use > MOST_BUSY and ranks != anchor.ranks:
        reason = (
            f"all nodes share {cores} cores of one machine, which {ranks_text(ranks)} would use for "
            f"{percent(core_use, 0)} of the time (at most {percent(MOST_BUSY, 0)})"
        )
        yield refused("R4", ranks, what=reason)
    leaf = ingredients.nodes_per_leaf
    needed = []
    if ingredients.per_node > 1:
        needed.append(("inside", "inside a node", "2,4"))
    if nodes > 1:
        needed.append(("across", "between nodes", "2,4"))
    if leaf is not None and nodes > leaf and ingredients.leaf_taper is None:
        needed.append(("beyond", "beyond a leaf switch", f"{2 * leaf}  # on two leaves"))
    missing = [item for item in needed if network is None or item[0] not in network.levels]
    if ranks > 1 and missing:
        system, node_counts = ingredients.system or "SYSTEM", missing[-1][2]
        levels = " and ".join(words for _, words, _ in missing)
        yield refused("R3", ranks, level=levels, system=system, measured=node_counts)
    batch = ingredients.batch_at(ranks)
    if ingredients.scaling == "strong" and ingredients.measured_at(ranks) is None:
        batches = sorted(figures.batch_per_rank for figures in ingredients.batches)
        if len(batches) < 2 and (batch or not anchor.batch_per_rank):  # Else it is R7.
            reason = "the batch per rank changes, and the work was measured at only one batch"
            yield refused("R9", ranks, what=reason, batch=batch or "OTHER")
        elif batch is not None and batch * SMALLEST_BATCH < batches[0]:
            reason = f"{batch} samples per rank are less than a quarter of the smallest measured batch, {batches[0]}"
            yield refused("R9", ranks, what=reason, batch=batch)


def flags(ingredients: Ingredients, ranks: int, *, by: Literal["model", "points"] = "model") -> tuple[Flag, ...]:
    """Returns the flags of the ingredients on a figure at a rank count. `by`: source of the figure."""
    raised = []
    nodes, scatter = ingredients.nodes_of(ranks), ingredients.nodes
    if nodes > 1 and sum(point.nodes > 1 for point in ingredients.points) == 1:
        raised.append(flagged("F1"))
    times = ranks / ingredients.anchor.ranks
    if times > FAR:
        raised.append(flagged("F2", times=f"{times:g}"))
    hosts = 0 if scatter is None else len(scatter.hosts)
    if by == "model" and nodes > 1 and hosts < LEAST_HOSTS:
        raised.append(flagged("F3", hosts=hosts, least=LEAST_HOSTS))
    elif by == "model" and scatter is not None and nodes > max(1, scatter.num_maxima / TAIL):
        raised.append(flagged("F4", nodes=nodes, observed=scatter.num_maxima))
    effects = (0.0,) if scatter is None else scatter.hosts
    is_one_slow = max(effects) - statistics.median(effects) >= LEAST_SLOWER
    if by == "model" and nodes > hosts >= LEAST_HOSTS and not is_one_slow and ingredients.slow_hosts is None:
        # With this share of slow hosts the chance that none is among the measured ones is 5 %.
        raised.append(flagged("F11", hosts=hosts, share=percent(1 - 0.05 ** (1 / hosts), 0)))
    leaf, taper, network = ingredients.nodes_per_leaf, ingredients.leaf_taper, ingredients.network
    if by == "model" and leaf and taper and nodes > leaf and network is not None and network.beyond is None:
        raised.append(flagged("F9", taper=taper))
    by_point = [frozenset(run.session for run in point.runs) for point in ingredients.points]
    sessions = frozenset().union(*by_point)
    if any(of_point != sessions for of_point in by_point):
        raised.append(flagged("F6", sessions=len(sessions)))
    return tuple(raised)

"""Costs of a network from measured collectives: alpha and beta of each level, gamma, breaks in size.

Collectives are priced as in `dlbench.perfmodels.predictions`. Errors are relative and absolute values count, so that
all sizes weigh alike and a few slow points do not move the costs (`dlbench.perfmodels.lines`).

A cost more is taken in only if Schwarz's criterion of the relative errors (Laplace: 2 N ln(mean |error|) + k ln N)
falls by more than `CLEAR_GAIN`, very strong evidence by Kass & Raftery (1995): gamma, which all-reduces alone cannot
separate from beta, and breaks in the size of messages, where a transport changes its protocol.

The steps of all measured collectives are arrays, so that a fit can price all at once. Columns of costs: alpha and beta
of each piece, by level from inside groups outwards, then gamma.

Costs of a given structure are found by alternating between rows and costs. Which port or link is the slowest of a step
depends on the costs themselves. So with the costs in hand, the slowest of each step gives one row a point; the rows
give new costs by one step towards least absolute relative errors; and again. The best round counts.
"""

from __future__ import annotations

import bisect
import copy
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dlbench.errors import UserError
from dlbench.lazy import Array, Flags, np, npt
from dlbench.perfmodels.lines import reweighted
from dlbench.perfmodels.patterns import ONE_LINK, Sharing, summarise
from dlbench.perfmodels.predictions import whole_elements
from dlbench.perfmodels.schedules import Layout
from dlbench.specs.comm import (
    LEVELS,
    Collective,
    FittedRange,
    LargestHeldOut,
    Level,
    LevelName,
    NetworkModel,
    Piece,
    Residual,
    SizeBias,
)

if TYPE_CHECKING:
    Indices = npt.NDArray[np.int64]


CLEAR_GAIN = 10.0
MOST_BREAKS = 3  # Breaks of all levels together, at most.
MOST_NEAR = 6  # Sizes around the best octave at which a break is tried, about.
POINTS_OF_A_PIECE = 4  # Points that must have messages of a piece.
SMALLEST_MEAN_ERROR = 1e-4  # Mean relative errors below this count as this large: exact data need no cost more.
DIGITS = 6  # Significant digits of a drawn cost: far below its scatter.
ROUNDS = 60
PATIENCE = 6  # Rounds without a better fit after which the rounds end.
# Alpha and beta of each level from which fitting starts; the best end counts, the last where leaf switches differ.
_FAST, _SLOW, _SLOWER = (1e-5, 1e-10), (1e-4, 1e-8), (1e-3, 1e-6)
_STARTS = ((_FAST, _FAST, _FAST), (_FAST, _SLOW, _SLOW), (_FAST, _SLOW, _SLOWER))


def fit_network(
    observations: Sequence[Observation],
    *,
    system: str,
    transport: str,
    sources: Sequence[str],
    fitted: str,
    sharing: Sharing = ONE_LINK,
    resampled: Array | None = None,
    runs: int = 1,
) -> NetworkModel:
    """The network that the measured collectives show.

    A level without a message in them is None. A level whose messages never decided a step has alpha and beta 0 with an
    interval up to those of the level next to it: the points only show that it is no slower. Intervals are the middle 95
    % of fits to resampled runs, each begun from the costs of the fit, with its breaks.

    `fitted`: when, UTC, ISO 8601. `resampled`: seconds of every point in each resample of the runs, shape (resamples,
    points); None: single runs. `runs`: behind each point, at least.
    """
    table = LoadTable(observations, sharing)
    fit = _fit(table, observations)
    apart = _held_out(table, observations, fit)
    errors = [abs(predicted / seen.seconds - 1) for seen, predicted in apart]
    drawn: Array | None = None
    if resampled is not None:
        everything, costs = np.ones(len(table.seconds), dtype=bool), []
        for again in resampled:
            other = copy.copy(table)
            other.seconds = again
            costs.append(descend(other, fit.structure, everything, fit).costs)
        drawn = np.array(costs)
    intervals = None if drawn is None else np.quantile(drawn, [0.025, 0.975], axis=0)
    return NetworkModel(
        system=system,
        transport=transport,
        inside=_level(table, fit, intervals, "inside", sharing.inside),
        across=_level(table, fit, intervals, "across", sharing.across),
        beyond=_level(table, fit, intervals, "beyond", sharing.beyond),
        gamma_s_per_byte=float(fit.costs[-1]),
        median_error=statistics.median(errors) if errors else None,
        num_points=len(observations),
        fitted_over=_range(observations, runs),
        residuals=_residuals(observations, fit, apart),
        draws=() if drawn is None else _draws(table, fit.structure, drawn),
        sources=tuple(sources),
        fitted=fitted,
    )


def _range(observations: Sequence[Observation], runs: int) -> FittedRange:
    def distinct(values: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(set(values)))

    sizes = [seen.num_bytes for seen in observations]
    return FittedRange(
        ranks=distinct(seen.layout.ranks for seen in observations),
        group_sizes=distinct(min(seen.layout.group_size, seen.layout.ranks) for seen in observations),
        num_groups=distinct(seen.layout.num_groups for seen in observations),
        sizes=(min(sizes), max(sizes)),
        runs=runs,
    )


def _residuals(
    observations: Sequence[Observation], fit: CostFit, apart: Sequence[tuple[Observation, float]]
) -> tuple[Residual, ...]:
    """What fits without a point miss there, where they predict it: the fit itself bends towards its points, and an
    interval of its own residuals would hold too few new ones (cross-validated residuals: Barber, Candes, Ramdas &
    Tibshirani 2021, "Predictive inference with the jackknife+"). Of n points the next lies between the extremes with
    probability (n - 1) / (n + 1) alone, so that few of one algorithm are widened to the middle 95 % of all points.
    """
    found: dict[tuple[str, str, int], list[float]] = {}
    unseen = {id(seen): seconds for seen, seconds in apart}
    for seen, fitted in zip(observations, (fit.rows @ fit.costs).tolist(), strict=True):
        seconds = unseen.get(id(seen), fitted)
        if seconds > 0:
            found.setdefault((seen.collective, seen.algorithm, seen.layout.ranks), []).append(seen.seconds / seconds)
    low, high = np.quantile([ratio for ratios in found.values() for ratio in ratios] or [1.0], [0.025, 0.975]).tolist()
    return tuple(
        Residual(
            collective=collective, algorithm=algorithm, ranks=ranks, least=min(low, *ratios), most=max(high, *ratios)
        )
        for (collective, algorithm, ranks), ratios in found.items()
    )


def hold_out_largest(observations: Sequence[Observation]) -> LargestHeldOut | None:
    """The points of the largest rank count as a fit to all others predicts them: what a step beyond them is worth.

    That fit chooses everything anew: breaks, gamma, and what ranks share. None where there is one rank count only, or
    where the others are too few or do not determine a single point of it.
    """
    largest = max(seen.layout.ranks for seen in observations)
    others = [seen for seen in observations if seen.layout.ranks < largest]
    if not others:
        return None
    try:
        sharing, _ = choose_sharing(others)
        table = LoadTable(others, sharing)
        fit = _fit(table, others)
    except UserError:
        return None
    wanted = [seen for seen in observations if seen.layout.ranks == largest]
    beyond = LoadTable(wanted, sharing)
    rows = beyond.rows(beyond.loads(fit.structure), fit.costs, gamma=fit.structure.gamma)
    known = np.flatnonzero((fit.rows > 0).any(axis=0)).tolist()
    predicted = rows @ fit.costs
    found = {
        index: (seen.num_bytes, float(predicted[index] / seen.seconds))
        for index, (seen, row) in enumerate(zip(wanted, rows, strict=True))
        if set(np.flatnonzero(row > 0).tolist()) <= set(known) and predicted[index] > 0
    }
    if not found:
        return None
    ratios = np.array([ratio for _, ratio in found.values()])
    return LargestHeldOut(
        ranks=largest,
        fitted_ranks=tuple(sorted({seen.layout.ranks for seen in others})),
        num_points=len(found),
        ratio=float(np.median(ratios)),
        median_error=float(np.median(np.abs(ratios - 1))),
        by_size=tuple(
            SizeBias(num_bytes=size, ratio=statistics.median(ratio for other, ratio in found.values() if other == size))
            for size in sorted({size for size, _ in found.values()})
        ),
    )


def held_out(observations: Sequence[Observation], sharing: Sharing = ONE_LINK) -> list[tuple[Observation, float]]:
    """Every point with its time predicted by a fit that did not see it: (point, seconds), in the order of the points.

    For each combination of size and rank count in the points, costs are fitted to the points of other sizes and other
    rank counts - of other sizes alone where all points have one rank count - and the points of the combination are
    predicted. Only which costs there are (breaks, gamma) is taken from the fit to all points. A point is left out
    where the other points do not determine a cost it needs, e.g. that of messages across groups.
    """
    table = LoadTable(observations, sharing)
    return _held_out(table, observations, _fit(table, observations))


def choose_sharing(observations: Sequence[Observation]) -> tuple[Sharing, list[tuple[Observation, float]]]:
    """What ranks share by the measurements: what predicts points held out best; with these predictions.

    Level by level from outside in, as the slower links decide most steps: one link for a block, or a port for each of
    its ranks; of a node's adapters also as many as divide its ranks. Each is kept only if it predicts better, and not
    by what rounding makes of equal ones.
    """
    best = ONE_LINK
    predictions = held_out(observations, best)
    layouts = {seen.layout for seen in observations}
    groups = {layout.group_size for layout in layouts if layout.num_groups > 1}
    common = math.gcd(*groups)
    tried: list[tuple[LevelName, int | None]] = []
    if any(seen.layout.num_leaves > 1 for seen, _ in predictions):  # else no point held out tells
        tried.append(("beyond", None))
    if max(groups, default=1) > 1:
        tried += [("across", links) for links in (None, *(n for n in range(2, common) if common % n == 0))]
    if any(layout.group_size > 1 for layout in layouts):
        tried.append(("inside", 1))
    for level, links in tried:
        others = held_out(observations, other := replace(best, **{level: links}))
        if others and predictions and _median_error(others) < _median_error(predictions) - 1e-9:
            best, predictions = other, others
    return best, predictions


def _median_error(predictions: Sequence[tuple[Observation, float]]) -> float:
    return statistics.median(abs(seconds / seen.seconds - 1) for seen, seconds in predictions)


def _held_out(table: LoadTable, observations: Sequence[Observation], fit: CostFit) -> list[tuple[Observation, float]]:
    sizes = np.array([seen.num_bytes for seen in observations])
    ranks = np.array([seen.layout.ranks for seen in observations])
    several = len(set(ranks.tolist())) > 1
    predicted: dict[int, float] = {}
    for size, count in sorted(set(zip(sizes.tolist(), ranks.tolist(), strict=True))):
        others = (sizes != size) & ((ranks != count) | (not several))
        if others.sum() <= _num_costs(table, fit.structure):
            continue
        apart = descend(table, fit.structure, others)
        known = (apart.rows[others] > 0).any(axis=0)
        for index in np.flatnonzero((sizes == size) & (ranks == count)).tolist():
            needed = (apart.rows[index] > 0) | (fit.rows[index] > 0)
            if known[needed].all():
                predicted[index] = float(apart.rows[index] @ apart.costs)
    return [(seen, predicted[i]) for i, seen in enumerate(observations) if i in predicted]


def _fit(table: LoadTable, observations: Sequence[Observation]) -> CostFit:
    least, sizes = _num_costs(table, Structure()) + 1, len({seen.num_bytes for seen in observations})
    if least == 1:
        raise UserError("fit: no point has a message: every one is of one rank alone")
    if len(observations) < least or sizes < 2:
        raise UserError(
            f"fit: needs {least} points or more of two sizes or more, here are {len(observations)} of {sizes}"
        )
    everything = np.ones(len(observations), dtype=bool)
    best = _with_gamma(table, descend(table, Structure(), everything), everything)
    for _ in range(MOST_BREAKS):
        better = min((_with_break(table, best, level, everything) for level in LEVELS), key=lambda fit: fit.error)
        if better is best:
            break
        best = better
    return _with_gamma(table, _moved(table, best, everything), everything)


def _moved(table: LoadTable, fit: CostFit, points: Flags) -> CostFit:
    """The fit with each break looked for again in the presence of the others."""
    best = fit
    for level in LEVELS:
        for size in fit.structure.breaks(level):
            others = tuple(other for other in best.structure.breaks(level) if other != size)
            without = descend(table, _with_breaks(best.structure, level, others), points, best)
            again = _with_break(table, without, level, points)
            best = min(best, again, key=lambda one: one.error)
    return best


def _num_costs(table: LoadTable, structure: Structure) -> int:
    levels = [level for level in LEVELS if len(table.sizes(level))]
    return sum(2 + 3 * len(structure.breaks(level)) for level in levels) + structure.gamma


def _clearly_better(table: LoadTable, new: CostFit, old: CostFit) -> bool:
    def criterion(fit: CostFit) -> float:
        points = len(table.seconds)
        misfit = 2 * points * math.log(max(fit.error, SMALLEST_MEAN_ERROR))
        return misfit + _num_costs(table, fit.structure) * math.log(points)

    return criterion(new) < criterion(old) - CLEAR_GAIN


def _with_gamma(table: LoadTable, fit: CostFit, points: Flags) -> CostFit:
    if fit.structure.gamma or not table.reduced.any():
        return fit
    new = descend(table, replace(fit.structure, gamma=True), points, fit)
    return new if _clearly_better(table, new, fit) else fit


def _with_break(table: LoadTable, fit: CostFit, level: LevelName, points: Flags) -> CostFit:
    """The fit with the best break more at a level, if that is clearly better; else the same fit. Breaks stand at sizes
    that messages have: first one an octave is tried, then those around the best of them.
    """
    sizes = table.sizes(level)
    octaves: dict[int, float] = {math.floor(math.log2(size)): size for size in sizes[:-1].tolist()}
    tried = {size: _broken(table, fit, level, size, points) for size in octaves.values()}
    right = {size: new for size, new in tried.items() if new is not None}
    if not right:
        return fit
    near = min(right, key=lambda size: right[size].error)
    others = [size for size in sizes[:-1].tolist() if near / 2 < size < near * 2 and size != near]
    closer = others[:: max(1, len(others) // MOST_NEAR)]
    finer = [right[near], *(_broken(table, fit, level, size, points) for size in closer)]
    best = min((new for new in finer if new is not None), key=lambda new: new.error)
    return best if _clearly_better(table, best, fit) else fit


def _broken(table: LoadTable, fit: CostFit, level: LevelName, size: float, points: Flags) -> CostFit | None:
    """The fit with a break more; None if a piece would hold too few points."""
    breaks = tuple(sorted({*fit.structure.breaks(level), math.ceil(size)}))
    new = descend(table, _with_breaks(fit.structure, level, breaks), points, fit)
    seen = (new.rows > 0).sum(axis=0)
    pieces = range(len(breaks) + 1)
    return new if all(seen[new.structure.column(level, i)] >= POINTS_OF_A_PIECE for i in pieces) else None


def _with_breaks(structure: Structure, level: LevelName, breaks: tuple[int, ...]) -> Structure:
    return replace(structure, limits={**structure.limits, level: breaks})


def _draws(table: LoadTable, structure: Structure, drawn: Array) -> tuple[tuple[float, ...], ...]:
    """As the file holds them: of the levels that it has."""
    columns = [
        structure.column(level, piece) + one
        for level in LEVELS
        if len(table.sizes(level))
        for piece in range(len(structure.breaks(level)) + 1)
        for one in (0, 1)
    ]
    return tuple(tuple(float(f"{cost:.{DIGITS}g}") for cost in draw[[*columns, -1]]) for draw in drawn)


def _level(
    table: LoadTable, fit: CostFit, intervals: Array | None, level: LevelName, links: int | None
) -> Level | None:
    if not len(table.sizes(level)):
        return None
    structure = fit.structure
    pieces = []
    for index, limit in enumerate((*structure.breaks(level), None)):
        alpha = structure.column(level, index)
        other = structure.column("inside" if level == "across" else "across", 0)
        ends: list[tuple[float, float] | None] = []
        for cost in (alpha, alpha + 1):
            if not fit.rows[:, cost].any():  # it never decided a step
                ends.append((0.0, float(fit.costs[other + cost - alpha])))
            else:
                ends.append(None if intervals is None else (float(intervals[0, cost]), float(intervals[1, cost])))
        pieces.append(
            Piece(
                up_to_bytes=limit,
                alpha_s=float(fit.costs[alpha]),
                beta_s_per_byte=float(fit.costs[alpha + 1]),
                alpha_interval_s=ends[0],
                beta_interval_s_per_byte=ends[1],
            )
        )
    return Level(pieces=tuple(pieces), links=links)


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One measured collective."""

    collective: Collective
    algorithm: str
    layout: Layout
    num_bytes: int  # Of each rank's whole buffer.
    element_bytes: int
    shards: int | None  # Servers of parameter-server; None: every rank is one.
    seconds: float  # Measured.
    chunks: int | None = None  # As of `counts`.


@dataclass(frozen=True)
class Structure:
    """Which costs a fit has: sizes in bytes up to which each piece goes (the last goes on), and whether gamma."""

    limits: Mapping[LevelName, tuple[int, ...]] = field(default_factory=dict)
    gamma: bool = False

    def breaks(self, level: LevelName) -> tuple[int, ...]:
        return self.limits.get(level, ())

    def column(self, level: LevelName, piece: int) -> int:
        """Column of alpha of a piece; beta's is the next."""
        before = LEVELS[: LEVELS.index(level)]
        return 2 * (sum(len(self.breaks(one)) + 1 for one in before) + piece)

    @property
    def columns(self) -> int:
        return 2 * sum(len(self.breaks(level)) + 1 for level in LEVELS) + 1


class LoadTable:
    """Loads of all steps of all observations."""

    def __init__(self, observations: Sequence[Observation], sharing: Sharing) -> None:
        entries: list[tuple[int, int, float, float, float]] = []  # load, level, bytes of a message, starts, bytes
        load_steps: list[int] = []
        steps: list[tuple[int, int]] = []  # observation, how many there are
        reduced = np.zeros(len(observations))
        for index, seen in enumerate(observations):
            elements = whole_elements(seen.num_bytes, seen.element_bytes)
            if elements < 1 or not 0 < seen.seconds < float("inf"):
                raise UserError(f"fit: {seen.num_bytes} bytes in {seen.seconds} s are no measurement")
            what = seen.collective, seen.algorithm, seen.layout, elements
            summary = summarise(*what, shards=seen.shards, chunks=seen.chunks, sharing=sharing)
            scale = seen.num_bytes / summary.elements
            for step, times in summary.steps:
                reduced[index] += times * step.reduced * scale
                if step.loads:
                    steps.append((index, times))
                for load in step.loads:
                    number, level, share = len(load_steps), LEVELS.index(load.level), scale / load.links
                    for name, count, n in load.starts:
                        entries.append((number, LEVELS.index(name), count * scale, float(n), 0.0))
                    for count, n in load.flows:
                        entries.append((number, level, count * scale, 0.0, n * count * share))
                    load_steps.append(len(steps) - 1)
        table = np.array(entries, dtype=np.float64).reshape(-1, 5)
        self._load: Indices = table[:, 0].astype(np.int64)
        self._level: Indices = table[:, 1].astype(np.int64)
        self._size, self._starts, self._bytes = table[:, 2], table[:, 3], table[:, 4]
        self._load_steps: Indices = np.array(load_steps, dtype=np.int64)
        self._first_loads: Indices = np.unique(self._load_steps, return_index=True)[1]
        self._steps: Indices = np.array(steps, dtype=np.int64).reshape(-1, 2)
        self.reduced: Array = reduced
        self.seconds: Array = np.array([seen.seconds for seen in observations])

    def sizes(self, level: LevelName) -> Array:
        """Distinct sizes of messages at a level, bytes, ascending; none if no message goes there."""
        return np.unique(self._size[self._level == LEVELS.index(level)])

    def loads(self, structure: Structure) -> Array:
        """How often each cost counts in each load: (loads, columns)."""
        columns = structure.columns
        column = np.zeros(len(self._load), dtype=np.int64)
        for index, level in enumerate(LEVELS):
            piece = np.searchsorted(np.array(structure.breaks(level), dtype=np.float64), self._size, side="left")
            column = np.where(self._level == index, structure.column(level, 0) + 2 * piece, column)
        length = len(self._load_steps) * columns
        flat: Array = np.bincount(self._load * columns + column, self._starts, length).astype(np.float64)
        flat += np.bincount(self._load * columns + column + 1, self._bytes, length)
        return flat.reshape(-1, columns)

    def rows(self, loads: Array, costs: Array, *, gamma: bool) -> Array:
        """How often each cost counts in each observation, (observations, columns), at the given costs.

        The costs decide which load of a step takes longest: the prediction is rows x costs. Without gamma, bytes that
        are added do not count.
        """
        seconds = loads @ costs
        rows = np.zeros((len(self.seconds), loads.shape[1]))
        if len(seconds):
            slowest = np.maximum.reduceat(seconds, self._first_loads)
            ties = np.flatnonzero(seconds == slowest[self._load_steps])
            _, first = np.unique(self._load_steps[ties], return_index=True)
            weighted = loads[ties[first]] * self._steps[:, 1:]
            present, begins = np.unique(self._steps[:, 0], return_index=True)
            rows[present] = np.add.reduceat(weighted, begins, axis=0)
        if gamma:
            rows[:, -1] = self.reduced
        return rows


@dataclass(frozen=True)
class CostFit:
    """Costs of a structure, fitted to some points."""

    structure: Structure
    costs: Array
    error: float  # Mean |predicted / measured - 1|.
    rows: Array  # Of all observations, at these costs.


def descend(table: LoadTable, structure: Structure, points: Flags, old: CostFit | None = None) -> CostFit:
    """The best costs for some of the points, beginning from those of another fit or from general ones."""
    loads = table.loads(structure)
    used = _STARTS if len(table.sizes("beyond")) else _STARTS[:-1]
    if old is not None:
        return _rounds(table, loads, structure, points, _carry(old, structure))
    starts = []
    for costs in used:
        of_levels = [one for level, one in zip(LEVELS, costs, strict=True) for _ in (*structure.breaks(level), None)]
        starts.append(np.array([*(cost for one in of_levels for cost in one), 0.0]))
    return min((_rounds(table, loads, structure, points, start) for start in starts), key=lambda fit: fit.error)


def _carry(old: CostFit, structure: Structure) -> Array:
    """Costs of a fit as those of a structure with more pieces: each begins with the piece that it was part of."""
    costs = np.zeros(structure.columns)
    costs[-1] = old.costs[-1]
    for level in LEVELS:
        for piece, limit in enumerate((*structure.breaks(level), math.inf)):
            new = structure.column(level, piece)
            was = old.structure.column(level, bisect.bisect_left(old.structure.breaks(level), limit))
            costs[new : new + 2] = old.costs[was : was + 2]
    return costs


def _rounds(table: LoadTable, loads: Array, structure: Structure, points: Flags, costs: Array) -> CostFit:
    """Rows at the costs, costs from the rows, and again; the best round counts, the start does not."""
    best: CostFit | None = None
    errors = np.ones(len(table.seconds))
    since = 0
    rows = table.rows(loads, costs, gamma=structure.gamma)
    for _ in range(ROUNDS):
        costs = reweighted(rows[points] / table.seconds[points, None], errors[points])
        rows = table.rows(loads, costs, gamma=structure.gamma)
        errors = rows @ costs / table.seconds - 1
        error = float(np.abs(errors[points]).mean())
        since += 1
        if best is None or error < best.error:
            since = 0 if best is None or error < best.error * (1 - 1e-4) else since
            best = CostFit(structure, costs, error, rows)
        if since >= PATIENCE:
            break
    assert best is not None
    return best

"""Costs of a network from measured collectives: alpha and beta of each level, gamma, breaks in size.

Another cost is added only if Schwarz's criterion of the relative errors (Laplace: 2 N ln(mean |error|) + k ln N) falls
by more than `CLEAR_GAIN`, very strong evidence by Kass & Raftery (1995): gamma, which all-reduces alone cannot separate
from beta, and breaks in the size of messages, where a transport changes its protocol.

Columns of costs: alpha and beta of each piece, by level from inside groups outwards, then gamma. A fit alternates: the
slowest link of each step at the current costs gives one row per observation; one step towards least absolute relative
errors over the rows gives new costs. The best round counts.
"""

from __future__ import annotations

import bisect
import copy
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

from dlbench.errors import UserError
from dlbench.lazy import Array, Flags, np, npt
from dlbench.perfmodels.lines import reweighted
from dlbench.perfmodels.predictions import whole_elements
from dlbench.perfmodels.schedules import Layout
from dlbench.perfmodels.topology import ONE_LINK, Sharing, summarise
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
POINTS_OF_A_PIECE = 4  # Observations that must have messages of a piece.
SMALLEST_MEAN_ERROR = 1e-4  # Mean relative errors below this count as this large: exact data need no cost more.
DIGITS = 6  # Significant digits of a drawn cost: far below its scatter.
ROUNDS = 60
PATIENCE = 6  # Rounds without a better fit after which the rounds end.
# Alpha and beta of each level from which fitting starts; the last start is for networks with several leaf switches.
_FAST, _SLOW, _SLOWER = (1e-5, 1e-10), (1e-4, 1e-8), (1e-3, 1e-6)
_STARTS = ((_FAST, _FAST, _FAST), (_FAST, _SLOW, _SLOW), (_FAST, _SLOW, _SLOWER))


def fit_network(  # noqa: PLR0913  # Most are fields of the network model.
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
    """Returns the network whose costs explain the measured collectives best.

    A level whose messages never decided a step has costs 0 with an interval up to those of the next level. Intervals
    are the middle 95 % of fits to `resampled` seconds, shape (resamples, observations). `fitted` is the time of the
    fit, UTC, ISO 8601; `runs` the smallest number of runs of an observation.
    """
    table = LoadTable(observations, sharing)
    fit = _fit(table, observations)
    predictions = _held_out(table, observations, fit)
    intervals: Array | None = None
    draws: tuple[tuple[float, ...], ...] = ()
    if resampled is not None:
        all_points, costs = np.ones(len(table.seconds), dtype=bool), []
        for seconds in resampled:
            resampled_table = copy.copy(table)
            resampled_table.seconds = seconds
            costs.append(descend(resampled_table, fit.structure, all_points, fit).costs)
        intervals = np.quantile(np.array(costs), [0.025, 0.975], axis=0)
        draws = _draws(table, fit.structure, np.array(costs))
    return NetworkModel(
        system=system,
        transport=transport,
        inside=_level(table, fit, intervals, "inside", sharing.inside),
        across=_level(table, fit, intervals, "across", sharing.across),
        beyond=_level(table, fit, intervals, "beyond", sharing.beyond),
        gamma_s_per_byte=float(fit.costs[-1]),
        median_error=_median_error(predictions) if predictions else None,
        num_points=len(observations),
        fitted_over=_range(observations, runs),
        residuals=_residuals(observations, fit, predictions),
        draws=draws,
        sources=tuple(sources),
        fitted=fitted,
    )


def _range(observations: Sequence[Observation], runs: int) -> FittedRange:
    def distinct(values: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(set(values)))

    sizes = [observation.num_bytes for observation in observations]
    layouts = [observation.layout for observation in observations]
    return FittedRange(
        ranks=distinct(layout.ranks for layout in layouts),
        group_sizes=distinct(min(layout.group_size, layout.ranks) for layout in layouts),
        num_groups=distinct(layout.num_groups for layout in layouts),
        sizes=(min(sizes), max(sizes)),
        runs=runs,
    )


def _residuals(
    observations: Sequence[Observation], fit: CostFit, predictions: Sequence[tuple[Observation, float]]
) -> tuple[Residual, ...]:
    """Returns the extremes of measured over predicted time, by collective, algorithm and ranks.

    Predictions are by fits without the point where there is one (cross-validated residuals: Barber, Candes, Ramdas &
    Tibshirani 2021, "Predictive inference with the jackknife+"). The few of one algorithm are widened to the middle 95
    % of all points.
    """
    ratios: dict[tuple[str, str, int], list[float]] = {}
    held_out_s = {id(observation): seconds for observation, seconds in predictions}
    for observation, fitted_s in zip(observations, (fit.rows @ fit.costs).tolist(), strict=True):
        predicted_s = held_out_s.get(id(observation), fitted_s)
        if predicted_s > 0:
            key = observation.collective, observation.algorithm, observation.layout.ranks
            ratios.setdefault(key, []).append(observation.seconds / predicted_s)
    all_ratios = list(chain.from_iterable(ratios.values())) or [1.0]
    low, high = np.quantile(all_ratios, [0.025, 0.975]).tolist()
    return tuple(
        Residual(
            collective=collective, algorithm=algorithm, ranks=ranks, least=min(low, *values), most=max(high, *values)
        )
        for (collective, algorithm, ranks), values in ratios.items()
    )


def hold_out_largest(observations: Sequence[Observation]) -> LargestHeldOut | None:
    """Returns how a fit to all smaller rank counts, with its own breaks, gamma and sharing, predicts the largest one.
    None if there is only one rank count, or if the other points do not determine any point of the largest.
    """
    largest = max(observation.layout.ranks for observation in observations)
    others = [observation for observation in observations if observation.layout.ranks < largest]
    if not others:
        return None
    try:
        sharing, _ = choose_sharing(others)
        table = LoadTable(others, sharing)
        fit = _fit(table, others)
    except UserError:
        return None
    at_largest = [observation for observation in observations if observation.layout.ranks == largest]
    table = LoadTable(at_largest, sharing)
    rows = table.rows(table.loads(fit.structure), fit.costs, gamma=fit.structure.gamma)
    is_determined = np.asarray((fit.rows > 0).any(axis=0))
    ratios: list[float] = []  # Predicted over measured.
    by_size: dict[int, list[float]] = {}
    for observation, row, predicted_s in zip(at_largest, rows, rows @ fit.costs, strict=True):
        if is_determined[row > 0].all() and predicted_s > 0:
            ratio = float(predicted_s / observation.seconds)
            ratios.append(ratio)
            by_size.setdefault(observation.num_bytes, []).append(ratio)
    if not ratios:
        return None
    return LargestHeldOut(
        ranks=largest,
        fitted_ranks=tuple(sorted({observation.layout.ranks for observation in others})),
        num_points=len(ratios),
        ratio=float(np.median(ratios)),
        median_error=float(np.median(np.abs(np.array(ratios) - 1))),
        by_size=tuple(
            SizeBias(num_bytes=size, ratio=statistics.median(values)) for size, values in sorted(by_size.items())
        ),
    )


def held_out(observations: Sequence[Observation], sharing: Sharing = ONE_LINK) -> list[tuple[Observation, float]]:
    """Returns points with their seconds as predicted by a fit to other sizes and rank counts, in the order of the
    points. A point is left out if the others do not determine a cost that it needs.
    """
    table = LoadTable(observations, sharing)
    return _held_out(table, observations, _fit(table, observations))


def choose_sharing(observations: Sequence[Observation]) -> tuple[Sharing, list[tuple[Observation, float]]]:
    """Returns the shared links that predict held-out points best, with these predictions.

    Levels are tried from outside in, as the slower links decide most steps: one link for a block, a port for each rank,
    or for a node numbers of adapters that divide its ranks.
    """
    best = ONE_LINK
    predictions = held_out(observations, best)
    layouts = {observation.layout for observation in observations}
    groups = {layout.group_size for layout in layouts if layout.num_groups > 1}
    common = math.gcd(*groups)
    choices: list[tuple[LevelName, int | None]] = []
    if any(observation.layout.num_leaves > 1 for observation, _ in predictions):  # Otherwise no held-out point tells.
        choices.append(("beyond", None))
    if max(groups, default=1) > 1:
        choices.append(("across", None))
        choices += [("across", links) for links in range(2, common) if common % links == 0]
    if any(layout.group_size > 1 for layout in layouts):
        choices.append(("inside", 1))
    for level, links in choices:
        sharing = replace(best, **{level: links})
        others = held_out(observations, sharing)
        if others and predictions and _median_error(others) < _median_error(predictions) - 1e-9:
            best, predictions = sharing, others
    return best, predictions


def _median_error(predictions: Sequence[tuple[Observation, float]]) -> float:
    return statistics.median(abs(predicted_s / observation.seconds - 1) for observation, predicted_s in predictions)


def _held_out(table: LoadTable, observations: Sequence[Observation], fit: CostFit) -> list[tuple[Observation, float]]:
    sizes = np.array([observation.num_bytes for observation in observations])
    ranks = np.array([observation.layout.ranks for observation in observations])
    has_one_rank_count = len(set(ranks.tolist())) == 1
    predicted_s: dict[int, float] = {}
    for size, count in sorted(set(zip(sizes.tolist(), ranks.tolist(), strict=True))):
        others = (sizes != size) & ((ranks != count) | has_one_rank_count)
        if others.sum() <= _num_costs(table, fit.structure):
            continue
        fit_to_others = descend(table, fit.structure, others)
        is_determined = (fit_to_others.rows[others] > 0).any(axis=0)
        for index in np.flatnonzero((sizes == size) & (ranks == count)).tolist():
            is_needed = (fit_to_others.rows[index] > 0) | (fit.rows[index] > 0)
            if is_determined[is_needed].all():
                predicted_s[index] = float(fit_to_others.rows[index] @ fit_to_others.costs)
    return [(observations[index], predicted_s[index]) for index in sorted(predicted_s)]


def _fit(table: LoadTable, observations: Sequence[Observation]) -> CostFit:
    num_needed = _num_costs(table, Structure()) + 1
    num_sizes = len({observation.num_bytes for observation in observations})
    if num_needed == 1:
        raise UserError("fit: every point is of a single rank, so none has a message")
    if len(observations) < num_needed or num_sizes < 2:
        raise UserError(
            f"fit: needs at least {num_needed} points of at least two sizes; got {len(observations)} points of "
            f"{num_sizes}"
        )
    all_points = np.ones(len(observations), dtype=bool)
    best = _with_gamma(table, descend(table, Structure(), all_points), all_points)
    for _ in range(MOST_BREAKS):
        better = min((_with_break(table, best, level, all_points) for level in LEVELS), key=attrgetter("error"))
        if better is best:
            break
        best = better
    return _with_gamma(table, _moved(table, best, all_points), all_points)


def _moved(table: LoadTable, fit: CostFit, points: Flags) -> CostFit:
    best = fit
    for level in LEVELS:
        for size in fit.structure.breaks(level):
            others = tuple(other for other in best.structure.breaks(level) if other != size)
            without = descend(table, _with_breaks(best.structure, level, others), points, best)
            moved = _with_break(table, without, level, points)
            if moved.error < best.error:
                best = moved
    return best


def _num_costs(table: LoadTable, structure: Structure) -> int:
    levels = [level for level in LEVELS if len(table.sizes(level))]
    return sum(2 + 3 * len(structure.breaks(level)) for level in levels) + structure.gamma


def _clearly_better(table: LoadTable, new: CostFit, old: CostFit) -> bool:
    return _criterion(table, new) < _criterion(table, old) - CLEAR_GAIN


def _criterion(table: LoadTable, fit: CostFit) -> float:
    num_points = len(table.seconds)
    misfit = 2 * num_points * math.log(max(fit.error, SMALLEST_MEAN_ERROR))
    return misfit + _num_costs(table, fit.structure) * math.log(num_points)


def _with_gamma(table: LoadTable, fit: CostFit, points: Flags) -> CostFit:
    if fit.structure.gamma or not table.reduced.any():
        return fit
    new = descend(table, replace(fit.structure, gamma=True), points, fit)
    return new if _clearly_better(table, new, fit) else fit


def _with_break(table: LoadTable, fit: CostFit, level: LevelName, points: Flags) -> CostFit:
    """Returns the fit with another break at a level, at one size per octave, then around the best, if it is clearly
    better.
    """
    sizes = table.sizes(level)[:-1].tolist()
    octaves: dict[int, float] = {math.floor(math.log2(size)): size for size in sizes}
    fits = {size: _broken(table, fit, level, size, points) for size in octaves.values()}
    by_size = {size: new for size, new in fits.items() if new is not None}
    if not by_size:
        return fit
    centre = min(by_size, key=lambda size: by_size[size].error)
    best = by_size[centre]
    near = [size for size in sizes if centre / 2 < size < centre * 2 and size != centre]
    for size in near[:: max(1, len(near) // MOST_NEAR)]:
        new = _broken(table, fit, level, size, points)
        if new is not None and new.error < best.error:
            best = new
    return best if _clearly_better(table, best, fit) else fit


def _broken(table: LoadTable, fit: CostFit, level: LevelName, size: float, points: Flags) -> CostFit | None:
    """Returns the fit with another break; None if a piece would have too few points."""
    breaks = tuple(sorted({*fit.structure.breaks(level), math.ceil(size)}))
    new = descend(table, _with_breaks(fit.structure, level, breaks), points, fit)
    num_points = (new.rows > 0).sum(axis=0)
    for piece in range(len(breaks) + 1):
        if num_points[new.structure.column(level, piece)] < POINTS_OF_A_PIECE:
            return None
    return new


def _with_breaks(structure: Structure, level: LevelName, breaks: tuple[int, ...]) -> Structure:
    return replace(structure, limits={**structure.limits, level: breaks})


def _draws(table: LoadTable, structure: Structure, costs: Array) -> tuple[tuple[float, ...], ...]:
    """Returns the costs of each draw as the file has them: without the levels that it does not have."""
    columns: list[int] = []
    for level in LEVELS:
        if len(table.sizes(level)):
            for piece in range(len(structure.breaks(level)) + 1):
                alpha = structure.column(level, piece)
                columns += [alpha, alpha + 1]
    return tuple(tuple(float(f"{cost:.{DIGITS}g}") for cost in draw) for draw in costs[:, [*columns, -1]])


def _level(
    table: LoadTable, fit: CostFit, intervals: Array | None, level: LevelName, links: int | None
) -> Level | None:
    if not len(table.sizes(level)):
        return None
    structure = fit.structure
    next_alpha = structure.column("inside" if level == "across" else "across", 0)

    def interval(column: int, next_column: int) -> tuple[float, float] | None:
        if not fit.rows[:, column].any():  # It never decided a step.
            return 0.0, float(fit.costs[next_column])
        return None if intervals is None else (float(intervals[0, column]), float(intervals[1, column]))

    pieces = []
    for index, limit in enumerate((*structure.breaks(level), None)):
        alpha = structure.column(level, index)
        pieces.append(
            Piece(
                up_to_bytes=limit,
                alpha_s=float(fit.costs[alpha]),
                beta_s_per_byte=float(fit.costs[alpha + 1]),
                alpha_interval_s=interval(alpha, next_alpha),
                beta_interval_s_per_byte=interval(alpha + 1, next_alpha + 1),
            )
        )
    return Level(pieces=tuple(pieces), links=links)


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One measured collective."""

    collective: Collective
    algorithm: str
    layout: Layout
    num_bytes: int  # Size of each rank's whole buffer.
    element_bytes: int
    shards: int | None  # Servers of parameter-server; None: every rank is one.
    seconds: float  # Measured time.
    chunks: int | None = None  # Chunks of a pipelined algorithm; None: `pipeline_chunks`.


@dataclass(frozen=True)
class Structure:
    """The costs of a fit: sizes in bytes up to which each piece goes (the last has no limit), and whether gamma."""

    limits: Mapping[LevelName, tuple[int, ...]] = field(default_factory=dict)
    gamma: bool = False

    def breaks(self, level: LevelName) -> tuple[int, ...]:
        return self.limits.get(level, ())

    def column(self, level: LevelName, piece: int) -> int:
        """Returns the column of alpha of a piece; beta's is the next."""
        before = LEVELS[: LEVELS.index(level)]
        return 2 * (sum(len(self.breaks(inner)) + 1 for inner in before) + piece)

    @property
    def columns(self) -> int:
        return 2 * sum(len(self.breaks(level)) + 1 for level in LEVELS) + 1


class LoadTable:
    """The loads of all steps of all observations, as arrays."""

    def __init__(self, observations: Sequence[Observation], sharing: Sharing) -> None:
        entries: list[tuple[int, int, float, float, float]] = []  # Load, level, bytes of a message, start-ups, bytes.
        load_steps: list[int] = []  # The step of each load.
        steps: list[tuple[int, int]] = []  # Observation, and how often it has the step.
        reduced = np.zeros(len(observations))
        for index, observation in enumerate(observations):
            elements = whole_elements(observation.num_bytes, observation.element_bytes)
            if elements < 1 or not 0 < observation.seconds < float("inf"):
                raise UserError(f"fit: {observation.num_bytes} bytes in {observation.seconds} s are no measurement")
            summary = summarise(
                observation.collective,
                observation.algorithm,
                observation.layout,
                elements,
                shards=observation.shards,
                chunks=observation.chunks,
                sharing=sharing,
            )
            scale = observation.num_bytes / summary.elements
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
        self.seconds: Array = np.array([observation.seconds for observation in observations])

    def sizes(self, level: LevelName) -> Array:
        """Returns the distinct sizes of messages at a level in bytes, ascending; empty if no message goes there."""
        return np.unique(self._size[self._level == LEVELS.index(level)])

    def loads(self, structure: Structure) -> Array:
        """Returns how often each cost counts in each load, shape (loads, columns)."""
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
        """Returns how often each cost counts in each observation at these costs, shape (observations, columns)."""
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
    rows: Array  # How often each cost counts in each observation, at these costs.


def descend(table: LoadTable, structure: Structure, points: Flags, old: CostFit | None = None) -> CostFit:
    """Returns the best costs for the given points, beginning from those of another fit or from `_STARTS`."""
    loads = table.loads(structure)
    if old is not None:
        return _rounds(table, loads, structure, points, _carry(old, structure))
    fits = []
    for by_level in _STARTS if len(table.sizes("beyond")) else _STARTS[:-1]:
        costs: list[float] = []
        for level, alpha_beta in zip(LEVELS, by_level, strict=True):
            costs += alpha_beta * (len(structure.breaks(level)) + 1)
        fits.append(_rounds(table, loads, structure, points, np.array([*costs, 0.0])))
    return min(fits, key=attrgetter("error"))


def _carry(old: CostFit, structure: Structure) -> Array:
    """Returns a fit's costs for a structure with more pieces: each has those of the piece that it was part of."""
    costs = np.zeros(structure.columns)
    costs[-1] = old.costs[-1]
    for level in LEVELS:
        for piece, limit in enumerate((*structure.breaks(level), math.inf)):
            column = structure.column(level, piece)
            old_piece = bisect.bisect_left(old.structure.breaks(level), limit)
            old_column = old.structure.column(level, old_piece)
            costs[column : column + 2] = old.costs[old_column : old_column + 2]
    return costs


def _rounds(table: LoadTable, loads: Array, structure: Structure, points: Flags, costs: Array) -> CostFit:
    """Returns the best round of the alternation of rows and costs; the start is none of them."""
    best: CostFit | None = None
    errors = np.ones(len(table.seconds))
    rounds_without_gain = 0
    rows = table.rows(loads, costs, gamma=structure.gamma)
    for _ in range(ROUNDS):
        costs = reweighted(rows[points] / table.seconds[points, None], errors[points])
        rows = table.rows(loads, costs, gamma=structure.gamma)
        errors = rows @ costs / table.seconds - 1
        error = float(np.abs(errors[points]).mean())
        rounds_without_gain += 1
        if best is None or error < best.error * (1 - 1e-4):
            rounds_without_gain = 0
        if best is None or error < best.error:
            best = CostFit(structure, costs, error, rows)
        if rounds_without_gain >= PATIENCE:
            break
    assert best is not None
    return best

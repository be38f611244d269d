"""Reads a table of runs (`dlbench project points FILE`: separated by tabs, semicolons or commas) as `Ingredients`, and
extrapolates measured step times to more ranks, without a model of the step: T(p) = c0 ideal(p) + c1 x(p).

x is one of `LAWS` of k, the nodes (in one node: ranks over those of the smallest point); ideal is 1 under weak and 1/k
under strong scaling. Each draw takes a law by its prior times the likelihood of the points (Gelman et al., Bayesian
Data Analysis, 3rd edition, 2013, section 7.4). The prior favours laws that flatten: by four points of published series
a straight line gave 20 to 420 % too long steps at 8 to 16 times the ranks, logarithm and saturation 4 to 14 %.
"""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from dlbench.errors import UserError
from dlbench.lazy import Array, np
from dlbench.opening import read_named, why_unreadable
from dlbench.perfmodels.lines import relative_pairs
from dlbench.perfmodels.predictions import Miss, model_error
from dlbench.projection.ingredients import Ingredients, PointFigures, RunFigures
from dlbench.projection.projected import MIN_POINTS, Flag, flagged, reasons, usable_points
from dlbench.records.folder import MAX_JSON
from dlbench.report.wording import percent, ranks_text
from dlbench.specs.base import MAX_RANKS
from dlbench.specs.problems import problem_of
from dlbench.stats.multiplicity import SEED, resampled

COUNTS = ("ranks", "nodes", "batch_per_rank")
_COUNT = re.compile(r"[1-9]\d{0,6}(\.0+)?|[1-9]\d{0,2}(,\d{3}){1,2}", re.ASCII)  # 8, 8.0 or 1,024
# 0.12, 1.2e-1 or 14,919.9; a comma alone is refused, as it may be a decimal point.
_FIGURE = re.compile(r"\+?(\d+\.?\d*|\.\d+|\d{1,3}(,\d{3})+\.\d+)(e[+-]?\d{1,3})?", re.ASCII | re.IGNORECASE)
DRAWS = 1000
LAWS: Mapping[str, Callable[[float], float]] = {
    "a logarithm": math.log2,
    "a saturation": lambda k: 1 - 1 / k,
    "a square root": lambda k: math.sqrt(k) - 1,
    "a straight line": lambda k: k - 1,
    "k log k": lambda k: k * math.log2(k),
    "a square": lambda k: (k - 1) ** 2,
}
"""Growth of the time beyond the ideal with the nodes k, 0 for a single one, by name."""

PRIOR = (0.39, 0.39, 0.02, 0.03, 0.03, 0.14)
"""Prior probability of each law. Runs may hide a square that is large at four times the ranks: with a smaller prior,
bands do not cover such series (`make bench AREA=truth.points`)."""

NUM_FLAT = 2  # Laws that grow no faster than the logarithm: the first ones.
UPWARDS = 0.5  # Probability of growth above the logarithm from which a figure is flagged.
UNEXPLAINED = (0.001, 0.005, 0.03)
"""Unexplained errors of a point (standard deviation, logarithm), equally likely a priori: some per mille in clean runs,
1 to 4 % in published series of large machines."""

OVERHEAD = 0.3  # Prior standard deviation of the overhead of the largest point, as a share of its step.
LAW_SCALE = 0.015
"""Prior error of a law per square root of a doubling: less than `PRIOR_SCALE`, as the law and the unexplained error are
drawn separately."""


def read_points(path: Path, scaling: Literal["weak", "strong"]) -> Ingredients:
    """Returns the series of a file."""
    rows, left_out = _rows(path)
    points: dict[int, dict[str, int]] = {}
    runs: dict[int, dict[str, RunFigures]] = {}
    for where, row in rows:
        counts = {name: _count(where, name, row[name]) for name in COUNTS if name in row}
        ranks = counts["ranks"]
        point, steps = points.setdefault(ranks, counts), runs.setdefault(ranks, {})
        for name, count in counts.items():
            if count != point[name]:
                raise UserError(f"{where}: {name} {count:,}: earlier rows have {point[name]:,} at {ranks:,} ranks")
        if row["run"] in steps:
            raise UserError(f"{where}: run {row['run']!r}: appears twice at {ranks:,} ranks; give one row for each run")
        steps[row["run"]] = _run(where, row, counts)
    batches = {point.get("batch_per_rank", 0) for point in points.values()}
    if scaling == "strong":
        batches = {point.get("batch_per_rank", 0) * ranks for ranks, point in points.items()}
    if len(batches) > 1:
        raise UserError(
            f"{path}: batch_per_rank differs between rank counts, which is not weak scaling; with --scaling strong "
            "ranks x batch_per_rank must be equal"
        )
    notes: tuple[str, ...] = ()
    if left_out:
        notes = (f"Columns that were left out: {', '.join(left_out)}.",)
    content = {
        "title": path.name,
        "source": str(path),
        "scaling": scaling,
        "points": [{**points[ranks], "runs": tuple(runs[ranks].values())} for ranks in sorted(points)],
        "notes": notes,
    }
    try:
        return Ingredients.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{path}: nodes: {problem_of(Ingredients, error)}") from None


def _count(where: str, name: str, text: str) -> int:
    if _COUNT.fullmatch(text):
        count = int(text.partition(".")[0].replace(",", ""))
        if 1 <= count <= MAX_RANKS:
            return count
    raise UserError(f"{where}: {name} {text!r}: must be a whole number from 1 to {MAX_RANKS:,}")


def _rows(path: Path) -> tuple[list[tuple[str, Mapping[str, str]]], list[str]]:
    """Returns the rows by column, each with its file and line, and the columns that are left out."""
    try:
        text = read_named(path, MAX_JSON).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a table: {why_unreadable(error)}") from None
    table = list(_cells(path, text.splitlines()))
    if len(table) < 2:
        raise UserError(f"{path}: contains no runs; give a line with the names of columns and a line for each run")
    (first, header), *data = table
    used = _used(first, header)
    for where, cells in data:
        if len(cells) != len(header):
            raise UserError(
                f"{where}: has {len(cells)} values, but the header has {len(header)} columns; put a value with a "
                "comma in double quotes"
            )
    left_out = [name or "a column without a name" for name in header if name not in used]
    rows: list[tuple[str, Mapping[str, str]]] = []
    for where, cells in data:
        row = dict(zip(header, cells, strict=True))
        rows.append((where, {name: row[name] for name in used}))
    return rows, left_out


def _cells(path: Path, lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    data_lines = ["" if line.lstrip().startswith("#") else line for line in lines]
    header = next((line for line in data_lines if line.strip()), "")
    delimiter = next((mark for mark in "\t;" if mark in header), ",")
    reader = csv.reader(data_lines, delimiter=delimiter, skipinitialspace=delimiter != "\t", strict=True)
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield f"{path}: line {reader.line_num}", [cell.strip() for cell in cells]
    except csv.Error as error:
        raise UserError(f"{path}: line {reader.line_num}: {error}") from None


def _used(where: str, header: list[str]) -> list[str]:
    used = ["ranks", "nodes", "run", "step_s"]
    if "samples_per_s" in header and "step_s" not in header:
        used[-1:] = ["samples_per_s", "batch_per_rank"]
    elif "batch_per_rank" in header:
        used.append("batch_per_rank")
    wrong = [name for name in used if header.count(name) != 1]
    if wrong:
        raise UserError(
            f"{where}: columns {', '.join(map(repr, header))}: {', '.join(wrong)} must appear once; instead of "
            "step_s samples_per_s with batch_per_rank is possible (step_s = ranks x batch_per_rank / samples_per_s)"
        )
    return used


def _run(where: str, row: Mapping[str, str], counts: Mapping[str, int]) -> RunFigures:
    name = "step_s" if "step_s" in row else "samples_per_s"
    text = row[name]
    value = float(text.replace(",", "")) if _FIGURE.fullmatch(text) else 0.0
    if not value:
        raise UserError(f"{where}: {name} {text!r}: must be a number above 0, with a decimal point")
    step_s = value
    if name == "samples_per_s":
        step_s = counts["ranks"] * counts["batch_per_rank"] / value
    try:
        return RunFigures(run_id=row["run"], step_s=step_s)
    except ValidationError as error:
        raise UserError(f"{where}: {name} {text!r}: {problem_of(RunFigures, error)}") from None


@dataclass(frozen=True, kw_only=True)
class ByPoints:
    """The step at a rank count by the points only."""

    law: str  # The most probable one of `LAWS`.
    step_s: Array  # By draw, seconds.
    error: Array  # Factor by the error of the law, included in `step_s`, by draw.
    flags: tuple[Flag, ...]  # F13 if the points bend upwards.


def points_only(ingredients: Ingredients, ranks: int, *, draws: int = DRAWS) -> ByPoints | None:
    """Returns the step by draws of runs, laws and errors of the law; None: the points are not sufficient."""
    if reasons(ingredients, ranks, by="points"):
        return None
    is_inside = ingredients.nodes_of(ranks) == 1
    points = usable_points(ingredients, ranks)
    if len(points) < MIN_POINTS:
        return None
    base = points[0].ranks if is_inside else ingredients.per_node
    counts = [point.ranks / base for point in points]
    is_strong = ingredients.scaling == "strong"
    by_run = [_steps(point) for point in points]
    drawn = resampled(by_run, centre="geometric mean", resamples=draws)
    assert drawn is not None  # Every point has `LEAST_RUNS` runs.
    middle = np.array([[statistics.geometric_mean(runs.values()) for runs in by_run]])
    # Runs of all points are assumed to have equal scatter, as each has few.
    variance = statistics.fmean(statistics.variance(map(math.log, runs.values())) for runs in by_run)
    weights = _weights(counts, middle, variance / np.array([len(runs) for runs in by_run]), is_strong)
    rng = np.random.default_rng([SEED, 9])
    picks = np.searchsorted(np.cumsum(weights), rng.permutation((np.arange(draws) + 0.5) / draws))
    laws, unexplained = np.unravel_index(picks, weights.shape)
    fitted = drawn * np.exp(np.array(UNEXPLAINED)[unexplained, None] * rng.standard_normal(drawn.shape))
    step = np.empty(draws)
    for number, law in enumerate(LAWS):
        step[laws == number] = _at(law, counts, fitted[laws == number], ranks / base, is_strong)
    by_law = weights.sum(axis=1)
    best = list(LAWS)[by_law.argmax()]
    misses = []
    for last in range(MIN_POINTS - 1, len(points)):
        # Each point from the third on is predicted by the smaller ones.
        times = np.vstack([middle, drawn])
        missed = np.log(times[:, last] / _at(best, counts[:last], times[:, :last], counts[last], is_strong))
        doublings = math.log2(counts[last] / counts[last - 1])
        misses.append(Miss(error=missed[0], doublings=doublings, scatter=missed[1:].std()))
    # Equal seeds, so that errors at several rank counts belong to one law.
    doublings = min(abs(math.log2(ranks / point.ranks)) for point in points)
    error = model_error(misses, prior_scale=LAW_SCALE).drawn(doublings, draws, [SEED, 8])
    step *= error
    if doublings == 0:  # A measured step needs no law.
        step = drawn[:, [point.ranks for point in points].index(ranks)]
    upwards = float(by_law[NUM_FLAT:].sum())
    point_flags: tuple[Flag, ...] = ()
    if upwards > UPWARDS:
        point_flags = (flagged("F13", probability=percent(upwards, 0), ranks=ranks_text(2 * points[-1].ranks)),)
    return ByPoints(law=best, step_s=step, error=error, flags=point_flags)


def _steps(point: PointFigures) -> dict[tuple[str, str], float]:
    return {(run.session, run.run_id): run.step_s for run in point.runs}


def _terms(law: str, counts: Sequence[float], is_strong: bool) -> Array:
    """Returns ideal and x of the law at each k, shape (counts, 2)."""
    ks = np.array(counts)
    ideal = 1 / ks if is_strong else np.ones_like(ks)
    return np.stack([ideal, np.array([LAWS[law](k) for k in counts])], axis=1)


def _weights(counts: Sequence[float], middle: Array, variances: Array, is_strong: bool) -> Array:
    """Returns the probability of each law with each unexplained error, shape (laws, errors), by a linear regression
    with a flat prior of c0 and a normal one of the overhead. `variances`: of the logarithms of `middle`, by runs.
    """
    precisions = 1 / (np.square(UNEXPLAINED)[:, None] + variances)  # Shape (errors, points).
    logs = np.empty((len(LAWS), len(UNEXPLAINED)))
    for number, law in enumerate(LAWS):
        rows = _terms(law, counts, is_strong) / middle.T
        rows[:, 1] /= rows[-1, 1]
        squares, sums = rows.T * precisions[:, None] @ rows, precisions @ rows
        squares[:, 1, 1] += OVERHEAD**-2
        fitted = (np.linalg.solve(squares, sums[..., None])[..., 0] * sums).sum(axis=1)
        volume = np.linalg.slogdet(squares)[1] - np.log(precisions).sum(axis=1)
        logs[number] = math.log(PRIOR[number]) - (precisions.sum(axis=1) - fitted + volume) / 2
    weights: Array = np.exp(logs - logs.max())
    weights /= weights.sum()
    return weights


def _at(law: str, counts: Sequence[float], times: Array, target_counts: float, is_strong: bool) -> Array:
    """Returns the law through times of shape (draws, points) at `counts`, at another k: shape (draws,)."""
    coefficients = relative_pairs(_terms(law, counts, is_strong) / times[..., None])
    at: Array = coefficients @ _terms(law, [target_counts], is_strong)[0]
    return at

"""The cost of a training at projected rank counts and other batches, by draws of their steps. Own work of a rank is
w(b) = w0 + w1 b by pieces of its batch, and epochs to a target are E(B) = E0 (1 + B / Bc) by the global batch
(McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, section 2.4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from dlbench.lazy import Array, np
from dlbench.perfmodels.lines import relative_pairs
from dlbench.perfmodels.predictions import PRIOR_POINTS, PRIOR_SCALE, Miss, model_error
from dlbench.perfmodels.training_time import HOUR_S, UNSTATED_SAMPLES
from dlbench.projection.ingredients import BatchFigures, Ingredients, QualityFigures
from dlbench.projection.projected import Band, Refused, Target, figure, refused
from dlbench.report.document import Section
from dlbench.report.table import Sheet, column, columns_of, drop_empty_columns
from dlbench.report.wording import figure_text, ranks_text, sentence, value_text
from dlbench.stats.estimates import Estimate
from dlbench.stats.multiplicity import SEED

LEAST_BATCHES = 3  # Global batches with runs to the target needed to fit both E0 and Bc.
UNSURE = 0.01  # Share of draws that may save no time if the price of an hour saved is given.


def own_work(batches: Sequence[BatchFigures], batch: int, draws: int, seed: Sequence[int]) -> Array:
    """Returns draws of a rank's own work at `batch` samples, seconds, shape (draws,). Equal seeds draw equal runs, so
    that ratios of two batches are paired. `batches`: two or more, ascending.
    """
    rng = np.random.default_rng([*seed, 0])
    batch_sizes = np.array([figures.batch_per_rank for figures in batches], dtype=np.float64)
    runs = [np.array(figures.own_work_s) for figures in batches]
    drawn = np.stack([rng.choice(work_s, (draws, len(work_s))).mean(axis=1) for work_s in runs], axis=1)
    if batch_sizes[0] <= batch <= batch_sizes[-1]:
        above = min(int(np.searchsorted(batch_sizes, batch, side="right")), len(batch_sizes) - 1)
        share = (batch - batch_sizes[above - 1]) / (batch_sizes[above] - batch_sizes[above - 1])
        inside: Array = drawn[:, above - 1] * (1 - share) + drawn[:, above] * share
        return inside
    end = 0 if batch < batch_sizes[0] else -1
    fixed, per_sample = _lines(batch_sizes, drawn)
    means = [own_work_s.mean() for own_work_s in runs]
    misses = []
    if len(batch_sizes) > 2:
        first, slope = _lines(batch_sizes[1:], np.array([means[1:]]))
        error = math.log(means[0] / (first[0] + slope[0] * batch_sizes[0]))
        misses.append(Miss(error=error, doublings=math.log2(batch_sizes[1] / batch_sizes[0])))
    beyond = model_error(misses).drawn(abs(math.log2(batch / batch_sizes[end])), draws, [*seed, 1])
    work: Array = drawn[:, end] * (fixed + per_sample * batch) / (fixed + per_sample * batch_sizes[end]) * beyond
    return work


def why_no_epochs(quality: QualityFigures) -> Refused | None:
    """Returns why epochs to the target cannot be projected (R10); None if they can."""
    batches = len({run.global_batch for run in quality.runs})
    if batches >= LEAST_BATCHES or (batches and quality.noise_scale is not None):
        return None
    noun = "global batch" if batches == 1 else "global batches"
    return refused("R10", None, batches=f"{batches} {noun}", least=LEAST_BATCHES)


def epochs(quality: QualityFigures, global_batch: int, draws: int, seed: Sequence[int]) -> Array:
    """Returns draws of the epochs to the target at a global batch, shape (draws,), by residuals of the law for each
    run; two points of the prior replace the two fitted constants. Raises `ValueError`: see `why_no_epochs`.
    """
    if (why := why_no_epochs(quality)) is not None:
        raise ValueError(why.text)
    rng = np.random.default_rng([*seed, 0])
    batch_sizes = np.array([run.global_batch for run in quality.runs], dtype=np.float64)
    run_epochs = np.array([run.epochs for run in quality.runs])
    slope = None
    if len(set(batch_sizes)) < LEAST_BATCHES:
        slope = 1 / (quality.noise_scale or math.inf)
    fitted = _law(batch_sizes, run_epochs[None, :], slope, batch_sizes)[0]
    scale = math.sqrt(
        (PRIOR_POINTS * PRIOR_SCALE**2 + float((np.log(run_epochs / fitted) ** 2).sum())) / len(batch_sizes)
    )
    sigma = scale * np.sqrt(len(batch_sizes) / rng.chisquare(len(batch_sizes), (draws, 1)))
    redrawn = fitted * np.exp(sigma * rng.standard_normal((draws, len(batch_sizes))))
    beyond = model_error(()).drawn(math.log2(global_batch / batch_sizes.max()), draws, [*seed, 1])
    drawn: Array = _law(batch_sizes, redrawn, slope, np.array([global_batch]))[:, 0] * beyond
    return drawn


def _law(batch_sizes: Array, run_epochs: Array, slope: float | None, targets: Array) -> Array:
    """Returns E0 (1 + B / Bc), shape (draws, targets), by epochs of shape (draws, runs). `slope`: 1 / Bc if known."""
    if slope is None:
        smallest, per_sample = _lines(batch_sizes, run_epochs)
        return np.asarray(smallest[:, None] + per_sample[:, None] * targets)
    smallest = np.exp(np.log(run_epochs / (1 + slope * batch_sizes)).mean(axis=1))
    return np.asarray(smallest[:, None] * (1 + slope * targets))


def _lines(x: Array, y: Array) -> Array:
    """Returns start and slope, both >= 0, with the least relative squares, for each row of y (draws, points)."""
    return relative_pairs(np.stack([1 / y, x / y], axis=2)).T


@dataclass(frozen=True, kw_only=True)
class TrainingCost:
    """The cost of a training at one projected rank count; medians, and the middle 80 % of the draws."""

    ranks: int = field(metadata=column("Ranks"))
    nodes: int = field(metadata=column("Nodes"))
    global_batch: int = field(metadata=column("Global batch"))
    epochs: Estimate | None = field(metadata=column("Epochs"))  # None: a fixed number of samples.
    hours: Estimate | None = field(metadata=column("Time, h"))  # Time of training steps.
    node_hours: Estimate | None = field(metadata=column("Node-hours"))
    kwh: Estimate | None = field(metadata=column("Energy, kWh"))  # None: power was not measured.
    price: Estimate | None = field(metadata=column("Price"))
    marginal: Estimate | None = field(metadata=column("Node-hours per hour saved"))
    """Additional node-hours over hours saved, from the row before; None: first row, or saving time is not certain."""


def costs(
    ingredients: Ingredients, targets: Sequence[Target], price: float | None, currency: str
) -> tuple[TrainingCost, ...]:
    """Returns the cost of each target with a known batch, by ranks. `price`: price of a node-hour in `currency`."""
    rows: list[TrainingCost] = []
    before: tuple[Array, Array] | None = None
    quality, watts = ingredients.quality, ingredients.node_watts
    if quality is not None and why_no_epochs(quality) is not None:
        quality = None
    for target in sorted(targets, key=attrgetter("ranks")):
        if target.batch_per_rank is None or not target.drawn:
            continue
        batch = target.ranks * target.batch_per_rank
        hours, passes = UNSTATED_SAMPLES / batch * target.drawn["step"] / HOUR_S, None
        if quality is not None:
            passes = epochs(quality, batch, len(target.drawn["step"]), (SEED, 21))
            hours = passes * (quality.samples_per_epoch / batch * target.drawn["step"] + quality.evaluation_s) / HOUR_S
        node_hours = target.nodes * hours
        marginal = None
        if before is not None:
            saved = before[0] - hours
            if np.mean(saved <= 0) <= UNSURE:
                marginal = (node_hours - before[1])[saved > 0] / saved[saved > 0]
        before = hours, node_hours
        energy_kwh = None if watts is None else node_hours * watts / 1000
        price_of_hours = None if price is None else node_hours * price
        row = TrainingCost(
            ranks=target.ranks,
            nodes=target.nodes,
            global_batch=batch,
            epochs=_figure(passes, "epochs"),
            hours=_figure(hours, "h"),
            node_hours=_figure(node_hours, "node-hours"),
            kwh=_figure(energy_kwh, "kWh"),
            price=_figure(price_of_hours, currency),
            marginal=_figure(marginal, "node-hours/h"),
        )
        rows.append(row)
    return tuple(rows)


def _figure(drawn: Array | None, unit: str) -> Estimate | None:
    return None if drawn is None else figure(Band.of(drawn), unit)


def cost_section(
    group_id: str, ingredients: Ingredients, targets: Sequence[Target], price: float | None, currency: str
) -> Section | None:
    """Returns the cost of a training by rank count; None: the batch of no target is known."""
    rows = costs(ingredients, targets, price, currency)
    if not rows:
        return None
    quality, why = ingredients.quality, None
    if quality is not None:
        why = why_no_epochs(quality)
    if quality is None or why is not None:
        goal = f"For a million {ingredients.sample_unit}, because the number that a training needs is not known."
        other_time = "evaluations, "
    else:
        goal, other_time = f"To {quality.target}, with evaluations.", ""
    notes = [f"Projected, not measured: training steps, without start, {other_time}checkpoints and queue."]
    if why is not None:
        notes.append(f"{why.code}: {why.text}. {sentence(why.remedy)}.")
    elif quality is not None and len({run.global_batch for run in quality.runs}) < LEAST_BATCHES:
        notes.append(
            "Epochs grow with the batch by the gradient noise scale, which equals the critical batch only if the loss "
            "has the same curvature in all directions."
        )
    if ingredients.node_watts is not None:
        notes.append("Energy: mean power of a node at the largest measured point; idle power is included.")
    columns = drop_empty_columns(columns_of(TrainingCost, titles={"price": f"Price, {currency}".rstrip(", ")}), rows)
    sheet = Sheet(name="cost", title="Cost", columns=columns, rows=rows)
    if any(row.marginal is None for row in rows[1:]):
        notes.append("Rows without node-hours per hour saved may save no time.")
    last = rows[-1]
    figures = [f"{figure_text(figure)} {figure.unit}" for figure in (last.hours, last.node_hours, last.kwh) if figure]
    if last.price:
        figures.append(f"price {figure_text(last.price)} {currency}".rstrip())
    words = f"{ranks_text(last.ranks)}: {', '.join(figures)}"
    if last.marginal is not None:
        before = ranks_text(rows[-2].ranks)
        words += f"; each hour saved from {before} costs {value_text(last.marginal)} more node-hours"
    return Section(
        id=f"cost-{group_id}",
        title="How many GPUs?",
        level="evidence" if price is None else "answer",
        about=(goal,),
        words=(f"{words}.",),
        sheets=(sheet,),
        notes=tuple(notes),
        brief=(f"How many GPUs? {goal} {words}.",),
        where={"group": group_id},
    )

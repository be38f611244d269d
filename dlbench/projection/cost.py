"""Time, node-hours, energy and price of a training at projected rank counts, by draws of their steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from dlbench.lazy import Array, np
from dlbench.perfmodels.training_time import HOUR_S, UNSTATED_SAMPLES
from dlbench.projection.batch import LEAST_BATCHES, epochs, why_no_epochs
from dlbench.projection.ingredients import Ingredients
from dlbench.projection.projected import Band, Target, figure
from dlbench.report.document import Section
from dlbench.report.table import Sheet, column, columns_of, drop_empty_columns
from dlbench.report.wording import figure_text, ranks_text, sentence, value_text
from dlbench.stats.estimates import Estimate
from dlbench.stats.multiplicity import SEED

UNSURE = 0.01  # Share of draws that may save no time if the price of an hour saved is given.


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

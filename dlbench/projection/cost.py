"""How many GPUs: time, node-hours, energy and money of a training at projected rank counts, by draws of their steps.

A training is as long as its target needs at the global batch of a rank count (`dlbench.projection.batch`), else a
million samples. Node-hours are nodes x steps x step; the price of going faster is what each hour less takes more of
them, from one row to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dlbench.lazy import Array, np
from dlbench.perfmodels.training_time import HOUR_S, UNSTATED_SAMPLES
from dlbench.projection.batch import LEAST_BATCHES, epochs, why_no_epochs
from dlbench.projection.ingredients import Ingredients
from dlbench.projection.projected import Band, Target, figure
from dlbench.report.document import Section
from dlbench.report.table import Sheet, column, columns_of, drop_empty_columns
from dlbench.report.wording import figure_text, ranks_text, sentence, value_text
from dlbench.stats.estimates import Estimate
from dlbench.stats.resampling import SEED

UNSURE = 0.01  # Share of the draws that may save no hour where an hour less has a price.


@dataclass(frozen=True, kw_only=True)
class TrainingCost:
    """A training at one projected rank count; medians, and the middle 80 % of the draws."""

    ranks: int = field(metadata=column("Ranks"))
    nodes: int = field(metadata=column("Nodes"))
    global_batch: int = field(metadata=column("Global batch"))
    epochs: Estimate | None = field(metadata=column("Epochs"))  # None: so many samples, whatever the batch.
    hours: Estimate | None = field(metadata=column("Time, h"))  # Of training steps.
    node_hours: Estimate | None = field(metadata=column("Node-hours"))
    kwh: Estimate | None = field(metadata=column("Energy, kWh"))  # None: power was not measured.
    price: Estimate | None = field(metadata=column("Price"))
    marginal: Estimate | None = field(metadata=column("Node-hours per hour saved"))
    """Node-hours more than in the row before, over hours less; None: the first row, or no hour is surely saved."""


def costs(
    given: Ingredients, targets: Sequence[Target], price: float | None, currency: str
) -> tuple[TrainingCost, ...]:
    """Of each target whose batch is known, by ranks. `price`: of a node-hour in `currency`."""
    found: list[TrainingCost] = []
    before: tuple[Array, Array] | None = None
    quality = given.quality if given.quality is not None and why_no_epochs(given.quality) is None else None
    for one in sorted(targets, key=lambda target: target.ranks):
        if one.batch_per_rank is None or not one.drawn:
            continue
        batch = one.ranks * one.batch_per_rank
        hours, passes = UNSTATED_SAMPLES / batch * one.drawn["step"] / HOUR_S, None
        if quality is not None:
            passes = epochs(quality, batch, len(one.drawn["step"]), (SEED, 21))
            hours = passes * (quality.samples_per_epoch / batch * one.drawn["step"] + quality.evaluation_s) / HOUR_S
        held = one.nodes * hours
        marginal = None
        if before is not None:
            saved = before[0] - hours
            if np.mean(saved <= 0) <= UNSURE:
                marginal = Band.of((held - before[1])[saved > 0] / saved[saved > 0])
        before = hours, held
        watts = given.node_watts
        found.append(
            TrainingCost(
                ranks=one.ranks,
                nodes=one.nodes,
                global_batch=batch,
                epochs=None if passes is None else figure(Band.of(passes), "epochs"),
                hours=figure(Band.of(hours), "h"),
                node_hours=figure(Band.of(held), "node-hours"),
                kwh=None if watts is None else figure(Band.of(held * watts / 1000), "kWh"),
                price=None if price is None else figure(Band.of(held * price), currency),
                marginal=None if marginal is None else figure(marginal, "node-hours/h"),
            )
        )
    return tuple(found)


def cost_section(
    group_id: str, given: Ingredients, targets: Sequence[Target], price: float | None, currency: str
) -> Section | None:
    """The answer to how many GPUs; None: the batch of no target is known. `price`: of a node-hour in `currency`."""
    rows = costs(given, targets, price, currency)
    if not rows:
        return None
    quality, why = given.quality, None if given.quality is None else why_no_epochs(given.quality)
    if quality is None or why is not None:
        goal = f"For a million {given.sample_unit}, as how many a training takes is not known."
        more = "evaluations, "
    else:
        goal, more = f"To {quality.target}, with evaluations.", ""
    notes = [f"Projected, not measured: training steps; start, {more}checkpoints and the queue come on top."]
    if why is not None:
        notes.append(f"{why.code}: {why.text}. {sentence(why.remedy)}.")
    elif quality is not None and len({run.global_batch for run in quality.runs}) < LEAST_BATCHES:
        notes.append(
            "Epochs grow with the batch by the gradient noise scale, which is the critical batch only where all "
            "directions curve alike."
        )
    if given.node_watts is not None:
        notes.append("Energy: mean power of a node at the largest measured point; idle power is not told apart.")
    columns = drop_empty_columns(columns_of(TrainingCost, titles={"price": f"Price, {currency}".rstrip(", ")}), rows)
    sheet = Sheet(name="cost", title="Cost", columns=columns, rows=rows)
    if any(row.marginal is None for row in rows[1:]):
        notes.append("Where an hour less has no price it is not sure that the row saves any.")
    last = rows[-1]
    figures = [f"{figure_text(one)} {one.unit}" for one in (last.hours, last.node_hours, last.kwh) if one]
    if last.price:
        figures.append(f"price {figure_text(last.price)} {currency}".rstrip())
    words = f"{ranks_text(last.ranks)}: {', '.join(figures)}"
    if last.marginal is not None:
        before = ranks_text(rows[-2].ranks)
        words += f"; each hour less than at {before} takes {value_text(last.marginal)} node-hours more"
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

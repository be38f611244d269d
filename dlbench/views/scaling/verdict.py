"""The figures of a group become one sentence that a person can repeat."""

from __future__ import annotations

from dlbench.reading.attribution import Part
from dlbench.reading.scaling import Point
from dlbench.report.wording import (
    PART_TITLES,
    basis_text,
    figure_text,
    percent,
    place_text,
    share_of_loss,
    value_text,
)
from dlbench.stats.estimates import MIN_RUNS
from dlbench.stats.verdicts import placed
from dlbench.views.causes.diagnosis import WORTH_EXPLAINING
from dlbench.views.causes.numbers import LostPercent
from dlbench.views.causes.words import CAUSE_TITLES
from dlbench.views.exchange.numbers import ExchangePoint
from dlbench.views.model import Group


def verdict(
    subject: str,
    unit: str,
    all_points: tuple[Point, ...],
    *,
    is_sufficient: bool,
    is_crowded: bool,
    exchange: tuple[ExchangePoint, ...] = (),
    causes: LostPercent | None = None,
) -> str:
    """What the largest scaling point says, in plain words, with its interval and its validity.

    Args:
        subject: the workload in words, with preset, engine, precision, batch and data source.
        unit: what a sample is called.
        all_points: points of the group, baseline first.
        is_sufficient: whether every point has enough runs for a comparison.
        is_crowded: whether ranks shared cores, which makes a scaling figure meaningless.
        exchange: what is known of the exchange of these points.
        causes: the loss by cause, which names it where it is known; else the parts of the step do.
    """
    base, last = all_points[0], all_points[-1]
    if len(all_points) == 1:
        return (
            f"{subject} trains {figure_text(base.throughput)} {unit} per second at "
            f"{place_text(base.ranks, base.nodes)} ({basis_text(base.throughput)}). A scaling figure needs a second "
            "rank count."
        )
    sentence = (
        f"{subject} keeps {figure_text(last.efficiency)} of the ideal at {place_text(last.ranks, last.nodes)}, "
        f"measured against {place_text(base.ranks, base.nodes)} ({basis_text(last.efficiency)})"
    )
    few = "" if is_sufficient else " Too few runs for a comparison."
    crowded = " Ranks shared cores: this says nothing about the scaling of the machine." if is_crowded else ""
    told = next((point for point in exchange if (point.ranks, point.nodes) == (last.ranks, last.nodes)), None)
    return f"{sentence}{_explanation(last, causes)}{_communication(last, told)}{few}{crowded}"


def _communication(point: Point, told: ExchangePoint | None) -> str:
    """Where the exchange costs most: how much of the communication is exposed, and how much must be."""
    worst = main_loss(point)
    is_explained = 1 - point.efficiency.value >= WORTH_EXPLAINING and point.whole.lost.value > 0
    if told is None or worst is None or worst.name != "exchange" or not is_explained:
        return ""
    if told.communication is None or told.exposed is None:
        return ""
    text = f" Communication takes {value_text(told.communication)} per step, {value_text(told.exposed)} of it exposed"
    if told.prediction is None:
        return f"{text}."
    best, efficiency = told.prediction.best_exposed, told.prediction.efficiency
    return (
        f"{text}; by the model the best merging leaves {value_text(best)}, for {value_text(efficiency)} of the ideal."
    )


def _explanation(point: Point, causes: LostPercent | None) -> str:
    loss = 1 - point.efficiency.value
    found = placed(point.efficiency, 1 - WORTH_EXPLAINING, 1 + WORTH_EXPLAINING)
    if abs(loss) < WORTH_EXPLAINING:
        if found == "undecided":
            return f". Whether {percent(WORTH_EXPLAINING, 0)} or more is lost is undecided."
        return ". There is no loss worth explaining."
    is_noise = placed(point.efficiency, 1, 1) == "undecided"
    if loss < 0:
        why = "the interval reaches 100 %" if is_noise else "the baseline ran with a handicap, or its runs drifted"
        return f". That is more than the ideal: {why}."
    doubt = " The interval reaches 100 %: the loss may be noise." if is_noise else ""
    worst = main_loss(point)
    if worst is None or point.whole.lost.value <= 0:
        return f". On average over the runs nothing is lost: arithmetic and geometric means disagree.{doubt}"
    # Only means sum to a whole, so the parts are arithmetic means; the efficiency before them is of geometric ones.
    name, lost, is_noise = _largest_cause(point, causes) or (_part_title(worst), worst.lost.value, False)
    share = f"{name} ({share_of_loss(lost, point.whole.lost.value)} on average{', within the noise' * is_noise})"
    return f"; the largest part of the loss is {share}.{doubt}"


def _part_title(part: Part) -> str:
    """Parts do not tell the exchange from waiting in it."""
    return f"{PART_TITLES[part.name]}{', waiting for late ranks included' if part.name == 'exchange' else ''}"


def _largest_cause(point: Point, causes: LostPercent | None) -> tuple[str, float, bool] | None:
    """The cause that the diagnosis of this point names, its share of the ideal, and whether that is within the noise.

    None where no cause is known.
    """
    for one in causes.diagnosed.points if causes else ():
        if (one.ranks, one.nodes) == (point.ranks, point.nodes) and one.verdict.cause:
            lost = one.cause(one.verdict.cause).lost.value
            return CAUSE_TITLES[one.verdict.cause], lost, one.verdict.finding == "within noise"
    return None


def main_loss(point: Point) -> Part | None:
    """The part that costs most of the ideal; None where no part costs anything."""
    worst = max(point.parts, key=lambda part: part.lost.value)
    return worst if worst.lost.value > 0 else None


def next_step(group: Group) -> str:
    """What to do next, in a sentence: the first experiment of the diagnosis of the largest point, or what a comparison
    still lacks; empty where nothing suggests itself.
    """
    if len(group.points) == 1:
        return f"Run the same workload at more rank counts, for example --ranks {more_ranks(group)}."
    if not group.is_sufficient:
        return f"Repeat every point at least {MIN_RUNS} times (--repeats {MIN_RUNS}), so that noise can be told apart."
    last = group.largest
    found = group.of(LostPercent)
    if found is None or 1 - last.efficiency.value < WORTH_EXPLAINING:
        return ""
    for point in found.diagnosed.points:
        if (point.ranks, point.nodes) == (last.ranks, last.nodes) and point.verdict.experiments:
            return sentence(point.verdict.experiments[0].text)
    return ""


def more_ranks(group: Group) -> str:
    """Rank counts that a group of one point lacks, as an option takes them."""
    ranks = group.baseline.ranks
    return ",".join(str(ranks * factor) for factor in (1, 2, 4))


def sentence(text: str) -> str:
    """A phrase with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."

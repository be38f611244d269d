"""The view `time-to-train`: how many GPUs (or ranks) a training is worth, at measured rank counts only. N samples at
Thr samples per second take N / Thr seconds and the start-up; times are geometric means over runs, so that ratios of two
rank counts are `ratio_estimate`s of the same runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, Literal

from dlbench.analysis.scaling import Point
from dlbench.errors import UserError
from dlbench.perfmodels.training_time import HOUR_S, UNSTATED_SAMPLES, TrainingLength, training_length_of
from dlbench.records.scan import Run
from dlbench.report.chart_style import HEIGHT, MEASURED, RANK_COLOURS, WIDE
from dlbench.report.charts import Axis, Chart, Rows, Series, Subject, figure_row, finish, lines
from dlbench.report.document import Section
from dlbench.report.formats.data import HIDDEN
from dlbench.report.table import Cell, Column, Sheet, column, columns_of, constant
from dlbench.report.wording import (
    clean,
    interval_text,
    place_text,
    repeat_text,
    span_text,
    times_text,
    units_text,
    value_text,
)
from dlbench.stats.estimates import Estimate, geometric_mean_estimate, ratio_estimate
from dlbench.stats.pairing import RunKey
from dlbench.stats.verdict import Outcome, judge
from dlbench.units import format_seconds
from dlbench.views.forecast import PublishedAnchor, anchor_layers, anchor_rows, anchors_text, published_for
from dlbench.views.model import AtPlace, GroupSource, GroupView, ReportGroup
from dlbench.views.quality.numbers import GroupQuality, quality_of

BilledUnit = Literal["GPU", "node", "core", "rank"]  # Resource that a training holds, billed by the hour.
Times = Iterable[tuple[str, Any, Estimate | None]]  # Name of the line, row with ranks and nodes, and time of points.
Goal = Literal["cheapest", "fastest"]  # cheapest: fewest billed hours.

_UNITS = ((86_400, "days"), (HOUR_S, "hours"), (60, "minutes"), (1, "seconds"))


@dataclass(frozen=True, kw_only=True)
class TrainingQuestion:
    """Options of `dlbench estimate`: length of the training, price and limits; by default the runs decide."""

    epochs: float | None = None
    epoch_samples: int | None = None
    samples: int | None = None  # Instead of epochs.
    price: float | None = None  # Of an hour of the billed unit.
    currency: str = ""
    held: BilledUnit | None = None  # Unit of price and budget; by default what the jobs hold.
    deadline_s: float | None = None
    budget: float | None = None
    is_money: bool = False  # Whether the budget is in the currency of the price, not in hours.


@dataclass(frozen=True, kw_only=True)
class TrainingPoint(AtPlace):
    """The training at one rank count."""

    held: int  # Number of billed units (`TimeToTrain.held`) that the runs held.
    place: str = field(metadata=column("At", ""))  # Ranks and nodes in words; GPUs if each rank holds one.
    global_batch: int
    throughput: Estimate = field(metadata=column("Throughput", "throughput_per_s"))
    efficiency: Estimate
    is_baseline: bool
    samples: float | None  # Trained samples of all ranks; None if runs trained to a target.
    time: Estimate  # Seconds.
    hours: Estimate = field(metadata=column("Hours"))  # Billed hours: `held` times `time`.
    price: Estimate | None = field(metadata=column("Price"))
    seconds: Mapping[RunKey, float] = field(repr=False, metadata={HIDDEN: False})  # Seconds by run.


@dataclass(frozen=True, kw_only=True)
class TrainingAnswer:
    """The answer to a question for a rank count."""

    wanted: Goal  # `fastest` for a point that is both.
    is_met: bool  # Whether a measured rank count meets the deadline and the budget; True without either.
    ranks: int | None  # Of the point; None if no point meets them.
    nodes: int | None
    text: str
    remarks: tuple[str, ...]  # Sentences that say how certain that is.


@dataclass(frozen=True, kw_only=True)
class TimeToTrain:
    """Time, hours and price of a training at each measured rank count."""

    held: BilledUnit
    currency: str
    amount: str  # The length of the training and its source, in a sentence; without a length a million samples.
    points: tuple[TrainingPoint, ...]  # Those that have a time.
    answers: tuple[TrainingAnswer, ...]
    notes: tuple[str, ...]  # Say what the figures include, and what they leave out.


@dataclass(frozen=True)
class _Limit:
    """A deadline or a budget."""

    words: str
    field: Literal["time", "hours", "price"]  # The limited figure of a `TrainingPoint`.
    most: float

    def figure(self, point: TrainingPoint) -> Estimate:
        figure: Estimate | None = getattr(point, self.field)
        return figure or point.hours

    def may_be_met(self, point: TrainingPoint) -> bool:
        low = self.figure(point).low
        return low is not None and low <= self.most

    def outcome(self, point: TrainingPoint) -> Outcome:
        """Returns `equal` if the whole interval lies between 0 and the limit."""
        return judge(self.figure(point), self.most / 2, centre=self.most / 2).outcome


def unit_of(seconds: float) -> tuple[float, str]:
    """Returns the largest unit of which a time has two or more: its seconds and its name."""
    return next(((size, name) for size, name in _UNITS if seconds >= 2 * size), _UNITS[-1])


def held_by(run: Run, unit: BilledUnit) -> int | None:
    """Returns how many units a run held, used or not; None for GPUs of a run that had none."""
    layout, system = run.plan.layout, run.plan.system
    if unit == "rank":
        return layout.ranks
    if unit == "node":
        return layout.nodes
    if unit == "core":
        if _holds_nodes(run) and layout.node_cores:
            return layout.nodes * layout.node_cores
        return layout.ranks * layout.cores_per_rank
    if run.record is None:
        return None
    num_used = len({(rank.host, rank.gpu.uuid) for rank in run.record.ranks if rank.gpu})
    asks_for_all = system.scheduler != "none" and system.slurm.gpu_count == "node"
    if num_used and (_holds_nodes(run) or asks_for_all):
        return max(num_used, layout.nodes * system.node.gpus)
    return num_used or None


def _holds_nodes(run: Run) -> bool:
    return run.plan.system.scheduler != "none" and run.plan.system.slurm.exclusive


def estimated(source: GroupSource, question: TrainingQuestion) -> TimeToTrain:
    """Returns the training at every rank count of a group. Raises `UserError`: an option needs what the runs lack."""
    group, table = source.group, source.table
    firsts = [table.runs[point.run_ids[0]] for point in group.points]
    unit = question.held or _default_unit(firsts[0])
    has_length = question.samples is not None or question.epochs is not None
    quality = None if has_length else source.of(GroupQuality)
    lengths = [_length(run, firsts[0], question) for run in firsts]
    is_whole = quality is not None or lengths[0] is not None
    if not is_whole and (question.deadline_s or question.budget):
        option = "--deadline" if question.deadline_s else "--budget"
        raise UserError(f"{option}: {_workload(firsts[0])} names no length of a training; add --epochs or --samples")
    missed = _missed_points(quality)
    points: list[TrainingPoint] = []
    notes = []
    for point, first, length in zip(group.points, firsts, lengths, strict=True):
        count = held_by(first, unit)
        if count is None:
            hint = "give price and budget in rank-hours or node-hours"
            raise UserError(f"{_workload(first)}: its runs had no GPU; {hint}")
        place = _place(point, unit, count)
        if (point.ranks, point.nodes) in missed:
            notes.append(f"{place}: no time, because {missed[point.ranks, point.nodes]} met the target.")
            continue
        samples = length.samples if length else UNSTATED_SAMPLES
        seconds = {}
        for run_id in point.run_ids:
            run = table.runs[run_id]
            if quality is not None:
                run_s = quality_of(run).time_to_quality_s or math.nan
            else:
                run_s = samples / table.rates[run_id] + (_start_s(run) if is_whole else 0.0)
            seconds[table.keys[run_id]] = run_s
        time = geometric_mean_estimate(seconds, "s")
        hours = time.scaled(count / HOUR_S, f"{unit}-hours")
        points.append(
            TrainingPoint(
                ranks=point.ranks,
                nodes=point.nodes,
                held=count,
                place=place,
                global_batch=first.plan.global_batch,
                **{name: getattr(point, name) for name in ("throughput", "efficiency", "is_baseline")},
                samples=samples if quality is None else None,
                time=time,
                hours=hours,
                price=hours.scaled(question.price, question.currency) if question.price else None,
                seconds=seconds,
            )
        )
    return TimeToTrain(
        held=unit,
        currency=question.currency,
        amount=_amount_text(firsts, lengths, quality, question),
        points=tuple(points),
        answers=answers(points, question, unit),
        notes=(*notes, *_notes(firsts, unit, is_whole=is_whole, to_target=quality is not None)),
    )


def _missed_points(quality: GroupQuality | None) -> dict[tuple[int, int], str]:
    """Returns how many runs met the target, by ranks and nodes of the points where some missed it."""
    if quality is None:
        return {}
    return {(point.ranks, point.nodes): point.reached_text for point in quality.points if not point.all_reached}


def _default_unit(run: Run) -> BilledUnit:
    if held_by(run, "GPU"):
        return "GPU"
    return "node" if _holds_nodes(run) else "rank"


def _place(point: Point, unit: BilledUnit, count: int) -> str:
    place = place_text(point.ranks, point.nodes)
    if unit != "GPU":
        return place
    if count == point.ranks:
        return place.replace("rank", "GPU")
    return f"{place} ({count} GPUs held)"


def _notes(firsts: Sequence[Run], unit: BilledUnit, *, is_whole: bool, to_target: bool) -> Iterator[str]:
    if to_target:
        yield "Time: start of training to the evaluation that met the target, with evaluations and checkpoints."
    elif is_whole:
        starts_s = [_start_s(run) for run in firsts]
        span = span_text(format_seconds(min(starts_s)), format_seconds(max(starts_s)))
        yield (
            f"Time: training steps at the measured throughput, and the start of a run with staging ({span}); "
            "evaluations, checkpoints and the queue are not in it."
        )
    small, large = firsts[0].plan.global_batch, firsts[-1].plan.global_batch
    if not to_target and small == large:
        yield f"The global batch is {large:,} in all rows."
    elif not to_target:
        yield (
            f"The global batch grows from {small:,} to {large:,}; larger batches often need more epochs to the same "
            "accuracy, which is not in the figures."
        )
    if unit != "rank":
        yield "GPUs, cores and nodes that a job holds are counted, used or not."
    yield "Measured rank counts only: nothing is extrapolated."


def _workload(run: Run) -> str:
    return clean(f"{run.plan.workload.name}, {run.plan.workload.preset} preset")


def _length(run: Run, base: Run, question: TrainingQuestion) -> TrainingLength | None:
    """Returns the training at the batch of a run; a recipe in steps has as many samples as at the baseline's batch."""
    if question.samples is not None:
        return TrainingLength(epochs=None, samples=question.samples, key="--samples", is_limit=False)
    epoch_samples = question.epoch_samples or run.epoch_samples
    if question.epochs is not None:
        if not epoch_samples:
            raise UserError(f"--epochs: data of {_workload(run)} names no size; add --epoch-samples, or give --samples")
        samples = epoch_samples * question.epochs
        return TrainingLength(epochs=question.epochs, samples=samples, key="--epochs", is_limit=False)
    recipe = training_length_of(run.plan, epoch_samples)
    is_of_batch = run.plan.workload.train.optimizer.place(run.plan.global_batch) is not None
    if recipe is None or recipe.epochs is not None or is_of_batch:
        return recipe
    return training_length_of(base.plan, epoch_samples)


def _start_s(run: Run) -> float:
    if run.record is None:
        return 0.0
    return max((rank.startup_s for rank in run.record.ranks), default=0.0)


def _amount_text(
    firsts: Sequence[Run],
    lengths: Sequence[TrainingLength | None],
    quality: GroupQuality | None,
    question: TrainingQuestion,
) -> str:
    unit = firsts[0].plan.workload.sample_unit
    first, last = lengths[0], lengths[-1]
    if quality is not None:
        return f"Trained to a {quality.goal}, as measured."
    if first is None or last is None:
        return f"Of a million {unit}: no length of a training is known; dlbench estimate RUNS --epochs N gives one."
    if first.epochs is None or last.epochs is None:
        amount = f"{span_text(f'{first.samples:,.0f}', f'{last.samples:,.0f}')} {unit} ({first.key})"
    else:
        epoch_samples = question.epoch_samples or firsts[0].epoch_samples
        epochs = _counted(span_text(f"{first.epochs:g}", f"{last.epochs:g}"), "epochs")
        amount = f"{epochs} ({first.key}) of {epoch_samples:,} {unit}"
    if first.is_limit:
        return f"At most {amount}: runs that meet their target take less."
    return f"{amount}."


def _counted(number: str, units: str) -> str:
    return f"1 {units.removesuffix('s')}" if number == "1" else f"{number} {units}"


def answers(
    points: Sequence[TrainingPoint], question: TrainingQuestion, unit: BilledUnit
) -> tuple[TrainingAnswer, ...]:
    """Returns the cheapest rank count within deadline and budget, or the fastest within a budget; by default both."""
    limits = []
    if question.deadline_s:
        size, name = unit_of(question.deadline_s)
        limits.append(_Limit(f"under {_counted(f'{question.deadline_s / size:g}', name)}", "time", question.deadline_s))
    if question.budget:
        amount = f"{question.budget:,.15g}"  # as it was typed
        if question.is_money:
            limits.append(_Limit(f"within {amount} {question.currency}", "price", question.budget))
        else:
            limits.append(_Limit(f"within {_counted(amount, f'{unit}-hours')}", "hours", question.budget))
    if limits:
        goal: Goal = "cheapest" if question.deadline_s else "fastest"
        return (_answer(goal, points, limits),)
    if not points:
        return ()
    fast, cheap = _answer("fastest", points, ()), _answer("cheapest", points, ())
    if (fast.ranks, fast.nodes) != (cheap.ranks, cheap.nodes):
        return fast, cheap
    text = f"{fast.text} and cheapest" if len(points) > 1 else f"{fast.text.removesuffix('fastest')}the only one"
    return (replace(fast, text=text, remarks=tuple(dict.fromkeys((*fast.remarks, *cheap.remarks)))),)


def best(points: Sequence[TrainingPoint], goal: Goal) -> TrainingPoint:
    """Returns the cheapest or the fastest by value; of equal ones the fastest or the cheapest, then fewest ranks."""
    figures = ("time.value", "hours.value") if goal == "fastest" else ("hours.value", "time.value")
    return min(points, key=attrgetter(*figures, "ranks", "nodes"))


def _answer(goal: Goal, points: Sequence[TrainingPoint], limits: Sequence[_Limit]) -> TrainingAnswer:
    def exceeded(point: TrainingPoint) -> list[_Limit]:
        return [limit for limit in limits if limit.figure(point).value > limit.most]

    meeting = [point for point in points if not exceeded(point)]
    chosen = best(meeting, goal) if meeting else None
    limit_words = " and ".join(limit.words for limit in limits)
    remarks = []
    for point in points:
        is_better = chosen is None or best([point, chosen], goal) is point
        if exceeded(point) and is_better and all(limit.may_be_met(point) for limit in exceeded(point)):
            remarks.append(f"{point.place} may do as well: {_summary(point)}.")
    if chosen is None:
        text = f"None of the measured rank counts is {limit_words}"
        if points:
            other_goal: Goal = "fastest" if goal == "cheapest" else "cheapest"
            nearest = best(points, other_goal)
            text += f"; the {other_goal}, {nearest.place}, takes {_summary(nearest)}"
            remarks.append(f"More than {max(points, key=attrgetter('ranks')).place} were not tried.")
        return TrainingAnswer(wanted=goal, is_met=False, ranks=None, nodes=None, text=text, remarks=tuple(remarks))
    return TrainingAnswer(
        wanted=goal,
        is_met=True,
        ranks=chosen.ranks,
        nodes=chosen.nodes,
        text=f"{chosen.place}: {_summary(chosen)}: {goal} {limit_words}".rstrip(),
        remarks=(*_certainty(chosen, points, limits), *remarks, *_indistinguishable(chosen, goal, meeting)),
    )


def _summary(point: TrainingPoint) -> str:
    size, name = unit_of(point.time.value)
    costs = [_with_unit(figure) for figure in (point.hours, point.price) if figure]
    return f"{_with_unit(point.time.scaled(1 / size, name))} for {', '.join(costs)}"


def _with_unit(figure: Estimate) -> str:
    return f"{value_text(figure)} {figure.unit} {interval_text(figure)}".replace("  ", " ").rstrip()


def _certainty(chosen: TrainingPoint, points: Sequence[TrainingPoint], limits: Sequence[_Limit]) -> Iterator[str]:
    left_out = "start-up and queue" if chosen.samples is None else "evaluations, checkpoints and queue"
    for limit in limits:
        outcome = limit.outcome(chosen)
        if outcome == "equal":
            yield f"The whole interval of the mean is {limit.words}, without {left_out}."
        elif outcome == "insufficient":
            figure = limit.figure(chosen)
            yield f"Not sure to be {limit.words}: {units_text(figure)} cannot decide that; {repeat_text(figure)}."
        else:
            text = f"Not sure to be {limit.words}: the interval of the mean reaches over it"
            certain = [point for point in points if {a_limit.outcome(point) for a_limit in limits} == {"equal"}]
            if certain:
                text += f"; that of {best(certain, 'cheapest').place} does not"
            yield f"{text}."


def _indistinguishable(chosen: TrainingPoint, goal: Goal, meeting: Sequence[TrainingPoint]) -> Iterator[str]:
    undecided = []
    for other in meeting:
        if other is chosen:
            continue
        ratio = ratio_estimate(other.seconds, chosen.seconds)
        figure = "time"
        if goal == "cheapest":
            ratio, figure = ratio.scaled(other.held / chosen.held, "ratio"), "hours"
        outcome = judge(ratio, 0.0, centre=1.0, higher_is_worse=True).outcome
        if outcome == "insufficient":
            undecided.append(ratio)
        elif outcome != "worse":
            yield f"{other.place} cannot be distinguished from {chosen.place}: {times_text(ratio)} the {figure}."
    if undecided:
        fewest = min(undecided, key=attrgetter("units"))
        yield f"Chosen by values alone: {units_text(fewest)} cannot distinguish rank counts; {repeat_text(fewest)}."


class TimeToTrainView(GroupView):
    """Time and cost of a training at each measured rank count; a report asks no questions."""

    id = "time-to-train"
    title = "How many ranks?"
    level = "answer"
    key = "time_to_train"
    after = "scaling"

    def __init__(self, question: TrainingQuestion | None = None) -> None:
        self._asked = question or TrainingQuestion()

    def numbers(self, source: GroupSource) -> TimeToTrain | None:
        plan = source.group.sample.plan
        if plan.measure.noise_scale or plan.strategy == "asynchronous":
            # Such runs read every gradient once more, or emulate workers: their speed is no training's.
            return None
        return estimated(source, self._asked)

    def shown(self, group: ReportGroup, training: TimeToTrain) -> Section:
        title = "How many GPUs?" if training.held == "GPU" else self.title
        sheet = _sheet(training, group.sample_unit)
        words: list[str] = []
        for answer in training.answers:
            words += [f"{answer.text}.", *answer.remarks]
        brief = []
        if len(training.points) > 1:
            brief.append(f"{title} {'; '.join(answer.text for answer in training.answers)}.")
        times = [("", point, point.time) for point in training.points]
        anchors: Sequence[PublishedAnchor] = ()
        if all(point.samples is None for point in training.points):  # They trained to a target.
            anchors = published_for(group, "time_to_target_s")
        return Section(
            title=title,
            about=(training.amount,),
            words=tuple(dict.fromkeys(words)),
            charts=partial(times_over, "ranks", group, "Time to train", times, sheet, anchors),
            sheets=(sheet,),
            notes=training.notes,
            where={"sample_unit": group.sample_unit},
            brief=tuple(brief),
        )


def times_over(
    x: str, subject: Subject, quantity: str, times: Times, table: Sheet[Any], anchors: Sequence[PublishedAnchor] = ()
) -> list[Chart]:
    """Returns a chart of seconds over `nodes` (or `ranks`, if these do not follow from the nodes); none of few counts.
    `anchors` are published times.
    """
    by_place = {(line, row.ranks, row.nodes): time for line, row, time in times if time is not None}
    places = {(ranks, nodes) for _, ranks, nodes in by_place}
    names = dict.fromkeys(line for line, *_ in by_place)
    fewest_places = 3 if len(names) == 1 else 2  # Of one line at two counts a table says as much.
    if not places or len(places) + len(anchors) < fewest_places:
        return []
    colours = dict(zip(names, itertools.cycle(RANK_COLOURS), strict=False))
    if anchors or len({nodes for _, nodes in places}) < len(places):
        x = "ranks"
    # The ideal begins at the fewest ranks; of several lines there at the first.
    name, base_ranks, base_nodes = base = min(by_place, key=itemgetter(1, 2))
    size, unit = unit_of(max(time.value for time in by_place.values()))
    rows: Rows = []
    for (line, ranks, nodes), time in by_place.items():
        row = {"ranks": ranks, "nodes": nodes, "line": line, "place": place_text(ranks, nodes)}
        ideal = by_place[base].value / size * base_ranks / ranks
        rows.append({**row, "ideal": ideal, **figure_row(time.scaled(1 / size, unit))})
    series: Series | str = MEASURED
    if len(colours) > 1:
        series = Series("line", colours)
    tooltip = {"line": quantity, "place": "at", "shown": unit, "basis": "interval"}
    words = "; ".join(", ".join(filter(None, (row["line"], f"{row['place']}: {row['shown']}"))) for row in rows)
    origin = ", ".join(filter(None, (name, place_text(base_ranks, base_nodes))))
    y, reach = Axis(unit, scale={"type": "log", "base": 2}), [anchor.ranks for anchor in anchors]
    drawn = lines(rows, y, series, tooltip, x=x, title=x, reach=reach, ideal="ideal")
    chart = finish(
        [*drawn, *anchor_layers(anchor_rows(anchors, 1 / size))],
        subject,
        name="times",
        title=f"{quantity} over {x} (dashed: ideal from {origin})",
        alt=f"In {unit}. {words}.{anchors_text(anchors)}",
        table=table,
        size=(WIDE, HEIGHT),
        axes="xy",
    )
    return [chart]


def _sheet(training: TimeToTrain, sample_unit: str) -> Sheet[TrainingPoint]:
    size, name = unit_of(max((point.time.value for point in training.points), default=0.0))
    price = ""
    if any(point.price for point in training.points):
        price = f"Price, {training.currency}".rstrip(", ")
    # For a length in samples the efficiency says how far a time is from the ideal.
    has_ideal = any(point.samples is None for point in training.points)

    def efficiency(point: TrainingPoint) -> Estimate | Cell:
        return Cell("baseline", number=1.0) if point.is_baseline else point.efficiency

    def time(point: TrainingPoint) -> Estimate:
        return point.time.scaled(1 / size)

    def ideal(point: TrainingPoint) -> Estimate:
        base = training.points[0]
        return base.time.scaled(base.ranks / point.ranks / size)

    columns = columns_of(
        TrainingPoint,
        *("ranks", "nodes", "place", "throughput"),
        Column("efficiency", "Efficiency", "efficiency", efficiency, has_interval=True),
        *("global_batch", "trained_samples=samples"),
        Column("time_s", f"Time, {name}", "time", time, has_interval=True),
        Column("", f"Ideal, {name}" if has_ideal else "", ideal),
        "held",
        constant("hours_of", training.held),
        *("hours", "price"),
        titles={
            "throughput_per_s": f"Throughput, {sample_unit}/s",
            "hours": f"{training.held[0].upper()}{training.held[1:]}-hours",
            "price": price,
        },
    )
    return Sheet(name="time-to-train", title="Time to train", columns=columns, rows=training.points)

"""The view `time-to-train`: how many GPUs (or ranks) a training is worth.

For N samples at Thr samples per second a run would take N / Thr seconds of training steps, and its own start-up; what
it holds meanwhile (GPUs, nodes, cores, ranks) times that are the hours that are billed, which grow by 1 / efficiency
over the baseline's. Times are geometric means over runs, as throughput is, so that ratios of two rank counts are
`ratio_estimate`s of the same runs. Only measured rank counts are answered: nothing here is extrapolated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dlbench.analysis.scaling import Point
from dlbench.errors import UserError
from dlbench.perfmodels.training_time import HOUR_S, UNSTATED_SAMPLES, TrainingLength, recipe_of
from dlbench.records.scan import Run
from dlbench.report.charts.chart import Chart, Rows, Subject, finish
from dlbench.report.charts.shapes import Axis, Series, figure_row, lines
from dlbench.report.charts.style import HEIGHT, MEASURED, RANK_COLOURS, WIDE
from dlbench.report.document import Section
from dlbench.report.formats.json import HIDDEN
from dlbench.report.table import Cell, Column, Sheet, column, columns_of
from dlbench.report.wording import (
    clean,
    interval_text,
    place_text,
    reached_text,
    repeat_text,
    times_text,
    units_text,
    value_text,
)
from dlbench.stats.estimates import Estimate, geometric_mean_estimate, ratio_estimate
from dlbench.stats.pairing import RunKey
from dlbench.stats.verdict import Outcome, judge
from dlbench.units import format_seconds
from dlbench.views.model import ReportGroup
from dlbench.views.quality.numbers import GroupQuality, quality_of
from dlbench.views.view import GroupSource, GroupView

Held = Literal["GPU", "node", "core", "rank"]  # What is held while a training runs, and billed by the hour.
Wanted = Literal["cheapest", "fastest"]  # cheapest: of fewest hours of what is held.

_UNITS = ((86_400, "days"), (HOUR_S, "hours"), (60, "minutes"), (1, "seconds"))


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a person says of the training, its price and its limits; the defaults leave all to the runs."""

    epochs: float | None = None
    epoch_samples: int | None = None
    samples: int | None = None  # Instead of epochs.
    price: float | None = None  # Of an hour of what is held.
    currency: str = ""
    held: Held | None = None
    """What price and budget are of; None: GPUs, of runs without GPUs ranks, or nodes where jobs hold whole ones."""
    deadline_s: float | None = None
    budget: float | None = None
    is_money: bool = False  # Whether the budget is in the currency of the price, not in hours.


@dataclass(frozen=True, kw_only=True)
class TrainingPoint:
    """The training at one rank count."""

    ranks: int
    nodes: int
    held: int  # GPUs, nodes, cores or ranks, as `TimeToTrain.held`, that the runs held.
    place: str = field(metadata=column("At", ""))  # Ranks and nodes in words; GPUs where each rank holds one.
    global_batch: int
    throughput: Estimate = field(metadata=column("Throughput", "throughput_per_s"))
    efficiency: Estimate
    is_baseline: bool
    samples: float | None  # Trained, all ranks together; None where runs trained to a target.
    time: Estimate  # Seconds.
    hours: Estimate = field(metadata=column("Hours"))  # `held` times `time`, hours.
    price: Estimate | None = field(metadata=column("Price"))
    seconds: Mapping[RunKey, float] = field(repr=False, metadata={HIDDEN: False})  # The time of each run.


@dataclass(frozen=True, kw_only=True)
class TrainingAnswer:
    """One rank count that was looked for."""

    wanted: Wanted  # Of a point that is both, fastest.
    is_met: bool  # Whether a measured rank count meets the deadline and the budget; True where none was given.
    ranks: int | None  # Of the point; None where none meets them.
    nodes: int | None
    text: str
    remarks: tuple[str, ...]  # How sure that is, each a sentence.


@dataclass(frozen=True, kw_only=True)
class TimeToTrain:
    """Time, hours and price of a training at each measured rank count."""

    held: Held
    currency: str
    amount: str  # How much is trained, and who says so, in a sentence; without a length a million samples.
    points: tuple[TrainingPoint, ...]  # Those that have a time.
    answers: tuple[TrainingAnswer, ...]
    notes: tuple[str, ...]  # What is in the figures, and what is not.


Limits = dict[str, tuple[Callable[[TrainingPoint], Estimate], float]]  # Figure and its maximum, by name.


def unit_of(seconds: float) -> tuple[float, str]:
    """The largest unit of which a time has two or more: its seconds and its name."""
    return next(((size, name) for size, name in _UNITS if seconds >= 2 * size), _UNITS[-1])


def held_by(run: Run, what: Held) -> int | None:
    """How much a run held; None for GPUs of a run that had none. Exclusive jobs hold whole nodes, used or not."""
    layout, system = run.plan.layout, run.plan.system
    is_whole = _holds_nodes(run)
    if what == "core" and is_whole and layout.node_cores:
        return layout.nodes * layout.node_cores
    if what != "GPU":
        return {"core": layout.ranks * layout.cores_per_rank, "node": layout.nodes, "rank": layout.ranks}[what]
    used = len({(rank.host, rank.gpu.uuid) for rank in run.record.ranks if rank.gpu}) if run.record else 0
    asks_all = system.scheduler != "none" and system.slurm.gpu_count == "node"
    return max(used, layout.nodes * system.node.gpus) if used and (is_whole or asks_all) else used or None


def _holds_nodes(run: Run) -> bool:
    return run.plan.system.scheduler != "none" and run.plan.system.slurm.exclusive


def estimated(source: GroupSource, asked: Asked) -> TimeToTrain:
    """The training at every rank count of a group, and the answer to what was asked."""
    group, table = source.group, source.table
    rates = table.rates
    runs = [{table.keys[name]: table.runs[name] for name in point.run_ids} for point in group.points]
    firsts = [table.runs[point.run_ids[0]] for point in group.points]
    held: Held = asked.held or ("GPU" if held_by(firsts[0], "GPU") else "node" if _holds_nodes(firsts[0]) else "rank")
    quality = source.of(GroupQuality) if asked.samples is None and asked.epochs is None else None
    lengths = [_length(run, firsts[0], asked) for run in firsts]
    is_whole = quality is not None or lengths[0] is not None
    if not is_whole and (asked.deadline_s or asked.budget):
        option = "--deadline" if asked.deadline_s else "--budget"
        raise UserError(f"{option}: {_workload(firsts[0])} names no length of a training; add --epochs or --samples")
    missed = [] if quality is None else [point for point in quality.points if not point.all_reached]
    unreached = {(point.ranks, point.nodes): reached_text(point.num_reached, point.num_runs) for point in missed}
    points: list[TrainingPoint] = []
    notes = []
    for point, of_point, first, length in zip(group.points, runs, firsts, lengths, strict=True):
        count = held_by(first, held)
        if count is None:
            hint = "give price and budget in rank-hours or node-hours"
            raise UserError(f"{_workload(first)}: its runs had no GPU; {hint}")
        place, samples = _place(point, held, count), length.samples if length else UNSTATED_SAMPLES
        if reached := unreached.get((point.ranks, point.nodes)):
            notes.append(f"{place}: no time, because {reached} met the target.")
            continue
        seconds = {}
        for key, run in of_point.items():
            if quality is not None:
                seconds[key] = quality_of(run).time_to_quality_s or math.nan
            else:
                seconds[key] = samples / rates[run.plan.run_id] + (_start_s(run) if is_whole else 0.0)
        time = geometric_mean_estimate(seconds, "s")
        hours = time.scaled(count / HOUR_S, f"{held}-hours")
        points.append(
            TrainingPoint(
                ranks=point.ranks,
                nodes=point.nodes,
                held=count,
                place=place,
                global_batch=first.plan.global_batch,
                throughput=point.throughput,
                efficiency=point.efficiency,
                is_baseline=point.is_baseline,
                samples=samples if quality is None else None,
                time=time,
                hours=hours,
                price=hours.scaled(asked.price, asked.currency) if asked.price else None,
                seconds=seconds,
            )
        )
    return TimeToTrain(
        held=held,
        currency=asked.currency,
        amount=_amount_text(firsts, lengths, quality, asked),
        points=tuple(points),
        answers=answers(points, asked, held),
        notes=(*notes, *_notes(firsts, held, is_whole=is_whole, to_target=quality is not None)),
    )


def _place(point: Point, held: Held, count: int) -> str:
    place = place_text(point.ranks, point.nodes)
    if held != "GPU":
        return place
    return place.replace("rank", "GPU") if count == point.ranks else f"{place} ({count} GPUs held)"


def _notes(firsts: Sequence[Run], held: Held, *, is_whole: bool, to_target: bool) -> Iterator[str]:
    if to_target:
        yield "Time: start of training to the evaluation that met the target, with evaluations and checkpoints."
    elif is_whole:
        starts = [_start_s(run) for run in firsts]
        span = _span(format_seconds(min(starts)), format_seconds(max(starts)))
        yield (
            f"Time: training steps at the measured throughput, and the start of a run with staging ({span}); "
            "evaluations, checkpoints and the queue are not in it."
        )
    # What a global batch that grows with the ranks leaves out.
    small, large = firsts[0].plan.global_batch, firsts[-1].plan.global_batch
    if not to_target and small == large:
        yield f"The global batch is {large:,} in all rows."
    elif not to_target:
        yield (
            f"The global batch grows from {small:,} to {large:,}; larger batches often need more epochs to the same "
            "accuracy, which is not in the figures."
        )
    if held != "rank":
        yield "GPUs, cores and nodes that a job holds are counted, used or not."
    yield "Measured rank counts only: nothing is extrapolated."


def _workload(run: Run) -> str:
    return clean(f"{run.plan.workload.name}, {run.plan.workload.preset} preset")


def _length(run: Run, base: Run, asked: Asked) -> TrainingLength | None:
    """What is trained at the batch of a run; a recipe in steps trains as many samples as at the baseline's batch."""
    if asked.samples is not None:
        return TrainingLength(epochs=None, samples=asked.samples, key="--samples", is_limit=False)
    epoch = asked.epoch_samples or run.epoch_samples
    if asked.epochs is not None:
        if not epoch:
            raise UserError(f"--epochs: data of {_workload(run)} names no size; add --epoch-samples, or give --samples")
        return TrainingLength(epochs=asked.epochs, samples=epoch * asked.epochs, key="--epochs", is_limit=False)
    found = recipe_of(run.plan, epoch)
    is_of_batch = run.plan.workload.train.optimizer.place(run.plan.global_batch) is not None
    return found if found is None or found.epochs is not None or is_of_batch else recipe_of(base.plan, epoch)


def _start_s(run: Run) -> float:
    """Of its slowest rank: start of the process to the first step, staging included."""
    ranks = run.record.ranks if run.record else ()
    return max((rank.startup_s for rank in ranks), default=0.0)


def _amount_text(
    firsts: Sequence[Run], lengths: Sequence[TrainingLength | None], quality: GroupQuality | None, asked: Asked
) -> str:
    unit = firsts[0].plan.workload.sample_unit
    first, last = lengths[0], lengths[-1]
    if quality is not None:
        return f"Trained to a {quality.goal}, as measured."
    if first is None or last is None:
        return f"Of a million {unit}: no length of a training is known; dlbench estimate RUNS --epochs N gives one."
    if first.epochs is None or last.epochs is None:
        much = f"{_span(f'{first.samples:,.0f}', f'{last.samples:,.0f}')} {unit} ({first.key})"
    else:
        epoch = asked.epoch_samples or firsts[0].epoch_samples
        epochs = _counted(_span(f"{first.epochs:g}", f"{last.epochs:g}"), "epochs")
        much = f"{epochs} ({first.key}) of {epoch:,} {unit}"
    return f"At most {much}: runs that meet their target take less." if first.is_limit else f"{much}."


def _span(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last}"


def _counted(number: str, units: str) -> str:
    return f"1 {units.removesuffix('s')}" if number == "1" else f"{number} {units}"


def answers(points: Sequence[TrainingPoint], asked: Asked, held: Held) -> tuple[TrainingAnswer, ...]:
    """With a deadline the cheapest rank count that meets it (and the budget), with a budget alone the fastest within
    it; without either both of all.
    """
    limits: Limits = {}
    if asked.deadline_s:
        size, name = unit_of(asked.deadline_s)
        limits[f"under {_counted(f'{asked.deadline_s / size:g}', name)}"] = lambda point: point.time, asked.deadline_s
    if asked.budget:
        amount = f"{asked.budget:,.15g}"  # as it was typed
        limit = f"{amount} {asked.currency}" if asked.is_money else _counted(amount, f"{held}-hours")
        limits[f"within {limit}"] = lambda point: (asked.is_money and point.price) or point.hours, asked.budget
    wanted: Wanted = "cheapest" if asked.deadline_s else "fastest"
    if limits:
        return (_answer(wanted, points, limits),)
    if not points:
        return ()
    fast, cheap = _answer("fastest", points, {}), _answer("cheapest", points, {})
    if (fast.ranks, fast.nodes) != (cheap.ranks, cheap.nodes):
        return fast, cheap
    text = f"{fast.text} and cheapest" if len(points) > 1 else f"{fast.text.removesuffix('fastest')}the only one"
    return (replace(fast, text=text, remarks=tuple(dict.fromkeys((*fast.remarks, *cheap.remarks)))),)


def best(points: Sequence[TrainingPoint], wanted: Wanted) -> TrainingPoint:
    """The cheapest or the fastest by value; of equal ones the fastest or the cheapest, then that of fewest ranks."""
    order = -1 if wanted == "cheapest" else 1
    return min(points, key=lambda one: ((one.time.value, one.hours.value)[::order], one.ranks, one.nodes))


def _answer(wanted: Wanted, points: Sequence[TrainingPoint], limits: Limits) -> TrainingAnswer:
    meeting = [one for one in points if all(figure(one).value <= most for figure, most in limits.values())]
    chosen = best(meeting, wanted) if meeting else None
    near = chosen or (best(points, "fastest" if wanted == "cheapest" else "cheapest") if points else None)
    remarks = []
    for one in points:
        over = [(figure(one).low, most) for figure, most in limits.values() if figure(one).value > most]
        is_better = chosen is None or best([one, chosen], wanted) is one
        if over and is_better and all(low is not None and low <= most for low, most in over):
            remarks.append(f"{one.place} may do as well: {_summary(one)}.")
    if chosen is None:
        more = [f"More than {max(points, key=lambda one: one.ranks).place} were not tried."] if points else []
        text = f"None of the measured rank counts is {' and '.join(limits)}"
        if near:
            text += f"; the {'fastest' if wanted == 'cheapest' else 'cheapest'}, {near.place}, takes {_summary(near)}"
        return TrainingAnswer(wanted=wanted, is_met=False, ranks=None, nodes=None, text=text, remarks=(*remarks, *more))
    return TrainingAnswer(
        wanted=wanted,
        is_met=True,
        ranks=chosen.ranks,
        nodes=chosen.nodes,
        text=f"{chosen.place}: {_summary(chosen)}: {' '.join([wanted, ' and '.join(limits)]).rstrip()}",
        remarks=(*_certainty(chosen, points, limits), *remarks, *_indistinguishable(chosen, wanted, meeting)),
    )


def _summary(point: TrainingPoint) -> str:
    """E.g. ``2.10 days [2.02, 2.18] for 806 GPU-hours [776, 837], 2,015 EUR [1,940, 2,093]``."""
    size, name = unit_of(point.time.value)
    figures = [one for one in (point.time.scaled(1 / size, name), point.hours, point.price) if one]
    time, *cost = (" ".join(filter(None, (value_text(one), one.unit, interval_text(one)))) for one in figures)
    return f"{time} for {', '.join(cost)}"


def _against(figure: Estimate, most: float) -> Outcome:
    """Returns `equal` where the whole interval lies between 0 and `most`."""
    return judge(figure, most / 2, centre=most / 2).outcome


def _certainty(chosen: TrainingPoint, points: Sequence[TrainingPoint], limits: Limits) -> Iterator[str]:
    left = "start-up and queue" if chosen.samples is None else "evaluations, checkpoints and queue"
    for words, (figure, most) in limits.items():
        outcome = _against(figure(chosen), most)
        if outcome == "equal":
            yield f"The whole interval of the mean is {words}, without {left}."
        elif outcome == "insufficient":
            few = figure(chosen)
            yield f"Not sure to be {words}: {units_text(few)} cannot decide that; {repeat_text(few)}."
        else:
            sure = [one for one in points if all(_against(f(one), m) == "equal" for f, m in limits.values())]
            then = f"; that of {best(sure, 'cheapest').place} does not" if sure else ""
            yield f"Not sure to be {words}: the interval of the mean reaches over it{then}."


def _indistinguishable(chosen: TrainingPoint, wanted: Wanted, meeting: Sequence[TrainingPoint]) -> Iterator[str]:
    few = []
    for other in (point for point in meeting if point is not chosen):
        factor = other.held / chosen.held if wanted == "cheapest" else 1.0
        ratio = ratio_estimate(other.seconds, chosen.seconds).scaled(factor, "ratio")
        outcome = judge(ratio, 0.0, centre=1.0, higher_is_worse=True).outcome
        if outcome == "insufficient":
            few.append(ratio)
        elif outcome != "worse":
            what = "hours" if wanted == "cheapest" else "time"
            yield f"{other.place} cannot be distinguished from {chosen.place}: {times_text(ratio)} the {what}."
    if few:
        fewest = min(few, key=lambda one: one.units)
        yield f"Chosen by values alone: {units_text(fewest)} cannot distinguish rank counts; {repeat_text(fewest)}."


class TimeToTrainView(GroupView):
    """What a training takes and costs at each measured rank count; of a report nothing is `asked`."""

    id = "time-to-train"
    title = "How many ranks?"
    level = "answer"
    key = "time_to_train"
    after = "scaling"

    def __init__(self, asked: Asked | None = None) -> None:
        self._asked = asked or Asked()

    def numbers(self, source: GroupSource) -> TimeToTrain | None:
        # Such runs read every gradient once more: their speed is no training's.
        return None if source.group.sample.plan.measure.noise_scale else estimated(source, self._asked)

    def shown(self, group: ReportGroup, found: TimeToTrain) -> Section:
        title = f"How many {'GPU' if found.held == 'GPU' else 'rank'}s?"
        sheet = _sheet(found, group.sample_unit)
        words = [text for one in found.answers for text in (f"{one.text}.", *one.remarks)]
        return Section(
            title=title,
            about=(found.amount,),
            words=tuple(dict.fromkeys(words)),
            charts=lambda: times_over("ranks", group, "Time to train", (("", p, p.time) for p in found.points), sheet),
            sheets=(sheet,),
            notes=found.notes,
            where={"sample_unit": group.sample_unit},
            brief=(f"{title} {'; '.join(one.text for one in found.answers)}.",) if len(found.points) > 1 else (),
        )


def times_over(
    x: str, subject: Subject, what: str, times: Iterable[tuple[str, Any, Estimate | None]], table: Sheet[Any]
) -> list[Chart]:
    """Seconds of `what` over `nodes` (or `ranks`, where these do not follow from the nodes); nothing of few counts.

    `times`: of a line at a row with ranks and nodes. Dashed: of the fewest ranks the first, which more divide evenly.
    """
    known = {(line, row.ranks, row.nodes): time for line, row, time in times if time is not None}
    places = {(ranks, nodes) for _, ranks, nodes in known}
    colours = dict(zip(dict.fromkeys(line for line, *_ in known), itertools.cycle(RANK_COLOURS), strict=False))
    if len(places) < 2 + (len(colours) == 1):  # Of one line at two counts a table says as much.
        return []
    x = x if len({nodes for _, nodes in places}) == len(places) else "ranks"
    (name, first, at), base = min(known.items(), key=lambda one: one[0][1:])
    size, unit = unit_of(max(time.value for time in known.values()))
    rows: Rows = [
        {
            "ranks": ranks,
            "nodes": nodes,
            "line": line,
            "place": place_text(ranks, nodes),
            "ideal": base.value / size * first / ranks,
            **figure_row(time.scaled(1 / size, unit)),
        }
        for (line, ranks, nodes), time in known.items()
    ]
    by = Series("line", colours) if len(colours) > 1 else MEASURED
    tooltip = {"line": what, "place": "at", "shown": unit, "basis": "interval"}
    words = "; ".join(", ".join(filter(None, (row["line"], f"{row['place']}: {row['shown']}"))) for row in rows)
    return [
        finish(
            lines(rows, Axis(unit, scale={"type": "log", "base": 2}), by, tooltip, x=x, title=x, ideal="ideal"),
            subject,
            name="times",
            title=f"{what} over {x} (dashed: ideal from {', '.join(filter(None, (name, place_text(first, at))))})",
            alt=f"In {unit}. {words}.",
            table=table,
            size=(WIDE, HEIGHT),
            axes="xy",
        )
    ]


def _sheet(found: TimeToTrain, unit: str) -> Sheet[TrainingPoint]:
    size, name = unit_of(max((point.time.value for point in found.points), default=0.0))
    price = f"Price, {found.currency}".rstrip(", ") if any(point.price for point in found.points) else ""

    def efficiency(point: TrainingPoint) -> Estimate | Cell:
        return Cell("baseline", number=1.0) if point.is_baseline else point.efficiency

    def time(point: TrainingPoint) -> Estimate:
        return point.time.scaled(1 / size)

    def ideal(point: TrainingPoint) -> Estimate:
        return found.points[0].time.scaled(found.points[0].ranks / point.ranks / size)

    columns = columns_of(
        TrainingPoint,
        *("ranks", "nodes", "place", "throughput"),
        Column("efficiency", "Efficiency", lambda point: point.efficiency, efficiency, has_interval=True),
        *("global_batch", "trained_samples=samples"),
        Column("time_s", f"Time, {name}", lambda point: point.time, time, has_interval=True),
        # Of a length in samples the efficiency says it.
        Column("", f"Ideal, {name}" * any(one.samples is None for one in found.points), ideal),
        "held",
        Column("hours_of", "", lambda point: found.held),
        *("hours", "price"),
        titles={
            "throughput_per_s": f"Throughput, {unit}/s",
            "hours": f"{found.held[0].upper()}{found.held[1:]}-hours",
            "price": price,
        },
    )
    return Sheet(name="time-to-train", title="Time to train", columns=columns, rows=found.points)

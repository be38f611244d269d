"""The view `time-to-train`: how many GPUs (or ranks) a training is worth.

For N samples at Thr samples per second a run would take N / Thr seconds of training steps, and its own start-up; what
it holds meanwhile (GPUs, nodes, cores, ranks) times that are the hours that are billed, which grow by 1 / efficiency
over the baseline's. Times are geometric means over runs, as throughput is, so that ratios of two rank counts are
`ratio_estimate`s of the same runs. Only measured rank counts are answered: nothing here is extrapolated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dlbench.costs.training_time import Recipe, recipe_of, time_to_train, training_samples
from dlbench.errors import UserError
from dlbench.records.record import NoiseScale
from dlbench.records.scan import Run
from dlbench.report.document import Section
from dlbench.report.formats.json import HIDDEN
from dlbench.report.table import Cell, Column, Sheet, times_cell
from dlbench.report.wording import (
    clean,
    interval_text,
    number_text,
    place_text,
    reached_text,
    times_text,
    value_text,
)
from dlbench.stats.estimates import MIN_RUNS, Estimate, geometric_mean_estimate, ratio_estimate
from dlbench.stats.pairing import RunKey
from dlbench.stats.verdicts import placed
from dlbench.units import format_seconds
from dlbench.views.model import Group
from dlbench.views.noise import noise_share
from dlbench.views.quality.numbers import Quality
from dlbench.views.view import GroupSource, GroupView

Held = Literal["GPU", "node", "core", "rank"]
"""What is held while a training runs, and billed by the hour."""
Wanted = Literal["cheapest", "fastest"]
"""cheapest: of fewest hours of what is held."""

PER = 1_000_000
"""Samples of a training whose length nobody states."""
HOUR_S = 3_600
_UNITS = ((86_400, "days"), (HOUR_S, "hours"), (60, "minutes"), (1, "seconds"))
_LEAST = 2
"""Of a unit, from which on times are printed in it."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a person says of the training, its price and its limits; the defaults leave all to the runs."""

    epochs: float | None = None
    epoch_samples: int | None = None
    samples: int | None = None
    """Instead of epochs."""
    price: float | None = None
    """Of an hour of what is held."""
    currency: str = ""
    held: Held | None = None
    """What price and budget are of; None: GPUs, of runs without GPUs ranks, or nodes where jobs hold whole ones."""
    deadline_s: float | None = None
    budget: float | None = None
    is_money: bool = False
    """Whether the budget is in the currency of the price, not in hours."""


@dataclass(frozen=True, kw_only=True)
class TrainingPoint:
    """The training at one rank count."""

    ranks: int
    nodes: int
    held: int
    """GPUs, nodes, cores or ranks, as `TimeToTrain.held`, that the runs held."""
    place: str
    """Ranks and nodes in words; of GPUs where each rank holds one."""
    global_batch: int
    throughput: Estimate
    efficiency: Estimate
    is_baseline: bool
    samples: float | None
    """Trained, all ranks together; None where runs trained to a target."""
    time: Estimate | None
    """Seconds; None where a run missed the target."""
    hours: Estimate | None
    """`held` times `time`, hours."""
    price: Estimate | None
    why: str
    """Why there is no time; empty where there is one."""
    more_samples: Estimate | None
    """Samples that the gradient noise scale lets expect at this global batch, over those at the baseline's (ratio);
    None where it was not recorded, or the batch is the baseline's. It is in no other figure."""
    seconds: Mapping[RunKey, float] = field(default_factory=dict, repr=False, metadata={HIDDEN: False})
    """The time of each run."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One rank count that was looked for."""

    wanted: Wanted
    """Of a point that is both, fastest."""
    is_met: bool
    """Whether a measured rank count meets the deadline and the budget; True where none was given."""
    ranks: int | None
    """Of the point; None where none meets them."""
    nodes: int | None
    text: str
    remarks: tuple[str, ...]
    """How sure that is, each a sentence."""


@dataclass(frozen=True, kw_only=True)
class TimeToTrain:
    """Time, hours and price of a training at each measured rank count."""

    held: Held
    currency: str
    amount: str
    """How much is trained, and who says so, in a sentence."""
    is_whole: bool
    """Whether it is a training; else figures are of a million samples."""
    points: tuple[TrainingPoint, ...]
    answers: tuple[Answer, ...]
    notes: tuple[str, ...]
    """What is in the figures, and what is not."""

    @property
    def unit(self) -> tuple[float, str]:
        """Seconds and name of the unit that its times are printed in."""
        return unit_of(max((point.time.value for point in self.points if point.time), default=0.0))


Limits = dict[str, tuple[Callable[[TrainingPoint], Estimate], float]]
"""What must not be more than how much, by what that is called."""


def unit_of(seconds: float) -> tuple[float, str]:
    """The largest unit of which a time has `_LEAST` or more: its seconds and its name."""
    return next(((size, name) for size, name in _UNITS if seconds >= _LEAST * size), _UNITS[-1])


def held_by(run: Run, what: Held) -> int | None:
    """How much a run held; None for GPUs of a run that had none. Exclusive jobs hold whole nodes, used or not."""
    assert run.record is not None
    layout, system = run.plan.layout, run.plan.system
    is_whole = system.scheduler != "none" and system.slurm.exclusive
    if what == "core":
        return (
            layout.nodes * layout.node_cores if is_whole and layout.node_cores else layout.ranks * layout.cores_per_rank
        )
    if what != "GPU":
        return layout.nodes if what == "node" else layout.ranks
    used = len({(rank.host, rank.gpu.uuid) for rank in run.record.ranks if rank.gpu is not None})
    asks_all = system.scheduler != "none" and (is_whole or system.slurm.gpu_count == "node")
    return max(used, layout.nodes * system.node.gpus) if used and asks_all else used or None


def _held(run: Run) -> Held:
    if held_by(run, "GPU"):
        return "GPU"
    system = run.plan.system
    return "node" if system.scheduler != "none" and system.slurm.exclusive else "rank"


def _place(ranks: int, nodes: int, held: Held, count: int) -> str:
    if held != "GPU":
        return place_text(ranks, nodes)
    if count != ranks:
        return f"{place_text(ranks, nodes)} ({count} GPUs held)"
    return f"{count} GPU{'s' * (count > 1)}" + f" on {nodes} nodes" * (nodes > 1)


def estimated(source: GroupSource, asked: Asked) -> TimeToTrain:
    """The training at every rank count of a group, and the answer to what was asked.

    Raises:
        UserError: epochs or a limit of a training whose length is not known, or GPU-hours of runs without GPUs.
    """
    group, table = source.group, source.table
    rates = dict(zip(table.figures["run_id"], table.figures["throughput"], strict=True))
    runs = [{table.keys[name]: table.runs[name] for name in point.run_ids} for point in group.points]
    firsts = [next(iter(of_point.values())) for of_point in runs]
    held = asked.held or _held(firsts[0])
    quality = source.of(Quality) if asked.samples is None and asked.epochs is None else None
    lengths = [_length(run, firsts[0], asked) for run in firsts]
    is_whole = quality is not None or lengths[0] is not None
    if not is_whole and (asked.deadline_s or asked.budget):
        option = "--deadline" if asked.deadline_s else "--budget"
        raise UserError(f"{option}: {_workload(firsts[0])} names no length of a training; add --epochs or --samples")
    share = noise_share(_with_noise(source), 1)
    made: list[TrainingPoint] = []
    for point, of_point, first, length in zip(group.points, runs, firsts, lengths, strict=True):
        count = held_by(first, held)
        if count is None:
            raise UserError(
                f"{_workload(first)}: its runs had no GPU: price and budget are of rank-hours or node-hours"
            )
        batch, samples, why = first.plan.global_batch, length.samples if length else PER, ""
        if quality is not None:
            there = next(one for one in quality.points if (one.ranks, one.nodes) == (point.ranks, point.nodes))
            why = "" if there.all_reached else f"{reached_text(there.num_reached, there.num_runs)} met the target"
            seconds = {key: _to_target_s(run) for key, run in of_point.items()} if there.all_reached else {}
        else:
            seconds = {
                key: time_to_train(samples, rates[run.plan.run_id]) + is_whole * _start_s(run)
                for key, run in of_point.items()
            }
        time = geometric_mean_estimate(seconds, "s") if seconds else None
        hours = None if time is None else time.scaled(count / HOUR_S, f"{held}-hours")
        smallest = made[0].global_batch if made else batch
        made.append(
            TrainingPoint(
                ranks=point.ranks,
                nodes=point.nodes,
                held=count,
                place=_place(point.ranks, point.nodes, held, count),
                global_batch=batch,
                throughput=point.throughput,
                efficiency=point.efficiency,
                is_baseline=point.is_baseline,
                samples=None if quality is not None else samples,
                time=time,
                hours=hours,
                price=hours.scaled(asked.price, asked.currency) if hours and asked.price else None,
                why=why,
                more_samples=share.mapped(_factor(smallest, batch), "ratio") if share and batch > smallest else None,
                seconds=seconds,
            )
        )
    points = tuple(made)
    return TimeToTrain(
        held=held,
        currency=asked.currency,
        amount=_amount_text(firsts, lengths, quality, asked),
        is_whole=is_whole,
        points=points,
        answers=answers(points, asked, held),
        notes=tuple(_notes(points, firsts, group.scaling, quality, share, is_whole=is_whole)),
    )


def _workload(run: Run) -> str:
    return clean(f"{run.plan.workload.name}, {run.plan.workload.preset} preset")


def _length(run: Run, base: Run, asked: Asked) -> Recipe | None:
    """What is trained at the batch of a run; a recipe in steps trains as many samples as at the baseline's batch."""
    if asked.samples is not None:
        return Recipe(epochs=None, samples=asked.samples, key="--samples", is_limit=False)
    epoch = asked.epoch_samples or run.epoch_samples
    if asked.epochs is not None:
        if not epoch:
            raise UserError(f"--epochs: data of {_workload(run)} names no size; add --epoch-samples, or give --samples")
        samples = training_samples(epoch, asked.epochs)
        return Recipe(epochs=asked.epochs, samples=samples, key="--epochs", is_limit=False)
    found = recipe_of(run.plan, epoch)
    if found is not None and found.epochs is None and run.plan.workload.train.optimizer.place(run.plan.global_batch):
        return found
    return found if found is None or found.epochs is not None else recipe_of(base.plan, epoch)


def _start_s(run: Run) -> float:
    """Of its slowest rank: start of the process to the first step, staging included, and unpacking before that."""
    assert run.record is not None
    return max(rank.startup_s + (rank.unpacking_s or 0.0) for rank in run.record.ranks)


def _to_target_s(run: Run) -> float:
    assert run.record is not None
    assert run.record.quality is not None
    assert run.record.quality.time_to_quality_s
    return run.record.quality.time_to_quality_s


def _with_noise(source: GroupSource) -> dict[RunKey, NoiseScale]:
    """Noise scales of all runs that trained the same network by the same preset: to record them they were slower, and
    are of another group.
    """
    own = source.group.sample.plan.workload
    found: dict[RunKey, NoiseScale] = {}
    for name, run in source.table.runs.items():
        workload = run.plan.workload
        same = (workload.name, workload.preset, workload.model) == (own.name, own.preset, own.model)
        if same and run.record is not None and run.record.noise_scale is not None:
            found[source.table.keys[name]] = run.record.noise_scale
    return found


def _factor(small: int, large: int) -> Callable[[float], float]:
    """Samples to a quality at a large batch over those at a small one, by 1 / noise scale: E = E_min (1 + B / B_n)."""
    return lambda share: (1 + large * max(0.0, share)) / (1 + small * max(0.0, share))


def answers(points: Sequence[TrainingPoint], asked: Asked, held: Held) -> tuple[Answer, ...]:
    """With a deadline the cheapest rank count that meets it (and the budget), with a budget alone the fastest within
    it; without either both of all.
    """
    known = [point for point in points if point.time]
    limits = _limits(asked, held)
    if not known:
        return (_none(known, limits),) if limits else ()
    if not limits:
        fast, cheap = (_answer(wanted, known, known, {}) for wanted in ("fastest", "cheapest"))
        if best(known, "fastest") is not best(known, "cheapest"):
            return fast, cheap
        text = f"{fast.text} and cheapest" if len(known) > 1 else f"{fast.text.removesuffix('fastest')}the only one"
        return (dataclasses.replace(fast, text=text, remarks=tuple(dict.fromkeys((*fast.remarks, *cheap.remarks)))),)
    meeting = [point for point in known if all(figure(point).value <= most for figure, most in limits.values())]
    wanted: Wanted = "cheapest" if asked.deadline_s else "fastest"
    return (_answer(wanted, meeting, known, limits) if meeting else _none(known, limits),)


def _limits(asked: Asked, held: Held) -> Limits:
    found: Limits = {}
    if asked.deadline_s:
        size, name = unit_of(asked.deadline_s)
        found[f"under {asked.deadline_s / size:g} {name}"] = _time, asked.deadline_s
    if asked.budget:
        unit, figure = (asked.currency, _price) if asked.is_money else (f"{held}-hours", _hours)
        found[f"within {f'{asked.budget:,.2f}'.removesuffix('.00')} {unit}"] = figure, asked.budget
    return found


def _time(point: TrainingPoint) -> Estimate:
    assert point.time is not None
    return point.time


def _hours(point: TrainingPoint) -> Estimate:
    assert point.hours is not None
    return point.hours


def _price(point: TrainingPoint) -> Estimate:
    assert point.price is not None
    return point.price


def best(points: Sequence[TrainingPoint], wanted: Wanted) -> TrainingPoint:
    """The cheapest or the fastest by value; of equal ones the fastest or the cheapest, then that of fewest ranks."""
    first, second = (_hours, _time) if wanted == "cheapest" else (_time, _hours)
    return min(points, key=lambda point: (first(point).value, second(point).value, point.ranks, point.nodes))


def _answer(wanted: Wanted, meeting: Sequence[TrainingPoint], known: Sequence[TrainingPoint], limits: Limits) -> Answer:
    chosen = best(meeting, wanted)
    title = " and ".join([f"{wanted} {words}" if not place else words for place, words in enumerate(limits)]) or wanted
    return Answer(
        wanted=wanted,
        is_met=True,
        ranks=chosen.ranks,
        nodes=chosen.nodes,
        text=f"{chosen.place}: {time_text(chosen)} for {cost_text(chosen)}: {title}",
        remarks=(*_sure(chosen, wanted, known, limits), *_told_apart(chosen, wanted, meeting)),
    )


def time_text(point: TrainingPoint, *, with_interval: bool = True) -> str:
    """E.g. ``2.10 days [2.02, 2.18]``."""
    size, name = unit_of(_time(point).value)
    figure = _time(point).scaled(1 / size)
    return f"{value_text(figure)} {name} {interval_text(figure) * with_interval}".rstrip()


def cost_text(point: TrainingPoint, *, with_interval: bool = True) -> str:
    """E.g. ``806 GPU-hours [776, 837], 2,015 EUR [1,940, 2,093]``."""
    figures = [figure for figure in (point.hours, point.price) if figure is not None]
    return ", ".join(
        " ".join(filter(None, (value_text(one), one.unit, interval_text(one) * with_interval))) for one in figures
    )


def _sure(chosen: TrainingPoint, wanted: Wanted, known: Sequence[TrainingPoint], limits: Limits) -> Iterator[str]:
    """How far the runs decide that a point meets the limits, and that better ones do not."""
    for words, (figure, most) in limits.items():
        where = placed(figure(chosen), 0.0, most)
        if where == "within":
            yield f"Sure to be {words}: the whole interval is."
        elif where == "insufficient":
            yield f"Not sure to be {words}: {MIN_RUNS} runs or more of a rank count would decide that."
        else:
            sure = [one for one in known if all(placed(f(one), 0.0, m) == "within" for f, m in limits.values())]
            then = f"; surely so: {best(sure, wanted).place}" if sure else ""
            yield f"Not sure to be {words}: the interval reaches over it{then}."
    first = _hours if wanted == "cheapest" else _time
    for other in known:
        over = [(figure, most) for figure, most in limits.values() if figure(other).value > most]
        if over and first(other).value < first(chosen).value and all((f(other).low or m) < m for f, m in over):
            yield f"{other.place} may do as well: {time_text(other)} for {cost_text(other)}."


def _told_apart(chosen: TrainingPoint, wanted: Wanted, meeting: Sequence[TrainingPoint]) -> Iterator[str]:
    """Which other points the runs cannot tell from the chosen one in what it was chosen for."""
    what = "hours" if wanted == "cheapest" else "time"
    few = False
    for other in meeting:
        if other is chosen:
            continue
        ratio = ratio_estimate(other.seconds, chosen.seconds)
        if wanted == "cheapest":
            ratio = ratio.scaled(other.held / chosen.held, "ratio")
        where = placed(ratio, 1.0, 1.0)
        few |= where == "insufficient"
        if where not in ("above", "insufficient"):
            faster = "" if wanted == "fastest" else f"; it takes {time_text(other, with_interval=False)}"
            yield f"{other.place} cannot be told apart from {chosen.place}: {times_text(ratio)} the {what}{faster}."
    if few:
        yield f"Chosen by values alone: fewer than {MIN_RUNS} runs of a rank count tell none apart."


def _none(known: Sequence[TrainingPoint], limits: Limits) -> Answer:
    """No point meets the limits: what the nearest ones take."""
    wanted: tuple[Wanted, ...] = ("cheapest",)
    if any(figure is _time for figure, _ in limits.values()):
        wanted = ("fastest", "cheapest") if len(limits) > 1 else ("fastest",)
    near = {one: best(known, one) for one in wanted if known}
    told = (f"the {one}, {at.place}, takes {time_text(at)} for {cost_text(at)}" for one, at in near.items())
    remarks = []
    lows = [[(figure(one).low, figure(one).value, most) for figure, most in limits.values()] for one in known]
    if any(all((value if low is None else low) <= most for low, value, most in one) for one in lows):
        remarks.append("The interval of a rank count reaches there: that none would do is not sure.")
    if known:
        remarks.append(f"More than {max(known, key=lambda point: point.ranks).place} were not tried.")
    return Answer(
        wanted=wanted[0],
        is_met=False,
        ranks=None,
        nodes=None,
        text="; ".join([f"None of the measured rank counts is {' and '.join(limits)}", *told]),
        remarks=tuple(remarks),
    )


def _amount_text(firsts: Sequence[Run], lengths: Sequence[Recipe | None], quality: Quality | None, asked: Asked) -> str:
    unit = firsts[0].plan.workload.sample_unit
    first, last = lengths[0], lengths[-1]
    if quality is not None:
        side = "at least" if quality.higher_is_better else "at most"
        return (
            f"Trained to a {quality.metric_title} of {side} {number_text(quality.target, quality.unit)}, as measured."
        )
    if first is None or last is None:
        return f"Of a million {unit}: no length of a training is known; dlbench estimate RUNS --epochs N gives one."
    if first.epochs is None or last.epochs is None:
        much = f"{_span(first.samples, last.samples, ',.0f')} {unit} ({first.key})"
    else:
        epoch = asked.epoch_samples or firsts[0].epoch_samples
        much = f"{_span(first.epochs, last.epochs, 'g')} epochs ({first.key}) of {epoch:,} {unit}"
    return f"At most {much}: runs that meet their target take less." if first.is_limit else f"{much}."


def _span(first: float, last: float, form: str) -> str:
    """One number, or both where the recipe is longer at the larger global batch."""
    return f"{first:{form}}" if first == last else f"{first:{form}} to {last:{form}}"


def _notes(
    points: Sequence[TrainingPoint],
    firsts: Sequence[Run],
    scaling: str,
    quality: Quality | None,
    share: Estimate | None,
    *,
    is_whole: bool,
) -> Iterator[str]:
    if quality is not None:
        yield "Time: start of training to the evaluation that met the target, with evaluations and checkpoints."
    elif is_whole:
        starts = sorted(_start_s(run) for run in firsts)
        span = " to ".join(dict.fromkeys(format_seconds(one) for one in (starts[0], starts[-1])))
        yield (
            f"Time: training steps at the measured throughput, and the start of each run with staging ({span}); "
            "evaluations, checkpoints and the queue are not in it."
        )
    small, large = points[0].global_batch, points[-1].global_batch
    if scaling == "strong" or small == large:
        yield f"The global batch is {large:,} in all rows."
    elif quality is None:
        grows = f"The global batch grows from {small:,} to {large:,}"
        if points[0].samples != points[-1].samples:
            yield f"{grows}, for which the recipe itself has another length."
        else:
            yield f"{grows}; larger batches often need more epochs to the same accuracy, which is not in the figures."
        if share is not None and points[-1].more_samples is not None:
            yield (
                "Samples by noise scale: what the measured gradient noise scale lets expect, in no other column; it "
                "supposes a learning rate tuned to each batch."
            )
        else:
            yield "--set measure.noise_scale=true measures how far the batch may grow."
    if any(point.held != point.ranks for point in points):
        yield "GPUs, cores and nodes that a job holds are counted, used or not."
    yield "Measured rank counts only: nothing is extrapolated."


def _sheet(found: TimeToTrain, unit: str) -> Sheet[TrainingPoint]:
    size, name = found.unit
    has_noise = any(point.more_samples for point in found.points)
    has_price = any(point.price for point in found.points)
    columns: tuple[Column[TrainingPoint], ...] = (
        Column("ranks", "", lambda point: point.ranks),
        Column("nodes", "", lambda point: point.nodes),
        Column("", "At", lambda point: point.place),
        Column("throughput_per_s", f"Throughput, {unit}/s", lambda point: point.throughput, has_interval=True),
        Column(
            "efficiency",
            "Efficiency",
            lambda point: point.efficiency,
            lambda point: Cell("baseline", number=1.0) if point.is_baseline else point.efficiency,
            has_interval=True,
        ),
        Column("global_batch", "", lambda point: point.global_batch),
        Column("trained_samples", "", lambda point: point.samples),
        Column(
            "time_s",
            f"Time, {name}",
            lambda point: point.time,
            lambda point: point.time.scaled(1 / size) if point.time else Cell(point.why),
            has_interval=True,
        ),
        Column("held", "", lambda point: point.held),
        Column("hours_of", "", lambda point: found.held),
        Column("hours", f"{found.held[0].upper()}{found.held[1:]}-hours", lambda point: point.hours, has_interval=True),
        Column(
            "price", f"Price, {found.currency}".rstrip(", ") * has_price, lambda point: point.price, has_interval=True
        ),
        Column(
            "samples_by_noise_scale",
            "Samples by noise scale" * has_noise,
            lambda point: point.more_samples,
            lambda point: times_cell(point.more_samples),
            has_interval=True,
        ),
    )
    return Sheet(name="time-to-train", title="Time to train", columns=columns, rows=found.points)


class TimeToTrainView(GroupView):
    """What a training takes and costs at each measured rank count.

    Args:
        asked: what a person says of it; the report asks nothing.
    """

    id = "time-to-train"
    title = "How many ranks?"
    level = "answer"
    key = "time_to_train"

    def __init__(self, asked: Asked | None = None) -> None:
        self._asked = asked or Asked()

    def numbers(self, source: GroupSource) -> TimeToTrain:
        return estimated(source, self._asked)

    def section(self, group: Group) -> Section | None:
        found = group.of(TimeToTrain)
        if found is None:
            return None
        headline = ""
        if found.answers and found.answers[0].ranks is not None:
            known = [point for point in found.points if point.time]
            ends = dict.fromkeys(id(best(known, one)) for one in ("fastest", "cheapest"))
            told = (point for name in ends for point in known if id(point) == name)
            headline = "; ".join(
                f"{point.place}: {time_text(point, with_interval=False)} for {cost_text(point, with_interval=False)}"
                for point in told
            )
        words = [text for one in found.answers for text in (f"{one.text}.", *one.remarks)]
        title = f"How many {'GPU' if found.held == 'GPU' else 'rank'}s?"
        return Section(
            id=self.id,
            title=title,
            headline=headline,
            about=(found.amount,),
            words=tuple(dict.fromkeys(words)),
            sheets=(_sheet(found, group.sample_unit),),
            notes=found.notes,
            brief=(f"{title} {headline}.",) if headline and len(found.points) > 1 else (),
        )

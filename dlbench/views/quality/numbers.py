"""Runs trained to a quality: how many got there, how soon, and whether steps or their number made the difference.

With T the time to quality, N the samples trained until then and Thr the measured throughput of a run, 1/T splits
into (Thr) (1/N) (N / (Thr T)), so that the speed-up against the baseline (0) is a product:

    T0/T = Thr/Thr0 x N0/N x rest,   rest = (T0 Thr0 / N0) / (T Thr / N)

Thr/Thr0 says by how much steps became faster, N0/N whether as few samples did (statistical efficiency; Keskar et al.
2017 and Shallue et al. 2019 on larger batches), and T Thr / N is by how much a run took longer than its measured steps
alone: evaluation, checkpoints, warm-up steps, waits. Ratios of geometric means over runs keep the product exact; those
of medians do not. Nothing of it is given unless all runs on both sides met the target: the time of a run that did not
is not known, and to leave it out would favour the side that fails more often.

What large batches need is across groups. Beside it stands the law of `dlbench.views.noise`, which supposes a rate tuned
to each batch: so of several rates the one that needed fewest samples stands for its batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from statistics import fmean

from dlbench.analysis.comparability import planned_id
from dlbench.analysis.scaling import Group
from dlbench.analysis.side_by_side import alike, pair_key, with_train
from dlbench.analysis.table import RunTable, without_resumed
from dlbench.perfmodels.training_time import TimeVerdict, consistency
from dlbench.records import record
from dlbench.records.record import QualityResult, meets
from dlbench.records.scan import Run
from dlbench.report.table import column, times_cell
from dlbench.report.wording import DASH, basis_text, number_text, place_text, times_value, value_text
from dlbench.specs.training import OptimizerSpec
from dlbench.stats.estimates import (
    Estimate,
    by_definition,
    difference_p,
    mean_estimate,
    median_estimate,
    of_known,
    ratio_estimate,
    typical_estimate,
)
from dlbench.stats.multiplicity import holm
from dlbench.stats.pairing import RunKey
from dlbench.views.noise import model_noise_share, samples_over

METRIC_TITLES = {"top1": "top-1 accuracy", "masked_lm_accuracy": "masked-LM accuracy", "mae": "mean absolute error"}
"""What the metrics of `dlbench.records.record.QualityResult` are called."""
MOST_WARMUP = 10.0  # Times a measured step that a warm-up step may take without making a time a contradiction.

Keys = Mapping[str, RunKey]

_mean = partial(of_known, mean_estimate)
_median = partial(of_known, median_estimate)
_typical = partial(of_known, typical_estimate)
"""Of what has a ratio next to it, which is one of geometric means."""
_Recipe = tuple[int, str, int, int, float]  # Global batch, optimizer, ranks, nodes and learning rate.


def quality_of(run: Run) -> QualityResult:
    """The quality that the record of a run to a quality holds."""
    assert run.record is not None
    assert run.record.quality is not None
    return run.record.quality


def without_staging(run: Run) -> float | None:
    """Seconds to quality outside of staging; None where the target was not met, or nothing was staged."""
    assert run.record is not None
    whole, staging = quality_of(run).time_to_quality_s, run.record.staging
    return None if whole is None or staging is None else max(0.0, whole - staging.seconds)


def until_target(result: QualityResult) -> Sequence[record.Evaluation]:
    """Evaluations up to the first that met the target; all of them where none did."""
    for index, evaluation in enumerate(result.evaluations):
        if meets_target(result, evaluation):
            return result.evaluations[: index + 1]
    return result.evaluations


def meets_target(result: QualityResult, evaluation: record.Evaluation) -> bool:
    """Whether an evaluation met the target of its run."""
    return meets(evaluation.value, result.target, higher_is_better=result.higher_is_better)


def resolution(result: QualityResult) -> float | None:
    """Seconds between the evaluation that met the target and the one before, or the start; None if none met it."""
    seen = until_target(result)
    if not (seen and meets_target(result, seen[-1])):
        return None
    return seen[-1].wall_s - (seen[-2].wall_s if len(seen) > 1 else 0.0)


def account(result: QualityResult) -> tuple[float, float, float]:
    """Seconds in all, in training steps and in evaluations, until the target or the end."""
    seen = until_target(result)
    if not seen:
        return 0.0, 0.0, 0.0
    return seen[-1].wall_s, seen[-1].train_s, sum(evaluation.eval_s for evaluation in seen)


def fit(run: Run, throughput: float) -> TimeVerdict | None:
    """Whether throughput, epochs and time in training steps of this run can all be true; None where one is not known.
    `throughput`: samples per second of its measured steps, all ranks together. Time that warm-up steps may have taken
    is no contradiction where later steps fit: of a short run they are a large part.
    """
    assert run.record is not None
    result, epoch = quality_of(run), run.epoch_samples
    last = result.evaluations[-1] if result.evaluations else None
    if last is None or not (epoch and last.epoch and last.train_s):
        return None

    def since(step: int) -> TimeVerdict | None:
        """Returns the verdict on what was trained from the first evaluation at that step or later to the last one."""
        start = next((one for one in result.evaluations if one.samples >= step * run.plan.global_batch), last)
        if last.epoch <= start.epoch or last.train_s <= start.train_s:
            return None
        return consistency(throughput, epoch, last.epoch - start.epoch, last.train_s - start.train_s)

    first, warmup = run.record.first_step, run.plan.measure.warmup_steps
    # What ran before the checkpoint ran at another rate: only what this run trained between two evaluations counts.
    verdict = since(first) if is_resumed(run) else consistency(throughput, epoch, last.epoch, last.train_s)
    if verdict is None or verdict.status != "unexplained":
        return verdict
    later = since(first + warmup)
    is_slow = verdict.stated_s - verdict.expected_s > MOST_WARMUP * warmup * run.plan.global_batch / throughput
    if is_slow or (later is not None and later.status != "fits"):
        return verdict
    return replace(verdict, status="fits")


def is_resumed(run: Run) -> bool:
    """Whether its training began from a checkpoint."""
    return run.record is not None and bool(run.record.first_step)


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Why the baseline's time to quality is `speedup` times as long: the other three multiply to it exactly."""

    speedup: Estimate = field(metadata=column())
    throughput: Estimate = field(metadata=column(name="throughput_factor"))
    """Throughput over the baseline's: above 1, samples are worked off faster."""
    samples: Estimate = field(metadata=column(name="samples_factor"))
    """The baseline's samples to quality over those here: below 1, more samples were needed."""
    rest: Estimate = field(metadata=column(name="rest_factor"))
    """QualityEvaluation, checkpoints, warm-up steps and waits: above 1, less time goes there than at the baseline."""


@dataclass(frozen=True, kw_only=True)
class QualityPoint:
    """All comparable runs to one quality with one rank and node count; over the runs that reached it, unless said
    otherwise: times, samples and epochs to accuracy are geometric means, the others medians.
    """

    ranks: int
    nodes: int
    global_batch: int = field(metadata=column("Global batch", unit="samples"))
    num_runs: int = field(metadata=column("Runs", "runs"))
    """Runs that ended: those with figures, and those whose sanity checks failed."""
    num_reached: int = field(metadata=column("Reached", "reached", is_brief=True))  # Valid runs that met the target.
    num_invalid: int  # Runs that failed a sanity check, e.g. by a loss that is not finite; the target is missed.
    num_lost: int  # Further runs that were killed or failed; nobody knows what they would have reached.
    time: Estimate | None = field(metadata=column("Time to accuracy", "time_to_quality_s", is_brief=True))
    """Seconds to quality, staging included."""
    unstaged: Estimate | None = field(metadata=column("Without staging", "unstaged_s", is_brief=True))
    """The same without the time in which samples were staged; None where no run staged any."""
    resolution: Estimate | None = field(metadata=column("Of it, last interval", "last_interval_s"))
    """Seconds between the evaluation that met the target and the one before (or the start): by so much the time to
    quality may be too long."""
    epochs: Estimate | None = field(metadata=column("Epochs", "epochs_to_quality", is_brief=True))
    samples: Estimate | None = field(metadata=column("Samples", "samples_to_quality"))
    best: Estimate | None = field(metadata=column("Best", is_brief=True))
    """Best value of each run, median over runs with figures; as `final`."""
    final: Estimate | None = field(metadata=column("Final"))  # Last value of each run.
    whole: Estimate | None = field(metadata=column(name="mean_s"))
    """Seconds to the target, or to the end of a run that did not meet it; mean over runs with figures, so that the
    following three sum to it."""
    training: Estimate | None = field(metadata=column(name="training_s"))
    evaluation: Estimate | None = field(metadata=column(name="evaluation_s"))
    other: Estimate | None = field(metadata=column(name="other_s"))  # Checkpoints and waits.
    factors: Factors | None  # None where a run on either side missed the target, and for a group of one point.
    run_ids: tuple[str, ...]  # Runs with figures.

    @property
    def all_reached(self) -> bool:
        """Whether every run that ended met the target."""
        return self.num_reached == self.num_runs > 0


@dataclass(frozen=True, kw_only=True)
class QualityEvaluation:
    """One evaluation of the quality; times in seconds since the start of training."""

    samples: int
    epoch: float
    wall_s: float
    train_s: float
    eval_s: float
    value: float | None
    loss: float | None


@dataclass(frozen=True, kw_only=True)
class QualityCurve:
    """All evaluations of one run."""

    run_id: str
    ranks: int
    nodes: int
    reached: bool
    evaluations: tuple[QualityEvaluation, ...]


@dataclass(frozen=True, kw_only=True)
class GroupQuality:
    """Training to a quality."""

    metric: str
    metric_title: str
    unit: str  # Unit of the metric's figures: `fraction` or `error`.
    higher_is_better: bool
    target: float
    limit: str  # When a run gives up, in words.
    predictor: str  # What a predictor without skill does, in words.
    predictor_value: float
    headline: tuple[str, str]  # The card's number and what it means.
    points: tuple[QualityPoint, ...]
    curves: tuple[QualityCurve, ...]

    @property
    def goal(self) -> str:
        """Returns the target in words, e.g. ``mean absolute error of at most 0.3000``."""
        bound = "at least" if self.higher_is_better else "at most"
        return f"{self.metric_title} of {bound} {number_text(self.target, self.unit)}"

    @property
    def num_reached(self) -> int:
        """Returns the valid runs of all points that met the target."""
        return sum(point.num_reached for point in self.points)

    @property
    def num_runs(self) -> int:
        """Returns the runs of all points that ended."""
        return sum(point.num_runs for point in self.points)


def group_quality(group: Group, table: RunTable) -> GroupQuality | None:
    """Returns the quality of a group's runs; None if they measure speed, or no record holds a quality."""
    result = next((run.record.quality for run in group.runs if run.record and run.record.quality), None)
    if group.sample.plan.measure.until != "quality" or result is None:
        return None
    cells = _cells(group, table)
    rates = {run_id: table.rates[run_id] for run_id, row in table.figures.items() if row["group"] == group.id}
    unit = "error" if result.metric == "mae" else "fraction"
    base = cells[min(cells)] if len(cells) > 1 else None
    points = [_point(place, cells[place], base, table.keys, rates, unit) for place in sorted(cells)]
    wanted = group.sample.plan.workload.quality
    assert wanted is not None
    found = GroupQuality(
        metric=result.metric,
        metric_title=METRIC_TITLES[result.metric],
        unit=unit,
        higher_is_better=result.higher_is_better,
        target=result.target,
        limit=f"{wanted.max_epochs:g} epochs" if wanted.max_epochs else f"{wanted.max_samples:,} samples",
        predictor=result.predictor,
        predictor_value=result.predictor_value,
        headline=("", ""),
        points=tuple(points),
        curves=_curves(group),
    )
    return replace(found, headline=_headline(found))


def _headline(found: GroupQuality) -> tuple[str, str]:
    """Returns the number of the summary's card and what it means; a failure goes before every speed-up."""
    base, last = found.points[0], found.points[-1]
    if found.num_reached < found.num_runs:
        big = f"{found.num_reached} of {found.num_runs}"
        return big, f"runs met {found.goal}: no speed-up of the time to accuracy"
    place = place_text(last.ranks, last.nodes)
    if last.factors is None or len(found.points) == 1:
        return (DASH if last.time is None else value_text(last.time)), f"to {found.goal} at {place}"
    factor, before = last.factors.speedup, place_text(base.ranks, base.nodes)
    return times_value(factor), f"as soon at {found.goal} with {place} as with {before}; {basis_text(factor)}"


def _curves(group: Group) -> tuple[QualityCurve, ...]:
    names = [one.name for one in fields(QualityEvaluation)]
    return tuple(
        QualityCurve(
            run_id=run.plan.run_id,
            ranks=run.plan.layout.ranks,
            nodes=run.plan.layout.nodes,
            reached=run.record.quality.reached,
            evaluations=tuple(
                QualityEvaluation(**{name: getattr(one, name) for name in names})
                for one in run.record.quality.evaluations
            ),
        )
        for run in group.runs
        if run.record and run.record.quality
    )


@dataclass
class RunsAtPlace:
    """Runs of one place, by what became of them."""

    valid: list[Run] = field(default_factory=list)
    invalid: list[Run] = field(default_factory=list)
    lost: list[Run] = field(default_factory=list)

    @property
    def reached(self) -> list[Run]:
        return [run for run in self.valid if quality_of(run).reached]

    @property
    def num_runs(self) -> int:
        return len(self.valid) + len(self.invalid)

    @property
    def all_reached(self) -> bool:
        return len(self.reached) == self.num_runs > 0


def _cells(group: Group, table: RunTable) -> dict[tuple[int, int], RunsAtPlace]:
    """Runs by ranks and nodes, those without figures included: diverged runs must not vanish."""
    wanted = planned_id(group.sample)
    cells: dict[tuple[int, int], RunsAtPlace] = {}
    others = [item.run for item in table.without if item.state != "damaged" and planned_id(item.run) == wanted]
    for run in (*group.runs, *others):
        layout = run.plan.layout
        cell = cells.setdefault((layout.ranks, layout.nodes), RunsAtPlace())
        if run.state == "valid":
            # A valid run that says nothing of its quality is not one that reached it.
            (cell.valid if run.record and run.record.quality else cell.invalid).append(run)
        else:
            (cell.invalid if run.state == "invalid" else cell.lost).append(run)
    return {place: cell for place, cell in cells.items() if cell.num_runs}


def _point(
    place: tuple[int, int],
    cell: RunsAtPlace,
    base: RunsAtPlace | None,
    keys: Keys,
    rates: Mapping[str, float],
    unit: str,
) -> QualityPoint:
    """`base`: the baseline of several points; `unit`: of the metric."""
    results = {keys[run.plan.run_id]: quality_of(run) for run in cell.valid}
    reached = {keys[run.plan.run_id]: quality_of(run) for run in cell.reached}
    accounts = {key: account(result) for key, result in results.items()}
    plan = (*cell.valid, *cell.invalid)[0].plan
    values = {key: [e.value for e in result.evaluations if e.value is not None] for key, result in results.items()}

    others = {key: max(0.0, whole - training - evals) for key, (whole, training, evals) in accounts.items()}
    of_account = ({key: each[part] for key, each in accounts.items()} for part in range(3))
    whole_s, training_s, evaluation_s, other_s = (_mean(seconds, "s") for seconds in (*of_account, others))
    return QualityPoint(
        ranks=place[0],
        nodes=place[1],
        global_batch=plan.global_batch,
        num_runs=cell.num_runs,
        num_reached=len(reached),
        num_invalid=len(cell.invalid),
        num_lost=len(cell.lost),
        time=_typical({key: result.time_to_quality_s for key, result in reached.items()}, "s"),
        unstaged=_typical({keys[run.plan.run_id]: without_staging(run) for run in cell.reached}, "s"),
        resolution=_median({key: resolution(result) for key, result in reached.items()}, "s"),
        epochs=_typical({key: result.epochs_to_quality for key, result in reached.items()}, "epochs"),
        samples=_typical({key: result.samples_to_quality for key, result in reached.items()}, "samples"),
        best=_median(
            {k: (max if results[k].higher_is_better else min)(found) for k, found in values.items() if found}, unit
        ),
        final=_median({key: found[-1] for key, found in values.items() if found}, unit),
        whole=whole_s,
        training=training_s,
        evaluation=evaluation_s,
        other=other_s,
        factors=None if base is None else _factors(cell, base, keys, rates),
        run_ids=tuple(run.plan.run_id for run in cell.valid),
    )


def _factors(cell: RunsAtPlace, baseline: RunsAtPlace, keys: Keys, rates: Mapping[str, float]) -> Factors | None:
    if not (cell.all_reached and baseline.all_reached):
        return None
    if cell is baseline:
        one = by_definition(1.0, len(cell.valid))
        return Factors(speedup=one, throughput=one, samples=one, rest=one)
    own, other = _by_run(cell, keys, rates), _by_run(baseline, keys, rates)
    if own is None or other is None:
        return None
    return Factors(
        speedup=ratio_estimate(other["time"], own["time"]),
        throughput=ratio_estimate(own["rate"], other["rate"]),
        samples=ratio_estimate(other["samples"], own["samples"]),
        rest=ratio_estimate(other["rest"], own["rest"]),
    )


def _by_run(cell: RunsAtPlace, keys: Keys, rates: Mapping[str, float]) -> dict[str, dict[RunKey, float]] | None:
    """Time, throughput, samples, and time over samples/throughput, of each run; None if a record contradicts itself."""
    found: dict[str, dict[RunKey, float]] = {"time": {}, "rate": {}, "samples": {}, "rest": {}}
    for run in cell.valid:
        result, rate = quality_of(run), rates[run.plan.run_id]
        time, samples = result.time_to_quality_s, result.samples_to_quality
        if not (time and samples):
            return None
        for name, value in {"time": time, "rate": rate, "samples": samples, "rest": time * rate / samples}.items():
            found[name][keys[run.plan.run_id]] = value
    return found


# Large batches


@dataclass(frozen=True, kw_only=True)
class BatchPoint(QualityPoint):
    """One batch with one optimizer and rate, against the best rate of the smallest batch."""

    global_batch: int = field(metadata=column("Global batch", unit="samples", is_brief=True))
    optimizer: str = field(metadata=column("Optimizer"))
    learning_rate: float = field(metadata=column("Learning rate", text=lambda rate: f"{rate:.3g}", is_brief=True))
    num_diverged: int = field(metadata=column("Diverged", "diverged", is_brief=True))  # Runs with a loss not finite.
    is_best: bool = field(metadata=column(name="best"))  # All met the target, after fewest samples of all rates.
    ratio: Estimate | None = field(metadata=column("Samples, over the smallest", "samples_ratio", text=times_cell))
    """None unless all runs of both met the target."""
    adjusted_p: float | None = field(metadata=column())
    """Of the ratio, after Holm over all pairs of rates: these runs also chose the best of each batch."""
    expected: Estimate | None = field(metadata=column("By the noise scale", "expected_ratio", text=times_cell))


@dataclass(frozen=True, kw_only=True)
class LargeBatch:
    """Runs to one target that differ in the global batch, and in the optimizer and rate that belong to it."""

    id: str
    label: str
    critical: Estimate | None  # Samples; None where no run of this network has measured it.
    points: tuple[BatchPoint, ...]  # By batch and rate.


def large_batches(table: RunTable) -> tuple[LargeBatch, ...]:
    """All sets of two global batches or more."""
    table = without_resumed(table)
    ended = [*table.runs.values(), *(item.run for item in table.without if item.state == "invalid")]
    plain = (run for run in ended if run.plan.measure.until == "quality" and run.plan.series.variant == "plain")
    sets = alike((run for run in plain if run.record and run.record.quality), _without_batch)
    recipes = {name: dict(sorted(alike(runs, _recipe).items())) for name, runs in sets.items()}
    return tuple(_batches(name, sides, table) for name, sides in recipes.items() if len({one[0] for one in sides}) > 1)


def _without_batch(run: Run) -> str:
    optimizer = OptimizerSpec(name="sgd", learning_rate=1.0)
    train = {"batch_per_rank": 1, "global_batch": None, "gradient_accumulation": 1, "optimizer": optimizer}
    bare = with_train(run, train)
    series = bare.plan.series.model_copy(update={"scaling": "weak"})
    return planned_id(replace(bare, plan=bare.plan.model_copy(update={"series": series})))


def _recipe(run: Run) -> _Recipe:
    batch, layout, optimizer = run.plan.global_batch, run.plan.layout, run.plan.workload.train.optimizer
    return batch, optimizer.name, layout.ranks, layout.nodes, optimizer.peak(batch)


def _batches(name: str, sides: Mapping[_Recipe, Sequence[Run]], table: RunTable) -> LargeBatch:
    runs = [run for members in sides.values() for run in members]
    differ = ("train.batch_per_rank", "train.global_batch", "train.gradient_accumulation", "train.optimizer.")
    apart = [key for run in runs for key in run.plan.series.axes if key.startswith(differ)]
    valid = [run for run in runs if run.plan.run_id in table.runs]
    keys = {run.plan.run_id: pair_key(run, table.sessions[run.plan.run_id], apart) for run in valid}
    rates = table.rates
    cells = {
        recipe: RunsAtPlace([run for run in members if run in valid], [run for run in members if run not in valid])
        for recipe, members in sides.items()
    }
    by_run = {recipe: _by_run(cell, keys, rates) for recipe, cell in cells.items() if cell.all_reached}
    logs = {one: {k: math.log(n) for k, n in found["samples"].items()} for one, found in by_run.items() if found}
    tried = list(alike(logs, lambda recipe: recipe[:-1]).values())
    best = [min(found, key=lambda recipe: fmean(logs[recipe].values())) for found in tried]
    pairs = [(own, base) for found in tried[1:] for own in found for base in tried[0]]
    adjusted = dict(zip(pairs, holm([difference_p(logs[own], logs[base]) for own, base in pairs]), strict=True))
    plan, unit = runs[0].plan, "error" if quality_of(runs[0]).metric == "mae" else "fraction"
    share = model_noise_share(plan.workload, table)
    points = []
    for recipe, cell in cells.items():
        base = best[0] if recipe in logs and recipe != best[0] else None
        point = _point(recipe[2:4], cell, cells[base] if base else None, keys, rates, unit)
        records = [run.record for run in cell.valid + cell.invalid if run.record]
        points.append(
            BatchPoint(
                **vars(point),
                optimizer=recipe[1],
                learning_rate=recipe[-1],
                num_diverged=sum(not all(rank.losses_finite for rank in record.ranks) for record in records),
                is_best=recipe in best,
                ratio=point.factors.samples.inverted("ratio") if point.factors else None,
                adjusted_p=adjusted.get((recipe, base)) if base else None,
                expected=samples_over(share, recipe[0], base[0]) if share and base else None,
            )
        )
    critical = share.inverted("samples") if share and (share.low is None or share.low > 0) else None
    label = f"{plan.workload.name}, {plan.workload.preset} preset, {plan.engine_title}"
    return LargeBatch(id=name, label=label, critical=critical, points=tuple(points))

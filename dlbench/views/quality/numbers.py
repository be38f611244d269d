"""Runs trained to a quality: how many reached it, how soon, and whether steps or their number made the difference. With
T the time to quality, N the samples trained until then and Thr the measured throughput, the speed-up over the baseline
(0) is T0/T = Thr/Thr0 x N0/N x rest, rest = (T0 Thr0 / N0) / (T Thr / N): faster steps, fewer samples (statistical
efficiency; Keskar et al. 2017, Shallue et al. 2019), and evaluation, checkpoints, warm-up steps and waits. Ratios of
geometric means keep the product exact. There are no factors unless all runs on both sides met the target: leaving runs
out would favour the side that fails more often.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import itemgetter
from statistics import fmean

from dlbench.analysis.comparability import planned_id
from dlbench.analysis.scaling import Group, group_by, pair_key, with_train
from dlbench.analysis.table import RunTable, without_resumed
from dlbench.perfmodels.training_time import TimeVerdict, consistency
from dlbench.records import record
from dlbench.records.record import QualityResult, meets
from dlbench.records.scan import Run
from dlbench.report.table import column, times_cell
from dlbench.report.wording import DASH, basis_text, number_text, place_text, reached_text, times_value, value_text
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
from dlbench.views.model import AtPlace
from dlbench.views.noise import model_noise_share, samples_over

METRIC_TITLES = {"top1": "top-1 accuracy", "masked_lm_accuracy": "masked-LM accuracy", "mae": "mean absolute error"}
"""Titles of the metrics of `dlbench.records.record.QualityResult`."""
MOST_WARMUP = 10.0  # Measured steps that a warm-up step may take without making a time a contradiction.

Keys = Mapping[str, RunKey]

_mean = partial(of_known, mean_estimate)
_median = partial(of_known, median_estimate)
_typical = partial(of_known, typical_estimate)  # For figures next to ratios of geometric means.
_Recipe = tuple[int, str, int, int, float]  # Global batch, optimizer, ranks, nodes and learning rate.


def quality_of(run: Run) -> QualityResult:
    """Returns the quality in the record of a run to a quality."""
    assert run.record is not None
    assert run.record.quality is not None
    return run.record.quality


def without_staging(run: Run) -> float | None:
    """Returns the seconds to quality without staging; None if the target was not met, or nothing was staged."""
    assert run.record is not None
    time_s, staging = quality_of(run).time_to_quality_s, run.record.staging
    if time_s is None or staging is None:
        return None
    return max(0.0, time_s - staging.seconds)


def until_target(result: QualityResult) -> Sequence[record.Evaluation]:
    """Returns the evaluations up to the first that met the target; all if none did."""
    for index, evaluation in enumerate(result.evaluations):
        if meets_target(result, evaluation):
            return result.evaluations[: index + 1]
    return result.evaluations


def meets_target(result: QualityResult, evaluation: record.Evaluation) -> bool:
    """Returns whether an evaluation met the target of its run."""
    return meets(evaluation.value, result.target, higher_is_better=result.higher_is_better)


def resolution(result: QualityResult) -> float | None:
    """Returns the seconds from the evaluation before (or the start) to the one that met the target; None without it."""
    evaluations = until_target(result)
    if not (evaluations and meets_target(result, evaluations[-1])):
        return None
    if len(evaluations) == 1:
        return evaluations[-1].wall_s
    return evaluations[-1].wall_s - evaluations[-2].wall_s


def account(result: QualityResult) -> tuple[float, float, float]:
    """Returns the seconds in all, in training steps and in evaluations, until the target or the end."""
    evaluations = until_target(result)
    if not evaluations:
        return 0.0, 0.0, 0.0
    last = evaluations[-1]
    return last.wall_s, last.train_s, sum(evaluation.eval_s for evaluation in evaluations)


def fit(run: Run, throughput: float) -> TimeVerdict | None:
    """Returns whether throughput (samples/s), epochs and training time of a run can all be true; None if one is
    unknown. Time that warm-up steps may have taken is no contradiction if later steps fit.
    """
    assert run.record is not None
    evaluations, epoch_samples = quality_of(run).evaluations, run.epoch_samples
    if not evaluations or not (epoch_samples and evaluations[-1].epoch and evaluations[-1].train_s):
        return None
    last = evaluations[-1]

    def since(step: int) -> TimeVerdict | None:
        """Returns the verdict on the training from the first evaluation at that step or later to the last one."""
        start_samples = step * run.plan.global_batch
        start = next((evaluation for evaluation in evaluations if evaluation.samples >= start_samples), last)
        if last.epoch <= start.epoch or last.train_s <= start.train_s:
            return None
        return consistency(throughput, epoch_samples, last.epoch - start.epoch, last.train_s - start.train_s)

    first, warmup = run.record.first_step, run.plan.measure.warmup_steps
    if is_resumed(run):
        # Steps before the checkpoint ran at another rate: only training between two evaluations of this run counts.
        verdict = since(first)
    else:
        verdict = consistency(throughput, epoch_samples, last.epoch, last.train_s)
    if verdict is None or verdict.status != "unexplained":
        return verdict
    later = since(first + warmup)
    is_slow = verdict.stated_s - verdict.expected_s > MOST_WARMUP * warmup * run.plan.global_batch / throughput
    if is_slow or (later is not None and later.status != "fits"):
        return verdict
    return replace(verdict, status="fits")


def is_resumed(run: Run) -> bool:
    """Returns whether the training began from a checkpoint."""
    return run.record is not None and bool(run.record.first_step)


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Factors of the speed-up of the time to quality over the baseline: the other three multiply to it exactly."""

    speedup: Estimate = field(metadata=column())
    throughput: Estimate = field(metadata=column(name="throughput_factor"))  # Above 1: faster.
    samples: Estimate = field(metadata=column(name="samples_factor"))  # Below 1: more samples were needed.
    rest: Estimate = field(metadata=column(name="rest_factor"))  # Evaluation, checkpoints, waits; above 1: less time.


@dataclass(frozen=True, kw_only=True)
class QualityPoint(AtPlace):
    """All comparable runs to one quality with one rank and node count. Unless a field says otherwise, times, samples
    and epochs to accuracy are geometric means over the runs that reached the target, the other figures medians.
    """

    global_batch: int = field(metadata=column("Global batch", unit="samples"))
    num_runs: int = field(metadata=column("Runs", "runs"))  # That ended, with failed checks too.
    num_reached: int = field(metadata=column("Reached", "reached", is_brief=True))  # Valid runs that met the target.
    num_invalid: int  # Runs that failed a sanity check, e.g. by a loss that is not finite; the target is missed.
    num_lost: int  # Further runs that were killed or failed; whether they would have met the target is unknown.
    time: Estimate | None = field(metadata=column("Time to accuracy", "time_to_quality_s", is_brief=True))
    unstaged: Estimate | None = field(metadata=column("Without staging", "unstaged_s", is_brief=True))
    resolution: Estimate | None = field(metadata=column("Of it, last interval", "last_interval_s"))
    """Seconds between the evaluation that met the target and the one before (or the start), by which the time to
    quality may be too long."""
    epochs: Estimate | None = field(metadata=column("Epochs", "epochs_to_quality", is_brief=True))
    samples: Estimate | None = field(metadata=column("Samples", "samples_to_quality"))
    best: Estimate | None = field(metadata=column("Best", is_brief=True))  # Median over the runs' best values.
    final: Estimate | None = field(metadata=column("Final"))  # Last value of each run, median over runs with figures.
    whole: Estimate | None = field(metadata=column(name="mean_s"))
    """Seconds to the target, or to the end of a run that did not meet it; mean over runs with figures, so that the
    following three sum to it."""
    training: Estimate | None = field(metadata=column(name="training_s"))
    evaluation: Estimate | None = field(metadata=column(name="evaluation_s"))
    other: Estimate | None = field(metadata=column(name="other_s"))  # Checkpoints and waits.
    factors: Factors | None  # None if a run on either side missed the target, and for a group of one point.
    run_ids: tuple[str, ...]  # Runs with figures.

    @property
    def all_reached(self) -> bool:
        return self.num_reached == self.num_runs > 0

    @property
    def reached_text(self) -> str:
        return reached_text(self.num_reached, self.num_runs)


@dataclass(frozen=True, kw_only=True)
class QualityEvaluation:
    """An evaluation of the quality; times in seconds since the start of training."""

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
    limit: str  # Training after which a run gives up, in words.
    predictor: str  # A predictor without skill, in words.
    predictor_value: float  # The metric of that predictor.
    headline: tuple[str, str]  # The card's number and its meaning.
    points: tuple[QualityPoint, ...]
    curves: tuple[QualityCurve, ...]

    @property
    def goal(self) -> str:
        """The target in words, e.g. ``mean absolute error of at most 0.3000``."""
        bound = "at least" if self.higher_is_better else "at most"
        return f"{self.metric_title} of {bound} {number_text(self.target, self.unit)}"

    @property
    def num_reached(self) -> int:
        return sum(point.num_reached for point in self.points)

    @property
    def num_runs(self) -> int:
        return sum(point.num_runs for point in self.points)


def group_quality(group: Group, table: RunTable) -> GroupQuality | None:
    """Returns the quality of a group's runs; None if they measure speed, or no record holds a quality."""
    result = next((run.record.quality for run in group.runs if run.record and run.record.quality), None)
    if group.sample.plan.measure.until != "quality" or result is None:
        return None
    cells = _cells(group, table)
    rates = {run_id: table.rates[run_id] for run_id, row in table.figures.items() if row["group"] == group.id}
    unit = _unit(result)
    base = cells[min(cells)] if len(cells) > 1 else None
    points = [_point(place, cells[place], base, table.keys, rates, unit) for place in sorted(cells)]
    target = group.sample.plan.workload.quality
    assert target is not None
    limit = f"{target.max_epochs:g} epochs" if target.max_epochs else f"{target.max_samples:,} samples"
    quality = GroupQuality(
        metric=result.metric,
        metric_title=METRIC_TITLES[result.metric],
        unit=unit,
        higher_is_better=result.higher_is_better,
        target=result.target,
        limit=limit,
        predictor=result.predictor,
        predictor_value=result.predictor_value,
        headline=("", ""),
        points=tuple(points),
        curves=tuple(_curves(group)),
    )
    return replace(quality, headline=_headline(quality))


def _unit(result: QualityResult) -> str:
    return "error" if result.metric == "mae" else "fraction"


def _headline(quality: GroupQuality) -> tuple[str, str]:
    base, last = quality.points[0], quality.points[-1]
    if quality.num_reached < quality.num_runs:
        big = f"{quality.num_reached} of {quality.num_runs}"
        return big, f"runs met {quality.goal}: no speed-up of the time to accuracy"
    place = place_text(last.ranks, last.nodes)
    if last.factors is None or len(quality.points) == 1:
        big = value_text(last.time) if last.time else DASH
        return big, f"to {quality.goal} at {place}"
    factor, before = last.factors.speedup, place_text(base.ranks, base.nodes)
    return times_value(factor), f"as soon at {quality.goal} with {place} as with {before}; {basis_text(factor)}"


def _curves(group: Group) -> Iterator[QualityCurve]:
    names = {evaluation_field.name for evaluation_field in fields(QualityEvaluation)}
    for run in group.runs:
        if not run.record or not run.record.quality:
            continue
        evaluations = (evaluation.model_dump(include=names) for evaluation in run.record.quality.evaluations)
        yield QualityCurve(
            run_id=run.plan.run_id,
            ranks=run.plan.layout.ranks,
            nodes=run.plan.layout.nodes,
            reached=run.record.quality.reached,
            evaluations=tuple(QualityEvaluation(**values) for values in evaluations),
        )


@dataclass
class RunsAtPlace:
    """Runs at one rank and node count, by how they ended."""

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
    """Returns runs by ranks and nodes, also those without figures: diverged runs must not vanish."""
    group_id = planned_id(group.sample)
    cells: dict[tuple[int, int], RunsAtPlace] = {}
    others = [item.run for item in table.without if item.state != "damaged" and planned_id(item.run) == group_id]
    for run in (*group.runs, *others):
        layout = run.plan.layout
        cell = cells.setdefault((layout.ranks, layout.nodes), RunsAtPlace())
        if run.state == "valid" and run.record and run.record.quality:
            cell.valid.append(run)
        elif run.state in ("valid", "invalid"):
            # A valid run that records no quality is not one that reached it.
            cell.invalid.append(run)
        else:
            cell.lost.append(run)
    return {place: cell for place, cell in cells.items() if cell.num_runs}


def _point(
    place: tuple[int, int],
    cell: RunsAtPlace,
    base: RunsAtPlace | None,
    keys: Keys,
    rates: Mapping[str, float],
    unit: str,
) -> QualityPoint:
    results = {keys[run.plan.run_id]: quality_of(run) for run in cell.valid}
    reached = {keys[run.plan.run_id]: quality_of(run) for run in cell.reached}
    seconds: dict[str, dict[RunKey, float]] = {name: {} for name in ("whole", "training", "evaluation", "other")}
    best: dict[RunKey, float] = {}
    final: dict[RunKey, float] = {}
    for key, result in results.items():
        whole_s, training_s, evaluation_s = account(result)
        other_s = max(0.0, whole_s - training_s - evaluation_s)
        for name, part_s in zip(seconds, (whole_s, training_s, evaluation_s, other_s), strict=True):
            seconds[name][key] = part_s
        values = [evaluation.value for evaluation in result.evaluations if evaluation.value is not None]
        if values:
            best[key] = max(values) if result.higher_is_better else min(values)
            final[key] = values[-1]
    plan = (*cell.valid, *cell.invalid)[0].plan
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
        best=_median(best, unit),
        final=_median(final, unit),
        whole=_mean(seconds["whole"], "s"),
        training=_mean(seconds["training"], "s"),
        evaluation=_mean(seconds["evaluation"], "s"),
        other=_mean(seconds["other"], "s"),
        factors=_factors(cell, base, keys, rates),
        run_ids=tuple(run.plan.run_id for run in cell.valid),
    )


def _factors(cell: RunsAtPlace, baseline: RunsAtPlace | None, keys: Keys, rates: Mapping[str, float]) -> Factors | None:
    if baseline is None or not (cell.all_reached and baseline.all_reached):
        return None
    if cell is baseline:
        unity = by_definition(1.0, len(cell.valid))
        return Factors(speedup=unity, throughput=unity, samples=unity, rest=unity)
    figures, base_figures = _by_run(cell, keys, rates), _by_run(baseline, keys, rates)
    if figures is None or base_figures is None:
        return None
    return Factors(
        speedup=ratio_estimate(base_figures["time"], figures["time"]),
        throughput=ratio_estimate(figures["rate"], base_figures["rate"]),
        samples=ratio_estimate(base_figures["samples"], figures["samples"]),
        rest=ratio_estimate(base_figures["rest"], figures["rest"]),
    )


def _by_run(cell: RunsAtPlace, keys: Keys, rates: Mapping[str, float]) -> dict[str, dict[RunKey, float]] | None:
    """Returns time, throughput, samples, and time over samples/throughput by run; None if a run lacks one."""
    if not cell.all_reached:
        return None
    figures: dict[str, dict[RunKey, float]] = {"time": {}, "rate": {}, "samples": {}, "rest": {}}
    for run in cell.valid:
        key, result, rate = keys[run.plan.run_id], quality_of(run), rates[run.plan.run_id]
        time_s, samples = result.time_to_quality_s, result.samples_to_quality
        if not (time_s and samples):
            return None
        figures["time"][key] = time_s
        figures["rate"][key] = rate
        figures["samples"][key] = samples
        figures["rest"][key] = time_s * rate / samples
    return figures


@dataclass(frozen=True, kw_only=True)
class BatchPoint(QualityPoint):
    """A batch with one optimizer and rate, against the best rate of the smallest batch."""

    global_batch: int = field(metadata=column("Global batch", unit="samples", is_brief=True))
    optimizer: str = field(metadata=column("Optimizer"))
    learning_rate: float = field(metadata=column("Learning rate", text="{:.3g}".format, is_brief=True))
    num_diverged: int = field(metadata=column("Diverged", "diverged", is_brief=True))  # Runs with a loss not finite.
    is_best: bool = field(metadata=column(name="best"))  # Whether all met the target, with fewest samples of all rates.
    ratio: Estimate | None = field(metadata=column("Samples, over the smallest", "samples_ratio", text=times_cell))
    """None unless all runs of both met the target."""
    adjusted_p: float | None = field(metadata=column())  # After Holm over all pairs of rates.
    expected: Estimate | None = field(metadata=column("By the noise scale", "expected_ratio", text=times_cell))


@dataclass(frozen=True, kw_only=True)
class LargeBatch:
    """Runs to one target that differ in the global batch and its optimizer and rate."""

    id: str
    label: str
    critical: Estimate | None  # Samples; None if no run of this network has measured it.
    points: tuple[BatchPoint, ...]  # By batch and rate.


def large_batches(table: RunTable) -> tuple[LargeBatch, ...]:
    """Returns all sets of two global batches or more."""
    table = without_resumed(table)
    runs = []
    for run in (*table.runs.values(), *(item.run for item in table.without if item.state == "invalid")):
        is_to_quality = run.plan.measure.until == "quality" and run.plan.series.variant == "plain"
        if is_to_quality and run.record and run.record.quality:
            runs.append(run)
    large = []
    for name, members in group_by(runs, _without_batch).items():
        by_recipe = dict(sorted(group_by(members, _recipe).items()))
        if len({batch for batch, *_ in by_recipe}) > 1:
            large.append(_batches(name, by_recipe, table))
    return tuple(large)


def _without_batch(run: Run) -> str:
    optimizer = OptimizerSpec(name="sgd", learning_rate=1.0)
    train = {"batch_per_rank": 1, "global_batch": None, "gradient_accumulation": 1, "optimizer": optimizer}
    bare = with_train(run, train)
    series = bare.plan.series.model_copy(update={"scaling": "weak"})
    return planned_id(replace(bare, plan=bare.plan.model_copy(update={"series": series})))


def _recipe(run: Run) -> _Recipe:
    batch, layout, optimizer = run.plan.global_batch, run.plan.layout, run.plan.workload.train.optimizer
    return batch, optimizer.name, layout.ranks, layout.nodes, optimizer.peak(batch)


def _batches(name: str, by_recipe: Mapping[_Recipe, Sequence[Run]], table: RunTable) -> LargeBatch:
    runs = list(itertools.chain.from_iterable(by_recipe.values()))
    recipe_keys = ("train.batch_per_rank", "train.global_batch", "train.gradient_accumulation", "train.optimizer.")
    swept = set().union(*(run.plan.series.axes for run in runs))
    different = [key for key in swept if key.startswith(recipe_keys)]
    keys = {}
    cells = {}
    logs = {}  # Logarithms of the samples to quality, of recipes whose runs all met the target.
    for recipe, members in by_recipe.items():
        cell = cells[recipe] = RunsAtPlace()
        for run in members:
            run_id = run.plan.run_id
            if run_id in table.runs:
                cell.valid.append(run)
                keys[run_id] = pair_key(run, table.sessions[run_id], different)
            else:
                cell.invalid.append(run)
        figures = _by_run(cell, keys, table.rates)
        if figures:
            logs[recipe] = {key: math.log(samples) for key, samples in figures["samples"].items()}
    by_batch = list(group_by(logs, itemgetter(0, 1, 2, 3)).values())
    best = [min(recipes, key=lambda recipe: fmean(logs[recipe].values())) for recipes in by_batch]
    larger = list(itertools.chain.from_iterable(by_batch[1:]))
    pairs = list(itertools.product(larger, *by_batch[:1]))
    p_values = [difference_p(logs[recipe], logs[base]) for recipe, base in pairs]
    adjusted = dict(zip(pairs, holm(p_values), strict=True))
    plan, unit = runs[0].plan, _unit(quality_of(runs[0]))
    share = model_noise_share(plan.workload, table)
    points = []
    for recipe, cell in cells.items():
        base_cell = adjusted_p = expected = ratio = None
        if recipe in logs and recipe != best[0]:
            base_cell = cells[best[0]]
            adjusted_p = adjusted.get((recipe, best[0]))
            if share:
                expected = samples_over(share, recipe[0], best[0][0])
        point = _point(recipe[2:4], cell, base_cell, keys, table.rates, unit)
        if point.factors:
            ratio = point.factors.samples.inverted("ratio")
        num_diverged = 0
        for run in cell.valid + cell.invalid:
            if run.record and not all(rank.losses_finite for rank in run.record.ranks):
                num_diverged += 1
        batch_point = BatchPoint(
            **vars(point),
            optimizer=recipe[1],
            learning_rate=recipe[-1],
            num_diverged=num_diverged,
            is_best=recipe in best,
            ratio=ratio,
            adjusted_p=adjusted_p,
            expected=expected,
        )
        points.append(batch_point)
    critical = None
    if share and (share.low is None or share.low > 0):
        critical = share.inverted("samples")
    label = f"{plan.workload.name}, {plan.workload.preset} preset, {plan.engine_title}"
    return LargeBatch(id=name, label=label, critical=critical, points=tuple(points))

"""What runs say of quality, noise scale and the use of the hardware becomes part of the `Report`."""

from __future__ import annotations

from collections.abc import Sequence

from dlbench.reading.run_table import RunTable
from dlbench.reading.scaling import Group
from dlbench.report.wording import METRIC_TITLES, clean, percent
from dlbench.stats.figure import figure_of, optional_figure_of
from dlbench.units import format_number
from dlbench.views.noise import numbers as noise_analysis
from dlbench.views.noise.numbers import doubled_batch
from dlbench.views.quality import model
from dlbench.views.quality import numbers as quality_analysis
from dlbench.views.quality.outcome import quality_of
from dlbench.views.quality.verdict import headline
from dlbench.views.utilisation import numbers as utilisation_analysis
from dlbench.views.utilisation.numbers import Peak, Recipe

_TERA = 1e12


def quality(group: Group, table: RunTable) -> model.Quality | None:
    """Training to a quality; None for runs of speed."""
    found = quality_analysis.group_quality(group, table)
    if found is None:
        return None
    unit = "error" if found.metric == "mae" else "fraction"
    points = tuple(_quality_point(point, unit) for point in found.points)
    return model.Quality(
        metric=found.metric,
        metric_title=METRIC_TITLES[found.metric],
        unit=unit,
        higher_is_better=found.higher_is_better,
        target=found.target,
        limit=_limit(group),
        predictor=clean(found.predictor),
        predictor_value=found.predictor_value,
        headline=headline(points, found.target, METRIC_TITLES[found.metric], unit),
        points=points,
        batches=tuple(_batch(batch) for batch in found.batches),
        curves=_curves(group),
    )


def _limit(group: Group) -> str:
    wanted = group.sample.plan.workload.quality
    assert wanted is not None
    return f"{wanted.max_epochs:g} epochs" if wanted.max_epochs else f"{wanted.max_samples:,} samples"


def _quality_point(point: quality_analysis.QualityPoint, unit: str) -> model.QualityPoint:
    found = point.factors
    factors = None
    if found is not None:
        factors = model.Factors(
            speedup=figure_of(found.speedup, "ratio"),
            throughput=figure_of(found.throughput, "ratio"),
            samples=figure_of(found.samples, "ratio"),
            rest=figure_of(found.rest, "ratio"),
        )
    return model.QualityPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        global_batch=point.global_batch,
        num_runs=point.num_runs,
        num_reached=point.num_reached,
        num_invalid=point.num_invalid,
        num_lost=point.num_lost,
        time=optional_figure_of(point.time_s, "s"),
        resolution=optional_figure_of(point.resolution_s, "s"),
        epochs=optional_figure_of(point.epochs, "epochs"),
        samples=optional_figure_of(point.samples, "samples"),
        best=optional_figure_of(point.best, unit),
        final=optional_figure_of(point.final, unit),
        trained_epochs=optional_figure_of(point.trained_epochs, "epochs"),
        trained=optional_figure_of(point.trained_s, "s"),
        whole=optional_figure_of(point.whole_s, "s"),
        training=optional_figure_of(point.training_s, "s"),
        evaluation=optional_figure_of(point.evaluation_s, "s"),
        other=optional_figure_of(point.other_s, "s"),
        factors=factors,
        run_ids=point.run_ids,
    )


def _batch(batch: quality_analysis.BatchPoint) -> model.BatchPoint:
    return model.BatchPoint(
        global_batch=batch.global_batch,
        num_runs=batch.num_runs,
        num_reached=batch.num_reached,
        epochs=optional_figure_of(batch.epochs, "epochs"),
        samples=optional_figure_of(batch.samples, "samples"),
        against_smallest=batch.against_smallest,
    )


def _curves(group: Group) -> tuple[model.Curve, ...]:
    return tuple(
        model.Curve(
            run_id=run.plan.run_id,
            ranks=run.plan.layout.ranks,
            nodes=run.plan.layout.nodes,
            reached=quality_of(run).reached,
            evaluations=tuple(
                model.Evaluation(
                    samples=e.samples,
                    epoch=e.epoch,
                    wall_s=e.wall_s,
                    train_s=e.train_s,
                    eval_s=e.eval_s,
                    value=e.value,
                    loss=e.loss,
                )
                for e in quality_of(run).evaluations
            ),
        )
        for run in group.runs
        if run.record and run.record.quality
    )


def noise(group: Group) -> tuple[model.NoisePoint, ...]:
    """The gradient noise scale, where it was asked for."""
    return tuple(
        model.NoisePoint(
            ranks=point.ranks,
            nodes=point.nodes,
            global_batch=point.global_batch,
            noise_scale=optional_figure_of(point.noise_scale, "samples"),
            share=point.share,
            advice=_advice(point),
            basis=f"batches of {point.small_batch:,} and {point.large_batch:,} samples, {point.steps:,} steps a run",
        )
        for point in noise_analysis.noise_points(group)
    )


def _advice(point: noise_analysis.NoisePoint) -> str:
    if point.share is None:
        return (
            f"unknown: no estimate of the squared gradient or of its variance is positive in {point.num_runs} "
            f"{'run' if point.num_runs == 1 else 'runs'}; more steps, or batches further apart, may tell"
        )
    steps, samples = doubled_batch(point.share)
    word = {
        "pays": "larger batches still pay",
        "balanced": "a larger batch trades samples for steps about evenly",
        "wasteful": "larger batches mostly cost samples",
    }[point.advice]
    unknown = f"; {point.num_unknown} of {point.num_runs} runs found none" if point.num_unknown else ""
    return (
        f"the global batch is {point.share:.2g} of the noise scale: {word} (twice the batch: "
        f"{percent(1 - steps, 0)} fewer steps, {percent(samples - 1, 0)} more samples to the same quality){unknown}"
    )


def utilisation(group: Group) -> model.Utilisation | None:
    """MFU and time to train of every point; None where a record tells neither FLOPs nor the length of a training."""
    flops, amount = utilisation_analysis.training_flops(group), utilisation_analysis.recipe(group)
    if flops is None and amount is None:
        return None
    unit = clean(group.sample.plan.workload.sample_unit, 40)
    points: list[model.UtilisationPoint] = []
    peaks: list[str] = []
    for point in group.points:
        use = utilisation_analysis.utilisation(group, point)
        peak = use.peak if use else None
        if peak is not None:
            peaks.append(_peak_text(peak, group))
        time = utilisation_analysis.training_time(point, amount) if amount else None
        points.append(
            model.UtilisationPoint(
                ranks=point.ranks,
                nodes=point.nodes,
                throughput=figure_of(point.throughput, f"{unit}/s"),
                achieved=figure_of(use.achieved_per_rank.scaled(1 / _TERA), "TFLOP/s/rank") if use else None,
                peak_tflops=peak.flops_per_s / _TERA if peak else None,
                mfu=optional_figure_of(use.mfu, "fraction") if use else None,
                training_time=optional_figure_of(time, "s"),
            )
        )
    return model.Utilisation(
        training_flops_per_sample=flops,
        peak="; ".join(dict.fromkeys(peaks)) or (_no_peak(group) if flops else ""),
        recipe=_recipe_text(group, amount, unit) if amount else "",
        points=tuple(points),
    )


def _peak_text(peak: Peak, group: Group) -> str:
    precision = group.sample.plan.workload.train.precision
    one = f"{format_number(peak.unit_flops_per_s / _TERA)} TFLOP/s a {peak.unit} at {precision}"
    many = "" if peak.per_rank == 1 else f", {peak.per_rank:.3g} {peak.unit}s a rank"
    how = "" if peak.is_declared else ", found by the GPU's name; node.peak_tflops of the system overrides it"
    return f"{one}{many} ({clean(peak.source)}{how})"


def _no_peak(group: Group) -> str:
    plan = group.sample.plan
    unit = "GPU" if plan.system.node.gpus else "core"
    return (
        f"not known: declare node.peak_tflops ({{{plan.workload.train.precision}: TFLOP/s of one {unit}}}) and "
        f"node.peak_source in the YAML of the system ({plan.system.name}) to get the MFU"
    )


def _recipe_text(group: Group, amount: Recipe, unit: str) -> str:
    plan = group.sample.plan
    if amount.epochs is None:
        much = f"{amount.samples:,.0f} {unit} ({amount.key})"
    else:
        much = f"{amount.epochs:g} epochs ({amount.key}) of {amount.epoch_samples:,} {unit}"
    caveats = ["An estimate at this rate: steps only, without start, evaluation and checkpoints, and no claim that it"]
    caveats[0] += " converges."
    if amount.is_limit:
        caveats.append("It is the most that would be trained, not the length of a recipe.")
    if plan.workload.preset == "ci":
        caveats.append("The ci preset is a miniature: its time says nothing about the published workload.")
    if plan.workload.data.is_synthetic:
        caveats.append("The rate is that of synthetic data: reading and decoding come on top.")
    return f"{much}. {' '.join(caveats)}"


def layer_tables(groups: Sequence[Group]) -> tuple[model.LayerTable, ...]:
    """The layers of each network once, however many groups train it."""
    found: dict[tuple[model.Layer, ...], model.LayerTable] = {}
    for group in groups:
        layers = tuple(
            model.Layer(name=clean(layer.name, 200), kind=clean(layer.kind, 80), macs=layer.macs)
            for layer in utilisation_analysis.layers(group)
        )
        record = group.sample.record
        if not layers or record is None or layers in found:
            continue
        workload = group.sample.plan.workload
        found[layers] = model.LayerTable(
            title=f"{workload.name}, {workload.preset} preset",
            num_parameters=record.num_parameters,
            training_flops_per_sample=utilisation_analysis.training_flops(group),
            layers=layers,
        )
    return tuple(found.values())

"""What share of the hardware's peak a scaling point turns into the model's arithmetic, and how long a training takes.

MFU = FLOPs of training per sample x samples per second / (ranks x peak of one rank); see `dlbench.costs.utilisation`.
The peak is the system's own declaration (`node.peak_tflops`), else a data sheet's, found by the GPU's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dlbench.costs.training_time import time_to_train, training_samples
from dlbench.costs.utilisation import TERA, datasheet_peak, model_flops_utilisation, why_no_peak
from dlbench.reading.scaling import Group, Point
from dlbench.records.scan import Run
from dlbench.stats.estimates import Estimate
from dlbench.units import format_number
from dlbench.views.utilisation.devices import gpu_names, gpus_per_rank
from dlbench.views.utilisation.published import PublishedRate, rates_beside


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The peak of one rank."""

    flops_per_s: float
    """Floating-point operations per second: of its GPU, or of its cores together."""
    unit_flops_per_s: float
    """Of one GPU or one core, as it was declared."""
    per_rank: float
    """GPUs or cores per rank; below 1 where ranks share a GPU."""
    unit: Literal["GPU", "core"]
    source: str
    is_declared: bool
    """From `node.peak_tflops`; otherwise from a data sheet, by the GPU's name."""
    memory_bytes_per_s: float | None = None
    """Of its memory, as the data sheet has it; None where that is not known."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How much a full training is, by the plan."""

    epochs: float | None
    """None where the plan counts samples."""
    epoch_samples: int | None
    samples: float
    """Samples of the whole training, all ranks together."""
    key: str
    """Where the amount is from: a key of the plan."""
    is_limit: bool
    """Whether it is the most that would be trained, and not the length of the recipe."""


@dataclass(frozen=True, kw_only=True)
class UtilisationPoint:
    """Arithmetic and time to train at one rank count."""

    ranks: int
    nodes: int
    throughput: Estimate
    achieved: Estimate | None
    """Model FLOPs per second and rank, `TFLOP/s/rank`; None where a sample's FLOPs are not known."""
    peak_tflops: float | None
    """Of one rank."""
    mfu: Estimate | None
    """Model FLOPs utilisation (fraction); None without a peak."""
    training_time: Estimate | None
    """An estimate: samples of the recipe over throughput."""


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """Use of the hardware, and what a full training would take at the measured rate."""

    training_flops_per_sample: int | None
    peak: str
    """The peak with its source, or how to declare it."""
    recipe: str
    """The amount of training behind `training_time`, its source and caveats; empty if there is none."""
    recipe_title: str
    """What `training_time` is, in a few words; empty if there is none."""
    points: tuple[UtilisationPoint, ...]
    padding: str = ""
    """What is odd about FLOPs of samples whose padding was left out, in a clause; empty where none was."""
    published: tuple[PublishedRate, ...] = ()
    """Published rates of the same network in the same precision on as many of the same cards."""


def utilisation(group: Group) -> Utilisation | None:
    """MFU and time to train of every point; None where neither FLOPs nor the training are known."""
    flops, amount = training_flops(group), recipe(group)
    if flops is None and amount is None:
        return None
    unit = group.sample.plan.workload.sample_unit
    points: list[UtilisationPoint] = []
    peaks: list[str] = []
    amounts: list[Recipe] = []
    for point in group.points:
        run = next(run for run in group.runs if run.plan.run_id in point.run_ids)
        peak = peak_of(run) if flops else None
        here = recipe_of(run)
        amounts += [here] if here is not None else []
        factor = model_flops_utilisation(flops, 1.0, peak.flops_per_s, point.ranks) if flops and peak else None
        if peak is not None:
            peaks.append(_peak_text(peak, group))
        achieved = point.throughput.scaled(flops / point.ranks).scaled(1 / TERA, "TFLOP/s/rank") if flops else None
        points.append(
            UtilisationPoint(
                ranks=point.ranks,
                nodes=point.nodes,
                throughput=point.throughput,
                achieved=achieved,
                peak_tflops=peak.flops_per_s / TERA if peak else None,
                mfu=point.throughput.scaled(factor, "fraction") if factor else None,
                training_time=training_time(point, here) if here else None,
            )
        )
    return Utilisation(
        training_flops_per_sample=flops,
        peak="; ".join(dict.fromkeys(peaks)) or (_no_peak(group) if flops else ""),
        recipe=_recipe_text(group, amounts, unit) if amount else "",
        recipe_title=_recipe_title(amount) if amount else "",
        points=tuple(points),
        padding=_padding(group) if flops else "",
        published=rates_beside(group),
    )


def _padding(group: Group) -> str:
    """By what runs say was in force: the plan alone does not show it."""
    in_force = [
        setting.effective == "unpadded"
        for run in group.runs
        if run.record
        for setting in run.record.settings
        if setting.key == "model.attention"
    ]
    return "padding is counted but not computed (model.attention unpadded)" if any(in_force) else ""


def _peak_text(peak: Peak, group: Group) -> str:
    precision = group.sample.plan.workload.train.precision
    one = f"{format_number(peak.unit_flops_per_s / TERA)} TFLOP/s per {peak.unit} at {precision}"
    many = "" if peak.per_rank == 1 else f", {peak.per_rank:.3g} {peak.unit}s per rank"
    how = "" if peak.is_declared else ", found by the GPU's name; node.peak_tflops of the system overrides it"
    memory = f"; memory {peak.memory_bytes_per_s / TERA:.3g} TB/s" if peak.memory_bytes_per_s else ""
    return f"peak: {one}{many}{memory} ({peak.source}{how})"


def _no_peak(group: Group) -> str:
    plan = group.sample.plan
    unit = "GPU" if plan.system.node.gpus else "core"
    names = sorted({name for run in group.runs for name in gpu_names(run)})
    precision = plan.workload.train.precision
    why = f"{names[0]}: {why_no_peak(names[0], precision)}; " if len(names) == 1 else ""
    return (
        f"{why}for the MFU declare node.peak_tflops ({{{precision}: TFLOP/s of one {unit}}}) and "
        f"node.peak_source in system {plan.system.name}"
    )


def _recipe_text(group: Group, amounts: list[Recipe], unit: str) -> str:
    plan = group.sample.plan
    first, last = amounts[0], amounts[-1]
    if first.epochs is None:
        much = f"{_span(first.samples, last.samples, ',.0f')} {unit} ({first.key})"
    else:
        epochs = _span(first.epochs, last.epochs or first.epochs, "g")
        much = f"{epochs} epochs ({first.key}) of {first.epoch_samples:,} {unit}"
    caveats = "training steps alone" + (" on synthetic data" if plan.workload.data.is_synthetic else "")
    return f"{'Upper limit' if first.is_limit else 'Time to train'}: {much}, {caveats}."


def _span(first: float, last: float, form: str) -> str:
    """One number, or both where the recipe is longer at the larger global batch."""
    return f"{first:{form}}" if first == last else f"{first:{form}} to {last:{form}}"


def _recipe_title(amount: Recipe) -> str:
    """What a time is that follows from it: an upper limit is no time to accuracy."""
    return f"Upper limit: {amount.key} at this rate" if amount.is_limit else f"Time to train by {amount.key}"


def training_flops(group: Group) -> int | None:
    """Model FLOPs of training on one sample; None if no run records them, or runs disagree."""
    recorded = {run.record.training_flops_per_sample for run in group.runs if run.record}
    (found,) = recorded if len(recorded) == 1 else (None,)
    return found or None


def peak_of(run: Run) -> Peak | None:
    """The peak of one rank of a run at its precision, if it is declared or a data sheet is known."""
    plan = run.plan
    node, precision = plan.system.node, plan.workload.train.precision
    devices = {rank.device for rank in run.record.ranks} if run.record else set()
    on_gpu = any(device.startswith("cuda") for device in devices)
    # Ranks that share a GPU share its peak.
    per_rank = gpus_per_rank(run) if on_gpu else float(plan.layout.cores_per_rank)
    # A declared peak is that of a GPU exactly if the node has some.
    if precision in node.peak_tflops and on_gpu == bool(node.gpus):
        one, source, declared = node.peak_tflops[precision] * TERA, node.peak_source or "", True
        memory = None
    else:
        names = gpu_names(run)
        sheet = datasheet_peak(names.pop(), precision) if len(names) == 1 else None
        if sheet is None:
            return None
        one, source, declared, memory = sheet.flops_per_s, sheet.source, False, sheet.memory_bytes_per_s
    return Peak(
        flops_per_s=one * per_rank,
        unit_flops_per_s=one,
        per_rank=per_rank,
        unit="GPU" if on_gpu else "core",
        source=source,
        is_declared=declared,
        memory_bytes_per_s=memory,
    )


def recipe(group: Group) -> Recipe | None:
    """The length of a full training at the group's first point; see `recipe_of`."""
    return recipe_of(group.sample)


def recipe_of(run: Run) -> Recipe | None:
    """The length of a full training: the schedule's, else the limit of the quality; None if neither is known.

    Both are those in force at the run's global batch.
    """
    plan, epoch = run.plan, epoch_samples(run)
    schedule, quality = plan.workload.train.at_batch(plan.global_batch).schedule, plan.goal
    if schedule.total_epochs is not None and epoch:
        epochs, key, limit = schedule.total_epochs, "train.schedule.total_epochs", False
    elif schedule.total_steps is not None:
        samples = float(schedule.total_steps * plan.global_batch)
        return Recipe(
            epochs=None, epoch_samples=None, samples=samples, key="train.schedule.total_steps", is_limit=False
        )
    elif quality is not None and quality.max_epochs is not None and epoch:
        epochs, key, limit = quality.max_epochs, "quality.max_epochs", True
    elif quality is not None and quality.max_samples is not None:
        samples = float(quality.max_samples)
        return Recipe(epochs=None, epoch_samples=None, samples=samples, key="quality.max_samples", is_limit=True)
    else:
        return None
    samples = training_samples(epoch, epochs)
    return Recipe(epochs=epochs, epoch_samples=epoch, samples=samples, key=key, is_limit=limit)


def epoch_samples(run: Run) -> int | None:
    """Samples of an epoch: the schedule's, else those of the training data; None for synthetic data without either."""
    workload, record = run.plan.workload, run.record
    if workload.train.schedule.epoch_samples is not None:
        return workload.train.schedule.epoch_samples
    if record is not None and record.quality is not None:
        return record.quality.train_samples
    found = record.data.get("num_samples") if record is not None else None
    return found if isinstance(found, int) and found > 0 and not workload.data.is_synthetic else None


def training_time(point: Point, amount: Recipe) -> Estimate:
    """Seconds of training steps for a recipe at the point's throughput; no claim that it converges."""
    return point.throughput.mapped(lambda rate: time_to_train(amount.samples, rate), "s")

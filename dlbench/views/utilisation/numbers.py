"""What share of the hardware's peak a scaling point turns into the model's arithmetic, and how long a training takes.

MFU = FLOPs of training on one sample x samples a second / (ranks x peak of one rank); see `dlbench.costs.utilisation`.
The peak is the system's own declaration (`node.peak_tflops`), else a data sheet's, found by the GPU's name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from dlbench.costs.training_time import time_to_train, training_samples
from dlbench.costs.utilisation import TERA, datasheet_peak, model_flops_utilisation
from dlbench.reading.scaling import Group, Point
from dlbench.records.record import LayerMacs
from dlbench.records.scan import Run
from dlbench.stats.estimates import Estimate

_GPU = re.compile(r"^cuda:\d+ \((.*)\)$")


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The peak of one rank."""

    flops_per_s: float
    """Floating-point operations a second: of its GPU, or of its cores together."""
    unit_flops_per_s: float
    """Of one GPU or one core, as it was declared."""
    per_rank: float
    """GPUs or cores a rank; below 1 where ranks share a GPU."""
    unit: Literal["GPU", "core"]
    source: str
    is_declared: bool
    """From `node.peak_tflops`; otherwise from a data sheet, by the GPU's name."""


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """The arithmetic of one scaling point."""

    achieved_per_rank: Estimate
    """Model FLOPs a second and rank."""
    mfu: Estimate | None
    """Model FLOPs utilisation (1); None without a peak."""
    peak: Peak | None


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


def training_flops(group: Group) -> int | None:
    """Model FLOPs of training on one sample; None if no run tells, or runs disagree."""
    told = {run.record.training_flops_per_sample for run in group.runs if run.record}
    (found,) = told if len(told) == 1 else (None,)
    return found or None


def layers(group: Group) -> tuple[LayerMacs, ...]:
    """Forward multiply-accumulates of a sample by layer, of the first run that tells."""
    return next((run.record.layers for run in group.runs if run.record and run.record.layers), ())


def utilisation(group: Group, point: Point) -> Utilisation | None:
    """Achieved rate and MFU of a point; None where the FLOPs of a sample are not known."""
    flops = training_flops(group)
    if flops is None:
        return None
    run = next(run for run in group.runs if run.plan.run_id in point.run_ids)
    peak = peak_of(run)
    factor = peak and model_flops_utilisation(flops, 1.0, peak.flops_per_s, point.ranks)
    return Utilisation(
        achieved_per_rank=point.throughput.scaled(flops / point.ranks),
        mfu=point.throughput.scaled(factor) if factor else None,
        peak=peak,
    )


def peak_of(run: Run) -> Peak | None:
    """The peak of one rank of a run at its precision, if it is declared or a data sheet is known."""
    plan = run.plan
    node, precision = plan.system.node, plan.workload.train.precision
    devices = {rank.device for rank in run.record.ranks} if run.record else set()
    on_gpu = any(device.startswith("cuda") for device in devices)
    # Ranks that share a GPU share its peak.
    gpus = min(1.0, node.gpus / plan.layout.ranks_per_node) if node.gpus else 1.0
    per_rank = gpus if on_gpu else float(plan.layout.cores_per_rank)
    # A declared peak is that of a GPU exactly if the node has some.
    if precision in node.peak_tflops and on_gpu == bool(node.gpus):
        one, source, declared = node.peak_tflops[precision] * TERA, node.peak_source or "", True
    else:
        names = {match[1] for device in devices if (match := _GPU.match(device))}
        sheet = datasheet_peak(names.pop(), precision) if len(names) == 1 else None
        if sheet is None:
            return None
        one, source, declared = sheet.flops_per_s, sheet.source, False
    return Peak(
        flops_per_s=one * per_rank,
        unit_flops_per_s=one,
        per_rank=per_rank,
        unit="GPU" if on_gpu else "core",
        source=source,
        is_declared=declared,
    )


def recipe(group: Group) -> Recipe | None:
    """The length of a full training: the schedule's epochs, else the limit of the quality; None if neither is known."""
    workload = group.sample.plan.workload
    epoch = epoch_samples(group)
    schedule, quality = workload.train.schedule, workload.quality
    if schedule.total_epochs is not None and epoch:
        epochs, key, limit = schedule.total_epochs, "train.schedule.total_epochs", False
    elif quality is not None and quality.max_epochs is not None and epoch:
        epochs, key, limit = quality.max_epochs, "quality.max_epochs", True
    elif quality is not None and quality.max_samples is not None:
        samples = float(quality.max_samples)
        return Recipe(epochs=None, epoch_samples=None, samples=samples, key="quality.max_samples", is_limit=True)
    else:
        return None
    samples = training_samples(epoch, epochs)
    return Recipe(epochs=epochs, epoch_samples=epoch, samples=samples, key=key, is_limit=limit)


def epoch_samples(group: Group) -> int | None:
    """Samples of an epoch: the schedule's, else those of the training data; None for synthetic data without either."""
    return epoch_samples_of(group.sample)


def epoch_samples_of(run: Run) -> int | None:
    """The same for one run."""
    workload, record = run.plan.workload, run.record
    if workload.train.schedule.epoch_samples is not None:
        return workload.train.schedule.epoch_samples
    if record is not None and record.quality is not None:
        return record.quality.train_samples
    found = record.data.get("num_samples") if record is not None else None
    return found if isinstance(found, int) and found > 0 and not workload.data.is_synthetic else None


def training_time(point: Point, amount: Recipe) -> Estimate:
    """Seconds of training steps for a recipe at the point's throughput; no claim that it converges."""
    rate = point.throughput
    low, high = (None if end is None else time_to_train(amount.samples, end) for end in (rate.high, rate.low))
    return Estimate(time_to_train(amount.samples, rate.value), low, high, rate.n, rate.kind)

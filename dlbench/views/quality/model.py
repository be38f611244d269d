"""The report's plain data on training to a quality, the noise scale and the use of the hardware; see `model`."""

from __future__ import annotations

from dataclasses import dataclass

from dlbench.stats.estimates import Estimate


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Why the time to quality is `speedup` times shorter than at the baseline: the other three multiply to it."""

    speedup: Estimate
    throughput: Estimate
    samples: Estimate
    """Samples to quality of the baseline over those here: below 1, more were needed."""
    rest: Estimate
    """Evaluation, checkpoints, warm-up steps and waits."""


@dataclass(frozen=True, kw_only=True)
class QualityPoint:
    """Training to a quality at one rank count; medians over the runs that reached it, unless said otherwise."""

    ranks: int
    nodes: int
    global_batch: int
    num_runs: int
    num_reached: int
    num_invalid: int
    """Runs of `num_runs` that yield no figure because a sanity check failed; they count as not having reached it."""
    num_lost: int
    """Further runs that ended without a record."""
    time: Estimate | None
    resolution: Estimate | None
    """Time between the evaluation that met the target and the one before: the time may be too long by so much."""
    epochs: Estimate | None
    samples: Estimate | None
    best: Estimate | None
    """Median over all runs with figures, as `final`, `trained_epochs` and `trained`."""
    final: Estimate | None
    trained_epochs: Estimate | None
    """None where throughput, epochs and time of some run contradict each other."""
    trained: Estimate | None
    """Seconds in training steps for these epochs."""
    whole: Estimate | None
    """Seconds until the target or the end, mean over runs with figures; sum of the following three."""
    training: Estimate | None
    evaluation: Estimate | None
    other: Estimate | None
    factors: Factors | None
    """None where a run on either side did not reach the target."""
    run_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class BatchPoint:
    """What a global batch needs to reach the quality."""

    global_batch: int
    num_runs: int
    num_reached: int
    epochs: Estimate | None
    samples: Estimate | None
    against_smallest: float | None
    """Samples over those of the smallest batch (ratio)."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One look at the quality; times in seconds since the start of training."""

    samples: int
    epoch: float
    wall_s: float
    train_s: float
    eval_s: float
    value: float | None
    loss: float | None


@dataclass(frozen=True, kw_only=True)
class Curve:
    """All evaluations of one run."""

    run_id: str
    ranks: int
    nodes: int
    reached: bool
    evaluations: tuple[Evaluation, ...]


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Training to a quality."""

    metric: str
    metric_title: str
    unit: str
    """Unit of the metric's figures: `fraction` or `error`."""
    higher_is_better: bool
    target: float
    limit: str
    """When a run gives up, in words."""
    predictor: str
    """What a predictor without skill does, in words."""
    predictor_value: float
    headline: tuple[str, str]
    """The card's number and what it means."""
    points: tuple[QualityPoint, ...]
    batches: tuple[BatchPoint, ...]
    curves: tuple[Curve, ...]


@dataclass(frozen=True, kw_only=True)
class NoisePoint:
    """The gradient noise scale at one rank count."""

    ranks: int
    nodes: int
    global_batch: int
    noise_scale: Estimate | None
    share: float | None
    """Global batch over noise scale."""
    advice: str
    """What that means for a larger batch, or why it is not known."""
    basis: str
    """Batch sizes and steps behind it."""


@dataclass(frozen=True, kw_only=True)
class UtilisationPoint:
    """Arithmetic and time to train at one rank count."""

    ranks: int
    nodes: int
    throughput: Estimate
    achieved: Estimate | None
    """Model FLOPs of a rank, `TFLOP/s/rank`; None where a sample's FLOPs are not known."""
    peak_tflops: float | None
    """Of one rank."""
    mfu: Estimate | None
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
    points: tuple[UtilisationPoint, ...]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Forward multiply-accumulates of one sample."""

    name: str
    kind: str
    macs: int


@dataclass(frozen=True, kw_only=True)
class LayerTable:
    """Layers of one network, in the order of the forward pass."""

    title: str
    num_parameters: int
    training_flops_per_sample: int | None
    layers: tuple[Layer, ...]

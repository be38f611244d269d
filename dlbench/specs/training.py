"""The training recipe (optimizer, schedule, precision, batch, target quality) and the measurement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, model_validator

from dlbench.specs.base import ActsIf, Count, CountOrZero, Flag, Fraction, NonNegative, Positive, Precision, Spec
from dlbench.specs.out_of_core import MemorySpec, Recompute, Swap

Where = Literal["row", "below", "between", "beyond"]

DECAYS_TO_AN_END = ("polynomial", "linear", "cosine")  # Decays with a last step and an end rate.

WARMUP_S, MEASURED_S = 20.0, 60.0
"""Default seconds of warm-up and measurement on GPUs: clocks and temperature settle within tens of seconds, and power
is read once per second."""

TABLE = "train.optimizer.learning_rate_table"

_BY_ROW = (
    "the row of train.optimizer.learning_rate_table for this global batch replaces it; set "
    "train.optimizer.learning_rate_scaling to none, linear or sqrt"
)
_OPTIMIZER = "workload.train.optimizer.name"
_SCALING = "workload.train.optimizer.learning_rate_scaling"
_DECAY = "workload.train.schedule.decay"
_PRECISION = "workload.train.precision"


class RatePoint(Spec):
    """A row of the learning rate table; steps are those of the row's batch."""

    batch: Count = Field(description="Global batch of this row, samples.")
    learning_rate: Positive = Field(description="Peak learning rate at this batch.")
    warmup_steps: CountOrZero | None = Field(None, description="Replaces schedule.warmup_steps.")
    warmup_epochs: Positive | None = Field(None, description="Replaces schedule.warmup_epochs.")
    total_steps: Count | None = Field(None, description="Replaces schedule.total_steps.")
    total_epochs: Positive | None = Field(None, description="Replaces schedule.total_epochs.")
    momentum: Fraction | None = Field(None, description="Replaces momentum.")
    betas: tuple[Fraction, Fraction] | None = Field(None, description="Replaces betas.")
    weight_decay: NonNegative | None = Field(None, description="Replaces weight_decay.")


@dataclass(frozen=True, kw_only=True)
class Place:
    """The position of a global batch in a learning rate table."""

    where: Where
    row: RatePoint  # The batch's row, else the nearest below it; below the first row, the first.
    above: RatePoint | None  # The next row, if the batch is between two.
    learning_rate: float  # From the table; see `place_in`.


def place_in(table: Sequence[RatePoint], batch: int, *, below: Literal["linear", "sqrt"]) -> Place:
    """Returns the learning rate of a global batch, in samples: interpolated between rows, constant beyond the last.

    `below`: scaling below the first row: linear (Goyal et al. 2017, section 2.1) or with the square root (You et al.
    2019, section 4, for LAMB). Scaling rules hold only up to some batch (Goyal et al. 2017, figure 1).
    """
    first, last = table[0], table[-1]
    for row in table:
        if row.batch == batch:
            return Place(where="row", row=row, above=None, learning_rate=row.learning_rate)
    if batch < first.batch:
        scale = _batch_scale(batch / first.batch, below)
        return Place(where="below", row=first, above=None, learning_rate=first.learning_rate * scale)
    for row, above in pairwise(table):
        if row.batch < batch < above.batch:
            share = (batch - row.batch) / (above.batch - row.batch)
            rate = row.learning_rate + (above.learning_rate - row.learning_rate) * share
            return Place(where="between", row=row, above=above, learning_rate=rate)
    return Place(where="beyond", row=last, above=None, learning_rate=last.learning_rate)


def _batch_scale(ratio: float, rule: str) -> float:
    if rule == "linear":
        return ratio
    return math.sqrt(ratio)


def table_problem(table: Sequence[RatePoint], reference_batch: int | None) -> str | None:
    """Returns what is wrong with a table, in one sentence; None if nothing is."""
    batches = [row.batch for row in table]
    if not batches:
        return "learning_rate_scaling table needs learning_rate_table"
    if batches != sorted(set(batches)):
        return "the batches of learning_rate_table must ascend"
    if reference_batch is not None and reference_batch not in batches:
        return f"reference_batch {reference_batch} is not a row of learning_rate_table"
    for row in table:
        for steps, epochs in (("warmup_steps", "warmup_epochs"), ("total_steps", "total_epochs")):
            if getattr(row, steps) is not None and getattr(row, epochs) is not None:
                return f"{steps} and {epochs} exclude each other (row {row.batch} of learning_rate_table)"
    return None


class OptimizerSpec(Spec):
    """The optimizer. Formulas are in `dlbench.node.models.optimizers`."""

    acting = (
        ActsIf("reference_batch", _SCALING, "linear", "sqrt", "table", why="only learning_rate_scaling reads it"),
        ActsIf("learning_rate_table", _SCALING, "table", why="only learning_rate_scaling table reads it"),
        ActsIf("momentum", "rate_row.momentum", None, why=_BY_ROW),
        ActsIf("betas", "rate_row.betas", None, why=_BY_ROW),
        ActsIf("weight_decay", "rate_row.weight_decay", None, why=_BY_ROW),
        ActsIf("momentum", _OPTIMIZER, "sgd", "lars", why="only sgd and lars read it"),
        ActsIf("betas", _OPTIMIZER, "adamw", "lamb", why="only adamw and lamb read it"),
        ActsIf("epsilon", _OPTIMIZER, "adamw", "lars", "lamb", why="only adamw and lars and lamb read it"),
        ActsIf("trust_coefficient", _OPTIMIZER, "lars", why="only lars read it"),
    )

    name: Literal["sgd", "adamw", "lars", "lamb"] = Field(description="Update rule.")
    implementation: Literal["foreach", "fused"] = Field(
        "foreach",
        description="Implementation of the update: foreach (one operation over all tensors), or fused (torch's fused "
        "kernel for sgd and adamw; torch.compile for lars and lamb).",
    )
    learning_rate: Positive = Field(description="Peak learning rate after warm-up, before scaling.")
    learning_rate_scaling: Literal["none", "linear", "sqrt", "table"] = Field(
        "none", description="Scale the rate with the global batch, its square root, or a table."
    )
    reference_batch: Count | None = Field(None, description="Global batch of learning_rate, samples, for its scaling.")
    learning_rate_table: tuple[RatePoint, ...] = Field(
        (),
        description="Published rates by global batch; interpolated between rows, constant beyond the last, where "
        "--to-accuracy is refused.",
    )
    momentum: Fraction = Field(0.9, description="Momentum (sgd, lars).")
    weight_decay: NonNegative = Field(0.0, description="Weight decay; not applied to biases and norms.")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.999), description="Decay rates of the two moments (adamw, lamb).")
    epsilon: NonNegative = Field(1e-6, description="Added to the denominator (adamw, lars, lamb).")
    trust_coefficient: Positive = Field(0.001, description="Trust coefficient eta (lars).")
    clip_norm: Positive | None = Field(None, description="Maximum global gradient norm, applied after the exchange.")

    @property
    def slots(self) -> int:
        """Values that the optimizer stores per parameter: none, momentum, or two moments."""
        if self.name == "sgd" and not self.momentum:
            return 0
        return 1 if self.name in ("sgd", "lars") else 2

    @property
    def is_compiled(self) -> bool:
        return self.implementation == "fused" and self.name in ("lars", "lamb")

    def peak(self, global_batch: int) -> float:
        """Returns the rate after warm-up, scaled with the global batch (samples) if that is set; see `place_in`.

        A table's rates are scaled so that the row of reference_batch has learning_rate.
        """
        if self.learning_rate_scaling == "none" or self.reference_batch is None:
            return self.learning_rate
        place = self.place(global_batch)
        if place is not None:
            reference_row = next(row for row in self.learning_rate_table if row.batch == self.reference_batch)
            return place.learning_rate * (self.learning_rate / reference_row.learning_rate)
        return self.learning_rate * _batch_scale(global_batch / self.reference_batch, self.learning_rate_scaling)

    def place(self, global_batch: int) -> Place | None:
        if self.learning_rate_scaling != "table":
            return None
        below: Literal["linear", "sqrt"] = "sqrt" if self.name == "lamb" else "linear"
        return place_in(self.learning_rate_table, global_batch, below=below)

    @model_validator(mode="after")
    def _scaling_has_reference(self) -> Self:
        if self.learning_rate_scaling != "none" and self.reference_batch is None:
            raise ValueError(f"learning_rate_scaling {self.learning_rate_scaling} needs reference_batch")
        problem = table_problem(self.learning_rate_table, self.reference_batch)
        if self.learning_rate_scaling == "table" and problem is not None:
            raise ValueError(problem)
        return self


class ScheduleSpec(Spec):
    """Learning rate over training: linear warm-up, then a decay; in steps or in epochs."""

    acting = (
        ActsIf("warmup_steps warmup_epochs", "rate_row.warmup_steps", None, why=_BY_ROW),
        ActsIf("warmup_steps warmup_epochs", "rate_row.warmup_epochs", None, why=_BY_ROW),
        ActsIf("total_steps total_epochs", "rate_row.total_steps", None, why=_BY_ROW),
        ActsIf("total_steps total_epochs", "rate_row.total_epochs", None, why=_BY_ROW),
        ActsIf("warmup_from", "recipe.schedule.warms_up", why="only a warm-up reads it"),
        ActsIf("epoch_samples", "counts_epochs", why="nothing in this plan counts in epochs"),
        ActsIf("power", _DECAY, "polynomial", why="only decay polynomial reads it"),
        ActsIf(
            "end_learning_rate decay_from total_steps total_epochs",
            _DECAY,
            *DECAYS_TO_AN_END,
            why=f"only decay {' and '.join(DECAYS_TO_AN_END)} reads it",
        ),
        ActsIf("step_boundaries step_factors epoch_boundaries", _DECAY, "step", why="only decay step reads it"),
    )

    warmup_steps: CountOrZero = Field(0, description="Steps of linear warm-up.")
    warmup_epochs: Positive | None = Field(None, description="Epochs of linear warm-up, instead of warmup_steps.")
    warmup_from: Literal["zero", "unscaled"] = Field("zero", description="Learning rate at step 0: zero, or unscaled.")
    decay: Literal["constant", "polynomial", "linear", "cosine", "step"] = Field("constant", description="Decay rule.")
    decay_from: Literal["warmup", "start"] = Field("warmup", description="Decay starts after warm-up, or at step 0.")
    power: Positive = Field(2.0, description="Exponent of the polynomial decay.")
    end_learning_rate: NonNegative = Field(0.0, description="Learning rate at the end of the decay; not scaled.")
    total_steps: Count | None = Field(None, description="Steps of a full training with its decay; not the measured.")
    total_epochs: Positive | None = Field(None, description="Epochs of a full training, instead of total_steps.")
    step_boundaries: tuple[Count, ...] = Field((), description="Steps from which step_factors apply (decay: step).")
    epoch_boundaries: tuple[Positive, ...] = Field((), description="Epochs instead of step_boundaries.")
    step_factors: tuple[Positive, ...] = Field((), description="Shares of the peak rate from each boundary on.")
    epoch_samples: Count | None = Field(None, description="Samples per epoch of schedule and target; none: the data's.")

    @property
    def boundaries(self) -> tuple[float, ...]:
        """Boundaries of the step decay, in steps or in epochs."""
        return self.epoch_boundaries or self.step_boundaries

    @property
    def warms_up(self) -> bool:
        return bool(self.warmup_steps or self.warmup_epochs)

    @property
    def counts_epochs(self) -> bool:
        return self.warmup_epochs is not None or self.total_epochs is not None or bool(self.epoch_boundaries)

    @model_validator(mode="after")
    def _one_unit_each(self) -> Self:
        pairs = (
            ("warmup_steps", "warmup_epochs", bool(self.warmup_steps) and self.warmup_epochs is not None),
            ("total_steps", "total_epochs", self.total_steps is not None and self.total_epochs is not None),
            ("step_boundaries", "epoch_boundaries", bool(self.step_boundaries) and bool(self.epoch_boundaries)),
        )
        for steps, epochs, are_both_set in pairs:
            if are_both_set:
                raise ValueError(f"{steps} and {epochs} exclude each other")
        if self.decay in DECAYS_TO_AN_END and self.total_steps is None and self.total_epochs is None:
            raise ValueError(f"decay {self.decay} needs total_steps or total_epochs")
        if len(self.boundaries) != len(self.step_factors):
            raise ValueError("the boundaries (in steps or in epochs) and step_factors must have the same length")
        if list(self.boundaries) != sorted(set(self.boundaries)):
            raise ValueError("boundaries must ascend")
        return self


class TrainSpec(Spec):
    """The training recipe."""

    acting = (
        ActsIf("allow_emulation", _PRECISION, "bf16", "fp16", why="only precisions bf16 and fp16 read it"),
        ActsIf("cudnn_benchmark", "workload.model.has_convolutions", why="the network has no convolutions"),
        ActsIf("initial_loss_scale loss_scale_growth_steps", _PRECISION, "fp16", why="only precision fp16 scales"),
    )

    batch_per_rank: Count = Field(description="Samples per rank and step.")
    global_batch: Count | None = Field(
        None, description="Samples per step over all ranks, in parts of batch_per_rank; none: one part each."
    )
    gradient_accumulation: Count = Field(
        1, description="Parts that a batch is split into; must divide batch_per_rank, times engine.ddp.spatial_ranks."
    )
    precision: Precision = Field(
        "fp32",
        description="fp32: without TF32. tf32: fp32 with TF32 in matrix products and convolutions. bf16: autocast with "
        "fp32 weights. fp16: autocast with fp32 weights and loss scaling.",
    )
    allow_emulation: Flag = Field(False, description="Let CPUs emulate bf16 or fp16: right results, meaningless speed.")
    initial_loss_scale: Positive = Field(65536.0, description="Loss scale of the first step (fp16).")
    loss_scale_growth_steps: Count = Field(2000, description="Steps without overflow until the scale doubles (fp16).")
    optimizer: OptimizerSpec = Field(description="The optimizer.")
    schedule: ScheduleSpec = Field(ScheduleSpec(), description="Learning rate schedule.")
    recompute: Recompute = Field(
        "none",
        description="Activations that are recomputed in the backward pass. none: keep all. blocks: those of every "
        "block (activation checkpointing). planned: those of the blocks that a plan for train.memory.capacity chooses.",
    )
    swap: Swap = Field(
        "none",
        description="Activations that are moved to the host (GPU) or to a file (CPU) between forward and backward "
        "pass. none: keep all. offload: all, synchronously (torch's save_on_cpu). streamed: all, overlapped with "
        "computing, one block ahead. planned: those that a plan for train.memory.capacity chooses.",
    )
    memory: MemorySpec = Field(MemorySpec(), description="Limits for the plan of recomputing and swapping.")
    optimizer_state: Literal["device", "host"] = Field(
        "device",
        description="host: the CPU stores the optimizer state and updates block by block during the next forward pass.",
    )
    compile: Literal["none", "default", "reduce-overhead", "max-autotune"] = Field(
        "none", description="Mode of torch.compile; blocks are compiled one by one with recompute or swap."
    )
    cuda_graphs: Literal["none", "network"] = Field(
        "none", description="network: capture forward and backward pass once and replay them as CUDA graphs."
    )
    cudnn_benchmark: Literal["auto", "on", "off"] = Field(
        "auto", description="Let cuDNN try its convolution algorithms in the first step; auto: on for GPUs."
    )
    activation_budget: Fraction | None = Field(None, description="Activation budget of torch.compile; none: default.")
    label_smoothing: Fraction = Field(0.0, description="Label smoothing of the classifier's loss.")
    seed: CountOrZero = Field(0, le=2**32 - 1, description="Seed of weights, sample order, augmentation and dropout.")

    def at_batch(self, global_batch: int) -> TrainSpec:
        """Returns the recipe for a global batch, without the learning rate (`peak`); steps are rescaled."""
        place = self.optimizer.place(global_batch)
        if place is None:
            return self
        row, ratio = place.row, place.row.batch / global_batch
        rule = {key: value for key in ("momentum", "betas", "weight_decay") if (value := getattr(row, key)) is not None}
        schedule: dict[str, object] = {}
        for part in ("warmup", "total"):
            steps, epochs = getattr(row, f"{part}_steps"), getattr(row, f"{part}_epochs")
            if epochs is not None:
                no_steps = 0 if part == "warmup" else None
                schedule |= {f"{part}_epochs": epochs, f"{part}_steps": no_steps}
            elif steps is not None:
                schedule |= {f"{part}_steps": round(steps * ratio), f"{part}_epochs": None}
        optimizer = self.optimizer.model_copy(update=rule)
        return self.model_copy(update={"optimizer": optimizer, "schedule": self.schedule.model_copy(update=schedule)})

    def lengthened(self, global_batch: int) -> float:
        """Returns the number of samples of this batch's recipe until the decay ends, over that of the preset."""
        preset_schedule, schedule = self.schedule, self.at_batch(global_batch).schedule
        if preset_schedule.total_epochs and schedule.total_epochs:
            return schedule.total_epochs / preset_schedule.total_epochs
        own_samples = self.total_samples(preset_schedule, self.optimizer.reference_batch or global_batch)
        samples = self.total_samples(schedule, global_batch)
        if not own_samples or not samples:
            return 1.0
        return samples / own_samples

    @staticmethod
    def total_samples(schedule: ScheduleSpec, batch: int) -> float | None:
        """Returns the samples of a full training at a global batch; None: the schedule does not end."""
        if schedule.total_epochs is not None and schedule.epoch_samples:
            return schedule.total_epochs * schedule.epoch_samples
        if schedule.total_epochs is None and schedule.total_steps is not None:
            return float(schedule.total_steps * batch)
        return None

    @property
    def is_in_core(self) -> bool:
        return self.recompute == "none" and self.swap == "none"

    @property
    def saves_memory(self) -> bool:
        """Returns whether a method saves device memory: for activations, or an update on the host."""
        return not self.is_in_core or self.optimizer_state == "host" or self.activation_budget is not None

    @property
    def swaps(self) -> bool:
        return self.swap != "none"

    @property
    def is_one_program(self) -> bool:
        """Returns whether layers are compiled or captured, so that nothing can be observed between them."""
        return self.compile != "none" or self.cuda_graphs != "none"

    @property
    def is_planned(self) -> bool:
        return "planned" in (self.recompute, self.swap)

    @model_validator(mode="after")
    def _memory_methods_agree(self) -> Self:
        if self.is_planned and self.memory.capacity is None:
            key = "recompute" if self.recompute == "planned" else "swap"
            raise ValueError(f"{key} planned needs memory.capacity, e.g. 8GiB or 50%")
        if (self.recompute, self.swap) in (("blocks", "planned"), ("planned", "offload"), ("planned", "streamed")):
            raise ValueError(
                f"recompute {self.recompute} and swap {self.swap} exclude each other: a plan decides for every block; "
                "set both to planned"
            )
        if self.activation_budget is not None and not (self.compile != "none" and self.is_in_core):
            raise ValueError("activation_budget needs compile default, and recompute and swap none")
        return self

    @model_validator(mode="after")
    def _graphs_are_possible(self) -> Self:
        setting = ""
        if self.compile in ("reduce-overhead", "max-autotune"):
            setting = f"compile {self.compile}"
        if self.cuda_graphs != "none":
            setting = f"cuda_graphs {self.cuda_graphs}"
            if self.compile != "none":
                raise ValueError(f"{setting} and compile {self.compile} exclude each other: that has its own graphs")
            if self.optimizer_state == "host":
                raise ValueError(f"{setting} and optimizer_state host exclude each other: replays do not wait")
        if setting and not self.is_in_core:
            raise ValueError(f"{setting} needs recompute and swap none: a replay cannot free or restore activations")
        if setting and self.gradient_accumulation > 1:
            raise ValueError(f"{setting} needs gradient_accumulation 1: each replay overwrites the gradients before")
        return self

    @model_validator(mode="after")
    def _updates_and_parts_are_possible(self) -> Self:
        optimizer = self.optimizer
        if optimizer.is_compiled and self.optimizer_state == "host":
            raise ValueError(
                f"optimizer.implementation fused and optimizer_state host exclude each other for {optimizer.name}: the "
                "host updates block by block, and each block would be a program of its own"
            )
        return self


class QualitySpec(Spec):
    """Target quality of training to accuracy, with the evaluation interval and the limits; see `measure.until`."""

    target: NonNegative = Field(description="Target: top-1 or masked-LM accuracy (share, at least), MAE (at most).")
    evaluate_every_epochs: Positive | None = Field(None, description="Epochs between evaluations.")
    evaluate_every_samples: Count | None = Field(None, description="Samples between evaluations, instead of epochs.")
    evaluate_samples: Count | None = Field(None, description="Number of validation samples to use; none: all.")
    max_epochs: Positive | None = Field(None, description="Epochs after which training ends without the target.")
    max_samples: Count | None = Field(None, description="Samples after which training ends, instead of max_epochs.")
    starts_from: Literal["random", "checkpoint"] = Field("random", description="checkpoint: needs initialize_from.")
    stop_at_target: Flag = Field(True, description="End at the first evaluation that meets the target.")

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        for epochs, samples in (("evaluate_every_epochs", "evaluate_every_samples"), ("max_epochs", "max_samples")):
            if (getattr(self, epochs) is None) == (getattr(self, samples) is None):
                raise ValueError(f"give one of {epochs} and {samples}")
        return self


class MeasureSpec(Spec):
    """Settings of the measurement."""

    acting = (
        ActsIf(
            "measured_steps measured_s warmup_steps warmup_s",
            "measure.until",
            "steps",
            why="measure.until quality ends by its target",
        ),
        ActsIf("noise_scale", "workload.model.computes", why="gradients of a paced network have no noise"),
    )

    until: Literal["steps", "quality"] = Field("steps", description="steps: time steps; quality: reach quality.target.")
    warmup_steps: CountOrZero = Field(description="Steps before the measurement; recorded separately.")
    measured_steps: Count = Field(description="Measured steps (until steps).")
    warmup_s: NonNegative | None = Field(None, description="Minimum warm-up time, s; none: 20 on GPUs, 0 on CPUs.")
    measured_s: NonNegative | None = Field(None, description="Minimum measured time, s; none: 60 on GPUs, 0 on CPUs.")
    phases: Literal["overlapped", "synchronised"] = Field(
        "overlapped",
        description="overlapped: no synchronisation is added. synchronised: wait for the device after each phase; "
        "slower.",
    )
    noise_scale: Flag = Field(False, description="Estimate the gradient noise scale; reads each gradient once more.")
    stall_timeout_s: Positive = Field(600.0, description="A rank without progress for this time ends itself, seconds.")

    def wanted_seconds(self, *, on_gpu: bool) -> tuple[float, float]:
        """Returns the minimum durations of warm-up and measurement, seconds; both 0 for training to a quality."""
        if self.until != "steps":
            return 0.0, 0.0
        warmup_s, measured_s = (WARMUP_S, MEASURED_S) if on_gpu else (0.0, 0.0)
        if self.warmup_s is not None:
            warmup_s = self.warmup_s
        if self.measured_s is not None:
            measured_s = self.measured_s
        return warmup_s, measured_s


def goal_problem(train: TrainSpec, quality: QualitySpec, *, global_batch: int, starts_from: str | None) -> str | None:
    """Returns why training to the target is refused, with a remedy; `starts_from` None: random weights."""
    if quality.starts_from == "checkpoint" and starts_from is None:
        return (
            f"this recipe reaches {quality.target:g} from trained weights only: set checkpoint.initialize_from to a "
            "checkpoint of the previous phase (a published one as safetensors, or dlbench's own)"
        )
    place = train.optimizer.place(global_batch)
    if place is not None and place.where == "beyond":
        return (
            f"a global batch of {global_batch:,} is beyond the last row of {TABLE} ({place.row.batch:,}): no "
            "published rate reaches the target there; use fewer ranks or a smaller train.batch_per_rank"
        )
    return None


def recipe_note(train: TrainSpec, *, global_batch: int, to_quality: bool) -> str | None:
    """Returns a note on a global batch without a row in the table; unless `to_quality`, only beyond the last row."""
    place = train.optimizer.place(global_batch)
    if place is None or place.where == "row" or not (to_quality or place.where == "beyond"):
        return None
    batch, row = f"a global batch of {global_batch:,}", f"{place.row.batch:,}"
    if place.where == "beyond":
        return (
            f"{batch} is beyond the last row of {TABLE} ({row}), whose rate is used: speed is measured, but the recipe "
            "is not known to converge"
        )
    if place.where == "below":
        return f"{batch} is below the first row of {TABLE} ({row}): its rate is scaled down, not published"
    assert place.above is not None
    return f"{batch} is between the rows {row} and {place.above.batch:,} of {TABLE}: its rate is interpolated"

"""What a plan trains, built on one rank: device, network, optimiser, data, and where training begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dlbench.errors import EnvironmentLacksError
from dlbench.node.data.reading.rank_reading import EpochRest, RankReading
from dlbench.node.data.sharding import Position
from dlbench.node.data.source import BatchSource, build_source
from dlbench.node.models.build import Batch, Loss, build_model, loss_for
from dlbench.node.models.optimizers import build_optimizer
from dlbench.node.models.schedule import LearningRate
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.engine import Engine
from dlbench.node.training import phases, sanity
from dlbench.node.training.checkpoint import Checkpoint, Progress, find_checkpoint
from dlbench.node.training.fault import PlantedFault
from dlbench.node.training.loop import Trainee
from dlbench.node.training.noise_scale import NoiseProbe
from dlbench.node.training.phases import PhaseTimer
from dlbench.node.training.precision import Precision
from dlbench.node.training.step_schedule import Course, plan_course
from dlbench.specs.plan import LaunchPlan, RunPlan


def device_for(plan: LaunchPlan, place: RankPlace) -> torch.device:
    """The rank's GPU where there is one for each rank of the node, the CPU where there is none at all.

    Raises:
        EnvironmentLacksError: a node has GPUs, but fewer than ranks, or GPUs were asked for and none is seen.
    """
    asked = plan.system.slurm.gpu_request if plan.system.scheduler == "slurm" else "none"
    if not torch.cuda.is_available():
        if asked != "none":
            raise EnvironmentLacksError(
                f"slurm.gpu_request is {asked}, but torch sees no GPU on {place.host}: check the driver and torch's "
                "build, or set gpu_request to none to train on CPUs"
            )
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if asked == "gpus-per-task" and visible == 1 and plan.system.launch.launcher != "mpirun":
        index = 0  # srun shows each rank its own GPU only; mpirun shows all ranks the same
    elif place.local_size <= visible:
        index = place.local_rank
    else:
        raise EnvironmentLacksError(
            f"{place.local_size} ranks per node, but {visible} GPUs on {place.host}: ranks must not share one; use "
            "fewer ranks, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """One rank, ready to train."""

    trainee: Trainee
    model: torch.nn.Module
    """The network itself, without the engine's wrapper."""
    source: BatchSource
    course: Course
    resumed: Checkpoint | None
    warnings: tuple[str, ...]
    reading: RankReading | None
    """How samples are read; None for synthetic data."""

    def position(self, done: int) -> Position:
        """Where the sample order stands after `done` steps of the whole training."""
        order = self.source.order
        return Position() if order is None else order.position(done - self.course.first)


def prepare(
    plan: RunPlan,
    place: RankPlace,
    engine: Engine,
    device: torch.device,
    timer: PhaseTimer,
    before_data: Callable[[], None] = lambda: None,
    beat: Callable[[str], None] = lambda _what: None,
) -> Prepared:
    """Builds network, optimiser and data as planned; the engine makes all ranks' parameters equal.

    Args:
        plan: the run.
        place: this rank.
        engine: started already.
        device: where this rank computes.
        timer: told of the end of the backward pass, where the engine knows it.
        before_data: called when everything is built but nothing of the data set has been touched.
        beat: told what moved while readers and page cache are settled.

    Raises:
        UserError: the data set is not what the plan needs, or what it resumes from does not fit.
        EnvironmentLacksError: the device does not compute in the planned precision.
    """
    workload = plan.workload
    train = workload.train
    # fp32 means fp32: by default torch lets cuDNN compute convolutions in TF32 on an A100 and newer.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    precision = Precision(train, device)
    torch.manual_seed(train.seed)
    model = build_model(workload.model).to(device)
    # Before the engine's own hooks, which hand the gradient on.
    noise = NoiseProbe(model, train.gradient_accumulation) if plan.measure.noise_scale else None
    optimizer = build_optimizer(model, train.optimizer)
    wrapped, optimizer = engine.prepare(
        model, optimizer, lambda: timer.mark(phases.BACKWARD), accumulation=train.gradient_accumulation
    )
    resumed = _resumed(plan, model, optimizer, precision)
    before_data()
    reading = None if workload.data.is_synthetic else rank_reading(plan, place, engine, device, beat)
    source, first = _source(plan, place, resumed.progress if resumed else None, reading, device)
    try:
        if resumed is not None:
            resumed.require(data_identity(source))
        course = plan_course(
            plan, first=first, batches_per_epoch=source.order.batches_per_epoch if source.order else None
        )
        rate = LearningRate(train, global_batch=plan.global_batch, steps_per_epoch=course.steps_per_epoch)
    except BaseException:
        source.close()
        raise
    loss = loss_for(workload.model, label_smoothing=train.label_smoothing)
    loss, batches, fault = _planted(plan, place, loss, iter(source))
    trainee = Trainee(
        model=wrapped,
        optimizer=optimizer,
        loss=loss,
        engine=engine,
        batches=batches,
        device=device,
        train=train,
        rate=rate,
        precision=precision,
        rank=place.rank,
        noise=noise,
        fault=fault,
        rest=EpochRest(reading, source) if reading is not None and reading.is_epoch_by_epoch else None,
    )
    warnings = (*precision.warnings, *_told_of_resume(plan, resumed, first), *sanity.planned_doubts(plan))
    return Prepared(
        trainee=trainee,
        model=model,
        source=source,
        course=course,
        resumed=resumed,
        warnings=warnings,
        reading=reading,
    )


def rank_reading(
    plan: RunPlan, place: RankPlace, engine: Engine, device: torch.device, beat: Callable[[str], None]
) -> RankReading:
    """How this rank will read; settled with the other ranks when the data set is opened."""
    return RankReading(
        plan.workload.data,
        cores=plan.layout.cores_per_rank,
        is_node_first=place.local_rank == 0,
        ranks=engine,
        device=device,
        beat=beat,
    )


def _planted(
    plan: RunPlan, place: RankPlace, loss: Loss, batches: Iterator[Batch]
) -> tuple[Loss, Iterator[Batch], PlantedFault | None]:
    """Loss and batches with the plan's fault in them."""
    if plan.fault is None:
        return loss, batches, None
    fault = PlantedFault(plan.fault, place.rank)
    return fault.slowed(loss), fault.delayed(batches), fault


def trained_identity(plan: RunPlan) -> dict[str, Any]:
    """What a checkpoint must have been trained with, by key; batch, ranks, rates and precision may change."""
    workload = plan.workload
    model = workload.model.model_dump(mode="json", exclude={"memory_format"})
    return {
        **{f"model.{key}": value for key, value in model.items()},
        "train.optimizer.name": workload.train.optimizer.name,
        "train.seed": workload.train.seed,
        "data.is_synthetic": workload.data.is_synthetic,
    }


def data_identity(source: BatchSource) -> dict[str, Any]:
    """What of a data set decides the sample order and its contents, for checkpoints; nothing for synthetic data."""
    if source.order is None:
        return {}
    described = source.describe()
    return {f"data.{key}": described[key] for key in ("kind", "num_samples", "index_sha256")}


def _resumed(
    plan: RunPlan, model: torch.nn.Module, optimizer: torch.optim.Optimizer, precision: Precision
) -> Checkpoint | None:
    if plan.checkpoint.resume_from is None:
        return None
    checkpoint = Checkpoint(find_checkpoint(Path(plan.checkpoint.resume_from)))
    checkpoint.require(trained_identity(plan))
    checkpoint.restore(model, optimizer)
    precision.restore(checkpoint.progress.loss_scaling)
    return checkpoint


def _source(
    plan: RunPlan, place: RankPlace, progress: Progress | None, reading: RankReading | None, device: torch.device
) -> tuple[BatchSource, int]:
    """The training data from where it goes on, and the steps done before, in steps of this plan's global batch."""
    train = plan.workload.train
    # With another global batch, steps before are counted as if they had been taken with this one.
    first = round(progress.samples / plan.global_batch) if progress else 0
    source = build_source(
        plan.workload.model,
        plan.workload.data,
        batch_size=train.batch_per_rank,
        rank=place.rank,
        world_size=place.size,
        seed=train.seed,
        start=progress.position if progress else None,
        start_batch=first,
        # Without page-locked memory a copy to the GPU cannot run beside computation.
        pin_memory=device.type == "cuda",
        reading=reading,
    )
    return source, first


def _told_of_resume(plan: RunPlan, resumed: Checkpoint | None, first: int) -> list[str]:
    if (
        resumed is None
        or resumed.progress.samples == first * plan.global_batch == resumed.progress.step * plan.global_batch
    ):
        return []
    return [
        f"resumed with another global batch ({plan.global_batch}): {resumed.progress.step} steps done before count as "
        f"{first}"
    ]

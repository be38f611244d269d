"""What a plan trains, built on one rank: device, network, optimizer, data, and where training begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dlbench.errors import EnvironmentLacksError, UserError
from dlbench.node.data.delivery import Delivery
from dlbench.node.data.loader import BatchSource
from dlbench.node.data.one_lister import Lister
from dlbench.node.data.rank_reading import EpochRest, RankReading
from dlbench.node.data.sample_exchange import Meeting
from dlbench.node.data.sharding import Position
from dlbench.node.data.source import build_source
from dlbench.node.models.build import Batch, Loss, build_model, loss_for
from dlbench.node.models.kernels import Kernels
from dlbench.node.models.optimizers import build_optimizer
from dlbench.node.models.schedule import LearningRate
from dlbench.node.ranks import RankPlace
from dlbench.node.rendezvous import own_address
from dlbench.node.sync.engine import Engine
from dlbench.node.training import phases, sanity
from dlbench.node.training.fault import PlantedFault
from dlbench.node.training.loop import Trainee
from dlbench.node.training.noise_scale import NoiseProbe
from dlbench.node.training.pauses.checkpoint import Checkpoint, Progress, find_checkpoint
from dlbench.node.training.phases import PhaseTimer
from dlbench.node.training.precision import Precision
from dlbench.node.training.staging import Staging
from dlbench.node.training.step_schedule import Course, plan_course
from dlbench.specs.plan import RunPlan
from dlbench.specs.sync import MGWFBP_STEPS
from dlbench.specs.workload import BertModel, ResNetModel

if TYPE_CHECKING:  # imported where a plan needs them: ranks in core start without
    from dlbench.node.memory.host_update import HostUpdate
    from dlbench.node.training.activations import ActivationMemory
    from dlbench.node.training.beginning.initial_weights import InitialWeights
    from dlbench.node.training.programs.compilation import Compilation
    from dlbench.node.training.programs.cuda_graphs import NetworkGraphs


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """One rank, ready to train."""

    trainee: Trainee
    model: torch.nn.Module
    """The network itself, without the engine's wrapper."""
    source: BatchSource
    course: Course
    resumed: Checkpoint | None
    staging: Staging | None
    """What was brought to the nodes; None where nothing was."""
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
    before_data: Callable[[torch.nn.Module], None] = lambda _: None,
    bring: Callable[[Progress | None], Staging | None] = lambda _: None,
    beat: Callable[[str], None] = lambda _what: None,
    stage: Callable[[str], None] = lambda _name: None,
    resume_from: str | None = None,
) -> Prepared:
    """Builds network, optimizer and data as planned; the engine makes all ranks' parameters equal.

    Args:
        plan: the run.
        place: this rank.
        engine: started already.
        device: where this rank computes.
        timer: told of the end of the backward pass, where the engine knows it.
        before_data: called with the network when everything is built but nothing of the data set has been touched.
        bring: called then with the progress of the checkpoint that is gone on from; stages the data.
        beat: told what moved while memory is measured, and while readers and page cache are settled.
        stage: told of the stages that it goes through.
        resume_from: a checkpoint, or a folder with some, in place of the plan's.

    Raises:
        UserError: the data set is not what the plan needs, or what it resumes from does not fit.
        EnvironmentLacksError: the device does not compute in the planned precision, or no plan fits its memory.
    """
    network = _network(plan, place, engine, device, timer, beat, stage)
    try:
        where = resume_from or plan.checkpoint.resume_from
        resumed = _resumed(plan, where, network.model, network.optimizer, network.precision)
        before_data(network.model)
        staging = bring(resumed.progress if resumed else None)
        data = _data(plan, place, engine, device, resumed, staging, beat)
        return _ready(plan, place, engine, device, network, data, resumed, staging)
    except BaseException:
        network.close()
        raise


@dataclass(frozen=True, kw_only=True)
class _Network:
    """What is trained, and how, before anything is known of data."""

    model: torch.nn.Module
    wrapped: torch.nn.Module
    """As the engine has it."""
    optimizer: torch.optim.Optimizer
    precision: Precision
    kernels: Kernels
    loss: Loss
    noise: NoiseProbe | None
    memory: ActivationMemory | None
    compilation: Compilation | None
    graphs: NetworkGraphs | None
    initial: InitialWeights | None
    """What weights were read; None on other ranks than the first."""

    def close(self) -> None:
        """Nothing of it holds a thread or a file any more."""
        if self.memory is not None:
            self.memory.close()


def _network(
    plan: RunPlan,
    place: RankPlace,
    engine: Engine,
    device: torch.device,
    timer: PhaseTimer,
    beat: Callable[[str], None],
    stage: Callable[[str], None],
) -> _Network:
    workload = plan.workload
    train = workload.train
    precision = Precision(train, device)
    kernels = Kernels(plan, device)
    if train.optimizer.is_compiled:
        from dlbench.node.training.programs.compilation import require_compiler

        require_compiler(device, "train.optimizer.implementation fused", "set it to foreach")
    torch.manual_seed(train.seed)
    model = kernels.placed(build_model(workload.model))
    initial: InitialWeights | None = None
    if plan.checkpoint.initialize_from is not None and place.rank == 0:  # the engine gives them to the other ranks
        from dlbench.node.training.beginning.initial_weights import load_initial

        initial = load_initial(plan.checkpoint.initialize_from, model)
    loss = loss_for(workload.model, label_smoothing=train.label_smoothing)
    compilation: Compilation | None = None
    memory: ActivationMemory | None = None
    graphs: NetworkGraphs | None = None
    if train.compile != "none":
        from dlbench.node.training.programs.compilation import Compilation

        compilation = Compilation(plan, device)
    if train.cuda_graphs != "none":
        from dlbench.node.training.programs.cuda_graphs import NetworkGraphs

        graphs = NetworkGraphs(plan, device)
    if not train.is_in_core:
        from dlbench.node.training.activations import activation_memory

        memory = activation_memory(
            *(plan, place, engine, model, device, precision, loss),
            wrap_block=compilation.block if compilation is not None else None,
            beat=beat,
            stage=stage,
        )
    if compilation is not None:
        compilation.set_budget(model, *_sampled(plan, device, model, loss, precision), beat)
    if graphs is not None:
        stage("compiling")
        loss_of, batch_of = _sampled(plan, device, model, loss, precision)
        graphs.capture(model, precision, loss_of, batch_of(train.batch_per_rank), beat)
        stage("building")
    # Before the engine's own hooks, which hand the gradient on.
    noise = NoiseProbe(model, train.gradient_accumulation) if plan.measure.noise_scale else None
    optimizer = build_optimizer(model, train.at_batch(plan.global_batch).optimizer)
    wrapped, optimizer = engine.prepare(
        model, optimizer, lambda: timer.mark(phases.BACKWARD), accumulation=train.gradient_accumulation
    )
    if compilation is not None and memory is None:
        stage("compiling")
        compilation.network(model, wrapped, *_sampled(plan, device, model, loss, precision), beat)
        stage("building")
        if noise is not None:
            noise.forget()
    return _Network(
        model=model,
        wrapped=wrapped,
        optimizer=optimizer,
        precision=precision,
        kernels=kernels,
        loss=kernels.counted(loss),
        noise=noise,
        memory=memory,
        compilation=compilation,
        graphs=graphs,
        initial=initial,
    )


def _sampled(
    plan: RunPlan, device: torch.device, model: torch.nn.Module, loss: Loss, precision: Precision
) -> tuple[Callable[[Batch], torch.Tensor], Callable[[int], Batch]]:
    """Forward pass and loss as in a step, and batches of the shapes that it has."""
    from dlbench.node.training.activations import sample_batches, sample_loss

    return sample_loss(model, loss, precision), sample_batches(plan, device)


@dataclass(frozen=True, kw_only=True)
class _Data:
    """What is trained on, and for how long."""

    source: BatchSource
    first: int
    """Steps done before, in steps of this plan's global batch."""
    course: Course
    reading: RankReading | None


def _data(
    plan: RunPlan,
    place: RankPlace,
    engine: Engine,
    device: torch.device,
    resumed: Checkpoint | None,
    staging: Staging | None,
    beat: Callable[[str], None],
) -> _Data:
    require_device_for_data(plan, device)
    progress = resumed.progress if resumed else None
    reading = None if plan.workload.data.is_synthetic else rank_reading(plan, place, engine, device, beat)
    source, first = _source(plan, place, engine, progress, staging, reading, device)
    try:
        if resumed is not None:
            resumed.require(data_identity(source))
        course = plan_course(
            plan,
            first=first,
            batches_per_epoch=source.order.batches_per_epoch if source.order else None,
            on_gpu=device.type == "cuda",
        )
    except BaseException:
        _close(source)
        raise
    return _Data(source=source, first=first, course=course, reading=reading)


def _close(source: BatchSource) -> None:
    source.close()
    if source.exchange is not None:
        source.exchange.close()


def _ready(
    plan: RunPlan,
    place: RankPlace,
    engine: Engine,
    device: torch.device,
    network: _Network,
    data: _Data,
    resumed: Checkpoint | None,
    staging: Staging | None,
) -> Prepared:
    """Network and data together."""
    train, source, reading = plan.workload.train, data.source, data.reading
    try:
        rate = LearningRate(train, global_batch=plan.global_batch, steps_per_epoch=data.course.steps_per_epoch)
    except BaseException:
        _close(source)
        raise
    loss, batches, fault = _planted(plan, place, network.loss, iter(source))
    host = _host_update(plan, network, device)
    trainee = Trainee(
        model=network.wrapped,
        optimizer=network.optimizer,
        loss=loss,
        engine=engine,
        batches=batches,
        device=device,
        train=train,
        rate=rate,
        precision=network.precision,
        rank=place.rank,
        noise=network.noise,
        fault=fault,
        host=host,
        rest=EpochRest(reading, source) if reading is not None and reading.is_epoch_by_epoch else None,
        memory=network.memory,
        compilation=network.compilation,
        graphs=network.graphs,
        kernels=network.kernels,
        delivery=_delivery(plan, device, batches, source),
        initial=network.initial,
    )
    staged = staging.warnings if staging is not None else ()
    return Prepared(
        trainee=trainee,
        model=network.model,
        source=source,
        course=data.course,
        resumed=resumed,
        staging=staging,
        warnings=(
            *network.precision.warnings,
            *staged,
            *_told_of_resume(plan, resumed, data.first),
            *(host.doubts if host is not None else ()),
            *sanity.planned_doubts(plan),
        ),
        reading=reading,
    )


def _delivery(plan: RunPlan, device: torch.device, batches: Iterator[Batch], source: BatchSource) -> Delivery | None:
    """What brings batches to a GPU; on a CPU there is nothing to copy."""
    if device.type != "cuda":
        return None
    data, model, decode = plan.workload.data, plan.workload.model, None
    if data.reader == "nvimagecodec":
        from dlbench.node.data.images import RegionDecoder

        assert isinstance(model, ResNetModel)  # the workload's validators hold this
        decode = RegionDecoder(device, model.image_size, is_whole=data.decode == "full", name=source.sample_name)
    return Delivery(batches, source.ahead, device, data.device_prefetch, decode)


def require_device_for_data(plan: RunPlan, device: torch.device) -> None:
    """Proves that the device can do what the plan asks of its input.

    Raises:
        EnvironmentLacksError: it is a CPU, to which nothing can be copied ahead, and which does not decode as a GPU.
    """
    ahead = plan.workload.data.device_prefetch
    if plan.workload.data.reader == "nvimagecodec":
        from dlbench.node.data.images import nvimagecodec

        if device.type != "cuda":
            raise EnvironmentLacksError(
                "data.reader is nvimagecodec, but this rank computes on its CPU: set data.reader to dlbench"
            )
        nvimagecodec()
    if device.type != "cuda" and ahead > 1:
        raise EnvironmentLacksError(
            f"data.device_prefetch is {ahead}, but this rank computes on its CPU, where nothing is copied"
        )


def _host_update(plan: RunPlan, network: _Network, device: torch.device) -> HostUpdate | None:
    """The update by the host, where that is planned; network and optimizer are as the first step finds them."""
    train = plan.workload.train
    if train.optimizer_state == "device":
        return None
    from dlbench.node.memory.host_update import HostUpdate, host_parameters

    return HostUpdate(
        network.model,
        network.optimizer,
        train.at_batch(plan.global_batch).optimizer,
        host_parameters((p for p in network.model.parameters() if p.requires_grad), device),
        overlaps=train.compile == "none",
        # Our own exchange arranges its buffers, of which gradients are parts, anew after some of its first steps.
        whole_steps=MGWFBP_STEPS if plan.sync.is_own else 0,
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


PATIENCE = 0.8
"""Of the time after which a rank counts as stalled, waited for a sample of another rank: so that its name is told."""

SHARED_BY = "data.ranks"
"""Key of a checkpoint's `trained`: the ranks among which samples were shared out. It may change at an epoch's end."""


def trained_identity(plan: RunPlan) -> dict[str, Any]:
    """What a checkpoint must have been trained with, by key; batch, ranks, rates and precision may change."""
    workload = plan.workload
    model = workload.model.model_dump(mode="json", exclude={"memory_format", "attention"})
    return {
        **{f"model.{key}": value for key, value in model.items()},
        "train.optimizer.name": workload.train.optimizer.name,
        "train.seed": workload.train.seed,
        "data.is_synthetic": workload.data.is_synthetic,
        **_shuffle_identity(plan),
    }


def _shuffle_identity(plan: RunPlan) -> dict[str, Any]:
    """What of a plan decides the order of samples, beside the data set; nothing for synthetic data."""
    data = plan.workload.data
    if data.is_synthetic:
        return {}
    if data.shuffle == "global":
        return {"data.shuffle": "global"}
    shuffle = f"partial:{data.exchanged_share:g}" if data.exchanged_share else "local"
    return {"data.shuffle": shuffle, "data.partition": data.partition}


def data_identity(source: BatchSource) -> dict[str, Any]:
    """What of a data set decides the sample order and its contents, for checkpoints; nothing for synthetic data."""
    if source.order is None:
        return {}
    described = source.describe()
    return {f"data.{key}": described[key] for key in ("kind", "num_samples", "index_sha256")}


def _resumed(
    plan: RunPlan, where: str | None, model: torch.nn.Module, optimizer: torch.optim.Optimizer, precision: Precision
) -> Checkpoint | None:
    if where is None:
        return None
    checkpoint = Checkpoint(find_checkpoint(Path(where)))
    checkpoint.require(trained_identity(plan))
    require_same_holders(plan, checkpoint)
    checkpoint.restore(model, optimizer)
    precision.restore(checkpoint.progress.loss_scaling)
    return checkpoint


def lister_for(plan: RunPlan, place: RankPlace, purpose: str) -> Lister:
    """Through which the ranks of this rank's node list the data for one purpose, e.g. training, once."""
    return Lister(
        name=f"{place.token} {place.node_rank} {purpose}",
        first_rank=place.rank - place.local_rank,
        local_rank=place.local_rank,
        local_size=place.local_size,
        timeout_s=plan.measure.stall_timeout_s,
    )


def _ranks_before(plan: RunPlan, checkpoint: Checkpoint) -> int:
    """How many ranks shared out the samples when the checkpoint was written; as now, where nobody holds any."""
    data = plan.workload.data
    if data.is_synthetic or data.shuffle == "global":
        return plan.layout.ranks
    return int(checkpoint.trained.get(SHARED_BY, plan.layout.ranks))


def require_same_holders(plan: RunPlan, checkpoint: Checkpoint) -> None:
    """Proves that the samples which each rank holds are those that it went on with, or that an epoch begins.

    Raises:
        UserError: within an epoch, with another number of ranks, and each reads what it holds.
    """
    before, progress = _ranks_before(plan, checkpoint), checkpoint.progress
    if before != plan.layout.ranks and progress.position.place:
        raise UserError(
            f"checkpoint.resume_from {checkpoint.path}: written within epoch {progress.position.epoch} by {before} "
            f"ranks, each of which has read a part of its own samples (data.shuffle {plan.workload.data.shuffle}); "
            f"{plan.layout.ranks} ranks can only go on from the end of an epoch (checkpoint.every_epochs)"
        )


def _source(
    plan: RunPlan,
    place: RankPlace,
    engine: Engine,
    progress: Progress | None,
    staging: Staging | None,
    reading: RankReading | None,
    device: torch.device,
) -> tuple[BatchSource, int]:
    """The training data from where it goes on, and the steps done before, in steps of this plan's global batch."""
    train = plan.workload.train
    # With another global batch, steps before are counted as if they had been taken with this one.
    first = round(progress.samples / plan.global_batch) if progress else 0
    model = plan.workload.model
    if isinstance(model, BertModel) and model.attention == "auto" and train.cuda_graphs != "none":
        # A captured step is replayed with the same arguments: some batches with a mask and some without do not fit.
        model = model.model_copy(update={"attention": "auto" if plan.workload.data.is_synthetic else "masked"})
    source = build_source(
        model,
        plan.workload.data,
        batch_size=train.batch_per_rank,
        rank=place.rank,
        world_size=place.size,
        seed=train.seed,
        start=progress.position if progress else None,
        start_batch=first,
        staged=staging.data if staging is not None else None,
        meeting=_meeting(plan, place, engine, staging),
        lister=lister_for(plan, place, "training"),
        # Without page-locked memory a copy to the GPU cannot run beside computation.
        pin_memory=device.type == "cuda",
        counts=device.type == "cuda",
        reading=reading,
        num_parts=train.gradient_accumulation,
        device=device,
    )
    return source, first


def _meeting(plan: RunPlan, place: RankPlace, engine: Engine, staging: Staging | None) -> Meeting | None:
    """How this rank exchanges samples; None where it does not."""
    if staging is None or plan.workload.data.staging != "shard" or place.size == 1:
        return None
    return Meeting(
        store=staging.data.store(place.rank),
        address=own_address(place.num_nodes == 1, plan.system.launch.interface),
        gather=engine.gather,
        patience_s=plan.measure.stall_timeout_s * PATIENCE,
    )


def _told_of_resume(plan: RunPlan, resumed: Checkpoint | None, first: int) -> list[str]:
    if resumed is None:
        return []
    told = []
    before = _ranks_before(plan, resumed)
    if before != plan.layout.ranks:
        told.append(
            f"resumed with {plan.layout.ranks} ranks after {before}: samples were shared out anew, so that each rank "
            "goes on with others than it held"
        )
    if not resumed.progress.samples == first * plan.global_batch == resumed.progress.step * plan.global_batch:
        told.append(
            f"resumed with another global batch ({plan.global_batch}): {resumed.progress.step} steps done before count "
            f"as {first}"
        )
    return told

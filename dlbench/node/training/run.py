"""A rank from plan to record: builds what the plan says, trains and measures it, gathers what all ranks saw.

`train` is the whole of it, in order: `prepare` (network, optimizer, where training begins, staging, data), the steps
(`TrainingLoop`) with what happens between them (`Pauses`), and what becomes of it (`run_record`).
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dlbench.errors import EnvironmentLacksError, RunError, UserError
from dlbench.node.data.delivery import Delivery
from dlbench.node.data.loader import BatchSource, EvaluationSource
from dlbench.node.data.one_lister import Lister
from dlbench.node.data.rank_reader import EpochBoundary, RankReading
from dlbench.node.data.sample_exchange import ExchangeEndpoint
from dlbench.node.data.source import build_evaluation, build_source
from dlbench.node.data.synthetic import SyntheticSource
from dlbench.node.failures import condensed
from dlbench.node.models.build import Batch, build_model, loss_for
from dlbench.node.models.kernels import Kernels
from dlbench.node.models.optimizers import LearningRate, build_optimizer
from dlbench.node.out_of_core.device_memory import (
    KEPT_FREED,
    fits_in_memory,
    keep_freed,
    largest_batch,
    missing_state_bytes,
    out_of_memory,
    trim,
)
from dlbench.node.out_of_core.held import StepMemory
from dlbench.node.rendezvous import own_address
from dlbench.node.sync.build_engine import exchange_memory
from dlbench.node.sync.run_store import interface_settings
from dlbench.node.training import phases
from dlbench.node.training.activations import ActivationMemory, activation_memory, sample_batches, sample_loss
from dlbench.node.training.checkpoint import (
    Checkpoint,
    Progress,
    data_identity,
    find_checkpoint,
    ranks_before,
    require_same_holders,
    trained_identity,
)
from dlbench.node.training.context import RankContext
from dlbench.node.training.initial_weights import InitialWeights, load_initial
from dlbench.node.training.loop import LoopResult, TrainingLoop
from dlbench.node.training.pauses import Pauses
from dlbench.node.training.precision import Precision
from dlbench.node.training.run_record import (
    make_record,
    parameters_digest,
    planned_warnings,
    rank_summary,
    sample_summary,
    shuffled,
)
from dlbench.node.training.staging import Staging, stage_data
from dlbench.node.training.state import InjectedFault, NoiseProbe, TrainState
from dlbench.node.training.step_schedule import Pacing, plan_schedule
from dlbench.records.files import write_json
from dlbench.records.interrupted import attempt_of
from dlbench.records.record import Record
from dlbench.specs.plan import RunPlan
from dlbench.specs.sync import ERROR_FEEDBACK, MGWFBP_STEPS

if TYPE_CHECKING:  # imported where a plan needs them: ranks in core start without
    from dlbench.node.out_of_core.host_update import HostUpdater
    from dlbench.node.training.programs import Compilation, NetworkGraphs

PATIENCE = 0.8  # Of the stall time-out: how long a sample of another rank is waited for, so that it can be named.


def train(context: RankContext) -> Record | None:
    """Trains, measures and writes; returns the record on rank 0, None elsewhere."""
    plan, engine, watch = context.plan, context.engine, context.watch
    watch.stage("building")
    torch.set_num_threads(context.binding.threads)
    timer = phases.timer_for(context.device, synchronise=plan.measure.phases == "synchronised")
    # The newest checkpoint that an earlier attempt at the run left. Rank 0 decides: listings of a shared folder may
    # differ between nodes for a while, and ranks that disagree would deadlock.
    folder, newest = context.folder, None
    if context.place.rank == 0 and attempt_of(folder) > 1 and any(folder.checkpoints.glob("step-*")):
        newest = str(find_checkpoint(folder.path))
    state = prepare(context, timer, engine.gather(newest)[0])
    schedule = state.schedule
    validation: EvaluationSource | None = None
    try:
        if schedule.evaluate_every is not None:
            validation = _open_validation(context, state)
        context.beat("opening the data")
        context.warnings += state.warnings
        context.status.expect(schedule.steps, schedule.warmup)
        watch.attach(
            *(state.model, engine, state.source, schedule, context.beat),
            computes=state.memory.computes if state.memory is not None else None,
            transfers=state.memory.spans if state.memory is not None else None,
        )
        startup_s = time.monotonic() - context.started - state.hashing_s
        pauses = Pauses(context, state, validation)
        pacing = Pacing(schedule, engine.gather, context.status.expect)
        seen = _train(context, state, timer, pauses, pacing)
        engine.end_training()
    except BaseException:
        state.close_exchange()
        raise
    finally:
        state.close()
        if validation is not None:
            validation.close()
    reached = (result := pauses.result()) is None or result.reached
    done = schedule.first + seen.steps
    context.events.add("run_stop", status="success" if reached else "aborted", epoch=schedule.epoch(done), step=done)
    failures = [*state.source.failures, *(validation.failures if validation else [])]
    own = rank_summary(context, state, seen, pacing, timer, startup_s, failures)
    exchange = engine.exchange_result()
    own |= {
        "watch": watch.summary(),
        "samples": sample_summary(state.source),
        "staging": state.staging.summary() if state.staging is not None else None,
    }
    everyone = engine.gather(own)
    state.close_exchange()
    if state.staging is not None:
        engine.barrier()  # nobody reads or receives what is staged any more
        state.staging.close()
    shuffle = shuffled(plan, state.source, [each["samples"] for each in everyone], engine.gather)
    reading = state.reading.settings() if state.reading is not None else []
    if isinstance(state.source, SyntheticSource):
        reading = state.source.settings(plan.workload.data)
    settings = [*engine.settings(), *shuffle.settings, *reading, *state.settings()]
    settings += pacing.settings(plan.measure, seen.step_s)
    settings += interface_settings(plan.system.launch.interface, context.place)
    if context.place.rank != 0:
        return None
    record = make_record(context, state, seen, pauses, everyone, exchange, settings, shuffle, timer.clock)
    write_json(context.folder.record, record.model_dump(mode="json"))
    return record


def prepare(context: RankContext, timer: phases.PhaseTimer, resume_from: str | None = None) -> TrainState:
    """Builds network, optimizer and data as planned; the engine makes all ranks' parameters equal."""
    plan, engine, device, stage = context.plan, context.engine, context.device, context.watch.stage
    workload, train = plan.workload, plan.workload.train
    allocator = None if context.on_gpu else keep_freed()  # of everything that is built and measured
    with ExitStack() as undo:
        precision, kernels = Precision(train, device), Kernels(plan, device)
        if train.optimizer.is_compiled:
            from dlbench.node.training.programs import require_compiler

            require_compiler(device, "train.optimizer.implementation fused", "set it to foreach")
        torch.manual_seed(train.seed)
        model = kernels.placed(build_model(workload.model))
        initial: InitialWeights | None = None
        if plan.checkpoint.initialize_from is not None and context.place.rank == 0:  # the engine gives them to others
            initial = load_initial(plan.checkpoint.initialize_from, model, workload.model)
        loss = loss_for(workload.model, label_smoothing=train.label_smoothing)
        loss_of, batch_of = sample_loss(model, loss, precision), sample_batches(plan, device)

        # What changes how the network computes or what it keeps.
        compilation: Compilation | None = None
        memory: ActivationMemory | None = None
        graphs: NetworkGraphs | None = None
        if train.compile != "none":
            from dlbench.node.training.programs import Compilation

            compilation = Compilation(plan, device)
        if train.cuda_graphs != "none":
            from dlbench.node.training.programs import NetworkGraphs

            graphs = NetworkGraphs(plan, device)
        if not train.is_in_core:
            wrap_block = compilation.block if compilation is not None else None
            memory = activation_memory(context, model, precision, loss, wrap_block, allocator)
            undo.callback(memory.close)
        if compilation is not None:
            compilation.set_budget(model, loss_of, batch_of, context.beat)
        if graphs is not None:
            stage("compiling")
            graphs.capture(model, precision, loss_of, batch_of(train.batch_per_rank), context.beat)
            stage("building")

        # The probe before the engine's own hooks, which hand the gradient on.
        noise = NoiseProbe(model, train.gradient_accumulation) if plan.measure.noise_scale else None
        optimizer = build_optimizer(model, train.at_batch(plan.global_batch).optimizer)
        engine.beat = context.beat
        wrapped, optimizer = engine.prepare(
            model, optimizer, lambda: timer.mark(phases.BACKWARD), accumulation=train.gradient_accumulation
        )
        if compilation is not None and memory is None:
            stage("compiling")
            compilation.network(model, wrapped, loss_of, batch_of, context.beat)
            stage("building")
            if noise is not None:
                noise.forget()

        resumed = _resumed(context, resume_from or plan.checkpoint.resume_from, model, optimizer, precision)
        # Parameters are as training will find them; hashing them is the check's business and in no figure.
        began = time.monotonic()
        context.beat("hashing the parameters")
        initial_digest = parameters_digest(model)
        hashing_s = time.monotonic() - began
        context.beat("building network and optimizer")
        engine.barrier()
        context.events.start_run()

        # The data, and what is done to them in which order.
        staging = stage_data(context, resumed.progress if resumed else None)
        _require_device_for_data(plan, context)
        reading = None if workload.data.is_synthetic else _rank_reading(context)
        source, first = _open_training(context, resumed.progress if resumed else None, staging, reading)
        if source.exchange is not None:
            undo.callback(source.exchange.close)
        undo.callback(source.close)
        if resumed is not None:
            resumed.require(data_identity(source))
        per_epoch = source.order.batches_per_epoch if source.order else None
        schedule = plan_schedule(plan, first=first, batches_per_epoch=per_epoch, on_gpu=context.on_gpu)
        if schedule.steps < 1:
            raise UserError(
                f"checkpoint.resume_from: {schedule.first} steps are done already, the plan ends after {schedule.end}; "
                "nothing is left to train"
            )
        engine.begin_training(schedule.first)
        rate = LearningRate(train, global_batch=plan.global_batch, steps_per_epoch=schedule.steps_per_epoch)
        loss, batches, fault = kernels.counted(loss), iter(source), None
        if plan.fault is not None:
            fault = InjectedFault(plan.fault, context.place.rank)
            loss, batches = fault.slowed(loss), fault.delayed(batches)
        host = _host_update(context, model, optimizer)
        state = TrainState(
            model=model,
            wrapped=wrapped,
            optimizer=optimizer,
            loss=loss,
            rate=rate,
            precision=precision,
            kernels=kernels,
            source=source,
            batches=batches,
            schedule=schedule,
            noise=noise,
            fault=fault,
            host=host,
            boundary=EpochBoundary(reading, source) if reading is not None and reading.is_epoch_by_epoch else None,
            memory=memory,
            held=None
            if memory is not None and context.on_gpu
            else StepMemory(engine.watch_memory, model, optimizer, device, exchange_memory(plan, model, device)),
            compilation=compilation,
            graphs=graphs,
            delivery=_delivery(context, batches, source),
            initial=initial,
            resumed=resumed,
            staging=staging,
            reading=reading,
            initial_digest=initial_digest,
            allocator=allocator,
            hashing_s=hashing_s,
            warnings=(
                *precision.warnings,
                *(staging.warnings if staging is not None else ()),
                *_resume_warnings(plan, resumed, first),
                *(host.doubts if host is not None else ()),
                *planned_warnings(plan),
            ),
        )
        undo.pop_all()
    if allocator == KEPT_FREED:
        trim()  # what only building took is no part of what training holds
    return state


def _resumed(
    context: RankContext, where: str | None, model: nn.Module, optimizer: torch.optim.Optimizer, precision: Precision
) -> Checkpoint | None:
    """What training goes on from, in network and optimizer; every rank has it from rank 0."""
    if where is None:
        return None
    engine, plan = context.engine, context.plan
    checkpoint = Checkpoint.on_all_ranks(
        Path(where),
        rank=context.place.rank,
        gather=engine.gather,
        broadcast=engine.broadcast,
        device=context.device,
        beat=context.beat,
    )
    checkpoint.require(trained_identity(plan))
    require_same_holders(plan, checkpoint)
    checkpoint.restore(model, optimizer, engine)
    precision.restore(checkpoint.progress.loss_scaling)
    return checkpoint


def _resume_warnings(plan: RunPlan, resumed: Checkpoint | None, first: int) -> list[str]:
    if resumed is None:
        return []
    found = []
    before = ranks_before(plan, resumed)
    if before != plan.replicas:
        found.append(
            f"resumed with {plan.replicas} ranks after {before}: samples were shared out anew, so that each rank "
            "goes on with others than it held"
        )
    if not resumed.progress.samples == first * plan.global_batch == resumed.progress.step * plan.global_batch:
        found.append(
            f"resumed with another global batch ({plan.global_batch}): {resumed.progress.step} steps done before count "
            f"as {first}"
        )
    if plan.sync.wire in ERROR_FEEDBACK:
        found.append(
            f"error feedback begins anew: a checkpoint holds nothing of what ranks had not sent (sync.wire "
            f"{plan.sync.wire}), so that losses differ from those of a run in one go"
        )
    return found


def _require_device_for_data(plan: RunPlan, context: RankContext) -> None:
    """Proves that the device can do what the plan asks of its input."""
    data = plan.workload.data
    if data.reader == "nvimagecodec":
        from dlbench.node.data.images import nvimagecodec

        if not context.on_gpu:
            raise EnvironmentLacksError(
                "data.reader is nvimagecodec, but this rank computes on its CPU: set data.reader to dlbench"
            )
        nvimagecodec()
    if not context.on_gpu and data.device_prefetch > 1:
        raise EnvironmentLacksError(
            f"data.device_prefetch is {data.device_prefetch}, but this rank computes on its CPU, where nothing is "
            "copied"
        )


def _rank_reading(context: RankContext) -> RankReading:
    """How this rank will read; settled with the other ranks when the data set is opened."""
    return RankReading(
        context.plan.workload.data,
        cores=context.plan.layout.cores_per_rank,
        is_node_first=context.place.local_rank == 0,
        ranks=context.engine,
        device=context.device,
        beat=context.beat,
    )


def _open_training(
    context: RankContext, progress: Progress | None, staging: Staging | None, reading: RankReading | None
) -> tuple[BatchSource, int]:
    """The training data from where it goes on, and the steps done before, in steps of this plan's global batch."""
    plan, place = context.plan, context.place
    data, train = plan.workload.data, plan.workload.train
    # With another global batch, steps before are counted as if they had been taken with this one.
    first = round(progress.samples / plan.global_batch) if progress else 0
    endpoint = None
    if staging is not None and data.staging == "shard" and place.size > 1:
        endpoint = ExchangeEndpoint(
            store=staging.data.store(place.rank),
            address=own_address(place.num_nodes == 1, plan.system.launch.interface),
            gather=context.engine.gather,
            patience_s=plan.measure.stall_timeout_s * PATIENCE,
        )
    model = plan.workload.model
    if train.cuda_graphs != "none":
        model = model.captured(data)
    source = build_source(
        model,
        data,
        batch_size=train.batch_per_rank,
        rank=place.rank,
        world_size=place.size,
        seed=train.seed,
        start=progress.position if progress else None,
        start_batch=first,
        staged=staging.data if staging is not None else None,
        endpoint=endpoint,
        lister=_lister_for(context, "training"),
        counts=data.keeps_counts(on_gpu=context.on_gpu),
        reading=reading,
        num_parts=train.gradient_accumulation,
        device=context.device,
        ranks_per_replica=plan.ranks_per_replica,
    )
    return source, first


def _open_validation(context: RankContext, state: TrainState) -> EvaluationSource:
    place, workload, replica = context.place, context.plan.workload, context.plan.ranks_per_replica
    return build_evaluation(
        workload.model,
        workload.data,
        max_samples=workload.quality.evaluate_samples if workload.quality else None,
        # No gradients are kept, so what fits training fits here.
        batch_size=workload.train.batch_per_rank * replica // workload.train.gradient_accumulation,
        rank=place.rank // replica,
        world_size=place.size // replica,
        seed=workload.train.seed,
        pin_memory=context.on_gpu,
        counts=workload.data.keeps_counts(on_gpu=context.on_gpu),
        staged=state.staging.data if state.staging is not None else None,
        lister=_lister_for(context, "evaluation"),
        readers=state.reading.readers if state.reading is not None else None,
    )


def _lister_for(context: RankContext, purpose: str) -> Lister:
    """Through which the ranks of this rank's node list the data for one purpose, e.g. training, once."""
    place = context.place
    return Lister(
        name=f"{place.token} {place.node_rank} {purpose}",
        first_rank=place.rank - place.local_rank,
        local_rank=place.local_rank,
        local_size=place.local_size,
        timeout_s=context.plan.measure.stall_timeout_s,
    )


def _delivery(context: RankContext, batches: Iterator[Batch], source: BatchSource) -> Delivery | None:
    """What brings batches to a GPU; on a CPU there is nothing to copy."""
    if not context.on_gpu:
        return None
    workload, decode = context.plan.workload, None
    if workload.data.reader == "nvimagecodec":
        from dlbench.node.data.images import RegionDecoder

        network: Any = workload.model  # of images, by the workload's validators
        is_whole = workload.data.decode == "full"
        decode = RegionDecoder(context.device, network.image_size, is_whole=is_whole, name=source.sample_name)
    return Delivery(batches, source.ahead, context.device, workload.data.device_prefetch, decode)


def _host_update(context: RankContext, model: nn.Module, optimizer: torch.optim.Optimizer) -> HostUpdater | None:
    """The update by the host, where that is planned; network and optimizer are as the first step finds them."""
    plan, train = context.plan, context.plan.workload.train
    if train.optimizer_state == "device":
        return None
    from dlbench.node.out_of_core.host_update import SETTING, HostUpdater, host_parameters
    from dlbench.node.out_of_core.planning import checkpoint_bytes
    from dlbench.node.page_locked import require_room

    place, spec = context.place, train.at_batch(plan.global_batch).optimizer
    kept = checkpoint_bytes(plan, place.rank, model)
    check_room = partial(require_room, what=SETTING, place=place, gather=context.engine.gather, checkpoint_bytes=kept)
    trained = (p for p in model.parameters() if p.requires_grad)
    parameters = host_parameters(trained, context.device, spec, check_room=check_room, beat=context.beat)
    return HostUpdater(
        model,
        optimizer,
        spec,
        parameters,
        overlaps=train.compile == "none",
        # Our own exchange arranges its buffers, of which gradients are parts, anew after some of its first steps.
        whole_steps=MGWFBP_STEPS if plan.sync.is_own else 0,
    )


def _train(
    context: RankContext, state: TrainState, timer: phases.PhaseTimer, pauses: Pauses, pacing: Pacing
) -> LoopResult:
    loop = TrainingLoop(context, state, timer, pauses, pacing)
    try:
        return loop.run(context.folder.node_steps(context.place.node_rank))
    except torch.OutOfMemoryError as error:
        words = condensed(str(error))
        traceback.clear_frames(error.__traceback__)  # they hold the activations
    finally:
        pauses.close()
    raise _out_of_memory(context, state, words, loop.result.startup_peak_bytes)


def _out_of_memory(context: RankContext, state: TrainState, words: str, startup_bytes: int | None) -> RunError:
    """The line that names the batch that fits, where that can be tried: in core, neither compiled nor captured."""
    plan, train = context.plan, context.plan.workload.train
    fit = None
    # Of a network that ranks share, no rank can try a pass alone.
    is_own = plan.engine.name != "fsdp" or plan.layout.ranks == 1
    if is_own and state.memory is None and state.compilation is None and state.graphs is None:
        loss = loss_for(plan.workload.model, train.label_smoothing)
        kept = 0 if state.host is not None else missing_state_bytes(state.model, state.optimizer, train.optimizer)
        passes = fits_in_memory(
            state.model,
            sample_loss(state.model, loss, state.precision),
            sample_batches(plan, context.device),
            context.device,
            kept,
            context.beat,
        )
        fit = largest_batch(passes, train.batch_per_rank // train.gradient_accumulation)
    return out_of_memory(
        *(words, fit),
        rank=context.place.rank,
        batch=train.batch_per_rank,
        accumulation=train.gradient_accumulation,
        startup_bytes=startup_bytes,
    )

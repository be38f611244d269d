"""A rank from plan to record: `Rank.train` runs everything in order; optional features are `TrainingPart`s."""

from __future__ import annotations

import time
import traceback
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import nn

from dlbench.errors import RunError, UserError
from dlbench.node.data.sample_exchange import SampleExchange
from dlbench.node.failures import condensed
from dlbench.node.models.build import build_model, loss_for
from dlbench.node.models.optimizers import LearningRate, build_optimizer
from dlbench.node.out_of_core.device_memory import (
    KEPT_FREED,
    StepMemory,
    fits_in_memory,
    keep_freed,
    largest_batch,
    missing_state_bytes,
    out_of_memory,
    trim,
)
from dlbench.node.part import Batch, Pacing, TrainingPart, plan_schedule
from dlbench.node.sync.build_engine import exchange_memory
from dlbench.node.training import phases
from dlbench.node.training.activations import ActivationMemory, trial_passes
from dlbench.node.training.checkpoint import (
    Checkpoint,
    data_identity,
    find_checkpoint,
    ranks_before,
    require_same_holders,
    trained_identity,
)
from dlbench.node.training.checks import parameters_digest, planned_warnings
from dlbench.node.training.context import RankContext
from dlbench.node.training.input_data import (
    batch_copier_of,
    open_training_data,
    open_validation_data,
    reading_of,
    stage_data,
    steps_before,
)
from dlbench.node.training.loop import LoopResult, TrainingLoop
from dlbench.node.training.optional_parts import InjectedFault, NoiseProbe, load_initial
from dlbench.node.training.pauses import Pauses
from dlbench.node.training.precision import Kernels, Precision
from dlbench.node.training.run_record import TrainedRank, shuffled
from dlbench.records.files import write_json
from dlbench.records.record import RankSummary, Record
from dlbench.records.status import attempt_of
from dlbench.specs.sync import ERROR_FEEDBACK, MGWFBP_STEPS

if TYPE_CHECKING:  # imported only if a plan updates on the host, so that other ranks start faster
    from dlbench.node.out_of_core.host_update import HostUpdater


class Rank(TrainedRank):
    """One rank of a run; `train` builds, trains, measures and records."""

    _exchange: SampleExchange | None = None  # Exchange of samples; it stays open until all ranks have trained.

    def __init__(self, context: RankContext, timer: phases.PhaseTimer | None = None) -> None:
        """`timer` marks the ends of phases; by default it is chosen by device and plan."""
        self.context, self.parts, self._closing = context, [], ExitStack()
        is_synchronised = context.plan.measure.phases == "synchronised"
        self.timer = timer or phases.timer_for(context.device, synchronise=is_synchronised)

    def train(self) -> Record | None:
        """Trains and measures; writes and returns the record on rank 0, and returns None on others."""
        self.context.watch.stage("building")
        torch.set_num_threads(self.context.binding.threads)
        try:
            self.prepare(self._interrupted_at())
            self.run_steps()
        except BaseException:
            self.close_exchange()
            raise
        finally:
            self.close()
        return self.record()

    def prepare(self, resume_from: str | None = None) -> Self:
        """Builds network and optimizer and opens the data; `resume_from` overrides the plan's checkpoint."""
        if not self.context.on_gpu:
            self.allocator = keep_freed()  # before anything is built and measured
        self.build_network()
        self.build_optimizer()
        self.resume(resume_from or self.context.plan.checkpoint.resume_from)
        self.open_data()
        if self.allocator == KEPT_FREED:
            trim()  # memory that only building used must not count as memory of training
        return self

    def build_network(self) -> None:
        """Builds the network, with the parts that change its precision, kernels, programs or activations."""
        context, plan, train = self.context, self.context.plan, self.context.plan.workload.train
        self.precision = Precision(train, context.device)
        self.add(self.precision)
        self._kernels = Kernels(plan, context.device)
        if train.optimizer.is_compiled:
            from dlbench.node.training.programs import require_compiler

            require_compiler(context.device, "train.optimizer.implementation fused", "set it to foreach")
        torch.manual_seed(train.seed)
        self.model = self._kernels.placed(build_model(plan.workload.model))
        if plan.checkpoint.initialize_from is not None and context.place.rank == 0:  # the engine broadcasts them
            self.initial_weights = load_initial(plan.checkpoint.initialize_from, self.model, plan.workload.model)
        self.loss = loss_for(plan.workload.model, train.label_smoothing)
        self.passes = trial_passes(
            *(plan, self.model, context.device, self.precision, self.loss), beat=context.beat, stage=context.watch.stage
        )
        self._add_network_parts()
        for part in self.parts:
            part.before_wrap(self.passes)

    def _add_network_parts(self) -> None:
        context, plan, train = self.context, self.context.plan, self.context.plan.workload.train
        programs: list[TrainingPart] = []
        wrap_block = None
        if train.compile != "none":
            from dlbench.node.training.programs import Compilation

            compilation = Compilation(plan, context.device)
            wrap_block = compilation.block
            programs.append(compilation)
        if train.cuda_graphs != "none":
            from dlbench.node.training.programs import NetworkGraphs

            programs.append(NetworkGraphs(plan, context.device, self.precision))
        self.memory: ActivationMemory | None = None
        if not train.is_in_core:
            self.memory = ActivationMemory.of_rank(context, self.passes, wrap_block, self.allocator)
            self.add(self.memory)
        for part in programs:
            self.add(part)
        if plan.measure.noise_scale:
            small = train.batch_per_rank // train.gradient_accumulation
            self.add(NoiseProbe(train.gradient_accumulation, small_batch=small, large_batch=plan.global_batch))

    def build_optimizer(self) -> None:
        """Builds the optimizer; the engine wraps it and the network, and makes parameters equal on all ranks."""
        plan, engine = self.context.plan, self.context.engine
        optimizer = build_optimizer(self.model, plan.workload.train.at_batch(plan.global_batch).optimizer)
        engine.beat, engine.forward, engine.trial_batch = self.context.beat, self._forward, self.passes.batch_of
        self.wrapped, self.optimizer = engine.prepare(
            self.model,
            optimizer,
            partial(self.timer.mark, phases.BACKWARD),
            accumulation=plan.workload.train.gradient_accumulation,
        )
        for part in self.parts:
            part.after_wrap(self.passes, self.wrapped)

    def _forward(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        with self.precision.autocast():
            return self.loss(module, batch)

    def _interrupted_at(self) -> str | None:
        """Returns the newest checkpoint of an earlier attempt, as rank 0 sees it; called by all ranks."""
        # Nodes may see different listings of a shared folder, and ranks that disagree would deadlock.
        folder, newest = self.context.folder, None
        if self.context.place.rank == 0 and attempt_of(folder) > 1 and any(folder.checkpoints.glob("step-*")):
            newest = str(find_checkpoint(folder.path))
        first: str | None = self.context.engine.gather(newest)[0]
        return first

    def resume(self, checkpoint: str | None) -> None:
        """Loads the checkpoint, if any, and ends initialisation."""
        context, engine, plan = self.context, self.context.engine, self.context.plan
        if checkpoint is not None:
            self.resumed = Checkpoint.on_all_ranks(
                Path(checkpoint),
                rank=context.place.rank,
                gather=engine.gather,
                broadcast=engine.broadcast,
                device=context.device,
                beat=context.beat,
            )
            self.resumed.require(trained_identity(plan))
            require_same_holders(plan, self.resumed)
            self.resumed.restore(self.model, self.optimizer, engine)
            self.precision.restore(self.resumed.progress.loss_scaling)
        # Hashing the initial parameters is part of the checks, and its time of no figure.
        began = time.monotonic()
        context.beat("hashing the parameters")
        with engine.holding_whole():
            self.initial_digest = parameters_digest(self.model)
        self.hashing_s = time.monotonic() - began
        context.beat("building network and optimizer")
        engine.barrier()
        context.events.start_run()

    def open_data(self) -> None:
        """Stages and opens the training data at the first step, and adds the parts that act on single steps."""
        context, plan, train = self.context, self.context.plan, self.context.plan.workload.train
        progress = self.resumed.progress if self.resumed is not None else None
        self.staging = stage_data(context, progress)
        if self.staging is not None:
            self.add(self.staging)
        context.warnings += self._resume_warnings()
        self.reading = reading_of(context)
        self.source = open_training_data(context, progress, self.staging, self.reading)
        self._exchange = self.source.exchange
        self._closing.callback(self.source.close)
        if self.resumed is not None:
            self.resumed.require(data_identity(self.source))
        per_epoch = self.source.order.batches_per_epoch if self.source.order else None
        first = steps_before(context, progress)
        self.schedule = plan_schedule(plan, first=first, batches_per_epoch=per_epoch, on_gpu=context.on_gpu)
        if self.schedule.steps < 1:
            raise UserError(
                f"checkpoint.resume_from: the checkpoint is of step {self.schedule.first}, and the plan ends after "
                f"step {self.schedule.end}: no steps remain"
            )
        context.engine.begin_training(self.schedule.first)
        self.rate = LearningRate(train, global_batch=plan.global_batch, steps_per_epoch=self.schedule.steps_per_epoch)
        self._add_step_parts()
        context.warnings += planned_warnings(plan)

    def _add_step_parts(self) -> None:
        context, plan = self.context, self.context.plan
        if self.memory is None or not context.on_gpu:
            exchange = exchange_memory(plan, self.model, context.device)
            self.add(StepMemory(context.engine.watch_memory, self.model, self.optimizer, context.device, exchange))
        if plan.workload.train.optimizer_state == "host":
            self.add(self._host_update())
        self.add(self._kernels)
        if plan.fault is not None:
            self.add(InjectedFault(plan.fault, context.place.rank))
        self.batches = iter(self.source)
        for part in self.parts:
            self.loss, self.batches = part.around_loss(self.loss), part.around_batches(self.batches)
        self.batch_copier = batch_copier_of(context, self.batches, self.source)
        if self.batch_copier is not None:
            self.add(self.batch_copier)

    def _host_update(self) -> HostUpdater:
        from dlbench.node.out_of_core.host_update import SETTING, HostUpdater, host_parameters
        from dlbench.node.out_of_core.planning import checkpoint_bytes
        from dlbench.node.page_locked import require_room

        context, plan, train = self.context, self.context.plan, self.context.plan.workload.train
        place, spec, gather = context.place, train.at_batch(plan.global_batch).optimizer, context.engine.gather
        needed = checkpoint_bytes(plan, place.rank, self.model)
        check_room = partial(require_room, purpose=SETTING, place=place, gather=gather, checkpoint_bytes=needed)
        trained = (parameter for parameter in self.model.parameters() if parameter.requires_grad)
        return HostUpdater(
            self.model,
            self.optimizer,
            spec,
            host_parameters(trained, context.device, spec, check_room=check_room, beat=context.beat),
            overlaps=train.compile == "none",
            # dlbench's exchange moves its buffers, of which gradients are views, after some of its first steps.
            whole_steps=MGWFBP_STEPS if plan.sync.is_own else 0,
        )

    def run_steps(self) -> None:
        context, engine, schedule = self.context, self.context.engine, self.schedule
        if schedule.evaluate_every is not None:
            self.validation = open_validation_data(context, self.staging, self.reading)
            self._closing.callback(self.validation.close)
        context.beat("opening the data")
        context.status.expect(schedule.steps, schedule.warmup)
        context.watch.attach(self.model, engine, self.source, schedule, context.beat, self.memory)
        self.startup_s = time.monotonic() - context.started - self.hashing_s
        self.pauses = Pauses(self, self.validation)
        self.pacing = Pacing(schedule, engine.gather, context.status.expect)
        self.steps = self._loop()
        engine.end_training()

    def _loop(self) -> LoopResult:
        loop = TrainingLoop(self, self.timer, self.pauses, self.pacing)
        try:
            return loop.run(self.context.folder.node_steps(self.context.place.node_rank))
        except torch.OutOfMemoryError as error:
            words = condensed(str(error))
            traceback.clear_frames(error.__traceback__)  # they hold the activations
        finally:
            self.pauses.close()
        raise self._out_of_memory(words, loop.result.startup_peak_bytes)

    def record(self) -> Record | None:
        """Gathers the summaries of all ranks and removes staged data; writes and returns the record on rank 0."""
        context, schedule, gather = self.context, self.schedule, self.context.engine.gather
        quality, done = self.pauses.result(), schedule.first + self.steps.steps
        status = "aborted" if quality is not None and not quality.reached else "success"
        context.events.add("run_stop", status=status, epoch=schedule.epoch(done), step=done)
        summary = self.summary()
        exchange = context.engine.exchange_result()
        # Ends sampling on this rank, without waiting for others.
        summary["watch"] = context.watch.summary()
        content = RankSummary.model_validate(summary).model_dump(mode="json")
        everyone = [RankSummary.model_validate(summary) for summary in gather(content)]
        self.close_exchange()
        if self.staging is not None:
            context.engine.barrier()  # no rank reads staged data any more
            self.staging.remove()
        shuffle = shuffled(context.plan, self.source, [rank.samples for rank in everyone], gather)
        settings = self.settings(shuffle)
        if context.place.rank != 0:
            return None
        record = self.make_record(everyone, exchange, settings, shuffle)
        write_json(context.folder.record, record.model_dump(mode="json"))
        return record

    def add(self, part: TrainingPart) -> None:
        """Adds a part and its warnings; the part is closed when training ends."""
        self.parts.append(part)
        self._closing.callback(part.close)
        self.context.warnings += part.early_warnings

    def close(self) -> None:
        """Ends threads and processes, except the exchange of samples, and keeps staged data."""
        self._closing.close()

    def close_exchange(self) -> None:
        """Ends the exchange of samples, after all ranks have trained or this one failed."""
        if self._exchange is not None:
            self._exchange.close()

    def _resume_warnings(self) -> list[str]:
        plan, resumed = self.context.plan, self.resumed
        if resumed is None:
            return []
        warnings = []
        before, first = ranks_before(plan, resumed), steps_before(self.context, resumed.progress)
        if before != plan.replicas:
            warnings.append(
                f"resumed with {plan.replicas} ranks after {before}: samples were distributed again, so that each rank "
                "continues with other samples than before"
            )
        if not resumed.progress.samples == first * plan.global_batch == resumed.progress.step * plan.global_batch:
            warnings.append(
                f"resumed with another global batch ({plan.global_batch}): {resumed.progress.step} steps done before "
                f"count as {first}"
            )
        if plan.sync.wire in ERROR_FEEDBACK:
            warnings.append(
                "error feedback restarts at zero: checkpoints do not contain what ranks had not yet sent (sync.wire "
                f"{plan.sync.wire}), so that losses differ from those of a run without interruption"
            )
        return warnings

    def _out_of_memory(self, words: str, startup_bytes: int | None) -> RunError:
        """Returns an error that names the largest batch that fits, if this rank can try one."""
        context, plan, train = self.context, self.context.plan, self.context.plan.workload.train
        fit = None
        # If ranks share the network or volumes, one rank cannot try a pass alone.
        is_sharded = (plan.engine.name == "fsdp" and plan.layout.ranks > 1) or plan.ranks_per_replica > 1
        if not is_sharded and train.is_in_core and not train.is_one_program:
            state_bytes = 0
            if train.optimizer_state == "device":
                state_bytes = missing_state_bytes(self.model, self.optimizer, train.optimizer)
            trial = self.passes
            limits = context.device, state_bytes, context.beat
            fit = largest_batch(fits_in_memory(self.model, trial.loss_of, trial.batch_of, *limits), trial.samples)
        return out_of_memory(
            *(words, fit),
            rank=context.place.rank,
            batch=train.batch_per_rank,
            accumulation=train.gradient_accumulation,
            startup_bytes=startup_bytes,
        )

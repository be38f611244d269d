"""The measured loop: plain training with time stamps between its phases, the same code in the warm-up."""

from __future__ import annotations

import functools
import hashlib
import itertools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dlbench.node.data.text import parts
from dlbench.node.garbage import COLLECT_EVERY, HeldGarbage
from dlbench.node.out_of_core.device_memory import peak_bytes, restart_peaks
from dlbench.node.part import Batch, Pacing, hooks_of
from dlbench.node.training import phases
from dlbench.node.training.context import TrainState
from dlbench.node.training.pauses import Pauses, stop_check_interval
from dlbench.node.training.phases import PhaseTimer, StepTimes
from dlbench.records.rows.steps import StepWriter
from dlbench.specs.launch import WARNING_S


@dataclass(kw_only=True)
class LoopResult:
    """Losses, times and peaks of memory of this rank's steps."""

    measured_samples: int = 0
    measured_ns: int = 0
    spent_ns: int = 0  # Time of all steps, warm-up included.
    losses: list[float] = field(default_factory=list)
    steps: int = 0
    step_s: list[float] = field(default_factory=list)  # Duration of every step, warm-up included, seconds.
    garbage: HeldGarbage = field(default_factory=HeldGarbage)
    startup_peak_bytes: int | None = None  # Peak before the measured steps; None if none was measured.
    has_own_peaks: bool = False  # True if peaks of resident memory count from the first measured step on.


class TrainingLoop:
    """Runs the steps and writes their times."""

    _writer: StepWriter

    def __init__(
        self, state: TrainState, timer: PhaseTimer, pauses: Pauses | None = None, pacing: Pacing | None = None
    ) -> None:
        """`pauses` acts between steps, and `pacing` decides the number of steps, if they are not None."""
        context = state.context
        self._context, self._state, self._train = context, state, context.plan.workload.train
        self._timer, self._schedule = timer, state.schedule
        self._replica = context.replica  # Its ranks draw the same dropout.
        self._before_forward = hooks_of(state.parts, "before_forward")
        self._settle = hooks_of(state.parts, "settle")
        self._before_update = hooks_of(state.parts, "before_update")
        self._end_step = hooks_of(state.parts, "end_step")
        self._is_queued = timer.clock == "cuda-events"  # The device runs work that the host queues: it may wait for it.
        self._pauses, self._pacing = pauses, pacing
        self._mark_forward = functools.partial(timer.mark, phases.FORWARD)
        self._maintenance_interval = COLLECT_EVERY  # Measured steps between two collections and checks for a stop.
        self._is_measuring = False
        self.result = LoopResult()
        self._garbage = self.result.garbage
        self._collected = 0  # Steps of this run when garbage was last collected.

    def run(self, path: Path) -> LoopResult:
        """Runs all steps; afterwards the step file of the node is complete on disk."""
        context = self._context
        header = {"rank": context.place.rank, "clock": self._timer.clock, "device": context.device.type}
        header["run_id"] = context.plan.run_id
        with StepWriter(path, header, launches=self._is_queued) as self._writer:
            try:
                self._all_steps()
            finally:
                self._garbage.release()
            context.watch.end_training()
            self._writer.sync()
        return self.result

    def _all_steps(self) -> None:
        timer, schedule = self._timer, self._schedule
        for step in itertools.count():
            if step == schedule.steps:  # the warm-up may lengthen it
                break
            # Files first, and the barrier directly before the clock: a slow file system must not stagger the ranks.
            self._context.beat(f"the start of step {step}")
            self._context.status.on_step(step)
            if step <= schedule.warmup:
                self._before_warmup(step)
            # Dropout depends on seed, replica and step alone, so that a resumed run draws the same.
            seed = _step_seed(self._train.seed, self._replica.number, schedule.first + step)
            # Not `torch.manual_seed`, which without a GPU takes 0.2 ms: torch keeps the caller's stack for later.
            torch.default_generator.manual_seed(seed)
            if self._context.on_gpu:
                torch.cuda.manual_seed(seed)
            timer.begin()
            samples, loss = self._step(schedule.first + step)
            timer.finish(samples, loss)
            self._record_steps(timer.collect(wait=False))
            if self._ends_after(schedule.first + step + 1):
                break
        self._drain()
        if not self._is_measuring:  # the target was met in the warm-up
            self._close_windows()

    def _before_warmup(self, step: int) -> None:
        """Opens and closes windows of profiling before a step of the warm-up, and before the first measured one."""
        schedule, watch = self._schedule, self._context.watch
        while self._pacing is not None and self._pacing.is_due(step):
            self._drain()
            self._pacing.agree(self.result.step_s)
            self._context.engine.barrier()
        if step == schedule.warmup:
            self._enter_measurement()
            return
        is_edge = bool(schedule.window) and step in (schedule.window.start, schedule.window.stop)
        is_held = self._is_queued and step == schedule.held.start and bool(schedule.held)
        if is_edge or is_held or step == schedule.watch_from:
            self._drain()
            self._garbage.hold()
            if is_held and self._context.on_gpu:
                # Drops the workspaces of cuDNN's search and of compilers, which measured steps do not need; the
                # remaining steps of the warm-up fill torch's cache again.
                torch.cuda.empty_cache()
            self._timer.hold(is_held)
        # Before a profile begins: torch crashes if one is open while another ends.
        for part in self._state.parts:
            part.before_warmup(step, schedule)
        watch.before_warmup(step)
        if is_edge or is_held or step == schedule.watch_from:
            # Ranks need different times for hooks and garbage, which must not count as waiting in an exchange.
            self._context.engine.barrier()
        if step == schedule.watch_from:
            self._context.engine.watch(True)

    def _close_windows(self) -> None:
        self._context.engine.watch(False)
        for part in self._state.parts:
            part.close_window()
        self._context.watch.close_window()

    def _enter_measurement(self) -> None:
        self._drain()
        self._close_windows()
        self._is_measuring = True
        before = max((part.peak_before for part in self._state.parts), default=0)
        self.result.startup_peak_bytes = max(before, peak_bytes(self._context.device))
        self.result.has_own_peaks = restart_peaks(self._context.device)
        for part in self._state.parts:
            part.begin_measuring()
        self._garbage.begin_measuring()
        self._collected = self._schedule.warmup
        warning_s = self._context.plan.system.slurm.warning_s or WARNING_S
        self._maintenance_interval = stop_check_interval(warning_s, self.result.step_s, self._context.engine.gather)
        self._context.watch.begin_measuring()
        self._context.engine.barrier()

    def _drain(self) -> None:
        """Ends the last step with its update, and waits until its times are known and written."""
        for settle in self._settle:
            settle()
        self._timer.close()
        self._record_steps(self._timer.collect(wait=True))
        self._writer.flush()

    def _ends_after(self, done: int) -> bool:
        """Evaluates, saves, empties caches and collects garbage after `done` steps; returns True if training ends."""
        state, schedule = self._state, self._schedule
        if self._pauses is not None:
            self._pauses.writer.require_well()
        is_new_epoch = done < schedule.end and state.source.is_between_epochs  # after the same step on all ranks
        has_pause = self._pauses is not None and (schedule.stops(done) or schedule.ends_epoch(done))
        is_collection_due = (
            self._is_measuring
            and done < schedule.end
            and done - schedule.first - self._collected >= self._maintenance_interval
        )
        # The end of an epoch is only noted; the device need not be waited for.
        is_interrupted = is_new_epoch or is_collection_due or (has_pause and schedule.stops(done))
        interruption: AbstractContextManager[object] = nullcontext()
        if is_interrupted:
            self._drain()
            self._context.watch.leave_step()
            self._collected = done - schedule.first
            interruption = self._garbage.between_steps()
        with interruption:
            ends = has_pause and self._pauses is not None and self._pauses(done, self.result.spent_ns / 1e9)
            if state.reading is not None and is_new_epoch and not ends:
                with self._context.watch.pause("cold cache"):
                    state.reading.between_epochs()
                    state.source.begin_epoch()
            if is_interrupted and not ends and self._pauses is not None:
                self._pauses.check_preemption(done, self.result.spent_ns / 1e9)
        if is_interrupted:
            self._context.engine.barrier()
        return ends

    def _step(self, step: int) -> tuple[int, torch.Tensor]:
        state, timer = self._state, self._timer
        self._context.engine.begin_step(state.rate.at(step))
        batch = self._batch()
        loss = self._context.engine.run_passes(batch, self._gradients, self._mark_forward)
        self._context.engine.finish_exchange()
        timer.mark(phases.EXCHANGE)
        # An optimizer that is compiled in its first update takes minutes; the stall timeout starts again for it.
        self._context.beat(f"the exchange of step {step - self._schedule.first}")
        timer.hold_back()
        self._update(step)
        timer.mark(phases.OPTIMIZER)
        if self._context.engine.exchange_parameters():
            timer.mark(phases.EXCHANGE)
        if state.batch_copier is not None and state.batch_copier.look_ahead():
            timer.mark(phases.INPUT)  # the device was idle because the next batch was not on the host
        for end_step in self._end_step:
            end_step()
        # Each rank of a replica counts its share of the replica's samples.
        return next(iter(batch.values())).size(0) // len(self._replica.ranks), loss

    def _batch(self) -> Batch:
        """Returns the step's batch on the device; the part of its copy that is not hidden counts as h2d."""
        state, timer = self._state, self._timer
        if state.batch_copier is None:
            batch = next(state.batches)
            timer.mark(phases.INPUT)
            batch = {name: tensor.to(self._context.device, non_blocking=True) for name, tensor in batch.items()}
        else:
            state.batch_copier.fetch()
            timer.mark(phases.INPUT)
            batch = state.batch_copier.deliver()
        timer.mark(phases.H2D)
        return batch

    def _gradients(self, batch: Batch) -> torch.Tensor:
        """Runs forward and backward passes over the parts of a batch; returns its mean loss."""
        state, timer = self._state, self._timer
        num_parts = self._train.gradient_accumulation
        losses: list[torch.Tensor] = []
        for number, part in enumerate(parts(batch, num_parts)):
            is_last = number == num_parts - 1
            if number:
                self._context.beat(f"backward pass {number} of a step")
            exchanging: AbstractContextManager[object] = nullcontext()
            if not is_last:
                exchanging = self._context.engine.hold_exchange()
            with exchanging:
                for before_forward in self._before_forward:
                    before_forward()
                timer.hold_back()
                with state.precision.autocast():
                    loss = state.loss(state.wrapped, part)
                    if num_parts > 1:
                        loss = loss / num_parts
                for settle in self._settle:  # e.g. parameters that no module waited for
                    settle()
                timer.mark(phases.FORWARD)
                timer.hold_back()
                if is_last:
                    self._context.engine.begin_backward()
                state.precision.backward(loss)
                if not (is_last and self._context.engine.marks_backward):
                    timer.mark(phases.BACKWARD)
            losses.append(loss.detach())
        return functools.reduce(torch.add, losses)

    def _update(self, step: int) -> None:
        state = self._state
        state.precision.unscale(state.optimizer)
        for before_update in self._before_update:
            before_update(state.precision.scale_in_force)
        clip = self._train.optimizer.clip_norm
        if clip is not None:
            # After the exchange, so that the norm is that of the averaged gradient (BERT's rule).
            self._context.engine.clip(state.wrapped.parameters(), clip)
        rate = state.rate.at(step)
        for group in state.optimizer.param_groups:
            group["lr"] = rate
        self._context.engine.step(state.precision.update)
        state.optimizer.zero_grad()

    def _record_steps(self, done: list[StepTimes]) -> None:
        result = self.result
        for step in done:
            samples, loss, step_ns = step.samples, step.loss, step.step_ns
            warmup = result.steps < self._schedule.warmup
            times = (step.start_ns, step_ns, *step.phases)
            self._writer.append((result.steps, int(warmup), *times, samples, loss, *step.launch))
            result.steps += 1
            result.losses.append(loss)
            result.spent_ns += step_ns
            result.step_s.append(step_ns / 1e9)
            if not warmup:
                result.measured_samples += samples
                result.measured_ns += step_ns


def _step_seed(seed: int, replica: int, step: int) -> int:
    digest = hashlib.blake2b(f"{seed} {replica} {step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

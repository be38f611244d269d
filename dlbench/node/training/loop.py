"""The measured loop: plain training with time stamps between its phases.

Warm-up and measured steps run the same code; only the mark in the step file differs. On a GPU the loop adds no
synchronisation to steps unless the plan asks for the synchronised phase mode; between steps it waits for the device
where training pauses, and to collect garbage every `COLLECT_EVERY` steps.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from dlbench.node.data.delivery import Delivery
from dlbench.node.data.packing import parts
from dlbench.node.data.reading.rank_reading import EpochRest
from dlbench.node.garbage import COLLECT_EVERY, HeldGarbage
from dlbench.node.memory.peaks import restart_peaks
from dlbench.node.models.kernels import Kernels
from dlbench.node.models.schedule import LearningRate
from dlbench.node.sync.engine import Engine
from dlbench.node.training import phases
from dlbench.node.training.fault import PlantedFault
from dlbench.node.training.instruments import RankWatch
from dlbench.node.training.noise_scale import NoiseProbe
from dlbench.node.training.pacing import Pacing
from dlbench.node.training.pauses.stop_request import looks_every
from dlbench.node.training.phases import PhaseTimer, StepTimes
from dlbench.node.training.precision import Precision
from dlbench.node.training.step_schedule import Course
from dlbench.records.record import Setting
from dlbench.records.rows.steps import StepWriter
from dlbench.specs.launch import WARNING_S
from dlbench.specs.training import TrainSpec

if TYPE_CHECKING:  # imported where a plan needs them: ranks in core start without
    from dlbench.node.memory.host_update import HostUpdate
    from dlbench.node.training.activations import ActivationMemory
    from dlbench.node.training.beginning.initial_weights import InitialWeights
    from dlbench.node.training.programs.compilation import Compilation
    from dlbench.node.training.programs.cuda_graphs import NetworkGraphs

Batch = dict[str, torch.Tensor]

Pause = Callable[[int, float], bool]
"""Called between two steps with the steps done so far and the seconds spent in this run's steps; True ends training."""


GiveWay = Callable[[int, float], None]
"""The same; raises `StoppedEarlyError` on all ranks if any was told to stop."""


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """Everything that is trained, ready to step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    engine: Engine
    batches: Iterator[Batch]
    device: torch.device
    train: TrainSpec
    rate: LearningRate
    precision: Precision
    rank: int = 0
    noise: NoiseProbe | None = None
    fault: PlantedFault | None = None
    host: HostUpdate | None = None
    """Updates parameters; None where the device does."""
    rest: EpochRest | None = None
    """What happens between two epochs, where something does."""
    memory: ActivationMemory | None = None
    """How activations are treated; None where they are left to autograd."""
    compilation: Compilation | None = None
    """What is compiled; None where nothing is."""
    graphs: NetworkGraphs | None = None
    """The network's CUDA graphs; None where nothing is captured."""
    kernels: Kernels | None = None
    """Chooses among kernels; None where nobody asks."""
    delivery: Delivery | None = None
    """Brings the batches to the device; None on CPUs, where they stay."""
    initial: InitialWeights | None = None
    """What weights were read to begin with; None where none were, and on other ranks than the first."""

    def settings(self) -> list[Setting]:
        """What was asked for of memory, compiler, update, kernels, copies and first weights, and what is in force."""
        parts = (self.memory, self.compilation, self.graphs, self.host, self.kernels, self.delivery, self.initial)
        return [setting for part in parts if part is not None for setting in part.settings()]


@dataclass(kw_only=True)
class LoopResult:
    """What the loop saw on this rank."""

    measured_samples: int = 0
    measured_ns: int = 0
    spent_ns: int = 0
    """In all steps, warm-up included."""
    losses: list[float] = field(default_factory=list)
    steps: int = 0
    step_s: list[float] = field(default_factory=list)
    """Of every step, warm-up included, seconds."""
    garbage: HeldGarbage = field(default_factory=HeldGarbage)
    has_own_peaks: bool = False
    """Whether peaks of resident memory are those from the first measured step on, and not the whole process's."""


class TrainingLoop:
    """Runs the steps and writes their times."""

    def __init__(
        self,
        trainee: Trainee,
        timer: PhaseTimer,
        writer: StepWriter,
        course: Course,
        on_step: Callable[[int], None],
        pause: Pause | None = None,
        watch: RankWatch | None = None,
        pacing: Pacing | None = None,
        give_way: GiveWay | None = None,
        warn_before_s: float = WARNING_S,
    ) -> None:
        """`on_step` is told each step's number in this run before it begins (progress, watchdog).

        `pacing` settles how many steps there are; None where the course says it.
        `give_way` is called where training stands still and goes on.
        `warn_before_s`: how long before the end of the job it may be told to stop, seconds.
        `watch` is told of every place where its window begins or ends; measured steps carry nothing of it.
        """
        self._trainee = trainee
        self._timer = timer
        self._writer = writer
        self._course = course
        self._on_step = on_step
        self._pause = pause
        self._watch = watch
        self._pacing = pacing
        self._give_way = give_way
        self._warn_before_s = warn_before_s
        self._stands_every = COLLECT_EVERY
        """Measured steps after which training stands still, to collect garbage and to look whether it is to stop."""
        self._is_measuring = False
        self._result = LoopResult()
        self._garbage = self._result.garbage
        self._collected = 0
        """Steps of this run when garbage was last collected."""

    def run(self) -> LoopResult:
        """All steps; afterwards every step is in the step file."""
        try:
            self._all_steps()
        finally:
            self._garbage.release()
        if self._watch is not None:
            self._watch.end_training()
        return self._result

    def _all_steps(self) -> None:
        timer, course = self._timer, self._course
        for step in itertools.count():
            if step == course.steps:  # the warm-up may lengthen it
                break
            # Files first, then the barrier, directly before the clock: a slow file system must not stagger the ranks.
            self._on_step(step)
            if step <= course.warmup:
                self._before_warmup(step)
            # Dropout that depends on nothing but seed, rank and step: a resumed run draws the same.
            _seed(self._trainee.device, _step_seed(self._trainee.train.seed, self._trainee.rank, course.first + step))
            timer.begin()
            samples, loss = self._step(course.first + step)
            timer.finish(samples, loss)
            self._keep(timer.collect(wait=False))
            if self._ends_after(course.first + step + 1):
                break
        self._drain()
        if not self._is_measuring:  # the target was met in the warm-up
            self._close_windows()

    def _before_warmup(self, step: int) -> None:
        """Before a step of the warm-up, and before the first measured one: windows open and close outside of steps."""
        course, watch = self._course, self._watch
        while self._pacing is not None and self._pacing.is_due(step):
            self._drain()
            self._pacing.agree(self._result.step_s)
            self._trainee.engine.barrier()
        if step == course.warmup:
            self._enter_measurement()
            return
        is_edge = bool(course.window) and step in (course.window.start, course.window.stop)
        on_device = self._trainee.device.type != "cpu"
        is_held = on_device and step == course.held.start and bool(course.held)
        if is_edge or is_held or step == course.watch_from:
            self._drain()
            self._garbage.hold()
            self._timer.hold(is_held)
        if watch is not None:
            watch.before_warmup(step)
        if self._trainee.memory is not None:
            self._trainee.memory.before_warmup(step, course)
        if is_edge or is_held or step == course.watch_from:
            # Ranks take unlike long to put hooks on and off and to collect garbage, which must not count as waiting in
            # an exchange.
            self._trainee.engine.barrier()
        if step == course.watch_from:
            self._trainee.engine.watch(True)

    def _close_windows(self) -> None:
        """The engine no longer watches its exchange, and nothing watches layers or transfers."""
        self._trainee.engine.watch(False)
        if self._trainee.memory is not None:
            self._trainee.memory.close_window()
        if self._watch is not None:
            self._watch.close_window()

    def _enter_measurement(self) -> None:
        """All ranks begin the measured steps together, and none of them watches any more."""
        self._drain()
        self._close_windows()
        self._is_measuring = True
        if self._trainee.fault is not None:
            self._trainee.fault.measuring()
        self._result.has_own_peaks = restart_peaks(self._trainee.device)
        for beginning in (self._trainee.memory, self._trainee.compilation, self._trainee.host):
            if beginning is not None:
                beginning.begin_measuring()
        self._garbage.begin_measuring()
        self._collected = self._course.warmup
        self._stands_every = looks_every(self._warn_before_s, self._result.step_s, self._trainee.engine.gather)
        if self._watch is not None:
            self._watch.begin_measuring()
        self._trainee.engine.barrier()

    def _drain(self) -> None:
        """Ends the last step, its update included, and waits until its times are known and written."""
        if self._trainee.host is not None:
            self._trainee.host.settle()
        self._timer.close()
        self._keep(self._timer.collect(wait=True))
        self._writer.flush()

    def _ends_after(self, done: int) -> bool:
        """Evaluations, checkpoints, the emptying of caches and the collection of garbage, outside of steps' times."""
        rest, course = self._trainee.rest, self._course
        rests = rest is not None and done < course.end and rest.is_due
        pauses = self._pause is not None and (course.stops(done) or course.ends_epoch(done))
        collects = (
            self._is_measuring and done < course.end and done - course.first - self._collected >= self._stands_every
        )
        stops = rests or collects or (pauses and course.stops(done))
        if stops:  # the end of an epoch is only noted; the device need not be waited for
            self._drain()
            if self._watch is not None:
                self._watch.leave_step()
            self._collected = done - course.first
        with self._garbage.between_steps() if stops else nullcontext():
            ends = pauses and self._pause is not None and self._pause(done, self._result.spent_ns / 1e9)
            if rest is not None and rests and not ends:
                with self._watch.pause("cold cache") if self._watch is not None else nullcontext():
                    rest.take()
            if stops and not ends and self._give_way is not None:
                self._give_way(done, self._result.spent_ns / 1e9)
        if stops:
            self._trainee.engine.barrier()
        return ends

    def _step(self, step: int) -> tuple[int, torch.Tensor]:
        trainee, timer = self._trainee, self._timer
        batch = self._batch()
        loss = self._gradients(batch)
        trainee.engine.finish_exchange()
        timer.mark(phases.EXCHANGE)
        timer.hold_back()
        self._update(step)
        timer.mark(phases.OPTIMIZER)
        if trainee.delivery is not None and trainee.delivery.look_ahead():
            timer.mark(phases.INPUT)  # what the device idled while the next batch was not on the host
        if trainee.fault is not None:
            trainee.fault.end_step()
        return len(next(iter(batch.values()))), loss

    def _batch(self) -> Batch:
        """The step's batch on the device; what of its copy is not hidden counts as h2d."""
        trainee, timer = self._trainee, self._timer
        if trainee.delivery is None:
            batch = next(trainee.batches)
            timer.mark(phases.INPUT)
            batch = {name: tensor.to(trainee.device, non_blocking=True) for name, tensor in batch.items()}
        else:
            trainee.delivery.fetch()
            timer.mark(phases.INPUT)
            batch = trainee.delivery.deliver()
        timer.mark(phases.H2D)
        return batch

    def _gradients(self, batch: Batch) -> torch.Tensor:
        """Forward and backward passes over the parts of a batch; returns its mean loss."""
        trainee, timer = self._trainee, self._timer
        num_parts = trainee.train.gradient_accumulation
        total = torch.zeros((), device=trainee.device)
        for number, part in enumerate(parts(batch, num_parts)):
            is_last = number == num_parts - 1
            with nullcontext() if is_last else trainee.engine.hold_exchange():
                if trainee.host is not None:
                    trainee.host.before_forward()
                timer.hold_back()
                with trainee.precision.autocast():
                    loss = trainee.loss(trainee.model, part) / num_parts
                if trainee.host is not None:
                    trainee.host.settle()  # parameters that no module waited for
                timer.mark(phases.FORWARD)
                timer.hold_back()
                if is_last:
                    trainee.engine.begin_backward()
                trainee.precision.backward(loss)
                if not (is_last and trainee.engine.marks_backward):
                    timer.mark(phases.BACKWARD)
            total += loss.detach()
        return total

    def _update(self, step: int) -> None:
        trainee = self._trainee
        trainee.precision.unscale(trainee.optimizer)
        if trainee.noise is not None:
            trainee.noise.end_step(trainee.precision.scale_in_force)
        clip = trainee.train.optimizer.clip_norm
        if clip is not None:
            # After the exchange, so that the norm is that of the averaged gradient (BERT's rule).
            nn.utils.clip_grad_norm_(trainee.model.parameters(), clip)
        rate = trainee.rate.at(step)
        for group in trainee.optimizer.param_groups:
            group["lr"] = rate
        trainee.engine.step(trainee.precision.update)
        trainee.optimizer.zero_grad()

    def _keep(self, done: list[StepTimes]) -> None:
        result = self._result
        for step in done:
            samples, loss, step_ns = step.samples, step.loss, step.step_ns
            warmup = result.steps < self._course.warmup
            times = (step.start_ns, step_ns, *step.phases)
            self._writer.append((result.steps, int(warmup), *times, samples, loss, *step.launch))
            result.steps += 1
            result.losses.append(loss)
            result.spent_ns += step_ns
            result.step_s.append(step_ns / 1e9)
            if not warmup:
                result.measured_samples += samples
                result.measured_ns += step_ns


def _seed(device: torch.device, seed: int) -> None:
    """As `torch.manual_seed` for the CPU and this rank's GPU.

    That takes 0.2 ms a step without a GPU, where torch keeps the stack of the caller for a time when one is there.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def _step_seed(seed: int, rank: int, step: int) -> int:
    digest = hashlib.blake2b(f"{seed} {rank} {step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

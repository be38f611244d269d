"""The measured loop: plain training with time stamps between its phases.

Warm-up and measured steps run the same code; only the mark in the step file differs. On a GPU the
loop adds no synchronisation to training unless the plan asks for the synchronised phase mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from dlbench.node.models.schedule import learning_rate
from dlbench.node.sync.engine import Engine
from dlbench.node.training import phases
from dlbench.node.training.phases import PhaseTimer, StepTimes
from dlbench.records.steps import StepWriter
from dlbench.specs.workload import MeasureSpec, TrainSpec

Batch = dict[str, torch.Tensor]


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


@dataclass(kw_only=True)
class LoopResult:
    """What the loop saw on this rank."""

    measured_samples: int = 0
    measured_ns: int = 0
    losses: list[float] = field(default_factory=list)
    steps: int = 0


class TrainingLoop:
    """Runs the steps and writes their times."""

    def __init__(
        self,
        trainee: Trainee,
        timer: PhaseTimer,
        writer: StepWriter,
        measure: MeasureSpec,
        on_step: Callable[[int], None],
    ) -> None:
        """`on_step` is told each step's number before it begins (progress, watchdog)."""
        self._trainee = trainee
        self._timer = timer
        self._writer = writer
        self._measure = measure
        self._on_step = on_step
        self._result = LoopResult()

    def run(self) -> LoopResult:
        """All steps; afterwards every step is in the step file."""
        timer = self._timer
        for step in range(self._measure.warmup_steps + self._measure.measured_steps):
            # Files first, then the barrier, directly before the clock: a slow file system must not stagger the ranks.
            self._on_step(step)
            if step == self._measure.warmup_steps:
                self._enter_measurement()
            timer.begin()
            samples, loss = self._step(step)
            timer.finish(samples, loss)
            self._keep(timer.collect(wait=False))
        timer.close()
        self._keep(timer.collect(wait=True))
        self._writer.flush()
        return self._result

    def _enter_measurement(self) -> None:
        """All ranks begin the measured steps together; outside of any step's time."""
        self._timer.close()
        self._keep(self._timer.collect(wait=True))
        self._writer.flush()
        self._trainee.engine.barrier()

    def _step(self, step: int) -> tuple[int, torch.Tensor]:
        trainee, timer = self._trainee, self._timer
        batch = next(trainee.batches)
        timer.mark(phases.INPUT)
        batch = {name: tensor.to(trainee.device, non_blocking=True) for name, tensor in batch.items()}
        timer.mark(phases.H2D)
        with autocast(trainee.train.precision, trainee.device):
            loss = trainee.loss(trainee.model, batch)
        timer.mark(phases.FORWARD)
        loss.backward()  # type: ignore[no-untyped-call]
        if not trainee.engine.marks_backward:
            timer.mark(phases.BACKWARD)
        trainee.engine.finish_exchange()
        timer.mark(phases.EXCHANGE)
        self._update(step)
        timer.mark(phases.OPTIMIZER)
        return len(next(iter(batch.values()))), loss.detach()

    def _update(self, step: int) -> None:
        trainee = self._trainee
        clip = trainee.train.optimizer.clip_norm
        if clip is not None:
            # After the exchange, so that the norm is that of the averaged gradient (BERT's rule).
            nn.utils.clip_grad_norm_(trainee.model.parameters(), clip)
        rate = learning_rate(step, trainee.train)
        for group in trainee.optimizer.param_groups:
            group["lr"] = rate
        trainee.engine.step()
        trainee.optimizer.zero_grad()

    def _keep(self, done: list[StepTimes]) -> None:
        result = self._result
        for start_ns, step_ns, parts, samples, loss in done:
            warmup = result.steps < self._measure.warmup_steps
            self._writer.append((result.steps, int(warmup), start_ns, step_ns, *parts, samples, loss))
            result.steps += 1
            result.losses.append(loss)
            if not warmup:
                result.measured_samples += samples
                result.measured_ns += step_ns


def autocast(precision: str, device: torch.device) -> torch.autocast | nullcontext[None]:
    """The context that a precision computes in; weights stay fp32."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()

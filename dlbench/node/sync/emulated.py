"""Asynchronous training, emulated in one process: its clocks are those of `dlbench.perfmodels.asynchrony`.

Each part of a step's batch is one worker's, dealt out in the order in which workers start: every policy reads the same
samples in the same order, and with bsp each worker those of its rank. A gradient is taken when its worker starts in
emulated time, at the newest weights, and held until it ends: no older weights are kept, but a gradient per worker.

A gradient weighs 1/N under every policy: an update of k gradients uses their mean, and k/N of the learning rate of an
update of N ranks at the same number of samples. Batch norm's running statistics are those of the process.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from dlbench.node.sync.engine import Engine, Value, settings_of
from dlbench.perfmodels.asynchrony import drawn_times, emulate
from dlbench.records.record import EmulationResult, Setting
from dlbench.specs.engine import SETTING_OF_POLICY
from dlbench.specs.plan import RunPlan


class EmulatedEngine(Engine):
    """Takes the gradients of emulated workers one after the other, and applies them in the order of their clocks."""

    def __init__(self, plan: RunPlan, *_: object) -> None:
        self._settings, self._workers = plan.engine.emulated, plan.emulated_workers
        self._clip_norm = plan.workload.train.optimizer.clip_norm
        # Repeats of a series draw other times, but each the same under all policies.
        work_time = drawn_times(self._settings.work_s, f"{plan.workload.train.seed} {plan.series.repeat}")
        self._events = emulate(self._settings, self._workers, work_time)
        self._held: dict[int, list[torch.Tensor | None]] = {}  # Gradients that are being computed, by worker.
        self._worker = next(self._events).starts or 0  # Worker of the gradient that is taken next.
        self._parameters: list[nn.Parameter] = []
        self._rate, self._seconds, self._dropped = 0.0, 0.0, 0
        self._steps: list[tuple[float, int]] = []  # Emulated time and updates at the end of each step.
        self._sizes, self._staleness = Counter[int](), Counter[int]()  # Updates by gradients, gradients by staleness.

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, mark_backward: Callable[[], None], *, accumulation: int = 1
    ) -> tuple[nn.Module, Optimizer]:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return super().prepare(model, optimizer, mark_backward)

    def begin_step(self, rate: float) -> None:
        self._rate = rate

    @contextmanager
    def hold_exchange(self) -> Iterator[None]:
        yield
        self._end_part()

    def clip(self, parameters: object, norm: float) -> None:
        """Clips nothing: each update clips the mean of its gradients."""

    def step(self, update: Callable[[Optimizer], object]) -> None:
        self._end_part()
        self._steps.append((self._seconds, self._sizes.total()))

    def _end_part(self) -> None:
        """Holds the gradient of the worker that has just started, and makes all updates until the next one starts."""
        self._held[self._worker] = [parameter.grad for parameter in self._parameters]
        self._clear()
        for event in self._events:
            self._seconds = event.seconds
            if event.dropped is not None:
                del self._held[event.dropped]
                self._dropped += 1
            if event.applied:
                self._update([self._held.pop(worker) for worker in event.applied])
                self._staleness.update(event.applied.values())
            if event.starts is not None:
                self._worker = event.starts
                return

    def _update(self, gradients: list[list[torch.Tensor | None]]) -> None:
        share = len(gradients) / self._workers
        for parameter, *parts in zip(self._parameters, *gradients, strict=True):
            present = [part for part in parts if part is not None]
            if present:
                # The loss of a part was divided by the number of workers.
                parameter.grad = functools.reduce(torch.Tensor.add_, present).div_(share)
        if self._clip_norm is not None:
            super().clip(self._parameters, self._clip_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * share
        self._optimizer.step()
        self._clear()
        self._sizes[len(gradients)] += 1

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def emulation(self) -> EmulationResult:
        ends_s, updates = zip(*self._steps, strict=True)
        most = max(self._staleness, default=-1)
        staleness = tuple(self._staleness[clocks] for clocks in range(most + 1))
        return EmulationResult(end_s=ends_s, updates=updates, staleness=staleness, dropped=self._dropped)

    def settings(self) -> list[Setting]:
        """Returns the policy and the setting that it reads, with what the updates show of it."""
        settings, most, sizes = self._settings, max(self._staleness, default=0), sorted(self._sizes)
        how = (
            f"{self._sizes.total()} updates of {sizes} gradients, at most {most} clocks ahead, {self._dropped} dropped"
        )
        is_as_planned = sizes == [settings.quorum(self._workers)] and (settings.bound is None or most <= settings.bound)
        rows = []
        for name in ("policy", *filter(None, [SETTING_OF_POLICY.get(settings.policy)])):
            requested: Value = getattr(settings, name)
            effective = requested if is_as_planned else "not as planned"
            rows.append((f"engine.emulated.{name}", requested, effective, how))
        return settings_of(*rows)

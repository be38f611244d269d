"""Asynchronous training, emulated in one process: its clocks are those of `dlbench.perfmodels.asynchrony`.

Each part of a step's batch is one worker's, dealt out in the order in which workers start: every policy reads the same
samples in the same order, and with bsp those of as many ranks. A gradient is taken when its worker starts in emulated
time, at the newest weights, and held until it ends: so no older weights are kept, but one gradient for each worker.

A gradient weighs 1/N under every policy: an update of k gradients uses their mean and k/N of the learning rate. So
equal samples are equal work, and an update of all N is that of N ranks. The learning rate follows the steps of N parts
each, which are the updates of N ranks. Batch norm's running statistics are those of the process.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from dlbench.node.sync.engine import Engine, Value, settings_of
from dlbench.perfmodels.asynchrony import Gradient, drawn_times, emulate, policy_of
from dlbench.records.record import EmulationResult, Setting
from dlbench.specs.plan import RunPlan
from dlbench.units import counted


class EmulatedEngine(Engine):
    """Takes the gradients of emulated workers one after the other, and applies them in the order of their clocks."""

    def __init__(self, plan: RunPlan, *_: object) -> None:
        self._emulated, self._workers = plan.engine.emulated, plan.emulated_workers
        self._clip_norm = plan.workload.train.optimizer.clip_norm
        recorded = self._emulated.recorded
        assert recorded is not None  # a plan has it
        # Repeats of a series differ in their times, but policies do not.
        work_time = drawn_times(recorded.work_s, f"{plan.workload.train.seed} {plan.series.repeat}")
        policy = policy_of(self._emulated, self._workers)
        self._events = emulate(policy, self._workers, work_time, recorded.exchange_s)
        self._held: dict[int, list[torch.Tensor | None]] = {}  # Gradients that are being computed, by worker.
        self._worker = 0  # Of the gradient that is taken next; the first event is its start.
        next(self._events)
        self._parameters: list[nn.Parameter] = []
        self._rate = 0.0
        self._seconds, self._num_updates, self._num_dropped = 0.0, 0, 0
        self._steps: list[tuple[float, int]] = []  # Emulated time and updates at the end of each step.
        self._staleness, self._delays, self._sizes = Counter[int](), Counter[int](), Counter[int]()

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
        self._steps.append((self._seconds, self._num_updates))

    def _end_part(self) -> None:
        """Holds the gradient of the worker that has just started, and makes all updates until the next one starts."""
        self._held[self._worker] = [parameter.grad for parameter in self._parameters]
        self._clear()
        for event in self._events:
            self._seconds = event.seconds
            if event.dropped is not None:
                del self._held[event.dropped]
                self._num_dropped += 1
            if event.applied:
                self._update(event.applied)
            if event.starts is not None:
                self._worker = event.starts
                return

    def _update(self, gradients: Sequence[Gradient]) -> None:
        share = len(gradients) / self._workers
        held = [self._held.pop(gradient.worker) for gradient in gradients]
        for parameter, *parts in zip(self._parameters, *held, strict=True):
            present = [part for part in parts if part is not None]
            if present:
                # The loss of a part was divided by the number of parts.
                parameter.grad = functools.reduce(torch.Tensor.add_, present).div_(share)
        if self._clip_norm is not None:
            super().clip(self._parameters, self._clip_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * share
        self._optimizer.step()
        self._clear()
        self._num_updates += 1
        self._sizes[len(gradients)] += 1
        self._staleness.update(gradient.clocks for gradient in gradients)
        self._delays.update(gradient.updates for gradient in gradients)

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def emulation(self) -> EmulationResult:
        return EmulationResult(
            end_s=tuple(seconds for seconds, _ in self._steps),
            updates=tuple(updates for _, updates in self._steps),
            staleness=_counts(self._staleness),
            delays=_counts(self._delays),
            dropped=self._num_dropped,
            unfinished=len(self._held),
        )

    def settings(self) -> list[Setting]:
        """Returns the policy and the setting that it reads, with what the updates show of it."""
        settings, largest = self._emulated, max(self._staleness, default=0)
        sizes = sorted(self._sizes)
        how = (
            f"{self._num_updates} updates of {sizes} gradients, {self._num_dropped} dropped; a worker was at most "
            f"{counted(largest, 'clock')} ahead"
        )
        rows: list[tuple[str, Value, Value, str]] = [("policy", settings.policy, settings.policy, how)]
        if settings.policy == "ssp":
            rows.append(("staleness", settings.staleness, max(settings.staleness, largest), how))
        elif settings.policy == "groups":
            rows.append(("group_size", settings.group_size, max(sizes, default=None), how))
        elif settings.policy == "backup":
            is_waited_for = sizes == [settings.waited_for(self._workers)]
            rows.append(("wait_share", settings.wait_share, settings.wait_share if is_waited_for else None, how))
        return settings_of(*((f"engine.emulated.{name}", *row) for name, *row in rows))


def _counts(counter: Counter[int]) -> tuple[int, ...]:
    """Returns the counts of 0, 1, ... up to the largest number."""
    return tuple(counter[number] for number in range(max(counter, default=-1) + 1))

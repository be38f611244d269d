"""Fault injection: sleeps that a plan puts into the steps of a rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dlbench.node.part import Batch, Loss, TrainingPart
from dlbench.specs.watch import FaultSpec

BACKWARD_PER_FORWARD = 2  # A backward pass counts as two forward passes, as for FLOPs: gradients of inputs and weights.


class InjectedFault(TrainingPart):
    """Sleeps in the steps of one rank, and measures how long."""

    def __init__(self, spec: FaultSpec, rank: int) -> None:
        self._spec = spec
        self._acts = spec.acts_on(rank)
        self._counts = False
        self._injected_ns = 0

    @property
    def injected_s(self) -> float:
        return self._injected_ns / 1e9

    def begin_measuring(self) -> None:
        self._counts = True

    def rank_result(self) -> dict[str, Any]:
        return {"planted_s": self.injected_s}

    def around_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self._sleep(self._spec.input_delay_s)
            yield batch

    def around_loss(self, loss: Loss) -> Loss:
        """Returns a loss that sleeps (compute_factor - 1) x 3 x its time, for which it synchronises a GPU."""
        if not self._acts or self._spec.compute_factor == 1.0:
            return loss

        def slow(model: nn.Module, batch: Batch) -> torch.Tensor:
            _synchronise(batch)
            start = time.monotonic_ns()
            batch_loss = loss(model, batch)
            _synchronise(batch)
            forward_s = (time.monotonic_ns() - start) / 1e9
            self._sleep((self._spec.compute_factor - 1) * (1 + BACKWARD_PER_FORWARD) * forward_s)
            return batch_loss

        return slow

    def end_step(self) -> None:
        self._sleep(self._spec.step_delay_s)

    def _sleep(self, seconds: float) -> None:
        if not self._acts or seconds <= 0:
            return
        start = time.monotonic_ns()
        time.sleep(seconds)
        if self._counts:
            self._injected_ns += time.monotonic_ns() - start


def _synchronise(batch: Batch) -> None:
    device = next(iter(batch.values())).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)

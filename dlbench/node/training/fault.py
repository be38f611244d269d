"""A planted fault at work: sleeps of a known length at known places of a step, on the ranks that the plan names."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import nn

from dlbench.node.models.build import Batch, Loss
from dlbench.specs.watch import FaultSpec

BACKWARD_PER_FORWARD = 2
"""A backward pass counts as two forward passes, as in the count of FLOPs: gradients of inputs and of weights."""


class PlantedFault:
    """The sleeps of one rank, and how long they really were.

    Args:
        spec: the fault.
        rank: this rank; where the fault does not act on it, nothing sleeps.
    """

    def __init__(self, spec: FaultSpec, rank: int) -> None:
        self._spec = spec
        self._acts = spec.acts_on(rank)
        self._counts = False
        self._planted_ns = 0

    @property
    def planted_s(self) -> float:
        """What was slept in measured steps, seconds, by the monotonic clock."""
        return self._planted_ns / 1e9

    def measuring(self) -> None:
        """Sleeps count from now on: the measured steps begin."""
        self._counts = True

    def delayed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches, each handed out later by `input_delay_s`."""
        for batch in batches:
            self._sleep(self._spec.input_delay_s)
            yield batch

    def slowed(self, loss: Loss) -> Loss:
        """A loss whose forward pass is followed by a sleep of what both passes should take longer.

        The sleep is (compute_factor - 1) x 3 x the forward time just measured, as backward counts as two forward
        passes. Behind it lies the backward pass as it is. On a GPU the forward pass is waited for, before and behind
        it, which by itself costs some overlap of host and device.
        """
        if not self._acts or self._spec.compute_factor == 1.0:
            return loss

        def slow(model: nn.Module, batch: Batch) -> torch.Tensor:
            _synchronise(batch)
            start = time.monotonic_ns()
            value = loss(model, batch)
            _synchronise(batch)
            forward_s = (time.monotonic_ns() - start) / 1e9
            self._sleep((self._spec.compute_factor - 1) * (1 + BACKWARD_PER_FORWARD) * forward_s)
            return value

        return slow

    def end_step(self) -> None:
        """Sleeps `step_delay_s`; called at the end of every step, outside of its phases."""
        self._sleep(self._spec.step_delay_s)

    def _sleep(self, seconds: float) -> None:
        if not self._acts or seconds <= 0:
            return
        start = time.monotonic_ns()
        time.sleep(seconds)
        if self._counts:
            self._planted_ns += time.monotonic_ns() - start


def _synchronise(batch: Batch) -> None:
    device = next(iter(batch.values())).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)

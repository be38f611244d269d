"""What one rank trains, and what a plan may put into its steps: a fault on purpose, and a probe of gradient norms.

**Gradient noise scale** from gradients of two batch sizes, which data parallelism has anyway (McCandlish, Kaplan,
Amodei, "An Empirical Model of Large-Batch Training" (2018), appendix A.1). With the squared norm of a gradient over b
samples, E|G_b|^2 = |G|^2 + tr(S) / b, two batch sizes give both unknowns::

    |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)        tr(S) = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)

and the noise scale is tr(S) / |G|^2. Both are averaged over steps before they are divided. The small batch is what one
backward pass saw, before gradient synchronisation; the large one is the global batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from dlbench.node.data.delivery import Delivery
from dlbench.node.data.loader import BatchSource
from dlbench.node.data.rank_reader import EpochBoundary, RankReading
from dlbench.node.data.sharding import Position
from dlbench.node.models.build import Batch, Loss
from dlbench.node.models.kernels import Kernels
from dlbench.node.models.optimizers import LearningRate
from dlbench.node.out_of_core.held import StepMemory
from dlbench.node.training.checkpoint import Checkpoint
from dlbench.node.training.initial_weights import InitialWeights
from dlbench.node.training.precision import Precision
from dlbench.node.training.staging import Staging
from dlbench.node.training.step_schedule import StepSchedule
from dlbench.records.record import NoiseScale, Setting
from dlbench.specs.watch import FaultSpec

if TYPE_CHECKING:  # imported where a plan needs them: ranks in core start without
    from dlbench.node.out_of_core.host_update import HostUpdater
    from dlbench.node.training.activations import ActivationMemory
    from dlbench.node.training.programs import Compilation, NetworkGraphs

BACKWARD_PER_FORWARD = 2  # A backward pass counts as two forward passes, as for FLOPs: gradients of inputs and weights.


@dataclass(kw_only=True)
class TrainState:
    """What one rank trains, on what, and for how long."""

    model: nn.Module  # The network itself, without the engine's wrapper.
    wrapped: nn.Module  # As the engine has it.
    optimizer: torch.optim.Optimizer
    loss: Loss  # Of the wrapped network and a batch.
    rate: LearningRate
    precision: Precision
    kernels: Kernels
    source: BatchSource
    batches: Iterator[Batch]  # Of the source, with the plan's fault in them.
    schedule: StepSchedule
    noise: NoiseProbe | None
    fault: InjectedFault | None
    host: HostUpdater | None  # Updates parameters; None where the device does.
    boundary: EpochBoundary | None  # What happens between two epochs, where something does.
    memory: ActivationMemory | None  # How activations are treated; None where they are left to autograd.
    held: StepMemory | None
    """What of the device's memory is what; None where `memory` counts on a GPU, or swaps in threads of its own."""
    compilation: Compilation | None
    graphs: NetworkGraphs | None  # The network's CUDA graphs; None where nothing is captured.
    delivery: Delivery | None  # Brings the batches to the device; None on CPUs, where they stay.
    initial: InitialWeights | None
    """What weights were read to begin with; None where none were, and on other ranks than the first."""
    resumed: Checkpoint | None
    staging: Staging | None  # What was staged on the nodes; None where nothing was.
    reading: RankReading | None  # How samples are read; None for synthetic data.
    allocator: str | None  # How memory that tensors free is treated; None on a GPU.
    initial_digest: str  # SHA-256 of the parameters as training finds them.
    hashing_s: float  # What hashing them took, which is in no figure.
    warnings: tuple[str, ...]

    def position(self, done: int) -> Position:
        """Where the sample order stands after `done` steps of the whole training."""
        order = self.source.order
        return Position() if order is None else order.position(done - self.schedule.first)

    def settings(self) -> list[Setting]:
        """What was asked for of memory, compiler, update, kernels, copies and first weights, and what is in force."""
        parts = (self.memory, self.compilation, self.graphs, self.host, self.kernels, self.delivery, self.initial)
        return [setting for part in parts if part is not None for setting in part.settings()]

    def close_exchange(self) -> None:
        """No samples are exchanged any more: all ranks have trained, or this one failed."""
        if self.source.exchange is not None:
            self.source.exchange.close()

    def close(self) -> None:
        """Ends threads and processes and closes files; what was staged and the exchange of samples stay open."""
        if self.host is not None:
            self.host.close()
        self.source.close()
        if self.memory is not None:
            self.memory.close()
        if self.held is not None:
            # Of a step that failed: with torch's profiler open, Python would crash at its end and lose the exit code.
            self.held.end()


class InjectedFault:
    """The sleeps of one rank, and how long they really were."""

    def __init__(self, spec: FaultSpec, rank: int) -> None:
        self._spec = spec
        self._acts = spec.acts_on(rank)
        self._counts = False
        self._injected_ns = 0

    @property
    def injected_s(self) -> float:
        return self._injected_ns / 1e9

    def begin_measuring(self) -> None:
        """Sleeps count from now on: the measured steps begin."""
        self._counts = True

    def delayed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
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
            self._injected_ns += time.monotonic_ns() - start


def _synchronise(batch: Batch) -> None:
    device = next(iter(batch.values())).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)


DECAY = 0.95  # Of the running means, a step; about the last 20 steps count.
_HISTORY = 1000  # Steps kept in a record.


class NoiseProbe:
    """Collects squared gradient norms of one rank; nothing is waited for before the end."""

    def __init__(self, model: nn.Module, accumulation: int) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._accumulation = accumulation
        self._local: list[torch.Tensor] = []
        self.small: list[torch.Tensor] = []
        self.large: list[torch.Tensor] = []
        for parameter in self._parameters:
            parameter.register_hook(self._see)  # type: ignore[no-untyped-call]

    def _see(self, gradient: torch.Tensor) -> None:
        self._local.append(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32).square())

    def forget(self) -> None:
        """Gradients seen since the last step were none of training's."""
        self._local.clear()

    def end_step(self, loss_scale: torch.Tensor | None) -> None:
        """After the exchange, with gradients brought back to their true size and before clipping."""
        # The mean over passes of |k g|^2 / k^2 summed k times: one factor k is left.
        local = torch.stack(self._local).sum() * self._accumulation
        if loss_scale is not None:
            local = local / loss_scale / loss_scale  # the square of a scale may leave fp32
        self._local.clear()
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        self.small.append(local)
        self.large.append(torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).square().sum())

    def squared_norms(self) -> list[list[float]]:
        """Squared norms per step, (small, large), as plain Python; waits for the device."""
        if not self.small:
            return []
        pairs: list[list[float]] = torch.stack([torch.stack(self.small), torch.stack(self.large)], 1).cpu().tolist()
        return pairs


def estimate_noise_scale(
    ranks: Sequence[Sequence[Sequence[float]]], *, small_batch: int, large_batch: int
) -> NoiseScale:
    """The noise scale from the norms of all ranks."""
    # Steps whose gradients overflowed hold no information.
    steps = [
        (number, sum(row[0] for row in rows) / len(rows), rows[0][1])
        for number, rows in enumerate(zip(*ranks, strict=True))
        if all(math.isfinite(value) for row in rows for value in row)
    ]
    norm2 = trace = weight = 0.0
    for _, small, large in steps:
        norm2 = DECAY * norm2 + (1 - DECAY) * (large_batch * large - small_batch * small) / (large_batch - small_batch)
        trace = DECAY * trace + (1 - DECAY) * (small - large) / (1 / small_batch - 1 / large_batch)
        weight = DECAY * weight + (1 - DECAY)
    known = bool(steps)
    stride = -(-len(steps) // _HISTORY) or 1
    return NoiseScale(
        small_batch=small_batch,
        large_batch=large_batch,
        steps=len(steps),
        gradient_norm2=norm2 / weight if known else None,
        covariance_trace=trace / weight if known else None,
        noise_scale=trace / norm2 if known and norm2 > 0 and trace > 0 else None,
        history=tuple(steps[::stride]),
    )

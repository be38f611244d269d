"""A network that sleeps instead of computing: gradients of real size become ready when a real network's would."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dlbench.node.models.build import Batch, Criterion, Meter, Network, Outputs
from dlbench.specs.workload import DataSpec, PacedLayer, PacedModel


class Pace:
    """Sleeps of one rank. A sleep ends about 0.1 ms late, and the next one is shortened by that."""

    def __init__(self) -> None:
        self.factor = 0.0  # Ratio of the time of a batch in the current pass to the seconds of a layer.
        self._late_s = 0.0

    @contextmanager
    def lasting(self, seconds: float) -> Iterator[None]:
        """Makes its block take `seconds` times the factor."""
        begin = time.monotonic()
        yield
        end = begin + seconds * self.factor - self._late_s
        now = time.monotonic()
        if now < end:
            time.sleep(end - now)
            self._late_s = time.monotonic() - end
        elif self.factor:
            self._late_s = now - end


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carried: Tensor, weight: Tensor, layer: PausingLayer) -> Tensor:
        ctx.layer = layer
        with layer.pace.lasting(layer.spec.forward_s):
            return carried + weight[0, 0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        layer: PausingLayer = ctx.layer
        with layer.pace.lasting(layer.spec.backward_s):
            return gradient, gradient.expand_as(layer.weight).contiguous(), None


class PausingLayer(nn.Module):
    """Adds its first weight to a scalar, () -> (). All weights are equal and have the gradient of the first."""

    def __init__(self, spec: PacedLayer, pace: Pace) -> None:
        super().__init__()
        self.spec, self.pace = spec, pace
        self.weight = nn.Parameter(torch.zeros(spec.bytes // torch.float32.itemsize, 1))  # two dimensions: decayed

    def forward(self, carried: Tensor) -> Tensor:
        passed: Tensor = _Pass.apply(carried, self.weight, self)  # type: ignore[no-untyped-call]
        return passed


class Paced(nn.Module):
    """Maps the rank's factor, (N,), to the mean of the layers' first weights, ()."""

    def __init__(self, spec: PacedModel) -> None:
        super().__init__()
        self.pace, self._speed, self._jitter = Pace(), spec.speed, spec.step_jitter
        self.layers = nn.Sequential(*(PausingLayer(layer, self.pace) for layer in spec.layers))

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, pace: Tensor) -> Tensor:
        if not pace.is_meta:
            # On a GPU this waits for the last update: a pass begins when the device is free, like a real one.
            of_rank, of_step = float(pace[0]), math.exp(self._jitter * float(torch.randn((), device="cpu")))
            self.pace.factor = len(pace) * of_rank * of_step / self._speed
        begin = torch.zeros((), device=pace.device)
        mean_weight: Tensor = self.layers(begin) / len(self.layers)
        return mean_weight


class PacedNetwork(Network[PacedModel]):
    """The paced network, with batches of pace (N,) float32, the rank's factor, and target (N,) float32."""

    meter = Meter  # Never used, since plans do not train it to a target.

    def build(self, spec: PacedModel) -> nn.Module:
        return Paced(spec)

    def outputs(self, spec: PacedModel) -> Callable[[nn.Module, Batch], Outputs]:
        return lambda model, batch: (model(batch["pace"]),)

    def criterion(self, label_smoothing: float = 0.0) -> Criterion:
        """Returns the mean squared error, whose only purpose is to show that ranks average gradients."""
        return lambda outputs, batch: (outputs[0].float() - batch["target"]).square().mean()

    def synthetic(
        self, spec: PacedModel, data: DataSpec, num: int, generator: torch.Generator, *, counts: bool
    ) -> Batch:
        # The generator's seed is that of the rank, the same for all batches.
        drawn = torch.randn((), generator=torch.Generator().manual_seed(generator.initial_seed()))
        pace = math.exp(spec.rank_jitter * float(drawn))
        return {"pace": torch.full((num,), pace), "target": torch.rand(num, generator=generator)}

    def one_sample(self, spec: PacedModel, data: DataSpec) -> tuple[Tensor, ...]:
        return (torch.empty(1),)


NETWORK = PacedNetwork()

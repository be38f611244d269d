"""Gradient noise scale, from gradients of two batch sizes.

McCandlish, Kaplan, Amodei, "An Empirical Model of Large-Batch Training" (2018), appendix A.1. With the squared norm of
a gradient over b samples, E|G_b|^2 = |G|^2 + tr(S) / b, batch sizes b (one backward pass) and B (global) give both::

    |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)        tr(S) = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)

and the noise scale is tr(S) / |G|^2. Both are averaged over steps before they are divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from dlbench.node.part import TrainingPart, TrialPasses
from dlbench.records.record import NoiseScale, RankResult, RankSummary

DECAY = 0.95  # Decay of the running means per step, so that about the last 20 steps count.
_HISTORY = 1000  # Steps kept in a record, at most.


class NoiseProbe(TrainingPart):
    """Collects squared gradient norms of one rank, without waiting for the device before the end."""

    def __init__(self, accumulation: int, *, small_batch: int, large_batch: int) -> None:
        self._accumulation, self._small_batch, self._large_batch = accumulation, small_batch, large_batch
        self._parameters: list[nn.Parameter] = []
        self._local: list[torch.Tensor] = []
        self.small: list[torch.Tensor] = []
        self.large: list[torch.Tensor] = []

    def before_wrap(self, passes: TrialPasses) -> None:
        """Hooks itself to the gradients, before the engine's own hooks, which start the exchange."""
        self._parameters = [parameter for parameter in passes.model.parameters() if parameter.requires_grad]
        for parameter in self._parameters:
            parameter.register_hook(self._add_norm)  # type: ignore[no-untyped-call]

    def _add_norm(self, gradient: torch.Tensor) -> None:
        self._local.append(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32).square())

    def after_wrap(self, passes: TrialPasses, wrapped: nn.Module) -> None:
        self._local.clear()  # gradients that a compilation computed

    def before_update(self, loss_scale: torch.Tensor | None) -> None:
        # The mean over passes of |k g|^2 / k^2 summed k times: one factor k is left.
        local = torch.stack(self._local).sum() * self._accumulation
        if loss_scale is not None:
            local = local / loss_scale / loss_scale  # the square of a scale may leave fp32
        self._local.clear()
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        self.small.append(local)
        self.large.append(torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).square().sum())

    def squared_norms(self) -> list[list[float]]:
        """Returns a pair of squared norms per step, for the small and the large batch; waits for the device."""
        if not self.small:
            return []
        pairs: list[list[float]] = torch.stack([torch.stack(self.small), torch.stack(self.large)], 1).cpu().tolist()
        return pairs

    def summary(self, result: RankResult) -> dict[str, Any]:
        return {"norms": self.squared_norms()}

    def record(self, summaries: Sequence[RankSummary]) -> dict[str, Any]:
        norms = [rank.norms for rank in summaries]
        return {
            "noise_scale": estimate_noise_scale(norms, small_batch=self._small_batch, large_batch=self._large_batch)
        }


def estimate_noise_scale(
    ranks: Sequence[Sequence[Sequence[float]]], *, small_batch: int, large_batch: int
) -> NoiseScale:
    """Returns the noise scale. `ranks` holds, for each rank, the pairs of `NoiseProbe.squared_norms`."""
    steps = []
    for number, rows in enumerate(zip(*ranks, strict=True)):
        norms = np.array(rows)  # shape (ranks, 2)
        if np.isfinite(norms).all():  # steps whose gradients overflowed hold no information
            steps.append((number, sum(row[0] for row in rows) / len(rows), rows[0][1]))
    norm2 = trace = weight = 0.0
    for _, small, large in steps:
        norm2 = DECAY * norm2 + (1 - DECAY) * (large_batch * large - small_batch * small) / (large_batch - small_batch)
        trace = DECAY * trace + (1 - DECAY) * (small - large) / (1 / small_batch - 1 / large_batch)
        weight = DECAY * weight + (1 - DECAY)
    stride = -(-len(steps) // _HISTORY) or 1
    fields: dict[str, Any] = {"gradient_norm2": None, "covariance_trace": None, "noise_scale": None}
    if steps:
        fields |= {"gradient_norm2": norm2 / weight, "covariance_trace": trace / weight}
        if norm2 > 0 and trace > 0:
            fields["noise_scale"] = trace / norm2
    return NoiseScale(
        small_batch=small_batch,
        large_batch=large_batch,
        steps=len(steps),
        history=tuple(steps[::stride]),
        **fields,
    )

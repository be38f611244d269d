"""Gradient noise scale from gradients of two batch sizes, which data parallelism has anyway.

McCandlish, Kaplan, Amodei, "An Empirical Model of Large-Batch Training" (2018), appendix A.1. With the squared norm of
a gradient over b samples, E|G_b|^2 = |G|^2 + tr(S) / b, two batch sizes give both unknowns::

    |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)        tr(S) = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)

and the noise scale is tr(S) / |G|^2. Both are averaged over steps before they are divided. The small batch is what one
backward pass saw, before the exchange; the large one is the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from dlbench.records.record import NoiseScale

DECAY = 0.95
"""Of the running means, a step; about the last 20 steps count."""
_HISTORY = 1000
"""Steps kept in a record."""


class NoiseProbe:
    """Collects squared gradient norms of one rank; nothing is waited for before the end.

    Args:
        model: its parameters get hooks that see each gradient before the exchange.
        accumulation: backward passes of one step, each of a loss divided by it.
    """

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
        """After the exchange, with gradients brought back to their true size and before clipping.

        `loss_scale`: a scalar on the device, which is not waited for; None where losses are not scaled.
        """
        # The mean over passes of |k g|^2 / k^2 summed k times: one factor k is left.
        local = torch.stack(self._local).sum() * self._accumulation
        if loss_scale is not None:
            local = local / loss_scale / loss_scale  # the square of a scale may leave fp32
        self._local.clear()
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        self.small.append(local)
        self.large.append(torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).square().sum())

    def told(self) -> list[list[float]]:
        """Squared norms a step, (small, large), as plain Python; waits for the device."""
        if not self.small:
            return []
        pairs: list[list[float]] = torch.stack([torch.stack(self.small), torch.stack(self.large)], 1).cpu().tolist()
        return pairs


def estimate(ranks: Sequence[Sequence[Sequence[float]]], *, small_batch: int, large_batch: int) -> NoiseScale:
    """The noise scale from what all ranks tell.

    Args:
        ranks: for each rank, for each step the squared norms of its local and of the exchanged gradient.
        small_batch: samples behind a local gradient.
        large_batch: samples behind the exchanged one.
    """
    # Steps whose gradients overflowed hold no information.
    steps = [
        (number, sum(row[0] for row in rows) / len(rows), rows[0][1])
        for number, rows in enumerate(zip(*ranks, strict=True))
        if all(_is_finite(value) for row in rows for value in row)
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


def _is_finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")

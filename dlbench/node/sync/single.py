"""One rank and nothing to exchange: the yardstick for what an engine costs at one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dlbench.records.record import Setting


class SingleEngine:
    """No exchange at all."""

    marks_backward = False

    def __init__(self) -> None:
        self._optimizer: torch.optim.Optimizer | None = None

    def start(self) -> None:
        """Nothing to find."""

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, mark_backward: Callable[[], None]
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Both as they are."""
        self._optimizer = optimizer
        return model, optimizer

    def finish_exchange(self) -> None:
        """Nothing to wait for."""

    def step(self) -> None:
        """The optimiser's update."""
        assert self._optimizer is not None
        self._optimizer.step()

    def gather(self, value: Any) -> list[Any]:
        """The one value."""
        return [value]

    def barrier(self) -> None:
        """Alone."""

    def settings(self) -> list[Setting]:
        """None to read back."""
        return []

    def stop(self) -> None:
        """Nothing to leave."""

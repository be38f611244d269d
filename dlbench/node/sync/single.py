"""One rank and nothing to exchange: the yardstick for what an engine costs at one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from dlbench.node.sync.engine import MessageSpan
from dlbench.records.exchange import ExchangeResult
from dlbench.records.record import Setting


class SingleEngine:
    """No exchange at all."""

    marks_backward = False

    def __init__(self) -> None:
        self._optimizer: torch.optim.Optimizer | None = None

    def start(self) -> None:
        """Nothing to find."""

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mark_backward: Callable[[], None],
        *,
        accumulation: int = 1,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Both as they are."""
        self._optimizer = optimizer
        return model, optimizer

    def hold_exchange(self) -> AbstractContextManager[None]:
        """There is nothing to hold."""
        return nullcontext()

    def begin_backward(self) -> None:
        """Not noted."""

    def watch(self, on: bool) -> None:
        """Nothing to watch."""

    def message_spans(self) -> list[MessageSpan]:
        """There are no messages."""
        return []

    def exchange_result(self) -> ExchangeResult | None:
        """Nothing is exchanged."""
        return None

    def finish_exchange(self) -> None:
        """Nothing to wait for."""

    def step(self, update: Callable[[torch.optim.Optimizer], object]) -> None:
        """The update."""
        assert self._optimizer is not None
        update(self._optimizer)

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """One rank's mean is its value."""

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

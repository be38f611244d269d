"""Ranks that train apart: a library finds them and keeps them in touch, and no gradient is exchanged.

What a step costs so is what it costs without the exchange and without the library's hooks, and without waiting for
other ranks. Parameters are equal at the start and drift apart: such a run shows times, and trains nothing of use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from dlbench.node.sync.communicators import communicators_for
from dlbench.node.sync.engine import Engine, MessageSpan
from dlbench.records.exchange import ExchangeResult
from dlbench.records.record import Setting
from dlbench.specs.engine import EngineName


class ApartEngine:
    """An engine that serves all but gradients, which nobody exchanges.

    Args:
        base: the library; not started yet.
        name: which one it is.
        device: where this rank computes.
    """

    marks_backward = False

    def __init__(self, base: Engine, name: EngineName, device: torch.device) -> None:
        self._base = base
        self._name = name
        self._device = device
        self._optimizer: torch.optim.Optimizer | None = None

    def start(self) -> None:
        """Finds the other ranks, as the library does."""
        self._base.start()

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mark_backward: Callable[[], None],
        *,
        accumulation: int = 1,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Makes parameters equal; model and optimizer stay plain, without any hook."""
        communicators_for(self._name, self._device).broadcast_parameters(model)
        self._optimizer = optimizer
        return model, optimizer

    def hold_exchange(self) -> AbstractContextManager[None]:
        """There is nothing to hold."""
        return nullcontext()

    def begin_backward(self) -> None:
        """Not noted."""

    def watch(self, on: bool) -> None:
        """There is no exchange to watch."""

    def message_spans(self) -> list[MessageSpan]:
        """No message was under way."""
        return []

    def exchange_result(self) -> ExchangeResult | None:
        """Nothing was exchanged."""
        return None

    def finish_exchange(self) -> None:
        """Nothing to wait for."""

    def step(self, update: Callable[[torch.optim.Optimizer], object]) -> None:
        """The update, with this rank's own gradients."""
        assert self._optimizer is not None
        update(self._optimizer)

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        self._base.average(tensors)

    def gather(self, value: Any) -> list[Any]:
        return self._base.gather(value)

    def barrier(self) -> None:
        self._base.barrier()

    def settings(self) -> list[Setting]:
        """The library's own, and that no gradient was exchanged."""
        apart = Setting(
            key="sync.exchange",
            requested="none",
            effective="none",
            evidence="no gradient was handed to the library; see the check of parameters",
        )
        return [*self._base.settings(), apart]

    def stop(self) -> None:
        self._base.stop()

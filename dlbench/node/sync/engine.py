"""What every gradient exchange looks like to the training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from dlbench.records.exchange import ExchangeResult
from dlbench.records.record import Setting


@dataclass(frozen=True, kw_only=True)
class MessageSpan:
    """One message on its way, in nanoseconds of this machine's CLOCK_MONOTONIC."""

    step: int
    """Of the watched steps, from 0."""
    number: int
    """Of the messages of its step, from 0, in the order of sending."""
    ready_ns: int
    """Its last gradient was there; the start, where the engine does not tell."""
    start_ns: int
    end_ns: int
    num_bytes: int
    """Of gradients, before any compression."""
    num_tensors: int
    method: str
    """The operation, as in `dlbench.records.exchange.Message`."""


class Engine(Protocol):
    """One way of keeping ranks in step. Used in this order: `start`, `prepare`, the loop, `stop`."""

    marks_backward: bool
    """Whether the engine itself marks the end of the backward phase (DDP waits inside `backward()`)."""

    def start(self) -> None:
        """Finds the other ranks.

        Raises:
            EnvironmentLacksError: the library is missing or lacks the needed operation.
            RunError: the ranks did not find each other as planned.
        """

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mark_backward: Callable[[], None],
        *,
        accumulation: int = 1,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Makes all ranks' parameters those of rank 0 and hooks the exchange into the backward pass.

        With `accumulation` k, gradients of k backward passes are summed before one exchange; all but the last of the
        passes (forward included) run inside `hold_exchange`.
        """

    def hold_exchange(self) -> AbstractContextManager[None]:
        """Within it, a backward pass adds to the gradients and exchanges nothing."""

    def begin_backward(self) -> None:
        """The backward pass that will be exchanged begins now."""

    def watch(self, on: bool) -> None:
        """Begins or ends to watch the exchange closely; called by all ranks between two warm-up steps."""

    def message_spans(self) -> list[MessageSpan]:
        """Messages of the watched steps as this rank saw them; after `watch(False)`. Empty where it cannot tell."""

    def exchange_result(self) -> ExchangeResult | None:
        """What was exchanged and how; called once by all ranks after the last step, complete on rank 0."""

    def finish_exchange(self) -> None:
        """Returns when this step's gradients are averaged over ranks (or, on a GPU, ordered to be)."""

    def step(self, update: Callable[[torch.optim.Optimizer], object]) -> None:
        """Calls `update`, which steps the optimizer it is given, so that nothing is exchanged a second time."""

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replaces floating-point tensors (outside of training steps) by their means over ranks, in place."""

    def gather(self, value: Any) -> list[Any]:
        """`value` (what JSON can hold) of every rank, by rank, on every rank; tuples come back as lists."""

    def barrier(self) -> None:
        """Returns when every rank is here."""

    def settings(self) -> list[Setting]:
        """What was asked of the engine and what is in force, read back where that is possible."""

    def stop(self) -> None:
        """Leaves in good order."""

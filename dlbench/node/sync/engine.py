"""What every gradient exchange looks like to the training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from dlbench.records.record import Setting


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
        self, model: nn.Module, optimizer: torch.optim.Optimizer, mark_backward: Callable[[], None]
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Makes all ranks' parameters those of rank 0 and hooks the exchange into the backward pass."""

    def finish_exchange(self) -> None:
        """Returns when this step's gradients are averaged over ranks (or, on a GPU, ordered to be)."""

    def step(self) -> None:
        """The optimiser's update, without another exchange."""

    def gather(self, value: Any) -> list[Any]:
        """`value` (plain Python, JSON-like) of every rank, by rank, on every rank."""

    def barrier(self) -> None:
        """Returns when every rank is here."""

    def settings(self) -> list[Setting]:
        """What was asked of the engine and what is in force, read back where that is possible."""

    def stop(self) -> None:
        """Leaves in good order."""

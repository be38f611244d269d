"""`TrainingPart`, the interface of optional features of training, with hooks for the stages of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dlbench.node.step_schedule import StepSchedule
from dlbench.records.record import RankResult, RankSummary, Setting

Batch = dict[str, torch.Tensor]
Loss = Callable[[nn.Module, Batch], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class TrialPasses:
    """A network with passes over synthetic batches, for parts that profile it before training."""

    model: nn.Module
    loss_of: Callable[[Batch], torch.Tensor]  # Forward pass and loss, in the precision of training.
    batch_of: Callable[[int], Batch]  # Makes that many samples of the shapes of training, on the device.
    samples: int  # Samples of one forward pass in training.
    beat: Callable[[str], None]
    stage: Callable[[str], None]


class TrainingPart:
    """One optional part of a rank's training, called on all ranks alike; hooks do nothing unless overridden."""

    peak_before: int = 0  # Peak of the device's memory that the part reset in the warm-up, bytes.

    @property
    def early_warnings(self) -> Sequence[str]:
        """Warnings that are known before the first step, each a sentence."""
        return ()

    @property
    def warnings(self) -> Sequence[str]:
        """Warnings that are known after the last step, each a sentence."""
        return ()

    def before_wrap(self, passes: TrialPasses) -> None:
        """Prepares the network, which the engine has not wrapped yet."""

    def after_wrap(self, passes: TrialPasses, wrapped: nn.Module) -> None:
        """Prepares the network after the engine has wrapped it, before the first step."""

    def around_loss(self, loss: Loss) -> Loss:
        """Returns the loss that training calls in place of `loss`."""
        return loss

    def around_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Returns the batches that training uses in place of `batches`."""
        return batches

    def before_warmup(self, step: int, schedule: StepSchedule) -> None:
        """Prepares a step of the warm-up, counted from 0, between two steps."""

    def close_window(self) -> None:
        """Stops watching steps: the warm-up is over, or training ended in it."""

    def begin_measuring(self) -> None:
        """Starts to count: measured steps begin."""

    def before_forward(self) -> None:
        """Is called within a step, before each forward pass."""

    def settle(self) -> None:
        """Waits for work that a step began in the background; called after a forward pass and between two steps."""

    def before_update(self, loss_scale: torch.Tensor | None) -> None:
        """Is called within a step, with gradients exchanged and not scaled; `loss_scale` is that of the step."""

    def end_step(self) -> None:
        """Is called at the end of each step, outside of its phases."""

    def evaluating(self) -> AbstractContextManager[object]:
        return nullcontext()

    def settings(self) -> list[Setting]:
        """Returns the settings as requested and as effective, after the last step."""
        return []

    def rank_result(self) -> dict[str, Any]:
        """Returns fields of `RankResult`, after the last step."""
        return {}

    def summary(self, result: RankResult) -> dict[str, Any]:
        """Returns fields of `RankSummary`; `result` is that of this rank."""
        return {}

    def record(self, summaries: Sequence[RankSummary]) -> dict[str, Any]:
        """Returns fields of `Record`, on rank 0, from the summaries of all ranks in order."""
        return {}

    def record_warnings(self, summaries: Sequence[RankSummary]) -> list[str]:
        """Returns warnings that the summaries of all ranks show, on rank 0, each a sentence."""
        return []

    def close(self) -> None:
        """Ends threads and removes hooks from the network; a second call does nothing."""


def hooks_of(parts: Sequence[TrainingPart], name: str) -> tuple[Callable[..., None], ...]:
    """Returns the hooks of one name, from the parts that override it."""
    overriding = [part for part in parts if getattr(type(part), name) is not getattr(TrainingPart, name)]
    return tuple(getattr(part, name) for part in overriding)

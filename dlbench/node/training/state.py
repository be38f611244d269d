"""`TrainState`: what one rank trains, as its loop and its pauses see it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from dlbench.node.data.delivery import Delivery
from dlbench.node.data.loader import BatchSource
from dlbench.node.data.rank_reader import EpochBoundary
from dlbench.node.models.optimizers import LearningRate
from dlbench.node.part import Batch, Loss, TrainingPart
from dlbench.node.step_schedule import StepSchedule
from dlbench.node.training.checkpoint import Checkpoint
from dlbench.node.training.context import RankContext
from dlbench.node.training.precision import Precision


class TrainState:
    """What one rank trains, on what, and for how long; `dlbench.node.training.run.Rank` fills it in."""

    context: RankContext
    model: nn.Module  # The network itself, without the engine's wrapper.
    wrapped: nn.Module  # As the engine has it.
    optimizer: torch.optim.Optimizer
    loss: Loss  # Of the wrapped network and a batch.
    rate: LearningRate
    precision: Precision
    source: BatchSource
    batches: Iterator[Batch]  # Of the source, with the plan's fault in them.
    schedule: StepSchedule
    parts: list[TrainingPart]  # What the plan adds, in the order in which its settings are recorded.
    delivery: Delivery | None = None  # Brings the batches to the device; None on CPUs, where they stay.
    boundary: EpochBoundary | None = None  # What happens between two epochs, where something does.
    resumed: Checkpoint | None = None

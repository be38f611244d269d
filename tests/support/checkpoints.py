"""Checkpoints that are waited for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dlbench.node.data.sharding import Position
from dlbench.node.sync.engine import SingleEngine
from dlbench.node.training.checkpoint import Progress, snapshot, write_snapshot


def progress_at(step: int, **changes: Any) -> Progress:
    """Training after some steps of one sample each."""
    fields: dict[str, Any] = {"samples": step, "epoch": 0.0, "position": Position(), "train_s": 1.0, "wall_s": 1.0}
    return Progress(step=step, **{**fields, "loss_scaling": {}, "evaluations": (), **changes})


def write_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, trained: Mapping[str, Any]
) -> None:
    """Writes one as the thread of a run does."""
    write_snapshot(path, snapshot(SingleEngine().whole_state(model, optimizer), progress, trained))

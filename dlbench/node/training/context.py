"""The state of one rank: its place in the run (`RankContext`), and what it trains (`TrainState`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dlbench.node.cores import CoreBinding
from dlbench.node.data.loader import BatchSource
from dlbench.node.data.rank_reader import RankReading
from dlbench.node.data.synthetic import BatchCopier
from dlbench.node.models.optimizers import LearningRate
from dlbench.node.nccl_log import NcclLog
from dlbench.node.part import Batch, Loss, TrainingPart
from dlbench.node.ranks import RankPlace, Replica
from dlbench.node.step_schedule import StepSchedule
from dlbench.node.sync.engine import Engine
from dlbench.node.training.checkpoint import Checkpoint
from dlbench.node.training.instruments import RankWatch
from dlbench.node.training.precision import Precision
from dlbench.node.training.progress import ProgressReporter, Watchdog
from dlbench.records.folder import RunFolder
from dlbench.records.record import Event
from dlbench.specs.plan import RunPlan
from dlbench.units import utc_now


class Events:
    """Events of a run by MLPerf logging's names, with wall-clock times; the first is the process's start."""

    def __init__(self, started: float) -> None:
        self.all: list[Event] = []
        self._offset = time.time() - time.monotonic()
        self._run_start = started
        self.resumed_s = 0.0  # Wall time of the run before it was resumed, seconds.
        self.add("init_start", at=started)

    def add(self, key: str, *, at: float | None = None, **fields: Any) -> None:
        """Adds an event, now or at a monotonic time in seconds; `fields` are those of `Event`."""
        monotonic_s = time.monotonic() if at is None else at
        self.all.append(Event(key=key, time_ms=round((monotonic_s + self._offset) * 1000), **fields))

    def start_run(self) -> None:
        """Ends initialisation; from here on data may be touched."""
        self.add("init_stop")
        self._run_start = time.monotonic()
        self.add("run_start")

    @property
    def wall_s(self) -> float:
        """Wall time since run_start, with that before the run was resumed, seconds."""
        return time.monotonic() - self._run_start + self.resumed_s


@dataclass(kw_only=True)
class RankContext:
    """One rank of a run: plan, rank and world size, engine and device, progress reporter."""

    plan: RunPlan
    folder: RunFolder
    place: RankPlace
    binding: CoreBinding
    engine: Engine
    device: torch.device
    watch: RankWatch  # Closed by its creator.
    status: ProgressReporter
    watchdog: Watchdog
    started: float  # Monotonic time at which the process began, seconds.
    nccl: NcclLog | None = None  # The log of NCCL, closed by its creator; None if NCCL is not used.
    started_utc: str = field(default_factory=utc_now)
    warnings: list[str] = field(init=False)
    events: Events = field(init=False)

    def __post_init__(self) -> None:
        self.warnings = list(self.binding.warnings)
        self.events = Events(self.started)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def replica(self) -> Replica:
        return self.place.replica(self.plan.ranks_per_replica)

    def beat(self, what: str) -> None:
        self.watchdog.beat(what)


class TrainState:
    """Network, optimizer, data and schedule of one rank; `dlbench.node.training.run.Rank` fills it in."""

    context: RankContext
    model: nn.Module  # The network itself, without the engine's wrapper.
    wrapped: nn.Module  # The network in the engine's wrapper.
    optimizer: torch.optim.Optimizer
    loss: Loss  # Function of the wrapped network and a batch.
    rate: LearningRate
    precision: Precision
    source: BatchSource
    batches: Iterator[Batch]  # Batches of the source, delayed by an injected fault.
    schedule: StepSchedule
    parts: list[TrainingPart]  # Optional parts of the plan, in the order in which their settings are recorded.
    batch_copier: BatchCopier | None = None  # Copies the batches to the device; None on CPUs, where they stay.
    reading: RankReading | None = None  # How samples are read, and the page cache between two epochs.
    resumed: Checkpoint | None = None

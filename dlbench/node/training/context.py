"""The state of one rank: its place in the run, what it trains, and its instruments; none acts within measured steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from dlbench.datasets.staging.copying import Moved
from dlbench.node.data.loader import BatchSource
from dlbench.node.data.rank_reader import RankReading
from dlbench.node.data.synthetic import BatchCopier
from dlbench.node.devices import NcclLog
from dlbench.node.models.optimizers import LearningRate
from dlbench.node.out_of_core.tiers import BACKWARD, COMPUTE, FORWARD, IN, OUT, LaneSpan
from dlbench.node.part import Batch, Loss, StepSchedule, TrainingPart
from dlbench.node.ranks import CoreBinding, RankPlace, Replica
from dlbench.node.sync.engine import Engine, MessageSpan
from dlbench.node.sync.timing import clock_for
from dlbench.node.training.checkpoint import Checkpoint
from dlbench.node.training.precision import Precision
from dlbench.node.training.progress import ProgressReporter, Watchdog
from dlbench.node.watching.agent import CoreLoad, SamplerProcess, node_loads, window_ranks
from dlbench.node.watching.spans import LayerWatch, ProfileWindow, RankSpans
from dlbench.records.exchange import carried
from dlbench.records.folder import RunFolder
from dlbench.records.record import Event, RankResult, RankSummary, SpanCounts, WatchSummary
from dlbench.records.rows.spans import EXCHANGE, INPUT, STAGING, SWAP
from dlbench.records.watch import NodeWatch, WatchOverhead, WatchResult
from dlbench.specs.plan import RunPlan
from dlbench.specs.watch import WatchSpec
from dlbench.units import counted, plural, utc_now

_SWAP_TRACKS = {COMPUTE: 0, OUT: 1, IN: 2}  # Tracks of lane swap: recomputing and waiting, copies out, copies in.


class RecordedActivations(Protocol):
    """Out-of-core training as the instruments see it."""

    def computes(self, module: nn.Module) -> bool:
        """Returns whether the running forward pass of a module is no recomputation."""

    def spans(self) -> list[tuple[int, LaneSpan]]:
        """Returns the spans of the lanes with their steps."""


class RankWatch:
    """Records stages and profiled steps of one rank, and on the first rank of a node controls the sampler."""

    def __init__(
        self, plan: RunPlan, folder: RunFolder, place: RankPlace, sampler: SamplerProcess | None, *, started: float
    ) -> None:
        self._plan, self._folder, self._place, self._sampler = plan, folder, place, sampler
        self._spans: RankSpans | None = None
        if plan.watch is not None and plan.watch.is_on:
            self._spans = RankSpans(plan, folder, place, start_ns=round(started * 1e9))
        self._load = CoreLoad(sees_node=place.local_rank == 0)
        self._layers: LayerWatch | None = None
        self._profile: ProfileWindow | None = None
        self._traces = self._is_open = self._is_measuring = False

    def attach(
        self,
        model: nn.Module,
        engine: Engine,
        source: BatchSource,
        schedule: StepSchedule,
        beat: Callable[[str], None],
        memory: RecordedActivations | None = None,
    ) -> None:
        """Connects the instruments to a built network, and creates those of the plan's window of steps."""
        self._engine, self._source, self._schedule, self._beat = engine, source, schedule, beat
        self._memory = memory
        watch, spans = self._plan.watch, self._spans
        self._traces = bool(schedule.traced) and self._place.rank in window_ranks(self._plan)
        if watch is None or spans is None or not (self._traces and schedule.window):
            return
        device = next(model.parameters()).device
        if not self._plan.workload.train.is_one_program:
            # In one program, hooks on modules would be compiled or captured with the network, or never called.
            if memory is None:
                self._layers = LayerWatch(model, clock_for(device), spans.add)
            else:
                self._layers = LayerWatch(model, clock_for(device), spans.add, memory.computes)
        if watch.profiler and self._place.rank == 0:
            self._profile = ProfileWindow(self._folder.profile(0), device, spans.add)

    def stage(self, name: str) -> None:
        if self._spans is not None:
            self._spans.stage(name)

    def staged(self, moved: Sequence[Moved]) -> None:
        if self._spans is not None:
            for file in moved:
                self._spans.add(
                    STAGING, "copy", file.start_ns, file.end_ns, track=file.stream, num_bytes=file.num_bytes
                )

    @contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """Surrounds an interruption of training between two steps, which does not count as measured."""
        was_measuring = self._is_measuring
        if was_measuring:
            self._set_measuring(measuring=False)
        if self._spans is None:
            yield
        else:
            with self._spans.pause(name):
                yield
        if was_measuring:
            self._set_measuring(measuring=True)

    def before_warmup(self, step: int) -> None:
        """Opens or closes the window before a step of the warm-up; at its edges the device is idle."""
        if step == 0:
            self.stage("warm-up")
        if self._layers is None and self._profile is None:
            return
        if step not in self._schedule.window:
            self._close_layers()
            return
        if not self._is_open:
            self._is_open = True
            if self._layers is not None:
                self._layers.open()
            if self._profile is not None:
                self._beat("the start of torch.profiler")
                self._profile.open()
        if self._layers is not None:
            self._layers.enter(step)

    def _close_layers(self) -> None:
        """Removes the hooks and ends the profile, whose file is written later; a second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        if self._profile is not None:
            self._beat("the end of torch.profiler")
            self._profile.stop()
        if self._layers is not None:
            self._layers.close()

    def leave_step(self) -> None:
        if self._layers is not None:
            self._layers.leave()

    def close_window(self) -> None:
        """Collects the spans of the window, after the engine has closed its own; a second call does nothing."""
        self._close_layers()
        if not self._traces or self._spans is None:
            return
        self._traces = False
        if self._profile is not None:
            self._beat("writing the profile")
            self._profile.close()
            self._beat("the profile")
        for message in self._engine.message_spans():
            self._add_message(message)
        if self._memory is not None:
            for step, span in self._memory.spans():
                # Forward and backward passes are shown by layers and phases.
                if step in self._schedule.traced and span.kind not in (FORWARD, BACKWARD):
                    name, track = f"{span.kind}, block {span.block}", _SWAP_TRACKS[span.lane]
                    self._spans.add(SWAP, name, span.start_ns, span.end_ns, step=step, track=track)
        for read in self._source.recent_reads():
            if read.number in self._schedule.traced:
                self._spans.add(
                    INPUT, "read batch", read.start_ns, read.end_ns, step=read.number, track=read.worker + 1
                )

    def _add_message(self, message: MessageSpan) -> None:
        step = self._schedule.watch_from + message.step
        if step not in self._schedule.traced or self._spans is None:
            return
        self._spans.add(
            EXCHANGE,
            f"{message.method}, {message.num_tensors} {plural(carried(message.method), message.num_tensors)}",
            message.start_ns,
            message.end_ns,
            step=step,
            track=message.number,
            num_bytes=message.num_bytes,
            queued_ns=message.start_ns - message.ready_ns,
        )

    def begin_measuring(self) -> None:
        self.stage("measuring")
        self._set_measuring(measuring=True)

    def end_training(self) -> None:
        if self._is_measuring:
            self._set_measuring(measuring=False)
        self.stage("finishing")

    def _set_measuring(self, *, measuring: bool) -> None:
        self._is_measuring = measuring
        self._load.measuring(measuring)
        if self._sampler is not None:
            self._sampler.measuring(measuring)

    def summary(self) -> WatchSummary:
        """Ends sampling and closes the file of spans."""
        node, sample_bytes, problems = None, 0, []
        if self._profile is not None:
            problems.append(self._profile.problem)
        if self._sampler is not None:
            node = self._sampler.finish()
            problems.append(self._sampler.problem)
            samples = self._folder.samples(self._place.node_rank)
            if samples.exists():
                sample_bytes = samples.stat().st_size
        spans = None
        if self._spans is not None:
            spans = SpanCounts.model_validate(self._spans.close())
            problems.append(self._spans.problem and f"rank {self._place.rank}: {self._spans.problem}")
        return WatchSummary(
            node=node,
            spans=spans,
            sample_bytes=sample_bytes,
            problems=tuple(text for text in problems if text),
            load=self._load.summary(),
        )

    def record(self, summaries: Sequence[RankSummary]) -> dict[str, Any]:
        ranks = [rank.result for rank in summaries]
        loads = [rank.watch.load for rank in summaries]
        fields: dict[str, Any] = {"load": node_loads(loads, ranks, [rank.node_rank for rank in ranks])}
        watch, schedule = self._plan.watch, self._schedule
        if watch is None or not watch.is_on:
            return fields
        nodes = [rank.watch.node for rank in summaries if rank.watch.node is not None]
        nodes.sort(key=lambda node: node.node_rank)
        spans = [rank.watch.spans for rank in summaries if rank.watch.spans is not None]
        traced_ranks: tuple[int, ...] = window_ranks(self._plan) if schedule.traced else ()
        first_step = schedule.window.start if schedule.window else None
        fields["watch"] = WatchResult(
            nodes=tuple(nodes),
            window_ranks=traced_ranks,
            window_first_step=first_step,
            window_num_steps=len(schedule.window),
            num_spans=sum(counts.num for counts in spans),
            dropped_spans=sum(counts.dropped for counts in spans),
            trace_bytes=sum(counts.bytes for counts in spans) + sum(rank.watch.sample_bytes for rank in summaries),
            overhead=accounted_overhead(watch, nodes, ranks),
        )
        return fields

    def close(self) -> None:
        """Closes the file of spans, however the run ended; spans of an open window are lost."""
        if self._spans is not None:
            self._spans.close()


def accounted_overhead(
    watch: WatchSpec, nodes: Sequence[NodeWatch], ranks: Sequence[RankResult]
) -> WatchOverhead | None:
    """Returns an upper limit of the share of time that sampling cost; None if it is not known. For the worst node, it
    is the sampler's CPU time over the time of the measured steps, as if the slowest rank had waited for all of it.
    """
    if not watch.is_on:
        return None
    if not watch.sampler:
        evidence = "no sampler ran, and measured steps have no hooks: layers are profiled in the warm-up"
        return WatchOverhead(value=0.0, low=0.0, high=0.0, evidence=evidence)
    shares: dict[int, float] = {}
    for node in nodes:
        measured_s = min((rank.measured_s for rank in ranks if rank.node_rank == node.node_rank), default=0.0)
        if node.measured_cpu_s is not None and measured_s > 0:
            shares[node.node_rank] = node.measured_cpu_s / measured_s
    if not shares:
        return None
    worst = max(shares, key=lambda number: shares[number])
    evidence = (
        f"CPU time of the samplers' processes within the measured steps, known of {len(shares)} of "
        f"{counted(len({rank.node_rank for rank in ranks}), 'node')}; the largest share is that of node {worst}"
    )
    return WatchOverhead(value=shares[worst], low=0.0, high=shares[worst], evidence=evidence)


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

"""One network in one process that trains by one method after the other: passes timed, memory as torch allocates it."""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from benchmarks.memory.by_hand import by_hand
from dlbench.machine.cgroup import peak_resident_bytes, reset_peak, resident_bytes
from dlbench.node.models.build import build_model, loss_for
from dlbench.node.models.optimizers import build_optimizer
from dlbench.node.out_of_core.device_memory import CpuPeaks, trim
from dlbench.node.out_of_core.host_update import HostUpdater, host_parameters
from dlbench.node.out_of_core.planning import MemoryPlan, Workbench, far_tier, planned
from dlbench.node.training.activations import ActivationMemory, trial_passes
from dlbench.node.training.precision import Precision
from dlbench.perfmodels.out_of_core.blocks import block_starts
from dlbench.perfmodels.out_of_core.planner import largest_batch
from dlbench.perfmodels.out_of_core.search import smallest_capacity
from dlbench.specs.expand import expand
from dlbench.specs.out_of_core import Chain
from dlbench.specs.plan import AxisValue, RunPlan
from dlbench.specs.requests import Request
from dlbench.specs.training import TrainSpec

IN_CORE, PLAN = "in core", "plan"
BASELINES: dict[str, dict[str, AxisValue]] = {
    "checkpoint": {"train.recompute": "blocks"},
    "offload": {"train.swap": "offload"},
    "streamed": {"train.swap": "streamed"},
    "checkpoint + streamed": {"train.recompute": "blocks", "train.swap": "streamed"},
}
METHODS: dict[str, dict[str, AxisValue]] = {
    IN_CORE: {},
    **BASELINES,
    PLAN: {"train.recompute": "planned", "train.swap": "planned"},
}


def give_back_freed(from_bytes: int) -> None:
    """Tensors of at least so much are mapped one by one, and unmapped when freed: resident memory is what is live.

    In place of keeping them, as training does, for which a variable of the C library's has to be set first.
    """
    mallopt = ctypes.CDLL(None).mallopt
    for name, value in ((_M_MMAP_THRESHOLD, from_bytes), (_M_MMAP_MAX, 1 << 16), (_M_TRIM_THRESHOLD, 64 << 20)):
        if mallopt(name, value) != 1:
            raise RuntimeError("this C library has no mallopt")


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # numbers of mallopt(3)


@dataclass(frozen=True)
class Seconds:
    """Medians of some steps."""

    step: float
    passes: float
    """Forward and backward pass alone: what a plan predicts."""


class Workshop:
    """A workload with a batch on this machine's CPU.

    Args:
        workload: its name; of preset ci.
        batch: samples of a step; None: as the preset has it.
        folder: of swap files.
        settings: overrides.
        model: further ones of the network, as the model's fields have them.
        blocks: names of the modules with which blocks begin where every block is treated alike and recomputed; none:
            every unit is one.
        host: whether the host updates parameters.
    """

    def __init__(
        self,
        workload: str,
        batch: int | None,
        folder: str,
        settings: Mapping[str, AxisValue] | None = None,
        model: Mapping[str, Any] | None = None,
        blocks: tuple[str, ...] = (),
        *,
        host: bool = False,
    ) -> None:
        self._workload, self._batch, self._folder = workload, batch, folder
        self._settings, self._starts = dict(settings or {}), blocks
        self.device = torch.device("cpu")
        plan = self._expanded({})
        torch.manual_seed(0)
        spec = plan.workload.model.model_copy(update=dict(model or {}))
        self.model = build_model(spec)
        self._optimizer = build_optimizer(self.model, plan.workload.train.optimizer)
        precision = Precision(plan.workload.train, self.device)
        plan = plan.model_copy(update={"workload": plan.workload.model_copy(update={"model": spec})})
        passes = trial_passes(plan, self.model, self.device, precision, loss_for(spec))
        self._loss_of, self._batch_of = passes.loss_of, passes.batch_of
        self._samples = self._batch_of(plan.workload.train.batch_per_rank)
        self.host: HostUpdater | None = None
        if host:
            parameters = host_parameters(self.model.parameters(), self.device, plan.workload.train.optimizer)
            self.host = HostUpdater(self.model, self._optimizer, plan.workload.train.optimizer, parameters)

    def _expanded(self, more: Mapping[str, AxisValue]) -> RunPlan:
        overrides: dict[str, AxisValue] = {**self._settings, **more}
        if self._batch is not None:
            overrides["train.batch_per_rank"] = self._batch
        if "train.swap" in more:
            overrides["train.memory.swap_folder"] = self._folder
        request = Request(workload=self._workload, preset="ci", engine="single", overrides=overrides)
        return expand(request, machine_cores=len(os.sched_getaffinity(0)))[0]

    def train(self, method: str, capacity: int | None = None) -> TrainSpec:
        """The settings of a method, a plan's with its capacity in bytes."""
        more = dict(METHODS[method])
        if method == PLAN:
            assert capacity is not None
            more["train.memory.capacity"] = str(capacity)
        found = self._expanded(more).workload.train
        if self._starts and found.recompute == "blocks":
            memory = found.memory.model_copy(update={"blocks": self._starts})
            found = found.model_copy(update={"memory": memory})
        return found

    def _open_tier(self, num_bytes: int) -> Any:
        plan = self._expanded(METHODS["streamed"])
        storage, train = plan.system.storage, plan.workload.train
        return far_tier(train, storage, self.device, host="bench", rank=0, variables=os.environ)(num_bytes)

    @cached_property
    def measured(self) -> tuple[Any, Chain, Any]:
        """Units, chain and transfer rates, measured now."""
        bench = Workbench(
            model=self.model,
            train=self.train("streamed"),
            device=self.device,
            loss_of=self._loss_of,
            batch_of=self._batch_of,
            open_tier=self._open_tier,
            beat=lambda _: None,
        )
        cut, chain, rates, _ = bench.measure()
        return cut, chain, rates

    def plan(self, method: str, capacity: int | None = None) -> MemoryPlan:
        """What is done with every block.

        Raises:
            EnvironmentLacksError: nothing fits the capacity.
        """
        cut, chain, rates = self.measured
        train = self.train(method, capacity)
        found, in_core = planned(chain, rates if train.swap != "none" else None, train)
        return MemoryPlan(
            cut=cut, chain=chain, rates=rates, plan=found, in_core_bytes=in_core, profile_s=0.0, warnings=()
        )

    def largest_batch(self, method: str, budget: int) -> int:
        """The largest that keeps within a budget, by the chain; 0: none does."""
        _, chain, rates = self.measured
        train = self.train(method, budget)
        starts = block_starts(train.memory.blocks, [unit.name for unit in chain.units])
        return largest_batch(chain, rates, (train.recompute, train.swap), budget, starts=starts)

    def smallest_bytes(self) -> int:
        """The smallest capacity of a plan."""
        return smallest_capacity(self.measured[1], recompute=True, swap=True)

    @property
    def in_core_bytes(self) -> int:
        """What training holds in core, by the chain."""
        return self.plan("checkpoint").in_core_bytes

    @contextmanager
    def training_by(self, method: str, capacity: int | None = None) -> Iterator[ActivationMemory | None]:
        """Within it the network trains by a method."""
        if method == IN_CORE:
            yield None
            return
        memory = ActivationMemory(
            *(self.train(method, capacity), self.plan(method, capacity), self.model, self.device, 0, self._open_tier),
            wrap_block=None,
        )
        try:
            yield memory
        finally:
            memory.close()

    @contextmanager
    def training_by_hand(self, method: str, capacity: int | None = None) -> Iterator[None]:
        """The same blocks and decisions without dlbench."""
        found, swap = self.plan(method, capacity), self.train(method, capacity).swap
        tier = self._open_tier(found.plan.predicted.swapped_bytes) if swap != "none" else None
        try:
            with by_hand(self.model, found.cut.units, found.plan.blocks, tier, blocking=swap == "offload"):
                yield
        finally:
            if tier is not None:
                tier.close()

    def step(self) -> tuple[float, float]:
        """One step: its seconds, and those of its passes."""
        begun = time.monotonic()
        loss = self._loss_of(self._samples)
        if self.host is not None:
            self.host.settle()
        loss.backward()  # type: ignore[no-untyped-call]
        passed = time.monotonic()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.monotonic() - begun, passed - begun

    def run(self, number: int) -> float:
        """Seconds of so many steps, the last one's update included."""
        begun = time.monotonic()
        for _ in range(number):
            self.step()
        if self.host is not None:
            self.host.settle()
        return time.monotonic() - begun

    def steps(self, number: int, *, warm: int) -> Seconds:
        """Medians of so many steps, after some that do not count."""
        found = [self.step() for _ in range(warm + number)][warm:]
        return Seconds(statistics.median(one for one, _ in found), statistics.median(one for _, one in found))

    def peak_bytes(self) -> int:
        """The most that a step holds: state and batch, and what resident memory grows by in the step.

        Only in a process that gave memory back to the system from its start (`give_back_freed`).
        """
        for _ in range(2):  # libraries make their own buffers in the first
            self.step()
        trim()  # what small tensors left free
        before = resident_bytes()
        if before is None or not reset_peak():
            raise RuntimeError("the kernel does not tell resident memory")
        self.step()
        return self._held_between() + (peak_resident_bytes() or 0) - before

    def live_bytes(self) -> int:
        """The same by torch's profiler: every tensor's memory, when it is taken and when it goes."""
        self.step()
        held = self._held_between()
        with CpuPeaks() as meter:
            meter.mark("step")
            self.step()
        return held + meter.held()["step"].peak

    def _held_between(self) -> int:
        """Parameters, buffers, the optimizer's state and the batch."""
        state = [t for one in self._optimizer.state.values() for t in one.values() if isinstance(t, torch.Tensor)]
        held = [*self.model.parameters(), *self.model.buffers(), *state, *self._samples.values()]
        return sum(t.numel() * t.element_size() for t in held)

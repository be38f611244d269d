"""Activations of one rank while it trains: measured, planned and then kept, moved or recomputed as the plan says."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dlbench.machine.host_memory import resident_bytes
from dlbench.node.data.synthetic import synthetic_batch
from dlbench.node.data.text import arranged
from dlbench.node.models.build import Batch, Loss
from dlbench.node.out_of_core.cut import BlockFunction
from dlbench.node.out_of_core.device_memory import KEPT_FREED, peak_bytes, trim
from dlbench.node.out_of_core.executor import OutOfCore
from dlbench.node.out_of_core.planning import (
    Gather,
    MemoryPlan,
    Workbench,
    alone,
    checkpoint_bytes,
    far_tier,
    plan_memory,
)
from dlbench.node.out_of_core.spans import LaneSpan
from dlbench.node.out_of_core.tiers import Tier
from dlbench.node.page_locked import require_room
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.build_engine import exchange_memory
from dlbench.node.sync.engine import Value, settings_of
from dlbench.node.sync.timing import clock_for
from dlbench.node.training.context import RankContext
from dlbench.node.training.precision import Precision
from dlbench.node.training.step_schedule import StepSchedule
from dlbench.perfmodels.out_of_core.blocks import BlockCosts
from dlbench.perfmodels.out_of_core.planner import PREFETCH, saves_nothing
from dlbench.perfmodels.out_of_core.simulator import simulate
from dlbench.records.out_of_core import MemoryResult, RankMemory, TransferSpan
from dlbench.records.record import HeldMemory, Setting
from dlbench.specs.plan import RunPlan
from dlbench.specs.training import TrainSpec
from dlbench.units import format_bytes


def sample_loss(model: nn.Module, loss: Loss, precision: Precision) -> Callable[[Batch], torch.Tensor]:
    """Forward pass and loss of a batch in the precision of training."""

    def loss_of(batch: Batch) -> torch.Tensor:
        with precision.autocast():
            return loss(model, batch)

    return loss_of


def sample_batches(plan: RunPlan, device: torch.device) -> Callable[[int], Batch]:
    """Makes N samples of the shapes that training will have, on the device."""

    def batch_of(samples: int) -> Batch:
        generator, workload = torch.Generator().manual_seed(0), plan.workload
        counts = workload.data.keeps_counts(on_gpu=device.type == "cuda")
        made = synthetic_batch(workload.model, workload.data, samples, generator, counts=counts)
        if workload.data.is_synthetic:
            made = arranged(made, workload.model)
        return {name: tensor.to(device) for name, tensor in made.items()}

    return batch_of


def workbench(
    plan: RunPlan,
    place: RankPlace,
    model: nn.Module,
    device: torch.device,
    precision: Precision,
    loss: Loss,
    *,
    beat: Callable[[str], None],
    gather: Gather = alone,
) -> Workbench:
    """What the memory of a plan's network is measured with; arguments as of `activation_memory`."""
    train = plan.workload.train
    exchange_bytes, gradients_stay = exchange_memory(plan, model, device)
    return Workbench(
        model=model,
        train=train,
        device=device,
        loss_of=sample_loss(model, loss, precision),
        batch_of=sample_batches(plan, device),
        open_tier=far_tier(
            *(train, plan.system.storage, device), host=place.host, rank=place.rank, variables=os.environ, beat=beat
        ),
        beat=beat,
        gather=gather,
        exchange_bytes=exchange_bytes,
        gradients_stay=gradients_stay,
    )


def activation_memory(
    context: RankContext,
    model: nn.Module,
    precision: Precision,
    loss: Loss,
    wrap_block: Callable[[BlockFunction], BlockFunction] | None,
    allocator: str | None,
) -> ActivationMemory:
    """What a plan says of activations, installed on the network; not for training in core."""
    plan, place, device = context.plan, context.place, context.device
    context.watch.stage("profiling memory")
    bench = workbench(*(plan, place, model, device, precision, loss), beat=context.beat, gather=context.engine.gather)
    found = plan_memory(bench)
    if allocator == KEPT_FREED:
        trim()  # What measuring freed is no part of what training holds.
    if context.on_gpu:
        locked = found.plan.predicted.swapped_bytes
        what, kept = f"train.swap {plan.workload.train.swap}", checkpoint_bytes(plan, place.rank, model)
        require_room(locked, what, place, context.engine.gather, checkpoint_bytes=kept)
    context.watch.stage("building")
    return ActivationMemory(
        *(plan.workload.train, found, model, device, place.rank, bench.open_tier),
        allocator=allocator,
        wrap_block=wrap_block,
    )


class ActivationMemory:
    """A plan at work."""

    def __init__(
        self,
        train: TrainSpec,
        found: MemoryPlan,
        model: nn.Module,
        device: torch.device,
        rank: int,
        open_tier: Callable[[int], Tier],
        *,
        allocator: str | None = None,
        wrap_block: Callable[[BlockFunction], BlockFunction] | None,
    ) -> None:
        self._allocator = allocator
        self._train, self._device, self._rank = train, device, rank
        self.found = found
        own = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
        self._process_bytes = (resident_bytes() or 0) - own  # without the network
        plan, chain = found.plan, found.chain
        moves = any(block.decision in ("swap", "recompute-swap") for block in plan.blocks)
        # On a GPU offload is torch's own save_on_cpu.
        own = not (train.swap == "offload" and device.type == "cuda")
        self._tier = open_tier(plan.predicted.swapped_bytes) if moves and own else None
        self._tier_words = self._tier.words if self._tier is not None else None
        capacity = plan.capacity_bytes
        prefetch = PREFETCH[train.swap]
        leaving = simulate(chain, plan.blocks, found.rates, capacity, prefetch=prefetch).leaving if moves else ()
        self._blocks = OutOfCore(
            model,
            found.units,
            plan.blocks,
            tier=self._tier,
            budget_bytes=None if capacity is None else max(0, capacity - chain.fixed_bytes),
            costs=BlockCosts(chain, blocking=prefetch == "blocking").of_plan(plan.blocks),
            turn_bytes=chain.turn_bytes,
            prefetch=prefetch,
            leaving=leaving,
            verify=train.memory.verify,
            rank=rank,
            clock=clock_for(device),
            wrap_block=wrap_block,
        )
        self._blocks.install()
        self._watched_from: int | None = None
        self._spans: list[LaneSpan] = []

    def before_warmup(self, step: int, schedule: StepSchedule) -> None:
        """Transfers are watched in the steps whose messages are kept one by one, else in the last of the warm-up."""
        first = schedule.traced.start if schedule.traced else schedule.warmup - 1
        if step == first and self._watched_from is None:
            self._watched_from = step
            self._blocks.watch(True)

    def close_window(self) -> None:
        if self._watched_from is not None and not self._spans:
            self._blocks.watch(False)
            self._spans = self._blocks.take_spans()

    def begin_measuring(self) -> None:
        self._blocks.begin_measuring()

    def computes(self, module: nn.Module) -> bool:
        return self._blocks.computes(module)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know, each as one sentence."""
        found = [*self.found.warnings, *self._blocks.warnings]
        if self._tier is not None:
            found += [text for text in self._tier.warnings if text not in found]
        if all(block.decision == "keep" for block in self.found.plan.blocks):
            found.append("fits in core: nothing swapped or recomputed")
            return tuple(found)
        capacity, reserved = self.found.plan.capacity_bytes, self._reserved_bytes
        if capacity is not None and reserved is not None and reserved > capacity:
            found.append(
                f"torch's allocator took {format_bytes(reserved)} from the GPU for tensors of at most "
                f"{format_bytes(torch.cuda.max_memory_allocated(self._device))}: a GPU with no more than "
                "train.memory.capacity would not do, or only with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            )
        resident = peak_bytes(self._device) - self._process_bytes if self._allocator == KEPT_FREED else 0
        # Buffers of libraries, input and exchange are resident as well.
        if capacity is not None and resident > 1.1 * capacity:
            found.append(
                f"the process grew by {format_bytes(resident)} in training: it would not fit into "
                "train.memory.capacity; MALLOC_MMAP_THRESHOLD_=1048576 in the environment makes it fit, and slower"
            )
        peak, in_core = self.found.plan.predicted.peak_bytes, self.found.in_core_bytes
        if saves_nothing(peak, in_core):
            found.append(
                f"recomputing and swapping save no memory here: {format_bytes(peak)} at most, {format_bytes(in_core)} "
                "in core; the most is held where they change nothing"
            )
        if self._train.compile != "none":
            found.append(
                "the plan rests on a chain that was measured without train.compile, which changes what blocks take"
            )
        return tuple(found)

    def spans(self) -> list[tuple[int, LaneSpan]]:
        first, parts = self._watched_from or 0, self._train.gradient_accumulation
        return [(first + span.number // parts, span) for span in self._spans]

    def summary(self, held: HeldMemory | None = None) -> dict[str, Any]:
        """What rank 0 needs of this rank, plain Python. `held`: what a step was seen to hold; not asked on a GPU."""
        peak = held.peak if held is not None else None
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
        counts = self._blocks.summary()
        passes = int(counts.pop("passes"))
        return {
            "rank": self._rank,
            "steps": passes // self._train.gradient_accumulation,
            "device_peak_bytes": peak,
            "device_reserved_bytes": self._reserved_bytes,
            **counts,
        }

    @property
    def _reserved_bytes(self) -> int | None:
        return torch.cuda.max_memory_reserved(self._device) if self._device.type == "cuda" else None

    def result(self, everyone: Sequence[dict[str, Any]]) -> MemoryResult:
        """What the record says, from the summaries of all ranks; on rank 0."""
        found, train = self.found, self._train
        return MemoryResult(
            recompute=train.recompute,
            swap=train.swap,
            tier=self._tier_words,
            parts=train.gradient_accumulation,
            chain=found.chain,
            rates=found.rates,
            plan=found.plan,
            in_core_bytes=found.in_core_bytes,
            profile_s=found.profile_s,
            checksum_share=1.0 if train.memory.verify and self._tier is not None else None,
            ranks=tuple(RankMemory.model_validate(one) for one in everyone),
            timeline=_timeline(self._spans),
        )

    def settings(self) -> list[Setting]:
        plan = self.found.plan
        count = {name: sum(block.decision == name for block in plan.blocks) for name in _DECIDED}
        decided = ", ".join(f"{number} {_DECIDED[name]}" for name, number in count.items() if number)
        blocks = f"{len(plan.blocks)} blocks: {decided}"
        moved = f"{format_bytes(plan.predicted.swapped_bytes)} of a pass leave the device and come back"
        train, capacity = self._train, self._train.memory.capacity
        rows: list[tuple[str, Value, Value, str]] = [
            ("train.recompute", train.recompute, train.recompute, blocks),
            ("train.swap", train.swap, train.swap, moved),
        ]
        if plan.capacity_bytes is not None:
            planned = f"planned {plan.predicted.peak_bytes}, in core {self.found.in_core_bytes}"
            rows.append(("train.memory.capacity", capacity, capacity, f"{plan.capacity_bytes} bytes; {planned}"))
        return settings_of(*rows)

    def close(self) -> None:
        """Nothing is left on the network or in the far tier; twice does no harm."""
        self._blocks.close()


_DECIDED = {
    "keep": "kept",
    "swap": "swapped",
    "recompute": "recomputed",
    "recompute-swap": "recomputed with their input swapped",
}


def _timeline(spans: Sequence[LaneSpan]) -> tuple[TransferSpan, ...]:
    if not spans:
        return ()
    last = max(span.number for span in spans)
    shown = [span for span in spans if span.number == last]
    begin = min(span.start_ns for span in shown)
    return tuple(
        TransferSpan(
            lane=span.lane,
            kind=span.kind,
            block=span.block,
            start_s=(span.start_ns - begin) / 1e9,
            end_s=(span.end_ns - begin) / 1e9,
        )
        for span in sorted(shown, key=lambda span: (span.start_ns, span.end_ns))
    )

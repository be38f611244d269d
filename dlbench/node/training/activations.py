"""Activations of one rank while it trains: measured, planned and then kept, moved or recomputed as the plan says."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import nn

from dlbench.machine.host_memory import resident_bytes
from dlbench.node.data.synthetic import synthetic_batch
from dlbench.node.data.text import arranged
from dlbench.node.out_of_core.cut import BlockFunction
from dlbench.node.out_of_core.device_memory import KEPT_FREED, peak_bytes, trim
from dlbench.node.out_of_core.executor import OutOfCore
from dlbench.node.out_of_core.planning import (
    Gather,
    MemoryPlan,
    Workbench,
    checkpoint_bytes,
    far_tier,
    plan_memory,
)
from dlbench.node.out_of_core.spans import LaneSpan
from dlbench.node.out_of_core.tiers import Tier
from dlbench.node.page_locked import require_room
from dlbench.node.part import Batch, Loss, TrainingPart, TrialPasses
from dlbench.node.ranks import RankPlace
from dlbench.node.step_schedule import StepSchedule
from dlbench.node.sync.build_engine import exchange_memory
from dlbench.node.sync.engine import Value, settings_of
from dlbench.node.sync.timing import clock_for
from dlbench.node.training.context import RankContext
from dlbench.node.training.precision import Precision
from dlbench.perfmodels.out_of_core.blocks import BlockCosts
from dlbench.perfmodels.out_of_core.planner import PREFETCH, saves_nothing
from dlbench.perfmodels.out_of_core.simulator import simulate
from dlbench.records.out_of_core import MemoryResult, RankMemory, TransferSpan
from dlbench.records.rank_summary import RankSummary
from dlbench.records.record import HeldMemory, RankResult, Setting
from dlbench.specs.plan import RunPlan
from dlbench.specs.training import TrainSpec
from dlbench.units import format_bytes

_DECIDED = {
    "keep": "kept",
    "swap": "swapped",
    "recompute": "recomputed",
    "recompute-swap": "recomputed with their input swapped",
}


def trial_passes(
    plan: RunPlan,
    model: nn.Module,
    device: torch.device,
    precision: Precision,
    loss: Loss,
    *,
    beat: Callable[[str], None] = lambda _what: None,
    stage: Callable[[str], None] = lambda _name: None,
) -> TrialPasses:
    """Returns passes of a plan's network in the precision of training, over batches of the shapes of training."""
    workload, train = plan.workload, plan.workload.train

    def loss_of(batch: Batch) -> torch.Tensor:
        with precision.autocast():
            return loss(model, batch)

    def batch_of(samples: int) -> Batch:
        generator = torch.Generator().manual_seed(0)
        counts = workload.data.keeps_counts(on_gpu=device.type == "cuda")
        made = synthetic_batch(workload.model, workload.data, samples, generator, counts=counts)
        if workload.data.is_synthetic:
            made = arranged(made, workload.model)
        return {name: tensor.to(device) for name, tensor in made.items()}

    samples = train.batch_per_rank // train.gradient_accumulation
    return TrialPasses(model=model, loss_of=loss_of, batch_of=batch_of, samples=samples, beat=beat, stage=stage)


def workbench(plan: RunPlan, place: RankPlace, device: torch.device, passes: TrialPasses, gather: Gather) -> Workbench:
    """Returns what the memory of a plan's network is measured with."""
    train = plan.workload.train
    exchange_bytes, gradients_stay = exchange_memory(plan, passes.model, device)
    return Workbench(
        model=passes.model,
        train=train,
        device=device,
        loss_of=passes.loss_of,
        batch_of=passes.batch_of,
        open_tier=far_tier(
            *(train, plan.system.storage, device),
            host=place.host,
            rank=place.rank,
            variables=os.environ,
            beat=passes.beat,
        ),
        beat=passes.beat,
        gather=gather,
        exchange_bytes=exchange_bytes,
        gradients_stay=gradients_stay,
    )


class ActivationMemory(TrainingPart):
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

    @classmethod
    def of_rank(
        cls,
        context: RankContext,
        passes: TrialPasses,
        wrap_block: Callable[[BlockFunction], BlockFunction] | None,
        allocator: str | None,
    ) -> Self:
        """Measures the network, plans its activations and installs the plan; called by all ranks."""
        plan, place, device, train = context.plan, context.place, context.device, context.plan.workload.train
        passes.stage("profiling memory")
        bench = workbench(plan, place, device, passes, context.engine.gather)
        found = plan_memory(bench)
        if allocator == KEPT_FREED:
            trim()  # What measuring freed is no part of what training holds.
        if context.on_gpu:
            checkpoint = checkpoint_bytes(plan, place.rank, passes.model)
            locked, what = found.plan.predicted.swapped_bytes, f"train.swap {train.swap}"
            require_room(locked, what, place, context.engine.gather, checkpoint_bytes=checkpoint)
        passes.stage("building")
        parts = train, found, passes.model, device, place.rank, bench.open_tier
        return cls(*parts, allocator=allocator, wrap_block=wrap_block)

    def before_warmup(self, step: int, schedule: StepSchedule) -> None:
        """Watches transfers in the steps whose messages are kept one by one, else in the last of the warm-up."""
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

    def summary(self, result: RankResult) -> dict[str, Any]:
        return {"memory": self.rank_memory(result.held)}

    def rank_memory(self, held: HeldMemory | None = None) -> RankMemory:
        """Returns what this rank moved. `held`: what a step was seen to hold; not asked on a GPU."""
        peak = held.peak if held is not None else None
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
        counts = self._blocks.summary()
        passes = int(counts.pop("passes"))
        about = {"rank": self._rank, "steps": passes // self._train.gradient_accumulation, **counts}
        return RankMemory.model_validate(
            {"device_peak_bytes": peak, "device_reserved_bytes": self._reserved_bytes, **about}
        )

    @property
    def _reserved_bytes(self) -> int | None:
        return torch.cuda.max_memory_reserved(self._device) if self._device.type == "cuda" else None

    def record(self, everyone: Sequence[RankSummary]) -> dict[str, Any]:
        found, train = self.found, self._train
        result = MemoryResult(
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
            ranks=tuple(rank.memory for rank in everyone if rank.memory is not None),
            timeline=_timeline(self._spans),
        )
        return {"memory": result}

    def record_warnings(self, everyone: Sequence[RankSummary]) -> list[str]:
        ranks = [rank.memory for rank in everyone if rank.memory is not None and rank.memory.over_budget_bytes]
        if not ranks:
            return []
        worst = max(ranks, key=lambda rank: rank.over_budget_bytes)
        return [
            f"activations took up to {format_bytes(worst.over_budget_bytes)} more than the plan allowed on "
            f"{len(ranks)} of {len(everyone)} ranks, most on rank {worst.rank}"
        ]

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

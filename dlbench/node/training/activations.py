"""Activations of one rank while it trains: measured, planned and then kept, moved or recomputed as the plan says."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, Self

import torch
from torch import nn

from dlbench.machine.cgroup import resident_bytes
from dlbench.node.data.synthetic import synthetic_batch
from dlbench.node.data.text import arranged
from dlbench.node.out_of_core.cut import BlockFunction
from dlbench.node.out_of_core.device_memory import KEPT_FREED, peak_bytes, trim
from dlbench.node.out_of_core.executor import OutOfCore
from dlbench.node.out_of_core.planning import Gather, MemoryPlan, Workbench, checkpoint_bytes, far_tier, plan_memory
from dlbench.node.out_of_core.tiers import LaneSpan, Tier
from dlbench.node.page_locked import require_room
from dlbench.node.part import Batch, Loss, StepSchedule, TrainingPart, TrialPasses
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.build_engine import exchange_memory
from dlbench.node.sync.engine import Value, settings_of
from dlbench.node.sync.timing import clock_for
from dlbench.node.training.context import RankContext
from dlbench.node.training.precision import Precision
from dlbench.perfmodels.out_of_core.blocks import BlockCosts
from dlbench.perfmodels.out_of_core.planner import PREFETCH, saves_nothing
from dlbench.perfmodels.out_of_core.simulator import simulate
from dlbench.records.out_of_core import MemoryResult, RankMemory, TransferSpan
from dlbench.records.record import HeldMemory, RankResult, RankSummary, Setting
from dlbench.specs.plan import RunPlan
from dlbench.units import format_bytes

_DECISION_WORDS = {
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
        voxel_counts = workload.data.keeps_voxel_counts(on_gpu=device.type == "cuda")
        batch = synthetic_batch(workload.model, workload.data, samples, generator, voxel_counts=voxel_counts)
        if workload.data.is_synthetic:
            batch = arranged(batch, workload.model)
        return {name: tensor.to(device) for name, tensor in batch.items()}

    samples = train.batch_per_rank // train.gradient_accumulation
    return TrialPasses(model=model, loss_of=loss_of, batch_of=batch_of, samples=samples, beat=beat, stage=stage)


def workbench(plan: RunPlan, place: RankPlace, device: torch.device, passes: TrialPasses, gather: Gather) -> Workbench:
    """Returns what is needed to measure the memory of a plan's network."""
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
    """Carries out a memory plan: keeps, moves or recomputes the activations of a network's blocks."""

    def __init__(
        self,
        bench: Workbench,
        memory_plan: MemoryPlan,
        rank: int,
        *,
        allocator: str | None = None,
        wrap_block: Callable[[BlockFunction], BlockFunction] | None,
    ) -> None:
        """`bench` is what `memory_plan` was made with; `wrap_block` compiles the function of a block."""
        train, model, device = bench.train, bench.model, bench.device
        self._allocator = allocator
        self._train, self._device, self._rank = train, device, rank
        self.memory_plan = memory_plan
        network_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        self._process_bytes = (resident_bytes() or 0) - network_bytes
        plan, chain = memory_plan.plan, memory_plan.chain
        capacity, prefetch = plan.capacity_bytes, PREFETCH[train.swap]
        self._tier: Tier | None = None
        self._tier_words: str | None = None
        leaving: Collection[int] = ()
        if any(block.decision in ("swap", "recompute-swap") for block in plan.blocks):
            leaving = simulate(chain, plan.blocks, memory_plan.rates, capacity, prefetch=prefetch).leaving
            # On a GPU offload is torch's own save_on_cpu, which needs no tier.
            if train.swap != "offload" or device.type != "cuda":
                self._tier = bench.open_tier(plan.predicted.swapped_bytes)
                self._tier_words = self._tier.words
        budget_bytes = max(0, capacity - chain.fixed_bytes) if capacity is not None else None
        self._blocks = OutOfCore(
            model,
            memory_plan.units,
            plan.blocks,
            tier=self._tier,
            budget_bytes=budget_bytes,
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
        memory_plan = plan_memory(bench)
        if allocator == KEPT_FREED:
            trim()  # memory that only profiling used must not count as memory of training
        if context.on_gpu:
            checkpoint = checkpoint_bytes(plan, place.rank, passes.model)
            locked_bytes = memory_plan.plan.predicted.swapped_bytes
            require_room(
                locked_bytes, f"train.swap {train.swap}", place, context.engine.gather, checkpoint_bytes=checkpoint
            )
        passes.stage("building")
        return cls(bench, memory_plan, place.rank, allocator=allocator, wrap_block=wrap_block)

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
        texts = [*self.memory_plan.warnings, *self._blocks.warnings]
        if self._tier is not None:
            texts += [text for text in self._tier.warnings if text not in texts]
        if all(block.decision == "keep" for block in self.memory_plan.plan.blocks):
            texts.append("fits in core: nothing swapped or recomputed")
            return tuple(texts)
        capacity, reserved = self.memory_plan.plan.capacity_bytes, self._reserved_bytes
        if capacity is not None and reserved is not None and reserved > capacity:
            texts.append(
                f"torch's allocator took {format_bytes(reserved)} from the GPU for tensors of at most "
                f"{format_bytes(torch.cuda.max_memory_allocated(self._device))}: a GPU with train.memory.capacity is "
                "too small, unless PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True is set"
            )
        if capacity is not None and self._allocator == KEPT_FREED:
            growth_bytes = peak_bytes(self._device) - self._process_bytes
            # The margin is for buffers of libraries, input and exchange, which are resident as well.
            if growth_bytes > 1.1 * capacity:
                texts.append(
                    f"the process grew by {format_bytes(growth_bytes)} in training: it would not fit into "
                    "train.memory.capacity; MALLOC_MMAP_THRESHOLD_=1048576 in the environment makes it fit, and slower"
                )
        peak, in_core = self.memory_plan.plan.predicted.peak_bytes, self.memory_plan.in_core_bytes
        if saves_nothing(peak, in_core):
            texts.append(
                f"recomputing and swapping save no memory here: the peak is {format_bytes(peak)}, and "
                f"{format_bytes(in_core)} without them; it occurs where they change nothing"
            )
        if self._train.compile != "none":
            texts.append(
                "the plan was made from blocks measured without train.compile, which changes their times and memory"
            )
        return tuple(texts)

    def spans(self) -> list[tuple[int, LaneSpan]]:
        first, parts = self._watched_from or 0, self._train.gradient_accumulation
        return [(first + span.number // parts, span) for span in self._spans]

    def summary(self, result: RankResult) -> dict[str, Any]:
        return {"memory": self.rank_memory(result.held)}

    def rank_memory(self, step_memory: HeldMemory | None = None) -> RankMemory:
        """Returns what this rank moved, and its peak; on a CPU the peak is that of `step_memory`."""
        fields: dict[str, Any] = dict(self._blocks.summary())
        fields |= {"rank": self._rank, "steps": int(fields.pop("passes")) // self._train.gradient_accumulation}
        peak = None
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
        elif step_memory is not None:
            peak = step_memory.peak
        fields |= {"device_peak_bytes": peak, "device_reserved_bytes": self._reserved_bytes}
        return RankMemory.model_validate(fields)

    @property
    def _reserved_bytes(self) -> int | None:
        return None if self._device.type != "cuda" else torch.cuda.max_memory_reserved(self._device)

    def record(self, summaries: Sequence[RankSummary]) -> dict[str, Any]:
        memory_plan, train = self.memory_plan, self._train
        checksum_share = 1.0 if train.memory.verify and self._tier is not None else None
        result = MemoryResult(
            recompute=train.recompute,
            swap=train.swap,
            tier=self._tier_words,
            parts=train.gradient_accumulation,
            chain=memory_plan.chain,
            rates=memory_plan.rates,
            plan=memory_plan.plan,
            in_core_bytes=memory_plan.in_core_bytes,
            profile_s=memory_plan.profile_s,
            checksum_share=checksum_share,
            ranks=tuple(rank.memory for rank in summaries if rank.memory is not None),
            timeline=_timeline(self._spans),
        )
        return {"memory": result}

    def record_warnings(self, summaries: Sequence[RankSummary]) -> list[str]:
        ranks = [rank.memory for rank in summaries if rank.memory is not None and rank.memory.over_budget_bytes]
        if not ranks:
            return []
        worst = max(ranks, key=lambda rank: rank.over_budget_bytes)
        return [
            f"activations took up to {format_bytes(worst.over_budget_bytes)} more than the plan allowed on "
            f"{len(ranks)} of {len(summaries)} ranks, most on rank {worst.rank}"
        ]

    def settings(self) -> list[Setting]:
        plan = self.memory_plan.plan
        counts = Counter[str](block.decision for block in plan.blocks)
        decisions = ", ".join(f"{counts[name]} {words}" for name, words in _DECISION_WORDS.items() if name in counts)
        blocks = f"{len(plan.blocks)} blocks: {decisions}"
        moved = f"{format_bytes(plan.predicted.swapped_bytes)} of a pass leave the device and come back"
        train, capacity = self._train, self._train.memory.capacity
        rows: list[tuple[str, Value, Value, str]] = [
            ("train.recompute", train.recompute, train.recompute, blocks),
            ("train.swap", train.swap, train.swap, moved),
        ]
        if plan.capacity_bytes is not None:
            planned = f"planned {plan.predicted.peak_bytes}, in core {self.memory_plan.in_core_bytes}"
            rows.append(("train.memory.capacity", capacity, capacity, f"{plan.capacity_bytes} bytes; {planned}"))
        return settings_of(*rows)

    def close(self) -> None:
        self._blocks.close()


def _timeline(spans: Sequence[LaneSpan]) -> tuple[TransferSpan, ...]:
    if not spans:
        return ()
    last = max(span.number for span in spans)
    last_pass = [span for span in spans if span.number == last]
    begin = min(span.start_ns for span in last_pass)
    return tuple(
        TransferSpan(
            lane=span.lane,
            kind=span.kind,
            block=span.block,
            start_s=(span.start_ns - begin) / 1e9,
            end_s=(span.end_ns - begin) / 1e9,
        )
        for span in sorted(last_pass, key=lambda span: (span.start_ns, span.end_ns))
    )

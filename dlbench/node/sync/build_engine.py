"""Builds the plan's engine for this rank, and computes the memory of its exchange."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import nn

from dlbench.node.ranks import RankPlace
from dlbench.node.sync.engine import Engine, NoSyncEngine
from dlbench.records.folder import RunFolder
from dlbench.records.record import RankGpu
from dlbench.specs.engine import ENGINES
from dlbench.specs.plan import RunPlan


def build_engine(
    plan: RunPlan, folder: RunFolder, place: RankPlace, device: torch.device, gpu: RankGpu | None = None
) -> Engine:
    """Returns the plan's engine, imported only here, or dlbench's own exchange, for which it connects the ranks."""
    module, _, name = ENGINES[plan.engine.name].on_ranks.partition(":")
    engine: Engine = getattr(import_module(module), name)(plan, folder, place, device, gpu)
    if place.size == 1:
        return engine
    if plan.sync.exchange == "none":
        return NoSyncEngine(engine)
    if plan.sync.average_every is not None:
        from dlbench.node.sync.local_sgd import LocalSgd

        return LocalSgd(engine, plan, place, device)
    if plan.sync.is_own:
        from dlbench.node.sync.own.engine import OwnExchange

        return OwnExchange(engine, plan, place, device)
    return engine


def exchange_memory(plan: RunPlan, model: nn.Module, device: torch.device) -> tuple[int, bool]:
    """Returns bytes of the exchange's buffers on the device, and whether gradients live in them beyond a pass."""
    # Not counted: buffers of a compressed wire format; the message of averaged parameters between two steps.
    counts = [p.numel() for p in model.parameters() if p.requires_grad]
    gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    kind, is_alone = plan.engine.kind, plan.layout.ranks == 1
    on_gpu = device.type == "cuda"
    if not kind.synchronises or not (plan.sync.exchanges_gradients or is_alone):
        return 0, False
    if plan.sync.is_own and not is_alone:
        from dlbench.node.sync.own.buckets import arena_elements

        return torch.float32.itemsize * arena_elements(counts, plan.group_size), False
    if plan.engine.name == "ddp":  # at one rank too; buckets hold a second copy of each gradient, or itself as a view
        if plan.engine.ddp.views_buckets(on_gpu=on_gpu):
            return 0, True
        return gradient_bytes, False
    if is_alone or plan.sync.fusion.rule == "none":
        return 0, False
    # Horovod's one buffer of its fusion threshold (fusion_buffer_manager.cc), of which a CPU uses only a part.
    buffer_bytes = plan.sync.library_fusion.bytes or kind.fusion.bytes or 0
    if not on_gpu:
        buffer_bytes = min(buffer_bytes, gradient_bytes)
    return buffer_bytes, False

"""The plan's engine, built for this rank, and the memory that its exchange takes."""

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
    """The engine that the plan names, whose library is imported only here.

    Where the plan leaves gradients to dlbench, the engine only carries its messages; where none is synchronised, it
    only keeps the ranks in touch.
    """
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
    """Bytes of the exchange's buffers on the device, and whether gradients outlast a pass, as they lie in buffers.

    DDP's buckets hold a second copy of each gradient, or are where it lies (gradient_as_bucket_view). Horovod has one
    buffer of the size up to which it fuses (fusion_buffer_manager.cc), of which a CPU's memory holds what is used.
    dlbench's own messages lie in one piece of memory, and gradients until they are part of it. Left out is what a
    format on the wire takes while messages are under way, and the message of averaged parameters, which is there
    between two steps.
    """
    counts = [p.numel() for p in model.parameters() if p.requires_grad]
    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    kind, is_alone = plan.engine.kind, plan.layout.ranks == 1
    if not kind.synchronises or not (plan.sync.exchanges_gradients or is_alone):
        return 0, False
    if plan.sync.is_own and not is_alone:
        from dlbench.node.sync.own.buckets import arena_elements

        return torch.float32.itemsize * arena_elements(counts, plan.group_size), False
    if plan.engine.name == "ddp":  # it makes its buckets at one rank too
        return (0, True) if plan.engine.ddp.views_buckets(on_gpu=device.type == "cuda") else (gradients, False)
    if is_alone or plan.sync.fusion.rule == "none":
        return 0, False
    fused = plan.sync.library_fusion.bytes or kind.fusion.bytes or 0
    return fused if device.type == "cuda" else min(fused, gradients), False

"""What all ranks told becomes the record of the run; on rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dlbench.node.models.flops import forward_macs, training_flops_per_sample
from dlbench.node.sync.autotune import with_tuning_cost
from dlbench.node.training import noise_scale, sanity
from dlbench.node.training.events import Events
from dlbench.node.training.loop import LoopResult
from dlbench.node.training.pauses import Pauses
from dlbench.node.training.prepare import Prepared
from dlbench.node.training.watched import watch_doubts, watch_result
from dlbench.records.exchange import ExchangeResult
from dlbench.records.record import NoiseScale, RankResult, Record, Setting
from dlbench.specs.plan import RunPlan
from dlbench.trace import environment
from dlbench.units import utc_now

Told = Sequence[dict[str, Any]]
"""Of every rank: `result`, `environment`, `warnings`, `norms`, `watch`."""


def make_record(
    plan: RunPlan,
    everyone: Told,
    *,
    ready: Prepared,
    seen: LoopResult,
    pauses: Pauses,
    exchange: ExchangeResult | None,
    settings: list[Setting],
    started: str,
    clock: str,
    device: torch.device,
    events: Events,
) -> Record:
    """The record of a run that came to its end.

    Args:
        plan: the run.
        everyone: what each rank told, by rank.
        ready: what rank 0 trained.
        seen: how its steps went.
        pauses: what happened between them.
        exchange: of gradients; None where nothing was exchanged.
        settings: of the engine.
        started: UTC, ISO 8601, of rank 0's start.
        clock: what measured the phases.
        device: where rank 0 computed.
        events: moments of the run.
    """
    ranks = [RankResult.model_validate(item["result"]) for item in everyone]
    precision = ready.trainee.precision
    steps = seen.steps - ready.course.warmup
    checks = sanity.check(plan, ranks, measured_steps=steps, exchange=exchange, is_scaled=precision.is_scaled)
    layers = forward_macs(plan.workload.model, plan.workload.data)
    reference = everyone[0]["environment"]
    watched = [item["watch"] for item in everyone]
    doubts = [
        *dict.fromkeys(text for item in everyone for text in item["warnings"]),
        *_doubts_of_compute(plan, ranks, device),
        *sanity.exchange_doubts(exchange, is_scaled=precision.is_scaled),
        *watch_doubts(plan, ready.course, watched),
    ]
    return Record.model_validate(
        {
            "run_id": plan.run_id,
            "configuration": plan.configuration_digest(),
            "state": "valid" if all(c.passed for c in checks) else "invalid",
            "started": started,
            "finished": utc_now(),
            "clock": clock,
            "phases": plan.measure.phases,
            "num_parameters": sum(p.numel() for p in ready.model.parameters()),
            "gradient_bytes": sum(p.numel() * p.element_size() for p in ready.model.parameters() if p.requires_grad),
            "ranks": ranks,
            "checks": checks,
            "settings": settings,
            "exchange": with_tuning_cost(exchange, seen.step_s),
            "watch": watch_result(plan, ready.course, watched, ranks),
            "inert": sanity.inert(settings, ranks=plan.layout.ranks),
            "warnings": tuple(doubts),
            "data": ready.source.describe(),
            "steps": seen.steps,
            "first_step": ready.course.first,
            "resumed_from": str(ready.resumed.path) if ready.resumed else None,
            "checkpoints": pauses.checkpoints(),
            "precision": precision.text,
            "overflow_steps": precision.overflow_steps if precision.is_scaled else None,
            "final_loss_scale": precision.scale if precision.is_scaled else None,
            "layers": layers,
            "training_flops_per_sample": training_flops_per_sample(layers),
            "quality": pauses.result(),
            "noise_scale": _noise_scale(plan, [item["norms"] for item in everyone]),
            "events": events.all,
            "environment": reference,
            "environment_differences": _environment_differences(everyone, reference),
        }
    )


def _noise_scale(plan: RunPlan, norms: list[list[list[float]]]) -> NoiseScale | None:
    if not plan.measure.noise_scale:
        return None
    train = plan.workload.train
    return noise_scale.estimate(
        norms, small_batch=train.batch_per_rank // train.gradient_accumulation, large_batch=plan.global_batch
    )


def _doubts_of_compute(plan: RunPlan, ranks: Sequence[RankResult], device: torch.device) -> list[str]:
    found = []
    threads = {rank.threads for rank in ranks}
    if threads != {plan.layout.cores_per_rank}:
        found.append(
            f"ranks computed with {sorted(threads)} threads, the plan says {plan.layout.cores_per_rank} cores a rank"
        )
    if plan.measure.phases == "synchronised" and device.type == "cpu":
        found.append("measure.phases synchronised has no effect on a CPU: its phases are exact anyway")
    return found


def _environment_differences(everyone: Told, reference: dict[str, str]) -> tuple[str, ...]:
    own = ("variable.CUDA_VISIBLE_DEVICES", "variable.HOROVOD_GLOO_IFACE", "variable.GLOO_SOCKET_IFNAME")
    return tuple(
        f"rank {rank}: {text}"
        for rank, item in enumerate(everyone)
        for text in environment.differences(item["environment"], reference, ignore=own)
    )

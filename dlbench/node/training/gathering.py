"""What all ranks told becomes the record of the run; on rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dlbench.machine import environment
from dlbench.node.cores import Seat, settle
from dlbench.node.data.naming import data_set
from dlbench.node.devices import together
from dlbench.node.models.flops import forward_macs, training_flops_per_sample
from dlbench.node.sync.horovod.report import with_tuning_cost
from dlbench.node.training import noise_scale, sanity
from dlbench.node.training.instruments import watch_result
from dlbench.node.training.loop import LoopResult
from dlbench.node.training.pauses.between_steps import Pauses
from dlbench.node.training.pauses.events import Events
from dlbench.node.training.prepare import Prepared
from dlbench.node.training.shuffling import Shuffled
from dlbench.node.training.staging import staging_result
from dlbench.node.training.step_schedule import WATCHED_STEPS, Course
from dlbench.node.watching.agent import window_ranks
from dlbench.node.watching.core_load import node_loads
from dlbench.records.exchange import ExchangeResult
from dlbench.records.memory import MemoryResult
from dlbench.records.record import NoiseScale, RankResult, Record, Setting
from dlbench.specs.plan import RunPlan
from dlbench.specs.watch import WINDOW_STEPS
from dlbench.units import utc_now

Told = Sequence[dict[str, Any]]
"""Of every rank: `result`, `environment`, `nccl`, `warnings`, `reads`, `norms`, `memory`, `watch`, `staging`,
`samples`."""


def make_record(
    plan: RunPlan,
    everyone: Told,
    *,
    ready: Prepared,
    seen: LoopResult,
    pauses: Pauses,
    exchange: ExchangeResult | None,
    settings: list[Setting],
    shuffle: Shuffled,
    started: str,
    clock: str,
    device: torch.device,
    events: Events,
    attempt: int,
) -> Record:
    """The record of a run that came to its end.

    Args:
        plan: the run.
        everyone: what each rank told, by rank.
        ready: what rank 0 trained.
        seen: how its steps went.
        pauses: what happened between them.
        exchange: of gradients; None where nothing was exchanged.
        settings: of the engine, the data path and the memory.
        shuffle: how samples were shuffled.
        started: UTC, ISO 8601, of rank 0's start.
        clock: what measured the phases.
        device: where rank 0 computed.
        events: moments of the run.
        attempt: at the run, from 1.
    """
    ranks = [RankResult.model_validate(item["result"]) for item in everyone]
    settled = settle([_seat(plan, rank) for rank in ranks])
    ranks = [rank.model_copy(update={"pinned": rank.rank in settled.pinned}) for rank in ranks]
    precision, reading = ready.trainee.precision, ready.reading
    # Training to a quality ends when it is met, everywhere after the same step.
    steps = ready.course.measured if plan.measure.until == "steps" else seen.steps - ready.course.warmup
    checks = sanity.check(plan, ranks, measured_steps=steps, exchange=exchange, is_scaled=precision.is_scaled)
    checks += shuffle.checks
    layers = forward_macs(plan.workload.model, plan.workload.data)
    reference = everyone[0]["environment"]
    watched = [item["watch"] for item in everyone]
    exchange = with_layers_told(plan, ready.course, exchange)
    described = ready.source.describe()
    memory = ready.trainee.memory.result([item["memory"] for item in everyone]) if ready.trainee.memory else None
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
            "nccl": together([item["nccl"] for item in everyone]),
            "watch": watch_result(plan, ready.course, watched, ranks),
            "load": node_loads([item["load"] for item in watched], ranks, [rank.node_rank for rank in ranks]),
            "inert": sanity.inert(settings, ranks=plan.layout.ranks),
            "warnings": (*settled.warnings, *_doubts(plan, ready, ranks, everyone, exchange, memory, device)),
            "data": described | data_set(plan.workload.data, described),
            "staging": staging_result(plan, ready.staging, everyone),
            "shuffle": shuffle.result,
            "host_update": ready.trainee.host.result() if ready.trainee.host is not None else None,
            "reading": reading.result([item["reads"] for item in everyone], seen.step_s) if reading else None,
            "memory": memory,
            "steps": seen.steps,
            "first_step": ready.course.first,
            "resumed_from": str(ready.resumed.path) if ready.resumed else None,
            "attempt": attempt,
            "checkpoints": pauses.checkpoints(),
            "precision": precision.text,
            "emulates_precision": any(item["emulates_precision"] for item in everyone),
            "overflow_steps": precision.overflow_steps if precision.is_scaled else None,
            "final_loss_scale": precision.scale if precision.is_scaled else None,
            "layers": layers,
            "training_flops_per_sample": training_flops_per_sample(layers),
            "quality": pauses.result(),
            "noise_scale": _noise_scale(plan, [item["norms"] for item in everyone]),
            "events": events.all,
            "environment": reference,
            "environment_differences": _environment_differences(plan, everyone, reference),
        }
    )


def _seat(plan: RunPlan, rank: RankResult) -> Seat:
    wanted = plan.layout.cores_per_rank
    return Seat(rank=rank.rank, host=rank.host, cores=rank.cores, threads=wanted, pinned=rank.pinned)


def _doubts(
    plan: RunPlan,
    ready: Prepared,
    ranks: Sequence[RankResult],
    everyone: Told,
    exchange: ExchangeResult | None,
    memory: MemoryResult | None,
    device: torch.device,
) -> list[str]:
    """Reasons for doubt, each a sentence."""
    return [
        *dict.fromkeys(text for item in everyone for text in item["warnings"]),
        *dict.fromkeys(text for item in everyone if item["staging"] for text in item["staging"]["warnings"]),
        *_doubts_of_compute(plan, ranks, device),
        *sanity.exchange_doubts(exchange, is_scaled=ready.trainee.precision.is_scaled),
        *watch_doubts(plan, ready.course, [item["watch"] for item in everyone], exchange),
        *(ready.reading.warnings() if ready.reading is not None else []),
        *sanity.memory_doubts(memory),
    ]


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
            f"ranks computed with {sorted(threads)} threads, the plan says {plan.layout.cores_per_rank} cores per rank"
        )
    if plan.measure.phases == "synchronised" and device.type == "cpu":
        found.append("measure.phases synchronised has no effect on a CPU: its phases are exact anyway")
    return found


def _environment_differences(plan: RunPlan, everyone: Told, reference: dict[str, str]) -> tuple[str, ...]:
    places = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    # mpirun hands lists of folders on to its own node only; what is loaded from them has keys of its own.
    lists = environment.DIGESTED
    own = [f"variable.{name}" for name in (*places, *lists, "HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME")]
    if plan.system.launch.launcher == "mpirun":
        # On other nodes than the first its daemon is a step of Slurm's, which says nothing of the ranks.
        own += [key for item in everyone for key in item["environment"] if key.startswith("variable.SLURM_")]
    return tuple(
        f"rank {rank}: {text}"
        for rank, item in enumerate(everyone)
        for text in environment.differences(item["environment"], reference, ignore=own)
    )


def with_layers_told(plan: RunPlan, course: Course, exchange: ExchangeResult | None) -> ExchangeResult | None:
    """The exchange, saying whether layers were watched in the steps from which its times come."""
    if exchange is None or not _are_mixed(plan, course, exchange):
        return exchange
    told = f"{exchange.evidence}; layers were profiled in these steps too, and their hooks lengthen the backward pass"
    return exchange.model_copy(update={"evidence": told})


def _are_mixed(plan: RunPlan, course: Course, exchange: ExchangeResult) -> bool:
    # dlbench's own exchange takes its times from measured steps.
    return bool(window_ranks(plan)) and course.shares_window and exchange.by == "backend" and exchange.window_steps > 0


def watch_doubts(
    plan: RunPlan, course: Course, told: Sequence[Mapping[str, Any]], exchange: ExchangeResult | None
) -> list[str]:
    """What went wrong with watching, and what was asked for and could not be watched, a sentence each."""
    watch = plan.watch
    found = list(dict.fromkeys(text for item in told for text in item["problems"]))
    if watch is None:
        return found
    if course.window and plan.workload.train.is_one_program:
        found.append("layers were not profiled: train.compile and train.cuda_graphs make one program of them")
    steps = len(course.window)
    enough = max(1, course.deciding_steps) + watch.window_steps + WATCHED_STEPS
    is_asked = watch.window_steps != WINDOW_STEPS or "watch.window_steps" in plan.overrides
    if steps < watch.window_steps and is_asked:
        why = "its first is left out"
        if course.deciding_steps:
            why = f"its first {course.deciding_steps} decide on the exchange, its last {WATCHED_STEPS} time it"
        found.append(
            f"watch.window_steps {watch.window_steps}: layers could be profiled in {steps} steps only, as the warm-up "
            f"has {course.warmup} and {why}; set measure.warmup_steps to {enough}"
        )
    if not watch.profiler or not watch.window_steps:
        return found
    if not steps:
        found.append(
            f"watch.profiler: nothing was profiled, as the warm-up has no step for it; set measure.warmup_steps to "
            f"{enough}"
        )
    elif exchange is not None and _are_mixed(plan, course, exchange):
        found.append(
            f"watch.profiler: it ran in the steps from which the times of the exchange come, and lengthens them; set "
            f"measure.warmup_steps to {enough}"
        )
    return found

"""What the ranks say of their training, checked and made into the record of the run, on rank 0.

Sanity before numbers: a run that fails a check yields no performance figure.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from dlbench.datasets.shuffling import exchanged_slots
from dlbench.machine import environment
from dlbench.machine.gpus import numa_nodes_of
from dlbench.node.cores import Seat, settle
from dlbench.node.data.loader import BatchSource
from dlbench.node.data.read_audit import Audited, doubtful_epochs
from dlbench.node.data.source import data_set, files_account
from dlbench.node.devices import rank_gpu, together
from dlbench.node.models.build import forward_macs, training_flops_per_sample
from dlbench.node.out_of_core.device_memory import peak_bytes
from dlbench.node.sync.engine import whole_tensor
from dlbench.node.torch_facts import torch_facts
from dlbench.node.training.context import RankContext
from dlbench.node.training.instruments import watch_result
from dlbench.node.training.loop import LoopResult
from dlbench.node.training.pauses import Pauses
from dlbench.node.training.phases import PhaseTimer
from dlbench.node.training.staging import staging_result
from dlbench.node.training.state import TrainState, estimate_noise_scale
from dlbench.node.training.step_schedule import WATCHED_STEPS, Pacing, StepSchedule
from dlbench.node.watching.agent import window_ranks
from dlbench.node.watching.core_load import node_loads
from dlbench.records.data_path import ShuffleResult
from dlbench.records.exchange import ExchangeResult
from dlbench.records.interrupted import attempt_of
from dlbench.records.out_of_core import MemoryResult
from dlbench.records.record import Check, CheckpointWrite, LayerMacs, RankResult, Record, Setting
from dlbench.specs.plan import RunPlan
from dlbench.specs.watch import WINDOW_STEPS
from dlbench.units import format_bytes, format_seconds, utc_now

Summaries = Sequence[dict[str, Any]]
"""Of every rank: `result`, `environment`, `nccl`, `warnings`, `reads`, `norms`, `memory`, `watch`, `staging`,
`samples`."""


def rank_summary(
    context: RankContext,
    state: TrainState,
    seen: LoopResult,
    pacing: Pacing,
    timer: PhaseTimer,
    startup_s: float,
    failures: Sequence[str],
) -> dict[str, Any]:
    """What this rank has to say, plain Python; see `Summaries`; watching, staging and samples come later."""
    place, device, memory, warnings = context.place, context.device, state.memory, context.warnings
    peak_resident = peak_bytes(torch.device("cpu"))
    if not seen.has_own_peaks and seen.measured_samples:
        warnings.append(
            f"peak resident memory of rank {place.rank} is that since its start, what was measured before training "
            "included: the kernel does not let it begin anew (/proc/self/clear_refs)"
        )
    on_gpu = context.on_gpu
    result = RankResult(
        rank=place.rank,
        node_rank=place.node_rank,
        host=place.host,
        switch=place.switch,
        device=f"{device} ({torch.cuda.get_device_name(device)})" if on_gpu else "cpu",
        cores=context.binding.cores,
        threads=torch.get_num_threads(),
        pinned=context.binding.pinned,
        numa_nodes=numa_nodes_of(context.binding.cores),
        gpu=rank_gpu(device, context.binding.gpu),
        samples=seen.measured_samples,
        measured_s=seen.measured_ns / 1e9,
        first_loss=seen.losses[0] if math.isfinite(seen.losses[0]) else None,
        last_loss=seen.losses[-1] if math.isfinite(seen.losses[-1]) else None,
        losses_finite=all(math.isfinite(loss) for loss in seen.losses),
        initial_parameters_sha256=state.initial_digest,
        final_parameters_sha256=parameters_digest(state.model),
        peak_memory_bytes=peak_bytes(device) if on_gpu else peak_resident,
        peak_reserved_bytes=torch.cuda.max_memory_reserved(device) if on_gpu else None,
        peak_resident_bytes=peak_resident,
        startup_peak_bytes=seen.startup_peak_bytes,
        held=state.held.result if state.held is not None else None,
        waits=context.engine.waits(),
        startup_s=startup_s,
        compiling=state.compilation.result() if state.compilation is not None else None,
        bad_samples=tuple(failures[:20]),
        bad_sample_count=len(failures),
        garbage_collections=seen.garbage.collections,
        garbage_s=seen.garbage.seconds,
        clock_error_s=timer.clock_error_ns / 1e9,
        planted_s=state.fault.injected_s if state.fault is not None else 0.0,
    )
    if place.rank == 0:
        warnings += pacing.warnings(seen.step_s, on_gpu=on_gpu)
    if seen.garbage.in_steps:
        warnings.append(
            f"Python's garbage collector was started {seen.garbage.in_steps} times within measured steps of rank "
            f"{place.rank}, by a library; dlbench had turned it off"
        )
    for part in (memory, state.compilation, state.graphs):
        warnings += part.warnings if part is not None else ()
    transport = context.nccl.read() if context.nccl is not None else None
    found = environment.capture(warnings, withheld=context.plan.system.launch.referenced)
    found |= torch_facts(warnings, device)
    if state.allocator is not None:
        found["memory.allocator"] = state.allocator
    return {
        "result": result.model_dump(mode="json"),
        "environment": found,
        "nccl": transport,
        "warnings": warnings,
        "emulates_precision": state.precision.is_emulated,
        "reads": [epoch.to_dict() for epoch in state.source.epoch_reads()],
        "norms": state.noise.squared_norms() if state.noise is not None else [],
        "memory": memory.summary(result.held) if memory is not None else None,
    }


def make_record(
    context: RankContext,
    state: TrainState,
    seen: LoopResult,
    pauses: Pauses,
    everyone: Summaries,
    exchange: ExchangeResult | None,
    settings: list[Setting],
    shuffle: Shuffled,
    clock: str,
) -> Record:
    """The record of a run that came to its end."""
    plan = context.plan
    ranks = [RankResult.model_validate(item["result"]) for item in everyone]
    train, wanted = plan.workload.train, plan.layout.cores_per_rank
    settled = settle([Seat(rank=r.rank, host=r.host, cores=r.cores, threads=wanted, pinned=r.pinned) for r in ranks])
    ranks = [rank.model_copy(update={"pinned": rank.rank in settled.pinned}) for rank in ranks]
    precision, reading = state.precision, state.reading
    # Training to a quality ends when it is met, everywhere after the same step.
    steps = state.schedule.measured if plan.measure.until == "steps" else seen.steps - state.schedule.warmup
    checks = check(plan, ranks, measured_steps=steps, exchange=exchange, is_scaled=precision.is_scaled)
    checks += shuffle.checks
    # Counted where no table is known: on the meta device, which may import torch's compiler (2 s).
    table = plan.workload.model.layer_table(plan.workload.data)
    products = [layer for layer in table if layer.macs or layer.kind == "embedding"]
    layers = [LayerMacs(name=layer.name, kind=layer.kind, macs=layer.macs) for layer in products]
    layers = layers or forward_macs(plan.workload.model, plan.workload.data)
    reference = everyone[0]["environment"]
    watched = [item["watch"] for item in everyone]
    exchange = with_layers_noted(plan, state.schedule, exchange)
    if exchange is not None and exchange.autotune is not None:  # of Horovod, which other ranks need not load
        from dlbench.node.sync.horovod.report import with_tuning_cost

        exchange = with_tuning_cost(exchange, seen.step_s)
    described = state.source.describe()
    memory = state.memory.result([item["memory"] for item in everyone]) if state.memory else None
    noise = None
    if plan.measure.noise_scale:
        small = train.batch_per_rank // train.gradient_accumulation
        norms = [item["norms"] for item in everyone]
        noise = estimate_noise_scale(norms, small_batch=small, large_batch=plan.global_batch)
    return Record.model_validate(
        {
            "run_id": plan.run_id,
            "configuration": plan.configuration_digest(),
            "state": "valid" if all(c.passed for c in checks) else "invalid",
            "started": context.started_utc,
            "finished": utc_now(),
            "clock": clock,
            "phases": plan.measure.phases,
            "num_parameters": sum(p.numel() for p in state.model.parameters()),
            "gradient_bytes": sum(p.numel() * p.element_size() for p in state.model.parameters() if p.requires_grad),
            "ranks": ranks,
            "checks": checks,
            "settings": settings,
            "exchange": exchange,
            "nccl": together([item["nccl"] for item in everyone]),
            "watch": watch_result(plan, state.schedule, watched, ranks),
            "load": node_loads([item["load"] for item in watched], ranks, [rank.node_rank for rank in ranks]),
            "inert": inert(settings, ranks=plan.layout.ranks),
            "warnings": (
                *settled.warnings,
                *_warnings(context, state, ranks, everyone, exchange, memory),
                *checkpoint_warnings(pauses.writer.writes, state.schedule.first + seen.steps),
            ),
            "data": described | data_set(plan.workload.data, described) | files_account(plan.workload.data),
            "staging": staging_result(plan, state.staging, everyone),
            "shuffle": shuffle.result,
            "host_update": state.host.result() if state.host is not None else None,
            "reading": reading.result([item["reads"] for item in everyone], seen.step_s) if reading else None,
            "memory": memory,
            "steps": seen.steps,
            "first_step": state.schedule.first,
            "resumed_from": str(state.resumed.path) if state.resumed else None,
            "attempt": attempt_of(context.folder),
            "checkpoints": pauses.checkpoints(),
            "checkpoint_writes": pauses.writer.writes,
            "precision": precision.text,
            "emulates_precision": any(item["emulates_precision"] for item in everyone),
            "overflow_steps": precision.overflow_steps if precision.is_scaled else None,
            "final_loss_scale": precision.scale if precision.is_scaled else None,
            "layers": layers,
            "training_flops_per_sample": training_flops_per_sample(layers),
            "quality": pauses.result(),
            "noise_scale": noise,
            "events": context.events.all,
            "environment": reference,
            "environment_differences": _environment_differences(plan, everyone, reference),
        }
    )


def _warnings(
    context: RankContext,
    state: TrainState,
    ranks: Sequence[RankResult],
    everyone: Summaries,
    exchange: ExchangeResult | None,
    memory: MemoryResult | None,
) -> list[str]:
    plan = context.plan
    found = [
        *dict.fromkeys(text for item in everyone for text in item["warnings"]),
        *dict.fromkeys(text for item in everyone if item["staging"] for text in item["staging"]["warnings"]),
    ]
    threads = {rank.threads for rank in ranks}
    if threads != {plan.layout.cores_per_rank}:
        found.append(
            f"ranks computed with {sorted(threads)} threads, the plan says {plan.layout.cores_per_rank} cores per rank"
        )
    if plan.system.node.gpus and context.device.type == "cpu":
        found.append(
            f"node.gpus is {plan.system.node.gpus}, and ranks saw no GPU: they trained on CPUs; ask for GPUs "
            "(slurm.gpu_request), or set node.gpus to 0"
        )
    if plan.measure.phases == "synchronised" and context.device.type == "cpu":
        found.append("measure.phases synchronised has no effect on a CPU: its phases are exact anyway")
    return [
        *found,
        *average_warnings(plan, state.schedule),
        *exchange_warnings(exchange, is_scaled=state.precision.is_scaled),
        *watch_warnings(plan, state.schedule, [item["watch"] for item in everyone], exchange),
        *(state.reading.warnings() if state.reading is not None else []),
        *memory_warnings(memory),
    ]


def average_warnings(plan: RunPlan, schedule: StepSchedule) -> list[str]:
    """Where the mean of measured steps is not that of local SGD."""
    sync, begin, measured = plan.sync, schedule.first + schedule.warmup, schedule.measured
    if sync.average_every is None or plan.layout.ranks == 1 or plan.measure.until != "steps":
        return []
    found = []
    if sync.average_from <= begin and measured % sync.average_every:
        found.append(
            f"sync.average_every {sync.average_every}: {measured} measured steps are no multiple of it, so that not "
            f"one step in {sync.average_every} averages; set measure.measured_steps to a multiple"
        )
    if begin < sync.average_from < schedule.end:
        found.append(
            f"sync.average_from {sync.average_from} lies within the measured steps, {begin} to {schedule.end - 1}: "
            "their mean is of both ways to train, and times of messages are of gradients alone; set "
            "measure.warmup_steps to as much"
        )
    return found


def checkpoint_warnings(writes: Sequence[CheckpointWrite], end: int) -> list[str]:
    """What writing checkpoints cost a training that ended after step `end`; none where none was written before."""
    beside = [write for write in writes if write.step < end]
    if not beside:
        return []
    blocked_s = sum(write.snapshot_s + write.waited_s for write in writes)
    spent = format_seconds(sum(write.overlapped_s for write in beside))
    return [
        f"a thread of rank 0 wrote {len(beside)} checkpoint{'s' * (len(beside) > 1)} of "
        f"{format_bytes(max(write.bytes for write in beside))} for {spent} while training went on: those steps shared "
        f"cores and bandwidth with it; for all checkpoints training stood still for {format_seconds(blocked_s)}"
    ]


def _environment_differences(plan: RunPlan, everyone: Summaries, reference: dict[str, str]) -> tuple[str, ...]:
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


def with_layers_noted(plan: RunPlan, schedule: StepSchedule, exchange: ExchangeResult | None) -> ExchangeResult | None:
    """The exchange, saying whether layers were watched in the steps from which its times come."""
    if exchange is None or not _are_mixed(plan, schedule, exchange):
        return exchange
    more = "layers were profiled in these steps too, and their hooks lengthen the backward pass"
    return exchange.model_copy(update={"evidence": f"{exchange.evidence}; {more}"})


def _are_mixed(plan: RunPlan, schedule: StepSchedule, exchange: ExchangeResult) -> bool:
    # dlbench's own exchange takes its times from measured steps.
    return (
        bool(window_ranks(plan)) and schedule.shares_window and exchange.by == "backend" and exchange.window_steps > 0
    )


def watch_warnings(
    plan: RunPlan, schedule: StepSchedule, summaries: Sequence[Mapping[str, Any]], exchange: ExchangeResult | None
) -> list[str]:
    """What went wrong with watching, and what was asked for and could not be watched, a sentence each."""
    watch = plan.watch
    found = list(dict.fromkeys(text for item in summaries for text in item["problems"]))
    if watch is None:
        return found
    if schedule.window and plan.workload.train.is_one_program:
        found.append("layers were not profiled: train.compile and train.cuda_graphs make one program of them")
    steps = len(schedule.window)
    enough = max(1, schedule.deciding_steps) + watch.window_steps + WATCHED_STEPS
    is_asked = watch.window_steps != WINDOW_STEPS or "watch.window_steps" in plan.overrides
    if steps < watch.window_steps and is_asked:
        why = "its first is left out"
        if schedule.deciding_steps:
            why = f"its first {schedule.deciding_steps} decide on the exchange, its last {WATCHED_STEPS} time it"
        found.append(
            f"watch.window_steps {watch.window_steps}: layers could be profiled in {steps} steps only, as the warm-up "
            f"has {schedule.warmup} and {why}; set measure.warmup_steps to {enough}"
        )
    if not watch.profiler or not watch.window_steps:
        return found
    if not steps:
        found.append(
            f"watch.profiler: nothing was profiled, as the warm-up has no step for it; set measure.warmup_steps to "
            f"{enough}"
        )
    elif exchange is not None and _are_mixed(plan, schedule, exchange):
        found.append(
            f"watch.profiler: it ran in the steps from which the times of the exchange come, and lengthens them; set "
            f"measure.warmup_steps to {enough}"
        )
    return found


def parameters_digest(model: nn.Module) -> str:
    """SHA-256 over all parameters in order, as bytes. Buffers (batch-norm statistics) are a rank's own. Called by all
    ranks: of parameters that they share out, each is put together.
    """
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(whole_tensor(parameter.detach()).float().flatten().cpu().numpy().data)
    return digest.hexdigest()


def check(
    plan: RunPlan,
    ranks: list[RankResult],
    *,
    measured_steps: int,
    exchange: ExchangeResult | None = None,
    is_scaled: bool = False,
) -> list[Check]:
    """All sanity checks of a run."""
    starts = [rank.initial_parameters_sha256 for rank in ranks]
    start = _same("identical start", starts, "before the first step")
    ends = [rank.final_parameters_sha256 for rank in ranks]
    end = _same("identical parameters", ends, "after the last step")
    if trains_without_sync(plan):
        # Ranks see different samples, so equal parameters would mean that they exchanged.
        detail = "after the last step, all ranks have the same parameters, though none were to be exchanged"
        differ = len(set(ends)) > 1
        if differ:
            detail = (
                f"after the last step, {len(set(ends))} different parameters on {len(ranks)} ranks, which train apart "
                "as planned"
            )
        end = Check(name="parameters apart", passed=differ, detail=detail)
    bad = [rank.rank for rank in ranks if not rank.losses_finite]
    detail = f"loss not finite on {_ranks(bad)}" if bad else "every loss on every rank is finite"
    finite = Check(name="finite loss", passed=not bad, detail=detail)
    idle = [rank.rank for rank in ranks if rank.initial_parameters_sha256 == rank.final_parameters_sha256]
    detail = f"parameters of {_ranks(idle)} never changed" if idle else "the parameters changed"
    trained = Check(name="trained", passed=not idle, detail=detail)
    found = [finite, start, end, trained, _equal_work(plan, ranks, measured_steps)]
    wire = wire_check(exchange, is_scaled=is_scaled)
    if wire is not None:
        found.append(wire)
    return found


def trains_without_sync(plan: RunPlan) -> bool:
    """Whether the plan has ranks that exchange no gradient."""
    return plan.sync.exchange == "none" and plan.layout.ranks > 1


def planned_warnings(plan: RunPlan) -> list[str]:
    """What the plan itself has that figures must not be read without, a sentence each; the same on every rank."""
    found = []
    if trains_without_sync(plan):
        found.append("gradients are not exchanged: figures show what training costs without exchange")
    fault = plan.fault
    if fault is not None:
        acting = [rank for rank in range(plan.layout.ranks) if fault.acts_on(rank)]
        parts = []
        if fault.compute_factor != 1.0:
            parts.append(f"forward and backward pass take {fault.compute_factor:g} times as long")
        if fault.input_delay_s:
            parts.append(f"each batch comes {format_seconds(fault.input_delay_s)} later")
        if fault.step_delay_s:
            parts.append(f"each step ends {format_seconds(fault.step_delay_s)} later")
        where = f"on {_ranks(acting)}" if acting else "on none of the ranks of this run"
        found.append(f"a fault is planted {where}: {', '.join(parts)}; figures show it on purpose")
    return found


def inert(settings: list[Setting], *, ranks: int) -> tuple[str, ...]:
    """Settings that were asked for and demonstrably not in force, a sentence each.

    At one rank nothing is exchanged: of settings only those of data and of training can act.
    """
    return tuple(
        f"{s.key}: {s.requested} was asked for, {s.effective} was in force ({s.evidence})"
        for s in settings
        if s.is_without_effect and (ranks > 1 or s.key.startswith(("data.", "train.")))
    )


def samples_check(shuffle: ShuffleResult, *, replaced: int) -> Check:
    """Whether every sample was read once in each epoch that the run read whole."""
    name = "every sample once per epoch"
    if shuffle.errors:
        more = f" and {len(shuffle.errors) - 3} more" if len(shuffle.errors) > 3 else ""
        return Check(name=name, passed=False, detail="; ".join(shuffle.errors[:3]) + more)
    whole = [epoch for epoch in shuffle.epochs if epoch.is_whole]
    if whole:
        detail = f"{len(whole)} whole epochs, in each {whole[0].visits} samples read and {whole[0].left_out} left out"
    else:
        detail = "no epoch was read whole; what was read was dealt out to its rank"
    if replaced:
        detail += f"; {replaced} samples were unreadable and others stood in for them (data.on_bad_sample skip)"
    return Check(name=name, passed=True, detail=detail)


def wire_check(exchange: ExchangeResult | None, *, is_scaled: bool) -> Check | None:
    """Whether every sum of gradients fitted the format it travelled in; None where fp16 was not on the wire."""
    if exchange is None or not ("fp16" in exchange.wire or exchange.wire_overflows):
        return None
    overflows = exchange.wire_overflows
    if not overflows:
        return Check(name="wire", passed=True, detail="no sum of gradients left the range of fp16 (65,504)")
    text = f"{overflows} sums of gradients left the range of fp16 (65,504)"
    if is_scaled:
        return Check(name="wire", passed=True, detail=f"{text}; loss scaling left these steps out")
    return Check(name="wire", passed=False, detail=f"{text}; set sync.wire to fp32 or bf16")


def exchange_warnings(exchange: ExchangeResult | None, *, is_scaled: bool) -> list[str]:
    """Warnings in what was exchanged, a sentence each. `exchange`: None at one rank."""
    if exchange is None:
        return []
    found = [
        f"calibration of {line.name}: at {', '.join(map(format_bytes, line.launch_bound))} the GPU came to messages "
        "before the host had queued them: their times, and what was chosen by them, may be the host's rate of calls"
        for line in exchange.costs
        if line.launch_bound
    ]
    if exchange.wire_overflows and is_scaled:
        found.append(
            f"{exchange.wire_overflows} sums of gradients left the range of fp16 on the wire, and loss scaling left "
            "those steps out; sync.wire fp32 or bf16 would have kept them"
        )
    return found


def _same(name: str, digests: list[str], when: str) -> Check:
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    detail = (
        f"{when}, the parameters of {_ranks(odd)} differ from rank 0's"
        if odd
        else f"{when}, SHA-256 {digests[0][:16]} on all {len(digests)} ranks"
    )
    return Check(name=name, passed=not odd, detail=detail)


def _equal_work(plan: RunPlan, ranks: list[RankResult], measured_steps: int) -> Check:
    expected = plan.workload.train.batch_per_rank * measured_steps
    odd = [r.rank for r in ranks if r.samples != expected]
    whole = len(ranks) == plan.layout.ranks
    if not whole:
        detail = f"{len(ranks)} ranks reported, the plan has {plan.layout.ranks}"
    elif odd:
        detail = f"{_ranks(odd)} did not process the planned {expected} samples"
    else:
        where = f"each of {len(ranks)} ranks" if len(ranks) > 1 else "the only rank"
        detail = f"{expected} samples on {where}, as planned"
    return Check(name="equal work", passed=whole and not odd, detail=detail)


def _ranks(ranks: list[int], limit: int = 8) -> str:
    """Returns e.g. ``rank 3``, or ``ranks 0, 1``; of many the first, and how many more."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = "ranks " + ", ".join(map(str, ranks[:limit]))
    return shown + (f" and {len(ranks) - limit} more" if len(ranks) > limit else "")


def memory_warnings(result: MemoryResult | None) -> list[str]:
    """Warnings in how activations were treated, a sentence each."""
    over = [rank for rank in result.ranks if rank.over_budget_bytes] if result is not None else []
    if result is None or not over:
        return []
    worst = max(over, key=lambda rank: rank.over_budget_bytes)
    return [
        f"activations took up to {format_bytes(worst.over_budget_bytes)} more than the plan allowed on {len(over)} of "
        f"{len(result.ranks)} ranks, most on rank {worst.rank}"
    ]


@dataclass(frozen=True, kw_only=True)
class Shuffled:
    """What the record says of shuffling."""

    result: ShuffleResult | None = None  # None where nothing was read.
    checks: tuple[Check, ...] = ()
    settings: tuple[Setting, ...] = ()


def sample_summary(source: BatchSource) -> dict[str, Any] | None:
    """What this rank read and exchanged, plain Python; None where nothing is read."""
    if source.audit is None:
        return None
    return {**source.audit.summary(), "exchange": source.exchange.summary() if source.exchange is not None else None}


def shuffled(
    plan: RunPlan, source: BatchSource, everyone: Sequence[Mapping[str, Any] | None], gather: Callable[[Any], list[Any]]
) -> Shuffled:
    """What all ranks together read; called by all of them, because samples in doubt are gathered one by one."""
    everyone = everyone[:: plan.ranks_per_replica]
    reported = [each for each in everyone if each is not None]
    if source.audit is None or len(reported) != len(everyone):
        return Shuffled()
    doubtful = doubtful_epochs(reported, source.num_samples)
    lists = gather(source.audit.lists(doubtful))[:: plan.ranks_per_replica] if doubtful else []
    data = plan.workload.data
    exchanged = [each["exchange"] for each in reported if each["exchange"] is not None]
    audited = Audited(
        reported,
        lists,
        num_samples=source.num_samples,
        exchanged=exchanged,
        name=source.sample_name,
        may_replace=data.on_bad_sample == "skip",
    )
    slots = exchanged_slots(source.num_samples, len(reported), data.exchanged_share) if data.shuffle != "global" else 0
    is_global = data.shuffle == "global"
    # An exchange that went on while its epoch was running is not over, and loses nothing.
    over = {epoch.epoch - 1 for epoch in audited.epochs if epoch.is_whole}
    lost = [
        f"epoch {epoch.epoch}: {epoch.sent} samples were sent and {epoch.received} arrived"
        for epoch in audited.epochs
        if epoch.epoch in over and epoch.sent != epoch.received
    ]
    result = ShuffleResult(
        shuffle=data.shuffle,
        partition=None if is_global else data.partition,
        exchanged_share=1.0 if is_global else slots / max(1, source.num_samples // len(reported)),
        errors=(*audited.errors, *lost),
        held_samples_peak=max((each["held_peak"] for each in exchanged), default=None),
        exchange_wait_s=max(each["waited_s"] for each in reported),
        audit_s=float(np.mean([each["audit_s"] for each in reported])),
        epochs=audited.epochs,
    )
    check = samples_check(result, replaced=audited.replaced)
    return Shuffled(result=result, checks=(check,), settings=_settings(plan, result, slots))


def _settings(plan: RunPlan, result: ShuffleResult, slots: int) -> tuple[Setting, ...]:
    data = plan.workload.data
    if data.shuffle == "global":
        return ()
    effective, sent = str(data.shuffle), sum(epoch.sent for epoch in result.epochs)
    evidence = (
        f"audit of what ranks read in {len(result.epochs)} epochs; {sent} samples sent and stored, {slots} per rank "
        "and epoch drawn"
    )
    if data.exchanged_share and not slots:
        effective, evidence = "local", "the share of a rank's samples is less than one sample"
        if plan.layout.ranks == 1:
            evidence = "at one rank there is nobody to exchange with"
    return (Setting(key="data.shuffle", requested=data.shuffle, effective=effective, evidence=evidence),)

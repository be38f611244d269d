"""Checks and warnings of a run; one that fails a check yields no performance figure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import nn

from dlbench.node.part import WATCHED_STEPS, StepSchedule
from dlbench.node.sync.engine import whole_tensor
from dlbench.node.watching.agent import window_ranks
from dlbench.records.exchange import ExchangeResult
from dlbench.records.record import Check, CheckpointWrite, RankResult, Setting, WatchSummary
from dlbench.specs.plan import RunPlan
from dlbench.specs.watch import WINDOW_STEPS
from dlbench.units import counted, first_of, format_bytes, format_seconds, plural


def average_warnings(plan: RunPlan, schedule: StepSchedule) -> list[str]:
    """Returns warnings if the measured steps do not represent local SGD (`sync.average_every`)."""
    sync, begin, measured = plan.sync, schedule.first + schedule.warmup, schedule.measured
    if sync.average_every is None or plan.layout.ranks == 1 or plan.measure.until != "steps":
        return []
    warnings = []
    if sync.average_from <= begin and measured % sync.average_every:
        warnings.append(
            f"sync.average_every {sync.average_every}: {measured} measured steps are no multiple of it, so that the "
            f"share of steps that average is not 1 in {sync.average_every}; set measure.measured_steps to a multiple"
        )
    if begin < sync.average_from < schedule.end:
        warnings.append(
            f"sync.average_from {sync.average_from} lies within the measured steps, {begin} to {schedule.end - 1}: "
            "their mean mixes steps that exchange gradients with local SGD, and message times are those of gradients; "
            f"set measure.warmup_steps so that warm-up ends at step {sync.average_from}"
        )
    return warnings


def checkpoint_warnings(writes: Sequence[CheckpointWrite], end: int) -> list[str]:
    """Returns a warning if checkpoints were written while training ran, which ended after step `end`."""
    overlapped = [write for write in writes if write.step < end]
    if not overlapped:
        return []
    blocked_s = sum(write.snapshot_s + write.waited_s for write in writes)
    spent = format_seconds(sum(write.overlapped_s for write in overlapped))
    return [
        f"a thread of rank 0 wrote {counted(len(overlapped), 'checkpoint')} of "
        f"{format_bytes(max(write.bytes for write in overlapped))} for {spent} during training: those steps shared "
        f"cores and bandwidth with it; all checkpoints together interrupted training for {format_seconds(blocked_s)}"
    ]


def with_layers_noted(plan: RunPlan, schedule: StepSchedule, exchange: ExchangeResult | None) -> ExchangeResult | None:
    """Returns the exchange, with a note if layers were profiled in the steps from which its times come."""
    if exchange is None or not _are_mixed(plan, schedule, exchange):
        return exchange
    note = "layers were profiled in these steps too, and their hooks lengthen the backward pass"
    return exchange.model_copy(update={"evidence": f"{exchange.evidence}; {note}"})


def _are_mixed(plan: RunPlan, schedule: StepSchedule, exchange: ExchangeResult) -> bool:
    # dlbench's own exchange takes its times from measured steps.
    return (
        bool(window_ranks(plan)) and schedule.shares_window and exchange.by == "backend" and exchange.window_steps > 0
    )


def watch_warnings(
    plan: RunPlan, schedule: StepSchedule, ranks: Sequence[WatchSummary], exchange: ExchangeResult | None
) -> list[str]:
    """Returns problems of profiling and sampling, and what was requested and could not be profiled, a sentence each."""
    watch = plan.watch
    warnings = list(dict.fromkeys(text for rank in ranks for text in rank.problems))
    if watch is None:
        return warnings
    if schedule.window and plan.workload.train.is_one_program:
        warnings.append("layers were not profiled: train.compile and train.cuda_graphs merge them into one program")
    steps = len(schedule.window)
    enough = max(1, schedule.deciding_steps) + watch.window_steps + WATCHED_STEPS
    is_asked = watch.window_steps != WINDOW_STEPS or "watch.window_steps" in plan.overrides
    if steps < watch.window_steps and is_asked:
        reason = "the first is not profiled"
        if schedule.deciding_steps:
            reason = f"the first {schedule.deciding_steps} choose the exchange and the last {WATCHED_STEPS} measure it"
        warnings.append(
            f"watch.window_steps {watch.window_steps}: layers could be profiled in only {counted(steps, 'step')}: the "
            f"warm-up has {counted(schedule.warmup, 'step')}, of which {reason}; set measure.warmup_steps to {enough}"
        )
    if not watch.profiler or not watch.window_steps:
        return warnings
    if not steps:
        warnings.append(
            f"watch.profiler: nothing was profiled, because the warm-up is too short; set measure.warmup_steps to "
            f"{enough}"
        )
    elif exchange is not None and _are_mixed(plan, schedule, exchange):
        warnings.append(
            f"watch.profiler: the profiler ran in the steps that measure the exchange, and makes it slower; set "
            f"measure.warmup_steps to {enough}"
        )
    return warnings


def parameters_digest(model: nn.Module) -> str:
    """Returns the SHA-256 over all parameters in order, as fp32; called by all ranks, which gather shards."""
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
    """Returns all sanity checks of a run."""
    starts = [rank.initial_parameters_sha256 for rank in ranks]
    start = _same("identical start", starts, "before the first step")
    ends = [rank.final_parameters_sha256 for rank in ranks]
    end = _same("identical parameters", ends, "after the last step")
    if trains_without_sync(plan):
        # Ranks see different samples, so equal parameters would mean that they exchanged.
        detail = "after the last step, all ranks have the same parameters, although no gradients were to be exchanged"
        differ = len(set(ends)) > 1
        if differ:
            detail = (
                f"after the last step, {len(set(ends))} different sets of parameters on {len(ranks)} ranks, which "
                "train without exchange as planned"
            )
        end = Check(name="parameters apart", passed=differ, detail=detail)
    bad = [rank.rank for rank in ranks if not rank.losses_finite]
    detail = f"loss not finite on {_ranks(bad)}" if bad else "every loss on every rank is finite"
    finite = Check(name="finite loss", passed=not bad, detail=detail)
    idle = [rank.rank for rank in ranks if rank.initial_parameters_sha256 == rank.final_parameters_sha256]
    detail = f"parameters of {_ranks(idle)} never changed" if idle else "the parameters changed"
    trained = Check(name="trained", passed=not idle, detail=detail)
    checks = [finite, start, end, trained, _equal_work(plan, ranks, measured_steps)]
    wire = wire_check(exchange, is_scaled=is_scaled)
    if wire is not None:
        checks.append(wire)
    return checks


def trains_without_sync(plan: RunPlan) -> bool:
    """Tells whether the plan has several ranks that exchange no gradients."""
    return plan.sync.exchange == "none" and plan.layout.ranks > 1


def planned_warnings(plan: RunPlan) -> list[str]:
    """Returns warnings that follow from the plan alone, a sentence each; the same on every rank."""
    warnings = []
    if trains_without_sync(plan):
        warnings.append("gradients are not exchanged: figures show what training costs without exchange")
    fault = plan.fault
    if fault is not None:
        acting = [rank for rank in range(plan.layout.ranks) if fault.acts_on(rank)]
        parts = []
        if fault.compute_factor != 1.0:
            parts.append(f"forward and backward pass take {fault.compute_factor:g} times as long")
        if fault.input_delay_s:
            parts.append(f"each batch is delayed by {format_seconds(fault.input_delay_s)}")
        if fault.step_delay_s:
            parts.append(f"each step is delayed by {format_seconds(fault.step_delay_s)}")
        where = f"on {_ranks(acting)}" if acting else "on none of the ranks of this run"
        warnings.append(f"a fault is injected on purpose {where}: {', '.join(parts)}; figures include it")
    return warnings


def inert(settings: Sequence[Setting], *, ranks: int) -> tuple[str, ...]:
    """Returns what was requested and had no effect, a sentence each; one rank has no exchange to be set."""
    return tuple(
        f"{s.key}: {s.requested} was requested, but {s.effective} was used ({s.evidence})"
        for s in settings
        if s.is_without_effect and (ranks > 1 or s.key.startswith(("data.", "train.")))
    )


def wire_check(exchange: ExchangeResult | None, *, is_scaled: bool) -> Check | None:
    """Checks that no sum of gradients overflowed fp16; None if none was sent in fp16."""
    if exchange is None or not ("fp16" in exchange.wire or exchange.wire_overflows):
        return None
    overflows = exchange.wire_overflows
    if not overflows:
        return Check(name="wire", passed=True, detail="no sum of gradients overflowed fp16 (65,504)")
    remedy = "loss scaling skipped these steps" if is_scaled else "set sync.wire to fp32 or bf16"
    text = f"{counted(overflows, 'sum')} of gradients overflowed fp16 (65,504); {remedy}"
    return Check(name="wire", passed=is_scaled, detail=text)


def exchange_warnings(exchange: ExchangeResult | None, *, is_scaled: bool) -> list[str]:
    """Returns warnings about the exchange, a sentence each. `exchange` is None at one rank."""
    if exchange is None:
        return []
    warnings = [
        f"calibration of {line.name}: at {', '.join(map(format_bytes, line.launch_bound))} the GPU waited for the host "
        "to launch messages: their times, and the choice made by them, may show the host's launch rate"
        for line in exchange.costs
        if line.launch_bound
    ]
    if exchange.wire_overflows and is_scaled:
        warnings.append(
            f"{counted(exchange.wire_overflows, 'sum')} of gradients overflowed fp16 in the exchange, and loss scaling "
            "skipped those steps; with sync.wire fp32 or bf16 they would not have overflowed"
        )
    return warnings


def _same(name: str, digests: list[str], when: str) -> Check:
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    detail = f"{when}, SHA-256 {digests[0][:16]} on all {len(digests)} ranks"
    if odd:
        detail = f"{when}, the parameters of {_ranks(odd)} differ from rank 0's"
    return Check(name=name, passed=not odd, detail=detail)


def _equal_work(plan: RunPlan, ranks: list[RankResult], measured_steps: int) -> Check:
    expected = plan.workload.train.batch_per_rank * measured_steps
    odd = [r.rank for r in ranks if r.samples != expected]
    is_complete = len(ranks) == plan.layout.ranks
    if not is_complete:
        detail = f"{len(ranks)} ranks reported, the plan has {plan.layout.ranks}"
    elif odd:
        detail = f"{_ranks(odd)} did not process the planned {expected} samples"
    else:
        detail = f"{expected} samples on each of {counted(len(ranks), 'rank')}, as planned"
    return Check(name="equal work", passed=is_complete and not odd, detail=detail)


def _ranks(ranks: list[int], limit: int = 8) -> str:
    """Returns e.g. ``rank 3``, or ``ranks 0, 1``; of many ranks the first, and how many more there are."""
    return f"{plural('rank', len(ranks))} {first_of([str(rank) for rank in ranks], limit)}"

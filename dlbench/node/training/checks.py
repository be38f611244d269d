"""Checks and warnings of a run: what must hold for its figures, and what they must not be read without.

Sanity before numbers: a run that fails a check yields no performance figure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import nn

from dlbench.node.step_schedule import WATCHED_STEPS, StepSchedule
from dlbench.node.sync.engine import whole_tensor
from dlbench.node.watching.agent import window_ranks
from dlbench.records.exchange import ExchangeResult
from dlbench.records.rank_summary import WatchSummary
from dlbench.records.record import Check, CheckpointWrite, RankResult, Setting
from dlbench.specs.plan import RunPlan
from dlbench.specs.watch import WINDOW_STEPS
from dlbench.units import format_bytes, format_seconds


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
    plan: RunPlan, schedule: StepSchedule, ranks: Sequence[WatchSummary], exchange: ExchangeResult | None
) -> list[str]:
    """Returns what went wrong with watching, and what was asked for and could not be watched, a sentence each."""
    watch = plan.watch
    found = list(dict.fromkeys(text for rank in ranks for text in rank.problems))
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


def inert(settings: Sequence[Setting], *, ranks: int) -> tuple[str, ...]:
    """Settings that were asked for and demonstrably not in force, a sentence each.

    At one rank nothing is exchanged: of settings only those of data and of training can act.
    """
    return tuple(
        f"{s.key}: {s.requested} was asked for, {s.effective} was in force ({s.evidence})"
        for s in settings
        if s.is_without_effect and (ranks > 1 or s.key.startswith(("data.", "train.")))
    )


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

"""Sanity before numbers: a run that fails here yields no performance figure."""

from __future__ import annotations

import hashlib

from torch import nn

from dlbench.records.data_path import ShuffleResult
from dlbench.records.exchange import ExchangeResult
from dlbench.records.memory import MemoryResult
from dlbench.records.record import Check, RankResult, Setting
from dlbench.specs.plan import RunPlan
from dlbench.units import format_bytes, format_seconds


def parameters_digest(model: nn.Module) -> str:
    """SHA-256 over all parameters in order, as bytes. Buffers (batch-norm statistics) are a rank's own."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().float().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def check(
    plan: RunPlan,
    ranks: list[RankResult],
    *,
    measured_steps: int,
    exchange: ExchangeResult | None = None,
    is_scaled: bool = False,
) -> list[Check]:
    """All sanity checks of a run.

    Args:
        plan: the run.
        ranks: what its ranks say.
        measured_steps: those that every rank has to have made: as planned, or as agreed on in the warm-up; where
            training ends with a quality, those that rank 0 made.
        exchange: what was exchanged; None at one rank.
        is_scaled: whether losses were scaled, so that steps whose gradients overflowed were left out.
    """
    work = _equal_work(plan, ranks, measured_steps)
    end = _apart_end(ranks) if trains_apart(plan) else _same_end(ranks)
    found = [_finite(ranks), _same_start(ranks), end, _trained(ranks), work]
    wire = wire_check(exchange, is_scaled=is_scaled)
    if wire is not None:
        found.append(wire)
    return found


def trains_apart(plan: RunPlan) -> bool:
    """Whether the plan has ranks that exchange no gradient."""
    return plan.sync.exchange == "none" and plan.layout.ranks > 1


def planned_doubts(plan: RunPlan) -> list[str]:
    """What the plan itself has that figures must not be read without, a sentence each; the same on every rank."""
    found = []
    if trains_apart(plan):
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
        where = f"on ranks {_some(acting)}" if acting else "on none of the ranks of this run"
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
    """Whether every sample was read once in each epoch that the run read whole.

    Args:
        shuffle: what was really read.
        replaced: samples that were unreadable, for which others stood in.
    """
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


def exchange_doubts(exchange: ExchangeResult | None, *, is_scaled: bool) -> list[str]:
    """Reasons for doubt in what was exchanged, a sentence each.

    Args:
        exchange: None at one rank.
        is_scaled: whether losses were scaled.
    """
    if exchange is None or not exchange.wire_overflows or not is_scaled:
        return []
    return [
        f"{exchange.wire_overflows} sums of gradients left the range of fp16 on the wire, and loss scaling left those "
        "steps out; sync.wire fp32 or bf16 would have kept them"
    ]


def _finite(ranks: list[RankResult]) -> Check:
    bad = [r.rank for r in ranks if not r.losses_finite]
    detail = f"loss not finite on ranks {_some(bad)}" if bad else "every loss on every rank is finite"
    return Check(name="finite loss", passed=not bad, detail=detail)


def _same_start(ranks: list[RankResult]) -> Check:
    return _same("identical start", [r.initial_parameters_sha256 for r in ranks], "before the first step")


def _same_end(ranks: list[RankResult]) -> Check:
    return _same("identical parameters", [r.final_parameters_sha256 for r in ranks], "after the last step")


def _apart_end(ranks: list[RankResult]) -> Check:
    """The opposite of `_same_end`: ranks see different samples, so equal parameters would mean that they exchanged."""
    digests = {r.final_parameters_sha256 for r in ranks}
    detail = (
        f"after the last step, {len(digests)} different parameters on {len(ranks)} ranks, which train apart as planned"
        if len(digests) > 1
        else "after the last step, all ranks have the same parameters, though none were to be exchanged"
    )
    return Check(name="parameters apart", passed=len(digests) > 1, detail=detail)


def _same(name: str, digests: list[str], when: str) -> Check:
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    detail = (
        f"{when}, the parameters of ranks {_some(odd)} differ from rank 0's"
        if odd
        else f"{when}, SHA-256 {digests[0][:16]} on all {len(digests)} ranks"
    )
    return Check(name=name, passed=not odd, detail=detail)


def _trained(ranks: list[RankResult]) -> Check:
    idle = [r.rank for r in ranks if r.initial_parameters_sha256 == r.final_parameters_sha256]
    detail = f"parameters of ranks {_some(idle)} never changed" if idle else "the parameters changed"
    return Check(name="trained", passed=not idle, detail=detail)


def _equal_work(plan: RunPlan, ranks: list[RankResult], measured_steps: int) -> Check:
    expected = plan.workload.train.batch_per_rank * measured_steps
    odd = [r.rank for r in ranks if r.samples != expected]
    whole = len(ranks) == plan.layout.ranks
    if not whole:
        detail = f"{len(ranks)} ranks reported, the plan has {plan.layout.ranks}"
    elif odd:
        detail = f"ranks {_some(odd)} did not process the planned {expected} samples"
    else:
        detail = f"{expected} samples on each of {len(ranks)} ranks, as planned"
    return Check(name="equal work", passed=whole and not odd, detail=detail)


def _some(ranks: list[int], limit: int = 8) -> str:
    shown = ", ".join(map(str, ranks[:limit]))
    return shown + (f" and {len(ranks) - limit} more" if len(ranks) > limit else "")


def memory_doubts(result: MemoryResult | None) -> list[str]:
    """Reasons for doubt in how activations were treated, a sentence each."""
    if result is None:
        return []
    over = [rank for rank in result.ranks if rank.over_budget_bytes]
    if not over:
        return []
    worst = max(over, key=lambda rank: rank.over_budget_bytes)
    return [
        f"activations took up to {format_bytes(worst.over_budget_bytes)} more than the plan allowed on {len(over)} of "
        f"{len(result.ranks)} ranks, most on rank {worst.rank}"
    ]

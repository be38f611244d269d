"""How a run was shuffled: what all ranks together read, checked sample by sample where there is doubt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlbench.datasets.shuffling import exchanged_slots
from dlbench.node.data.loader import BatchSource
from dlbench.node.data.read_audit import Audited, doubtful_epochs
from dlbench.records.data_path import ShuffleResult
from dlbench.records.record import Check, Setting
from dlbench.specs.plan import RunPlan


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

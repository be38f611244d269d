"""What all ranks say of the samples that they read and exchanged becomes a result, a check and a setting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlbench.datasets.shuffling import exchanged_slots
from dlbench.node.data.loader import BatchSource
from dlbench.node.data.read_audit import Audited, doubtful_epochs
from dlbench.node.training import sanity
from dlbench.records.data_path import ShuffleResult
from dlbench.records.record import Check, Setting
from dlbench.specs.plan import RunPlan


@dataclass(frozen=True, kw_only=True)
class Shuffled:
    """What the record says of shuffling."""

    result: ShuffleResult | None = None
    """None where nothing was read."""
    checks: tuple[Check, ...] = ()
    settings: tuple[Setting, ...] = ()


def told_of_samples(source: BatchSource) -> dict[str, Any] | None:
    """What this rank read and exchanged, plain Python; None where nothing is read."""
    if source.audit is None:
        return None
    return {**source.audit.told(), "exchange": source.exchange.told() if source.exchange is not None else None}


def shuffled(
    plan: RunPlan, source: BatchSource, everyone: Sequence[Mapping[str, Any] | None], gather: Callable[[Any], list[Any]]
) -> Shuffled:
    """What all ranks together read; called by all of them, because samples in doubt are gathered one by one.

    Args:
        plan: the run.
        source: of this rank.
        everyone: `told_of_samples` of every rank.
        gather: `Engine.gather`.
    """
    told = [each for each in everyone if each is not None]
    if source.audit is None or len(told) != len(everyone):
        return Shuffled()
    doubtful = doubtful_epochs(told, source.num_samples)
    lists = gather(source.audit.lists(doubtful)) if doubtful else []
    data = plan.workload.data
    exchanged = [each["exchange"] for each in told if each["exchange"] is not None]
    audited = Audited(
        told,
        lists,
        num_samples=source.num_samples,
        exchanged=exchanged,
        name=source.sample_name,
        may_replace=data.on_bad_sample == "skip",
    )
    slots = exchanged_slots(source.num_samples, len(told), data.exchanged_share) if data.shuffle != "global" else 0
    is_global = data.shuffle == "global"
    result = ShuffleResult(
        shuffle=data.shuffle,
        partition=None if is_global else data.partition,
        exchanged_share=1.0 if is_global else slots / max(1, source.num_samples // len(told)),
        errors=(*audited.errors, *_lost(audited)),
        held_samples_peak=max((each["held_peak"] for each in exchanged), default=None),
        exchange_wait_s=max(each["waited_s"] for each in told),
        audit_s=float(np.mean([each["audit_s"] for each in told])),
        epochs=audited.epochs,
    )
    check = sanity.samples_check(result, replaced=audited.replaced)
    return Shuffled(result=result, checks=(check,), settings=_settings(plan, result, slots))


def _lost(audited: Audited) -> list[str]:
    """Epochs whose exchange lost something: one that went on while it was running is not over, and loses nothing."""
    over = {epoch.epoch - 1 for epoch in audited.epochs if epoch.is_whole}
    return [
        f"epoch {epoch.epoch}: {epoch.sent} samples were sent and {epoch.received} arrived"
        for epoch in audited.epochs
        if epoch.epoch in over and epoch.sent != epoch.received
    ]


def _settings(plan: RunPlan, result: ShuffleResult, slots: int) -> tuple[Setting, ...]:
    data = plan.workload.data
    if data.shuffle == "global":
        return ()
    sent = sum(epoch.sent for epoch in result.epochs)
    num = len(result.epochs)
    if data.exchanged_share and not slots:
        return (
            Setting(
                key="data.shuffle",
                requested=data.shuffle,
                effective="local",
                evidence="the share of a rank's samples is less than one sample"
                if plan.layout.ranks > 1
                else "at one rank there is nobody to exchange with",
            ),
        )
    evidence = (
        f"audit of what ranks read in {num} epochs; {sent} samples sent and stored, {slots} per rank and epoch drawn"
    )
    return (Setting(key="data.shuffle", requested=data.shuffle, effective=data.shuffle, evidence=evidence),)

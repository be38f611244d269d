"""Table of a sweep: the update's share of the step by optimizer, with its state replicated or sharded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dlbench.analysis.measures import PARTS
from dlbench.analysis.table import RunTable
from dlbench.records.scan import Run
from dlbench.report.table import Sheet, column, columns_of
from dlbench.stats.estimates import Estimate, mean_estimate
from dlbench.stats.pairing import RunKey
from dlbench.units import format_bytes
from dlbench.views.sweep.settings import label

KEYS = ("train.optimizer.name", "engine.ddp.shard_optimizer")
"""A sweep over one of them has the table."""
_SHARED_BY = {"zero-1": "sharded (ZeRO-1)", "fsdp": "sharded (FSDP)", "fsdp+tensor": "sharded (FSDP)"}


@dataclass(frozen=True, kw_only=True)
class Update:
    """The optimizer phase of one setting: clip, update, and exchange of updated parameters; means over ranks."""

    setting: str = field(metadata=column("Setting", is_brief=True, limit=80))
    optimizer: str = field(metadata=column("Optimizer", is_brief=True))
    state: str = field(metadata=column("Its state", is_brief=True))
    update: Estimate = field(metadata=column("Update", "update_s", is_brief=True))
    share: Estimate = field(metadata=column("Of the step", "update_share", is_brief=True))
    waiting: Estimate | None = field(metadata=column("Of it waiting for parameters", "update_waiting_s"))
    """Waiting for parameters that other ranks updated; None if ranks exchange nothing in the update."""
    state_bytes: int | None = field(
        metadata=column(
            "State per rank, largest", text=format_bytes, missing="not measured: needs a warm-up step", is_brief=True
        )
    )
    imbalance: float | None = field(metadata=column("Largest over mean", unit="ratio"))


def updates_of(settings: Sequence[Sequence[Run]], table: RunTable) -> tuple[Update, ...]:
    """Returns the update of each setting (its runs) that has figures; empty if none of `KEYS` is swept."""
    updates = []
    for runs in settings:
        measured = [run for run in runs if run.plan.run_id in table.runs]
        if measured and not set(KEYS).isdisjoint(measured[0].plan.series.axes):
            updates.append(_update(measured, table))
    return tuple(updates)


def _update(runs: Sequence[Run], table: RunTable) -> Update:
    plan = runs[0].plan
    update_s: dict[RunKey, float] = {}
    shares: dict[RunKey, float] = {}
    waits_s: dict[RunKey, float] = {}
    state_bytes: list[int] = []  # By rank, of the first run that measured them.
    for run in runs:
        assert run.record is not None
        key, parts = table.repeat_key(run), table.parts[run.plan.run_id]
        update_s[key] = parts["optimizer"]
        shares[key] = parts["optimizer"] / sum(parts[part] for part in PARTS)
        ranks = run.record.ranks
        rank_waits_s = [rank.waits.exchange_s.get("optimizer", 0.0) for rank in ranks if rank.waits is not None]
        if any(rank_waits_s):
            waits_s[key] = sum(rank_waits_s) / len(ranks) / table.figures[run.plan.run_id]["steps"]
        if not state_bytes:
            state_bytes = [rank.held.optimizer for rank in ranks if rank.held is not None]
    state = _SHARED_BY.get(plan.strategy, "replicated")
    record = runs[0].record
    assert record is not None
    for setting in record.settings:
        # A requested sharding that was not in force.
        if setting.key == "engine.ddp.shard_optimizer" and setting.effective is False:
            state = "replicated"
    return Update(
        setting=label(plan.series.named),
        optimizer=plan.workload.train.optimizer.name,
        state=state,
        update=mean_estimate(update_s, "s"),
        share=mean_estimate(shares, "fraction"),
        waiting=mean_estimate(waits_s, "s") if len(waits_s) == len(runs) else None,
        state_bytes=max(state_bytes, default=None),
        imbalance=max(state_bytes) * len(state_bytes) / sum(state_bytes) if any(state_bytes) else None,
    )


def updates_sheet(updates: Sequence[Update]) -> Sheet[Update]:
    """Returns a table with one row for each setting."""
    return Sheet(
        name="sweep-updates",
        title="The update's share of the step",
        columns=columns_of(Update),
        rows=updates,
        caption="The optimizer phase of a step: clip, update, and waiting for parameters that other ranks update. ZeRO "
        "distributes whole tensors, so ranks hold unequal parts of the state.",
        in_terminal=True,
    )

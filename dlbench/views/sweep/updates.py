"""The update's share of the step by optimizer, with its state replicated against sharded: one table of a sweep."""

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
    """For those that other ranks updated; None where ranks exchange nothing in the update."""
    state_bytes: int | None = field(
        metadata=column(
            "State per rank, largest", text=format_bytes, missing="not measured: needs a warm-up step", is_brief=True
        )
    )
    imbalance: float | None = field(metadata=column("Largest over mean", unit="ratio"))


def updates_of(settings: Sequence[Sequence[Run]], table: RunTable) -> tuple[Update, ...]:
    """The update of each setting that has figures; empty where none of `KEYS` is swept. `settings`: runs of each."""
    measured = [[run for run in runs if run.plan.run_id in table.runs] for runs in settings]
    return tuple(_update(runs, table) for runs in measured if runs and set(KEYS) & set(runs[0].plan.series.axes))


def _update(runs: Sequence[Run], table: RunTable) -> Update:
    plan = runs[0].plan
    parts = {table.repeat_key(run): table.parts[run.plan.run_id] for run in runs}
    waited: dict[RunKey, float] = {}
    held: list[int] = []
    for run in runs:
        assert run.record is not None
        ranks = run.record.ranks
        seconds = [one.waits.exchange_s.get("optimizer", 0.0) for one in ranks if one.waits is not None]
        if any(seconds):
            waited[table.repeat_key(run)] = sum(seconds) / len(ranks) / table.figures[run.plan.run_id]["steps"]
        held = held or [one.held.optimizer for one in ranks if one.held is not None]
    # What was in force, not what was asked for.
    settings = runs[0].record.settings if runs[0].record is not None else ()
    in_force = [one.effective for one in settings if one.key == "engine.ddp.shard_optimizer"]
    state = "replicated" if in_force == [False] else _SHARED_BY.get(plan.strategy, "replicated")
    return Update(
        setting=label(plan.series.named),
        optimizer=plan.workload.train.optimizer.name,
        state=state,
        update=mean_estimate({key: one["optimizer"] for key, one in parts.items()}, "s"),
        share=mean_estimate(
            {k: one["optimizer"] / sum(one[part] for part in PARTS) for k, one in parts.items()}, "fraction"
        ),
        waiting=mean_estimate(waited, "s") if len(waited) == len(parts) else None,
        state_bytes=max(held, default=None),
        imbalance=max(held) * len(held) / sum(held) if any(held) else None,
    )


def updates_sheet(updates: Sequence[Update]) -> Sheet[Update]:
    """One row for each setting."""
    return Sheet(
        name="sweep-updates",
        title="The update's share of the step",
        columns=columns_of(Update),
        rows=updates,
        caption="The optimizer phase of a step: clip, update, and what ranks wait for parameters that others update; "
        "ZeRO deals out whole tensors, so that ranks keep unequal parts of the state.",
        in_terminal=True,
    )

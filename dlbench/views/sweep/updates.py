"""Table of a sweep: the update's share of the step by optimizer, with its state replicated or sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dlbench.analysis.measures import PARTS
from dlbench.analysis.table import RunTable
from dlbench.records.scan import Run
from dlbench.report.chart_style import PART_COLOURS, WIDE
from dlbench.report.charts import Axis, Chart, Rows, Series, Subject, figure_row, finish, stacked
from dlbench.report.table import Sheet, column, columns_of
from dlbench.report.wording import PART_TITLES, figure_text
from dlbench.stats.estimates import Estimate, mean_estimate
from dlbench.stats.pairing import RunKey
from dlbench.units import format_bytes
from dlbench.views.sweep.settings import label

KEYS = ("train.optimizer.name", "engine.ddp.shard_optimizer")  # A sweep over one of them has the table.
_STATE_COLUMN = column(
    "State per rank, largest", text=format_bytes, missing="not measured: needs a warm-up step", is_brief=True
)
_SHARED_BY = {"zero-1": "sharded (ZeRO-1)", "fsdp": "sharded (FSDP)", "fsdp+tensor": "sharded (FSDP)"}


@dataclass(frozen=True, kw_only=True)
class Update:
    """The optimizer phase of one setting: clip, update, and exchange of updated parameters; means over ranks."""

    setting: str = field(metadata=column("Setting", is_brief=True, limit=80))
    optimizer: str = field(metadata=column("Optimizer", is_brief=True))
    state: str = field(metadata=column("Its state", is_brief=True))
    parts: Mapping[str, Estimate]  # Seconds of a step by `PARTS`; means over ranks and runs.
    update: Estimate = field(metadata=column("Update", "update_s", is_brief=True))
    share: Estimate = field(metadata=column("Of the step", "update_share", is_brief=True))
    waiting: Estimate | None = field(metadata=column("Of it waiting for parameters", "update_waiting_s"))  # Per step.
    state_bytes: int | None = field(metadata=_STATE_COLUMN)
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
    parts_s: dict[str, dict[RunKey, float]] = {part: {} for part in PARTS}
    shares: dict[RunKey, float] = {}
    waits_s: dict[RunKey, float] = {}
    state_bytes: list[int] = []  # By rank, of the first run that measured them.
    for run in runs:
        assert run.record is not None
        key, parts = table.repeat_key(run), table.parts[run.plan.run_id]
        for part in PARTS:
            parts_s[part][key] = parts[part]
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
        parts={part: mean_estimate(seconds, "s") for part, seconds in parts_s.items()},
        update=mean_estimate(parts_s["optimizer"], "s"),
        share=mean_estimate(shares, "fraction"),
        waiting=mean_estimate(waits_s, "s") if len(waits_s) == len(runs) else None,
        state_bytes=max(state_bytes, default=None),
        imbalance=max(state_bytes) * len(state_bytes) / sum(state_bytes) if any(state_bytes) else None,
    )


def update_charts(sweep: Subject, number: int, place: str, updates: Sequence[Update]) -> list[Chart]:
    """Returns a step of each setting, stacked of its parts; none unless settings differ in the optimizer."""
    if len({update.optimizer for update in updates}) < 2:
        return []
    rows: Rows = []
    for update in updates:
        for order, (part, seconds) in enumerate(update.parts.items()):
            row = {"place": update.setting, "part": PART_TITLES[part], "order": order}
            rows.append({**row, **figure_row(seconds)})
    parts = Series("part", {PART_TITLES[part]: PART_COLOURS[part] for part in PARTS})
    tooltip = {"place": "setting", "part": "part", "shown": "time", "basis": "interval"}
    words = "; ".join(f"{update.setting}: update {figure_text(update.share)} of the step" for update in updates)
    chart = finish(
        stacked(rows, Axis("time of a step", unit="s"), parts, tooltip),
        sweep,
        name=f"{number}-update",
        title=f"A step by optimizer at {place}",
        alt=f"Parts of a step, means over ranks and runs; exchange: what the backward pass does not hide. {words}.",
        table=updates_sheet(updates),
        size=(WIDE, max(70, 34 * len(updates))),
    )
    return [chart]


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

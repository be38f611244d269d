"""The blocks of a plan as a table, and the operations of its pass as a chart of three lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dlbench.perfmodels.out_of_core.blocks import BlockCosts, Operation
from dlbench.report.charts.chart import Chart, Rows, Subject, finish, tooltips
from dlbench.report.charts.style import PART_COLOURS, WIDE, si_label
from dlbench.report.table import Sheet, column, columns_of
from dlbench.specs.out_of_core import BlockPlan, Chain, Decision, Swap
from dlbench.units import format_seconds

KINDS = {  # Title and colour of the operations of a pass, in the order of the legend.
    "forward": ("forward", PART_COLOURS["forward"]),
    "recompute": ("recomputed", PART_COLOURS["input"]),
    "backward": ("backward", PART_COLOURS["backward"]),
    "outside": ("outside of the chain", PART_COLOURS["other"]),
    "swap out": ("swapped out", PART_COLOURS["optimizer"]),
    "swap in": ("swapped in", PART_COLOURS["imbalance"]),
    "wait": ("waiting", PART_COLOURS["exchange"]),
}


def _decision_text(decision: Decision) -> str:
    return decision.replace("-swap", ", input swapped")


@dataclass(frozen=True, kw_only=True)
class PlannedPart:
    """A block of a plan."""

    number: int = field(metadata=column("Block", "block", is_brief=True))
    modules: str = field(metadata=column("Modules", is_brief=True, limit=60))  # Its module, or the first and the last.
    num_units: int = field(metadata=column("Units", "units"))
    decision: Decision = field(metadata=column("Decision", text=_decision_text, is_brief=True))
    own_bytes: int = field(metadata=column("Saves", unit="bytes", is_brief=True))
    """Activations that its forward pass saves, without its input."""
    input_bytes: int = field(metadata=column("Input", unit="bytes", is_brief=True))  # Output of the block before.
    moved_bytes: int = field(metadata=column("Moves", unit="bytes"))
    """Bytes that leave the device after its forward pass and come back."""
    forward_s: float = field(metadata=column("Forward", unit="s", is_brief=True))
    backward_s: float = field(metadata=column("Backward", unit="s", is_brief=True))


def blocks_of(chain: Chain, plan: BlockPlan, swap: Swap) -> tuple[PlannedPart, ...]:
    """Returns the blocks of a plan with the bytes and seconds of the chain."""
    costs = BlockCosts(chain, blocking=swap == "offload")
    parts = []
    for number, block in enumerate(plan.blocks):
        units = chain.units[block.first : block.last + 1]
        modules = units[0].name
        if units[-1].name != modules:
            modules = f"{modules} to {units[-1].name}"
        on_device = costs.of(block.first, block.last, "keep")
        parts.append(
            PlannedPart(
                number=number,
                modules=modules,
                num_units=len(units),
                decision=block.decision,
                own_bytes=on_device.own_bytes,
                input_bytes=on_device.input_bytes,
                moved_bytes=costs.of(block.first, block.last, block.decision).moved_bytes,
                forward_s=on_device.forward_s,
                backward_s=on_device.backward_s,
            )
        )
    return tuple(parts)


def blocks_sheet(blocks: Sequence[PlannedPart], title: str, *, in_terminal: bool = False) -> Sheet[PlannedPart]:
    """Returns the table of the blocks of a plan, first to last."""
    return Sheet(
        name="out-of-core-blocks",
        title=title,
        columns=columns_of(PlannedPart),
        rows=blocks,
        caption="Saves: bytes kept for the backward pass, without the input. Moves: bytes out of the device and back.",
        in_terminal=in_terminal,
        is_folded=not in_terminal and len(blocks) > 16,
    )


def lanes_chart(operations: Sequence[Operation], blocks: Sequence[PlannedPart], subject: Subject) -> Chart:
    """Draws computing, swap-outs and swap-ins in three lanes over time."""
    import altair as alt

    names = ["compute", "out", "in"]
    rows: Rows = []
    for span in operations:
        title, _ = KINDS.get(span.kind, (span.kind, ""))
        block = modules = ""
        if span.block is not None:
            block = str(span.block)
            if span.block < len(blocks):
                modules = blocks[span.block].modules
        rows.append(
            {
                "lane": span.lane,
                "kind": title,
                "block": block,
                "modules": modules,
                "start": span.start_s,
                "end": span.end_s,
                "shown": format_seconds(span.end_s - span.start_s),
            }
        )
    titles = {row["kind"] for row in rows}
    present = [kind for kind in KINDS.values() if kind[0] in titles]
    colour = alt.Color("kind:N", title=None, legend=alt.Legend(orient="bottom", columns=4)).scale(
        domain=[title for title, _ in present], range=[colour for _, colour in present]
    )
    x = alt.X("start:Q", title="from the start of the pass").scale(nice=False, domainMin=0)
    bars = alt.Chart(alt.InlineData(values=rows)).mark_bar(height={"band": 0.8}, stroke="white", strokeWidth=0.5)
    drawn = bars.encode(
        y=alt.Y("lane:N", title=None, sort=names).scale(domain=names),
        x=x.axis(labelExpr=si_label("s"), tickCount=6, grid=True),
        x2="end:Q",
        color=colour,
        tooltip=tooltips({"kind:N": "operation", "block:N": "block", "modules:N": "modules", "shown:N": "time"}),
    )
    end = max((span.end_s for span in operations), default=0.0)
    waited_s = sum(span.end_s - span.start_s for span in operations if span.kind == "wait")
    waited = format_seconds(waited_s) if waited_s else "nothing"
    words = f"predicted: {format_seconds(end)}, of it waiting {waited}"
    return finish(
        alt.layer(drawn),
        subject,
        name="lanes",
        title="One pass in three lanes",
        alt=f"Computing, swap-outs and swap-ins over one pass. {words}.",
        table=blocks_sheet(blocks, "Blocks of the plan"),
        size=(WIDE + 140, 34 * len(names)),
    )

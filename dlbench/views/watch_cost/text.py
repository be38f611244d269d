"""What watching cost, in words: printed by `run --watch-cost`."""

from __future__ import annotations

from collections.abc import Sequence

from dlbench.report.wording import clean, percent, place_text
from dlbench.views.watch_cost.numbers import MeasuredCost


def watch_cost_lines(costs: Sequence[MeasuredCost]) -> list[str]:
    """A line for each scaling point."""
    return [f"watching at {place_text(cost.ranks, cost.nodes)}: {_cost(cost)}" for cost in costs]


def _cost(cost: MeasuredCost) -> str:
    overhead = cost.overhead
    if overhead is None:
        return f"no cost is told: {clean(cost.why)}"
    ends = f"[{percent(overhead.low, 2)}, {percent(overhead.high, 2)}]"
    return f"{percent(overhead.value, 2)} of a step {ends}; {clean(overhead.evidence)}"

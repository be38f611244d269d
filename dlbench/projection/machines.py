"""Compares the cost of the same training on several systems by data sheet, and finds where two of them are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from dlbench.report.document import Section
from dlbench.report.table import Sheet, column, columns_of, drop_empty_columns
from dlbench.report.wording import ranks_text
from dlbench.units import format_number

COMPARED = {"hours": "Time", "node_hours": "Node-hours", "kwh": "Energy", "price": "Price"}
"""Fields of `MachineCost` for which a break-even is searched, with their titles."""


@dataclass(frozen=True, kw_only=True)
class MachineCost:
    """The cost of a training on some nodes of a system, by data sheet, with the fastest strategy that fits."""

    system: str = field(metadata=column("System"))
    nodes: int = field(metadata=column("Nodes"))
    ranks: int = field(metadata=column("Ranks"))
    strategy: str = field(metadata=column("Strategy"))
    samples_per_s: float = field(metadata=column("Samples/s", text="{:,.0f}".format))
    hours: float = field(metadata=column("Time, h", text=format_number))
    node_hours: float = field(metadata=column("Node-hours", text=format_number))
    kwh: float | None = field(metadata=column("Energy, kWh", text=format_number))  # None: power is not known.
    price: float | None = field(metadata=column("Price", text=format_number))


@dataclass(frozen=True, kw_only=True)
class BreakEven:
    """The nodes of another system at which a figure is at most that of some nodes of a system."""

    figure: str = field(metadata=column("Equal"))
    system: str = field(metadata=column("System"))
    nodes: int = field(metadata=column("Nodes"))
    other_system: str = field(metadata=column("Other system"))
    other_nodes: int | None = field(metadata={})  # None: the answer is the same at all asked counts.
    answer: str = field(metadata=column("At most that"))


class Machine(NamedTuple):
    """A system with the node counts to compare, full nodes, ascending."""

    system: str
    node_counts: Sequence[int]
    cost_on: Callable[[int], MachineCost | None]  # By node count; None: no strategy fits.


def break_evens(machine: Machine, other: Machine) -> Iterator[BreakEven]:
    """Yields for each node count of a machine, and each known figure, where another machine needs at most as much."""
    for nodes in machine.node_counts:
        cost = machine.cost_on(nodes)
        if cost is None or not other.node_counts:
            continue
        for name, title in COMPARED.items():
            limit = getattr(cost, name)
            other_costs = filter(None, map(other.cost_on, other.node_counts))
            if limit is None or any(getattr(other_cost, name) is None for other_cost in other_costs):
                continue
            other_nodes, answer = _crossing(other, name, limit)
            yield BreakEven(
                figure=title,
                system=machine.system,
                nodes=nodes,
                other_system=other.system,
                other_nodes=other_nodes,
                answer=answer,
            )


def _crossing(machine: Machine, name: str, limit: float) -> tuple[int | None, str]:
    """Returns the node count from which or up to which a figure is at most `limit`, and the answer in words."""

    def is_within(nodes: int) -> bool:
        cost = machine.cost_on(nodes)
        return cost is not None and getattr(cost, name) <= limit

    for low, high in pairwise(machine.node_counts):
        starts_within = is_within(low)
        if is_within(high) == starts_within:
            continue
        while high - low > 1:
            middle = (low + high) // 2
            if is_within(middle) == starts_within:
                low = middle
            else:
                high = middle
        if starts_within:
            return low, f"up to {low:,} nodes"
        return high, f"from {high:,} nodes on"
    if is_within(machine.node_counts[0]):
        return None, "at all asked counts"
    return None, "never within the asked counts"


def machines_section(
    costs: Sequence[MachineCost], equal: Sequence[BreakEven], *, work: str, currency: str, notes: Sequence[str]
) -> Section:
    """Returns the cost of the same training by system and rank count. `work`: its samples in words."""
    titles = {"price": f"Price, {currency}".rstrip(", ")}
    sheets: list[Sheet[MachineCost] | Sheet[BreakEven]] = [
        Sheet(
            name="machines",
            title="Cost by system",
            columns=drop_empty_columns(columns_of(MachineCost, titles=titles), costs, keep=("kwh",)),
            rows=costs,
            in_terminal=True,
        )
    ]
    if equal:
        columns = columns_of(BreakEven)
        sheets.append(Sheet(name="break-even", title="Break-even", columns=columns, rows=equal, in_terminal=True))
    words = tuple(
        f"{row.figure} on {row.other_system} at most that of {row.nodes:,} nodes of {row.system}: {row.answer}."
        for row in equal
        if row.nodes == equal[-1].nodes and row.system == equal[-1].system
    )
    if not equal:
        last = costs[-1]
        words = (f"{ranks_text(last.ranks)}: {last.hours:,.3g} h, {last.node_hours:,.4g} node-hours; ideal.",)
    return Section(
        id="machines",
        title="Cost of the training",
        level="answer",
        about=(f"For {work}.",),
        words=words,
        brief=(f"For {work}.", *words),
        sheets=tuple(sheets),
        notes=("Ideal, by data sheet: training steps only, without start, evaluations, checkpoints and queue.", *notes),
    )

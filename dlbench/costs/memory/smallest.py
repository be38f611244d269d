"""The smallest capacity that some plan fits, exactly, and what needs it."""

from __future__ import annotations

from collections.abc import Sequence

from dlbench.costs.memory.blocks import BlockCosts, cut, spans_of
from dlbench.costs.memory.simulator import Setting, last_bytes
from dlbench.costs.memory.static_plans import cheapest_fitting
from dlbench.errors import EnvironmentLacksError
from dlbench.specs.memory import Chain, Decision
from dlbench.units import format_bytes


class DoesNotFitError(EnvironmentLacksError):
    """No plan fits the capacity; `smallest_bytes` would do."""

    def __init__(self, chain: Chain, capacity_bytes: int, smallest_bytes: int) -> None:
        self.smallest_bytes = smallest_bytes
        super().__init__(
            f"training does not fit into {format_bytes(capacity_bytes)} even so: needs at least "
            f"{exact_bytes(smallest_bytes)}: {largest_items(chain, smallest_bytes)}"
        )


def allowed(*, recompute: bool, swap: bool) -> tuple[Decision, ...]:
    """Decisions that a plan may take."""
    every: tuple[tuple[Decision, bool], ...] = (
        ("keep", True),
        ("swap", swap),
        ("recompute", recompute),
        ("recompute-swap", recompute and swap),
    )
    return tuple(decision for decision, may in every if may)


def smallest_capacity(chain: Chain, *, recompute: bool, swap: bool, starts: Sequence[int] | None = None) -> int:
    """Bytes of the smallest capacity that some plan fits; no plan fits one byte less.

    Where blocks may be swapped, single units as blocks need the least: nothing else has to be held, and a block needs
    no less than each of its units by itself. Otherwise all ways to cut the chain count.

    Args:
        chain: the chain.
        recompute: whether blocks may be recomputed.
        swap: whether blocks may move.
        starts: units with which blocks begin; None: all ways to cut the chain.
    """
    most = _least_peak(chain, None, recompute=recompute, swap=swap, starts=starts)
    assert most is not None, "without a limit everything fits"
    least = 0
    while least < most:
        middle = (least + most) // 2
        found = _least_peak(chain, middle, recompute=recompute, swap=swap, starts=starts)
        if found is None:
            least = middle + 1
        else:
            most = found
    return chain.fixed_bytes + most


def fits(
    chain: Chain, capacity_bytes: int, *, recompute: bool, swap: bool, starts: Sequence[int] | None = None
) -> bool:
    """Whether some plan fits the capacity."""
    budget = capacity_bytes - chain.fixed_bytes
    return budget >= 0 and _least_peak(chain, budget, recompute=recompute, swap=swap, starts=starts) is not None


def _least_peak(
    chain: Chain, budget: int | None, *, recompute: bool, swap: bool, starts: Sequence[int] | None
) -> int | None:
    """Peak of activations of some plan that keeps to the budget; None: there is none."""
    spans = cut(chain, starts) if starts is not None or swap or not recompute else spans_of(chain)
    setting = Setting.of(chain, None, None if budget is None else chain.fixed_bytes + budget)
    found = cheapest_fitting(BlockCosts(chain), setting, allowed(recompute=recompute, swap=swap), spans, 0.0, front=1)
    return None if found is None else found[1]


def largest_items(chain: Chain, smallest_bytes: int) -> str:
    """What takes most of the smallest capacity, in words."""
    outputs = [*(unit.input_bytes for unit in chain.units[1:]), chain.output_bytes]
    sizes = [
        unit.input_bytes + unit.saved_bytes + max(output, unit.backward_working_bytes)
        for unit, output in zip(chain.units, outputs, strict=True)
    ]
    largest = chain.units[sizes.index(max(sizes))].name
    passing = smallest_bytes - chain.fixed_bytes
    what = f"activations, their gradients and workspace (the largest: {largest})"
    if passing == last_bytes(chain):
        what = "gradients and what the optimiser's update works with"
    items = [
        (chain.state_bytes, "parameters and optimiser state"),
        (chain.outside_bytes, "batch and modules before the chain"),
        (passing, what),
    ]
    return ", ".join(f"{format_bytes(size)} {what}" for size, what in sorted(items, reverse=True)[:3] if size > 0)


def exact_bytes(count: int) -> str:
    """Bytes as text that can be given as a capacity, and in words."""
    return f"{count} B" if count < 1024 else f"{count} B ({format_bytes(count)})"

"""The smallest capacity that some plan fits."""

from __future__ import annotations

from collections.abc import Sequence

from dlbench.costs.memory.blocks import cut
from dlbench.costs.memory.simulator import simulate
from dlbench.errors import EnvironmentLacksError
from dlbench.specs.memory.chain import Chain, TransferRates
from dlbench.specs.memory.plan import Decision, PlannedBlock
from dlbench.units import format_bytes


class DoesNotFitError(EnvironmentLacksError):
    """No plan fits the capacity."""

    def __init__(self, chain: Chain, smallest_bytes: int) -> None:
        self.smallest_bytes = smallest_bytes
        super().__init__(f"does not fit even so: needs at least {format_bytes(smallest_bytes)} ({smallest_bytes} B)")


def smallest_capacity(chain: Chain, *, recompute: bool, swap: bool, starts: Sequence[int] | None = None) -> int:
    """Bytes of the smallest capacity that some plan fits."""
    rates = TransferRates(tier="", out_bytes_per_s=1.0, in_bytes_per_s=1.0) if swap else None
    allowed: list[Decision] = ["keep"]
    allowed += ["recompute"] if recompute else []
    allowed += ["swap"] if swap else []
    allowed += ["recompute-swap"] if swap and recompute else []
    found = []
    for decision in allowed:
        blocks = [PlannedBlock(first=first, last=last, decision=decision) for first, last in cut(chain, starts)]
        done = simulate(chain, blocks, rates, 0)
        found.append(done.over_bytes)
    return min(found)

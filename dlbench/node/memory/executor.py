"""Training with activations out of core: what a plan says of each block, done in every pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from dlbench.node.memory.cut import UnitModule
from dlbench.node.memory.spans import LaneSpan, Moments
from dlbench.node.memory.tiers.tier import Tier
from dlbench.specs.memory.plan import PlannedBlock

Prefetch = Literal["room", "one-block", "blocking"]
"""room: as many blocks as have room; one-block: the next one; blocking: each tensor when it is made and needed."""


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of a block, as its last pass had them; by the owner rule of `Chain`."""

    saved_bytes: int
    """What its forward pass keeps (recompute: would keep), each storage once, inner units' inputs included; without its
    own input and output, parameters and casts of them."""
    input_bytes: int
    """Of its input's storage; 0 for the first block."""
    input_saved: bool
    """Whether a backward pass in core needs its input."""
    output_bytes: int


class OutOfCore:
    """Blocks of a network, each kept, swapped or recomputed.

    `install` puts them on the network (before an engine wraps it), `remove` takes them off. A pass is one forward and
    one backward pass; one without gradients is left alone. Whatever ends a pass in the middle, the next one begins anew.

    Args:
        model: the network; its units' `forward` are replaced on the instances, nothing else.
        units: of `find_units`.
        blocks: every unit in one block.
        tier: where swapped tensors go; None where no block swaps.
        budget_bytes: what activations of the chain may take (capacity less `Chain.fixed_bytes`); None: no limit.
        saved_bytes: of each block (`Chain`), so that the first pass keeps to the budget; later passes know their own.
        prefetch: when swapped blocks come back.
        verify: compare checksums of what comes back.
        recompute_literally: decides nothing but `torch.utils.checkpoint`'s own bookkeeping; for tests.
        rank: for messages.
        moments: of the device; None: the host's clock.
        wrap_block: applied to the function of every block, e.g. torch.compile.
        count: also note the bytes of blocks that are kept or recomputed, in every pass (`block_bytes`); without it the
            first pass alone does.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[UnitModule],
        blocks: Sequence[PlannedBlock],
        *,
        tier: Tier | None = None,
        budget_bytes: int | None = None,
        saved_bytes: Sequence[int] | None = None,
        prefetch: Prefetch = "room",
        verify: bool = False,
        rank: int = 0,
        moments: Moments | None = None,
        wrap_block: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
        count: bool = False,
    ) -> None:
        raise NotImplementedError

    @property
    def installed(self) -> bool:
        """Whether anything stands on the network: not where every block is kept and nothing wraps them."""
        raise NotImplementedError

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know, each as one sentence."""
        raise NotImplementedError

    def install(self) -> None:
        """Puts the blocks on the network; one pass later its bytes are known."""
        raise NotImplementedError

    def remove(self) -> None:
        """Takes them off; the network is as it was."""
        raise NotImplementedError

    def begin_measuring(self) -> None:
        """Counts begin at zero: before the first measured step."""
        raise NotImplementedError

    def told(self) -> dict[str, int | float]:
        """Since `begin_measuring`: passes, activation_peak_bytes, over_budget_bytes, swapped_out_bytes,
        swapped_in_bytes, room_wait_s, swap_wait_s, recompute_s. Waits for the device."""
        raise NotImplementedError

    def block_bytes(self) -> list[BlockBytes]:
        """Bytes of each block, of the last pass that counted them."""
        raise NotImplementedError

    def watch(self, watching: bool) -> None:
        """Between two steps: begins or ends noting operations of passes. Watched passes wait for nothing more."""
        raise NotImplementedError

    def take_spans(self) -> list[LaneSpan]:
        """Operations of watched passes that have ended, in order of their start."""
        raise NotImplementedError

    def close(self) -> None:
        """Removes what is installed and closes the tier; twice does no harm."""
        raise NotImplementedError

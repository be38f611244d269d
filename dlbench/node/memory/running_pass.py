"""One pass over a chain in blocks: what its blocks have saved, and what of it takes room."""

from __future__ import annotations

from collections import deque

from torch.multiprocessing.reductions import StorageWeakRef as WeakReference

from dlbench.node.memory.saved import Handle, Table


class Pass:
    """One pass: what its blocks have saved, and what of it takes room."""

    def __init__(self, num_blocks: int) -> None:
        self.table = Table()
        self.owned: list[list[Handle]] = [[] for _ in range(num_blocks)]
        self.inputs: list[Handle | None] = [None] * (num_blocks + 1)
        self.boundaries: list[WeakReference | None] = [None] * (num_blocks + 1)
        """Storage of each block's input; while it is referenced no other has its address."""
        self.boundary_bytes = [0] * (num_blocks + 1)
        self.charged = [0] * num_blocks
        """Bytes of each block that count as held, without its input."""
        self.charged_inputs = [0] * (num_blocks + 1)
        self.charged_beside = 0
        self.resident = 0
        self.leaving: deque[Handle] = deque()
        self.at = -1
        """The block whose forward pass began last."""
        self.current = num_blocks
        """The block whose backward pass began last; all behind it have ended."""
        self.next_in = num_blocks - 1
        """The block whose way back begins next."""
        self.has_turned = False
        self.counted: dict[int, tuple[WeakReference, int]] = {}
        """Storages that a recomputed block would have saved, by address."""

    def charge(self, handle: Handle, num_bytes: int) -> None:
        """A handle's bytes take room, or less than no bytes: take it no longer."""
        charges = self.charged_inputs if handle.is_input else self.charged
        charges[handle.block] += num_bytes
        self.resident += num_bytes

    def charge_block(self, block: int, num_bytes: int) -> None:
        """What a block takes beside its input is so much now."""
        self.resident += num_bytes - self.charged[block]
        self.charged[block] = num_bytes

    def charge_beside(self, num_bytes: int) -> None:
        """What head and loss, or gradients of parameters, take is so much now."""
        self.resident += num_bytes - self.charged_beside
        self.charged_beside = num_bytes

    def charge_input(self, block: int, num_bytes: int) -> None:
        """What a block's input takes is so much now."""
        self.resident += num_bytes - self.charged_inputs[block]
        self.charged_inputs[block] = num_bytes

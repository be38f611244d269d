"""Tensors that autograd saves for the backward pass: which of them are activations, and the storages behind them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef as WeakReference

from dlbench.perfmodels.out_of_core.blocks import BlockCost
from dlbench.specs.out_of_core import Decision

SMALL_BYTES = 4096  # storages below this stay: moving them would take longer than it saves room

_RESHAPES = {
    f"{name}Backward0"
    for name in (
        *("ToCopy", "T", "View", "Transpose", "Permute", "Alias", "UnsafeView", "Expand", "ReshapeAlias", "Clone"),
        *("Slice", "Select", "Unsqueeze", "Squeeze", "Detach", "Split"),
    )
}
"""What autograd calls operations that cast, copy or view a tensor."""


def is_of_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter, or a cast, copy or view of one (autocast, transposed weights)."""
    if isinstance(tensor, nn.Parameter):
        return True
    node: Any = tensor.grad_fn
    for _ in range(6):
        if node is None:
            return False
        name = node.name()
        if name.endswith("AccumulateGrad"):
            return True
        if name not in _RESHAPES:
            return False
        node = node.next_functions[0][0]
    return False


def weak_reference(storage: torch.UntypedStorage) -> WeakReference:
    """A weak reference; while there is one, no other storage has this one's address."""
    return WeakReference(storage)  # type: ignore[no-untyped-call]


class HeldByOthers:
    """Storages that stay whatever a plan says: of parameters and buffers, and what a pass is given from outside."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._always: set[int] = set()
        self._given: dict[int, WeakReference] = {}
        self.look()

    def look(self) -> None:
        tensors = [*self._model.parameters(), *self._model.buffers()]
        self._always = {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided}

    def begin_pass(self) -> None:
        self._given.clear()

    def give(self, arguments: Iterable[object]) -> None:
        for argument in arguments:
            if isinstance(argument, torch.Tensor) and argument.layout is torch.strided:
                storage = argument.untyped_storage()
                self._given[storage._cdata] = weak_reference(storage)

    def __contains__(self, key: int) -> bool:
        return key in self._always or key in self._given


def activation_storage(tensor: torch.Tensor, others: HeldByOthers) -> torch.UntypedStorage | None:
    """Returns the storage of a saved tensor that may be swapped; None for parameters and all else that stays."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return None
    storage = tensor.untyped_storage()
    if storage.nbytes() < SMALL_BYTES or storage._cdata in others:
        return None
    if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or is_of_parameter(tensor):
        return None
    return storage


class Handle:
    """One storage of a pass: in memory, away in the tier, or both on its way."""

    __slots__ = (
        *("block", "check", "coming", "discard", "dtype", "is_input"),
        *("kept", "num_bytes", "shape", "storage", "ticket", "users"),
    )

    def __init__(self, tensor: torch.Tensor, storage: torch.UntypedStorage, block: int) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.storage: torch.UntypedStorage | None = storage  # while it is in memory for us
        self.num_bytes = storage.nbytes()
        self.block = block  # its owner: the block that saved it or, for a boundary, the one whose input it is
        self.is_input = False
        self.coming = False  # whether its way back has begun
        self.ticket: Any = None  # of the tier, from the start of the way out until it is taken back
        self.kept: Any = None  # the ticket of what was recalled: a copy may still read the storage
        self.check: Checksum | None = None
        self.discard: Callable[[Any], None] | None = None
        self.users = 0  # how often autograd holds it

    @property
    def text(self) -> str:
        """Shape and type of the tensor that was saved first of it."""
        return f"shape {'x'.join(map(str, self.shape)) or 'scalar'}, {str(self.dtype).removeprefix('torch.')}"

    def drop(self) -> None:
        self.storage = None
        tickets, self.ticket, self.kept = (self.ticket, self.kept), None, None
        for ticket in tickets:
            if ticket is not None and self.discard is not None:
                self.discard(ticket)

    def __del__(self) -> None:
        # A pass that no backward pass followed leaves its tickets with its graph.
        self.drop()


class PackedTensor:
    """What autograd holds instead of a saved tensor: a storage's handle, and the view of it."""

    __slots__ = ("dtype", "handle", "offset", "size", "stride")

    def __init__(self, handle: Handle, tensor: torch.Tensor) -> None:
        self.handle = handle
        handle.users += 1
        self.dtype = tensor.dtype
        self.offset = tensor.storage_offset()
        self.size = tensor.size()
        self.stride = tensor.stride()

    def __del__(self) -> None:
        # Autograd lets go of it when its operation's backward pass is done: so goes what has come back, as in core.
        self.handle.users -= 1
        if not self.handle.users and self.handle.ticket is None:
            self.handle.drop()

    def tensor(self, storage: torch.UntypedStorage) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class SavedStorages:
    """The storages that one pass has saved, each once."""

    def __init__(self) -> None:
        self._handles: dict[int, tuple[WeakReference, Handle]] = {}

    def find(self, storage: torch.UntypedStorage) -> Handle | None:
        """Its handle, also when its bytes are away and others still hold it."""
        found = self._handles.get(storage._cdata)
        return found[1] if found is not None else None

    def add(self, tensor: torch.Tensor, storage: torch.UntypedStorage, block: int) -> Handle:
        handle = Handle(tensor, storage, block)
        self._handles[storage._cdata] = (weak_reference(storage), handle)
        return handle


@dataclass(frozen=True)
class Checksum:
    """What a storage held when it went out."""

    total: torch.Tensor  # of its bytes as int64 numbers, modulo 2^64; on its device
    finite: torch.Tensor | None  # whether all its numbers were finite; None for whole numbers

    @classmethod
    def of(cls, storage: torch.UntypedStorage, num_bytes: int, dtype: torch.dtype) -> Checksum:
        """The checksum of a storage's first bytes; nothing waits for a device."""
        return cls(total=_total(storage, num_bytes), finite=_finite(storage, num_bytes, dtype))

    def difference(self, storage: torch.UntypedStorage, num_bytes: int, dtype: torch.dtype) -> str | None:
        """What is no longer as it was, in words; None where nothing changed. Waits for the device."""
        if bool((_total(storage, num_bytes) == self.total).item()):
            return None
        now = _finite(storage, num_bytes, dtype)
        if now is not None and self.finite is not None and bool(self.finite.item()) and not bool(now.item()):
            return "it now holds NaN or infinity, which it did not when it went out"
        return "its checksum is not that of what went out"


def _numbers(storage: torch.UntypedStorage, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, 0, (num_bytes // dtype.itemsize,), (1,))


def _total(storage: torch.UntypedStorage, num_bytes: int) -> torch.Tensor:
    total = _numbers(storage, num_bytes, torch.int64).sum()
    rest = _numbers(storage, num_bytes, torch.uint8)[num_bytes // 8 * 8 :]
    return total + rest.sum(dtype=torch.int64)


def _finite(storage: torch.UntypedStorage, num_bytes: int, dtype: torch.dtype) -> torch.Tensor | None:
    return torch.isfinite(_numbers(storage, num_bytes, dtype)).all() if dtype.is_floating_point else None


class RunningPass:
    """One pass: what its blocks have saved, and what of it takes room."""

    def __init__(self, num_blocks: int) -> None:
        self.table = SavedStorages()
        self.owned: list[list[Handle]] = [[] for _ in range(num_blocks)]
        self.inputs: list[Handle | None] = [None] * (num_blocks + 1)
        self.boundaries: list[WeakReference | None] = [None] * (num_blocks + 1)
        """Storage of each block's input; while it is referenced no other has its address."""
        self.boundary_bytes = [0] * (num_blocks + 1)
        self.charged = [0] * num_blocks  # bytes of each block that count as held, without its input
        self.charged_inputs = [0] * (num_blocks + 1)
        self.charged_beside = 0
        self.resident = 0
        self.leaving: deque[Handle] = deque()
        self.at = -1  # the block whose forward pass began last
        self.current = num_blocks  # the block whose backward pass began last; all behind it have ended
        self.next_in = num_blocks - 1  # the block whose way back begins next
        self.has_turned = False
        self.counted: dict[int, tuple[WeakReference, int]] = {}  # What a recomputed block would have saved, by address.

    def begin_block(self, block: int, storage: torch.UntypedStorage) -> None:
        self.boundaries[block], self.boundary_bytes[block] = weak_reference(storage), storage.nbytes()

    def charge(self, handle: Handle, num_bytes: int) -> None:
        """A handle's bytes take room, or less than no bytes: take it no longer."""
        charges = self.charged_inputs if handle.is_input else self.charged
        charges[handle.block] += num_bytes
        self.resident += num_bytes

    def charge_block(self, block: int, num_bytes: int) -> None:
        """What a block takes besides its input is `num_bytes` now."""
        self.resident += num_bytes - self.charged[block]
        self.charged[block] = num_bytes

    def charge_beside(self, num_bytes: int) -> None:
        """What head and loss, or gradients of parameters, take is so much now."""
        self.resident += num_bytes - self.charged_beside
        self.charged_beside = num_bytes

    def charge_input(self, block: int, num_bytes: int) -> None:
        self.resident += num_bytes - self.charged_inputs[block]
        self.charged_inputs[block] = num_bytes


def first_tensor(output: Any) -> torch.Tensor | None:
    """A tensor, or the first one of a tuple or list; None where there is none."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, tuple | list):
        return next((one for one in output if isinstance(one, torch.Tensor)), None)
    return None


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of a block, as a pass had them; by the owner rule of `dlbench.perfmodels.out_of_core.blocks`."""

    saved_bytes: int = 0
    """What its forward pass keeps (recompute: would keep), each storage once, inner units' inputs included; without its
    own input and output, parameters and casts of them."""
    input_bytes: int = 0  # of its input's storage; 0 where others hold that
    input_saved: bool = False  # whether a backward pass in core needs its input
    output_bytes: int = 0


class MemoryRoom:
    """Bytes that blocks need: by `costs` or, without them, as the last counted pass had them; budget None: no limit."""

    def __init__(
        self, decisions: Sequence[Decision], budget: int | None, costs: Sequence[BlockCost] | None, by_others: set[int]
    ) -> None:
        self.budget = math.inf if budget is None else budget
        self.seen = [BlockBytes()] * len(decisions)  # bytes of each block in the last counted pass
        self._decisions, self._costs, self._held_by_others = decisions, costs, by_others
        self._issued = 0
        self._limits: deque[tuple[int, float]] = deque()

    def recomputes(self, block: int) -> bool:
        return self._decisions[block] in ("recompute", "recompute-swap")

    def moves(self, block: int) -> bool:
        """Whether the input of a block leaves with it."""
        return (
            block < len(self._decisions)
            and self._decisions[block] in ("swap", "recompute-swap")
            and block not in self._held_by_others
        )

    def forward_bytes(self, block: int) -> int:
        """Room that its forward pass needs to start, its output included."""
        if self._costs is not None:
            return self._costs[block].forward_bytes
        seen = self.seen[block]
        return seen.output_bytes + (0 if self.recomputes(block) else seen.saved_bytes)

    def own_bytes(self, block: int) -> int:
        """What stays of its forward pass, besides its boundaries, until it leaves."""
        if self._costs is not None:
            return self._costs[block].own_bytes
        return 0 if self.recomputes(block) else self.seen[block].saved_bytes

    def kept_bytes(self, block: int) -> int:
        """What stays of its input after its forward pass, until it leaves."""
        if self._costs is not None:
            return self._costs[block].kept_bytes
        seen = self.seen[block]
        return seen.input_bytes if seen.input_saved or self.recomputes(block) or block in self._held_by_others else 0

    def backward_bytes(self, block: int) -> int:
        """What its backward pass takes besides what is kept, recomputing included."""
        if self._costs is None:
            return self.seen[block].saved_bytes if self.recomputes(block) else 0
        return self._costs[block].backward_bytes

    def gradients_before(self, block: int) -> int:
        """Gradients of parameters that are there when its backward pass begins."""
        return 0 if self._costs is None else self._costs[block].gradients_before_bytes

    def turn(self) -> None:
        self._issued = 0
        self._limits.clear()

    def leaves_enough(self, num_bytes: int) -> bool:
        """Whether blocks whose backward pass comes first keep their room if `num_bytes` come back before."""
        return not self._limits or self._issued + num_bytes <= self._limits[0][1]

    def issue(self, block: int, num_bytes: int) -> None:
        """Bytes of a block, the next one in backward order, come back, or stay; it is owed room from now on."""
        self._issued += num_bytes
        if self._costs is None:
            return
        below = sum(cost.own_bytes + cost.kept_bytes - cost.freed_bytes for cost in self._costs[:block])
        own = self._costs[block].own_bytes + self._costs[block].kept_bytes
        spare = self.budget - below - own - self.gradients_before(block) - self.backward_bytes(block)
        limit = self._issued + spare
        while self._limits and self._limits[-1][1] >= limit:
            self._limits.pop()
        self._limits.append((block, limit))

    def start(self, block: int) -> None:
        while self._limits and self._limits[0][0] >= block:
            self._limits.popleft()

"""Tensors that autograd saves for the backward pass: which are activations, their storages, and their memory."""

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

SMALL_BYTES = 4096  # Smaller storages are not swapped: the transfer would cost more than the memory is worth.

_RESHAPES = {
    f"{name}Backward0"
    for name in (
        *("ToCopy", "T", "View", "Transpose", "Permute", "Alias", "UnsafeView", "Expand", "ReshapeAlias", "Clone"),
        *("Slice", "Select", "Unsqueeze", "Squeeze", "Detach", "Split"),
    )
}
"""Autograd's names of operations that cast, copy or view a tensor."""


def is_of_parameter(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a parameter, or a cast, copy or view of one (autocast, transposed weights)."""
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
    """Returns a weak reference; while it exists, no other storage has this one's address."""
    return WeakReference(storage)  # type: ignore[no-untyped-call]


def without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor to save as it is: with its graph, a saved output would keep itself alive."""
    return tensor if tensor.grad_fn is None else tensor.detach()


class UnmovedStorages:
    """The storages that no plan moves: of parameters, buffers and arguments from outside of the chain."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._always: set[int] = set()
        self._given: dict[int, WeakReference] = {}
        self.read_model()

    def read_model(self) -> None:
        tensors = [*self._model.parameters(), *self._model.buffers()]
        self._always = {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided}

    def begin_pass(self) -> None:
        self._given.clear()

    def add_arguments(self, arguments: Iterable[object]) -> None:
        for argument in arguments:
            if isinstance(argument, torch.Tensor) and argument.layout is torch.strided:
                storage = argument.untyped_storage()
                self._given[storage._cdata] = weak_reference(storage)

    def __contains__(self, key: int) -> bool:
        return key in self._always or key in self._given


def activation_storage(tensor: torch.Tensor, unmoved: UnmovedStorages) -> torch.UntypedStorage | None:
    """Returns the storage of a saved tensor that may be swapped; None for parameters and others that stay."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return None
    storage = tensor.untyped_storage()
    if storage.nbytes() < SMALL_BYTES or storage._cdata in unmoved:
        return None
    if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or is_of_parameter(tensor):
        return None
    return storage


class Handle:
    """One storage of a pass: in memory, in the tier, or in transfer."""

    __slots__ = (
        *("block", "check", "coming", "discard", "dtype", "is_input"),
        *("num_bytes", "recalled_ticket", "shape", "storage", "ticket", "users"),
    )

    def __init__(self, tensor: torch.Tensor, storage: torch.UntypedStorage, block: int) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.storage: torch.UntypedStorage | None = storage  # None while it is swapped out.
        self.num_bytes = storage.nbytes()
        self.block = block  # The block that saved it or, for a boundary, the block whose input it is.
        self.is_input = False
        self.coming = False  # Whether its transfer in has begun.
        self.ticket: Any = None  # The tier's ticket, from `swap_out` until it is taken back.
        self.recalled_ticket: Any = None  # Its ticket after a recall: a copy may still read the storage.
        self.check: Checksum | None = None
        self.discard: Callable[[Any], None] | None = None
        self.users = 0  # Number of saved tensors of autograd that use it.

    @property
    def resident_bytes(self) -> int:
        return self.num_bytes if self.ticket is None else 0

    @property
    def text(self) -> str:
        return f"shape {'x'.join(map(str, self.shape)) or 'scalar'}, {str(self.dtype).removeprefix('torch.')}"

    def drop(self) -> None:
        self.storage = None
        tickets, self.ticket, self.recalled_ticket = (self.ticket, self.recalled_ticket), None, None
        for ticket in tickets:
            if ticket is not None and self.discard is not None:
                self.discard(ticket)

    def __del__(self) -> None:
        # A pass without a backward pass discards its tickets together with its graph.
        self.drop()


class PackedTensor:
    """The object that autograd holds instead of a saved tensor: a storage's handle, and the view of it."""

    __slots__ = ("dtype", "handle", "offset", "size", "stride")

    def __init__(self, handle: Handle, tensor: torch.Tensor) -> None:
        self.handle = handle
        handle.users += 1
        self.dtype = tensor.dtype
        self.offset = tensor.storage_offset()
        self.size = tensor.size()
        self.stride = tensor.stride()

    def __del__(self) -> None:
        # Autograd releases it after its operation's backward pass: then the storage is released, too, as in core.
        self.handle.users -= 1
        if not self.handle.users and self.handle.ticket is None:
            self.handle.drop()

    def tensor(self, storage: torch.UntypedStorage) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class SavedStorages:
    """The storages that one pass has saved, one handle for each."""

    def __init__(self) -> None:
        self._handles: dict[int, tuple[WeakReference, Handle]] = {}

    def find(self, storage: torch.UntypedStorage) -> Handle | None:
        """Returns the handle of a storage, also if it is swapped out and others still use it; None if it has none."""
        _, handle = self._handles.get(storage._cdata, (None, None))
        return handle

    def add(self, tensor: torch.Tensor, storage: torch.UntypedStorage, block: int) -> Handle:
        handle = Handle(tensor, storage, block)
        self._handles[storage._cdata] = (weak_reference(storage), handle)
        return handle


@dataclass(frozen=True)
class Checksum:
    """The checksum of a storage when it was swapped out."""

    total: torch.Tensor  # Sum of its bytes as int64 numbers, modulo 2^64; on its device.
    finite: torch.Tensor | None  # Whether all its numbers were finite; None for integers.

    @classmethod
    def of(cls, storage: torch.UntypedStorage, num_bytes: int, dtype: torch.dtype) -> Checksum:
        """Computes the checksum of a storage's first bytes, without waiting for the device."""
        return cls(total=_total(storage, num_bytes), finite=_finite(storage, num_bytes, dtype))

    def difference(self, storage: torch.UntypedStorage, num_bytes: int, dtype: torch.dtype) -> str | None:
        """Returns the difference in words, or None if the checksums are equal; waits for the device."""
        if bool((_total(storage, num_bytes) == self.total).item()):
            return None
        finite = _finite(storage, num_bytes, dtype)
        if finite is not None and self.finite is not None and bool(self.finite.item()) and not bool(finite.item()):
            return "it now has NaN or infinity, which it did not when it was swapped out"
        return "its checksum differs from that when it was swapped out"


def _numbers(storage: torch.UntypedStorage, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, 0, (num_bytes // dtype.itemsize,), (1,))


def _total(storage: torch.UntypedStorage, num_bytes: int) -> torch.Tensor:
    total = _numbers(storage, num_bytes, torch.int64).sum()
    last_bytes = _numbers(storage, num_bytes, torch.uint8)[num_bytes // 8 * 8 :]
    return total + last_bytes.sum(dtype=torch.int64)


def _finite(storage: torch.UntypedStorage, num_bytes: int, dtype: torch.dtype) -> torch.Tensor | None:
    if not dtype.is_floating_point:
        return None
    return torch.isfinite(_numbers(storage, num_bytes, dtype)).all()


class RunningPass:
    """The state of one pass: the saved storages of its blocks, and the bytes that they take in memory."""

    def __init__(self, num_blocks: int) -> None:
        self.table = SavedStorages()
        self.owned: list[list[Handle]] = [[] for _ in range(num_blocks)]
        self.inputs: list[Handle | None] = [None] * (num_blocks + 1)
        self.boundaries: list[WeakReference | None] = [None] * (num_blocks + 1)
        """Storage of each block's input; while it is referenced no other has its address."""
        self.boundary_bytes = [0] * (num_blocks + 1)
        self.charged = [0] * num_blocks  # Bytes of each block that are in memory, without its input.
        self.charged_inputs = [0] * (num_blocks + 1)
        self.charged_other = 0  # Bytes of head and loss or, in the backward pass, of parameters' gradients.
        self.resident = 0  # Sum of all charged bytes.
        self.leaving: deque[Handle] = deque()  # Handles whose transfer out has begun, oldest first.
        self.last_forward = -1  # The block whose forward pass began last.
        self.last_backward = num_blocks  # The block whose backward pass began last; all later ones have ended.
        self.next_in = num_blocks - 1  # The block whose transfer in begins next.
        self.has_turned = False  # Whether the backward pass has begun.
        self.counted: dict[int, tuple[WeakReference, int]] = {}
        """Storages and bytes that a recomputed block would have saved, by address."""

    def begin_block(self, block: int, storage: torch.UntypedStorage) -> None:
        self.boundaries[block], self.boundary_bytes[block] = weak_reference(storage), storage.nbytes()

    def charge(self, handle: Handle, num_bytes: int) -> None:
        """Adds bytes of a handle to the memory in use; a negative number frees them."""
        charges = self.charged_inputs if handle.is_input else self.charged
        charges[handle.block] += num_bytes
        self.resident += num_bytes

    def charge_block(self, block: int, num_bytes: int) -> None:
        """Sets the bytes of a block without its input."""
        self.resident += num_bytes - self.charged[block]
        self.charged[block] = num_bytes

    def charge_other(self, num_bytes: int) -> None:
        """Sets the bytes of head and loss, or of parameters' gradients."""
        self.resident += num_bytes - self.charged_other
        self.charged_other = num_bytes

    def charge_input(self, block: int, num_bytes: int) -> None:
        self.resident += num_bytes - self.charged_inputs[block]
        self.charged_inputs[block] = num_bytes


def first_tensor(output: Any) -> torch.Tensor | None:
    """Returns a tensor, or the first tensor of a tuple or list; None if there is none."""
    values = output if isinstance(output, tuple | list) else (output,)
    return next((value for value in values if isinstance(value, torch.Tensor)), None)


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of a block in a pass, by the owner rule of `dlbench.perfmodels.out_of_core.blocks`."""

    saved_bytes: int = 0
    """Bytes of storages that its forward pass saves, or would save, without its input and output and parameters."""
    input_bytes: int = 0  # Bytes of its input's storage; 0 if others hold it.
    input_saved: bool = False  # Whether a backward pass in core needs its input.
    output_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class BlockNeeds:
    """Bytes of a block, with the meaning of the fields of `BlockCost`."""

    forward_bytes: int
    own_bytes: int
    kept_bytes: int
    backward_bytes: int
    gradients_before_bytes: int = 0


class MemoryRoom:
    """Bytes that blocks need, by `costs` or, without them, by the last counted pass; budget None: no limit."""

    def __init__(
        self,
        decisions: Sequence[Decision],
        budget: int | None,
        costs: Sequence[BlockCost] | None,
        shared_inputs: set[int],
    ) -> None:
        self.budget = budget if budget is not None else math.inf
        self.counted = [BlockBytes()] * len(decisions)  # Bytes of each block in the last counted pass.
        self._decisions, self._costs, self._shared_inputs = decisions, costs, shared_inputs
        self._issued = 0
        self._limits: deque[tuple[int, float]] = deque()

    def recomputes(self, block: int) -> bool:
        return self._decisions[block] in ("recompute", "recompute-swap")

    def moves(self, block: int) -> bool:
        """Returns whether the input of a block is swapped out with it."""
        return (
            block < len(self._decisions)
            and self._decisions[block] in ("swap", "recompute-swap")
            and block not in self._shared_inputs
        )

    def needs(self, block: int) -> BlockCost | BlockNeeds:
        """Returns the bytes that a block needs by the plan's costs or, without them, by the last counted pass."""
        if self._costs is not None:
            return self._costs[block]
        counted = self.counted[block]
        own_bytes, backward_bytes, kept_bytes = counted.saved_bytes, 0, 0
        if self.recomputes(block):
            own_bytes, backward_bytes = 0, counted.saved_bytes
        if counted.input_saved or self.recomputes(block) or block in self._shared_inputs:
            kept_bytes = counted.input_bytes
        forward_bytes = own_bytes + counted.output_bytes
        return BlockNeeds(
            forward_bytes=forward_bytes, own_bytes=own_bytes, kept_bytes=kept_bytes, backward_bytes=backward_bytes
        )

    def turn(self) -> None:
        self._issued = 0
        self._limits.clear()

    def leaves_enough(self, num_bytes: int) -> bool:
        """Returns whether blocks whose backward passes come first still fit after `num_bytes` more are swapped in."""
        if not self._limits:
            return True
        _, limit = self._limits[0]
        return self._issued + num_bytes <= limit

    def issue(self, block: int, num_bytes: int) -> None:
        """Adds the bytes of the next block in backward order that come back or stay, and reserves memory for it."""
        self._issued += num_bytes
        if self._costs is None:
            return
        earlier_bytes = sum(cost.own_bytes + cost.kept_bytes - cost.freed_bytes for cost in self._costs[:block])
        cost = self._costs[block]
        block_bytes = cost.own_bytes + cost.kept_bytes + cost.gradients_before_bytes + cost.backward_bytes
        limit = self._issued + self.budget - earlier_bytes - block_bytes
        while self._limits and self._limits[-1][1] >= limit:
            self._limits.pop()
        self._limits.append((block, limit))

    def start(self, block: int) -> None:
        while self._limits and self._limits[0][0] >= block:
            self._limits.popleft()

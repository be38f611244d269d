"""Tensors that autograd saves for the backward pass: which of them are activations, and the storages behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef as WeakReference

SMALL_BYTES = 4096
"""Storages below this stay: moving them would take longer than it saves room."""

_RESHAPES = {
    f"{name}Backward0"
    for name in (
        *("ToCopy", "T", "View", "Transpose", "Permute", "Alias", "UnsafeView", "Expand", "ReshapeAlias", "Clone"),
        *("Slice", "Select", "Unsqueeze", "Squeeze", "Detach", "Split"),
    )
}
"""What autograd calls operations that cast, copy or view a tensor."""
_DEEPEST = 6


def is_of_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter, or a cast, copy or view of one (autocast, transposed weights)."""
    if isinstance(tensor, nn.Parameter):
        return True
    node: Any = tensor.grad_fn
    for _ in range(_DEEPEST):
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
        """Looks up parameters and buffers anew: something may have moved them."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        self._always = {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided}

    def begin_pass(self) -> None:
        """Forgets what the pass before was given."""
        self._given.clear()

    def give(self, arguments: Iterable[object]) -> None:
        """Tensors from outside of the chain."""
        for argument in arguments:
            if isinstance(argument, torch.Tensor) and argument.layout is torch.strided:
                storage = argument.untyped_storage()
                # While there is a weak reference, no other storage has this address.
                self._given[storage._cdata] = weak_reference(storage)

    def __contains__(self, key: int) -> bool:
        return key in self._always or key in self._given


def activation_storage(tensor: torch.Tensor, others: HeldByOthers) -> torch.UntypedStorage | None:
    """The storage of a saved tensor that may be swapped; None for all that stays.

    Parameters, buffers, casts of parameters, what others hold, small and unusual tensors stay.
    """
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
        "block",
        "check",
        "coming",
        "discard",
        "dtype",
        "is_input",
        "num_bytes",
        "shape",
        "storage",
        "ticket",
        "users",
    )

    def __init__(self, tensor: torch.Tensor, storage: torch.UntypedStorage, block: int) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.storage: torch.UntypedStorage | None = storage
        """While it is in memory for us."""
        self.num_bytes = storage.nbytes()
        self.block = block
        """Its owner: the block that saved it or, for a boundary, the one whose input it is."""
        self.is_input = False
        self.coming = False
        """Whether its way back has begun."""
        self.ticket: Any = None
        """Of the tier, from the start of the way out until it is taken back."""
        self.check: Checksum | None = None
        self.discard: Callable[[Any], None] | None = None
        self.users = 0
        """How often autograd holds it."""

    @property
    def text(self) -> str:
        """Shape and type of the tensor that was saved first of it."""
        return f"shape {'x'.join(map(str, self.shape)) or 'scalar'}, {str(self.dtype).removeprefix('torch.')}"

    def drop(self) -> None:
        """It is no longer needed: neither its memory nor its place in the tier."""
        self.storage = None
        ticket, self.ticket = self.ticket, None
        if ticket is not None and self.discard is not None:
            self.discard(ticket)

    def __del__(self) -> None:
        # A pass that no backward pass followed leaves its tickets with its graph.
        if self.ticket is not None:
            self.drop()


class Packed:
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
            self.handle.storage = None

    def tensor(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The saved tensor, in the storage that holds its bytes now."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class Table:
    """The storages that one pass has saved, each once."""

    def __init__(self) -> None:
        self._handles: dict[int, tuple[WeakReference, Handle]] = {}

    def find(self, storage: torch.UntypedStorage) -> Handle | None:
        """Its handle, also when its bytes are away and others still hold it."""
        found = self._handles.get(storage._cdata)
        return found[1] if found is not None else None

    def add(self, tensor: torch.Tensor, storage: torch.UntypedStorage, block: int) -> Handle:
        """A handle for the storage of a tensor, which has none yet."""
        handle = Handle(tensor, storage, block)
        self._handles[storage._cdata] = (weak_reference(storage), handle)
        return handle


@dataclass(frozen=True)
class Checksum:
    """What a storage held when it went out."""

    total: torch.Tensor
    """Of its bytes as int64 numbers, modulo 2^64; on its device."""
    finite: torch.Tensor | None
    """Whether all its numbers were finite; None for whole numbers."""

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

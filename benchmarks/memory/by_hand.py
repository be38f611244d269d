"""A plan as a person would write it: `torch.utils.checkpoint`, `saved_tensors_hooks`, and no dlbench but its swap file.

The same blocks and decisions, and the same file behind the same direct I/O, so that what differs is the code around
them. What is streamed has two blocks on their way out, and comes back a block ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from dlbench.node.out_of_core.cut import UnitModule
from dlbench.specs.out_of_core import PlannedBlock

SMALL_BYTES = 4096


class Moved:
    """One storage that leaves and comes back; given up with the last tensor that autograd holds of it."""

    def __init__(self, tier: Any, storage: torch.UntypedStorage, block: int) -> None:
        self.tier, self.block, self.coming = tier, block, False
        self.storage: torch.UntypedStorage | None = None
        self.ticket = tier.swap_out(storage, block)

    def start_back(self) -> None:
        if self.storage is None and not self.coming:
            self.storage = self.tier.recall(self.ticket)
            if self.storage is None:
                self.tier.swap_in(self.ticket, self.block)
                self.coming = True

    def back(self) -> torch.UntypedStorage:
        self.start_back()
        if self.storage is None:
            self.storage = self.tier.take(self.ticket)
        return self.storage

    def __del__(self) -> None:
        self.tier.discard(self.ticket)


class ByHand:
    """Blocks of a network on it, until `remove`. `blocking`: computing waits for each tensor that moves."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[UnitModule],
        blocks: Sequence[PlannedBlock],
        tier: Any,
        *,
        blocking: bool,
    ) -> None:
        self._tier, self._blocking = tier, blocking
        self._stay = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
        self._seen: dict[int, tuple[StorageWeakRef, Moved]] = {}
        self._moved: list[list[Any]] = [[] for _ in blocks]
        self._modules: list[nn.Module] = []
        for number, block in enumerate(blocks):
            modules = [module for unit in units[block.first : block.last + 1] for module in unit.modules]
            forwards = [module.forward for module in modules]
            modules[0].forward = partial(self._block, number, block.decision, forwards)
            for module in modules[1:]:
                module.forward = lambda x, *_, **__: x
            self._modules += modules

    def remove(self) -> None:
        for module in self._modules:
            module.__dict__.pop("forward", None)
        self._seen.clear()
        self._moved.clear()

    def _block(self, number: int, decision: str, forwards: Sequence[Callable[..., Any]], *args: Any, **kw: Any) -> Any:
        if number == 0:
            self._seen.clear()
        self._moved[number].clear()

        def run(x: Any, *others: Any, **keywords: Any) -> Any:
            for forward in forwards:
                x = forward(x, *others, **keywords)
            return x

        hooks: Any = nullcontext()
        if "swap" in decision:
            for moved in self._moved[number - 2] if number > 1 else ():
                self._tier.wait_out(moved.ticket)
            hooks = saved_tensors_hooks(partial(self._pack, number), self._unpack)
        with hooks:
            if "recompute" in decision:
                return checkpoint(run, *args, use_reentrant=False, **kw)
            return run(*args, **kw)

    def _pack(self, number: int, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALL_BYTES or storage.data_ptr() in self._stay or (number == 0 and tensor.is_leaf):
            return tensor.detach() if tensor.grad_fn is not None else tensor
        found = self._seen.get(storage._cdata)
        if found is None or found[0].expired():  # type: ignore[no-untyped-call]
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            found = self._seen[storage._cdata] = (reference, Moved(self._tier, storage, number))
            if self._blocking:
                self._tier.wait_out(found[1].ticket)
            else:
                self._moved[number].append(found[1])
        return found[1], tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        moved, dtype, *view = packed
        self._seen.clear()  # the forward pass is over: autograd alone holds what has left
        if not self._blocking:
            ahead, self._moved[moved.block - 1] = self._moved[moved.block - 1] if moved.block else [], []
            for other in (*self._moved[moved.block], *reversed(ahead)):
                other.start_back()
            self._moved[moved.block].clear()
        return torch.empty(0, dtype=dtype).set_(moved.back(), *view)


@contextmanager
def by_hand(
    model: nn.Module, units: Sequence[UnitModule], blocks: Sequence[PlannedBlock], tier: Any, *, blocking: bool
) -> Iterator[None]:
    """Within it the network trains so."""
    hand = ByHand(model, units, blocks, tier, blocking=blocking)
    try:
        yield
    finally:
        hand.remove()

"""Shared memory for batches, written by loader processes and used again: slots.

A loader process writes samples straight into a slot. The memory of a slot crosses to the training process once, when it
is made; from then on only its number does. So a batch is neither copied on its way nor mapped anew (unmapping holds up
the training process: pytorch issue 77139). For a GPU the training process page-locks each slot once, in place.

The training process says which slot a batch goes to. A slot is free again when no tensor of its batch is left, which
Python's reference counts tell: whoever copies from one to a GPU keeps it until that copy is done.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dlbench.errors import EnvironmentLacksError
from dlbench.node.data.reader import Fetched, Forms
from dlbench.units import format_bytes

Batch = dict[str, torch.Tensor]


class NoRoomError(Exception):
    """Shared memory is full; `str` is the reason."""


class MadeSlots:
    """The slots of one loader process, in that process."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[int, Forms, Batch]] = {}
        self._told: set[int] = set()

    def room(self, slot: int, num: int, forms: Forms) -> dict[str, NDArray[Any]]:
        """Room for `num` samples in a slot, which is made where there is none of these forms.

        Raises:
            NoRoomError: there is no shared memory left.
        """
        most, known, batch = self._slots.get(slot, (0, {}, {}))
        if num > most or known != forms:
            self._slots.pop(slot, None)
            self._told.discard(slot)
            try:
                batch = {name: _shared((num, *shape), dtype) for name, (shape, dtype) in forms.items()}
            except (RuntimeError, OSError) as error:
                raise NoRoomError(" ".join(str(error).split())) from error
            self._slots[slot] = (num, forms, batch)
        return {name: tensor.numpy()[:num] for name, tensor in batch.items()}

    def hand_over(self, fetched: Fetched, slot: int) -> None:
        """Leaves of the tensors that lie in the slot their names only, and the slot where it is not known yet."""
        made = self._slots.get(slot, (0, {}, {}))[2]
        inside = [n for n, tensor in fetched.batch.items() if n in made and tensor.data_ptr() == made[n].data_ptr()]
        if not inside:
            return
        fetched.slot, fetched.num, fetched.names = slot, len(fetched.batch[inside[0]]), tuple(fetched.batch)
        fetched.made = {} if slot in self._told else made
        fetched.batch = {name: tensor for name, tensor in fetched.batch.items() if name not in inside}
        self._told.add(slot)


def _shared(shape: tuple[int, ...], dtype: np.dtype[Any]) -> torch.Tensor:
    like = torch.from_numpy(np.empty(0, dtype))
    made: torch.Tensor = torch.empty(shape, dtype=like.dtype).share_memory_()  # type: ignore[no-untyped-call]
    return made


@dataclass
class _Slot:
    batch: Batch
    locked: list[int]
    """Addresses that were page-locked."""
    left: int = 0
    """Tensors of the batch that was handed out last which somebody may still have."""


class Slots:
    """The slots of all loader processes of a rank, in the training process.

    Args:
        loader_workers: processes; batches go to them in turn, as torch's DataLoader deals them out.
        pin_memory: page-lock them (needs a GPU).
    """

    def __init__(self, loader_workers: int, *, pin_memory: bool) -> None:
        self._workers, self._pins = loader_workers, pin_memory
        self._numbers = itertools.count()
        self._free: list[list[int]] = [[] for _ in range(loader_workers)]
        self._home: dict[int, int] = {}
        """By slot: the process that it is meant for."""
        self._known: dict[tuple[int, int], _Slot] = {}
        """By process and slot."""
        self._dropped: deque[tuple[int, int]] = deque()
        """Process and slot of each tensor that is gone; appended to by any thread, without a lock."""

    def turns(self) -> Iterator[int]:
        """The slot for each batch of a pass."""
        for worker in itertools.cycle(range(self._workers)):
            self._collect()
            if self._free[worker]:
                yield self._free[worker].pop()
            else:
                slot = next(self._numbers)
                self._home[slot] = worker
                yield slot

    def take(self, fetched: Fetched) -> None:
        """Gives a batch from a loader process its tensors, which lie in its slot.

        Raises:
            EnvironmentLacksError: a slot cannot be page-locked.
        """
        asked = fetched.asked_slot
        if fetched.slot is None:
            # An error, an empty batch, or one whose form differed from the one before: its slot was not used.
            if asked is not None:
                self._free[self._home[asked]].append(asked)
            return
        key = (fetched.worker, fetched.slot)
        if fetched.made:
            if key in self._known:
                self._forget(self._known.pop(key))
            self._known[key] = _Slot(fetched.made, self._lock(fetched.made))
            fetched.made = {}
        slot, beside = self._known[key], fetched.batch
        slot.left = len(fetched.names) - len(beside)
        fetched.batch = {
            name: self._beside(beside[name]) if name in beside else self._lent(key, slot.batch[name], fetched.num)
            for name in fetched.names
        }

    def _beside(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory() if self._pins else tensor

    def _lent(self, key: tuple[int, int], tensor: torch.Tensor, num: int) -> torch.Tensor:
        # The storage of the tensor, and of every view of it, holds this array, and nothing else does.
        array = tensor.numpy()[:num]
        weakref.finalize(array, partial(self._dropped.append, key)).atexit = False
        return torch.from_numpy(array)

    def _collect(self) -> None:
        while self._dropped:
            key = self._dropped.popleft()
            slot = self._known.get(key)
            if slot is not None:
                slot.left -= 1
                if slot.left == 0:
                    self._free[self._home[key[1]]].append(key[1])

    def _lock(self, batch: Batch) -> list[int]:
        locked: list[int] = []
        for tensor in batch.values() if self._pins else ():
            # 1 is cudaHostRegisterPortable: page-locked for every context of this process, as torch's own.
            error = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 1))  # type: ignore[no-untyped-call]
            if error:
                raise EnvironmentLacksError(
                    f"{format_bytes(tensor.nbytes)} of shared memory cannot be page-locked for the GPU (CUDA error "
                    f"{error}): see `ulimit -l`, or lower data.loader_workers or data.prefetch_batches"
                )
            locked.append(tensor.data_ptr())
        return locked

    def _forget(self, slot: _Slot) -> None:
        for address in slot.locked:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        slot.locked.clear()

    def close(self) -> None:
        """Nothing is page-locked any more; call it when no copy from a slot is under way."""
        for slot in self._known.values():
            self._forget(slot)
        self._known.clear()

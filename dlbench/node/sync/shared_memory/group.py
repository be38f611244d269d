"""Ranks of one machine exchange through memory they share: a `Group` for CPU tensors that no socket slows down."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from dlbench.node.sync.shared_memory.segment import DTYPES, LINE_BYTES, Call, Room

BLOCK_ELEMENTS = 1 << 16
"""Summed at a time: still in the cache when the next rank's numbers are added and when the result is copied."""

SMALL_BYTES = 8192
"""Up to so much, every rank sums the whole vector: more work than its share, but one meeting instead of two."""


class SharedMemoryGroup:
    """A `Group` of CPU ranks of one machine.

    Each rank has a slot, in two halves used in turn, each half with a part for every rank. A vector goes through in
    chunks of half a slot. To sum, a rank puts into its slot what others are to sum, sums its own share in the order of
    ranks, and leaves the result in its own part, where the others fetch it: every share is summed once, by one rank, so
    all ranks get the same bits. The next chunk is in the other half before the ranks meet: a chunk costs one meeting.

    A half is written again two chunks later. Between lies a meeting to which a rank comes only after it has read all it
    needs of the half, so nothing is overwritten early, and no meeting is needed at the end of a call.

    16-bit types are summed in fp32 and rounded once.
    """

    carrier = "shared memory"

    def __init__(
        self, ranks: tuple[int, ...], index: int, name: str, capacity_bytes: int, timeout_s: float = 60.0
    ) -> None:
        """All ranks call it together; `index` is this rank's position in `ranks`.

        `name` is the same for these ranks, and no other group's on this machine at the time. `capacity_bytes` is the
        memory of one rank, rounded up to a line of each rank in each half. Longer than `timeout_s` no rank waits for
        another, here or in a call.

        Raises:
            RunError: not all ranks came, or the name is in use.
            EnvironmentLacksError: not on Linux.
        """
        self.ranks, self.index = ranks, index
        lines = max(capacity_bytes // (2 * len(ranks) * LINE_BYTES), 1)
        self._shape = (len(ranks), 2, len(ranks), lines * LINE_BYTES)
        slot_bytes = 2 * len(ranks) * lines * LINE_BYTES
        self._room = Room(ranks, index, name, len(ranks) * slot_bytes, timeout_s)
        self._slots = self._room.data[: len(ranks) * slot_bytes].view(self._shape)
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._half = 0
        self._areas: list[tuple[int, torch.Tensor]] = []

    def close(self) -> None:
        """Leaves; ranks that still wait for this one are told. Allocated vectors stay usable, but not exchangeable."""
        self._room.close()

    def allocate(self, num_elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A vector of zeros that others read and write in place: it, and parts of it, go without copies in and out.

        All ranks call it together and then use the same parts of it in the same calls.
        """
        call = Call("allocate", num_elements, dtype)
        stride = -(-max(num_elements * dtype.itemsize, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        offset = self._room.grow(stride * len(self.ranks))
        self._room.meet(call)
        area = self._room.map(offset, stride * len(self.ranks)).view(len(self.ranks), stride)
        self._areas.append((offset, area))
        return area[self.index, : num_elements * dtype.itemsize].view(dtype)

    def sum(self, vector: torch.Tensor) -> None:
        """Every share is summed by one rank and fetched by all."""
        self._sum_to(vector, "sum", 0)

    def reduce(self, vector: torch.Tensor, root: int) -> None:
        """As `sum`, but only `root` fetches."""
        self._sum_to(vector, "reduce", root)

    def reduce_scatter(self, vector: torch.Tensor) -> torch.Tensor:
        """Every rank sums its own share."""
        place, buffers = self._examine(vector)
        if vector.numel() % len(self.ranks):
            raise ValueError(f"{vector.numel()} elements do not divide by {len(self.ranks)} ranks")
        call = Call("reduce-scatter", vector.numel(), vector.dtype, place=place)
        shares = vector.view(len(self.ranks), -1)
        share = torch.empty_like(shares[self.index])
        if buffers is not None:
            self._room.meet(call)
            self._add_up([buffer.view(shares.shape)[self.index] for buffer in buffers], [share])
            self._room.wait(call)  # the others have read this rank's vector
            return share
        slots = self._slots_of(vector.dtype)
        for first, last in self._chunks(share.numel(), slots.shape[3]):
            half, count = self._next_half(), last - first
            for other in self._room.others:
                slots[self.index, half, other, :count].copy_(shares[other, first:last])
            self._meet(call, first)
            parts = list(slots[:, half, self.index, :count])
            parts[self.index] = shares[self.index, first:last]
            self._add_up(parts, [share[first:last]])
        return share

    def all_gather(self, share: torch.Tensor, vector: torch.Tensor) -> None:
        """Each rank puts its share into its slot, the others fetch it."""
        self._examine(share)
        place, buffers = self._examine(vector)
        if share.dtype != vector.dtype or share.numel() * len(self.ranks) != vector.numel():
            raise ValueError(f"{len(self.ranks)} shares of {share.numel()} do not make {vector.numel()} elements")
        call = Call("all-gather", vector.numel(), vector.dtype, place=place)
        shares = vector.view(len(self.ranks), -1)
        shares[self.index].copy_(share)
        if buffers is not None:
            self._room.meet(call)
            for other in self._room.others:
                shares[other].copy_(buffers[other].view(shares.shape)[other])
            self._room.wait(call)
            return
        slots = self._slots_of(vector.dtype).flatten(2)
        for first, last in self._chunks(share.numel(), slots.shape[2]):
            half = self._next_half()
            slots[self.index, half, : last - first].copy_(share[first:last])
            self._meet(call, first)
            for other in self._room.others:
                shares[other, first:last].copy_(slots[other, half, : last - first])

    def broadcast(self, vector: torch.Tensor, root: int) -> None:
        """The root puts it into its slot, the others fetch it."""
        self._examine(vector)
        call = Call("broadcast", vector.numel(), vector.dtype, root)
        slots = self._slots_of(vector.dtype).flatten(2)
        for first, last in self._chunks(vector.numel(), slots.shape[2]):
            slot = slots[root, self._next_half(), : last - first]
            if self.index == root:
                slot.copy_(vector[first:last])
            self._meet(call, first)
            if self.index != root:
                vector[first:last].copy_(slot)

    def gather_all(self, tensor: torch.Tensor, *, equal: bool = False) -> list[torch.Tensor]:
        """As `all_gather`; the lengths become known when the ranks meet."""
        self._examine(tensor)
        call = Call("gather", tensor.numel(), tensor.dtype)
        slots = self._slots_of(tensor.dtype).flatten(2)
        capacity = slots.shape[2]
        result: list[torch.Tensor] = []
        first, longest = 0, 1
        while first < longest:
            half, piece = self._next_half(), tensor[first : first + capacity]
            slots[self.index, half, : piece.numel()].copy_(piece)
            calls = self._meet(call, first)
            if first == 0:
                result = [tensor.new_empty(theirs.elements) for theirs in calls]
                longest = max(theirs.elements for theirs in calls)
            for whole, slot in zip(result, slots[:, half], strict=True):
                part = whole[first : first + capacity]
                part.copy_(slot[: part.numel()])
            first += capacity
        return result

    def _sum_to(self, vector: torch.Tensor, name: str, root: int) -> None:
        place, buffers = self._examine(vector)
        call = Call(name, vector.numel(), vector.dtype, root, place)
        fetches = name == "sum" or self.index == root
        if buffers is not None:
            self._room.meet(call)
            shares = [self._shares(buffer)[self.index] for buffer in buffers]
            self._add_up(shares, shares if name == "sum" else [shares[root]])
            self._room.wait(call)
            return
        slots = self._slots_of(vector.dtype)
        chunks = self._chunks(vector.numel(), slots.shape[2] * slots.shape[3])
        if len(chunks) == 1 and vector.nbytes <= SMALL_BYTES:
            small = list(slots.flatten(2)[:, self._next_half(), : vector.numel()])
            small[self.index].copy_(vector)
            self._room.meet(call)
            if fetches:
                self._add_up(small, [vector])
            return
        pieces = [self._shares(vector[first:last]) for first, last in chunks]
        halves = [self._next_half() for _ in pieces]
        self._put(pieces[0], slots[self.index, halves[0]])
        self._room.meet(call)
        for number, (shares, half) in enumerate(zip(pieces, halves, strict=True)):
            if number + 1 < len(pieces):
                self._put(pieces[number + 1], slots[self.index, halves[number + 1]])
            own = shares[self.index]
            parts = list(slots[:, half, self.index, : own.numel()])
            result = parts[self.index]
            parts[self.index] = own
            self._add_up(parts, [own, result] if fetches else [result])
            self._room.wait(call)
            for other in self._room.others if fetches else ():
                shares[other].copy_(slots[other, half, other, : shares[other].numel()])

    def _put(self, shares: Sequence[torch.Tensor], slot: torch.Tensor) -> None:
        """What the others are to sum."""
        for other in self._room.others:
            slot[other, : shares[other].numel()].copy_(shares[other])

    def _add_up(self, parts: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Each of `results` becomes the sum of `parts` in their order; a result may be one of the parts."""
        dtype = parts[0].dtype
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        if wide not in self._scratch:
            self._scratch[wide] = torch.empty(BLOCK_ELEMENTS, dtype=wide)
        for first in range(0, parts[0].numel(), BLOCK_ELEMENTS):
            blocks = [part[first : first + BLOCK_ELEMENTS] for part in parts]
            if len(parts) == 2 and wide == dtype:  # saves a pass
                total = results[0][first : first + BLOCK_ELEMENTS]
                torch.add(*blocks, out=total)
            else:
                total = self._scratch[wide][: blocks[0].numel()]
                total.copy_(blocks[0])
                for block in blocks[1:]:
                    total.add_(block)
                results[0][first : first + BLOCK_ELEMENTS].copy_(total)
            for result in results[1:]:
                result[first : first + BLOCK_ELEMENTS].copy_(total)

    def _examine(self, vector: torch.Tensor) -> tuple[int, torch.Tensor | None]:
        """Where it lies in allocated memory, and what lies there for all ranks (ranks x elements); or -1 and None."""
        if vector.dim() != 1 or not vector.is_contiguous() or vector.device.type != "cpu" or vector.dtype not in DTYPES:
            raise ValueError(
                f"shared memory takes contiguous vectors on the CPU, not {vector.dtype} of shape {tuple(vector.shape)} "
                f"on {vector.device}"
            )
        for offset, area in self._areas:
            at = vector.data_ptr() - area[self.index].data_ptr()
            if 0 <= at < area.shape[1]:
                return offset + at, area[:, at : at + vector.nbytes].view(vector.dtype)
        return -1, None

    def _slots_of(self, dtype: torch.dtype) -> torch.Tensor:
        """Shape: ranks, halves, part for a rank, elements."""
        if dtype not in self._typed:
            self._typed[dtype] = self._slots.view(dtype)
        return self._typed[dtype]

    def _shares(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """A share a rank, the last ones shorter or empty."""
        size = -(-vector.numel() // len(self.ranks))
        return [vector[size * index : size * (index + 1)] for index in range(len(self.ranks))]

    def _chunks(self, num_elements: int, capacity: int) -> list[tuple[int, int]]:
        """First and last element (exclusive) of each; one even if there is nothing, so that ranks meet."""
        return [(at, min(at + capacity, num_elements)) for at in range(0, max(num_elements, 1), capacity)]

    def _next_half(self) -> int:
        self._half ^= 1
        return self._half

    def _meet(self, call: Call, first: int) -> list[Call]:
        """For the first chunk the ranks compare what they do; for the others they only wait for each other."""
        if first == 0:
            return self._room.meet(call)
        self._room.wait(call)
        return []

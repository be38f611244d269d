"""Page-locked memory of the host, which a GPU reads and writes by itself while it computes.

torch's own (`pin_memory=True`) rounds every request up to a power of two (`CachingHostAllocator.h` of torch 2.13), so
that 33 GiB would lock 64, and locks it in one call, which takes tens of seconds. Here it is as much as was asked for,
locked in pieces, and it goes back to the system when nothing uses it any more.
"""

from __future__ import annotations

import itertools
import mmap
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from dlbench.errors import EnvironmentLacksError
from dlbench.machine.memory import memory_room
from dlbench.node.ranks import RankPlace
from dlbench.units import format_bytes

PIECE_BYTES = 1 << 30  # one call locks at most this; the watchdog hears of each
_PORTABLE = 1  # cudaHostRegisterPortable: for every context of this process, as torch's own

Beat = Callable[[str], None]


def page_lock(address: int, num_bytes: int) -> int:
    """Locks memory where it is. Returns CUDA's error number: 0 where that worked."""
    return int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE))  # type: ignore[no-untyped-call]


def page_unlock(address: int) -> None:
    """The opposite, by the address that was locked; no copy may be under way."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def locked_memory(
    num_bytes: int,
    what: str,
    *,
    borders: Iterable[int] | None = None,
    beat: Beat = lambda _what: None,
    lock: Callable[[int, int], int] = page_lock,
    unlock: Callable[[int], None] = page_unlock,
) -> torch.Tensor:
    """Bytes of page-locked memory, one after the other; given back when no tensor of them is left.

    `what`: what needs it, which begins the error's line. `borders`: where one call's piece ends and the next one's
    begins, at multiples of a page; every `PIECE_BYTES` by default (`pieces`). No copy may cross them, as each piece is
    locked by itself. `beat`: called before each.
    Raises EnvironmentLacksError: the node or its cgroup has not so much left, or CUDA does not lock it.
    """
    room = memory_room()
    if room is not None and num_bytes > room:
        raise EnvironmentLacksError(
            f"{what}: {format_bytes(num_bytes)} of host memory would be page-locked, {format_bytes(room)} are left "
            "(MemAvailable, and the cgroup's limit)"
        )
    locked: list[int] = []
    try:
        memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise EnvironmentLacksError(f"{what}: no {format_bytes(num_bytes)} of host memory: {error.strerror}") from error
    # A process that is forked meanwhile would make these pages copied at the next write, and the GPU keep the old ones.
    memory.madvise(mmap.MADV_DONTFORK)
    weakref.finalize(memory, _unlock_all, locked, unlock).atexit = False  # The process's end does that by itself.
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    borders = range(PIECE_BYTES, num_bytes, PIECE_BYTES) if borders is None else borders
    for first, last in itertools.pairwise(sorted({0, *borders, num_bytes})):
        beat(f"page-locking {format_bytes(num_bytes)} of host memory")
        error_number = lock(tensor.data_ptr() + first, last - first)
        if error_number:
            raise EnvironmentLacksError(
                f"{what}: cannot page-lock {format_bytes(num_bytes)} of host memory, only {format_bytes(first)} (CUDA "
                f"error {error_number}): see `ulimit -l`"
            )
        locked.append(tensor.data_ptr() + first)
    return tensor


def _unlock_all(locked: list[int], unlock: Callable[[int], None]) -> None:
    for address in locked:
        unlock(address)


def pieces(first: int, num_bytes: int) -> list[tuple[int, int]]:
    """First and last of each part of a range of `locked_memory` that one copy may move."""
    last = first + num_bytes
    ends = [*range((first // PIECE_BYTES + 1) * PIECE_BYTES, last, PIECE_BYTES), last]
    return list(zip([first, *ends[:-1]], ends, strict=True))


def require_room(num_bytes: int, what: str, place: RankPlace, gather: Callable[[Any], Sequence[Any]]) -> None:
    """Refuses what all ranks of a node together cannot page-lock; called by all of them, before any of them locks.

    `num_bytes`: of each rank. `what`: needs it; begins the error's line. `gather`: a value of every rank, on every
    rank. Raises EnvironmentLacksError, on all ranks: on some node there is not so much.
    """
    for host, left in gather([place.host, memory_room()]):
        if left is not None and num_bytes * place.local_size > left:
            raise EnvironmentLacksError(
                f"{what}: {format_bytes(num_bytes * place.local_size)} of host memory would be page-locked on {host} "
                f"by {place.local_size} ranks together, {format_bytes(left)} are left (MemAvailable, and the cgroup's "
                "limit)"
            )

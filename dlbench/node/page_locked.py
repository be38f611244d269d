"""Page-locked memory of the host, which a GPU reads and writes by itself while it computes.

torch's own (`pin_memory=True`) rounds every request up to a power of two (`CachingHostAllocator.h` of torch 2.13), so
that 33 GiB would lock 64, and locks it in one call, which takes tens of seconds. Here it is as much as was asked for,
locked in pieces, and it goes back to the system when nothing uses it any more.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from dlbench.errors import EnvironmentLacksError
from dlbench.machine.host_memory import memory_room
from dlbench.node.ranks import RankPlace
from dlbench.units import format_bytes

PIECE_BYTES = 1 << 30  # one call locks at most this; the watchdog hears of each
_PORTABLE = 1  # cudaHostRegisterPortable: for every context of this process, as torch's own

Beat = Callable[[str], None]


def page_lock(address: int, num_bytes: int) -> int:
    """Locks memory where it is. Returns CUDA's error number: 0 where that worked."""
    forget = _last_error()
    error = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE))  # type: ignore[no-untyped-call]
    if error:
        forget()
    return error


def page_unlock(address: int) -> None:
    """The opposite, by the address that was locked and is still mapped; no copy may be under way."""
    if int(torch.cuda.cudart().cudaHostUnregister(address)):  # type: ignore[no-untyped-call]
        _last_error()()


def _last_error() -> Callable[[], int]:
    """CUDA's cudaGetLastError, of the library that torch itself calls: gives the calling thread's last error, once.

    torch's binding leaves the error of a call that failed where it is (C10_CUDA_ERROR_HANDLED of torch 2.13), and the
    check after torch's next kernel would raise it there (C10_CUDA_KERNEL_LAUNCH_CHECK).
    """
    try:
        # A symbol is looked for in a library and in all that it was linked with.
        found: Callable[[], int] = ctypes.CDLL(torch._C.__file__).cudaGetLastError
    except (OSError, AttributeError) as error:
        raise EnvironmentLacksError(
            "memory is not page-locked: torch's CUDA runtime does not offer cudaGetLastError, without which a refusal "
            "would end the next kernel"
        ) from error
    return found


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
    """
    room = memory_room()
    if room is not None and num_bytes > room:
        raise EnvironmentLacksError(
            f"{what}: {format_bytes(num_bytes)} of host memory would be page-locked, {format_bytes(room)} are left "
            "(MemAvailable, and the cgroup's limit)"
        )
    try:
        memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise EnvironmentLacksError(f"{what}: no {format_bytes(num_bytes)} of host memory: {error.strerror}") from error
    # A process that is forked meanwhile would make these pages copied at the next write, and the GPU keep the old ones.
    memory.madvise(mmap.MADV_DONTFORK)
    # The storage of the tensor, and of every view of it, holds this array, and nothing else does; the finalizer holds
    # the mapping, which so outlives the unlocking. (A mapping that goes unmaps before its own finalizers run.)
    array, locked = np.frombuffer(memory, np.uint8), list[int]()
    tensor = torch.from_numpy(array)
    done = weakref.finalize(array, _unlock_all, memory, locked, unlock, os.getpid())
    done.atexit = False  # The process's end does that by itself.
    del array
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


def _unlock_all(mapped: mmap.mmap, locked: list[int], unlock: Callable[[int], None], locker: int) -> None:
    """Before `mapped` goes. `locker`: the process that locked; a forked one has no part in that."""
    if os.getpid() == locker:
        for address in locked:
            unlock(address)


def pieces(first: int, num_bytes: int) -> list[tuple[int, int]]:
    """First and last of each part of a range of `locked_memory` that one copy may move."""
    last = first + num_bytes
    ends = [*range((first // PIECE_BYTES + 1) * PIECE_BYTES, last, PIECE_BYTES), last]
    return list(zip([first, *ends[:-1]], ends, strict=True))


def require_room(
    num_bytes: int, what: str, place: RankPlace, gather: Callable[[Any], Sequence[Any]], *, checkpoint_bytes: int = 0
) -> None:
    """Refuses what all ranks of a node together cannot page-lock; called by all of them, before any of them locks."""
    everyone = gather([place.host, memory_room(), checkpoint_bytes])
    for host, left, _ in everyone:
        later = sum(of_rank for its_host, _, of_rank in everyone if its_host == host)
        needed = num_bytes * place.local_size + later
        if left is not None and needed > left:
            share = f", {format_bytes(later)} of it for checkpoints" if later else ""
            raise EnvironmentLacksError(
                f"{what}: {format_bytes(needed)} of host memory would be page-locked on {host} by {place.local_size} "
                f"ranks together{share}, {format_bytes(left)} are left (MemAvailable, and the cgroup's limit)"
            )

"""Page-locked memory of the host, which a GPU can read and write while it computes, locked in pieces. torch's
`pin_memory=True` locks in one call, which takes tens of seconds, and rounds up to a power of two
(`CachingHostAllocator.h` of torch 2.13).
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
from dlbench.machine.cgroup import available_bytes
from dlbench.node.ranks import RankPlace
from dlbench.units import format_bytes

PIECE_BYTES = 1 << 30  # Most bytes locked by one call, so that the watchdog sees progress.
_PORTABLE = 1  # cudaHostRegisterPortable: for every context of this process, as torch does.

Beat = Callable[[str], None]


def page_lock(address: int, num_bytes: int) -> int:
    """Locks mapped memory. Returns CUDA's error number, 0 for success."""
    clear_error = _last_error()
    error = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE))  # type: ignore[no-untyped-call]
    if error:
        clear_error()
    return error


def page_unlock(address: int) -> None:
    """Unlocks memory by the address that was locked and is still mapped; no copy may be running."""
    if int(torch.cuda.cudart().cudaHostUnregister(address)):  # type: ignore[no-untyped-call]
        _last_error()()


def _last_error() -> Callable[[], int]:
    """Returns cudaGetLastError of the CUDA runtime that torch uses; it returns and clears the thread's last error.
    torch does not clear it (C10_CUDA_ERROR_HANDLED of torch 2.13), and the check after its next kernel would raise it.
    """
    try:
        # dlsym searches a library and all those it was linked with.
        get_last_error: Callable[[], int] = ctypes.CDLL(torch._C.__file__).cudaGetLastError
    except (OSError, AttributeError) as error:
        raise EnvironmentLacksError(
            "memory is not page-locked: torch's CUDA runtime has no cudaGetLastError, without which a failed lock "
            "would make the next kernel fail"
        ) from error
    return get_last_error


def locked_memory(
    num_bytes: int,
    purpose: str,
    *,
    borders: Iterable[int] | None = None,
    beat: Beat = lambda _what: None,
    lock: Callable[[int, int], int] = page_lock,
    unlock: Callable[[int], None] = page_unlock,
) -> torch.Tensor:
    """Returns a uint8 tensor of page-locked memory, which is freed with the last tensor that uses it. `borders` are the
    offsets between pieces that are locked by separate calls, multiples of a page; no copy may cross them.
    """
    available = available_bytes()
    if available is not None and num_bytes > available:
        raise EnvironmentLacksError(
            f"{purpose}: {format_bytes(num_bytes)} of host memory would be page-locked, but only "
            f"{format_bytes(available)} are available (MemAvailable, and the cgroup's limit)"
        )
    try:
        memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise EnvironmentLacksError(
            f"{purpose}: no {format_bytes(num_bytes)} of host memory: {error.strerror}"
        ) from error
    # After a fork, the next write would copy these pages, while the GPU keeps using the old ones.
    memory.madvise(mmap.MADV_DONTFORK)
    # The array lives as long as the tensor or a view of it. The finalizer keeps the mapping until the pages are
    # unlocked; a finalizer of the mapping itself would run after it was unmapped.
    array, locked = np.frombuffer(memory, np.uint8), list[int]()
    tensor = torch.from_numpy(array)
    finalizer = weakref.finalize(array, _unlock_all, memory, locked, unlock, os.getpid())
    finalizer.atexit = False  # the kernel unlocks at the end of the process
    del array
    if borders is None:
        borders = range(PIECE_BYTES, num_bytes, PIECE_BYTES)
    for first, last in itertools.pairwise(sorted({0, *borders, num_bytes})):
        beat(f"page-locking {format_bytes(num_bytes)} of host memory")
        error_number = lock(tensor.data_ptr() + first, last - first)
        if error_number:
            raise EnvironmentLacksError(
                f"{purpose}: cannot page-lock {format_bytes(num_bytes)} of host memory, only {format_bytes(first)} "
                f"(CUDA error {error_number}): see `ulimit -l`"
            )
        locked.append(tensor.data_ptr() + first)
    return tensor


def _unlock_all(mapped: mmap.mmap, locked: list[int], unlock: Callable[[int], None], locker: int) -> None:
    """Unlocks memory before it is unmapped, in the process `locker` that locked it and in no forked one."""
    if os.getpid() == locker:
        for address in locked:
            unlock(address)


def pieces(first: int, num_bytes: int) -> list[tuple[int, int]]:
    """Splits a range of `locked_memory` into parts, begin and end offset, that one copy may move."""
    last = first + num_bytes
    ends = [*range((first // PIECE_BYTES + 1) * PIECE_BYTES, last, PIECE_BYTES), last]
    return list(zip([first, *ends[:-1]], ends, strict=True))


def require_room(
    num_bytes: int, purpose: str, place: RankPlace, gather: Callable[[Any], Sequence[Any]], *, checkpoint_bytes: int = 0
) -> None:
    """Raises EnvironmentLacksError if the ranks of a node together cannot page-lock their memory; collective."""
    everyone = gather([place.host, available_bytes(), checkpoint_bytes])
    for host, available, _ in everyone:
        for_checkpoints = sum(num for other_host, _, num in everyone if other_host == host)
        needed = num_bytes * place.local_size + for_checkpoints
        if available is not None and needed > available:
            share = ""
            if for_checkpoints:
                share = f", {format_bytes(for_checkpoints)} of it for checkpoints"
            raise EnvironmentLacksError(
                f"{purpose}: {format_bytes(needed)} of host memory would be page-locked on {host} by "
                f"{place.local_size} ranks together{share}, but only {format_bytes(available)} are available "
                "(MemAvailable, and the cgroup's limit)"
            )

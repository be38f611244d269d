"""Freed memory of a rank that trains on a CPU: given back to the system at once, or kept by the allocator.

glibc keeps what is freed for what comes next, and above its threshold for mapping (which rises to 32 MiB by itself)
nothing. Activations that leave and come back in other orders than they were made leave holes that nothing fits into:
tried on ResNet-50 with everything swapped, the resident peak stayed where it is in core, although a quarter of the
bytes was held. With a low threshold memory is mapped and unmapped tensor by tensor, so that what has left is really
free; pages then are filled with zeros again and again, which takes time of the CPU. So it is for out-of-core training
alone.
"""

from __future__ import annotations

import ctypes

from dlbench.units import format_bytes

MAPPED_FROM_BYTES = 1 << 20
"""Tensors of at least this are mapped one by one."""
_GLIBC_MOST = 32 << 20
"""Where glibc's own threshold ends (DEFAULT_MMAP_THRESHOLD_MAX of its malloc.c, 64-bit)."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Numbers of mallopt(3)."""


def trim() -> None:
    """Gives back what small tensors left free, wherever it lies, so that what is resident now is in use."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return


def give_back_freed(at_once: bool, mapped_from_bytes: int = MAPPED_FROM_BYTES) -> str | None:
    """Freed tensors go back to the system at once, or as glibc does it after training for a while.

    Args:
        at_once: whether.
        mapped_from_bytes: tensors of at least this.

    Returns:
        What is in force, in words; None where the C library has no such setting (not glibc).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return None
    threshold = mapped_from_bytes if at_once else _GLIBC_MOST
    if mallopt(_M_MMAP_THRESHOLD, threshold) != 1 or mallopt(_M_TRIM_THRESHOLD, 2 * _GLIBC_MOST) != 1:
        return None
    return f"tensors from {format_bytes(threshold)} on are mapped one by one (mallopt M_MMAP_THRESHOLD)"

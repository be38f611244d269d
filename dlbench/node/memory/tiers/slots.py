"""Places in a file or a pool of memory, handed out and taken back: the same sizes come again in every pass."""

from __future__ import annotations

ALIGNMENT = 4096
"""Places begin and end at multiples of this, as direct I/O wants it."""
_LOOSE = 1.25
"""A free place is given to somewhat smaller bytes rather than a new one."""


def aligned(num_bytes: int) -> int:
    """The multiple of `ALIGNMENT` that holds so many bytes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Slots:
    """Offsets of places, each aligned."""

    def __init__(self) -> None:
        self._free: dict[int, list[int]] = {}
        self.end = 0
        """Bytes that were ever in use: what the file or pool must hold."""

    def find(self, num_bytes: int) -> tuple[int, int]:
        """Offset and size of a place; one that is free if there is one of about that size, else a new one behind."""
        size = aligned(num_bytes)
        found = self.find_free(num_bytes)
        if found is not None:
            return found
        offset, self.end = self.end, self.end + size
        return offset, size

    def find_free(self, num_bytes: int) -> tuple[int, int] | None:
        """The same, but None rather than a new place."""
        size = aligned(num_bytes)
        fits = size if self._free.get(size) else 0
        if not fits:
            fits = min((have for have, free in self._free.items() if free and size <= have <= _LOOSE * size), default=0)
        return (self._free[fits].pop(), fits) if fits else None

    def give_back(self, offset: int, size: int) -> None:
        """The place is free again."""
        self._free.setdefault(size, []).append(offset)

"""A digest of many sample numbers that does not depend on their order, and to which others can be added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_SALTS = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)
"""Odd and without pattern: two sums that have nothing to do with each other."""


@dataclass(frozen=True)
class Digest:
    """How many samples, and two 64-bit sums of what a mixing function makes of their numbers.

    Two different collections have the same digest by chance once in 2**128, whatever is doubled or missing.
    """

    count: int = 0
    sums: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, samples: NDArray[np.int64]) -> Self:
        """The digest of sample numbers, each as often as it is there."""
        import numpy as np

        values = np.asarray(samples).astype(np.uint64)
        one, other = (int(_mixed(values + np.uint64(salt)).sum(dtype=np.uint64)) for salt in _SALTS)
        return cls(len(values), (one, other))

    def __add__(self, other: Digest) -> Digest:
        one, two = ((a + b) & _MASK for a, b in zip(self.sums, other.sums, strict=True))
        return Digest(self.count + other.count, (one, two))


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    import numpy as np

    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed

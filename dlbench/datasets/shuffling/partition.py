"""Which rank holds which samples, under local and partial shuffling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_PARTITION = 0x9A27
"""Beside the seed, so that the partition is none of the epochs' permutations."""


def first_parts(
    num_samples: int, ranks: int, *, seed: int, partition: Literal["shuffled", "contiguous"]
) -> list[NDArray[np.int64]]:
    """The samples that each rank holds when training begins: equally many, or one more on the first ranks.

    Args:
        num_samples: of the data set.
        ranks: how many share it.
        seed: of the draw.
        partition: drawn from all samples, or in the order of storage.

    Returns:
        For each rank (n,) sample numbers; together all of them, each once.
    """
    import numpy as np

    order = np.arange(num_samples)
    if partition == "shuffled":
        order = np.random.default_rng([seed, _PARTITION]).permutation(num_samples)
    return np.array_split(order, ranks)

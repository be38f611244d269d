"""Particle counts become what CosmoFlow computes on: log(counts + 1), looked up: all devices agree to the bit."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray


@lru_cache(maxsize=1)
def logarithms() -> NDArray[np.float32]:
    """(32768,) log(n + 1) of each count that int16 has, rounded from float64, and so the same on every machine."""
    return np.log1p(np.arange(np.iinfo(np.int16).max + 1, dtype=np.float64)).astype(np.float32)


@lru_cache(maxsize=1)
def _logarithms_on(device: torch.device) -> Tensor:
    return torch.from_numpy(logarithms()).to(device)


def network_volume(volume: Tensor, *, channels_last: bool) -> Tensor:
    """(N, C, S, S, S) float32, in the order of memory asked for.

    Args:
        volume: counts (N, S, S, S, C) int16, none negative, of which it takes the logarithm where they lie; or (N, C,
            S, S, S) float32, of which it has been taken.
        channels_last: the order of memory.
    """
    form = torch.channels_last_3d if channels_last else torch.contiguous_format
    if volume.dtype != torch.int16:
        return volume.contiguous(memory_format=form)
    # A device's own log1p may differ in the last bit; 128 KiB of table stay in its cache. Two bytes are put into
    # another order, not four.
    counts = volume.permute(0, 4, 1, 2, 3)
    indices = volume if channels_last else counts.contiguous()
    found = _logarithms_on(volume.device).index_select(0, indices.flatten().int()).view(indices.shape)
    return found.permute(0, 4, 1, 2, 3) if channels_last else found

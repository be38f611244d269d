"""Density volumes of CosmoFlow's form, as small as training takes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def write_volumes(folder: Path, num: int, seed: int, size: int = 32) -> None:
    """One HDF5 file of `num` volumes of `size`^3 x 4 counts, and four targets each."""
    import h5py

    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    target = generator.uniform(-1, 1, (num, 4)).astype("float32")
    with h5py.File(folder / "density-0.h5", "w") as file:
        # A mean that the first parameter decides: something to learn, at once.
        mean = np.exp(1 + target[:, 0])[:, None, None, None, None]
        file["x"] = generator.poisson(mean, (num, size, size, size, 4)).astype("int16")
        file["y"] = target

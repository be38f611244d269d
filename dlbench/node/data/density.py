"""Density volumes become network input: log(counts + 1), channels first. No augmentation, as in the reference."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlbench.datasets.containers.tfrecord import decompressor
from dlbench.datasets.volumes.density import DensityIndex, DensityReader, index_density
from dlbench.errors import UserError
from dlbench.node.data.reader import BadSampleError, Sample, SampleReader, path_text
from dlbench.node.data.sharding import Key
from dlbench.specs.workload import CosmoFlowModel

_VOXELS_AT_ONCE = 1 << 16
"""Voxels of one channel that are looked up together: their indices stay in the cache of a core."""


@lru_cache(maxsize=1)
def _logarithms() -> NDArray[np.float32]:
    # One value for each count that int16 has. Rounded from float64, and so the same on every machine.
    return np.log1p(np.arange(np.iinfo(np.int16).max + 1, dtype=np.float64)).astype(np.float32)


def network_input(counts: NDArray[np.int16]) -> NDArray[np.float32]:
    """Counts (S, S, S, C), none negative, become log(counts + 1) as (C, S, S, S) float32, exact to the last bit."""
    size, channels = counts.shape[0], counts.shape[3]
    table, out = _logarithms(), np.empty((channels, *counts.shape[:3]), dtype=np.float32)
    step = max(1, _VOXELS_AT_ONCE // (size * size))
    for start in range(0, size, step):
        for channel in range(channels):
            # "clip" leaves out a check that no int16 of 0 and more needs, and a copy with it.
            indices = counts[start : start + step, ..., channel]
            np.take(table, indices, mode="clip", out=out[channel, start : start + step])
    return out


class VolumeReader:
    """Samples of a folder of volumes: volume (C, S, S, S) float32 and target (T,) float32."""

    def __init__(self, index: DensityIndex) -> None:
        self._index, self._files = index, DensityReader(index)

    @property
    def num_samples(self) -> int:
        """Volumes in all files."""
        return self._index.num_samples

    def read(self, key: Key) -> Sample:
        """One volume; the epoch makes no difference.

        Raises:
            BadSampleError: it cannot be read, has a negative count or a target that is no number.
        """
        path, place = self._index.locate(key[1])
        where = f"{str(path)!r}, sample {place}"
        try:
            counts, target = self._files.read(key[1])
        except (OSError, KeyError, ValueError, IndexError) as error:
            raise BadSampleError(f"{where}: {(str(error) or type(error).__name__).splitlines()[0]}") from None
        if counts.min() < 0:
            raise BadSampleError(f"{where}: x has a negative count")
        if not np.isfinite(target).all():
            raise BadSampleError(f"{where}: y is not finite")
        return Sample({"volume": network_input(counts), "target": target})

    def describe(self) -> dict[str, object]:
        """Kind, path, shape, digest of file names and counts; for TFRecord also what takes gzip apart."""
        index = self._index
        about: dict[str, object] = {
            "kind": f"{index.container}-density",
            "path": path_text(index.root),
            "files": len(index.files),
            "shape": [index.size, index.size, index.size, index.channels],
            "index_sha256": index.sha256,
            "chunks_span_samples": index.chunks_span_samples,
        }
        return about | ({"decompressor": decompressor()} if index.container == "tfrecord" else {})

    def close(self) -> None:
        """Closes the files of this process."""
        self._files.close()


def open_density(source: Path, model: CosmoFlowModel, seed: int, *, training: bool) -> SampleReader:
    """The volumes of one split, for a network.

    Args:
        source: folder of the split.
        model: whose input and targets they must fit.
        seed: without effect, for nothing is drawn.
        training: without effect, for volumes are not augmented.

    Raises:
        UserError: there is no such folder, it is damaged, or does not fit the model; key and file are named.
    """
    del seed, training
    index = index_density(source)
    for key, stored in (
        ("input_size", index.size),
        ("input_channels", index.channels),
        ("num_targets", index.num_targets),
    ):
        if stored != getattr(model, key):
            raise UserError(f"data.source {str(source)!r} has {key} {stored}, model.{key} is {getattr(model, key)}")
    return VolumeReader(index)

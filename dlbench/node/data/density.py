"""HDF5 density volumes become network input: log(counts + 1), channels first. No augmentation, as in the reference."""

from __future__ import annotations

import numpy as np

from dlbench.datasets.density_hdf5 import DensityIndex, DensityReader
from dlbench.node.data.reader import BadSampleError, Sample, path_text
from dlbench.node.data.sharding import Key


class VolumeReader:
    """Samples of an HDF5 folder: volume (C, S, S, S) float32 and target (T,) float32."""

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
        # Transposed first, in 2 bytes a voxel; the logarithm then writes contiguous fp32.
        volume = np.log1p(np.ascontiguousarray(np.moveaxis(counts, -1, 0)), dtype=np.float32)
        return Sample({"volume": volume, "target": target})

    def describe(self) -> dict[str, object]:
        """Kind, path, shape and digest of file names and counts."""
        index = self._index
        return {
            "kind": "hdf5-density",
            "path": path_text(index.root),
            "files": len(index.files),
            "shape": [index.size, index.size, index.size, index.channels],
            "index_sha256": index.sha256,
            "chunks_span_samples": index.chunks_span_samples,
        }

    def close(self) -> None:
        """Closes the files of this process."""
        self._files.close()

"""Density volumes become network input: log(counts + 1), channels first. No augmentation, as in the reference.

Counts of two bytes are half of what their logarithms are: on their way to a GPU they stay as they are stored (see
`dlbench.node.models.cosmoflow`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlbench.datasets.splits import Split
from dlbench.datasets.tfrecord import decompressor
from dlbench.datasets.volumes import CONTAINERS, DensityIndex, index_density, require_sizes, target_fault
from dlbench.node.data.one_lister import ALONE, Lister
from dlbench.node.data.reader import NAMES_FROM, Arrays, BadSampleError, DataReader, PreparedSample, Raw, path_text
from dlbench.node.data.sharding import Key
from dlbench.node.models.cosmoflow import logarithms
from dlbench.opening import why_unreadable
from dlbench.specs.workload import CosmoFlowModel

_VOXELS_AT_ONCE = 1 << 16  # Voxels of one channel looked up together: their indices stay in the cache of a core.


def network_input(counts: NDArray[np.int16], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """Counts (S, S, S, C), none negative, become log(counts + 1) as (C, S, S, S) float32, exact to the last bit.

    `out`: of that form, to be filled and returned; None: a new one.
    """
    size, channels = counts.shape[0], counts.shape[3]
    table = logarithms()
    if out is None:
        out = np.empty((channels, *counts.shape[:3]), dtype=np.float32)
    step = max(1, _VOXELS_AT_ONCE // (size * size))
    for start in range(0, size, step):
        for channel in range(channels):
            # "clip" leaves out a check that no int16 of 0 and more needs, and a copy with it.
            indices = counts[start : start + step, ..., channel]
            np.take(table, indices, mode="clip", out=out[channel, start : start + step])
    return out


class _Targets(bytes):
    """What `fetch` gives of a sample whose counts lie in the batch already."""


class VolumeReader(DataReader):
    """Samples of a folder of volumes: volume (C, S, S, S) float32 and target (T,) float32.

    `counts`: the device takes the logarithm: volume is (S, S, S, C) int16.
    """

    def __init__(self, index: DensityIndex, *, counts: bool = False) -> None:
        self._counts, self._shape = counts, (index.size, index.size, index.size, index.channels)
        self._index, self._volumes = index, CONTAINERS[index.container]()
        self.num_samples = index.num_samples

    def fetch(self, index: int, out: Arrays | None = None) -> Raw:
        """Counts (S, S, S, C) and then parameters (T,), little-endian int16 and float32; unpacked, whatever the file.

        Counts that the batch takes as they are go there at once.
        """
        is_placed = self._counts and out is not None
        # Of numpy, which asks for large pages: a `bytes` of this size is slow without.
        room = np.empty(4 * self._index.num_targets if is_placed else self.num_bytes(index), np.uint8)
        end = len(room) - 4 * self._index.num_targets
        counts = out["volume"] if out is not None and is_placed else room[:end].view("<i2").reshape(self._shape)
        try:
            target = self._volumes.read(*self._index.place(index), counts)
        except (OSError, KeyError, ValueError, IndexError) as error:
            raise self._bad(index, why_unreadable(error)) from None
        if target.shape != (self._index.num_targets,):
            raise self._bad(index, f"y has shape {target.shape}, the others have {(self._index.num_targets,)}")
        room[end:].view("<f4")[:] = target
        if is_placed:
            return Raw(_Targets(room), num_placed=counts.nbytes)
        return Raw(room.data)  # type: ignore[arg-type]  # only read from, as bytes are

    def prepare(self, key: Key, data: bytes, out: Arrays | None = None) -> PreparedSample:
        """One volume; the epoch makes no difference."""
        if isinstance(data, _Targets):
            assert out is not None  # the same as `fetch` was given
            end, counts = 0, out["volume"]
        elif len(data) != self.num_bytes(key[1]):
            raise self._bad(key[1], f"{len(data)} of {self.num_bytes(key[1])} bytes are there")
        else:
            end = len(data) - 4 * self._index.num_targets
            counts = np.frombuffer(data, "<i2", count=end // 2).reshape(self._shape)
        target = np.frombuffer(data, "<f4", offset=end)
        if (fault := target_fault(target)) is not None:
            raise self._bad(key[1], fault)
        if self._counts:
            return PreparedSample({"volume": counts, "target": target})
        return PreparedSample(
            {"volume": network_input(counts, None if out is None else out["volume"]), "target": target}
        )

    def num_bytes(self, index: int) -> int:
        return 2 * self._index.size**3 * self._index.channels + 4 * self._index.num_targets

    def name(self, index: int) -> str:
        path, place, _num = self._index.place(index)
        return f"{str(path)!r}, sample {place}"

    def _bad(self, index: int, reason: str) -> BadSampleError:
        return BadSampleError(f"{self.name(index)}: {reason}")

    def files(self) -> Sequence[Path]:
        return self._index.paths()

    def describe(self) -> dict[str, object]:
        index = self._index
        about: dict[str, object] = {
            "kind": f"{index.container}-density",
            "path": path_text(index.root),
            "files": len(index.files),
            "shape": [index.size, index.size, index.size, index.channels],
            "index_sha256": index.sha256,
            "names_from": NAMES_FROM,
            "chunks_span_samples": index.chunks_span_samples,
            "logarithm": "device" if self._counts else "reader",
        }
        return about | ({"decompressor": decompressor()} if index.container == "tfrecord" else {})

    def close(self) -> None:
        self._volumes.close()


def open_density(
    source: Path, model: CosmoFlowModel, *, training: bool, lister: Lister = ALONE, counts: bool = False
) -> DataReader:
    """The volumes of one split, for a network.

    `training`: which split is read where names tell two apart. `counts`: leave the logarithm to the device.
    """
    split: Split = "train" if training else "validation"
    index = lister.index(lambda: index_density(source, split), (DensityIndex,))
    require_sizes(index, model, f"data.source {str(source)!r}")
    return VolumeReader(index, counts=counts)

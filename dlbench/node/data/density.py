"""Density volumes to network input: log(counts + 1), channels first, without augmentation, as in the reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlbench.datasets.splits import Split
from dlbench.datasets.tfrecord import decompressor
from dlbench.datasets.volumes import CONTAINERS, DensityIndex, index_density, require_sizes, target_fault
from dlbench.node.data.node_sharing import ALONE, IndexBroadcast
from dlbench.node.data.reader import NAMES_FROM, Arrays, DataReader, Key, PreparedSample, Raw, path_text
from dlbench.node.models.cosmoflow import logarithms
from dlbench.opening import why_unreadable
from dlbench.specs.workload import CosmoFlowModel

_VOXELS_AT_ONCE = 1 << 16  # Voxels of one channel per look-up, so that indices stay in the cache of a core.


def network_input(counts: NDArray[np.int16], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """Returns log(counts + 1), (C, S, S, S) float32, of counts (S, S, S, C); fills `out` if given."""
    size, channels = counts.shape[0], counts.shape[3]
    table = logarithms()
    if out is None:
        out = np.empty((channels, *counts.shape[:3]), dtype=np.float32)
    step = max(1, _VOXELS_AT_ONCE // (size * size))
    for start in range(0, size, step):
        for channel in range(channels):
            # "clip" avoids a check that non-negative int16 do not need, and a copy with it.
            indices = counts[start : start + step, ..., channel]
            np.take(table, indices, mode="clip", out=out[channel, start : start + step])
    return out


class _Targets(bytes):
    """Bytes of a sample's targets, from `fetch`, when its counts are in the batch already."""


class VolumeReader(DataReader):
    """Samples of a folder of volumes: target (T,); volume (C, S, S, S) or, with `voxel_counts`, (S, S, S, C) int16."""

    def __init__(self, index: DensityIndex, *, voxel_counts: bool = False) -> None:
        self._counts, self._shape = voxel_counts, (index.size, index.size, index.size, index.channels)
        self._index, self._volumes = index, CONTAINERS[index.container]()
        self.num_samples = index.num_samples

    def fetch(self, index: int, out: Arrays | None = None) -> Raw:
        """Reads counts (S, S, S, C) int16, into `out` if possible, and targets (T,) float32, little-endian."""
        target_bytes = 4 * self._index.num_targets
        is_placed = self._counts and out is not None
        # numpy's memory has large pages, without which this size is slow.
        room = np.empty(target_bytes if is_placed else self.num_bytes(index), np.uint8)
        end = len(room) - target_bytes
        if is_placed and out is not None:
            counts = out["volume"]
        else:
            counts = room[:end].view("<i2").reshape(self._shape)
        try:
            target = self._volumes.read(*self._index.place(index), counts)
        except (OSError, KeyError, ValueError, IndexError) as error:
            raise self._bad(index, why_unreadable(error)) from None
        if target.shape != (self._index.num_targets,):
            raise self._bad(index, f"y has shape {target.shape}, others have {(self._index.num_targets,)}")
        room[end:].view("<f4")[:] = target
        if is_placed:
            return Raw(_Targets(room), num_bytes_in_place=counts.nbytes)
        return Raw(room.data)  # type: ignore[arg-type]  # only read, like bytes

    def prepare(self, key: Key, data: bytes, out: Arrays | None = None) -> PreparedSample:
        if isinstance(data, _Targets):
            assert out is not None  # the same as in `fetch`
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
        if out is None:
            volume = network_input(counts)
        else:
            volume = network_input(counts, out["volume"])
        return PreparedSample({"volume": volume, "target": target})

    def num_bytes(self, index: int) -> int:
        return 2 * self._index.size**3 * self._index.channels + 4 * self._index.num_targets

    def name(self, index: int) -> str:
        path, place = self._index.place(index)
        return f"{str(path)!r}, sample {place}"

    def files(self) -> Sequence[Path]:
        return self._index.paths()

    def describe(self) -> dict[str, object]:
        index = self._index
        description: dict[str, object] = {
            "kind": f"{index.container}-density",
            "path": path_text(index.root),
            "files": len(index.files),
            "shape": [index.size, index.size, index.size, index.channels],
            "index_sha256": index.sha256,
            "names_from": NAMES_FROM,
            "chunks_span_samples": index.chunks_span_samples,
            "logarithm": "reader",
        }
        if self._counts:
            description["logarithm"] = "device"
        if index.container == "tfrecord":
            description["decompressor"] = decompressor()
        return description

    def close(self) -> None:
        self._volumes.close()


def open_density(
    source: Path, model: CosmoFlowModel, *, training: bool, lister: IndexBroadcast = ALONE, voxel_counts: bool = False
) -> DataReader:
    """Opens the volumes of the training or validation split; with `voxel_counts`, the device computes the logarithm."""
    split: Split = "train" if training else "validation"
    index = lister.index(lambda: index_density(source, split), (DensityIndex,))
    require_sizes(index, model, f"data.source {str(source)!r}")
    return VolumeReader(index, voxel_counts=voxel_counts)

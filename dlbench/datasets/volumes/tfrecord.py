"""TFRecord files of density volumes, in the form of the public cosmoUniverse set of MLPerf HPC.

Each record is an Example with `x`, the bytes of int16 counts (S, S, S, C) in C order, and `y`, T floats. The public set
(github.com/mlcommons/hpc, cosmoflow) has one gzip file a sample, S = 128, C = 4, T = 4. Files of several records are
read too; of a gzip file that reads all records before the one that is wanted.

`x` has no shape of its own: C is 4 if a quarter of the counts is a cube, else the first of 1, 2, 3, 5 ... 16 that fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dlbench.datasets.containers.tf_example import encode_example, example_views
from dlbench.datasets.containers.tfrecord import gunzip, is_gzip, read_record_at, read_records, record_offsets, unframe
from dlbench.datasets.volumes.shape import FileShape, Volume
from dlbench.opening import open_file, read_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LAYOUT = "TFRecord files of Examples with x (bytes of int16, (S, S, S, C)) and y (floats, (T,))"
SUFFIXES = (".tfrecord", ".tfrecords", ".tfrecord.gz", ".tfrecords.gz")
MAX_SAMPLE = 1 << 33
"""Bytes of a file of one sample at most: 512 by 512 by 512 voxels of 16 channels in two bytes have half as many."""
_CHANNELS = (4, 1, 2, 3, *range(5, 17))


def encode_volume(x: NDArray[np.int16], y: NDArray[np.float32]) -> bytes:
    """A volume and its parameters as the payload of one record."""
    return encode_example({"x": x.astype("<i2").tobytes(), "y": y})


def decode_volume(payload: bytes | memoryview) -> Volume:
    """The volume of one record (S, S, S, C) int16, a view of the payload, and its parameters (T,) float32.

    Raises:
        ValueError: it is no Example, lacks `x` or `y`, or has them in another form.
    """
    import numpy as np

    features = example_views(payload)
    x, y = features.get("x"), features.get("y")
    if not isinstance(x, list) or len(x) != 1:
        raise ValueError(f"no x of bytes in it; expected {LAYOUT}")
    if not isinstance(y, np.ndarray) or y.dtype != np.float32 or not y.size:
        raise ValueError(f"no y of floats in it; expected {LAYOUT}")
    counts, odd = divmod(len(x[0]), 2)
    for channels in _CHANNELS:
        edge = round((counts / channels) ** (1 / 3))
        if edge and not odd and edge**3 * channels == counts:
            return np.frombuffer(x[0], dtype="<i2").reshape(edge, edge, edge, channels), y
    raise ValueError(f"x has {len(x[0])} bytes, which are no int16 cube of 1 to 16 channels")


def file_volumes(path: Path) -> Iterator[Volume]:
    """All samples of a file, in order.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged.
    """
    for payload in read_records(path):
        yield decode_volume(payload)


def inspect(path: Path) -> FileShape:
    """How many volumes of which shape; reads the whole file, for a TFRecord has no table of contents.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged or empty.
    """
    with open_file(path) as file:
        compressed = is_gzip(file.read(12))
    first: Volume | None = None
    number = 0
    for payload in read_records(path, gzip=compressed):
        first = decode_volume(payload) if first is None else first
        number += 1
    if first is None:
        raise ValueError("holds no record")
    x, y = first
    return FileShape(
        num=number, size=x.shape[0], channels=x.shape[3], num_targets=len(y), spans=compressed and number > 1
    )


class TfrecordVolumes:
    """Reads single samples. Files are open only while they are read."""

    def __init__(self) -> None:
        self._offsets: dict[Path, NDArray[np.int64]] = {}

    def read(self, path: Path, place: int, num: int) -> Volume:
        """The sample at a place of a file that holds `num` of them.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is damaged or holds another number of records.
        """
        if num == 1:
            data = read_bytes(path, MAX_SAMPLE)
            payloads = list(unframe(gunzip(data) if is_gzip(data[:12]) else data))
            if len(payloads) != 1:
                raise ValueError(f"holds {len(payloads)} records, like the others it should hold 1")
            return decode_volume(payloads[0])
        with open_file(path) as file:
            if not is_gzip(file.read(12)):
                if path not in self._offsets:
                    self._offsets[path] = record_offsets(path)
                return decode_volume(read_record_at(file, int(self._offsets[path][place])))
        for number, payload in enumerate(read_records(path, gzip=True)):
            if number == place:
                return decode_volume(payload)
        raise ValueError(f"holds fewer than {place + 1} records")

    def close(self) -> None:
        """Forgets where records start."""
        self._offsets.clear()

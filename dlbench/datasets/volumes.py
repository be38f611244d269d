"""Indexes, reads and checks folders of density volumes in one of three containers, known by the names of the files:

- HDF5: `x`, int16 counts, (n, S, S, S, C) or one sample (S, S, S, C), and `y`, float32 parameters scaled to [-1, 1],
  (n, T) or (T,). One chunk per sample is fastest. The published CosmoFlow samples have S = 128, C = 4, T = 4.
- TFRecord, as in the public cosmoUniverse set of MLPerf HPC (github.com/mlcommons/hpc, cosmoflow): one Example per
  file, plain or gzip, with `x`, the bytes of the counts in C order, and `y`, T floats. `x` has no stored shape: C is 4
  if a quarter of the counts is a cube, else the first of 1, 2, 3, 5 ... 16 that fits.
- Pairs of .npy files, one sample each, as MLPerf HPC's submissions prepare cosmoUniverse: `<name>_data.npy`, int16
  counts (S, S, S, C), and `<name>_label.npy`, float32 (T,). They have no checksum.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from dlbench.datasets import tfrecord
from dlbench.datasets.arrays import Files, OpenFiles, damage_as_oserror, map_array, open_hdf5, require_plausible
from dlbench.datasets.splits import OF_STORAGE, Split, foreign_form, is_split_name, sample_names
from dlbench.errors import UserError
from dlbench.lazy import np
from dlbench.opening import read_bytes, why_unreadable

if TYPE_CHECKING:
    import h5py
    from numpy.typing import NDArray

    from dlbench.specs.workload import CosmoFlowModel

    Volume: TypeAlias = tuple[NDArray[np.int16], NDArray[np.float32]]  # (S, S, S, C) and (T,) of one sample.
else:
    Volume = tuple

_DATA, _LABEL = "_data.npy", "_label.npy"
MAX_SAMPLE = 1 << 33
"""Largest file of one sample in bytes: 512^3 voxels of 16 channels with two bytes need half of that."""
PUBLIC = {"train": (524_288, 262_144), "validation": (65_536,)}
"""Samples of the public set, of MLPerf HPC v1.0 and later, then of v0.7 (mlcommons/hpc, cosmoflow/README.md)."""
_MAX_TARGET = 1.001  # largest parameter: they are scaled to [-1, 1], and rounded
_FLOATS = (1e-10, 1e10)  # range of float32 counts; two int16 counts read as a float32 are rarely in it
_INSTEAD = {
    "data": "it holds data and label instead; write them as x (int16) and y",
    "full": "it holds a whole universe, as published; cut it with prepare.py of MLPerf HPC's CosmoFlow (mlcommons/hpc)",
}
"""Explanations of HDF5 files without `x`, by a dataset that they have."""
_CHANNELS = (4, 1, 2, 3, *range(5, 17))
_PART_BYTES = 1 << 19


@dataclass(frozen=True, kw_only=True)
class VolumeShape:
    """The number and the shape of the samples in a file."""

    num: int
    size: int  # edge of a volume, voxels
    channels: int
    num_targets: int
    spans: bool = False  # whether reading one sample decompresses others

    def fits(self, other: VolumeShape) -> bool:
        """Returns whether volumes and targets have the same shapes."""
        return (self.size, self.channels, self.num_targets) == (other.size, other.channels, other.num_targets)

    def __str__(self) -> str:
        return f"volumes of {self.size}^3 x {self.channels} with {self.num_targets} targets"


class Volumes:
    """Reads files of one container. Can be pickled before the first read. Files are open only while they are read."""

    LAYOUT: ClassVar[str]
    SUFFIXES: ClassVar[tuple[str, ...]]

    @classmethod
    def inspect(cls, path: Path) -> VolumeShape:
        """Returns number and shape of volumes. Raises OSError, or ValueError: damaged, or `x` or `y` is unsuitable."""
        return _shape_of(*next(cls.samples(path)))

    @staticmethod
    def samples(path: Path) -> Iterator[Volume]:
        """Yields all samples of a file, in order; raises as `inspect` does."""
        raise NotImplementedError

    def read(self, path: Path, place: int, counts: NDArray[np.int16]) -> NDArray[np.float32]:
        """Reads sample `place`: counts into `counts`, returns parameters. Raises OSError, KeyError, ValueError or
        IndexError: the file is damaged or missing, the shape differs, or a count is negative.
        """
        x, y = next(self.samples(path))  # files of containers other than HDF5 have one sample
        require_form(x.shape, counts)
        for part, stored in zip(_parts(counts), _parts(x), strict=True):
            np.copyto(part, stored)
            require_counts(part)
        return y

    def close(self) -> None:
        """Closes open files; reading again opens them again."""


def require_form(shape: tuple[int, ...], counts: NDArray[np.int16]) -> None:
    """Raises ValueError if a volume has another shape than `counts`."""
    if shape != counts.shape:
        raise ValueError(f"x has shape {shape}, the others have {counts.shape}")


def require_counts(part: NDArray[np.int16]) -> None:
    """Raises ValueError if a count is negative."""
    if np.minimum.reduce(part, axis=None) < 0:  # faster than `min`
        raise ValueError("x has a negative count")


def _parts(counts: NDArray[np.int16]) -> Iterator[NDArray[np.int16]]:
    """Yields a volume in parts that fit into a core's cache, so that they are checked right after reading."""
    step = max(1, _PART_BYTES // counts[0].nbytes)
    return (counts[start : start + step] for start in range(0, len(counts), step))


class Hdf5Volumes(Volumes):
    """Samples as `x` and `y` of HDF5 files; can also be forked."""

    LAYOUT = ".h5 files with x (int16, (n, S, S, S, C)) and y (float32, (n, T))"
    SUFFIXES = (".h5", ".hdf5")

    def __init__(self) -> None:
        self._files = OpenFiles()

    @classmethod
    def inspect(cls, path: Path) -> VolumeShape:
        try:
            with damage_as_oserror(), open_hdf5(path) as file:
                x, y = _dataset(file, "x", "int16", (4, 5)), _dataset(file, "y", "float32", (1, 2))
                shape, targets, chunks = x.shape, y.shape, x.chunks
        except OSError as error:
            raise ValueError(f"not a readable HDF5 file: {str(error).splitlines()[0]}") from None
        *num, size, height, depth, channels = shape  # one sample has no `num`
        if len({size, height, depth}) != 1 or 0 in shape:
            raise ValueError(f"x has shape {shape}, expected (n, S, S, S, C) or (S, S, S, C)")
        if list(targets[:-1]) != num:
            raise ValueError(f"y has shape {targets}, which does not fit x of shape {shape}")
        spans = bool(num and chunks and chunks[0] > 1)
        return VolumeShape(num=math.prod(num), size=size, channels=channels, num_targets=targets[-1], spans=spans)

    @staticmethod
    def samples(path: Path) -> Iterator[Volume]:
        num = Hdf5Volumes.inspect(path).num
        with damage_as_oserror(), open_hdf5(path) as file:
            x, y = file["x"], file["y"]
            if x.ndim == 4:
                yield x[...], y[...]
                return
            for place in range(num):
                yield x[place], y[place]

    def read(self, path: Path, place: int, counts: NDArray[np.int16]) -> NDArray[np.float32]:
        with damage_as_oserror():  # HDF5 itself raises an error for an index beyond the end
            x, y, descriptor, start_of = self._files.content(path, _hdf5_content)
            require_form(x.shape[-4:], counts)
            chosen = place if len(x.shape) == 5 else ()
            target, start = np.asarray(y[chosen]), start_of(place)
            if start is None:
                x.read_direct(counts, chosen)
                require_counts(counts)
                return target
            for part in _parts(counts):
                if os.preadv(descriptor, [part.data], start) < part.nbytes:
                    raise ValueError("truncated")
                require_counts(part)
                start += part.nbytes
            return target

    def close(self) -> None:
        self._files.close()


def _dataset(file: Any, key: str, dtype: str, dimensions: tuple[int, ...]) -> Any:
    import h5py

    if key not in file:  # not `get`, which would hide damage
        instead = "".join(f"{text}; " for other, text in _INSTEAD.items() if other in file)
        raise ValueError(f"no dataset {key!r}; {instead}expected {Hdf5Volumes.LAYOUT}")
    dataset = file[key]
    if not isinstance(dataset, h5py.Dataset):
        raise ValueError(f"no dataset {key!r}; expected {Hdf5Volumes.LAYOUT}")  # noqa: TRY004 -- the file is wrong
    if dataset.dtype != dtype or dataset.ndim not in dimensions:
        raise ValueError(f"{key} is {dataset.dtype} of shape {dataset.shape}; expected {Hdf5Volumes.LAYOUT}")
    require_plausible(file, dataset)
    return dataset


def _hdf5_content(file: h5py.File) -> tuple[Any, Any, int, Callable[[int], int | None]]:
    """Returns `x`, `y`, the file's descriptor, and a function for the byte offset of a volume, or None."""
    x = file["x"]
    return x, file["y"], x.file.id.get_vfd_handle(), _volume_offsets(file, x)


def _volume_offsets(file: h5py.File, x: Any) -> Callable[[int], int | None]:
    def no_offset(_place: int) -> int | None:
        return None

    # With a user block some releases of HDF5 count offsets from its end, and give offsets of data never written.
    if x.dtype != "<i2" or file.userblock_size or not x.id.get_storage_size():
        return no_offset
    num, *volume_shape = (1, *x.shape)[-5:]
    if x.chunks is None:
        start, num_bytes = x.id.get_offset(), math.prod(volume_shape) * x.dtype.itemsize
        if start is None:  # a compact dataset
            return no_offset
        return lambda place: start + place * num_bytes if place < num else None
    if x.id.get_create_plist().get_nfilters() or x.chunks != (1, *volume_shape)[-x.ndim :]:
        return no_offset
    origin = (0,) * (x.ndim - 1)
    return lambda place: x.id.get_chunk_info_by_coord((place, *origin)).byte_offset if place < num else None


class TfrecordVolumes(Volumes):
    """One sample per TFRecord file, plain or gzip."""

    LAYOUT = "TFRecord files of one Example with x (bytes of int16, (S, S, S, C)) and y (floats, (T,))"
    SUFFIXES = (".tfrecord", ".tfrecords", ".tfrecord.gz", ".tfrecords.gz")

    @staticmethod
    def samples(path: Path) -> Iterator[Volume]:
        data = read_bytes(path, MAX_SAMPLE)
        if tfrecord.is_gzip(data[:12]):
            data = tfrecord.gunzip(data)
        payloads = list(tfrecord.unframe(data))
        if len(payloads) != 1:
            raise ValueError(f"holds {len(payloads)} records; expected {TfrecordVolumes.LAYOUT}")
        yield decode_volume(payloads[0])


def encode_volume(x: NDArray[np.int16], y: NDArray[np.float32]) -> bytes:
    """Returns the payload of a record with a volume and its parameters."""
    return tfrecord.encode_example({"x": x.astype("<i2").tobytes(), "y": y})


def decode_volume(payload: bytes | memoryview) -> Volume:
    """Returns (S, S, S, C) int16, a view of the payload, and (T,) float32. Raises ValueError: unsuitable."""
    features = tfrecord.example_views(payload)
    x, y = features.get("x"), features.get("y")
    if not isinstance(x, list) or len(x) != 1:
        raise ValueError(f"no x of bytes in it; expected {TfrecordVolumes.LAYOUT}")
    if not isinstance(y, np.ndarray) or y.dtype != np.float32 or not y.size:
        raise ValueError(f"no y of floats in it; expected {TfrecordVolumes.LAYOUT}")
    counts, odd = divmod(len(x[0]), 2)
    for channels in _CHANNELS:
        edge = round((counts / channels) ** (1 / 3))
        if edge and not odd and edge**3 * channels == counts:
            return np.frombuffer(x[0], dtype="<i2").reshape(edge, edge, edge, channels), y
    raise ValueError(f"x has {len(x[0])} bytes, which is not an int16 cube of 1 to 16 channels")


class NpyVolumes(Volumes):
    """One sample per pair of .npy files."""

    LAYOUT = "<name>_data.npy (int16, (S, S, S, C)) next to <name>_label.npy (float32, (T,))"
    SUFFIXES = (_DATA,)

    @staticmethod
    def samples(path: Path) -> Iterator[Volume]:
        x, y = map_array(path), map_array(path.with_name(targets_name(path.name)))
        for array, name, dtype, dimensions in ((x, _DATA, "int16", 4), (y, _LABEL, "float32", 1)):
            if array.dtype != dtype or array.ndim != dimensions or not array.size:
                raise ValueError(f"{name} is {array.dtype} of shape {array.shape}; expected {NpyVolumes.LAYOUT}")
        if len(set(x.shape[:3])) != 1:
            raise ValueError(f"{_DATA} has shape {x.shape}; expected {NpyVolumes.LAYOUT}")
        yield x, np.array(y)


def targets_name(name: str) -> str:
    """Returns the name of the .npy file with the parameters for a .npy file of counts."""
    return name.removesuffix(_DATA) + _LABEL


CONTAINERS: dict[str, type[Volumes]] = {"hdf5": Hdf5Volumes, "tfrecord": TfrecordVolumes, "npy": NpyVolumes}
LAYOUT = ", or ".join(container.LAYOUT for container in CONTAINERS.values())


def container_of(name: str) -> str | None:
    """Returns the container of a file by its name; None if it is not a file of volumes."""
    for container, volumes in CONTAINERS.items():
        if name.lower().endswith(volumes.SUFFIXES):
            return container
    return None


def target_fault(y: NDArray[np.float32]) -> str | None:
    """Returns what is wrong with the parameters of a sample; None if nothing is."""
    if not np.isfinite(y).all():
        return "y is not finite"
    largest = float(y[np.abs(y).argmax()])
    if abs(largest) > _MAX_TARGET:
        return (
            f"y holds {largest:g}, outside -1..1; give the scaled parameters (unitPar), not the physical ones (physPar)"
        )
    return None


def _shape_of(x: NDArray[np.int16], y: NDArray[np.float32]) -> VolumeShape:
    pairs = x.reshape(-1)[: x.size // 2 * 2].view("<f4")
    floats = pairs[pairs != 0]
    with np.errstate(invalid="ignore"):
        low, high = _FLOATS
        if len(floats) and bool(((np.abs(floats) > low) & (np.abs(floats) < high)).all()):
            raise ValueError(
                f"x is float32 by its values; expected {TfrecordVolumes.LAYOUT}: write the counts as int16"
            )
    return VolumeShape(num=1, size=x.shape[0], channels=x.shape[3], num_targets=len(y))


@dataclass(frozen=True, kw_only=True, eq=False)
class DensityIndex:
    """The files of a data set and the position of each volume; all volumes have one shape."""

    root: Path
    container: str  # A key of `CONTAINERS`
    files: tuple[str, ...]  # relative to the root, sorted
    offsets: NDArray[np.int64]  # (num_files + 1,) first sample of each file
    size: int  # edge of a volume, voxels
    channels: int
    num_targets: int
    sha256: str  # digest of file names and sample counts; contents are not read
    chunks_span_samples: bool  # whether in some file one read decompresses several samples

    @property
    def num_samples(self) -> int:
        return int(self.offsets[-1])

    def paths(self) -> Sequence[Path]:
        """Returns the files that samples are read from, for .npy with those of targets."""
        names = Files(len(self.files), lambda number: self.root / self.files[number])
        if self.container != "npy":
            return names
        return [*names, *(self.root / targets_name(name) for name in self.files)]

    def place(self, index: int) -> tuple[Path, int]:
        """Returns the file of a sample, and its index in the file."""
        file = int(self.offsets.searchsorted(index, side="right")) - 1
        return self.root / self.files[file], index - int(self.offsets[file])


def volume_files(folder: Path, split: Split | None) -> tuple[str, list[str]]:
    """Returns the container and the files of a folder, relative and sorted; of one split if names distinguish two."""
    if not folder.is_dir():
        raise UserError(f"{str(folder)!r}: no such folder; expected {LAYOUT}")
    by_container: dict[str, list[str]] = {}
    targets = set()
    names = []
    try:
        for name in _names(folder):
            names.append(name)
            if name.endswith(_LABEL):
                targets.add(name)
            elif (container := container_of(name)) is not None:
                by_container.setdefault(container, []).append(name)
    except OSError as error:
        raise UserError(f"{error.filename!r}: cannot be listed: {error.strerror}") from None
    if not by_container:
        foreign = foreign_form(names) or f"expected {LAYOUT}"
        endings = ", ".join(chain.from_iterable(volumes.SUFFIXES for volumes in CONTAINERS.values()))
        raise UserError(f"{str(folder)!r} holds no file that ends in {endings}; {foreign}")
    if len(by_container) > 1:
        examples = " and ".join(repr(min(names)) for names in by_container.values())
        raise UserError(f"{str(folder)!r} holds {examples}: a data set has one container; move the others away")
    [(container, volume_names)] = by_container.items()
    split_names = sample_names(folder, names, frozenset(volume_names).__contains__, split, LAYOUT)
    for name in split_names:
        if container == "npy" and targets_name(name) not in targets:
            raise UserError(f"{str(folder / name)!r} has no file of targets next to it; expected {NpyVolumes.LAYOUT}")
    return container, split_names


def _names(folder: Path) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name in OF_STORAGE:
                continue
            if not entry.is_dir():
                yield entry.name
                continue
            if is_split_name(entry.name):  # splits would be mixed
                raise UserError(f"{str(folder)!r} holds the folder {entry.name!r} of a split; give that folder")
            with os.scandir(entry.path) as inner:
                yield from (f"{entry.name}/{e.name}" for e in inner if not e.name.startswith(".") and e.is_file())


def index_density(folder: Path, split: Split | None = None) -> DensityIndex:
    """Lists the files of a folder with the number and the shape of their volumes. All HDF5 files are opened, but only
    the first, the middle and the last TFRecord or .npy file: there may be half a million with one sample each.
    """
    container, names = volume_files(folder, split)
    probes = [names[i] for i in sorted({0, len(names) // 2, len(names) - 1})]
    shapes = {name: file_shape(folder, name, container) for name in probes}
    if container == "hdf5":
        shapes |= {name: file_shape(folder, name, container) for name in names if name not in shapes}
    first = shapes[names[0]]
    for name, shape in shapes.items():
        if not shape.fits(first):
            raise UserError(f"{str(folder / name)!r}: {shape}, but {names[0]!r} has {first}")
    counts = []
    digest = hashlib.sha256()
    for name in names:
        count = shapes.get(name, first).num
        counts.append(count)
        digest.update(os.fsencode(name) + f"\0{count}\0".encode())
    return DensityIndex(
        root=folder,
        container=container,
        files=tuple(names),
        offsets=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)]),
        size=first.size,
        channels=first.channels,
        num_targets=first.num_targets,
        sha256=digest.hexdigest(),
        chunks_span_samples=any(shape.spans for shape in shapes.values()),
    )


def require_sizes(stored: VolumeShape | DensityIndex, model: CosmoFlowModel, where: str) -> None:
    """Raises UserError if volumes or targets have other sizes than the network's. `where`: key and path."""
    sizes = {"input_size": stored.size, "input_channels": stored.channels, "num_targets": stored.num_targets}
    for name, size in sizes.items():
        if size != getattr(model, name):
            raise UserError(f"{where} has {name} {size}, model.{name} is {getattr(model, name)}")


def file_shape(folder: Path, name: str, container: str) -> VolumeShape:
    """Returns number and shape of a file's samples. Raises UserError: it is damaged, or has other types or shapes."""
    try:
        return CONTAINERS[container].inspect(folder / name)
    except (OSError, ValueError) as error:
        raise UserError(f"{str(folder / name)!r}: {why_unreadable(error)}") from None


def checked_file(folder: Path, container: str, name: str) -> VolumeShape | str:
    """Reads a whole file; returns the shape of its samples, or a fault."""
    number, first_shape = 0, None
    try:
        for x, y in CONTAINERS[container].samples(folder / name):
            shape = _shape_of(x, y)
            first_shape = first_shape or shape
            if not shape.fits(first_shape):
                return f"sample {number}: {shape}, but the first has {first_shape}"
            require_counts(x)
            if (fault := target_fault(y)) is not None:
                return f"sample {number}: {fault}"
            number += 1
    except (OSError, KeyError, ValueError, IndexError) as error:
        return f"sample {number}: {why_unreadable(error)}"
    return first_shape or "holds no sample"


def completeness(index: DensityIndex, split: str) -> str | None:
    """Returns how the number of samples differs from the public set; None if it is a published number."""
    published = PUBLIC[split]
    if index.num_samples in published:
        return None
    expected = " or ".join(f"{num:,}" for num in published)
    return f"{index.num_samples:,} {split} samples; the public set has {expected}"

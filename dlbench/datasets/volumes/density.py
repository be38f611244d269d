"""A folder of density volumes becomes an index, single samples and a verdict, whatever container they lie in.

The container follows from the files' names: HDF5 (`density_hdf5`), TFRecord (`density_tfrecord`) or pairs of .npy files
(`density_npy`). Files may lie in the folder and in its subfolders, one level deep.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from dlbench import pool
from dlbench.datasets.splits import is_split_name
from dlbench.datasets.volumes import hdf5 as density_hdf5
from dlbench.datasets.volumes import npy as density_npy
from dlbench.datasets.volumes import tfrecord as density_tfrecord
from dlbench.datasets.volumes.shape import FileShape, Volume, Volumes
from dlbench.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CONTAINERS: dict[str, ModuleType] = {"hdf5": density_hdf5, "tfrecord": density_tfrecord, "npy": density_npy}
LAYOUT = f"{density_hdf5.LAYOUT}, or {density_tfrecord.LAYOUT}, or {density_npy.LAYOUT}"
_OPENED_ALL = ("hdf5",)
"""Containers whose files are all opened for the index; of the others three are, if they hold one sample each."""
PUBLIC = {"train": (524_288, 262_144), "validation": (65_536,)}
"""Samples of the public set, of MLPerf HPC v1.0 and later, then of v0.7 (mlcommons/hpc, cosmoflow/README.md)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DensityIndex:
    """Which volumes there are; all of one shape."""

    root: Path
    container: str
    """`hdf5`, `tfrecord` or `npy`."""
    files: tuple[str, ...]
    """Relative to the root, sorted."""
    offsets: NDArray[np.int64]
    """(num_files + 1,) first sample of each file."""
    size: int
    """Edge of a volume, voxels."""
    channels: int
    num_targets: int
    sha256: str
    """Digest of file names and sample counts; contents are not read."""
    chunks_span_samples: bool
    """Whether in some file one read decompresses several samples."""

    @property
    def num_samples(self) -> int:
        """Volumes in all files."""
        return int(self.offsets[-1])

    def paths(self) -> list[Path]:
        """The files that samples are read from; of .npy also those of targets."""
        names = [self.root / name for name in self.files]
        if self.container != "npy":
            return names
        return [*names, *map(density_npy.targets_path, names)]

    def locate(self, index: int) -> tuple[Path, int]:
        """The file of a sample and its place in it."""
        file, place, _num = self.place(index)
        return file, place

    def place(self, index: int) -> tuple[Path, int, int]:
        """The file of a sample, its place in it, and how many samples the file holds."""
        import numpy as np

        file = int(np.searchsorted(self.offsets, index, side="right")) - 1
        first = int(self.offsets[file])
        return self.root / self.files[file], index - first, int(self.offsets[file + 1]) - first


def _listed(folder: Path) -> tuple[str, list[str]]:
    """The container of a folder and its files, relative and sorted."""
    if not folder.is_dir():
        raise UserError(f"{str(folder)!r}: no such folder; expected {LAYOUT}")
    found: dict[str, list[str]] = {}
    targets = set()
    try:
        for name in _names(folder):
            if name.lower().endswith("_y.npy"):
                targets.add(name)
            for container, module in CONTAINERS.items():
                if name.lower().endswith(module.SUFFIXES):
                    found.setdefault(container, []).append(name)
    except OSError as error:
        raise UserError(f"{error.filename!r}: cannot be listed: {error.strerror}") from None
    if not found:
        suffixes = [s for module in CONTAINERS.values() for s in module.SUFFIXES]
        raise UserError(f"{str(folder)!r} holds no file that ends in {', '.join(suffixes)}; expected {LAYOUT}")
    if len(found) > 1:
        examples = " and ".join(repr(min(names)) for names in found.values())
        raise UserError(f"{str(folder)!r} holds {examples}: a data set is of one container; move the others away")
    ((container, names),) = found.items()
    if container == "npy":
        for name in sorted(names):
            if name[: -len("_x.npy")] + "_y.npy" not in targets:
                raise UserError(
                    f"{str(folder / name)!r} has no file of targets beside it; expected {density_npy.LAYOUT}"
                )
    return container, sorted(names)


def _names(folder: Path) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if not entry.is_dir():
                yield entry.name
                continue
            if is_split_name(entry.name):  # they would be mixed
                raise UserError(f"{str(folder)!r} holds the folder {entry.name!r} of a split; give that one")
            with os.scandir(entry.path) as inner:
                yield from (f"{entry.name}/{e.name}" for e in inner if not e.name.startswith(".") and e.is_file())


def index_density(folder: Path) -> DensityIndex:
    """Lists a folder and learns how many volumes of which shape its files hold; volumes of HDF5 and .npy are not read.

    Half a million files of one sample must not all be opened: if the first, the middle and the last TFRecord or .npy
    file hold one sample each, all are taken to. One that does not is a bad sample when it is read.

    Raises:
        UserError: the folder is missing, has no such files or a mixture, or a file is damaged, lacks `x` or `y`, or
            has them in another type or shape; file and key are named.
    """
    import numpy as np

    container, names = _listed(folder)
    probes = [names[i] for i in sorted({0, len(names) // 2, len(names) - 1})]
    shapes = {name: file_shape(folder, name, container) for name in probes}
    spread = container in _OPENED_ALL or any(shape.num != 1 for shape in shapes.values())
    if spread:
        shapes |= {name: file_shape(folder, name, container) for name in names if name not in shapes}
    first = shapes[names[0]]
    for name, shape in shapes.items():
        if not shape.fits(first):
            raise UserError(f"{str(folder / name)!r}: {shape}, but {names[0]!r} has {first}")
    counts = [shapes[name].num if spread else 1 for name in names]
    digest = hashlib.sha256()
    for name, num in zip(names, counts, strict=True):
        digest.update(os.fsencode(name) + f"\0{num}\0".encode())
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


def file_shape(folder: Path, name: str, container: str) -> FileShape:
    """What one file holds; of a TFRecord all is read.

    Raises:
        UserError: it is damaged, or lacks `x` or `y`, or has them in another type or shape.
    """
    try:
        shape: FileShape = CONTAINERS[container].inspect(folder / name)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(f"{str(folder / name)!r}: {reason}") from None
    return shape


class DensityReader:
    """Reads single volumes of an index; it may be pickled or forked."""

    def __init__(self, index: DensityIndex) -> None:
        self.index = index
        makers: dict[str, Callable[[], Volumes]] = {
            "hdf5": density_hdf5.Hdf5Volumes,
            "tfrecord": density_tfrecord.TfrecordVolumes,
            "npy": density_npy.NpyVolumes,
        }
        self._volumes = makers[index.container]()

    def read(self, index: int) -> Volume:
        """Volume (S, S, S, C) int16 and parameters (T,) float32 of one sample.

        Raises:
            OSError, KeyError, ValueError or IndexError: the file is damaged, has gone, or holds something else than
                the index says.
        """
        x, y = self._volumes.read(*self.index.place(index))
        _same_shape(x, y, self.index.size, self.index.channels, self.index.num_targets)
        return x, y

    def close(self) -> None:
        """Closes all files; reading again opens them again."""
        self._volumes.close()


def _same_shape(x: NDArray[np.int16], y: NDArray[np.float32], size: int, channels: int, num_targets: int) -> None:
    expected = (size, size, size, channels)
    if x.shape != expected or y.shape != (num_targets,):
        raise ValueError(f"x has shape {x.shape} and y {y.shape}, the others have {expected} and {(num_targets,)}")


def verify_density(folder: Path, on_progress: Callable[[int, int], None] | None, workers: int) -> list[str]:
    """Reads every sample of a folder: checksums, shapes, no negative count, finite parameters.

    Args:
        folder: of one split.
        on_progress: told the files that are done and all files.
        workers: processes that read; with 1 or fewer the calling process does.

    Returns:
        One line `name: reason` for each bad file, by name; none if all is well.

    Raises:
        UserError: the folder is missing or has no such files, or a mixture.
    """
    container, names = _listed(folder)
    check = partial(_checked, folder, container)
    bad: list[str] = []
    shapes: dict[str, FileShape] = {}
    with pool.run(check, names, workers, name=str, verb="read", ahead=2) as results:
        for number, (name, result) in enumerate(zip(names, pool.in_order(results), strict=True), 1):
            if isinstance(result, str):
                bad.append(f"{name}: {result}")
            else:
                shapes[name] = result
            if on_progress is not None:
                on_progress(number, len(names))
    first = next(iter(shapes.items()), None)
    if first is not None:
        bad += [f"{n}: {s}, but {first[0]!r} has {first[1]}" for n, s in shapes.items() if not s.fits(first[1])]
    return sorted(bad)


def _checked(folder: Path, container: str, name: str) -> FileShape | str:
    """What one file holds after all of it was read, or what is wrong with it."""
    import numpy as np

    number, shape = 0, None
    try:
        for x, y in CONTAINERS[container].file_volumes(folder / name):
            found = FileShape(num=1, size=x.shape[0], channels=x.shape[3], num_targets=len(y), spans=False)
            shape = found if shape is None else shape
            if not found.fits(shape):
                return f"sample {number}: {found}, but the first has {shape}"
            if x.min() < 0:
                return f"sample {number}: x has a negative count"
            if not np.isfinite(y).all():
                return f"sample {number}: y is not finite"
            number += 1
    except (OSError, KeyError, ValueError, IndexError) as error:
        return f"sample {number}: {(str(error) or type(error).__name__).splitlines()[0]}"
    return shape if shape is not None else "holds no sample"


def completeness(index: DensityIndex, split: str) -> str | None:
    """What a split of the public set lacks or has too much, in one line; None if the count is a published one."""
    published = PUBLIC[split]
    if index.num_samples in published:
        return None
    expected = " or ".join(f"{num:,}" for num in published)
    return f"{index.num_samples:,} {split} samples; the public set has {expected}"

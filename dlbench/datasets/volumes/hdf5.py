"""HDF5 files of density volumes: what a file holds, and single samples.

A `.h5` or `.hdf5` file holds dataset `x`, int16 counts, (n, S, S, S, C) or one sample (S, S, S, C),
and dataset `y`, float32 parameters scaled to [-1, 1], (n, T) or (T,). One chunk per sample reads best. The published
CosmoFlow samples have S = 128, C = 4, T = 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlbench.datasets.containers.hdf5 import OpenFiles, damage_told, open_hdf5, require_plausible
from dlbench.datasets.volumes.shape import FileShape, Volume

LAYOUT = ".h5 files with x (int16, (n, S, S, S, C)) and y (float32, (n, T))"
SUFFIXES = (".h5", ".hdf5")


def inspect(path: Path) -> FileShape:
    """How many volumes of which shape; volumes are not read.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not HDF5, or lacks `x` or `y`, or has them in another type or shape.
    """
    try:
        with damage_told(), open_hdf5(path) as file:
            x, y = _dataset(file, "x", "int16", (4, 5)), _dataset(file, "y", "float32", (1, 2))
            shape, several = x.shape, x.ndim == 5
            spans = bool(several and x.chunks and x.chunks[0] > 1)
            targets = y.shape
    except OSError as error:
        raise ValueError(f"not a readable HDF5 file: {str(error).splitlines()[0]}") from None
    volume = shape[1:] if several else shape
    if len(set(volume[:3])) != 1 or 0 in shape:
        raise ValueError(f"x has shape {shape}, expected (n, S, S, S, C) or (S, S, S, C)")
    if len(targets) != (2 if several else 1) or (several and targets[0] != shape[0]):
        raise ValueError(f"y has shape {targets}, which does not fit x of shape {shape}")
    return FileShape(
        num=shape[0] if several else 1, size=volume[0], channels=volume[3], num_targets=targets[-1], spans=spans
    )


def file_volumes(path: Path) -> Iterator[Volume]:
    """All samples of a file, in order; raises as `inspect` does."""
    num = inspect(path).num
    with damage_told(), open_hdf5(path) as file:
        for place in range(num):
            yield _sample(file, place)


def _dataset(file: Any, key: str, dtype: str, dimensions: tuple[int, ...]) -> Any:
    import h5py

    if key not in file:  # not `get`, which would hide damage
        raise ValueError(f"no dataset {key!r}; expected {LAYOUT}")
    found = file[key]
    if not isinstance(found, h5py.Dataset):
        raise ValueError(f"no dataset {key!r}; expected {LAYOUT}")  # noqa: TRY004 -- it is the file that is wrong
    if found.dtype != dtype or found.ndim not in dimensions:
        raise ValueError(f"{key} is {found.dtype} of shape {found.shape}; expected {LAYOUT}")
    require_plausible(found)
    return found


def _sample(file: Any, place: int) -> Volume:
    x, y = file["x"], file["y"]
    return (x[place], y[place]) if x.ndim == 5 else (x[...], y[...])


class Hdf5Volumes:
    """Reads single samples; it may be pickled or forked."""

    def __init__(self) -> None:
        self._files = OpenFiles()

    def read(self, path: Path, place: int, num: int) -> Volume:
        """The sample at a place of a file; HDF5 itself refuses a place beyond its end.

        Raises:
            OSError: the file is damaged or has gone, or `x` or `y` from it; the message is HDF5's.
            ValueError: the place has gone from the file.
        """
        with damage_told():
            return _sample(self._files.get(path), place)

    def close(self) -> None:
        """Closes all files; reading again opens them again."""
        self._files.close()

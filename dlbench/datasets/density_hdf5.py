"""HDF5 files of density volumes become an index and single samples.

A folder of `.h5` or `.hdf5` files. Each holds dataset `x`, int16 counts, (n, S, S, S, C) or one sample (S, S, S, C),
and dataset `y`, float32 parameters scaled to [-1, 1], (n, T) or (T,). One chunk per sample reads best. The published
CosmoFlow samples have S = 128, C = 4, T = 4.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlbench.errors import UserError

if TYPE_CHECKING:
    import h5py
    import numpy as np
    from numpy.typing import NDArray

LAYOUT = "a folder of .h5 files with x (int16, (n, S, S, S, C)) and y (float32, (n, T))"
SUFFIXES = (".h5", ".hdf5")
_OPEN_AT_MOST = 32
"""Files kept open by one process; the published set has one file a sample."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DensityIndex:
    """Which volumes there are; all of one shape."""

    root: Path
    files: tuple[str, ...]
    offsets: NDArray[np.int64]
    """(num_files + 1,) first sample of each file."""
    size: int
    """Edge of a volume, voxels."""
    channels: int
    num_targets: int
    sha256: str
    """Digest of file names and sample counts; contents are not read."""
    chunks_span_samples: bool
    """Whether some file makes one read decompress several samples."""

    @property
    def num_samples(self) -> int:
        """Volumes in all files."""
        return int(self.offsets[-1])

    def locate(self, index: int) -> tuple[Path, int]:
        """The file of a sample and its place in it."""
        import numpy as np

        file = int(np.searchsorted(self.offsets, index, side="right")) - 1
        return self.root / self.files[file], index - int(self.offsets[file])


@dataclass(frozen=True)
class _Shape:
    num: int
    size: int
    channels: int
    num_targets: int
    spans: bool


def index_density(folder: Path) -> DensityIndex:
    """Opens each file once, to learn how many volumes of which shape it holds; volumes are not read.

    Raises:
        UserError: the folder is missing or has no HDF5 files, or a file is damaged, lacks `x` or `y`, or has them in
            another type or shape; file and key are named.
    """
    import numpy as np

    if not folder.is_dir():
        raise UserError(f"{str(folder)!r}: no such folder; expected {LAYOUT}")
    names = sorted(p.name for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
    if not names:
        raise UserError(f"{str(folder)!r} holds no .h5 or .hdf5 file; expected {LAYOUT}")
    digest, shapes = hashlib.sha256(), []
    for name in names:
        shapes.append(_inspect(folder / name))
        digest.update(os.fsencode(name) + f"\0{shapes[-1].num}\0".encode())
    first = shapes[0]
    for name, shape in zip(names, shapes, strict=True):
        if (shape.size, shape.channels, shape.num_targets) != (first.size, first.channels, first.num_targets):
            raise UserError(
                f"{str(folder / name)!r}: volumes of {shape.size}^3 x {shape.channels} with {shape.num_targets} "
                f"targets, but {names[0]!r} has {first.size}^3 x {first.channels} with {first.num_targets}"
            )
    return DensityIndex(
        root=folder,
        files=tuple(names),
        offsets=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum([s.num for s in shapes], dtype=np.int64)]),
        size=first.size,
        channels=first.channels,
        num_targets=first.num_targets,
        sha256=digest.hexdigest(),
        chunks_span_samples=any(s.spans for s in shapes),
    )


def _open(path: Path) -> h5py.File:
    import h5py

    # Nobody writes a data set during a run, and network file systems often lack locks.
    return h5py.File(path, "r", locking=False)


def _inspect(path: Path) -> _Shape:
    try:
        with _open(path) as file:
            x, y = _dataset(file, path, "x", "int16", (4, 5)), _dataset(file, path, "y", "float32", (1, 2))
            shape, several = x.shape, x.ndim == 5
            spans = bool(several and x.chunks and x.chunks[0] > 1)
            targets = y.shape
    except OSError as error:
        raise UserError(f"{str(path)!r}: not a readable HDF5 file: {str(error).splitlines()[0]}") from None
    volume = shape[1:] if several else shape
    if len(set(volume[:3])) != 1 or 0 in shape:
        raise UserError(f"{str(path)!r}: x has shape {shape}, expected (n, S, S, S, C) or (S, S, S, C)")
    if len(targets) != (2 if several else 1) or (several and targets[0] != shape[0]):
        raise UserError(f"{str(path)!r}: y has shape {targets}, which does not fit x of shape {shape}")
    return _Shape(shape[0] if several else 1, volume[0], volume[3], targets[-1], spans)


def _dataset(file: Any, path: Path, key: str, dtype: str, dimensions: tuple[int, ...]) -> Any:
    import h5py

    found = file.get(key)
    if not isinstance(found, h5py.Dataset):
        raise UserError(f"{str(path)!r}: no dataset {key!r}; expected {LAYOUT}")
    if found.dtype != dtype or found.ndim not in dimensions:
        raise UserError(f"{str(path)!r}: {key} is {found.dtype} of shape {found.shape}; expected {LAYOUT}")
    return found


class DensityReader:
    """Reads single volumes. Files are opened at first use in each process, so that it may be pickled or forked."""

    def __init__(self, index: DensityIndex) -> None:
        self.index = index
        self._handles: dict[Path, Any] = {}
        self._owner = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {"index": self.index, "_handles": {}, "_owner": -1}

    def read(self, index: int) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
        """Volume (S, S, S, C) int16 and parameters (T,) float32 of one sample.

        Raises:
            OSError: the file is damaged or has gone; the message is HDF5's.
            KeyError: `x` or `y` has gone from the file.
        """
        path, place = self.index.locate(index)
        file = self._handle(path)
        x, y = file["x"], file["y"]
        return (x[place], y[place]) if x.ndim == 5 else (x[...], y[...])

    def close(self) -> None:
        """Closes all files; reading again opens them again."""
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()

    def _handle(self, path: Path) -> Any:
        if self._owner != os.getpid():  # handles of a parent must not be used, nor closed, in its child
            self._handles, self._owner = {}, os.getpid()
        if path not in self._handles:
            if len(self._handles) >= _OPEN_AT_MOST:
                self._handles.pop(next(iter(self._handles))).close()
            self._handles[path] = _open(path)
        return self._handles[path]

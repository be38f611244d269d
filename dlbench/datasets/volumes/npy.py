"""Pairs of .npy files of density volumes: `<name>_x.npy`, int16 counts, and `<name>_y.npy`, float32 parameters.

The shapes are those of HDF5: (n, S, S, S, C) and (n, T), or (S, S, S, C) and (T,) for one sample. The form has no
checksum: only a manifest tells an altered file from a whole one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlbench.datasets.containers.npy import map_array
from dlbench.datasets.volumes.shape import FileShape, Volume

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LAYOUT = "<name>_x.npy (int16, (n, S, S, S, C)) beside <name>_y.npy (float32, (n, T))"
SUFFIXES = ("_x.npy",)


def targets_path(path: Path) -> Path:
    """The file of the parameters beside a file of volumes."""
    return path.with_name(path.name[: -len("_x.npy")] + "_y.npy")


def inspect(path: Path) -> FileShape:
    """How many volumes of which shape; reads the two headers.

    Raises:
        OSError: one of the two files cannot be read.
        ValueError: one is damaged, or they do not fit each other.
    """
    x, y = _pair(path)
    return FileShape(num=x.shape[0], size=x.shape[1], channels=x.shape[4], num_targets=y.shape[1], spans=False)


def file_volumes(path: Path) -> Iterator[Volume]:
    """All samples of a pair of files, in order; raises as `inspect` does."""
    import numpy as np

    x, y = _pair(path)
    for place in range(x.shape[0]):
        yield np.array(x[place]), np.array(y[place])


def _pair(path: Path) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
    """Both arrays with a first dimension of samples, mapped."""
    x, y = _mapped(path, "int16"), _mapped(targets_path(path), "float32")
    if (x.ndim, y.ndim) == (4, 1):
        x, y = x[None], y[None]
    if x.ndim != 5 or y.ndim != 2 or x.shape[0] != y.shape[0] or len(set(x.shape[1:4])) != 1 or 0 in x.shape + y.shape:
        raise ValueError(f"shapes {x.shape} and {y.shape}; expected {LAYOUT}")
    return x, y


def _mapped(path: Path, dtype: str) -> Any:
    found = map_array(path)
    if found.dtype != dtype:
        raise ValueError(f"{path.name} is {found.dtype}; expected {LAYOUT}")
    return found


class NpyVolumes:
    """Reads single samples. Files are open only while they are read."""

    def read(self, path: Path, place: int, num: int) -> Volume:
        """The sample at a place of a pair of files that holds `num` of them; raises as `inspect` does."""
        import numpy as np

        x, y = _pair(path)
        if x.shape[0] != num:
            raise ValueError(f"holds {x.shape[0]} volumes, expected {num}")
        return np.array(x[place]), np.array(y[place])

    def close(self) -> None:
        """Nothing is kept open."""

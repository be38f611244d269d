"""Arrays in .npy files (numpy.lib.format), mapped into memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlbench.opening import open_file

if TYPE_CHECKING:
    from numpy.typing import NDArray


def map_array(path: Path) -> NDArray[Any]:
    """The array of a file, read-only and mapped; the file is opened once, where `numpy.load` opens it three times.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError: it is damaged, cut off, or holds Python objects.
    """
    import numpy as np

    with open_file(path) as file:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, is_fortran, dtype = np.lib.format.read_array_header_2_0(file)
        else:
            raise ValueError(f"version {version} of .npy, which only arrays with named fields have")
        if dtype.hasobject:
            raise ValueError("holds Python objects")
        order: Any = "F" if is_fortran else "C"
        return np.memmap(file, dtype=dtype, shape=shape, order=order, mode="r", offset=file.tell())

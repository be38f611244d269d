"""HDF5 and .npy files: opened and read so that damage is an error of one line; HDF5 made with checksums."""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dlbench.lazy import np
from dlbench.opening import open_file, require_file

if TYPE_CHECKING:
    import h5py
    from numpy.typing import NDArray

T = TypeVar("T")
OPEN_AT_MOST = 32  # files kept open by one process
_SMALLEST_SHARE = 1 / 1100  # of its bytes that compression leaves of a dataset; gzip leaves 1/1032
_HEAP, _SIZE = b"GCOL\x01\0\0\0", struct.Struct("<Q")  # how a global heap begins, and how it states sizes


@contextmanager
def damage_as_oserror() -> Iterator[None]:
    """Around everything that reads HDF5: what h5py raises on damaged metadata becomes an OSError with one line.

    Which error it is depends on the byte: RuntimeError, KeyError, TypeError, MemoryError for a size that cannot be.
    ValueError passes, for it is also what our own checks raise.
    Raises OSError: the file is damaged.
    """
    try:
        yield
    except (RuntimeError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0].strip("'\"")
        raise OSError(f"damaged HDF5: {reason}") from None


def open_hdf5(path: Path) -> h5py.File:
    """A file, for reading.

    Raises OSError: it is missing, no regular file, damaged or truncated; of damage the message is HDF5's.
    """
    import h5py

    require_file(path)
    with damage_as_oserror():
        # Nobody writes a data set during a run, and network file systems often lack locks. Whatever HDF5_DRIVER says:
        # volumes are read through this driver's descriptor.
        return h5py.File(path, "r", driver="sec2", locking=False)


def make_hdf5(path: Path) -> h5py.File:
    """A new file, whose bytes depend on its content and the version of the HDF5 library alone.

    Its metadata carry checksums, which HDF5 has since 1.10; datasets have them if they are made with `fletcher32`.
    Raises OSError: the file exists already, or the disk refuses.
    """
    import h5py

    creation = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    creation.set_obj_track_times(False)
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_libver_bounds(h5py.h5f.LIBVER_V110, h5py.h5f.LIBVER_V110)
    return h5py.File(h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_EXCL, creation, access))


def require_plausible(file: h5py.File, dataset: h5py.Dataset) -> None:
    """Before anything of that size is allocated.

    Raises ValueError: values of a dataset lie in other files, which HDF5 replaces by fill values where they are
    missing; or its shape is larger than its file can hold, however well it is compressed.
    """
    name, kind = dataset.name.lstrip("/"), "a link"
    outside = {dataset.file.filename} - {file.filename}
    if dataset.is_virtual:
        kind, outside = "virtual", {source.file_name for source in dataset.virtual_sources()} - {"."}
    elif dataset.external:
        kind, outside = "external", {path for path, _offset, _size in dataset.external}
    if outside:
        first = min(outside)
        raise ValueError(f"{name} is {kind}: its values lie in other files, e.g. {first!r}; write them into this one")
    size = dataset.file.id.get_filesize()
    if math.prod(dataset.shape) * dataset.dtype.itemsize * _SMALLEST_SHARE <= size:
        return
    if not dataset.id.get_storage_size():
        raise ValueError(f"{name} of shape {dataset.shape} was never written: the file stores no value of it")
    raise ValueError(f"{name} of shape {dataset.shape} cannot lie in a file of {size} bytes")


class OpenFiles:
    """Opens files at first use in each process, so that its owner may be pickled or forked."""

    def __init__(self) -> None:
        self._handles: dict[Path, tuple[Any, Any]] = {}  # and what was found in it
        self._owner = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {"_handles": {}, "_owner": -1}

    def found(self, path: Path, look: Callable[[h5py.File], T]) -> T:
        """Returns what `look` finds in a file, which it looks at when that is opened.

        The file opened first gives way when there are too many. Raises as `open_hdf5`, and as `look`.
        """
        if self._owner != os.getpid():  # handles of a parent must not be used, nor closed, in its child
            self._handles, self._owner = {}, os.getpid()
        if path not in self._handles:
            if len(self._handles) >= OPEN_AT_MOST:
                self._handles.pop(next(iter(self._handles)))[0].close()
            file = open_hdf5(path)
            try:
                self._handles[path] = file, look(file)
            except BaseException:
                file.close()
                raise
        content: T = self._handles[path][1]
        return content

    def close(self) -> None:
        for file, _ in self._handles.values():
            file.close()
        self._handles.clear()


def heap_fault(path: Path) -> str | None:
    """What is wrong with the heaps in which HDF5 keeps rows of variable length, or none.

    To be asked before such rows are read: over an object without a size the library goes round without end. What refers
    to the heaps is not looked at. Layout: HDF5 file format specification 3.0, section III.E.
    Raises OSError: the file cannot be read.
    """
    with open_file(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = -1
        while (start := content.find(_HEAP, start + 1)) >= 0:
            (size,) = _SIZE.unpack_from(content, start + 8) if start + 16 <= len(content) else (0,)
            end, place = start + size, start + 16
            if not 16 < size <= len(content) - start:
                return f"damaged HDF5: the heap at byte {start} has a size of {size}"
            while place + 16 <= end:
                number = int.from_bytes(content[place : place + 2], "little")
                (length,) = _SIZE.unpack_from(content, place + 8)
                # Object 0 is the free rest: its size counts its own head.
                taken = length if number == 0 else 16 + length + -length % 8
                if taken < 16 or taken > end - place:
                    return f"damaged HDF5: object {number} at byte {place} of a heap has a size of {length}"
                place += taken
    return None


def map_array(path: Path) -> NDArray[Any]:
    """The array of a file, read-only and mapped.

    Raises OSError: it cannot be read, or is no regular file. ValueError: it is damaged, cut off, or holds Python
    objects.
    """
    require_file(path)
    mapped: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
    return mapped

"""Arrays of data sets: in HDF5 and .npy files, and an index of arrays that one rank of a node packs into shared memory,
so that it lists the files for all.

Format of the index: 8 bytes, the length of a description in JSON (UTF-8), little-endian; the description; then arrays
and byte strings, each aligned to 64 bytes. Nothing in it is executed: dataclasses are named, and must be among those
that the reader expects.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dlbench.lazy import np
from dlbench.opening import open_file, parse_json, require_file

if TYPE_CHECKING:
    import h5py
    from numpy.typing import NDArray

T = TypeVar("T")
OPEN_AT_MOST = 32  # files kept open by one process
_SMALLEST_RATIO = 1 / 1100  # smallest size of a compressed dataset relative to its content; gzip reaches 1/1032
_HEAP, _SIZE = b"GCOL\x01\0\0\0", struct.Struct("<Q")  # signature of a global heap, and format of its sizes
_HEAD = struct.Struct("<q")
_ALIGNED = 64
_KINDS = frozenset("biuf")  # numpy's kinds of the arrays: numbers and booleans


@contextmanager
def damage_as_oserror() -> Iterator[None]:
    """Turns errors of h5py on damaged metadata, but not ValueError, into an OSError of one line."""
    try:
        yield
    except (RuntimeError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0].strip("'\"")
        raise OSError(f"damaged HDF5: {reason}") from None


def open_hdf5(path: Path) -> h5py.File:
    """Opens a file for reading. Raises OSError: it is missing, not a regular file, damaged or truncated."""
    import h5py

    require_file(path)
    with damage_as_oserror():
        # No locking: nobody writes a data set during a run, and network file systems often lack locks. The driver is
        # fixed, because volumes are read through its file descriptor.
        return h5py.File(path, "r", driver="sec2", locking=False)


def make_hdf5(path: Path) -> h5py.File:
    """Creates a file whose bytes depend only on its content and the HDF5 library, with checksums of metadata."""
    import h5py

    creation = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    creation.set_obj_track_times(False)
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_libver_bounds(h5py.h5f.LIBVER_V110, h5py.h5f.LIBVER_V110)
    return h5py.File(h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_EXCL, creation, access))


def require_plausible(file: h5py.File, dataset: h5py.Dataset) -> None:
    """Raises ValueError if a dataset cannot be in its file, before memory of its size is allocated."""
    name, kind = dataset.name.lstrip("/"), "a link"
    other_files = {dataset.file.filename} - {file.filename}
    if dataset.is_virtual:
        kind, other_files = "virtual", {source.file_name for source in dataset.virtual_sources()} - {"."}
    elif dataset.external:
        kind, other_files = "external", {path for path, _offset, _size in dataset.external}
    if other_files:
        raise ValueError(
            f"{name} is {kind}: its values are in other files, e.g. {min(other_files)!r}; write them into this one"
        )
    size = dataset.file.id.get_filesize()
    if math.prod(dataset.shape) * dataset.dtype.itemsize * _SMALLEST_RATIO <= size:
        return
    if not dataset.id.get_storage_size():
        raise ValueError(f"{name} of shape {dataset.shape} was never written: the file stores no value of it")
    raise ValueError(f"{name} of shape {dataset.shape} cannot be stored in a file of {size} bytes")


class OpenFiles:
    """Opens HDF5 files at first use in each process, so that its owner may be pickled or forked."""

    def __init__(self) -> None:
        self._handles: dict[Path, tuple[Any, Any]] = {}  # open file and its content
        self._owner = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {"_handles": {}, "_owner": -1}

    def content(self, path: Path, read: Callable[[h5py.File], T]) -> T:
        """Returns what `read` returned for a file when it was opened; raises its errors and those of `open_hdf5`."""
        if self._owner != os.getpid():  # handles of a parent process must neither be used nor closed in its child
            self._handles, self._owner = {}, os.getpid()
        if path not in self._handles:
            if len(self._handles) >= OPEN_AT_MOST:
                self._handles.pop(next(iter(self._handles)))[0].close()
            file = open_hdf5(path)
            try:
                self._handles[path] = file, read(file)
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
    """Returns what is damaged in the heaps of rows of variable length, or None; the library loops forever at an object
    of size 0. Layout: HDF5 file format specification 3.0, section III.E. Raises OSError: the file cannot be read.
    """
    with open_file(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = -1
        while (start := content.find(_HEAP, start + 1)) >= 0:
            size = 0
            if start + 16 <= len(content):
                (size,) = _SIZE.unpack_from(content, start + 8)
            if not 16 < size <= len(content) - start:
                return f"damaged HDF5: the heap at byte {start} has a size of {size}"
            end, position = start + size, start + 16
            while position + 16 <= end:
                number = int.from_bytes(content[position : position + 2], "little")
                (length,) = _SIZE.unpack_from(content, position + 8)
                # Object 0 is the free space, whose size includes its header.
                object_bytes = length if number == 0 else 16 + length + -length % 8
                if object_bytes < 16 or object_bytes > end - position:
                    return f"damaged HDF5: object {number} at byte {position} of a heap has a size of {length}"
                position += object_bytes
    return None


def map_array(path: Path) -> NDArray[Any]:
    """Memory-maps a .npy file, read-only. Raises OSError or ValueError: it is unreadable, or damaged."""
    require_file(path)
    mapped: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
    return mapped


class Files(Sequence[Path]):
    """Paths of a data set's files, created on access: a million `Path` objects take seconds and 400 MB."""

    def __init__(self, num: int, path: Callable[[int], Path]) -> None:
        self._num, self._path = num, path

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: Any) -> Any:
        numbers = range(self._num)[index]
        if isinstance(numbers, int):
            return self._path(numbers)
        return Files(len(numbers), lambda n: self._path(numbers[n]))

    def __iter__(self) -> Iterator[Path]:
        return map(self._path, range(self._num))  # unlike a generator, threads may share it


def packed(value: Any) -> Iterator[bytes | memoryview]:
    """Yields the pieces of the packed form in their order. `value`: None, a bool, an int, a str, bytes, a Path, an
    array of numbers, or a tuple or a dataclass of these. Raises TypeError: it contains something else.
    """
    blocks: list[bytes | memoryview] = []
    text = json.dumps(_described(value, blocks)).encode("ascii")
    for block in (_HEAD.pack(len(text)) + text, *blocks):
        yield block
        yield bytes(-len(block) % _ALIGNED)


def _described(value: Any, blocks: list[bytes | memoryview]) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Path):
        return {"path": os.fspath(value)}
    if isinstance(value, bytes):
        blocks.append(value)
        return {"bytes": len(value)}
    if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
        flat = np.ascontiguousarray(value)
        blocks.append(flat.reshape(-1).view(np.uint8).data)
        return {"array": flat.dtype.str, "shape": list(flat.shape)}
    if isinstance(value, tuple):
        return [_described(element, blocks) for element in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _described(getattr(value, field.name), blocks) for field in dataclasses.fields(value)}
        return {"dataclass": type(value).__name__, "fields": fields}
    raise TypeError(f"{type(value).__name__} cannot be packed into an index")


def unpacked(data: memoryview, expected: Sequence[type]) -> Any:
    """Returns the value that `packed` was given; arrays are read-only views of `data`. `expected`: its dataclasses."""
    dataclass_types: Mapping[str, Callable[..., Any]] = {cls.__name__: cls for cls in expected}
    position = _HEAD.size

    def block(length: int) -> memoryview:
        """Returns the next block; they are read in the order in which they were written."""
        nonlocal position
        begin, end = position, position + length
        position = end + -end % _ALIGNED
        return data[begin:end]

    def value(described: Any) -> Any:
        if isinstance(described, list):
            return tuple(value(element) for element in described)
        if not isinstance(described, dict):
            return described
        if "path" in described:
            return Path(described["path"])
        if "bytes" in described:
            return bytes(block(int(described["bytes"])))
        if "array" not in described:
            fields = {name: value(field) for name, field in described["fields"].items()}
            return dataclass_types[described["dataclass"]](**fields)
        dtype, shape = np.dtype(str(described["array"])), [int(edge) for edge in described["shape"]]
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        array = np.frombuffer(block(num_bytes) or b"", dtype).reshape(shape)
        array.flags.writeable = False
        return array

    return value(parse_json(bytes(block(_HEAD.unpack_from(data)[0]))))

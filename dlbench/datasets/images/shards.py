"""Shards of images with random access: one positioned read a sample, from a bounded number of open files.

A folder of shards (see shard_scan) and, if dlbench wrote them, `index.npz`: the array of a `ShardIndex` by their names,
and `about`, the UTF-8 bytes of a JSON object `{"format": "dlbench.image-index", "version": 1, "container", "shards",
"sizes", "classes", "remarks"}`. A folder without an index is scanned each time it is opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import zipfile
from collections import OrderedDict
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from dlbench.datasets.containers.tfrecord import read_record_at
from dlbench.datasets.images.shard_scan import RECORD_HEAD, ShardIndex, index_text, scan_shards, shard_names
from dlbench.errors import UserError
from dlbench.opening import descriptor, open_file, parse_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

INDEX = "index.npz"
_FORMAT = {"format": "dlbench.image-index", "version": 1}
_ARRAYS = {"shard": "int32", "records": "int64", "offsets": "int64", "lengths": "int32", "labels": "int32"}
_LISTS = ("shards", "sizes", "classes", "remarks")
_MEMBER = "{}.npy"
"""What numpy calls an array in an archive."""
_MAX_ABOUT = 1 << 28
"""Bytes of the lists of an index at most: names of shards and classes."""


class ImageShards:
    """Labelled encoded images in shards; an `ImageSet` of dlbench.datasets.images.image_set.

    Files are opened at first use in each copy. They are only read at given positions, so that a forked process may go
    on with those of its parent.

    Args:
        root: the folder.
        index: of the shards in it.
        open_at_most: shards kept open; None: a quarter of what the process may open.
    """

    def __init__(self, root: Path, index: ShardIndex, open_at_most: int | None = None) -> None:
        self.root, self.index = root, index
        # The rest is for data loaders, which pass tensors between processes as descriptors.
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._open_at_most = open_at_most or max(8, min(4096, allowed // 4))
        self._descriptors: OrderedDict[int, int] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptors": OrderedDict()}

    def __del__(self) -> None:
        self.close()

    @property
    def kind(self) -> str:
        """`tar` or `tfrecord`."""
        return self.index.container

    @property
    def num_samples(self) -> int:
        """Images in all shards."""
        return len(self.index.labels)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; the position is the label."""
        return self.index.classes

    @property
    def remarks(self) -> tuple[str, ...]:
        """How the labels were understood, and what was passed over."""
        return self.index.remarks

    @cached_property
    def sha256(self) -> str:
        """Digest of names and sizes of shards, and of length and label of each image."""
        digest = hashlib.sha256(index_text(self.index))
        digest.update(self.index.lengths.tobytes())
        digest.update(self.index.labels.tobytes())
        return digest.hexdigest()

    def label(self, index: int) -> int:
        """The label of one sample."""
        return int(self.index.labels[index])

    @property
    def labels(self) -> NDArray[np.int32]:
        """(num_samples,) the label of each sample."""
        return self.index.labels

    def num_bytes(self, index: int) -> int:
        """Length of one encoded image."""
        return int(self.index.lengths[index])

    def read(self, index: int) -> bytes:
        """The encoded bytes of one sample; of a TFRecord the checksum is compared.

        Raises:
            OSError: the shard is missing or cannot be read.
            ValueError: the shard is cut off, or the checksum of the record differs.
            EnvironmentLacksError: google-crc32c is not installed (TFRecord).
        """
        table = self.index
        descriptor = self._descriptor(int(table.shard[index]))
        offset, length = int(table.offsets[index]), int(table.lengths[index])
        if table.container == "tfrecord":
            record = int(table.records[index])
            start = offset - record - RECORD_HEAD
            return read_record_at(descriptor, record)[start : start + length] if length else b""
        data = os.pread(descriptor, length, offset)
        if len(data) < length:
            raise ValueError(f"cut off, {len(data)} of {length} bytes are there")
        return data

    def name(self, index: int) -> str:
        """The shard, quoted, and the member or record in it."""
        path = self.root / self.index.shards[int(self.index.shard[index])]
        return f"{str(path)!r}, {self._place(index)}"

    def filename(self, index: int) -> str:
        """The shard, and the member or record in it."""
        return f"{self.index.shards[int(self.index.shard[index])]}, {self._place(index)}"

    def _place(self, index: int) -> str:
        shard, record = int(self.index.shard[index]), int(self.index.records[index])
        if self.index.container == "tfrecord":
            return f"record at byte {record}"
        try:
            start = os.pread(self._descriptor(shard), 100, record)
        except OSError:  # the name is wanted for a message about a file that cannot be read
            start = b""
        member = start.partition(b"\0")[0].decode("utf-8", "backslashreplace")
        return f"member {member!r}" if member else f"member at byte {record}"

    def files(self) -> list[Path]:
        """The shards."""
        return [self.root / name for name in self.index.shards]

    def close(self) -> None:
        """Closes all shards; reading again opens them again."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _descriptor(self, shard: int) -> int:
        found = self._descriptors.get(shard)
        if found is not None:
            self._descriptors.move_to_end(shard)
            return found
        while len(self._descriptors) >= self._open_at_most:
            os.close(self._descriptors.popitem(last=False)[1])
        opened = descriptor(self.root / self.index.shards[shard])
        self._descriptors[shard] = opened
        return opened


def holds_shards(folder: Path) -> bool:
    """Whether a folder holds image shards or an index of them."""
    return (folder / INDEX).is_file() or shard_names(folder) is not None


def open_image_shards(folder: Path) -> ImageShards:
    """Opens a folder of shards by its index, or by reading all headers if it has none.

    Raises:
        UserError: no shards; the index is damaged; or a shard is missing, damaged or not of the size that the index
            says.
    """
    if not (folder / INDEX).is_file():
        return ImageShards(folder, scan_shards(folder))
    index = load_index(folder)
    for name, size in zip(index.shards, index.sizes, strict=True):
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            raise UserError(f"{str(folder / name)!r}: {error.strerror}; {INDEX} lists it, copy the set anew") from None
        if found != size:
            raise UserError(f"{str(folder / name)!r}: {found} bytes, {INDEX} says {size}; copy the set anew")
    return ImageShards(folder, index)


def save_index(index: ShardIndex, folder: Path) -> None:
    """Writes `index.npz` into a folder, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    import numpy as np

    about = json.dumps({**_FORMAT, **json.loads(index_text(index))}).encode("ascii")
    temporary = folder / f".{INDEX}.partial"
    with temporary.open("wb") as file:
        arrays = {name: getattr(index, name) for name in _ARRAYS}
        np.savez(file, allow_pickle=False, about=np.frombuffer(about, dtype=np.uint8), **arrays)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / INDEX)


def load_index(folder: Path) -> ShardIndex:
    """Reads `index.npz`.

    Raises:
        UserError: it is missing, damaged, or of another form.
    """
    import numpy as np

    path = folder / INDEX
    try:
        # Opened here, because numpy leaves a file open that is no archive.
        with open_file(path) as raw, np.load(raw, allow_pickle=False) as file:
            about = parse_json(file["about"].tobytes())
            arrays = {name: file[name] for name in _ARRAYS}
        form = {key: about[key] for key in _FORMAT}
        lists: dict[str, Any] = {name: tuple(about[name]) for name in _LISTS}
        container = str(about["container"])
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{str(path)!r}: not a whole index of images: {_first_line(error)}; remove it") from None
    shapes = {array.shape for array in arrays.values()}
    kinds = all(array.dtype == _ARRAYS[name] for name, array in arrays.items())
    if form != _FORMAT or len(shapes) != 1 or not kinds or len(lists["shards"]) != len(lists["sizes"]):
        raise UserError(f"{str(path)!r}: not an index of images of this form; remove it, and the shards are scanned")
    return ShardIndex(container=container, **lists, **arrays)


def index_size(folder: Path) -> tuple[int, int]:
    """Images and classes that `index.npz` says, without reading its arrays.

    Raises:
        UserError: it is missing, damaged, or of another form.
    """
    import numpy as np

    path = folder / INDEX
    try:
        with open_file(path) as raw, np.load(raw, allow_pickle=False) as file:
            with file.zip.open(_MEMBER.format("labels")) as member:
                shape = _array_header(member)
            with file.zip.open(_MEMBER.format("about")) as member:
                _array_header(member)
                about = parse_json(member.read(_MAX_ABOUT))
        return int(shape[0]), len(about["classes"])
    except (OSError, ValueError, KeyError, TypeError, IndexError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{str(path)!r}: not a whole index of images: {_first_line(error)}; remove it") from None


def _array_header(member: IO[bytes]) -> tuple[int, ...]:
    """The shape of an array; afterwards the stream stands at its first value."""
    import numpy as np

    np.lib.format.read_magic(member)
    shape: tuple[int, ...] = np.lib.format.read_array_header_1_0(member)[0]
    return shape


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

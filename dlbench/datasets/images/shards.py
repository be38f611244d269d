"""Reads image shards with random access: one positioned read per sample, from a bounded number of open files.

Shards that dlbench wrote have an `index.npz`: the arrays of a `ShardIndex` by name, and `about`, the UTF-8 bytes of a
JSON object `{"format": "dlbench.image-index", "version": 1, "container", "shards", "sizes", "classes", "remarks"}`.
Other shards are scanned each time they are opened; a scan reads only headers, not the images.

- tar (webdataset.github.io): members `<key>.jpg` and `<key>.cls` next to each other, in any order; the second holds the
  label in decimal digits. Other members are counted. Links, devices and sparse files as images or labels are refused,
  and so are absolute names and `..`: nothing in an archive is ever followed or unpacked.
- TFRecord: one `tf.train.Example` per record with `image/encoded` (bytes), `image/class/label` (int64) and optionally
  `image/class/synset`, the name of the class. The public ImageNet records count labels from 1, with 0 for a background
  class without images: if 1 is the smallest label, labels are lowered by one, and a remark says so.
"""

from __future__ import annotations

import hashlib
import io
import json
import mmap
import os
import re
import resource
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlbench.datasets.splits import Split, other_split, sample_names
from dlbench.datasets.tfrecord import FRAME, example_views, read_record_at, record_offsets
from dlbench.errors import UserError, first_line
from dlbench.lazy import np
from dlbench.opening import descriptor, open_file, parse_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_IMAGE = 1 << 30
"""Largest size of a file in bytes: a JPEG has at most 65,535 by 65,535 pixels, and photographs have far fewer."""
IMAGE, LABEL, SYNSET, FILENAME = "image/encoded", "image/class/label", "image/class/synset", "image/filename"
"""Names of features in a TFRecord of images."""
RECORD_HEAD = 12  # bytes of a record before its payload: length and its checksum
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
LABEL_SUFFIX = "cls"
_PATTERNS = {"tar": re.compile(r".+\.tar"), "tfrecord": re.compile(r".+\.tfrecords?|.+-\d+-of-\d+")}
_CLASS_TAR = re.compile(r"n\d{8}\.tar")  # of ImageNet's archive of training images, which holds one for each class
_COMPRESSION_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
CLASS_TARS = (
    "ImageNet's class tars, one for each class: unpack each into a folder of its name, for f in *.tar; do "
    'mkdir "${f%.tar}" && tar -xf "$f" -C "${f%.tar}"; done, and move the tars away'
)
SHARD_LAYOUT = "*.tar, *.tfrecord or *-00000-of-01024"
_MAX_HEADERS = 1 << 20  # most bytes of the headers of one tar member that are read for its name
_MAX_NAME = 200  # most characters of a member's name in a message
_MAX_CLASSES = 10_000_000  # a larger label is considered damage
INDEX = "index.npz"
_FORMAT = {"format": "dlbench.image-index", "version": 1}
_ARRAYS = {"shard": "int32", "records": "int64", "offsets": "int64", "lengths": "int32", "labels": "int32"}
_LISTS = ("shards", "sizes", "classes", "remarks")


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardIndex:
    """The position of each sample. About 28 bytes per sample: 36 MB for ImageNet."""

    container: str  # `tar` or `tfrecord`
    shards: tuple[str, ...]  # file names, sorted
    sizes: tuple[int, ...]  # bytes of each shard
    classes: tuple[str, ...]  # names by label; digits if the shards have no names
    shard: NDArray[np.int32]  # (num_samples,) the shard of each sample
    records: NDArray[np.int64]  # (num_samples,) byte at which the tar member's header, or the record, starts
    offsets: NDArray[np.int64]  # (num_samples,) byte at which the encoded image starts
    lengths: NDArray[np.int32]  # (num_samples,) bytes of the encoded image
    labels: NDArray[np.int32]  # (num_samples,) counted from 0
    remarks: tuple[str, ...] = ()


@dataclass
class _Rows:
    records: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    num_ignored: int = 0  # tar members that are neither image nor label
    first_ignored: str = ""

    def add(self, record: int, offset: int, length: int, label: int) -> None:
        if not 0 <= label < _MAX_CLASSES:
            raise ValueError(f"label {label} of the image at byte {offset}: not a class number")
        if length > MAX_IMAGE:
            raise ValueError(f"the image at byte {offset} has {length} bytes, more than any image")
        self.records.append(record)
        self.offsets.append(offset)
        self.lengths.append(length)
        self.labels.append(label)


def shard_names(folder: Path, split: Split | None = None) -> tuple[str, list[str]] | None:
    """Returns the container and the sorted file names of the shards in a folder; None if it holds none."""
    try:
        files = sorted(p.name for p in folder.iterdir() if not p.name.startswith(".") and p.is_file())
    except OSError:  # the caller looks for a tree next, and reports the error
        return None
    names_by_container = shards_among(files)
    if len(names_by_container) > 1:
        raise UserError(f"{str(folder)!r} holds tar and TFRecord files; keep one of the two")
    for container, names in names_by_container.items():
        return container, sample_names(folder, files, frozenset(names).__contains__, split, SHARD_LAYOUT)
    return None


def holds_class_tars(names: Sequence[str]) -> bool:
    """Returns whether all tar files are, by their names, class archives of ImageNet's training images."""
    tars = [name for name in names if name.endswith(".tar")]
    return bool(tars) and all(_CLASS_TAR.fullmatch(name) for name in tars)


def shards_among(names: Sequence[str]) -> dict[str, list[str]]:
    """Returns the names of shards among names of files, by container."""
    by_container: dict[str, list[str]] = {}
    for container, pattern in _PATTERNS.items():
        if shards := list(filter(pattern.fullmatch, names)):
            by_container[container] = shards
    return by_container


def scan_shards(
    folder: Path, *, classes: Sequence[str] | None = None, first_label: int | None = None, split: Split | None = None
) -> ShardIndex:
    """Reads the headers of all shards of a folder. `classes`: names of the classes; None: from the shards, or digits.
    `first_label`: number of the first class in the shards; None: 1 in TFRecords if it is the smallest label of both
    splits, else 0. `split`: to read if the names of the shards distinguish two.
    """
    shards = shard_names(folder, split)
    if shards is None:
        raise UserError(f"{str(folder)!r} holds no shards; expected {SHARD_LAYOUT}")
    container, names = shards
    tables, sizes, synsets = [], [], dict[int, str]()
    if holds_class_tars(names):
        raise UserError(f"{str(folder)!r} holds {CLASS_TARS}")
    for name in names:
        tables.append(_scan(folder / name, container, synsets))
        sizes.append((folder / name).stat().st_size)
    labels = np.concatenate([np.array(table.labels, dtype=np.int32) for table in tables])
    if not len(labels):
        reason = ""
        if member := next((table.first_ignored for table in tables if table.num_ignored), ""):
            endings = ", ".join(f".{suffix}" for suffix in IMAGE_SUFFIXES)
            reason = f": {_short(member)} does not end in {endings}; an ending begins at the first dot of a file's name"
        raise UserError(f"{str(folder)!r}: the shards hold no image{reason}")
    remarks = []
    last_label = int(labels.max())
    if first_label is None:
        first_label = 0
        if container == "tfrecord" and labels.min() > 0:
            all_labels = [int(labels.min()), last_label, *_labels_of_other_split(folder, split, synsets)]
            last_label = max(all_labels)
            if min(all_labels) == 1:
                first_label = 1
                remarks.append(
                    "labels in the records count from 1 (0 is the background class); they were lowered by one"
                )
    if num_ignored := sum(table.num_ignored for table in tables):
        remarks.append(f"members of the tar files that are neither image nor label, ignored: {num_ignored}")
    return ShardIndex(
        container=container,
        shards=tuple(names),
        sizes=tuple(sizes),
        classes=_class_names(folder, labels, first_label, last_label, classes, synsets),
        shard=np.repeat(np.arange(len(names), dtype=np.int32), [len(table.labels) for table in tables]),
        records=np.concatenate([np.array(table.records, dtype=np.int64) for table in tables]),
        offsets=np.concatenate([np.array(table.offsets, dtype=np.int64) for table in tables]),
        lengths=np.concatenate([np.array(table.lengths, dtype=np.int32) for table in tables]),
        labels=labels - np.int32(first_label),
        remarks=tuple(remarks),
    )


def _labels_of_other_split(folder: Path, split: Split | None, synsets: dict[int, str]) -> list[int]:
    other = other_split(folder, split)
    if other is None:
        return []
    labels: list[int] = []
    container, names = shard_names(*other) or ("", [])
    if container == "tfrecord":
        for name in names:
            labels += _scan(other[0] / name, container, synsets).labels
    return labels


def _scan(path: Path, container: str, synsets: dict[int, str]) -> _Rows:
    try:
        if container == "tar":
            return _scan_tar(path)
        return _scan_records(path, synsets)
    except OSError as error:
        raise UserError(f"{str(path)!r}: cannot be read: {error.strerror or error}") from None
    except (ValueError, OverflowError, tarfile.TarError) as error:
        raise UserError(f"{str(path)!r}: not an intact shard of images: {error}") from None


def _class_names(
    folder: Path,
    labels: NDArray[np.int32],
    first: int,
    last: int,
    classes: Sequence[str] | None,
    synsets: dict[int, str],
) -> tuple[str, ...]:
    low, high = int(labels.min()) - first, last - first
    if low < 0 or (classes is not None and high >= len(classes)):
        expected = str(first)
        if classes is not None:
            expected += f" to {len(classes) - 1 + first}"
        raise UserError(f"{str(folder)!r}: labels {low + first} to {high + first}, expected {expected}")
    if classes is not None:
        return tuple(classes)
    return tuple(synsets.get(label + first, str(label)) for label in range(high + 1))


class _Bounded(io.BufferedReader):
    """A file that reads at most its own size at once: tarfile would allocate any size that a damaged header claims."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(descriptor(path)))
        self._size = os.fstat(self.fileno()).st_size

    def read(self, num_bytes: int | None = -1, /) -> bytes:
        """Reads at most `num_bytes`. Raises ValueError: the number is negative."""
        if num_bytes is None or num_bytes < 0:
            raise ValueError(f"a header claims a size of {num_bytes} bytes")
        return super().read(min(num_bytes, self._size))


def _scan_tar(path: Path) -> _Rows:
    _require_uncompressed(path)
    rows = _Rows()
    image: tarfile.TarInfo | None = None
    label: int | None = None
    image_key = label_key = ("", "")
    with _Bounded(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            tar.members = []  # type: ignore[attr-defined]  # tarfile would keep all members
            _require_safe(member)
            if member.isdir():
                continue
            # The key is the path up to the first dot of the file's name.
            folder, _, base = member.name.rpartition("/")
            name, _, suffix = base.partition(".")
            if suffix.lower() == LABEL_SUFFIX:
                label, label_key = _stored_label(member, file.fileno()), (folder, name)
            elif suffix.lower() in IMAGE_SUFFIXES:
                _require_stored(member)
                if image is not None:
                    raise _unlabelled(image)
                image, image_key = member, (folder, name)
            else:
                rows.num_ignored += 1
                rows.first_ignored = rows.first_ignored or member.name
            if image is not None and label is not None:
                if image_key != label_key:
                    raise _unlabelled(image)
                rows.add(image.offset, image.offset_data, image.size, label)
                image = label = None
        if image is not None:
            raise _unlabelled(image)
        if tar.offset > path.stat().st_size:
            raise ValueError(f"truncated: ends before byte {tar.offset}")
    return rows


def _require_uncompressed(path: Path) -> None:
    with open_file(path) as file:
        head = file.read(max(map(len, _COMPRESSION_MAGIC)))
    for magic, program in _COMPRESSION_MAGIC.items():
        if head.startswith(magic):
            raise ValueError(f"it is compressed with {program}, which prevents random access; decompress it")


def _require_safe(member: tarfile.TarInfo) -> None:
    if member.name.startswith("/") or ".." in member.name.split("/"):
        raise ValueError(f"member {_short(member.name)} points outside of the archive")
    if member.size < 0:
        raise ValueError(f"member {_short(member.name)} has {member.size} bytes")


def _require_stored(member: tarfile.TarInfo) -> None:
    if not member.isreg() or member.issparse():
        raise ValueError(
            f"member {_short(member.name)} is a link, a device, a pipe or sparse; create the archive again with the "
            "files themselves"
        )


def _stored_label(member: tarfile.TarInfo, descriptor: int) -> int:
    _require_stored(member)
    text = os.pread(descriptor, min(member.size, 20), member.offset_data)
    if not text.strip().isdigit():
        raise ValueError(f"member {_short(member.name)} holds {text!r}, not a label in digits")
    return int(text)


def _unlabelled(image: tarfile.TarInfo) -> ValueError:
    return ValueError(f"member {_short(image.name)} has no .{LABEL_SUFFIX} next to it")


def _short(name: str) -> str:
    if len(name) > _MAX_NAME:
        return repr(f"{name[:_MAX_NAME]}...")
    return repr(name)


def _scan_records(path: Path, synsets: dict[int, str]) -> _Rows:
    rows = _Rows()
    starts = record_offsets(path)
    if not len(starts):
        return rows
    ends = np.append(starts[1:], path.stat().st_size) + RECORD_HEAD - FRAME
    with open_file(path) as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    mapped.madvise(mmap.MADV_RANDOM)  # without it the kernel's read-ahead would read nearly the whole file
    view = memoryview(mapped)
    base = _address(view)
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        features = example_views(view[start + RECORD_HEAD : end])
        image, label = features.get(IMAGE), features.get(LABEL)
        if not isinstance(image, list) or len(image) != 1 or label is None or len(label) != 1:
            raise ValueError(f"record at byte {start}: needs one {IMAGE} (bytes) and one {LABEL} (int64)")
        offset = _address(image[0]) - base if len(image[0]) else start
        rows.add(start, offset, len(image[0]), int(label[0]))
        if int(label[0]) not in synsets and (synset := features.get(SYNSET)):
            synsets[int(label[0])] = bytes(synset[0]).decode("utf-8", "backslashreplace")
    return rows


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])


def index_text(index: ShardIndex) -> bytes:
    """Returns the fields of an index other than its arrays, as JSON."""
    names = ("container", "shards", "sizes", "classes", "remarks")
    return json.dumps({name: getattr(index, name) for name in names}).encode("ascii")


class ImageSet:
    """Labelled encoded images with random access. Can be pickled; a copy opens its own files."""

    kind: str  # `jpeg-tree`, `tar` or `tfrecord`
    root: Path
    classes: tuple[str, ...]  # names of the classes; the position is the label
    labels: NDArray[np.int32]  # (num_samples,) the label of each sample
    sha256: str  # digest of the index (names or sizes, and labels), hexadecimal; image contents are not read
    remarks: tuple[str, ...]  # one line for each assumption made about the set, e.g. which files were ignored

    @property
    def num_samples(self) -> int:
        return len(self.labels)

    def label(self, index: int) -> int:
        return int(self.labels[index])

    def num_bytes(self, index: int) -> int:
        """Returns the length of the encoded image. Raises OSError: its file is missing."""
        raise NotImplementedError

    def read(self, index: int) -> bytes:
        """Reads the encoded bytes of one sample. Raises OSError, ValueError or EnvironmentLacksError: unreadable."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        """Returns the file of one sample and the position in it, for messages; never fails."""
        raise NotImplementedError

    def files(self) -> Sequence[Path]:
        """Returns the files that samples are read from."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes files; reading again opens them again."""


class ImageShards(ImageSet):
    """Labelled encoded images in shards. Files are opened at first use in each copy, and are read only at given
    positions, so that a forked process can use its parent's. `open_at_most`: shards kept open; None: a quarter of the
    process's limit.
    """

    def __init__(self, root: Path, index: ShardIndex, open_at_most: int | None = None) -> None:
        self.root, self.index, self.kind = root, index, index.container
        self.classes, self.remarks, self.labels = index.classes, index.remarks, index.labels
        # Data loaders need descriptors, too: they pass tensors between processes as file descriptors.
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._open_at_most = open_at_most or max(8, min(4096, allowed // 4))
        self._descriptors: OrderedDict[int, int] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptors": OrderedDict()}

    def __del__(self) -> None:
        self.close()

    @cached_property
    def sha256(self) -> str:  # type: ignore[override]
        digest = hashlib.sha256(index_text(self.index))
        digest.update(self.index.lengths.tobytes())
        digest.update(self.index.labels.tobytes())
        return digest.hexdigest()

    def num_bytes(self, index: int) -> int:
        return int(self.index.lengths[index])

    def read(self, index: int) -> bytes:
        table = self.index
        descriptor = self._descriptor(int(table.shard[index]))
        offset, length = int(table.offsets[index]), int(table.lengths[index])
        if table.container == "tfrecord":
            record = int(table.records[index])
            if not length:
                return b""
            start = offset - record - RECORD_HEAD
            return read_record_at(descriptor, record)[start : start + length]
        data = os.pread(descriptor, length, offset)
        if len(data) < length:
            raise ValueError(f"truncated, {len(data)} of {length} bytes are there")
        return data

    def name(self, index: int) -> str:
        path = self.root / self.index.shards[int(self.index.shard[index])]
        return f"{str(path)!r}, {self._position(index)}"

    def _position(self, index: int) -> str:
        shard, record = int(self.index.shard[index]), int(self.index.records[index])
        if self.index.container == "tfrecord":
            return f"record at byte {record}"
        length = min(int(self.index.offsets[index]) - record, _MAX_HEADERS)
        try:
            headers = io.BytesIO(os.pread(self._descriptor(shard), max(0, length), record))
            with tarfile.open(fileobj=headers, mode="r:") as tar:
                for member in tar:
                    return f"member {_short(member.name)}"
        except (OSError, ValueError, OverflowError, tarfile.TarError):
            pass  # the message is about a file that cannot be read
        return f"member at byte {record}"

    def files(self) -> list[Path]:
        return [self.root / name for name in self.index.shards]

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _descriptor(self, shard: int) -> int:
        open_descriptor = self._descriptors.get(shard)
        if open_descriptor is not None:
            self._descriptors.move_to_end(shard)
            return open_descriptor
        while len(self._descriptors) >= self._open_at_most:
            os.close(self._descriptors.popitem(last=False)[1])
        new_descriptor = descriptor(self.root / self.index.shards[shard])
        self._descriptors[shard] = new_descriptor
        return new_descriptor


def holds_shards(folder: Path) -> bool:
    """Returns whether a folder holds image shards or an index of them."""
    return (folder / INDEX).is_file() or shard_names(folder, "train") is not None


def open_image_shards(folder: Path, split: Split | None = None) -> ImageShards:
    """Opens a folder of shards by its index, or by a scan if it has none."""
    if not (folder / INDEX).is_file():
        return ImageShards(folder, scan_shards(folder, split=split))
    index = load_index(folder)
    for name, size in zip(index.shards, index.sizes, strict=True):
        try:
            actual_size = (folder / name).stat().st_size
        except OSError as error:
            raise UserError(f"{str(folder / name)!r}: {error.strerror}; {INDEX} lists it, copy the set again") from None
        if actual_size != size:
            raise UserError(f"{str(folder / name)!r}: {actual_size} bytes, {INDEX} says {size}; copy the set again")
    return ImageShards(folder, index)


def save_index(index: ShardIndex, folder: Path) -> None:
    """Writes `index.npz` into a folder, whole or not at all. Raises OSError: it cannot be written."""
    about = json.dumps({**_FORMAT, **json.loads(index_text(index))}).encode("ascii")
    temporary = folder / f".{INDEX}.partial"
    with temporary.open("wb") as file:
        arrays = {name: getattr(index, name) for name in _ARRAYS}
        np.savez(file, allow_pickle=False, about=np.frombuffer(about, dtype=np.uint8), **arrays)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / INDEX)


def load_index(folder: Path) -> ShardIndex:
    """Reads `index.npz`."""
    path = folder / INDEX
    try:
        # Opened here, because numpy would leave a file open that is not an archive.
        with open_file(path) as raw, np.load(raw, allow_pickle=False) as file:
            about = parse_json(file["about"].tobytes())
            arrays = {name: file[name] for name in _ARRAYS}
        form = {key: about[key] for key in _FORMAT}
        lists: dict[str, Any] = {name: tuple(about[name]) for name in _LISTS}
        container = str(about["container"])
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{str(path)!r}: not an intact index of images: {first_line(error)}; remove it") from None
    shapes = {array.shape for array in arrays.values()}
    has_types = all(array.dtype == _ARRAYS[name] for name, array in arrays.items())
    if form != _FORMAT or len(shapes) != 1 or not has_types or len(lists["shards"]) != len(lists["sizes"]):
        raise UserError(f"{str(path)!r}: not an index of images of this version; remove it, and the shards are scanned")
    return ShardIndex(container=container, **lists, **arrays)

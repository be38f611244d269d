"""Shards of images with random access: one positioned read per sample, from a bounded number of open files.

A folder of shards and, if dlbench wrote them, `index.npz`: the array of a `ShardIndex` by their names,
and `about`, the UTF-8 bytes of a JSON object `{"format": "dlbench.image-index", "version": 1, "container", "shards",
"sizes", "classes", "remarks"}`. A folder without an index is scanned each time it is opened.

What a scan reads:

- tar (webdataset.github.io): members `<key>.jpg` and `<key>.cls`, in any order but side by side; the second holds the
  label in decimal digits. Members with other endings are passed over and counted. An image or label that is a link, a
  device or a sparse file, and any member whose name is absolute or climbs with `..`, is refused: nothing in an archive
  is ever followed or unpacked, and a set whose names point elsewhere is not what it says.
- TFRecord: one `tf.train.Example` per record with `image/encoded` (bytes) and `image/class/label` (int64), and perhaps
  `image/class/synset`, the name of the class. The public ImageNet records count labels from 1 and keep 0 for a
  background class that has no images; if 1 is the smallest label of all, labels are lowered by one, and a remark says
  so.

Only headers are read, not the images: some microseconds per sample, and two or three small reads.
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

from dlbench.datasets.account import sample_names
from dlbench.datasets.splits import Split, other_split
from dlbench.datasets.tfrecord import FRAME, example_views, read_record_at, record_offsets
from dlbench.errors import UserError, first_line
from dlbench.lazy import np
from dlbench.opening import descriptor, open_file, parse_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_IMAGE = 1 << 30
"""Bytes of a file at most: a JPEG has at most 65,535 by 65,535 pixels, and none of photographs comes near this."""
IMAGE, LABEL, SYNSET, FILENAME = "image/encoded", "image/class/label", "image/class/synset", "image/filename"
"""Names of features in a TFRecord of images."""
RECORD_HEAD = 12  # bytes of a record before its payload: length and its checksum
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
LABEL_SUFFIX = "cls"
_PATTERNS = {"tar": re.compile(r".+\.tar"), "tfrecord": re.compile(r".+\.tfrecords?|.+-\d+-of-\d+")}
_CLASS_TAR = re.compile(r"n\d{8}\.tar")  # of ImageNet's archive of training images, which holds one for each class
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
CLASS_TARS = (
    "ImageNet's class tars, one for each class: unpack each into a folder of its name, for f in *.tar; do "
    'mkdir "${f%.tar}" && tar -xf "$f" -C "${f%.tar}"; done, and move the tars away'
)
SHARD_LAYOUT = "*.tar, *.tfrecord or *-00000-of-01024"
_MAX_HEADERS = 1 << 20  # bytes of the headers of one tar member that are read for its name, at most
_MAX_NAME = 200  # characters of a member's name that a message holds, at most
_MOST_CLASSES = 10_000_000  # a label beyond is taken for damage; it would make as many names
INDEX = "index.npz"
_FORMAT = {"format": "dlbench.image-index", "version": 1}
_ARRAYS = {"shard": "int32", "records": "int64", "offsets": "int64", "lengths": "int32", "labels": "int32"}
_LISTS = ("shards", "sizes", "classes", "remarks")


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardIndex:
    """Where each sample is. About 28 bytes per sample: 36 MB for ImageNet."""

    container: str  # `tar` or `tfrecord`
    shards: tuple[str, ...]  # file names, sorted
    sizes: tuple[int, ...]  # bytes of each shard
    classes: tuple[str, ...]  # By label; digits where the shards do not name them.
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
    passed_over: int = 0  # tar members that are neither image nor label
    first_passed_over: str = ""

    def add(self, record: int, offset: int, length: int, label: int) -> None:
        if not 0 <= label < _MOST_CLASSES:
            raise ValueError(f"label {label} of the image at byte {offset}: no class number")
        if length > MAX_IMAGE:
            raise ValueError(f"the image at byte {offset} has {length} bytes, which no image has")
        self.records.append(record)
        self.offsets.append(offset)
        self.lengths.append(length)
        self.labels.append(label)


def shard_names(folder: Path, split: Split | None = None) -> tuple[str, list[str]] | None:
    """The container and the sorted file names of the shards in a folder; None if it holds none."""
    try:
        files = sorted(p.name for p in folder.iterdir() if not p.name.startswith(".") and p.is_file())
    except OSError:  # the caller looks for a tree next, and says what is wrong
        return None
    found = shards_among(files)
    if len(found) > 1:
        raise UserError(f"{str(folder)!r} holds tar and TFRecord files; keep one of the two")
    for container, names in found.items():
        return container, sample_names(folder, files, frozenset(names).__contains__, split, SHARD_LAYOUT)
    return None


def holds_class_tars(names: Sequence[str]) -> bool:
    """Returns whether tar files are those that ImageNet's archive of training images is made of, by their names."""
    tars = [name for name in names if name.endswith(".tar")]
    return bool(tars) and all(_CLASS_TAR.fullmatch(name) for name in tars)


def shards_among(names: Sequence[str]) -> dict[str, list[str]]:
    """Those of the names of files that are shards, by container."""
    return {c: found for c, p in _PATTERNS.items() if (found := [name for name in names if p.fullmatch(name)])}


def scan_shards(
    folder: Path,
    *,
    classes: Sequence[str] | None = None,
    first_label: int | None = None,
    split: Split | None = None,
) -> ShardIndex:
    """Reads the headers of all shards of a folder.

    `folder`: with shards of one container. `classes`: names of the classes; None: as the shards name them, or digits.
    `first_label`: number of the first class in the shards; None: 1 in TFRecords if it is the smallest label of both
    splits, else 0. `split`: which of two splits that names tell apart is wanted.
    """
    found = shard_names(folder, split)
    if found is None:
        raise UserError(f"{str(folder)!r} holds no shards; expected {SHARD_LAYOUT}")
    container, names = found
    tables, sizes, synsets = [], [], dict[int, str]()
    if holds_class_tars(names):
        raise UserError(f"{str(folder)!r} holds {CLASS_TARS}")
    for name in names:
        tables.append(_scan(folder / name, container, synsets))
        sizes.append((folder / name).stat().st_size)
    labels = np.concatenate([np.array(t.labels, dtype=np.int32) for t in tables])
    if not len(labels):
        reason = ""
        member = next((table.first_passed_over for table in tables if table.passed_over), None)
        if member is not None:
            endings = ", ".join(f".{suffix}" for suffix in IMAGE_SUFFIXES)
            reason = f": {_short(member)} does not end in {endings}; an ending begins at the first dot of a file's name"
        raise UserError(f"{str(folder)!r}: the shards hold no image{reason}")
    remarks = []
    last_label = int(labels.max())
    if first_label is None:
        first_label = 0
        if container == "tfrecord" and labels.min() > 0:
            of_both = [int(labels.min()), last_label]
            other = other_split(folder, split)
            shards = None if other is None else shard_names(*other)
            if other is not None and shards is not None and shards[0] == "tfrecord":
                for name in shards[1]:
                    of_both += _scan(other[0] / name, "tfrecord", synsets).labels
            last_label = max(of_both)
            first_label = int(min(of_both) == 1)
        if first_label:
            remarks.append("labels in the records count from 1 (0 is the background class); they were lowered by one")
    if passed_over := sum(t.passed_over for t in tables):
        remarks.append(f"members of the tar files that are neither image nor label, passed over: {passed_over}")
    return ShardIndex(
        container=container,
        shards=tuple(names),
        sizes=tuple(sizes),
        classes=_class_names(folder, labels, first_label, last_label, classes, synsets),
        shard=np.repeat(np.arange(len(names), dtype=np.int32), [len(t.labels) for t in tables]),
        records=np.concatenate([np.array(t.records, dtype=np.int64) for t in tables]),
        offsets=np.concatenate([np.array(t.offsets, dtype=np.int64) for t in tables]),
        lengths=np.concatenate([np.array(t.lengths, dtype=np.int32) for t in tables]),
        labels=labels - np.int32(first_label),
        remarks=tuple(remarks),
    )


def _scan(path: Path, container: str, synsets: dict[int, str]) -> _Rows:
    try:
        if container == "tar":
            return _scan_tar(path)
        return _scan_records(path, synsets)
    except OSError as error:
        raise UserError(f"{str(path)!r}: cannot be read: {error.strerror or error}") from None
    except (ValueError, OverflowError, tarfile.TarError) as error:
        raise UserError(f"{str(path)!r}: not a whole shard of images: {error}") from None


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
        known = "" if classes is None else f" to {len(classes) - 1 + first}"
        raise UserError(f"{str(folder)!r}: labels {low + first} to {high + first}, expected {first}{known}")
    if classes is not None:
        return tuple(classes)
    return tuple(synsets.get(label + first, str(label)) for label in range(high + 1))


class _Bounded(io.BufferedReader):
    """A file that never gives more than it has at once: tarfile reads as much as a header says, whatever that is."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(descriptor(path)))
        self._size = os.fstat(self.fileno()).st_size

    def read(self, num_bytes: int | None = -1, /) -> bytes:
        """At most `num_bytes`; ValueError if that is no number of bytes."""
        if num_bytes is None or num_bytes < 0:
            raise ValueError(f"a header says that something has {num_bytes} bytes")
        return super().read(min(num_bytes, self._size))


def _scan_tar(path: Path) -> _Rows:
    rows = _Rows()
    waiting: dict[str, Any] = {}
    with open_file(path) as file:
        head = file.read(max(map(len, _COMPRESSED)))
    for magic, program in _COMPRESSED.items():
        if head.startswith(magic):
            raise ValueError(f"it is compressed with {program}, and images are read at their place; unpack it")
    with _Bounded(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            tar.members = []  # type: ignore[attr-defined]  # tarfile keeps all members it has met
            # A member whose name leads out of the archive, or whose size is none.
            if member.name.startswith("/") or ".." in member.name.split("/"):
                raise ValueError(f"member {_short(member.name)} leads out of the archive")
            if member.size < 0:
                raise ValueError(f"member {_short(member.name)} has {member.size} bytes")
            if member.isdir():
                continue
            # The key is the path up to the first dot of the file's name.
            folder, _slash, base = member.name.rpartition("/")
            key, _dot, suffix = base.partition(".")
            is_stored = member.isreg() and not member.issparse()
            if suffix.lower() in (LABEL_SUFFIX, *IMAGE_SUFFIXES) and not is_stored:
                raise ValueError(
                    f"member {_short(member.name)} is a link, a device, a pipe or sparse; write the archive anew with "
                    "the files themselves"
                )
            if suffix.lower() == LABEL_SUFFIX:
                text = os.pread(file.fileno(), min(member.size, 20), member.offset_data)
                if not text.strip().isdigit():
                    raise ValueError(f"member {_short(member.name)} holds {text!r}, not a label in digits")
                waiting["label"] = (folder, key, int(text))
            elif suffix.lower() in IMAGE_SUFFIXES:
                if "image" in waiting:
                    raise ValueError(f"member {_short(waiting['image'][2].name)} has no .{LABEL_SUFFIX} next to it")
                waiting["image"] = (folder, key, member)
            else:
                rows.passed_over += 1
                rows.first_passed_over = rows.first_passed_over or member.name
            if len(waiting) == 2:
                image = waiting["image"][2]
                if waiting["image"][:2] != waiting["label"][:2]:
                    raise ValueError(f"member {_short(image.name)} has no .{LABEL_SUFFIX} next to it")
                rows.add(image.offset, image.offset_data, image.size, waiting["label"][2])
                waiting.clear()
        if "image" in waiting:
            raise ValueError(f"member {_short(waiting['image'][2].name)} has no .{LABEL_SUFFIX} next to it")
        if tar.offset > path.stat().st_size:
            raise ValueError(f"cut off: ends before byte {tar.offset}")
    return rows


def _short(name: str) -> str:
    """A name of a member for messages: it may have any length and any characters."""
    return repr(name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}...")


def _scan_records(path: Path, synsets: dict[int, str]) -> _Rows:
    rows = _Rows()
    starts = record_offsets(path)
    if not len(starts):
        return rows
    ends = np.append(starts[1:], path.stat().st_size) + RECORD_HEAD - FRAME
    with open_file(path) as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    mapped.madvise(mmap.MADV_RANDOM)  # or the kernel would read ahead, and with it nearly the whole file
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
    """What an index says besides its arrays, as JSON."""
    names = ("container", "shards", "sizes", "classes", "remarks")
    return json.dumps({name: getattr(index, name) for name in names}).encode("ascii")


class ImageSet:
    """Labelled encoded images with random access. Survives pickling; a copy opens files of its own."""

    kind: str  # `jpeg-tree`, `tar` or `tfrecord`
    root: Path
    classes: tuple[str, ...]  # names of the classes; the position is the label
    labels: NDArray[np.int32]  # (num_samples,) the label of each sample
    sha256: str  # digest of the index (names or sizes, and labels), hexadecimal; image contents are not read
    remarks: tuple[str, ...]  # How the set was understood, one line each: what was passed over, ...

    @property
    def num_samples(self) -> int:
        """Images."""
        return len(self.labels)

    def label(self, index: int) -> int:
        """The label of one sample."""
        return int(self.labels[index])

    def num_bytes(self, index: int) -> int:
        """Length of what `read` gives. Raises OSError: its file is missing."""
        raise NotImplementedError

    def read(self, index: int) -> bytes:
        """The encoded bytes of one sample; of a TFRecord the checksum is compared.

        Raises OSError: its file is missing or cannot be read. ValueError: its file is shorter than the index says, or a
        checksum differs. EnvironmentLacksError: google-crc32c is not installed (TFRecord).
        """
        raise NotImplementedError

    def name(self, index: int) -> str:
        """File, and place in it, of one sample, for messages; never fails."""
        raise NotImplementedError

    def files(self) -> Sequence[Path]:
        """The files that samples are read from."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes files; reading again opens them again."""


class ImageShards(ImageSet):
    """Labelled encoded images in shards.

    Files are opened at first use in each copy. They are only read at given positions, so that a forked process may go
    on with those of its parent.
    `open_at_most`: shards kept open; None: a quarter of what the process may open.
    """

    def __init__(self, root: Path, index: ShardIndex, open_at_most: int | None = None) -> None:
        self.root, self.index, self.kind = root, index, index.container
        self.classes, self.remarks, self.labels = index.classes, index.remarks, index.labels
        # The rest is for data loaders, which pass tensors between processes as descriptors.
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
            start = offset - record - RECORD_HEAD
            return read_record_at(descriptor, record)[start : start + length] if length else b""
        data = os.pread(descriptor, length, offset)
        if len(data) < length:
            raise ValueError(f"cut off, {len(data)} of {length} bytes are there")
        return data

    def name(self, index: int) -> str:
        path = self.root / self.index.shards[int(self.index.shard[index])]
        return f"{str(path)!r}, {self._place(index)}"

    def _place(self, index: int) -> str:
        shard, record = int(self.index.shard[index]), int(self.index.records[index])
        if self.index.container == "tfrecord":
            return f"record at byte {record}"
        length = min(int(self.index.offsets[index]) - record, _MAX_HEADERS)
        try:
            headers = io.BytesIO(os.pread(self._descriptor(shard), max(0, length), record))
            with tarfile.open(fileobj=headers, mode="r:") as tar:
                member = tar.next()
        except (OSError, ValueError, OverflowError, tarfile.TarError):
            member = None  # the name is wanted for a message about a file that cannot be read
        return f"member at byte {record}" if member is None else f"member {_short(member.name)}"

    def files(self) -> list[Path]:
        return [self.root / name for name in self.index.shards]

    def close(self) -> None:
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
    return (folder / INDEX).is_file() or shard_names(folder, "train") is not None


def open_image_shards(folder: Path, split: Split | None = None) -> ImageShards:
    """Opens a folder of shards by its index, or by reading all headers if it has none."""
    if not (folder / INDEX).is_file():
        return ImageShards(folder, scan_shards(folder, split=split))
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
        # Opened here, because numpy leaves a file open that is no archive.
        with open_file(path) as raw, np.load(raw, allow_pickle=False) as file:
            about = parse_json(file["about"].tobytes())
            arrays = {name: file[name] for name in _ARRAYS}
        form = {key: about[key] for key in _FORMAT}
        lists: dict[str, Any] = {name: tuple(about[name]) for name in _LISTS}
        container = str(about["container"])
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{str(path)!r}: not a whole index of images: {first_line(error)}; remove it") from None
    shapes = {array.shape for array in arrays.values()}
    kinds = all(array.dtype == _ARRAYS[name] for name, array in arrays.items())
    if form != _FORMAT or len(shapes) != 1 or not kinds or len(lists["shards"]) != len(lists["sizes"]):
        raise UserError(f"{str(path)!r}: not an index of images of this form; remove it, and the shards are scanned")
    return ShardIndex(container=container, **lists, **arrays)

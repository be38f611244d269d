"""Opens labelled images, stored as a tree of JPEGs, tar shards or TFRecord shards. In a tree, `<class>/<image>.jpg` (or
.jpeg, .webp, any case), the sorted class folders are labels 0, 1, ...; a remark names files that are not read.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dlbench.datasets.arrays import Files
from dlbench.datasets.images.shards import MAX_IMAGE, ImageSet, holds_shards, open_image_shards
from dlbench.datasets.splits import OF_STORAGE, Split, require_no_splits
from dlbench.errors import UserError
from dlbench.lazy import np
from dlbench.opening import read_bytes
from dlbench.units import first_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dlbench.specs.workload import ResNetModel

IMAGENET: dict[Split, int] = {"train": 1_281_167, "validation": 50_000}
"""Images of ImageNet-2012 (Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge", 2015, table 2)."""
IMAGENET_CLASSES = 1000
_SYNSET = re.compile(r"n\d{8}")
LAYOUT = "<folder>/<class>/<image>.jpg"
SUFFIXES = (b".jpg", b".jpeg", b".webp")
ENDINGS = ".jpg, .jpeg or .webp"
_EXPECTED = ("manifest.json", "manifest.files.jsonl", "LICENSES.txt")
_NAMED = 20  # files not read that are named; the others are only counted


def open_image_set(folder: Path, split: Split | None = None) -> ImageSet:
    """Opens a folder of class folders or of shards. `split`: to read if the names of the shards distinguish two."""
    train = folder / "train"
    # A tree may have a class of that name; a class folder holds neither shards nor folders.
    if train.is_dir() and (
        holds_shards(train) or any(path.is_dir() and not path.name.startswith(".") for path in train.iterdir())
    ):
        raise UserError(f"{str(folder)!r} holds splits, not classes; give {str(train)!r} or the other one")
    if holds_shards(folder):
        return open_image_shards(folder, split)
    return index_jpeg_tree(folder)


def completeness(image_set: ImageSet, split: Split) -> str | None:
    """Returns how the counts of a set differ from a split of ImageNet-2012; None if they agree."""
    images, classes = image_set.num_samples, len(image_set.classes)
    if (images, classes) == (IMAGENET[split], IMAGENET_CLASSES):
        return None
    return (
        f"{str(image_set.root)!r}: {images:,} images in {classes:,} classes; ImageNet-2012 has {IMAGENET[split]:,} in "
        f"{IMAGENET_CLASSES:,} ({split})"
    )


def require_classes(num_classes: int, model: ResNetModel, where: str) -> None:
    """Raises UserError: there are more classes than the network distinguishes. `where`: key and path."""
    if num_classes > model.num_classes:
        raise UserError(f"{where} has {num_classes} classes, model.num_classes is {model.num_classes}")


def resembles_imagenet(image_set: ImageSet) -> bool:
    """Returns whether a set may be meant as ImageNet-2012, by the number or the names of its classes."""
    return len(image_set.classes) == IMAGENET_CLASSES or all(map(_SYNSET.fullmatch, image_set.classes))


@dataclass(frozen=True, kw_only=True, eq=False)
class JpegTree(ImageSet):
    """The files of a tree and their labels, as arrays: a million files take tens of MB."""

    root: Path
    classes: tuple[str, ...]  # names of the class folders; the position is the label
    labels: NDArray[np.int32]  # (num_samples,) label of each file
    names: bytes  # file names inside their class folders, joined; a name may hold any byte but NUL and a slash
    offsets: NDArray[np.int64]  # (num_samples + 1,) where each name starts in `names`
    sha256: str  # digest of class and file names, in order; contents are not read
    remarks: tuple[str, ...] = ()  # one line that names files which are not read, if there are any
    kind: str = "jpeg-tree"

    def path(self, index: int) -> Path:
        return Path(self._path(index))

    def _path(self, index: int) -> str:
        # A string, because creating a Path takes as long as opening and reading the file.
        name = self.names[int(self.offsets[index]) : int(self.offsets[index + 1])]
        return f"{self.root}/{self.classes[int(self.labels[index])]}/{os.fsdecode(name)}"

    def num_bytes(self, index: int) -> int:
        return self.path(index).stat().st_size

    def read(self, index: int) -> bytes:
        return read_bytes(self._path(index), MAX_IMAGE)

    def name(self, index: int) -> str:
        return repr(str(self.path(index)))

    def files(self) -> Sequence[Path]:
        return Files(self.num_samples, self.path)

    def close(self) -> None:
        """Does nothing: files are open only while they are read."""


def _class_folders(folder: Path, unread: list[str]) -> list[str]:
    if not folder.exists():
        raise UserError(f"{str(folder)!r}: no such folder; expected {LAYOUT}")
    if not folder.is_dir():
        raise UserError(f"{str(folder)!r} is not a folder; expected {LAYOUT}")
    with os.scandir(folder) as entries:
        names = []
        for entry in entries:
            if entry.is_dir() and not entry.name.startswith(".") and entry.name not in OF_STORAGE:
                names.append(entry.name)
            elif not entry.name.startswith(".") and entry.name not in _EXPECTED:
                unread.append(entry.name)
    if not names:
        raise UserError(f"{str(folder)!r} holds no class folders; expected {LAYOUT}")
    require_no_splits(folder, names)
    return sorted(names)


def index_jpeg_tree(folder: Path) -> JpegTree:
    """Lists a tree of JPEGs, sorted by class and name, so that every rank sees the same order."""
    digest, labels, names, lengths = hashlib.sha256(), [], [], []
    unread: list[str] = []
    try:
        classes = _class_folders(folder, unread)
        for label, name in enumerate(classes):
            with os.scandir(os.fsencode(folder / name)) as entries:
                files = sorted(entry.name for entry in entries if not entry.name.startswith(b"."))
            images = [file for file in files if file.lower().endswith(SUFFIXES)]
            unread += [f"{name}/{os.fsdecode(file)}" for file in files if not file.lower().endswith(SUFFIXES)]
            if not images:
                raise UserError(f"{str(folder / name)!r} holds no {ENDINGS} file; expected {LAYOUT}")
            digest.update(os.fsencode(name) + b"/\0" + b"\0".join(images) + b"\0")
            labels.append(np.full(len(images), label, dtype=np.int32))
            lengths.append(np.array([len(i) for i in images], dtype=np.int64))
            names.append(b"".join(images))
    except OSError as error:
        raise UserError(f"{error.filename!r}: cannot be listed: {error.strerror}") from None
    remarks: tuple[str, ...] = ()
    if unread:
        names_text = first_of([repr(name) for name in sorted(unread)], _NAMED)
        remarks = (f"not read, not {ENDINGS} in a class folder: {len(unread)} ({names_text})",)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.concatenate(lengths))])
    return JpegTree(
        root=folder,
        classes=tuple(classes),
        labels=np.concatenate(labels),
        names=b"".join(names),
        offsets=offsets,
        sha256=digest.hexdigest(),
        remarks=remarks,
    )

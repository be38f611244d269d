"""One view of all forms in which labelled images are stored: a tree of JPEGs, tar shards, TFRecord shards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dlbench.datasets.splits import Split
from dlbench.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

IMAGENET: dict[Split, int] = {"train": 1_281_167, "validation": 50_000}
"""Images of ImageNet-2012 (Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge", 2015, table 2)."""
IMAGENET_CLASSES = 1000


class ImageSet(Protocol):
    """Labelled encoded images with random access. Survives pickling; a copy opens files of its own."""

    @property
    def kind(self) -> str:
        """`jpeg-tree`, `tar` or `tfrecord`."""

    @property
    def root(self) -> Path:
        """The folder."""

    @property
    def num_samples(self) -> int:
        """Images."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; the position is the label."""

    @property
    def sha256(self) -> str:
        """Digest of the index (names or sizes, and labels), hexadecimal; image contents are not read."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a person should know about how the set was understood, one line each: what was passed over, ..."""

    @property
    def labels(self) -> NDArray[np.int32]:
        """(num_samples,) the label of each sample."""

    def label(self, index: int) -> int:
        """The label of one sample."""

    def num_bytes(self, index: int) -> int:
        """Length of what `read` gives.

        Raises:
            OSError: its file is missing.
        """

    def read(self, index: int) -> bytes:
        """The encoded bytes of one sample.

        Raises:
            OSError: its file is missing or cannot be read.
            ValueError: its file is shorter than the index says, or a checksum differs.
        """

    def name(self, index: int) -> str:
        """File, and place in it, of one sample, for messages; never fails."""

    def filename(self, index: int) -> str:
        """The place of one sample relative to the folder; equal wherever the folder lies."""

    def files(self) -> list[Path]:
        """The files that samples are read from."""

    def close(self) -> None:
        """Closes files; reading again opens them again."""


def open_image_set(folder: Path) -> ImageSet:
    """Opens a folder of class folders, or a folder of shards; see jpeg_tree and image_shards.

    Raises:
        UserError: the folder is missing, unreadable, empty, or damaged; or holds splits, of which one must be named.
    """
    from dlbench.datasets.images.jpeg_tree import index_jpeg_tree
    from dlbench.datasets.images.shards import holds_shards, open_image_shards

    train = folder / "train"
    # A tree may have a class of that name; a class folder holds neither shards nor folders.
    if train.is_dir() and (holds_shards(train) or _holds_folders(train)):
        raise UserError(f"{str(folder)!r} holds splits, not classes; give {str(train)!r} or the other one")
    return open_image_shards(folder) if holds_shards(folder) else index_jpeg_tree(folder)


def _holds_folders(folder: Path) -> bool:
    return any(path.is_dir() and not path.name.startswith(".") for path in folder.iterdir())


def completeness(image_set: ImageSet, split: Split) -> str | None:
    """What a set lacks, or has too much, to be a split of ImageNet-2012 by its counts; None if they agree.

    Args:
        image_set: the set.
        split: `train` or `validation`.
    """
    images, classes = image_set.num_samples, len(image_set.classes)
    if (images, classes) == (IMAGENET[split], IMAGENET_CLASSES):
        return None
    return (
        f"{str(image_set.root)!r}: {images:,} images in {classes:,} classes; ImageNet-2012 has {IMAGENET[split]:,} in "
        f"{IMAGENET_CLASSES:,} ({split})"
    )

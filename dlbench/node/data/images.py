"""A path becomes a reader of images, checked against the network."""

from __future__ import annotations

from pathlib import Path

from dlbench.datasets.images.image_set import ImageSet, JpegTree, open_image_set
from dlbench.datasets.images.jpeg_decode import Decoding
from dlbench.datasets.images.shards import ImageShards, ShardIndex
from dlbench.datasets.making.image_recipes import class_labels
from dlbench.errors import UserError
from dlbench.node.data.jpeg import JpegReader
from dlbench.node.data.one_lister import ALONE, Lister
from dlbench.node.data.reader import SampleReader
from dlbench.specs.workload import ResNetModel


def open_images(
    source: Path,
    model: ResNetModel,
    seed: int,
    *,
    training: bool,
    classes: tuple[str, ...] | None = None,
    lister: Lister = ALONE,
    decoding: Decoding = "region",
    by_gpu: bool = False,
) -> SampleReader:
    """A reader of one split: a tree of JPEGs, or tar or TFRecord shards.

    Args:
        source: the folder of the split.
        model: gives the size of the image and the number of classes.
        seed: of the augmentation.
        training: random-resized crops and flips, or else the centre crop.
        classes: names by label, for a set whose own classes may be fewer (validation); None: the set's own.
        lister: through which the ranks of a node list the set once.
        decoding: what of an image is decoded in training.
        by_gpu: images are not decoded here, but by the GPU (see `dlbench.node.data.gpu_images`).

    Returns:
        Samples with image (S, S, 3) uint8 and label () int64, S = model.image_size.

    Raises:
        UserError: the set is missing or damaged, has more classes than the model, or a class that is not in `classes`.
        EnvironmentLacksError: a library that its form needs is not installed.
    """
    images = _listed(source, lister)
    known = images.classes if classes is None else classes
    if len(known) > model.num_classes:
        raise UserError(
            f"data.source {str(source)!r} has {len(known)} classes, model.num_classes is {model.num_classes}"
        )
    labels = None if classes is None else class_labels(images, classes)
    kind: type[JpegReader] = JpegReader
    if by_gpu:
        from dlbench.node.data.gpu_images import EncodedReader

        kind = EncodedReader
    return kind(images, model.image_size, seed, training=training, labels=labels, decoding=decoding)


def _listed(source: Path, lister: Lister) -> ImageSet:
    def listed() -> JpegTree | ShardIndex:
        images = open_image_set(source)
        if isinstance(images, ImageShards):
            return images.index
        assert isinstance(images, JpegTree)
        return images

    found = lister.index(listed, (JpegTree, ShardIndex))
    return ImageShards(source, found) if isinstance(found, ShardIndex) else found


def image_classes(source: Path, lister: Lister = ALONE) -> tuple[str, ...]:
    """The names of the classes of a set, by label; see `open_images`.

    Raises:
        UserError: the set is missing or damaged.
    """
    return lister.index(lambda: open_image_set(source).classes, ())

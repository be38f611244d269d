"""The kinds of data sets that `dlbench data make` knows: a wish, in samples or bytes, becomes a recipe.

How many samples fill a number of bytes is measured: a few of the very samples are written to a temporary folder. The
same wish thus gives the same recipe, and a set that was begun by its size is continued by it.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dlbench.datasets.making.production import Part, Recipe
from dlbench.datasets.splits import train_folder, validation_folder
from dlbench.errors import UserError, nearest

if TYPE_CHECKING:
    from dlbench.datasets.images.image_set import ImageSet

KINDS = ("images", "text", "density")
CONTAINERS = {"images": ("tree", "tar", "tfrecord"), "text": ("txt",), "density": ("hdf5", "tfrecord")}
"""The first one of each kind is the default."""
VALIDATION_SHARE = 0.1
"""Of the training samples, where the wish does not say."""
_WIDE_BELOW = 64
"""Edge, cells. Smaller volumes show too little of a universe to tell neighbouring parameters apart."""
_PROBES = 8
_PARALLEL_TEXT = 200_000_000
"""Bytes."""
_PUBLISHED_PREDICTIONS = {128: 20, 512: 76}
"""Hidden tokens by sequence length, of the pre-training of BERT in MLPerf (mlcommons/training)."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a person asks for; what is None has a default of the kind."""

    samples: int | None = None
    """Of the training split."""
    validation: int | None = None
    size_on_disk: int | None = None
    """Bytes of all files together, about; instead of `samples`."""
    size: str | None = None
    """Pixels as 500x375 (images), or the edge of a volume (density)."""
    classes: int | None = None
    container: str | None = None
    samples_per_file: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Order:
    """A recipe and what it will need."""

    recipe: Recipe
    unit: str
    """What its samples are called."""
    estimated_bytes: int | None
    most_workers: int | None = None
    """More would not be faster."""


def order(kind: str, wish: Wish) -> Order:
    """Decides a recipe.

    Raises:
        UserError: an unknown kind, an option that the kind does not have, or a value that does not fit.
        EnvironmentLacksError: a package of the extra `data` or `demo` is not installed.
    """
    if kind not in KINDS:
        raise UserError(f"unknown kind of data {kind!r}: {nearest(kind, KINDS)}")
    if wish.container is not None and wish.container not in CONTAINERS[kind]:
        raise UserError(f"--container {wish.container}: {kind} has {', '.join(CONTAINERS[kind])}")
    if kind == "text":
        return _text(wish)
    if (wish.samples is None) == (wish.size_on_disk is None):
        raise UserError("give one of --samples and --size-on-disk; one of the two decides how much is made")
    return _images(wish) if kind == "images" else _density(wish)


def _refuse(kind: str, wish: Wish, *names: str) -> None:
    for name in names:
        if getattr(wish, name) is not None:
            raise UserError(f"--{name.replace('_', '-')}: {kind} has no such choice; leave it out")


def _text(wish: Wish) -> Order:
    from dlbench.datasets.text.recipes import TextRecipe

    for name in ("samples", "validation"):
        if getattr(wish, name) is not None:
            raise UserError(
                f"--{name}: text is counted in bytes, and a tenth of its documents is for validation; "
                "give --size-on-disk"
            )
    _refuse("text", wish, "size", "classes", "samples_per_file")
    recipe = TextRecipe(num_bytes=wish.size_on_disk, seed=wish.seed)
    # Each process parses the text anew, which takes longer than writing some files.
    most = 1 if recipe.estimated_bytes < _PARALLEL_TEXT else None
    return Order(recipe, "documents", recipe.estimated_bytes, most)


def _images(wish: Wish) -> Order:
    from dlbench.datasets.images.packing import SAMPLES_PER_SHARD
    from dlbench.datasets.images.photo_crops import PhotoRecipe

    width, height = _pixels(wish.size or "500x375")
    container = wish.container or "tree"
    if container == "tree":
        _refuse("a tree of images", wish, "samples_per_file")

    def recipe(train: int, validation: int) -> PhotoRecipe:
        return PhotoRecipe(
            train_images=train,
            validation_images=validation,
            num_classes=10 if wish.classes is None else wish.classes,
            container=container,  # type: ignore[arg-type]  # one of CONTAINERS
            width=width,
            height=height,
            samples_per_shard=wish.samples_per_file or SAMPLES_PER_SHARD,
            seed=wish.seed,
        )

    least = 10 if wish.classes is None else wish.classes
    probe = replace(recipe(4 * least, 0), samples_per_shard=16)
    return _sized(wish, recipe, probe, "images", least)


def _density(wish: Wish) -> Order:
    from dlbench.datasets.volumes.fields import DensityRecipe

    _refuse("density", wish, "classes")
    size = _edge(wish.size or "128")

    def recipe(train: int, validation: int) -> DensityRecipe:
        return DensityRecipe(
            num_train=train,
            num_validation=validation,
            size=size,
            container=wish.container or "hdf5",  # type: ignore[arg-type]  # one of CONTAINERS
            seed=wish.seed,
            samples_per_file=wish.samples_per_file or 1,
            wide=size < _WIDE_BELOW,
        )

    return _sized(wish, recipe, replace(recipe(_PROBES, 0), samples_per_file=1), "volumes", 1)


def _sized(wish: Wish, recipe: Callable[[int, int], Recipe], probe: Recipe, unit: str, least: int) -> Order:
    """Numbers of samples from the wish, of which each split has `least` or more (or none, for validation)."""
    per_sample = _bytes_per_sample(probe)
    if wish.samples is not None:
        train = wish.samples
    else:
        assert wish.size_on_disk is not None  # one of the two, says `order`
        total = int(wish.size_on_disk / per_sample)
        share = VALIDATION_SHARE / (1 + VALIDATION_SHARE)
        train = total - (round(total * share) if wish.validation is None else wish.validation)
        if train < least:
            raise UserError(
                f"--size-on-disk {wish.size_on_disk}: too small; a sample takes about {per_sample:.0f} bytes"
            )
    validation = wish.validation if wish.validation is not None else max(least, round(train * VALIDATION_SHARE))
    return Order(recipe(train, validation), unit, round((train + validation) * per_sample))


def _bytes_per_sample(probe: Recipe) -> float:
    parts = probe.parts()
    chosen = parts[:: max(1, len(parts) // _PROBES)]
    total = 0
    with tempfile.TemporaryDirectory(prefix="dlbench-") as folder:
        for part in chosen:
            path = Path(folder) / part.name
            path.parent.mkdir(parents=True, exist_ok=True)
            probe.write(part, path)
            files = path.rglob("*") if path.is_dir() else [path]
            total += sum(p.stat().st_size for p in files if p.is_file())
    return total / sum(part.count for part in chosen)


def _pixels(text: str) -> tuple[int, int]:
    width, mark, height = text.partition("x")
    if not (width.isascii() and width.isdigit() and (not mark or (height.isascii() and height.isdigit()))):
        raise UserError(f"--size {text!r}: not a size in pixels such as 500x375, or 256 for a square")
    return int(width), int(height or width)


def _edge(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 4 <= int(text) <= 1024):
        raise UserError(f"--size {text!r}: not the edge of a volume, a whole number from 4 to 1024")
    return int(text)


# Data sets from data sets


def packing(source: Path, *, container: Literal["tar", "tfrecord"], samples_per_shard: int | None, seed: int) -> Order:
    """Images become shards, both splits if the source holds both.

    Raises:
        UserError: the source holds no images, or is damaged.
    """
    from dlbench.datasets.images.image_set import open_image_set
    from dlbench.datasets.images.packing import SAMPLES_PER_SHARD, PackRecipe

    train, validation = train_folder(source), validation_folder(source)
    recipe = PackRecipe(
        train=train,
        validation=validation,
        container=container,
        samples_per_shard=samples_per_shard or SAMPLES_PER_SHARD,
        seed=seed,
    )
    expected = 0.0
    for folder in (train, validation):
        if folder is not None:
            images = open_image_set(folder)
            step = max(1, images.num_samples // _PROBES)
            sizes = [_size_of(images, index) for index in range(0, images.num_samples, step)]
            expected += images.num_samples * sum(sizes) / len(sizes)
            images.close()
    return Order(recipe, "images", round(expected))


def _size_of(images: ImageSet, index: int) -> int:
    try:
        # A tar member has a header, and padding to 512 bytes.
        return len(images.read(index)) + 1024
    except (OSError, ValueError) as error:
        raise UserError(f"{images.name(index)}: {getattr(error, 'strerror', None) or error}") from None


def pretraining(
    source: Path, *, vocabulary: str, sequence_length: int, max_predictions: int | None, duplicates: int, seed: int
) -> Order:
    """Text becomes BERT samples; validation text of its own stays apart.

    Raises:
        UserError: the text or the vocabulary is missing, or numbers do not fit.
    """
    from dlbench.datasets.text.samples_recipe import SamplesRecipe

    if max_predictions is None:
        max_predictions = _PUBLISHED_PREDICTIONS.get(sequence_length, math.ceil(0.15 * sequence_length))
    train, validation = train_folder(source), validation_folder(source)
    recipe = SamplesRecipe(
        source=str(train),
        vocabulary=vocabulary,
        sequence_length=sequence_length,
        max_predictions=max_predictions,
        duplicates=duplicates,
        seed=seed,
    )
    if validation is None:
        return Order(recipe, "samples", None)
    both = Paired(
        train=replace(recipe, validation_share=0.0),
        validation=replace(recipe, source=str(validation), validation_share=0.0, duplicates=1),
    )
    return Order(both, "samples", None)


@dataclass(frozen=True)
class Paired:
    """Two recipes that make training parts only; those of the second become the validation split."""

    train: Recipe
    validation: Recipe

    @property
    def kind(self) -> str:
        """That of the first."""
        return self.train.kind

    @property
    def made_with(self) -> Mapping[str, str | int | float | bool]:
        """What the first is made with, and, named `validation_...`, what is another value in the second."""
        first, second = self.train.made_with, self.validation.made_with
        return {**first, **{f"validation_{key}": value for key, value in second.items() if first.get(key) != value}}

    def parts(self) -> Sequence[Part]:
        """The parts of both."""
        held_out = (
            Part(f"validation/{p.name.removeprefix('train/')}", "validation", p.first, p.count)
            for p in self.validation.parts()
        )
        return [*self.train.parts(), *held_out]

    def write(self, part: Part, path: Path) -> None:
        """Writes one file."""
        if part.split == "train":
            self.train.write(part, path)
        else:
            name = part.name.removeprefix("validation/")
            self.validation.write(Part(f"train/{name}", "train", part.first, part.count), path)

    def finish(self, folder: Path) -> None:
        """Writes what stands beside the training parts."""
        self.train.finish(folder)

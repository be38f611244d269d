"""Makes labelled images from photographs in Python packages, and packs any images into shards.

Each photograph of the installed packages scikit-image and scikit-learn is a class; nothing is downloaded. An image is a
random crop of its photograph at a random scale, with grain like a sensor's, so that a network has something to learn
and a JPEG has a realistic size. Validation crops overlap with training crops, so that their accuracy shows that a
network learns, not how well it would generalise. Shards are tar files for webdataset, with the encoded bytes of the
source. Their order is random, so that a shard read from front to back mixes the classes. Sample k has the name k with 8
digits.
"""

from __future__ import annotations

import importlib.util
import io
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlbench.datasets.images.image_set import open_image_set
from dlbench.datasets.images.shards import LABEL_SUFFIX, ImageSet, save_index, scan_shards
from dlbench.datasets.making.production import DatasetPart, numbered_parts
from dlbench.datasets.manifest import MadeWith
from dlbench.datasets.splits import Split
from dlbench.errors import EnvironmentLacksError, UserError
from dlbench.opening import why_unreadable

if TYPE_CHECKING:
    from PIL.Image import Image

SAMPLES_PER_SHARD = 1252  # ImageNet's 1,281,167 training images in 1,024 shards
VERSION = 1  # increased whenever packing writes other bytes
PHOTO_VERSION = 2  # increased whenever the recipe writes other bytes
_TREE_FIELDS = {"container": "tree", "samples_per_shard": SAMPLES_PER_SHARD}  # in `made_with`, for older data sets
_SHARES = (0.25, 0.75)  # smallest and largest edge of a crop, relative to the largest crop that fits
_SPLITS: tuple[Split, ...] = ("train", "validation")
_SKIMAGE = ("skimage", "scikit-image")
_CC0 = "Creative Commons CC0 1.0"
_CC_BY = "Creative Commons Attribution 2.0 (https://creativecommons.org/licenses/by/2.0/)"


class Packed(NamedTuple):
    """One sample of a shard."""

    key: str
    data: bytes
    label: int  # counted from 0


def write_shard(path: Path, samples: Iterable[Packed]) -> None:
    """Writes one shard; the same samples give the same bytes. Only one sample at a time is in memory."""
    # A new TarInfo has time, owner and group 0.
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for sample in samples:
            label = str(sample.label).encode("ascii")
            for suffix, content in (("jpg", sample.data), (LABEL_SUFFIX, label)):
                member = tarfile.TarInfo(f"{sample.key}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            tar.members = []  # type: ignore[attr-defined]  # tarfile would keep all members


@dataclass(frozen=True, kw_only=True)
class PackRecipe:
    """Packs an image set, a tree or shards, into shards; a `Recipe` of dlbench.datasets.making.production."""

    train: Path  # the training images: a folder that `open_image_set` takes
    validation: Path | None = None  # the validation images; their classes must be among those of the training images
    samples_per_shard: int = SAMPLES_PER_SHARD
    seed: int = 0  # of the order
    kind: str = "image-shards"

    @property
    def made_with(self) -> MadeWith:
        """Container, shard size, seed, version, and the digest of each split's index, which covers names only."""
        digests = {f"{split}_index_sha256": images.sha256 for split, images in self._sets.items()}
        return {
            "version": VERSION,
            "container": "tar",
            "samples_per_shard": self.samples_per_shard,
            "seed": self.seed,
            **digests,
        }

    def parts(self) -> Sequence[DatasetPart]:
        """Returns all shards of all splits."""
        parts: list[DatasetPart] = []
        for split, images in self._sets.items():
            self._labels(split)  # reports wrong classes before the first shard is written
            parts += numbered_parts(split, "shard", "tar", images.num_samples, self.samples_per_shard)
        return parts

    def write(self, part: DatasetPart, path: Path) -> None:
        order = self._orders[part.split][part.first : part.first + part.count]
        samples = _samples(self._sets[part.split], order, part.first, self._labels(part.split))
        write_shard(path, samples)

    def finish(self, folder: Path) -> None:
        for split in self._sets:
            index = scan_shards(folder / split, classes=self._sets["train"].classes, first_label=0)
            save_index(index, folder / split)

    def __getstate__(self) -> dict[str, Any]:
        # A worker process opens the sources itself, once.
        return {key: value for key, value in self.__dict__.items() if not key.startswith("_")}

    @cached_property
    def _sets(self) -> dict[Split, ImageSet]:
        sets: dict[Split, ImageSet] = {"train": open_image_set(self.train, "train")}
        if self.validation is not None:
            sets["validation"] = open_image_set(self.validation, "validation")
        return sets

    @cached_property
    def _orders(self) -> dict[Split, NDArray[np.int64]]:
        generators = {split: np.random.default_rng([self.seed, len(split)]) for split in self._sets}
        return {split: generators[split].permutation(images.num_samples) for split, images in self._sets.items()}

    def _labels(self, split: Split) -> tuple[int, ...]:
        return class_labels(self._sets[split], self._sets["train"].classes)


def class_labels(images: ImageSet, classes: Sequence[str]) -> tuple[int, ...]:
    """Returns the label of each class of a set in `classes`. Raises UserError: a class is not in `classes`."""
    label_by_name = {name: label for label, name in enumerate(classes)}
    unknown = [name for name in images.classes if name not in label_by_name]
    if unknown:
        names = ", ".join(map(repr, unknown[:3]))
        if len(unknown) > 3:
            names += f" and {len(unknown) - 3} more"
        raise UserError(
            f"{str(images.root)!r}: not among the {len(classes)} training classes: {names}; "
            "give each class the same name in both splits"
        )
    return tuple(label_by_name[name] for name in images.classes)


def _samples(source: ImageSet, order: NDArray[np.int64], first: int, labels: Sequence[int]) -> Iterable[Packed]:
    for position, index in enumerate(order.tolist()):
        try:
            data = source.read(index)
        except (OSError, ValueError) as error:
            reason = why_unreadable(error)
            raise UserError(f"{source.name(index)}: {reason}; repair or remove it, then pack again") from None
        yield Packed(f"{first + position:08d}", data, labels[source.label(index)])


@dataclass(frozen=True)
class Photo:
    """A photograph in an installed package, and the licence that the package states."""

    class_name: str
    package: str
    distribution: str
    file: str
    licence: str


PHOTOS = (
    Photo("astronaut", *_SKIMAGE, "data/astronaut.png", "NASA; no known copyright restrictions, public domain"),
    Photo("brick-wall", *_SKIMAGE, "data/brick.png", f"{_CC0}, from CC0Textures, Bricks25"),
    Photo("cat", *_SKIMAGE, "data/chelsea.png", f"{_CC0} by the photographer, Stefan van der Walt"),
    Photo("coffee-cup", *_SKIMAGE, "data/coffee.png", f"{_CC0} by the photographer, Rachel Michetti"),
    Photo("galaxies", *_SKIMAGE, "data/hubble_deep_field.jpg", "NASA, Hubble eXtreme Deep Field; public domain"),
    Photo("retina", *_SKIMAGE, "data/retina.jpg", f"{_CC0}, Mikael Haggstrom, Wikimedia Commons"),
    Photo("rocket", *_SKIMAGE, "data/rocket.jpg", "SpaceX, launch of DSCOVR; released into the public domain"),
    Photo("tissue", *_SKIMAGE, "data/ihc.png", "Center for Microscopy and Molecular Imaging; no known restrictions"),
    Photo(
        "flower",
        "sklearn",
        "scikit-learn",
        "datasets/images/flower.jpg",
        f"{_CC_BY}; the package's note names danielbuechele and links to flickr.com/photos/vultilion/6056698931",
    ),
    Photo(
        "temple",
        "sklearn",
        "scikit-learn",
        "datasets/images/china.jpg",
        f"{_CC_BY}; by danielbuechele, flickr.com/photos/danielbuechele/6061409035",
    ),
)


def _sorted_photos() -> list[Photo]:
    return sorted(PHOTOS, key=lambda photo: photo.class_name)


def photo_path(photo: Photo) -> Path:
    """Returns the path of a photograph in an installed package, which is not imported."""
    spec = importlib.util.find_spec(photo.package)
    if spec is not None:
        for folder in spec.submodule_search_locations or []:
            path = Path(folder) / photo.file
            if path.is_file():
                return path
    raise EnvironmentLacksError(
        f"the photograph {photo.file} of {photo.distribution} is not installed; pip install 'dlbench[demo]'"
    )


@dataclass(frozen=True, kw_only=True)
class PhotoRecipe:
    """A tree of JPEGs of labelled photographs; a `Recipe` of dlbench.datasets.making.production.

    The defaults resemble ImageNet: 500 x 375 pixels, about 105 kB per image (ImageNet: 115 kB). Image k of a class does
    not depend on the number of images.
    """

    train_images: int  # over all classes, divided as evenly as possible
    validation_images: int  # 0, or at least one per class
    num_classes: int = len(PHOTOS)
    width: int = 500  # pixels, of the largest image
    height: int = 375  # pixels, of the largest image
    vary: float = 0.0  # largest random reduction of an image's size, relative to `width` x `height`
    quality: int = 95  # of the JPEG, 1 to 100
    grain: int = 16  # largest deviation of a pixel's brightness by the grain, of 255; uniformly distributed
    seed: int = 0
    kind = "images"

    def __post_init__(self) -> None:
        if not 2 <= self.num_classes <= len(PHOTOS):
            raise UserError(f"num_classes is {self.num_classes}, expected 2 to {len(PHOTOS)}")
        if self.train_images < self.num_classes:
            raise UserError(f"train_images is {self.train_images}, expected {self.num_classes} or more")
        if self.validation_images and self.validation_images < self.num_classes:
            raise UserError(f"validation_images is {self.validation_images}, expected 0 or at least one per class")

    @property
    def made_with(self) -> MadeWith:
        """All fields, this recipe's version, and that of Pillow, whose encoder decides the bytes."""
        try:
            import PIL
        except ImportError:
            raise EnvironmentLacksError("Pillow is not installed; pip install 'dlbench[demo]'") from None
        return {"version": PHOTO_VERSION, "pillow": PIL.__version__, **_TREE_FIELDS, **self.__dict__}

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(photo.class_name for photo in _sorted_photos()[: self.num_classes])

    def parts(self) -> Sequence[DatasetPart]:
        parts: list[DatasetPart] = []
        for split in _SPLITS:
            if not self._images(split):
                continue
            per_class, num_larger = divmod(self._images(split), self.num_classes)
            first = 0
            for label, name in enumerate(self.classes):
                count = per_class + 1 if label < num_larger else per_class
                parts.append(DatasetPart(f"{split}/{name}", split, first, count))
                first += count
        return parts

    def write(self, part: DatasetPart, path: Path) -> None:
        name = Path(part.name).name
        path.mkdir()
        for number in range(part.count):
            (path / f"{name}-{number:03d}.jpg").write_bytes(self.image(part.split, self.classes.index(name), number))

    def finish(self, folder: Path) -> None:
        lines = [
            f"{photo.class_name}: {photo.package}/{photo.file} of {photo.distribution}. {photo.licence}"
            for photo in PHOTOS
        ]
        head = [
            "The images in this folder are cuts from the photographs below: "
            "cropped, resized and encoded as JPEG again.",
            "Rights as stated by the package that carries each photograph.",
            "",
        ]
        (folder / "LICENSES.txt").write_text("\n".join(head + lines) + "\n", encoding="utf-8")

    def image(self, split: Split, label: int, number: int) -> bytes:
        """Returns the JPEG of image `number` of a class."""
        from PIL import Image

        generator = np.random.default_rng([self.seed, _SPLITS.index(split), label, number])
        picture = _picture(_sorted_photos()[label])
        # The largest crop with this aspect ratio that fits, reduced by a random factor.
        scale = min(picture.width / self.width, picture.height / self.height) * generator.uniform(*_SHARES)
        w, h = self.width * scale, self.height * scale
        x, y = generator.random() * max(0, picture.width - w), generator.random() * max(0, picture.height - h)
        shrink = 1 - generator.uniform(0, self.vary)
        size = max(1, round(self.width * shrink)), max(1, round(self.height * shrink))
        # Rounding may put an edge slightly beyond the photograph, which Pillow refuses.
        box = (x, y, min(x + w, picture.width), min(y + h, picture.height))
        crop = picture.resize(size, Image.Resampling.BILINEAR, box=box)
        if self.grain:
            grain = generator.integers(-self.grain, self.grain + 1, (size[1], size[0], 1), dtype=np.int16)
            crop = Image.fromarray(np.clip(np.asarray(crop) + grain, 0, 255).astype(np.uint8))
        buffer = io.BytesIO()
        crop.save(buffer, "JPEG", quality=self.quality)
        return buffer.getvalue()

    def _images(self, split: Split) -> int:
        return self.train_images if split == "train" else self.validation_images


@lru_cache(maxsize=len(PHOTOS))
def _picture(photo: Photo) -> Image:
    from PIL import Image

    with Image.open(photo_path(photo)) as opened:
        return opened.convert("RGB")

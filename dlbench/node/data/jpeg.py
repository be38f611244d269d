"""Encoded images become crops of 8-bit pixels: decode, random-resized crop and flip, or resize and centre crop.

Training is Inception's augmentation (Szegedy et al., "Going Deeper with Convolutions", 2014, section 6): an area of 8 %
to 100 % of the image at an aspect ratio of 3/4 to 4/3, resized to a square, mirrored in half of the cases. Validation
is the field's single centre crop: the shorter edge becomes 256/224 of the crop's. Resizing is bilinear with
anti-aliasing (as Pillow's, to one level). Pixels stay 8-bit, channels last; the device normalises them.

A training crop that would be shrunk by two or more is decoded at a half, a quarter or an eighth of its size (see
jpeg_decode). At 224 pixels that needs crops of 448 pixels or more, so it acts on large photographs only. Rows below the
crop are not decoded, which changes no pixel of it. `full` leaves both out.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from dlbench.datasets.images.image_set import ImageSet
from dlbench.datasets.images.jpeg_decode import FACTORS, Decoding, decode, decoder, decodes_regions, inspect
from dlbench.node.data.reader import Arrays, BadSampleError, InHalves, Raw, Sample, path_text
from dlbench.node.data.sharding import Key

if TYPE_CHECKING:
    from numpy.typing import NDArray

AREA = (0.08, 1.0)
ASPECT = (3 / 4, 4 / 3)
EVALUATION_EDGE = 256 / 224
"""Shorter edge of a validation image over that of its centre crop (Krizhevsky et al. 2012: 256 and 224)."""

Box = tuple[int, int, int, int]
"""Left, top, right, bottom in pixels."""


def crop_box(width: int, height: int, generator: np.random.Generator) -> Box:
    """A random-resized crop.

    After ten draws that do not fit: the largest central part within the allowed aspect ratios.
    """
    for _ in range(10):
        area = width * height * generator.uniform(*AREA)
        aspect = math.exp(generator.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left = int(generator.integers(0, width - w + 1))
            top = int(generator.integers(0, height - h + 1))
            return left, top, left + w, top + h
    w = min(width, max(1, round(height * ASPECT[1])))
    h = min(height, max(1, round(width / ASPECT[0])))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def training_crop(width: int, height: int, generator: np.random.Generator) -> tuple[Box, bool]:
    """A random-resized crop, and whether it is mirrored."""
    return crop_box(width, height, generator), generator.random() < 0.5


def decode_factor(width: int, height: int, least_width: int, least_height: int) -> int:
    """How many times smaller an area may be decoded so that it is still no smaller than what is wanted of it."""
    return next(f for f in FACTORS if f == 1 or (width >= f * least_width and height >= f * least_height))


def scaled_box(box: Box, factor: int) -> Box:
    """A box on an image that was decoded smaller, to whole pixels: each edge off by half a pixel of it at most.

    Args:
        box: on the whole image; no smaller than `factor` pixels.
        factor: how many times smaller the decoded image is.
    """
    if factor == 1:
        return box
    half = factor // 2
    left, top, right, bottom = ((edge + half) // factor for edge in box)
    return left, top, right, bottom


def resize(pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """(H, W, 3) -> (height, width, 3), bilinear with anti-aliasing."""
    out: NDArray[np.uint8] = _resized(pixels, height, width).numpy()
    return out


def _resized(pixels: NDArray[np.uint8], height: int, width: int) -> torch.Tensor:
    # torch's 8-bit code for channels-last images is four to five times as fast as Pillow's (measured on AVX2).
    image = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(image, (height, width), mode="bilinear", antialias=True)
    return resized[0].permute(1, 2, 0).contiguous()


def training_image(
    data: bytes,
    size: int,
    generator: np.random.Generator,
    decoding: Decoding = "region",
    out: NDArray[np.uint8] | None = None,
) -> tuple[NDArray[np.uint8], str | None]:
    """A random part of an encoded image, perhaps mirrored, as (size, size, 3), and a remark as from `decode`.

    Args:
        data: the encoded image.
        size: pixels of each edge of the result.
        generator: of crop and flip; what is drawn does not depend on the rest.
        decoding: see `dlbench.specs.workload`.
        out: (size, size, 3), to be filled and returned; None: a new array.

    Raises:
        ValueError: the image is empty, truncated, or none.
    """
    encoded = inspect(data)
    box, is_mirrored = training_crop(encoded.width, encoded.height, generator)
    if decoding == "full":
        factor, (pixels, remark) = 1, encoded.pixels()
    else:
        factor = decode_factor(box[2] - box[0], box[3] - box[1], size, size) if encoded.scalable else 1
        pixels, remark = encoded.pixels(factor, box[3])
    left, top, right, bottom = scaled_box(box, factor)
    image = _resized(pixels[top:bottom, left:right], size, size)
    if is_mirrored:
        image = image.flip(1)  # six times as fast as numpy's copy of a mirrored view
    if out is None:
        return image.numpy(), remark
    torch.from_numpy(out).copy_(image)
    return out, remark


def evaluation_image(data: bytes, size: int) -> tuple[NDArray[np.uint8], str | None]:
    """The centre of an encoded image as (size, size, 3), and a remark as from `decode`.

    The shorter edge becomes round(size * 256 / 224) pixels, the longer one keeps the form, rounded down. The image is
    decoded whole, whatever its size: accuracies are compared with those of others.

    Raises:
        ValueError: the image is empty, truncated, or none.
    """
    pixels, remark = decode(data)
    height, width = pixels.shape[:2]
    shorter, least = round(size * EVALUATION_EDGE), min(width, height)
    wide, high = shorter * width // least, shorter * height // least
    resized = resize(pixels, high, wide)
    left, top = (wide - size) // 2, (high - size) // 2
    return np.ascontiguousarray(resized[top : top + size, left : left + size]), remark


class JpegReader(InHalves):
    """Samples of an image set: image (S, S, 3) uint8, RGB, and label () int64.

    Args:
        images: the set.
        image_size: S, pixels.
        seed: of crops and flips.
        training: random crops, or else the centre.
        labels: of each class of the set, its label; None: as the set counts.
        decoding: what of an image is decoded in training.
    """

    def __init__(
        self,
        images: ImageSet,
        image_size: int,
        seed: int,
        *,
        training: bool = True,
        labels: tuple[int, ...] | None = None,
        decoding: Decoding = "region",
    ) -> None:
        self._decoding = decoding
        self._images, self._size, self._seed = images, image_size, seed
        self._training, self._labels = training, labels

    @property
    def num_samples(self) -> int:
        """Images in the set."""
        return self._images.num_samples

    def fetch(self, index: int) -> Raw:
        """The encoded image.

        Raises:
            BadSampleError: the file is missing, unreadable or cut off.
        """
        try:
            return Raw(self._images.read(index))
        except OSError as error:
            raise BadSampleError(f"{self._images.name(index)}: {error.strerror or error}") from None
        except ValueError as error:
            raise BadSampleError(f"{self._images.name(index)}: {error}") from None

    def prepare(self, key: Key, data: bytes, out: Arrays | None = None) -> Sample:
        """One image; in training augmented by a generator of the seed and the key.

        Raises:
            BadSampleError: the image is empty or damaged.
        """
        epoch, index = key
        try:
            if self._training:
                generator = np.random.default_rng([self._seed, epoch, index])
                place = None if out is None else out["image"]
                image, remark = training_image(data, self._size, generator, self._decoding, place)
            else:
                image, remark = evaluation_image(data, self._size)
        except ValueError as error:
            raise BadSampleError(f"{self._images.name(index)}: {error}") from None
        converted = None if remark is None else f"{self._images.name(index)}: {remark}"
        return Sample({"image": image, "label": self._label(index)}, converted)

    def _label(self, index: int) -> NDArray[np.int64]:
        label = self._images.label(index)
        return np.asarray(label if self._labels is None else self._labels[label], dtype=np.int64)

    def num_bytes(self, index: int) -> int:
        """Bytes of the encoded image."""
        try:
            return self._images.num_bytes(index)
        except OSError as error:
            raise BadSampleError(f"{self._images.name(index)}: {error.strerror or error}") from None

    def labels(self) -> NDArray[np.int32]:
        """The class of each image, as the set counts them."""
        return self._images.labels

    def name(self, index: int) -> str:
        """File, and place in it."""
        return self._images.name(index)

    def files(self) -> list[Path]:
        """Images or shards."""
        return self._images.files()

    def describe(self) -> dict[str, object]:
        """Kind, path, classes, digest of the index, remarks on how the set was understood, decoder and decoding."""
        is_region = self._training and self._decoding == "region" and decodes_regions()
        return {
            "kind": self._images.kind,
            "path": path_text(self._images.root),
            "classes": len(self._images.classes),
            "index_sha256": self._images.sha256,
            "remarks": [text.encode("utf-8", "backslashreplace").decode("utf-8") for text in self._images.remarks],
            "decoder": decoder(),
            "decode": "region" if is_region else "full",
        }

    def close(self) -> None:
        """Closes files; reading again opens them again."""
        self._images.close()

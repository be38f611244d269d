"""JPEG files become normalised crops: decode, random-resized crop, flip, scale.

The augmentation is Inception's (Szegedy et al., "Going Deeper with Convolutions", 2014, section 6): an area of 8 % to
100 % of the image at an aspect ratio of 3/4 to 4/3, resized to a square, mirrored in half of the cases. The resize is
bilinear with anti-aliasing, done on 8-bit pixels.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

import numpy as np

from dlbench.datasets.jpeg_tree import JpegTree
from dlbench.errors import EnvironmentLacksError
from dlbench.node.data.reader import BadSampleError, Sample, path_text
from dlbench.node.data.sharding import Key

if TYPE_CHECKING:
    from numpy.typing import NDArray

try:
    import simplejpeg
except ImportError:  # Pillow decodes too, at about half the speed
    simplejpeg = None
try:
    from PIL import Image, UnidentifiedImageError
except ImportError:
    raise EnvironmentLacksError("Pillow is not installed; pip install 'dlbench[node]'") from None

# Mean and standard deviation of ImageNet's pixels in [0, 1], as the field uses them.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
AREA = (0.08, 1.0)
ASPECT = (3 / 4, 4 / 3)
_SCALE = np.array([1 / (255 * s) for s in STD], dtype=np.float32)
_SHIFT = np.array([-m / s for m, s in zip(MEAN, STD, strict=True)], dtype=np.float32)

Box = tuple[int, int, int, int]


def decode(data: bytes) -> tuple[NDArray[np.uint8], str | None]:
    """An encoded image as (H, W, 3) RGB, and what it was if not a JPEG of three colour channels.

    Grey images get three equal channels; CMYK and other forms that Pillow knows are converted by Pillow.

    Raises:
        ValueError: it is empty, truncated or no image.
    """
    if not data:
        raise ValueError("empty file")
    if simplejpeg is not None and data.startswith(b"\xff\xd8"):
        try:
            _height, _width, colours, _subsampling = simplejpeg.decode_jpeg_header(data)
            if colours in ("YCbCr", "RGB", "Gray"):
                return simplejpeg.decode_jpeg(data, "RGB"), "grey" if colours == "Gray" else None
        except ValueError as error:
            raise ValueError(str(error).strip() or "damaged JPEG") from None
    try:
        with Image.open(io.BytesIO(data)) as opened:
            kind = f"{opened.format}, {opened.mode}"
            pixels = np.asarray(opened.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = "not an image" if isinstance(error, UnidentifiedImageError) else str(error)
        raise ValueError(reason.splitlines()[0] if reason else type(error).__name__) from None
    return pixels, {"JPEG, RGB": None, "JPEG, L": "grey"}.get(kind, kind)


def crop_box(width: int, height: int, generator: np.random.Generator) -> Box:
    """A random-resized crop as left, top, right, bottom in pixels.

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


def prepare(pixels: NDArray[np.uint8], size: int, generator: np.random.Generator) -> NDArray[np.float32]:
    """(H, W, 3) uint8 -> (3, size, size) float32, cropped, perhaps mirrored, normalised."""
    height, width = pixels.shape[:2]
    left, top, right, bottom = crop_box(width, height, generator)
    # Only the crop is handed to Pillow, which copies what it gets.
    image = Image.fromarray(pixels[top:bottom, left:right])
    resized = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR))
    if generator.random() < 0.5:
        resized = resized[:, ::-1]
    out: NDArray[np.float32] = np.empty((3, size, size), dtype=np.float32)
    for channel in range(3):
        np.multiply(resized[:, :, channel], _SCALE[channel], out=out[channel])
        out[channel] += _SHIFT[channel]
    return out


class JpegReader:
    """Samples of a JPEG tree: image (3, size, size) float32 and label () int64."""

    def __init__(self, tree: JpegTree, image_size: int, seed: int) -> None:
        self._tree, self._size, self._seed = tree, image_size, seed

    @property
    def num_samples(self) -> int:
        """Images in the tree."""
        return self._tree.num_samples

    def read(self, key: Key) -> Sample:
        """One image, augmented by a generator of the seed and the key.

        Raises:
            BadSampleError: the file is missing, unreadable, empty or damaged.
        """
        epoch, index = key
        path = self._tree.path(index)
        try:
            pixels, kind = decode(path.read_bytes())
        except OSError as error:
            raise BadSampleError(f"{str(path)!r}: {error.strerror}") from None
        except ValueError as error:
            raise BadSampleError(f"{str(path)!r}: {error}") from None
        image = prepare(pixels, self._size, np.random.default_rng([self._seed, epoch, index]))
        label = np.int64(self._tree.label(index))
        converted = None if kind is None else f"{str(path)!r}: {kind}, converted to RGB"
        return Sample({"image": image, "label": np.asarray(label)}, converted)

    def describe(self) -> dict[str, object]:
        """Kind, path, classes and digest of the file names."""
        return {
            "kind": "jpeg-tree",
            "path": path_text(self._tree.root),
            "classes": len(self._tree.classes),
            "index_sha256": self._tree.sha256,
            "decoder": "Pillow" if simplejpeg is None else "simplejpeg",
        }

    def close(self) -> None:
        """Files are open only while they are read."""

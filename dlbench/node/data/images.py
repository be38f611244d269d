"""Encoded images become crops of 8-bit pixels: decode, random-resized crop and flip, or resize and centre crop.

Training is Inception's augmentation (Szegedy et al., "Going Deeper with Convolutions", 2014, section 6): an area of 8 %
to 100 % of the image at an aspect ratio of 3/4 to 4/3, resized to a square, mirrored in half of the cases. Validation
is the field's single centre crop: the shorter edge becomes 256/224 of the crop's. Resizing is bilinear with
anti-aliasing (as Pillow's, to one level). Pixels stay 8-bit, channels last; the device normalises them.

A training crop that would be shrunk by two or more is decoded at a half, a quarter or an eighth of its size (see
jpeg_decode). At 224 pixels that needs crops of 448 pixels or more, so it acts on large photographs only. What a crop
does not need is not decoded, where that is built, which changes no pixel of it. `full` leaves both out.

Or a GPU decodes: dlbench reads the files and draws crops and flips, nvImageCodec decodes the regions. Order and
augmentation are those of dlbench's own reader. Pixels may differ from its by rounding: another decoder, and a resize in
floating point; a crop is never decoded at a smaller scale. nvImageCodec takes the JPEG engines of GPUs that have them,
CUDA otherwise, and the CPU for what neither can.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from dlbench.datasets.images.image_set import JpegTree, open_image_set, require_classes
from dlbench.datasets.images.jpeg_decode import FACTORS, Box, Decoding, decode, inspect, region_function
from dlbench.datasets.images.shards import ImageSet, ImageShards, ShardIndex
from dlbench.datasets.making.image_recipes import class_labels
from dlbench.datasets.splits import Split
from dlbench.errors import EnvironmentLacksError, UserError
from dlbench.node.data.one_lister import ALONE, Lister
from dlbench.node.data.reader import NAMES_FROM, Arrays, BadSampleError, DataReader, PreparedSample, Raw, path_text
from dlbench.node.data.sharding import Key
from dlbench.opening import why_unreadable
from dlbench.specs.workload import ResNetModel

AREA = (0.08, 1.0)
ASPECT = (3 / 4, 4 / 3)
EVALUATION_EDGE = 256 / 224
"""Shorter edge of a validation image over that of its centre crop (Krizhevsky et al. 2012: 256 and 224)."""
Batch = dict[str, torch.Tensor]
NAME = "nvImageCodec"


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

    `box`: on the whole image; no smaller than `factor` pixels. `factor`: how many times smaller the decoded image is.
    """
    if factor == 1:
        return box
    half = factor // 2
    left, top, right, bottom = ((edge + half) // factor for edge in box)
    return left, top, right, bottom


def resize(pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """(H, W, 3) -> (height, width, 3), bilinear with anti-aliasing."""
    out = np.empty((height, width, 3), np.uint8)
    _resize(pixels, out)
    return out


def _resize(pixels: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    # torch's 8-bit code for channels-last images is four to five times as fast as Pillow's (measured on AVX2). It is
    # what `interpolate` calls, which takes no place for the result; by `torch.ops` it takes 25 us longer.
    image, place = (torch.from_numpy(array).permute(2, 0, 1)[None] for array in (pixels, out))
    torch._C._nn._upsample_bilinear2d_aa(image, out.shape[:2], False, None, None, out=place)  # type: ignore[call-arg]


def training_image(
    data: bytes, size: int, generator: np.random.Generator, decoding: Decoding = "region"
) -> Callable[[NDArray[np.uint8] | None], tuple[NDArray[np.uint8], str | None]]:
    """A random part of an encoded image: its header is read and the part drawn; the rest when the result is called.

    That takes an array (size, size, 3) to be filled, or None for a new one, and returns it with the part, perhaps
    mirrored, and a remark as from `decode`. `decoding`: see `dlbench.specs.workload`.
    Raises ValueError, at once or then: the image is empty, truncated, or none.
    """
    encoded = inspect(data)
    box, is_mirrored = training_crop(encoded.width, encoded.height, generator)
    factor, is_whole = 1, decoding == "full"
    if encoded.scalable and not is_whole:
        factor = decode_factor(box[2] - box[0], box[3] - box[1], size, size)
    part = left, top, right, bottom = scaled_box(box, factor)

    def finish(out: NDArray[np.uint8] | None) -> tuple[NDArray[np.uint8], str | None]:
        pixels, remark = encoded.pixels(factor, None if is_whole else part)
        if is_whole:
            pixels = pixels[top:bottom, left:right]
        place = np.empty((size, size, 3), np.uint8) if out is None else out
        _resize(pixels, place)
        if is_mirrored:
            image = torch.from_numpy(place)
            image.copy_(image.flip(1))  # six times as fast as numpy's copy of a mirrored view
        return place, remark

    return finish


def evaluation_image(data: bytes, size: int) -> tuple[NDArray[np.uint8], str | None]:
    """The centre of an encoded image as (size, size, 3), and a remark as from `decode`.

    The shorter edge becomes round(size * 256 / 224) pixels, the longer one keeps the form, rounded down. The image is
    decoded whole, whatever its size: accuracies are compared with those of others.
    Raises ValueError: the image is empty, truncated, or none.
    """
    pixels, remark = decode(data)
    height, width = pixels.shape[:2]
    shorter, least = round(size * EVALUATION_EDGE), min(width, height)
    wide, high = shorter * width // least, shorter * height // least
    resized = resize(pixels, high, wide)
    left, top = (wide - size) // 2, (high - size) // 2
    return np.ascontiguousarray(resized[top : top + size, left : left + size]), remark


class JpegReader(DataReader):
    """Samples of an image set: image (S, S, 3) uint8, RGB, and label () int64.

    `image_size`: S, pixels. `labels`: of each class of the set, its label; None: as the set counts. `decoding`: what of
    an image is decoded in training.
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
        self.num_samples = images.num_samples

    def fetch(self, index: int, out: Arrays | None = None) -> Raw:
        """The encoded image."""
        try:
            return Raw(self._images.read(index))
        except (OSError, ValueError) as error:
            raise BadSampleError(f"{self._images.name(index)}: {why_unreadable(error)}") from None

    def begin(self, key: Key, data: bytes) -> Callable[[Arrays | None], PreparedSample]:
        """Reads its header and, in training, draws its crop by a generator of the seed and the key."""
        index, label = key[1], self._label(key[1])
        try:
            drawn = training_image(data, self._size, self._generator(key), self._decoding) if self._training else None
        except ValueError as error:
            raise BadSampleError(f"{self.name(index)}: {error}") from None

        def finish(out: Arrays | None) -> PreparedSample:
            try:
                if drawn is None:
                    image, remark = evaluation_image(data, self._size)
                else:
                    image, remark = drawn(None if out is None else out["image"])
            except ValueError as error:
                raise BadSampleError(f"{self.name(index)}: {error}") from None
            return PreparedSample(
                {"image": image, "label": label}, None if remark is None else f"{self.name(index)}: {remark}"
            )

        return finish

    def prepare(self, key: Key, data: bytes, out: Arrays | None = None) -> PreparedSample:
        """One image; in training augmented."""
        return self.begin(key, data)(out)

    def _generator(self, key: Key) -> np.random.Generator:
        # As of the list of the three, but quicker.
        return np.random.default_rng(np.array([self._seed, *key], np.uint32))

    def _label(self, index: int) -> NDArray[np.int64]:
        label = self._images.label(index)
        return np.asarray(label if self._labels is None else self._labels[label], dtype=np.int64)

    def num_bytes(self, index: int) -> int:
        try:
            return self._images.num_bytes(index)
        except OSError as error:
            raise BadSampleError(f"{self._images.name(index)}: {error.strerror or error}") from None

    def labels(self) -> NDArray[np.int32]:
        return self._images.labels

    def name(self, index: int) -> str:
        return self._images.name(index)

    def files(self) -> Sequence[Path]:
        return self._images.files()

    def describe(self) -> dict[str, object]:
        is_region, (crops, decoder) = self._training and self._decoding == "region", region_function()
        decoded = "crops, progressive files whole" if is_region and crops else "whole images"
        return {
            "kind": self._images.kind,
            "path": path_text(self._images.root),
            "classes": len(self._images.classes),
            "index_sha256": self._images.sha256,
            "names_from": NAMES_FROM if self._images.kind == "jpeg-tree" else None,
            "remarks": [text.encode("utf-8", "backslashreplace").decode("utf-8") for text in self._images.remarks],
            "decoder": decoder,
            "decode": "region" if is_region and decoder != "Pillow" else "full",
            "decoded": decoded + ", at a smaller scale where that is enough" * is_region,
        }

    def close(self) -> None:
        self._images.close()


class EncodedReader(JpegReader):
    """Samples of an image set as they are stored, with the crop and the flip that training wants.

    encoded (L,) uint8, of unlike lengths; box (4,) int64: left, top, right, bottom; is_mirrored () bool; index ()
    int64; label () int64.
    """

    def begin(self, key: Key, data: bytes) -> Callable[[Arrays | None], PreparedSample]:
        """One image; augmented as dlbench's own reader would."""
        index = key[1]
        try:
            encoded = inspect(data)
        except ValueError as error:
            raise BadSampleError(f"{self.name(index)}: {error}") from None
        box, is_mirrored = training_crop(encoded.width, encoded.height, self._generator(key))
        arrays: dict[str, NDArray[Any]] = {
            "encoded": np.frombuffer(data, np.uint8),
            "box": np.asarray(box),
            "is_mirrored": np.asarray(is_mirrored),
            "index": np.asarray(index),
            "label": self._label(index),
        }
        converted = None if encoded.kind is None else f"{self.name(index)}: {encoded.kind}, converted to RGB"
        return lambda _out: PreparedSample(arrays, converted)

    def describe(self) -> dict[str, object]:
        version = getattr(nvimagecodec(), "__version__", "unknown")
        decoded = "crops" if self._decoding == "region" else "whole images"
        return {**super().describe(), "decoder": f"{NAME} {version}", "decode": self._decoding, "decoded": decoded}


def nvimagecodec() -> Any:
    """The library."""
    try:
        from nvidia import nvimgcodec
    except ImportError as error:
        # Of torch's CUDA: a process should not have two of its runtimes.
        extra = "gpu-input-cu12" if str(torch.version.cuda).startswith("12.") else "gpu-input"
        raise EnvironmentLacksError(
            f"data.reader is nvimagecodec, but {NAME} cannot be imported ({error}): pip install 'dlbench[{extra}]', "
            "or set data.reader to dlbench"
        ) from None
    return nvimgcodec


class RegionDecoder:
    """Batches of `EncodedReader` become batches of pixels: image (N, S, S, 3) uint8, and label (N,) int64.

    `device`: which decodes; for tests also the CPU. `is_whole`: decode all of an image and crop it then. `name`: file,
    and place in it, of a sample.
    """

    def __init__(self, device: torch.device, image_size: int, *, is_whole: bool, name: Callable[[int], str]) -> None:
        self._library = library = nvimagecodec()
        self._device, self._size, self._is_whole, self._name = device, image_size, is_whole, name
        on_gpu = device.type == "cuda"
        self._decoder = library.Decoder(
            device_id=device.index if on_gpu else library.NVIMGCODEC_DEVICE_CPU_ONLY,
            backends=None if on_gpu else [library.Backend(library.BackendKind.CPU_ONLY)],
            max_num_cpu_threads=len(os.sched_getaffinity(0)),
            options=":fancy_upsampling=1",  # colours interpolated between pixels, as libjpeg's
        )
        self._params = library.DecodeParams(
            apply_exif_orientation=False, color_spec=library.ColorSpec.SRGB, sample_format=library.SampleFormat.I_RGB
        )

    def __call__(self, batch: Batch) -> tuple[Batch, object]:
        """The batch on the device, in the order of its current stream, and what must live until it is there."""
        boxes = batch["box"].tolist()
        decoded = self._decoded(batch["encoded"].numpy(), batch["ends"].tolist(), boxes)
        for image, index in zip(decoded, batch["index"].tolist(), strict=True):
            if image is None:
                raise UserError(
                    f"{self._name(index)}: {NAME} cannot decode it; repair it, or set data.reader to dlbench, which "
                    "can pass over such samples"
                )
        pixels = torch.empty((len(boxes), self._size, self._size, 3), dtype=torch.uint8, device=self._device)
        for place, (image, box, is_mirrored) in enumerate(
            zip(decoded, boxes, batch["is_mirrored"].tolist(), strict=True)
        ):
            if self._device.type == "cuda":
                region = from_dlpack(image).to(self._device)  # without a copy
            else:
                region = torch.from_numpy(np.asarray(image))  # its DLPack asks for a GPU, even of pixels on the host
            if self._is_whole:
                left, top, right, bottom = box
                region = region[top:bottom, left:right]
            resized = _resized_float(region, self._size)
            pixels[place] = resized.flip(1) if is_mirrored else resized
        return {"image": pixels, "label": batch["label"].to(self._device, non_blocking=True)}, decoded

    def _decoded(self, encoded: NDArray[np.uint8], ends: list[int], boxes: list[list[int]]) -> list[Any]:
        library, streams, start = self._library, [], 0
        for end, (left, top, right, bottom) in zip(ends, boxes, strict=True):
            stream = library.CodeStream(encoded[start:end])
            if not self._is_whole:
                stream = stream.get_sub_code_stream(region=library.Region(top, left, bottom, right))
            streams.append(stream)
            start = end
        current = torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0
        found: list[Any] = self._decoder.decode(streams, params=self._params, cuda_stream=current)
        return found


def _resized_float(region: torch.Tensor, size: int) -> torch.Tensor:
    """(H, W, 3) uint8 -> (size, size, 3) uint8, bilinear with anti-aliasing, in floating point: CUDA has no other."""
    planes = region.permute(2, 0, 1)[None].float()
    resized = torch.nn.functional.interpolate(planes, (size, size), mode="bilinear", antialias=True)
    return resized[0].permute(1, 2, 0).round_().clamp_(0, 255).to(torch.uint8)


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
) -> DataReader:
    """A reader of one split: a tree of JPEGs, or tar or TFRecord shards.

    `training`: random-resized crops and flips, or else the centre crop. `classes`: names by label, for a set whose own
    classes may be fewer (validation); None: the set's own. `by_gpu`: images are decoded by the GPU, not here.
    """
    images = _listed(source, "train" if training else "validation", lister)
    known = images.classes if classes is None else classes
    require_classes(len(known), model, f"data.source {str(source)!r}")
    labels = None if classes is None else class_labels(images, classes)
    kind: type[JpegReader] = JpegReader
    if by_gpu:
        kind = EncodedReader
    return kind(images, model.image_size, seed, training=training, labels=labels, decoding=decoding)


def _listed(source: Path, split: Split, lister: Lister) -> ImageSet:
    def listed() -> JpegTree | ShardIndex:
        images = open_image_set(source, split)
        if isinstance(images, ImageShards):
            return images.index
        assert isinstance(images, JpegTree)
        return images

    found = lister.index(listed, (JpegTree, ShardIndex))
    return ImageShards(source, found) if isinstance(found, ShardIndex) else found


def image_classes(source: Path, lister: Lister = ALONE) -> tuple[str, ...]:
    """The names of the classes of training data, by label."""
    return lister.index(lambda: open_image_set(source, "train").classes, ())

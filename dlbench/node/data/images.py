"""Encoded images to crops of 8-bit pixels: decode, random-resized crop and flip, or resize and centre crop. Training
uses Inception's augmentation (Szegedy et al., "Going Deeper with Convolutions", 2014, section 6): 8 % to 100 % of the
area at an aspect ratio of 3/4 to 4/3. Resizing is bilinear with anti-aliasing, equal to Pillow's within one level.
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
from dlbench.node.data.node_sharing import ALONE, IndexBroadcast
from dlbench.node.data.reader import NAMES_FROM, Arrays, DataReader, Key, PreparedSample, Raw, path_text
from dlbench.opening import why_unreadable
from dlbench.specs.workload import ResNetModel

AREA = (0.08, 1.0)
ASPECT = (3 / 4, 4 / 3)
EVALUATION_EDGE = 256 / 224  # Shorter edge of a validation image over its centre crop's (Krizhevsky et al. 2012).
Batch = dict[str, torch.Tensor]
NAME = "nvImageCodec"


def crop_box(width: int, height: int, generator: np.random.Generator) -> Box:
    """Draws a random-resized crop; after ten draws that do not fit, returns the largest central one allowed."""
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
    """Draws a random-resized crop, and whether it is mirrored."""
    return crop_box(width, height, generator), generator.random() < 0.5


def decode_factor(width: int, height: int, least_width: int, least_height: int) -> int:
    """Returns by what factor an area may be decoded smaller and still have the least width and height."""
    return next(f for f in FACTORS if f == 1 or (width >= f * least_width and height >= f * least_height))


def scaled_box(box: Box, factor: int) -> Box:
    """Converts a box of the full image to one of the image decoded `factor` times smaller, rounded to whole pixels."""
    if factor == 1:
        return box
    half = factor // 2
    left, top, right, bottom = ((edge + half) // factor for edge in box)
    return left, top, right, bottom


def resize(pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Resizes (H, W, 3) to (height, width, 3), bilinear with anti-aliasing."""
    out = np.empty((height, width, 3), np.uint8)
    _resize(pixels, out)
    return out


def _resize(pixels: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    # torch's 8-bit code for channels-last images is four to five times as fast as Pillow's (measured on AVX2).
    # `interpolate` calls this function, too, but without `out`; through `torch.ops` it takes 25 us longer.
    image, resized = (torch.from_numpy(array).permute(2, 0, 1)[None] for array in (pixels, out))
    torch._C._nn._upsample_bilinear2d_aa(image, out.shape[:2], False, None, None, out=resized)  # type: ignore[call-arg]


def training_image(
    data: bytes, size: int, generator: np.random.Generator, decoding: Decoding = "region"
) -> Callable[[NDArray[np.uint8] | None], tuple[NDArray[np.uint8], str | None]]:
    """Reads the header of an encoded image and draws a random crop; the returned function decodes it into an array
    (size, size, 3), a new one for None, and returns a remark of `decode`, too. Both raise ValueError if it is empty,
    truncated, or no image.
    """
    encoded = inspect(data)
    box, is_mirrored = training_crop(encoded.width, encoded.height, generator)
    factor, is_whole = 1, decoding == "full"
    if encoded.scalable and not is_whole:
        factor = decode_factor(box[2] - box[0], box[3] - box[1], size, size)
    crop = scaled_box(box, factor)

    def finish(out: NDArray[np.uint8] | None) -> tuple[NDArray[np.uint8], str | None]:
        if is_whole:
            pixels, remark = encoded.pixels(factor, None)
            left, top, right, bottom = crop
            pixels = pixels[top:bottom, left:right]
        else:
            pixels, remark = encoded.pixels(factor, crop)
        if out is None:
            out = np.empty((size, size, 3), np.uint8)
        _resize(pixels, out)
        if is_mirrored:
            image = torch.from_numpy(out)
            image.copy_(image.flip(1))  # six times as fast as numpy's copy of a mirrored view
        return out, remark

    return finish


def evaluation_image(data: bytes, size: int) -> tuple[NDArray[np.uint8], str | None]:
    """Returns the centre crop of an encoded image, (size, size, 3), and a remark of `decode`; ValueError if it is none.
    It is decoded at full size, so that accuracies are comparable with others.
    """
    pixels, remark = decode(data)
    height, width = pixels.shape[:2]
    shorter, short_edge = round(size * EVALUATION_EDGE), min(width, height)
    wide, high = shorter * width // short_edge, shorter * height // short_edge
    resized = resize(pixels, high, wide)
    left, top = (wide - size) // 2, (high - size) // 2
    return np.ascontiguousarray(resized[top : top + size, left : left + size]), remark


class JpegReader(DataReader):
    """Samples of an image set: image (S, S, 3) uint8, RGB, and label () int64, from `labels` by class if given."""

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
        try:
            return Raw(self._images.read(index))
        except (OSError, ValueError) as error:
            raise self._bad(index, why_unreadable(error)) from None

    def begin(self, key: Key, data: bytes) -> Callable[[Arrays | None], PreparedSample]:
        """Reads the image's header and, in training, draws its crop by a generator of the seed and the key."""
        index, label = key[1], self._label(key[1])
        decode_crop = None
        try:
            if self._training:
                decode_crop = training_image(data, self._size, self._generator(key), self._decoding)
        except ValueError as error:
            raise self._bad(index, error) from None

        def finish(out: Arrays | None) -> PreparedSample:
            try:
                if decode_crop is None:
                    image, remark = evaluation_image(data, self._size)
                else:
                    image, remark = decode_crop((out or {}).get("image"))
            except ValueError as error:
                raise self._bad(index, error) from None
            if remark is not None:
                remark = f"{self.name(index)}: {remark}"
            return PreparedSample({"image": image, "label": label}, remark)

        return finish

    def prepare(self, key: Key, data: bytes, out: Arrays | None = None) -> PreparedSample:
        return self.begin(key, data)(out)

    def _generator(self, key: Key) -> np.random.Generator:
        # An array gives the same numbers as a list, but faster.
        return np.random.default_rng(np.array([self._seed, *key], np.uint32))

    def _label(self, index: int) -> NDArray[np.int64]:
        label = self._images.label(index)
        if self._labels is not None:
            label = self._labels[label]
        return np.asarray(label, dtype=np.int64)

    def num_bytes(self, index: int) -> int:
        try:
            return self._images.num_bytes(index)
        except OSError as error:
            raise self._bad(index, error.strerror or error) from None

    def labels(self) -> NDArray[np.int32]:
        return self._images.labels

    def name(self, index: int) -> str:
        return self._images.name(index)

    def files(self) -> Sequence[Path]:
        return self._images.files()

    def describe(self) -> dict[str, object]:
        decodes_crops, decoder = region_function()
        decode, decoded, names_from = "full", "whole images", None
        if self._training and self._decoding == "region":
            if decoder != "Pillow":
                decode = "region"
            if decodes_crops:
                decoded = "crops, progressive files whole"
            decoded += ", at a smaller scale where that is enough"
        if self._images.kind == "jpeg-tree":
            names_from = NAMES_FROM
        return {
            "kind": self._images.kind,
            "path": path_text(self._images.root),
            "classes": len(self._images.classes),
            "index_sha256": self._images.sha256,
            "names_from": names_from,
            "remarks": [text.encode("utf-8", "backslashreplace").decode("utf-8") for text in self._images.remarks],
            "decoder": decoder,
            "decode": decode,
            "decoded": decoded,
        }

    def close(self) -> None:
        self._images.close()


class EncodedReader(JpegReader):
    """Encoded samples: encoded (L,) uint8, box (4,) int64, is_mirrored () bool, index () int64, label () int64."""

    def begin(self, key: Key, data: bytes) -> Callable[[Arrays | None], PreparedSample]:
        index = key[1]
        try:
            encoded = inspect(data)
        except ValueError as error:
            raise self._bad(index, error) from None
        box, is_mirrored = training_crop(encoded.width, encoded.height, self._generator(key))
        arrays: dict[str, NDArray[Any]] = {
            "encoded": np.frombuffer(data, np.uint8),
            "box": np.asarray(box),
            "is_mirrored": np.asarray(is_mirrored),
            "index": np.asarray(index),
            "label": self._label(index),
        }
        converted = None
        if encoded.kind is not None:
            converted = f"{self.name(index)}: {encoded.kind}, converted to RGB"
        return lambda _out: PreparedSample(arrays, converted)

    def describe(self) -> dict[str, object]:
        version = getattr(nvimagecodec(), "__version__", "unknown")
        decoded = "crops" if self._decoding == "region" else "whole images"
        return {**super().describe(), "decoder": f"{NAME} {version}", "decode": self._decoding, "decoded": decoded}


def nvimagecodec() -> Any:
    """Imports nvImageCodec."""
    try:
        from nvidia import nvimgcodec
    except ImportError as error:
        # For torch's version of CUDA: a process should not have two CUDA runtimes.
        extra = "gpu-input-cu12" if str(torch.version.cuda).startswith("12.") else "gpu-input"
        raise EnvironmentLacksError(
            f"data.reader is nvimagecodec, but {NAME} cannot be imported ({error}): pip install 'dlbench[{extra}]', "
            "or set data.reader to dlbench"
        ) from None
    return nvimgcodec


class RegionDecoder:
    """Decodes batches of `EncodedReader` to image (N, S, S, 3) uint8, and label (N,) int64. With `is_whole`, images are
    decoded completely and then cropped. `name` returns the file of a sample for messages.
    """

    def __init__(self, device: torch.device, image_size: int, *, is_whole: bool, name: Callable[[int], str]) -> None:
        self._library = library = nvimagecodec()
        self._device, self._size, self._is_whole, self._name = device, image_size, is_whole, name
        device_id, backends = device.index, None
        if device.type != "cuda":
            device_id, backends = library.NVIMGCODEC_DEVICE_CPU_ONLY, [library.Backend(library.BackendKind.CPU_ONLY)]
        self._decoder = library.Decoder(
            device_id=device_id,
            backends=backends,
            max_num_cpu_threads=len(os.sched_getaffinity(0)),
            options=":fancy_upsampling=1",  # interpolates colours between pixels, like libjpeg
        )
        self._params = library.DecodeParams(
            apply_exif_orientation=False, color_spec=library.ColorSpec.SRGB, sample_format=library.SampleFormat.I_RGB
        )

    def __call__(self, batch: Batch) -> tuple[Batch, object]:
        """Returns the batch on the device, in its current stream, and objects that must live until it is decoded."""
        boxes = batch["box"].tolist()
        decoded = self._decoded(batch["encoded"].numpy(), batch["ends"].tolist(), boxes)
        for image, index in zip(decoded, batch["index"].tolist(), strict=True):
            if image is None:
                raise UserError(
                    f"{self._name(index)}: {NAME} cannot decode it; repair it, or set data.reader to dlbench, which "
                    "can skip such samples"
                )
        pixels = torch.empty((len(boxes), self._size, self._size, 3), dtype=torch.uint8, device=self._device)
        for target, image, box, is_mirrored in zip(pixels, decoded, boxes, batch["is_mirrored"].tolist(), strict=True):
            if self._device.type == "cuda":
                region = from_dlpack(image).to(self._device)  # without a copy
            else:
                region = torch.from_numpy(np.asarray(image))  # its DLPack needs a GPU, even for pixels on the host
            if self._is_whole:
                left, top, right, bottom = box
                region = region[top:bottom, left:right]
            resized = _resized_float(region, self._size)
            target.copy_(resized.flip(1) if is_mirrored else resized)
        return {"image": pixels, "label": batch["label"].to(self._device, non_blocking=True)}, decoded

    def _decoded(self, encoded: NDArray[np.uint8], ends: list[int], boxes: list[list[int]]) -> list[Any]:
        library, streams, start = self._library, [], 0
        for end, (left, top, right, bottom) in zip(ends, boxes, strict=True):
            stream = library.CodeStream(encoded[start:end])
            if not self._is_whole:
                stream = stream.get_sub_code_stream(region=library.Region(top, left, bottom, right))
            streams.append(stream)
            start = end
        cuda_stream = 0
        if self._device.type == "cuda":
            cuda_stream = torch.cuda.current_stream(self._device).cuda_stream
        images: list[Any] = self._decoder.decode(streams, params=self._params, cuda_stream=cuda_stream)
        return images


def _resized_float(region: torch.Tensor, size: int) -> torch.Tensor:
    """Resizes (H, W, 3) uint8 to (size, size, 3) uint8, bilinear with anti-aliasing, in fp32, as CUDA requires."""
    planes = region.permute(2, 0, 1)[None].float()
    resized = torch.nn.functional.interpolate(planes, (size, size), mode="bilinear", antialias=True)
    return resized[0].permute(1, 2, 0).round_().clamp_(0, 255).to(torch.uint8)


def open_images(  # noqa: PLR0913  (each option of the data is an argument)
    source: Path,
    model: ResNetModel,
    seed: int,
    *,
    training: bool,
    classes: tuple[str, ...] | None = None,
    lister: IndexBroadcast = ALONE,
    decoding: Decoding = "region",
    by_gpu: bool = False,
) -> DataReader:
    """Opens the training or validation split of a tree of JPEGs, or of tar or TFRecord shards. `classes` are the names
    of all labels, for a validation set that may lack some classes.
    """
    split: Split = "train" if training else "validation"
    images = _listed(source, split, lister)
    labels = class_labels(images, classes) if classes is not None else None
    require_classes(len(classes or images.classes), model, f"data.source {str(source)!r}")
    kind: type[JpegReader] = EncodedReader if by_gpu else JpegReader
    return kind(images, model.image_size, seed, training=training, labels=labels, decoding=decoding)


def _listed(source: Path, split: Split, lister: IndexBroadcast) -> ImageSet:
    def listed() -> JpegTree | ShardIndex:
        images = open_image_set(source, split)
        if isinstance(images, ImageShards):
            return images.index
        assert isinstance(images, JpegTree)
        return images

    listing = lister.index(listed, (JpegTree, ShardIndex))
    return ImageShards(source, listing) if isinstance(listing, ShardIndex) else listing


def image_classes(source: Path, lister: IndexBroadcast = ALONE) -> tuple[str, ...]:
    """Returns the names of the classes of training data, by label."""
    return lister.index(lambda: open_image_set(source, "train").classes, ())

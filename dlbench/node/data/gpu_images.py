"""JPEGs that a GPU decodes: dlbench reads the files and draws crops and flips, nvImageCodec decodes the regions.

Order and augmentation are those of dlbench's own reader. Pixels may differ from its by rounding: another decoder, and a
resize in floating point; a crop is never decoded at a smaller scale. nvImageCodec takes the JPEG engines of GPUs that
have them, CUDA otherwise, and the CPU for what neither can.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from dlbench.datasets.images.jpeg_decode import inspect
from dlbench.errors import EnvironmentLacksError, UserError
from dlbench.node.data.jpeg import JpegReader, training_crop
from dlbench.node.data.reader import Arrays, BadSampleError, Sample
from dlbench.node.data.sharding import Key

if TYPE_CHECKING:
    from numpy.typing import NDArray

Batch = dict[str, torch.Tensor]
NAME = "nvImageCodec"


class EncodedReader(JpegReader):
    """Samples of an image set as they are stored, with the crop and the flip that training wants.

    encoded (L,) uint8, of unlike lengths; box (4,) int64: left, top, right, bottom; is_mirrored () bool; index ()
    int64; label () int64.
    """

    def prepare(self, key: Key, data: bytes, out: Arrays | None = None) -> Sample:
        """One image; augmented as dlbench's own reader would.

        Raises:
            BadSampleError: the image is empty, or its header is damaged.
        """
        epoch, index = key
        try:
            encoded = inspect(data)
        except ValueError as error:
            raise BadSampleError(f"{self.name(index)}: {error}") from None
        generator = np.random.default_rng([self._seed, epoch, index])
        box, is_mirrored = training_crop(encoded.width, encoded.height, generator)
        arrays: dict[str, NDArray[Any]] = {
            "encoded": np.frombuffer(data, np.uint8),
            "box": np.asarray(box),
            "is_mirrored": np.asarray(is_mirrored),
            "index": np.asarray(index),
            "label": self._label(index),
        }
        return Sample(arrays, None if encoded.kind is None else f"{self.name(index)}: {encoded.kind}, converted to RGB")

    def describe(self) -> dict[str, object]:
        """As the reader of images, with the decoder."""
        version = getattr(nvimagecodec(), "__version__", "unknown")
        return {**super().describe(), "decoder": f"{NAME} {version}", "decode": self._decoding}


def nvimagecodec() -> Any:
    """The library.

    Raises:
        EnvironmentLacksError: it is not installed, or cannot be loaded.
    """
    try:
        from nvidia import nvimgcodec
    except ImportError as error:
        raise EnvironmentLacksError(
            f"data.reader is nvimagecodec, but {NAME} cannot be imported ({error}): pip install 'dlbench[gpu-input]', "
            "or set data.reader to dlbench"
        ) from None
    return nvimgcodec


class RegionDecoder:
    """Batches of `EncodedReader` become batches of pixels: image (N, S, S, 3) uint8, and label (N,) int64.

    Args:
        device: which decodes; for tests also the CPU.
        image_size: S, pixels.
        is_whole: decode all of an image and crop it then.
        name: file, and place in it, of a sample.

    Raises:
        EnvironmentLacksError: nvImageCodec is not installed.
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
        """The batch on the device, in the order of its current stream, and what must live until that stream is there.

        Raises:
            UserError: an image is damaged; its file is named.
        """
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
            region = self._tensor(image)
            if self._is_whole:
                left, top, right, bottom = box
                region = region[top:bottom, left:right]
            resized = _resized(region, self._size)
            pixels[place] = resized.flip(1) if is_mirrored else resized
        return {"image": pixels, "label": batch["label"].to(self._device, non_blocking=True)}, decoded

    def _tensor(self, image: Any) -> torch.Tensor:
        """(H, W, 3) uint8 on the device, without a copy where it is there."""
        if self._device.type == "cuda":
            return from_dlpack(image).to(self._device)
        return torch.from_numpy(np.asarray(image))  # its DLPack asks for a GPU, even of pixels on the host

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


def _resized(region: torch.Tensor, size: int) -> torch.Tensor:
    """(H, W, 3) uint8 -> (size, size, 3) uint8, bilinear with anti-aliasing, in floating point: CUDA has no other."""
    planes = region.permute(2, 0, 1)[None].float()
    resized = torch.nn.functional.interpolate(planes, (size, size), mode="bilinear", antialias=True)
    return resized[0].permute(1, 2, 0).round_().clamp_(0, 255).to(torch.uint8)

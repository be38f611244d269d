"""Encoded images become pixels, whole or at a half, a quarter or an eighth of their size.

A JPEG is stored as blocks of 8 x 8 frequencies. Taking only the lowest 4 x 4, 2 x 2 or 1 x 1 of each block decodes a
smaller image directly (Independent JPEG Group, `libjpeg.txt`, "scale_num, scale_denom"), which saves work where a crop
would be shrunk anyway. Other ratios exist, but libjpeg-turbo has fast code for the powers of two only.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from dlbench.errors import EnvironmentLacksError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FACTORS = (8, 4, 2, 1)
"""How many times smaller an image can be decoded, from the smallest result to the whole."""
_MOST_PIXELS = 178_956_970
"""Pillow's own bound against decompression bombs; a damaged header may claim 65,535 x 65,535."""
_HARMLESS = "extraneous bytes before marker"
"""libjpeg's warning about bytes between two parts of a file; some old cameras write them, and nothing is missing."""


@cache
def _simplejpeg() -> Any | None:
    try:
        import simplejpeg
    except ImportError:  # Pillow decodes too, at about half the speed
        return None
    return simplejpeg


@cache
def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise EnvironmentLacksError("Pillow is not installed; pip install 'dlbench[data]'") from None
    return Image


def decoder() -> str:
    """Which library decodes JPEGs here: `simplejpeg` or `Pillow`."""
    return "Pillow" if _simplejpeg() is None else "simplejpeg"


@dataclass(frozen=True)
class Encoded:
    """An encoded image whose header has been read."""

    data: bytes
    width: int
    """Pixels."""
    height: int
    """Pixels."""
    kind: str | None
    """What it is, if not a JPEG of three colour channels: `grey`, or format and mode as Pillow names them."""
    fast: bool
    """Whether simplejpeg can decode it."""
    scalable: bool = True
    """Whether it can be decoded smaller: a JPEG."""

    def pixels(self, factor: int = 1) -> tuple[NDArray[np.uint8], str | None]:
        """(ceil(height / factor), ceil(width / factor), 3) RGB, and a remark if it was not read as it was stored.

        Grey images get three equal channels; CMYK and other forms that Pillow knows are converted by Pillow. A pixel is
        `factor` pixels of the whole image wide and high; those of the last row and column may reach beyond it.

        Args:
            factor: one of `FACTORS`, no larger than width and height; 1 if the image is not scalable.

        Raises:
            ValueError: it is truncated or damaged.
        """
        return self._by_simplejpeg(factor) if self.fast else self._by_pillow(factor)

    @property
    def _remark(self) -> str | None:
        return None if self.kind is None else f"{self.kind}, converted to RGB"

    def _by_simplejpeg(self, factor: int) -> tuple[NDArray[np.uint8], str | None]:
        library = _simplejpeg()
        assert library is not None  # `fast` says so
        asked = {} if factor == 1 else {"min_factor": factor, "min_width": -(-self.width // factor)}
        try:
            return library.decode_jpeg(self.data, "RGB", **asked), self._remark
        except ValueError as error:
            reason = _one_line(error)
            if _HARMLESS not in reason:
                raise ValueError(reason) from None
        return library.decode_jpeg(self.data, "RGB", strict=False, **asked), f"{reason}, passed over"

    def _by_pillow(self, factor: int) -> tuple[NDArray[np.uint8], str | None]:
        import numpy as np

        image = _pillow()
        try:
            with image.open(io.BytesIO(self.data)) as opened:
                if factor > 1:
                    # Pillow takes the largest power of two that leaves no less than this.
                    opened.draft(None, (max(1, self.width // factor), max(1, self.height // factor)))
                return np.array(opened.convert("RGB")), self._remark
        except _pillow_errors() as error:
            raise ValueError(_one_line(error)) from None


def _pillow_errors() -> tuple[type[Exception], ...]:
    # What Pillow's decoders raise on damage, as its test-suite of broken files shows.
    return OSError, SyntaxError, ValueError, EOFError, _pillow().DecompressionBombError


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "damaged image"


def inspect(data: bytes) -> Encoded:
    """Reads the header of an encoded image.

    Raises:
        ValueError: it is empty, no image, its header is damaged, or it claims more pixels than any photograph has.
        EnvironmentLacksError: Pillow is not installed.
    """
    if not data:
        raise ValueError("empty file")
    encoded = _jpeg_header(data) or _any_header(data)
    if encoded.width * encoded.height > _MOST_PIXELS:
        raise ValueError(f"header says {encoded.width} x {encoded.height}, at most {_MOST_PIXELS} pixels are read")
    return encoded


def _jpeg_header(data: bytes) -> Encoded | None:
    library = _simplejpeg()
    if library is None or not data.startswith(b"\xff\xd8"):
        return None
    try:
        height, width, colours, _subsampling = library.decode_jpeg_header(data)
    except ValueError as error:
        reason = _one_line(error)
        if _HARMLESS not in reason:
            raise ValueError(reason) from None
        height, width, colours, _subsampling = library.decode_jpeg_header(data, strict=False)
    if colours not in ("YCbCr", "RGB", "Gray"):
        return None
    return Encoded(data, width, height, "grey" if colours == "Gray" else None, True)


def _any_header(data: bytes) -> Encoded:
    from PIL import UnidentifiedImageError

    try:
        with _pillow().open(io.BytesIO(data)) as opened:
            kind, scalable = f"{opened.format}, {opened.mode}", opened.format == "JPEG"
            width, height = opened.size
    except UnidentifiedImageError:
        raise ValueError("not an image") from None
    except _pillow_errors() as error:
        raise ValueError(_one_line(error)) from None
    return Encoded(data, width, height, {"JPEG, RGB": None, "JPEG, L": "grey"}.get(kind, kind), False, scalable)


def decode(data: bytes) -> tuple[NDArray[np.uint8], str | None]:
    """An encoded image as (H, W, 3) RGB, and a remark if it was not stored as a sound JPEG of three colour channels.

    Raises:
        ValueError: it is empty, truncated or no image.
        EnvironmentLacksError: Pillow is not installed.
    """
    return inspect(data).pixels()

"""Encoded images become pixels, whole or at a half, a quarter or an eighth of their size.

A JPEG is stored as blocks of 8 x 8 frequencies. Taking only the lowest 4 x 4, 2 x 2 or 1 x 1 of each block decodes a
smaller image directly (Independent JPEG Group, `libjpeg.txt`, "scale_num, scale_denom"), which saves work where a crop
would be shrunk anyway. Other ratios exist, but libjpeg-turbo has fast code for the powers of two only.

Rows below a wanted region need not be decoded: a baseline JPEG is stored row of blocks by row of blocks, and its header
says how many there are (ITU-T T.81, B.2.2). With a smaller number in the header the decoder stops there. What lies
above or next to the region can be left out in the later stages only, by calls that no Python library passes on.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

from dlbench.errors import EnvironmentLacksError
from dlbench.lazy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Decoding = Literal["region", "full"]
FACTORS = (8, 4, 2, 1)  # how many times smaller an image can be decoded, from the smallest result to the whole
_MOST_PIXELS = 178_956_970  # Pillow's own bound against decompression bombs; a damaged header may claim 65,535 x 65,535
_SEQUENTIAL = (0xC0, 0xC1)  # Frames whose rows are stored once, from the top: baseline and extended, Huffman-coded.
_END = b"\xff\xd9"  # of an image; within coded data 0xff is followed by 0 or the number of a restart
_TAIL = 1024  # bytes in which the end of an image is looked for; some cameras write a few after it
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


def decodes_regions() -> bool:
    """Whether rows that are not needed are left out here: Pillow always decodes all."""
    return _simplejpeg() is not None


@dataclass(frozen=True)
class Encoded:
    """An encoded image whose header has been read."""

    data: bytes
    width: int  # pixels
    height: int  # pixels
    kind: str | None  # If not a JPEG of three colour channels: `grey`, or format and mode as Pillow names them.
    fast: bool  # whether simplejpeg can decode it
    scalable: bool = True  # whether it can be decoded smaller: a JPEG, with simplejpeg of at least 8 pixels' width

    def pixels(self, factor: int = 1, rows: int | None = None) -> tuple[NDArray[np.uint8], str | None]:
        """(ceil(height / factor), ceil(width / factor), 3) RGB, and a remark if it was not read as it was stored.

        Grey images get three equal channels; CMYK and other forms that Pillow knows are converted by Pillow. A pixel is
        `factor` pixels of the whole image wide and high; those of the last row and column may reach beyond it.
        `factor`: one of `FACTORS`, no larger than width and height; 1 if the image is not scalable. `rows`: of the
        whole image, from its top, that are needed: these are as without it, bit for bit, and there may be fewer below
        them. Damage in what is left out is not seen, and that a code is wrong may not be; None: all are.
        Raises ValueError: it is truncated or damaged.
        """
        return self.begun(factor, rows)()

    def begun(self, factor: int, rows: int | None) -> Callable[[], tuple[NDArray[np.uint8], str | None]]:
        """What is quick of `pixels`; the rest when the result is called."""
        if not self.fast:
            return partial(self._by_pillow, factor)
        shorter = _cut(self.data, rows, factor) if rows is not None and rows < self.height else None
        if shorter is None:
            return partial(self._by_simplejpeg, factor)
        library = _simplejpeg()
        assert library is not None  # `fast` says so
        # What follows the last row is passed over with a warning, which strict would take for damage.
        asked, remark = {**self._asked(factor), "strict": False}, self._remark
        return lambda: (library.decode_jpeg(shorter, "RGB", **asked), remark)

    def _asked(self, factor: int) -> dict[str, int]:
        return {} if factor == 1 else {"min_factor": factor, "min_width": -(-self.width // factor)}

    @property
    def _remark(self) -> str | None:
        return None if self.kind is None else f"{self.kind}, converted to RGB"

    def _by_simplejpeg(self, factor: int) -> tuple[NDArray[np.uint8], str | None]:
        library = _simplejpeg()
        assert library is not None  # `fast` says so
        asked = self._asked(factor)
        try:
            return library.decode_jpeg(self.data, "RGB", **asked), self._remark
        except ValueError as error:
            reason = _one_line(error)
            if _HARMLESS not in reason:
                raise ValueError(reason) from None
        return library.decode_jpeg(self.data, "RGB", strict=False, **asked), f"{reason}, passed over"

    def _by_pillow(self, factor: int) -> tuple[NDArray[np.uint8], str | None]:
        image = _pillow()
        try:
            with image.open(io.BytesIO(self.data)) as opened:
                if factor > 1:
                    # Pillow takes the largest power of two that leaves no less than this.
                    opened.draft(None, (max(1, self.width // factor), max(1, self.height // factor)))
                return np.array(opened.convert("RGB")), self._remark
        except _pillow_errors() as error:
            raise ValueError(_one_line(error)) from None


def _cut(data: bytes, rows: int, factor: int) -> bytes | None:
    """The same JPEG with a header that says fewer rows, `rows` and those that their colours need at least.

    None: it is not one whose rows follow each other, nothing can be left out, or its end is not where it should be.
    """
    place = 2
    while place + 10 <= len(data) and data[place] == 0xFF:
        marker = data[place + 1]
        if marker in _SEQUENTIAL:
            break
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # other frames; these three are tables
            return None
        place += 2 + int.from_bytes(data[place + 2 : place + 4])
    else:
        return None
    height, components = int.from_bytes(data[place + 5 : place + 7]), data[place + 9]
    samplings = [
        data[place + 11 + 3 * number] & 15 for number in range(components) if place + 11 + 3 * number < len(data)
    ]
    if not samplings or not all(samplings):
        return None
    # Colour that was stored at half the height is interpolated between rows: one more of them is needed.
    block = 8 * max(samplings)
    fewer = -(-(rows + max(samplings) * factor) // block) * block
    if fewer >= height or data.find(_END, max(place, len(data) - _TAIL)) < 0:
        return None
    return b"".join((data[: place + 5], fewer.to_bytes(2), data[place + 7 :]))


def _pillow_errors() -> tuple[type[Exception], ...]:
    # What Pillow's decoders raise on damage, as its test-suite of broken files shows.
    return OSError, SyntaxError, ValueError, EOFError, _pillow().DecompressionBombError


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "damaged image"


def inspect(data: bytes) -> Encoded:
    """Reads the header of an encoded image.

    Raises ValueError: it is empty, no image, its header is damaged, or it claims more pixels than any photograph has.
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
    # Fewer pixels have the same width at half and at 3/8 of the size, and the library takes the smaller one.
    return Encoded(data, width, height, "grey" if colours == "Gray" else None, True, scalable=width >= 8)


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

    Raises ValueError: it is empty, truncated or no image. EnvironmentLacksError: Pillow is not installed.
    """
    return inspect(data).pixels()

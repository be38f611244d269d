"""Encoded images become pixels, whole or at a half, a quarter or an eighth of their size.

A JPEG is stored as blocks of 8 x 8 frequencies. Taking only the lowest 4 x 4, 2 x 2 or 1 x 1 of each block decodes a
smaller image directly (Independent JPEG Group, `libjpeg.txt`, "scale_num, scale_denom"), which saves work where a crop
would be shrunk anyway. Other ratios exist, but libjpeg-turbo has fast code for the powers of two only.

Of a wanted part no more is decoded than it needs, where `dlbench setup images` has built a function in C for that:
`jpeg_crop_scanline` and `jpeg_skip_scanlines` (libjpeg-turbo, `libjpeg.txt`, "Partial image decompression") leave out
all but the codes above and beside it, of which only decoding finds the end. No Python library passes them on.
"""

from __future__ import annotations

import ctypes
import io
import os
import platform
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dlbench.cache import cache_folder
from dlbench.errors import EnvironmentLacksError
from dlbench.lazy import np
from dlbench.opening import file_sha256
from dlbench.units import utf8_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

Decoding = Literal["region", "full"]
Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels
FACTORS = (8, 4, 2, 1)  # how many times smaller an image can be decoded, from the smallest result to the whole
_MOST_PIXELS = 178_956_970  # Pillow's own bound against decompression bombs; a damaged header may claim 65,535 x 65,535
_SOURCE = Path(__file__).with_name("region.c")
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


def _library() -> Path:
    return cache_folder() / "jpeg" / f"{file_sha256(_SOURCE)[:16]}-{platform.machine()}.so"


@cache
def region_function() -> tuple[Any | None, str]:
    """The function in C, None where crops are cut from whole images; and which library decodes, in words.

    It is tried in each process: machines that share a home, and so the cache, may differ in their libjpeg.
    """
    if _simplejpeg() is None:
        return None, "Pillow"
    try:
        if (path := _library()).exists():
            return _tried(path), "simplejpeg, crops by libjpeg-turbo"
    except (OSError, RuntimeError) as error:
        return None, f"simplejpeg, decoder of crops cannot be used ({utf8_text(str(error))})"
    return None, "simplejpeg, before `dlbench setup images`"


def _tried(path: Path) -> Any:
    library: Any = _simplejpeg()
    found = ctypes.CDLL(str(path)).dlbench_region
    found.argtypes = [ctypes.c_void_p, ctypes.c_ulong, *[ctypes.c_uint] * 5, ctypes.c_void_p, ctypes.c_void_p]
    noise = np.random.default_rng(0).integers(0, 256, (48, 200, 3), np.uint8)
    for colours in ("444", "422", "420", "440", "Gray"):
        encoded = inspect(library.encode_jpeg(noise, colorsubsampling=colours))
        for factor in FACTORS:
            left, top, right, bottom = box = (150 // factor, 20 // factor, 168 // factor, 40 // factor)
            part = encoded.region(found, factor, box)
            if part is None or not np.array_equal(part, encoded.pixels(factor)[0][top:bottom, left:right]):
                raise OSError(f"its pixels are not simplejpeg's, {colours} at 1/{factor}")
    return found


def build_region() -> Path:
    """Builds the function in C apart from others, and tries it there."""
    if _simplejpeg() is None:
        raise EnvironmentLacksError("simplejpeg is not installed; pip install 'dlbench[data]'")
    path = _library()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, ignore_cleanup_errors=True) as folder:  # NFS keeps what is loaded
        part, english = Path(folder) / path.name, {**os.environ, "LC_ALL": "C"}
        command = ("cc", "-O2", "-shared", "-fPIC", "-o", str(part), str(_SOURCE), "-ljpeg")
        try:
            subprocess.run(command, capture_output=True, text=True, errors="replace", check=True, env=english)
            _tried(part)
            part.replace(path)
        except (OSError, subprocess.CalledProcessError) as error:
            line = re.search(".*(error:|cannot find).*", getattr(error, "stderr", ""))
            reason = error if line is None else line[0]
            told = "install a C compiler and libjpeg-turbo's header, 2.0.6 or newer (Debian: libjpeg-dev)"
            raise EnvironmentLacksError(f"what decodes crops of JPEGs cannot be built ({reason}): {told}") from None
    region_function.cache_clear()
    return path


@dataclass(frozen=True)
class Encoded:
    """An encoded image whose header has been read."""

    data: bytes
    width: int  # pixels
    height: int  # pixels
    kind: str | None  # If not a JPEG of three colour channels: `grey`, or format and mode as Pillow names them.
    fast: bool  # whether simplejpeg can decode it
    scalable: bool = True  # whether it can be decoded smaller: a JPEG, with simplejpeg of at least 8 pixels' width

    def pixels(self, factor: int = 1, part: Box | None = None) -> tuple[NDArray[np.uint8], str | None]:
        """(ceil(height / factor), ceil(width / factor), 3) RGB, and a remark if it was not read as it was stored.

        Grey images get three equal channels; CMYK and other forms that Pillow knows are converted by Pillow. A pixel is
        `factor` pixels of the whole image wide and high; those of the last row and column may reach beyond it.
        `factor`: one of `FACTORS`, no larger than width and height; 1 if the image is not scalable. `part`: the pixels
        that are wanted of these, bit for bit as without it. Damage in what is left out is not seen, and that a code is
        wrong may not be; None: all are.
        Raises ValueError: it is truncated or damaged.
        """
        decode = region_function()[0] if part is not None and self.fast else None
        left, top, right, bottom = box = part or (0, 0, -(-self.width // factor), -(-self.height // factor))
        if decode is not None and (cut := self.region(decode, factor, box)) is not None:
            return cut, self._remark
        pixels, remark = self._by_simplejpeg(factor) if self.fast else self._by_pillow(factor)
        return pixels[top:bottom, left:right], remark

    def region(self, decode: Any, factor: int, part: Box) -> NDArray[np.uint8] | None:
        """Such pixels by the function in C; None: it is progressive, or damaged, of which the whole says what it is."""
        if self.data.find(_END, max(0, len(self.data) - _TAIL)) < 0:
            return None
        left, top, right, bottom = part
        cut, row = np.empty((bottom - top, right - left, 3), np.uint8), np.empty(3 * self.width, np.uint8)
        address, size = np.frombuffer(self.data, np.uint8).ctypes.data, len(self.data)
        return None if decode(address, size, factor, *part, cut.ctypes.data, row.ctypes.data) else cut

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

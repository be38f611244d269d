"""Decodes images, at their full size or at a half, a quarter or an eighth of it. A JPEG is stored as blocks of 8 x 8
frequencies; taking the lowest 4 x 4, 2 x 2 or 1 x 1 of each decodes a smaller image directly (Independent JPEG Group,
`libjpeg.txt`, "scale_num, scale_denom"), for which libjpeg-turbo has fast code. After `dlbench setup images` a function
in C decodes only a part of an image (ibidem, "Partial image decompression"), which no Python library offers.
"""

from __future__ import annotations

import ctypes
import io
import os
import platform
import re
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dlbench.bundled import cache_folder
from dlbench.errors import EnvironmentLacksError
from dlbench.lazy import np
from dlbench.opening import file_sha256
from dlbench.units import utf8_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

Decoding = Literal["region", "full"]
Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels
FACTORS = (8, 4, 2, 1)  # divisors of width and height that an image can be decoded with
_MAX_PIXELS = 178_956_970  # Pillow's own limit against decompression bombs; a damaged header may claim 65,535 x 65,535
_SOURCE = Path(__file__).with_name("region.c")
_END = b"\xff\xd9"  # end of an image; within coded data 0xff is followed by 0 or the number of a restart
_TAIL = 1024  # bytes at the end of a file that may contain the end of the image; some cameras write a few after it
_REUSED_BYTES = 4 << 20
"""Largest crop that is decoded into memory used again, which stays in a core's caches and needs no new pages from the
kernel: crops of 500 x 375 pixels took a tenth less CPU time in a bare loop, 2 % less in the reader (measured)."""
_HARMLESS = "extraneous bytes before marker"
"""libjpeg's warning about bytes between two segments of a file: some old cameras write them, the image is complete."""


@cache
def _memory_of_crops(_thread: int) -> NDArray[np.uint8]:
    return np.empty(_REUSED_BYTES, np.uint8)


@cache
def _simplejpeg() -> Any | None:
    try:
        import simplejpeg
    except ImportError:  # Pillow is used instead, at about half the speed
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
    """Returns the function in C, or None if whole images must be decoded, and the decoder's name."""
    if _simplejpeg() is None:
        return None, "Pillow"
    # It is tested in each process, because machines with a common home folder may have different libjpegs.
    try:
        if (path := _library()).exists():
            return _tested(path), "simplejpeg, crops by libjpeg-turbo"
    except (OSError, RuntimeError) as error:
        return None, f"simplejpeg, decoder of crops cannot be used ({utf8_text(str(error))})"
    return None, "simplejpeg, before `dlbench setup images`"


def _tested(path: Path) -> Any:
    library: Any = _simplejpeg()
    decode_region = ctypes.CDLL(str(path)).dlbench_region
    decode_region.argtypes = [ctypes.c_void_p, ctypes.c_ulong, *[ctypes.c_uint] * 5, ctypes.c_void_p, ctypes.c_void_p]
    noise = np.random.default_rng(0).integers(0, 256, (48, 200, 3), np.uint8)
    for colours in ("444", "422", "420", "440", "Gray"):
        encoded = inspect(library.encode_jpeg(noise, colorsubsampling=colours))
        for factor in FACTORS:
            left, top, right, bottom = box = (150 // factor, 20 // factor, 168 // factor, 40 // factor)
            part = encoded.region(decode_region, factor, box)
            if part is None or not np.array_equal(part, encoded.pixels(factor)[0][top:bottom, left:right]):
                raise OSError(f"its pixels differ from simplejpeg's, {colours} at 1/{factor}")
    return decode_region


def build_region() -> Path:
    """Compiles the function in C in a temporary folder, tests it there, and moves it into the cache."""
    if _simplejpeg() is None:
        raise EnvironmentLacksError("simplejpeg is not installed; pip install 'dlbench[data]'")
    path = _library()
    path.parent.mkdir(parents=True, exist_ok=True)
    # On NFS a loaded library cannot be removed.
    with tempfile.TemporaryDirectory(dir=path.parent, ignore_cleanup_errors=True) as folder:
        part, english = Path(folder) / path.name, {**os.environ, "LC_ALL": "C"}
        command = ("cc", "-O2", "-shared", "-fPIC", "-o", str(part), str(_SOURCE), "-ljpeg")
        try:
            subprocess.run(command, capture_output=True, text=True, errors="replace", check=True, env=english)
            _tested(part)
            part.replace(path)
        except (OSError, subprocess.CalledProcessError) as error:
            compiler_error = re.search(".*(error:|cannot find).*", getattr(error, "stderr", ""))
            reason = compiler_error[0] if compiler_error else error
            remedy = "install a C compiler and libjpeg-turbo's header, 2.0.6 or newer (Debian: libjpeg-dev)"
            raise EnvironmentLacksError(f"the decoder of JPEG crops cannot be built ({reason}): {remedy}") from None
    region_function.cache_clear()
    return path


@dataclass(frozen=True)
class Encoded:
    """An encoded image whose header has been read."""

    data: bytes
    width: int  # pixels
    height: int  # pixels
    kind: str | None  # None for a JPEG of three colour channels, else `grey`, or Pillow's format and mode
    fast: bool  # whether simplejpeg can decode it
    scalable: bool = True  # whether it can be decoded smaller: a JPEG, with simplejpeg of at least 8 pixels' width

    def pixels(self, factor: int = 1, part: Box | None = None) -> tuple[NDArray[np.uint8], str | None]:
        """Decodes to (ceil(height / factor), ceil(width / factor), 3) RGB, with a remark if it was converted. `factor`:
        one of `FACTORS`, at most width and height; 1 if not scalable. `part`: pixels to return (None: all), valid until
        this thread decodes the next part; damage outside of it may not be noticed. Raises ValueError: it is truncated
        or damaged.
        """
        left, top, right, bottom = box = part or (0, 0, -(-self.width // factor), -(-self.height // factor))
        if part is not None and self.fast:
            decode_region, _ = region_function()
            if decode_region is not None and (pixels := self.region(decode_region, factor, box)) is not None:
                return pixels, self._remark
        if self.fast:
            pixels, remark = self._by_simplejpeg(factor)
        else:
            pixels, remark = self._by_pillow(factor)
        return pixels[top:bottom, left:right], remark

    def region(self, decode_region: Any, factor: int, part: Box) -> NDArray[np.uint8] | None:
        """Decodes a part with the function in C, into memory that the next part of this thread overwrites; None if the
        image is progressive or damaged.
        """
        if self.data.find(_END, max(0, len(self.data) - _TAIL)) < 0:
            return None
        left, top, right, bottom = part
        num_bytes, row = 3 * (bottom - top) * (right - left), np.empty(3 * self.width, np.uint8)
        if num_bytes > _REUSED_BYTES:
            pixels = np.empty(num_bytes, np.uint8)
        else:
            pixels = _memory_of_crops(threading.get_ident())[:num_bytes]
        if decode_region(self.data, len(self.data), factor, *part, pixels.ctypes.data, row.ctypes.data):
            return None
        return pixels.reshape(bottom - top, right - left, 3)

    @property
    def _remark(self) -> str | None:
        return None if self.kind is None else f"{self.kind}, converted to RGB"

    def _by_simplejpeg(self, factor: int) -> tuple[NDArray[np.uint8], str | None]:
        library = _simplejpeg()
        assert library is not None  # because `fast` is set
        options = {}
        if factor > 1:
            options = {"min_factor": factor, "min_width": -(-self.width // factor)}
        try:
            return library.decode_jpeg(self.data, "RGB", **options), self._remark
        except ValueError as error:
            reason = _one_line(error)
            if _HARMLESS not in reason:
                raise ValueError(reason) from None
        return library.decode_jpeg(self.data, "RGB", strict=False, **options), f"{reason}, ignored"

    def _by_pillow(self, factor: int) -> tuple[NDArray[np.uint8], str | None]:
        image = _pillow()
        try:
            with image.open(io.BytesIO(self.data)) as opened:
                if factor > 1:
                    # Pillow takes the largest power of two that leaves at least this size.
                    opened.draft(None, (max(1, self.width // factor), max(1, self.height // factor)))
                return np.array(opened.convert("RGB")), self._remark
        except _pillow_errors() as error:
            raise ValueError(_one_line(error)) from None


def _pillow_errors() -> tuple[type[Exception], ...]:
    # Errors of Pillow's decoders on damaged files, from its test suite.
    return OSError, SyntaxError, ValueError, EOFError, _pillow().DecompressionBombError


def _one_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "damaged image")


def inspect(data: bytes) -> Encoded:
    """Reads the header of an image. Raises ValueError: it is damaged. EnvironmentLacksError: Pillow is missing."""
    if not data:
        raise ValueError("empty file")
    encoded = _jpeg_header(data) or _any_header(data)
    if encoded.width * encoded.height > _MAX_PIXELS:
        raise ValueError(f"header says {encoded.width} x {encoded.height}, at most {_MAX_PIXELS} pixels are supported")
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
    kind = "grey" if colours == "Gray" else None
    # A narrower image has the same width at 1/2 and at 3/8 of its size, and the library would take the smaller one.
    return Encoded(data, width, height, kind, True, scalable=width >= 8)


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
    """Decodes an image to (H, W, 3) RGB, with a remark if it was converted; raises the errors of `inspect`."""
    return inspect(data).pixels()

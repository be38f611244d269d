"""JPEG files of noise, and a small tree of them with names that are hard on readers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def encode(shape: tuple[int, ...], mode: str = "RGB", form: str = "JPEG", seed: int = 0, **options: Any) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, form, **options)
    return buffer.getvalue()


def write_tree(folder: Path) -> Path:
    """Three classes of five images, each of another size; returns the folder."""
    for label in range(3):
        (folder / f"class {label}").mkdir(parents=True)
        for number in range(5):
            data = encode((40 + 3 * number, 60 - 4 * label, 3), seed=10 * label + number)
            (folder / f"class {label}" / f'"{number}".jpg').write_bytes(data)
    return folder

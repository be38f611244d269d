"""JPEG files of noise, a small tree of them with names that are hard on readers, and TFRecords of a tree."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dlbench.datasets.images.image_set import index_jpeg_tree
from dlbench.datasets.tfrecord import RecordWriter, encode_example


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


def write_records(tree: Path, folder: Path, per_shard: int = 4) -> Path:
    """The images of a tree in TFRecords as TensorFlow's ImageNet scripts make them: labels count from 1."""
    images = index_jpeg_tree(tree)
    folder.mkdir(parents=True)
    order = np.random.default_rng(0).permutation(images.num_samples).tolist()
    for shard, first in enumerate(range(0, len(order), per_shard)):
        with RecordWriter(folder / f"shard-{shard:05d}.tfrecord") as writer:
            for index in order[first : first + per_shard]:
                label = images.label(index)
                features = {
                    "image/encoded": images.read(index),
                    "image/class/label": np.array([label + 1]),
                    "image/class/synset": images.classes[label].encode(),
                }
                writer.write(encode_example(features))
    return folder

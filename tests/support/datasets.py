"""Small data sets made by hand: samples, JPEG trees, TFRecords and volumes; what tests ask of a data set."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dlbench.datasets.images.image_set import index_jpeg_tree
from dlbench.datasets.manifest import (
    FILES_NAME,
    NAME,
    MadeWith,
    Manifest,
    describe_files,
    read_files,
    save_manifest,
    verify_file,
)
from dlbench.datasets.tfrecord import RecordWriter, encode_example, example_views


def write_manifest(folder: Path, *, kind: str, made_with: MadeWith, counts: Mapping[str, int]) -> Manifest:
    """Digests every file below a folder and writes its manifest."""
    files = describe_files(folder, skip=lambda name: name in (NAME, FILES_NAME))
    return save_manifest(folder, kind=kind, made_with=made_with, counts=counts, files=files)


def verify_manifest(folder: Path) -> list[str]:
    """Reads every file of a prepared data set; returns one line for each that is missing or altered, none if whole.

    Raises UserError: the folder has no manifest, or a damaged one.
    """
    return [fault for entry in read_files(folder) if (fault := verify_file(folder, entry)) is not None]


def write_samples(path: Path, num: int) -> None:
    """Writes equal BERT samples of 64 tokens and 10 predictions in NVIDIA's fixed layout."""
    import h5py

    with h5py.File(path, "w") as file:
        for name, value in (("input_ids", 7), ("input_mask", 1), ("segment_ids", 0)):
            file.create_dataset(name, data=np.full((num, 64), value, np.int32), fletcher32=True)
        for name in ("masked_lm_positions", "masked_lm_ids"):
            file.create_dataset(name, data=np.ones((num, 10), np.int32), fletcher32=True)
        file.create_dataset("next_sentence_labels", data=np.zeros(num, np.int8), fletcher32=True)


def decode_example(payload: bytes | memoryview) -> dict[str, list[bytes] | NDArray[Any]]:
    """The features of one Example by name: a list of bytes, or an array (n,) of float32 or of int64.

    A feature without content is an empty list, for its kind is not known.
    Raises ValueError: it is no Example; the message says what does not fit.
    """
    views = example_views(payload)
    return {name: [bytes(v) for v in value] if isinstance(value, list) else value for name, value in views.items()}


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


def write_volumes(folder: Path, num: int, seed: int, size: int = 32) -> None:
    """One HDF5 file of `num` volumes of `size`^3 x 4 counts, and four targets each."""
    import h5py

    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    target = generator.uniform(-1, 1, (num, 4)).astype("float32")
    with h5py.File(folder / "density-0.h5", "w") as file:
        # A mean that the first parameter decides: something to learn, at once.
        mean = np.exp(1 + target[:, 0])[:, None, None, None, None]
        file["x"] = generator.poisson(mean, (num, size, size, size, 4)).astype("int16")
        file["y"] = target

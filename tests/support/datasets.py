"""What tests ask of data sets and make of them by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
from dlbench.datasets.tfrecord import example_views


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


def most_frequent_share(ids: NDArray[Any]) -> float:
    """The share of the most frequent id: the accuracy of a predictor that always says this one token.

    Taken over the hidden tokens of an evaluation set it is the baseline of masked-LM accuracy.
    Raises ValueError: there are no ids.
    """
    if not ids.size:
        raise ValueError("no ids, no most frequent one")
    return float(np.unique(ids, return_counts=True)[1].max() / ids.size)

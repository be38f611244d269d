"""Which kind of data set lies in a folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from dlbench.datasets.making.manifest import read_manifest
from dlbench.datasets.splits import train_folder
from dlbench.errors import UserError
from dlbench.opening import require_file, why_unreadable

KINDS = ("images", "image-shards", "text", "samples", "density")
MANIFEST_KINDS = {
    "images": "images",
    "image-shards": "image-shards",
    "text": "text",
    "pretraining-samples": "samples",
    "density": "density",
}


def detect(source: Path) -> str:
    """Which of KINDS lies at a path: by its manifest, else by the files of its (training) folder.

    Raises:
        UserError: none is recognised.
    """
    manifest = read_manifest(source) if source.is_dir() else None
    if manifest is not None and manifest.kind in MANIFEST_KINDS:
        return MANIFEST_KINDS[manifest.kind]
    folder = train_folder(source)
    if not folder.is_dir():
        try:
            require_file(folder)
        except OSError as error:
            raise UserError(f"{str(source)!r}: cannot be read: {why_unreadable(error)}") from None
    paths = [folder] if folder.is_file() else sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    if (found := kind_of_files(paths)) is not None:
        return found
    raise UserError(
        f"{str(source)!r}: no data set that dlbench knows; expected one of {', '.join(KINDS)}, "
        "with its files in the folder or in train/ and validation/"
    )


def kind_of_files(paths: Sequence[Path]) -> str | None:
    """Which of KINDS files and folders are that lie side by side in one folder; None if they are none."""
    # A damaged file says nothing of its kind but by its name, so others are asked first.
    for sure in (True, False):
        for path in paths:
            found = _kind_of_file(path, sure) if path.is_file() else None
            if found is not None:
                return found
    for path in paths:
        if path.is_dir():
            return _kind_of_folder(path)
    return None


def _kind_of_file(path: Path, sure: bool) -> str | None:
    name = path.name.lower()
    if name.endswith((".txt", "corpus.json")) and not name.startswith(("license", "readme", "vocabulary")):
        return "text"
    if name.endswith(("_x.npy", "_y.npy")):
        return "density"
    if name.endswith((".h5", ".hdf5", ".hdf")):
        return _kind_of_hdf5(path, sure)
    if name.endswith(".tar"):
        return "image-shards"
    if name.endswith((".tfrecord", ".tfrecords", ".gz")) or re.search(r"-\d+-of-\d+$", name):
        return _kind_of_records(path, sure)
    return None


def _kind_of_folder(path: Path) -> str:
    """Of a folder inside a set: a class of images, or, one level deep, files of volumes."""
    inner = (_kind_of_file(p, sure=False) for p in sorted(path.iterdir()) if p.is_file())
    return "density" if "density" in inner else "images"


def _kind_of_hdf5(path: Path, sure: bool) -> str | None:
    from dlbench.datasets.containers.hdf5 import open_hdf5

    try:
        with open_hdf5(path) as file:
            return "samples" if "next_sentence_labels" in file else "density"
    except (OSError, ValueError, KeyError, RuntimeError):  # what h5py says of damage
        if sure:
            return None
        return "samples" if path.name.startswith("samples-") else "density"


def _kind_of_records(path: Path, sure: bool) -> str | None:
    from dlbench.datasets.containers.tf_example import example_views
    from dlbench.datasets.containers.tfrecord import read_records

    try:
        features = example_views(next(iter(read_records(path))))
    except (OSError, ValueError, StopIteration):
        if sure:
            return None
        return "density" if path.name.startswith("density-") else "image-shards"
    return "density" if "x" in features else "image-shards"

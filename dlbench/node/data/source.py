"""Readers of a plan's data at its source, and facts about the data set for the record."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dlbench.datasets.images.image_set import IMAGENET, IMAGENET_CLASSES
from dlbench.datasets.manifest import read_manifest
from dlbench.datasets.recognition import account_for
from dlbench.datasets.splits import NAMES, train_folder, validation_folder
from dlbench.datasets.volumes import PUBLIC
from dlbench.errors import UserError
from dlbench.node.data.node_sharing import ALONE, IndexBroadcast
from dlbench.node.data.reader import DataReader
from dlbench.specs.workload import DataSpec, DensityData, ImageData, ModelSpec, TextData

_PUBLIC_VOLUME = [128, 128, 128, 4]  # Shape of a sample of cosmoUniverse.


def open_training(model_spec: ModelSpec, data_spec: DataSpec, seed: int) -> DataReader:
    """Opens the training data at its source."""
    return open_reader(train_folder(Path(data_spec.source)), model_spec, data_spec, seed, training=True)


def validation_path(data_spec: DataSpec) -> Path:
    """Returns the folder of the validation data of a plan."""
    if data_spec.validation is not None:
        path = Path(data_spec.validation)
        return validation_folder(path) or path
    folder = validation_folder(Path(data_spec.source))
    if folder is None:
        raise UserError(
            f"data.source {data_spec.source!r} has no validation data: put `train` and `validation` into one folder, "
            "or give data.validation"
        )
    return folder


def open_reader(
    folder: Path,
    model_spec: ModelSpec,
    data_spec: DataSpec,
    seed: int,
    *,
    training: bool,
    lister: IndexBroadcast = ALONE,
    voxel_counts: bool = False,
) -> DataReader:
    """Opens one split of the data."""
    if data_spec.format not in model_spec.formats:
        raise UserError(f"data.format {data_spec.format!r} does not fit model.family {model_spec.family!r}")
    # Libraries of a format are imported only if it is read.
    network: Any = model_spec  # has the sizes of samples of its formats
    if isinstance(data_spec, ImageData):
        from dlbench.node.data.images import image_classes, open_images

        # A validation tree may lack a class; its labels are still those of the training data.
        classes = None
        if not training:
            classes = image_classes(train_folder(Path(data_spec.source)), lister)
        return open_images(
            folder,
            network,
            seed,
            training=training,
            classes=classes,
            lister=lister,
            decoding=data_spec.decode,
            by_gpu=training and data_spec.reader == "nvimagecodec",
        )
    if isinstance(data_spec, TextData):
        from dlbench.node.data.text import open_text

        return open_text(folder, network, data_spec, seed, training=training, lister=lister)
    from dlbench.node.data.density import open_density

    return open_density(folder, network, training=training, lister=lister, voxel_counts=voxel_counts)


def data_set(spec: DataSpec, described: Mapping[str, object]) -> dict[str, str]:
    """Identifies the training data for the record: a set made by dlbench, or a public one by its counts; else empty."""
    if spec.is_synthetic:
        return {}
    source, manifest = Path(spec.source), None
    with suppress(UserError):  # an unreadable manifest counts as none
        manifest = read_manifest(source)
        if manifest is None and source.name in NAMES["train"]:
            manifest = read_manifest(source.parent)
    # Manifests count documents of text.
    if manifest is not None and manifest.counts.get("train") == described.get("documents", described["num_samples"]):
        return {"made_by": "dlbench", "set_sha256": manifest.files_sha256}
    num = described["num_samples"]
    if isinstance(spec, ImageData) and (num, described.get("classes")) == (IMAGENET["train"], IMAGENET_CLASSES):
        return {"public_set": "ImageNet-2012"}
    is_volume = isinstance(spec, DensityData) and described.get("shape") == _PUBLIC_VOLUME
    return {"public_set": "cosmoUniverse"} if is_volume and num in PUBLIC["train"] else {}


def files_account(spec: DataSpec) -> dict[str, object]:
    """Returns which files of the data set are read and which are not, for the record; empty if not known."""
    with suppress(UserError, OSError):  # the source may have been removed since it was read
        account = account_for(spec)
        if account is not None:
            return {"account": account.as_json()}
    return {}

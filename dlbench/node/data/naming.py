"""Which data set was trained on: made by dlbench, a public one by its counts, or neither."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dlbench.datasets.images.image_set import IMAGENET, IMAGENET_CLASSES
from dlbench.datasets.manifest import Manifest, read_manifest
from dlbench.datasets.splits import NAMES
from dlbench.datasets.volumes import PUBLIC
from dlbench.errors import UserError
from dlbench.specs.workload import DataSpec, DensityData, ImageData

_PUBLIC_VOLUME = [128, 128, 128, 4]
"""Shape of a sample of cosmoUniverse."""


def data_set(spec: DataSpec, described: Mapping[str, object]) -> dict[str, str]:
    """The name of the training data, for the record.

    Args:
        spec: of the workload.
        described: what the source says of itself.

    Returns:
        `made_by` and `set_sha256` (of the manifest's list of files) where dlbench made the set, all of which is there;
        `public_set` where the counts are those of a public one; empty where neither is so.
    """
    if spec.is_synthetic:
        return {}
    manifest = _manifest(Path(spec.source))
    # A set of text is counted in documents.
    if manifest is not None and manifest.counts.get("train") == described.get("documents", described["num_samples"]):
        return {"made_by": "dlbench", "set_sha256": manifest.files_sha256}
    public = _public(spec, described)
    return {"public_set": public} if public else {}


def _manifest(source: Path) -> Manifest | None:
    """Of the set, where its folder or that of its training data is given; None where there is none that can be read."""
    try:
        found = read_manifest(source)
        return read_manifest(source.parent) if found is None and source.name in NAMES["train"] else found
    except UserError:
        return None


def _public(spec: DataSpec, described: Mapping[str, object]) -> str:
    num = described["num_samples"]
    if isinstance(spec, ImageData) and (num, described.get("classes")) == (IMAGENET["train"], IMAGENET_CLASSES):
        return "ImageNet-2012"
    is_volume = isinstance(spec, DensityData) and described.get("shape") == _PUBLIC_VOLUME
    return "cosmoUniverse" if is_volume and num in PUBLIC["train"] else ""

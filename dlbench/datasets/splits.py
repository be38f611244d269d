"""Which folder of a data set holds the training samples, and which the validation samples."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Split = Literal["train", "validation"]
NAMES: dict[Split, tuple[str, ...]] = {"train": ("train",), "validation": ("validation", "val")}
"""Names of the folders, as ImageNet, cosmoUniverse and `dlbench data make` use them."""


def has_splits(source: Path) -> bool:
    """Whether a folder holds both a training and a validation folder; one alone may be a class of that name."""
    return all(_folder(source, split) is not None for split in NAMES)


def train_folder(source: Path) -> Path:
    """Where the training data is: in `source`, where that holds both splits, otherwise `source` itself."""
    return (_folder(source, "train") if has_splits(source) else None) or source


def validation_folder(source: Path) -> Path | None:
    """Where the validation data is; None unless `source` holds both splits."""
    return _folder(source, "validation") if has_splits(source) else None


def _folder(source: Path, split: Split) -> Path | None:
    return next((source / name for name in NAMES[split] if (source / name).is_dir()), None)

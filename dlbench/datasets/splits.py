"""Which folder of a data set holds the training samples, and which the validation samples."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from dlbench.errors import UserError

Split = Literal["train", "validation"]
NAMES: dict[Split, tuple[str, ...]] = {"train": ("train",), "validation": ("validation", "val")}
"""Names of the folders, as ImageNet, cosmoUniverse and `dlbench data make` use them."""

_SUFFIX = r"[-_. ]?(?:\d+|set|split|data|images|img)?"
_TRAINING = re.compile(rf"train(?:ing)?{_SUFFIX}", re.IGNORECASE)
_EVALUATION = re.compile(rf"(?:val(?:id(?:ation)?)?|test(?:ing)?|eval(?:uation)?|dev){_SUFFIX}", re.IGNORECASE)
"""Names by which others call their splits, e.g. `valid`, `Test`, `train2017`."""


def has_splits(source: Path) -> bool:
    """Whether a folder holds both a training and a validation folder; one alone may be a class of that name."""
    return all(_folder(source, split) is not None for split in NAMES)


def train_folder(source: Path) -> Path:
    """Where the training data is: in `source`, where that holds both splits, otherwise `source` itself."""
    return (_folder(source, "train") if has_splits(source) else None) or source


def validation_folder(source: Path) -> Path | None:
    """Where the validation data is; None unless `source` holds both splits."""
    return _folder(source, "validation") if has_splits(source) else None


def is_split_name(name: str) -> bool:
    """Whether a folder bears the name of a split, as dlbench or others call it."""
    return bool(_TRAINING.fullmatch(name) or _EVALUATION.fullmatch(name))


def split_names(folders: Iterable[str]) -> list[str]:
    """Those of the folders side by side that are splits and never classes, sorted; none if they may be classes.

    They are splits if one is for training and another for evaluation, or if all bear such names. A single one among
    others may be a class: public sets of photographs have one called `train`.
    """
    names = sorted(folders)
    found = [name for name in names if is_split_name(name)]
    training = [name for name in found if _TRAINING.fullmatch(name)]
    return found if (training and len(training) < len(found)) or len(found) == len(names) else []


def require_no_splits(folder: Path, folders: Iterable[str]) -> None:
    """Proves that the folders in `folder` may be classes.

    Raises:
        UserError: they are splits; says what to give.
    """
    if found := split_names(folders):
        raise UserError(
            f"{str(folder)!r} holds splits: {', '.join(map(repr, found))}; give one of them, or name them "
            "`train` and `validation` (or `val`) and give the folder that holds both"
        )


def _folder(source: Path, split: Split) -> Path | None:
    return next((source / name for name in NAMES[split] if (source / name).is_dir()), None)

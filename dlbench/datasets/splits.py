"""Which folder of a data set holds the training samples, and which the validation samples."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from dlbench.errors import UserError

Split = Literal["train", "validation"]
NAMES: dict[Split, tuple[str, ...]] = {"train": ("train",), "validation": ("validation", "val", "valid")}
"""Names of the folders, as ImageNet, cosmoUniverse, `dlbench data make` and others use them."""
_NEVER_CLASSES = frozenset(("test", *(name for names in NAMES.values() for name in names)))
"""Besides classes these are splits all the same: a class of such a name must take another one."""

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

    They are splits if one bears the very name of a split, if one is for training and another for evaluation, or if all
    are of such a kind. Otherwise a single one among others may be a class, e.g. `dev`.
    """
    names = sorted(folders)
    if very := [name for name in names if name.lower() in _NEVER_CLASSES]:
        return [name for name in names if name in very or is_split_name(name)]
    found = [name for name in names if is_split_name(name)]
    training = [name for name in found if _TRAINING.fullmatch(name)]
    return found if (training and len(training) < len(found)) or len(found) == len(names) else []


def require_no_splits(folder: Path, folders: Iterable[str]) -> None:
    """Proves that the folders in `folder` may be classes. Raises UserError: they are splits; says what to give."""
    if found := split_names(folders):
        raise UserError(
            f"{str(folder)!r} holds splits: {', '.join(map(repr, found))}; give one of them, or name them "
            "`train` and `validation` (or `val`, `valid`) and give the folder that holds both; no class is called so"
        )


def _folder(source: Path, split: Split) -> Path | None:
    return next((source / name for name in NAMES[split] if (source / name).is_dir()), None)

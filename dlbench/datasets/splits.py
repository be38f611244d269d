"""Which folder of a data set holds the training samples, and which the validation samples.

Without such folders the names of files may tell two splits of one folder apart: `train-00000-of-00002` beside
`validation-00000-of-00001`, `wikicorpus_en_training_0.hdf5` beside `wikicorpus_en_test_0.hdf5`, `train.h5` beside
`validation.h5`, or MLPerf's text, `part-00000-of-00500` beside `eval.txt`. Where there is no validation file, files of
test serve as such.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from itertools import islice
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

OF_STORAGE = frozenset(("lost+found", "@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information", "__MACOSX"))
"""Folders that file systems and archives keep for themselves; none is a class."""
MAX_NAMES = 10_000  # names of a folder that are looked at while planning, at most
_WORDS = r"(?:(?P<train>train(?:ing)?)|(?P<validation>val(?:id(?:ation)?)?)|(?P<test>test(?:ing)?|eval(?:uation)?|dev))"
_WORD = re.compile(rf"(?<![^-_. ]){_WORDS}(?=[-_. \d]|$)", re.IGNORECASE)
_WORD_OF_TEXT = re.compile(rf"(?<![^-_. ]){_WORDS}(?=(?:[-_. ]?(?:\d+|of|part))*\.txt$)", re.IGNORECASE)
"""A word for a split in a file's name; of a text nothing but numbers may follow: `test-driving.txt` is any document."""
PART = re.compile(r".+-\d+-of-\d+")  # of a numbered part
_CONTAINER = re.compile(r".*(?:\.(?:h5|hdf5?|tar|tfrecords?(?:\.gz)?)|_data\.npy|-\d+-of-\d+)", re.IGNORECASE)


def has_splits(source: Path) -> bool:
    """Whether a folder holds both a training and a validation folder; one alone may be a class of that name."""
    return all(_folder(source, split) is not None for split in NAMES)


def train_folder(source: Path) -> Path:
    """Where the training data is: in `source`, where that holds both splits, otherwise `source` itself."""
    return (_folder(source, "train") if has_splits(source) else None) or source


def validation_folder(source: Path) -> Path | None:
    """Where the validation data is: `source` itself if files' names tell its splits apart; None without both splits."""
    if has_splits(source):
        return _folder(source, "validation")
    return source if holds_named_splits(source) else None


def other_split(folder: Path, split: Split | None) -> tuple[Path, Split] | None:
    """Returns the other split of the data set that a folder holds, or of which it is one; None if there is none."""
    if split is not None and holds_named_splits(folder):
        return folder, "validation" if split == "train" else "train"
    for name, folders in NAMES.items():
        if folder.name not in folders and has_splits(folder.parent):
            path = _folder(folder.parent, name)
            return None if path is None else (path, name)
    return None


def holds_named_splits(folder: Path) -> bool:
    """Returns whether the names of files tell two splits of a folder apart, by the first of them if there are many."""
    if not folder.is_dir():
        return False
    with os.scandir(folder) as entries:
        visible = [entry for entry in islice(entries, MAX_NAMES) if not entry.name.startswith(".")]
    folders = [entry for entry in visible if entry.is_dir() and entry.name not in OF_STORAGE]
    files = [entry.name for entry in visible if not entry.is_dir()]
    samples = [name for name in files if _CONTAINER.fullmatch(name)]
    texts = [name for name in files if name.lower().endswith(".txt")]
    if texts and not folders and all(PART.fullmatch(name) for name in samples):  # beside folders they are lists
        samples += [name for name in texts if split_word(name)]
    return named_splits(folder, samples) is not None


def split_word(name: str) -> str | None:
    """Returns train, validation or test, as the last such word in a file's name says; None if it holds none."""
    base = name.rpartition("/")[2]
    pattern = _WORD
    if base.lower().endswith(".txt"):
        pattern = _WORD_OF_TEXT
    words = [match.lastgroup for match in pattern.finditer(base)]
    return words[-1] if words else None


def named_splits(folder: Path, names: Iterable[str]) -> dict[Split, list[str]] | None:
    """Tells the splits of sample files in one folder apart by their names, sorted; None if all are of one split.

    Files of test are left out where there are train and validation.
    """
    groups: dict[str | None, list[str]] = {"train": [], "validation": [], "test": [], None: []}
    for name in sorted(names):
        groups[split_word(name)].append(name)
    held_out = groups["validation"] or groups["test"]
    training, unnamed = groups["train"], groups[None]
    if held_out and not training and all(PART.fullmatch(name) for name in unnamed):
        training, unnamed = unnamed, []
    if not held_out or not (training or unnamed):
        return None
    if unnamed:
        raise UserError(
            f"{str(folder)!r} holds {_counted('validation', held_out)} beside {_counted('no split', unnamed)} by the "
            "names; put the word train or validation into each name, or the files into folders `train` and `validation`"
        )
    return {"train": training, "validation": held_out}


def of_split(folder: Path, names: Iterable[str], split: Split | None) -> list[str]:
    """Returns those of the sample files in a folder that are of a split, sorted: all where names tell none apart."""
    candidates = sorted(names)
    splits = named_splits(folder, candidates)
    if splits is None:
        return candidates
    is_split_folder = any(folder.name in folders for folders in NAMES.values())
    if split is None or is_split_folder:
        raise UserError(
            f"{str(folder)!r} holds two splits by the names of its files, {_counted('train', splits['train'])} and "
            f"{_counted('validation', splits['validation'])}; put them into folders `train` and `validation`, and give "
            "the folder that holds both"
        )
    return splits[split]


def _counted(what: str, names: list[str]) -> str:
    """Returns text such as `2 of train ('train-0.h5', ...)`."""
    more = ", ..." if len(names) > 1 else ""
    return f"{len(names):,} of {what} ({names[0]!r}{more})"


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
    """Proves that the folders in `folder` may be classes."""
    if found := split_names(folders):
        raise UserError(
            f"{str(folder)!r} holds splits: {', '.join(map(repr, found))}; give one of them, or name them "
            "`train` and `validation` (or `val`, `valid`) and give the folder that holds both; no class is called so"
        )


def _folder(source: Path, split: Split) -> Path | None:
    return next((source / name for name in NAMES[split] if (source / name).is_dir()), None)

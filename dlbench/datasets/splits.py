"""Sorts the files of a data set by their names into training samples, validation samples, companions and unknown
files; opens none. Splits are two folders, or two sets of file names in one folder, which a word distinguishes:
`train-00000-of-00002`, `wikicorpus_en_test_0.hdf5`, `validation.h5`, or MLPerf's `part-00000-of-00500` and
`eval.txt`. Without validation files, test files are used for validation. Files that look like samples of another
format are refused, so that no data is ignored silently.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Literal

from dlbench.errors import UserError
from dlbench.units import counted

NAMED = 20  # names of a list that are printed; the others are only counted
_NAMED_IN_LINE = 3
_COMPANION = re.compile(
    r"(?:licen[cs]es?|readme|copying|notice|vocabulary|[^.]*synset[^.]*|(?:md5|sha\d+)_?sums?)(?:\.\w+)?"
    r"|.*\.(?:md5|sha\d*|sha\d*sums?|idx|index|lst|list|jsonl?|md|ya?ml|csv|tsv|log|py|sh)|index\.npz|.*_label\.npy",
    re.IGNORECASE,
)
"""Companion files of samples: indexes, manifests, checksums, lists, licences, descriptions."""

_OURS = frozenset(("manifest.json", "manifest.files.jsonl", "LICENSES.txt", "index.npz"))
_LIKE_SAMPLES = re.compile(
    r".*(?:\.(?:h5|hdf5?|he5|tfrecords?|tar|tgz|parquet|arrow|rec|beton)|_(?:x|y|data|label)\.npy|-\d+-of-\d+)"
    r"(?:\.(?:gz|bz2|xz|zst))?|.*\.txt\.(?:gz|bz2|xz|zst)|[\w-]*\d",
    re.IGNORECASE,
)
_NUMBERED = re.compile(r"-\d+-of-(\d+)")  # In a file's name: the number of files.
_FOREIGN: tuple[tuple[str, str], ...] = (
    (r".*\.(?:parquet|arrow)", "is a Hugging Face file; write the images as <class>/<image>.jpg (docs/workloads.md)"),
    (r".*\.beton", "is an FFCV file; give the images that it was written from"),
    (r".*\.rec", "is an MXNet RecordIO file; unpack it to <class>/<image>.jpg"),
    (r".*\.(?:tgz|tar\.(?:gz|bz2|xz|zst))", "is compressed, which prevents random access; decompress it to .tar"),
    (r".*\.(?:txt|h5|hdf5?)\.(?:gz|bz2|xz|zst)|.*\.zip", "is compressed; decompress it"),
    (r".*\.(?:png|bmp|tiff?)", "is not a JPEG; convert it to .jpg"),
)
Split = Literal["train", "validation"]
NAMES: dict[Split, tuple[str, ...]] = {"train": ("train",), "validation": ("validation", "val", "valid")}
"""Names of the folders in ImageNet, cosmoUniverse, `dlbench data make` and others."""

_NEVER_CLASSES = frozenset(("test", *chain.from_iterable(NAMES.values())))
"""Names of folders that are splits even among class folders."""

_SUFFIX = r"[-_. ]?(?:\d+|set|split|data|images|img)?"
_TRAINING = re.compile(rf"train(?:ing)?{_SUFFIX}", re.IGNORECASE)
_EVALUATION = re.compile(rf"(?:val(?:id(?:ation)?)?|test(?:ing)?|eval(?:uation)?|dev){_SUFFIX}", re.IGNORECASE)
"""Other common names of splits, e.g. `valid`, `Test`, `train2017`."""

OF_STORAGE = frozenset(("lost+found", "@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information", "__MACOSX"))
"""Folders of file systems and archives, which are never classes."""

MAX_NAMES = 10_000  # most names of a folder that are listed during planning
_WORDS = r"(?:(?P<train>train(?:ing)?)|(?P<validation>val(?:id(?:ation)?)?)|(?P<test>test(?:ing)?|eval(?:uation)?|dev))"
_WORD = re.compile(rf"(?<![^-_. ]){_WORDS}(?=[-_. \d]|$)", re.IGNORECASE)
_WORD_OF_TEXT = re.compile(rf"(?<![^-_. ]){_WORDS}(?=(?:[-_. ]?(?:\d+|of|part))*\.txt$)", re.IGNORECASE)
"""A word for a split in a file's name; in a text only numbers may follow: `test-driving.txt` is no test split."""

PART = re.compile(r".+-\d+-of-\d+")  # name of a numbered part
_CONTAINER = re.compile(r".*(?:\.(?:h5|hdf5?|tar|tfrecords?(?:\.gz)?)|_data\.npy|-\d+-of-\d+)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Account:
    """The files of a data set by split."""

    splits: Mapping[str, tuple[str, ...]]
    """Names of files, or of class folders, by split; by `all` if there is only one split."""
    others: tuple[str, ...] = ()  # companions and unknown files, which are not read
    unit: str = "files"
    is_partial: bool = False  # whether only the first names of a large folder were listed

    def line(self) -> str:
        """Returns text such as `train 500 files, validation 1 (eval.txt), 1 not read: eval.md5`."""
        parts: list[str] = []
        for split, names in self.splits.items():
            unit = "" if parts else f" {self.unit}"
            if len(names) == 1:
                unit = f"{unit.removesuffix('s')} ({names[0]})"
            if names and not self.is_partial:
                numbered = _NUMBERED.search(names[0])
                if numbered and int(numbered[1]) != len(names):
                    unit += f" of {int(numbered[1]):,} by their names"
            parts.append(f"{split} {len(names):,}{unit}")
        # Without the files that dlbench itself writes.
        unread = [name for name in self.others if name.rpartition("/")[2] not in _OURS]
        if unread:
            more = ", ..." if len(unread) > _NAMED_IN_LINE else ""
            parts.append(f"{len(unread):,} not read: {', '.join(unread[:_NAMED_IN_LINE])}{more}")
        if self.is_partial:
            parts.append("only the first names were listed")
        return ", ".join(parts)

    def as_json(self) -> dict[str, object]:
        return {
            "unit": self.unit,
            "splits": {split: len(names) for split, names in self.splits.items()},
            "companions": [name for name in self.others if is_companion(name)][:NAMED],
            "passed_over": [name for name in self.others if not is_companion(name)][:NAMED],
            "not_read": len(self.others),
            "is_partial": self.is_partial,
        }


def is_companion(name: str) -> bool:
    """Returns whether a name is that of a companion file: a description, a list, an index or a checksum."""
    return _COMPANION.fullmatch(name.rpartition("/")[2]) is not None


def sample_names(
    folder: Path, names: Iterable[str], is_sample: Callable[[str], bool], split: Split | None, layout: str
) -> list[str]:
    """Returns the sorted sample files of one split. Raises UserError: other files look like samples, too."""
    all_names = set(names)
    samples = list(filter(is_sample, all_names))
    others = all_names.difference(samples)
    unread = sorted(name for name in others if _LIKE_SAMPLES.fullmatch(name) and not is_companion(name))
    if samples and unread:
        raise UserError(
            f"{str(folder)!r} holds {counted(len(unread), 'file')} that would not be read, e.g. {unread[0]!r}, next to "
            f"{min(samples)!r}; move them away, or convert them to the expected layout: {layout}"
        )
    return of_split(folder, samples, split)


def foreign_form(names: Iterable[str]) -> str | None:
    """Returns what to do with the first file of a known format that is not supported; None if there is none."""
    for name in sorted(names):
        for pattern, remedy in _FOREIGN:
            if re.fullmatch(pattern, name, re.IGNORECASE):
                return f"{name!r} {remedy}"
    return None


def has_splits(source: Path) -> bool:
    """Returns whether a folder holds a training and a validation folder; one alone may be a class of that name."""
    return all(_folder(source, split) is not None for split in NAMES)


def train_folder(source: Path) -> Path:
    """Returns the folder of the training data: in `source` if that has both splits, otherwise `source` itself."""
    if has_splits(source):
        return _folder(source, "train") or source
    return source


def validation_folder(source: Path) -> Path | None:
    """Returns the folder of the validation data, which is `source` if names of files distinguish splits; else None."""
    if has_splits(source):
        return _folder(source, "validation")
    return source if holds_named_splits(source) else None


def other_split(folder: Path, split: Split | None) -> tuple[Path, Split] | None:
    """Returns folder and name of the other split of the same data set; None if there is none."""
    if split is not None and holds_named_splits(folder):
        return folder, "validation" if split == "train" else "train"
    if not has_splits(folder.parent):
        return None
    for name, folders in NAMES.items():
        if folder.name not in folders:
            path = _folder(folder.parent, name)
            return None if path is None else (path, name)
    return None


def holds_named_splits(folder: Path) -> bool:
    """Returns whether the first names of files in a folder distinguish two splits."""
    if not folder.is_dir():
        return False
    with os.scandir(folder) as entries:
        visible = [entry for entry in islice(entries, MAX_NAMES) if not entry.name.startswith(".")]
    folders = [entry for entry in visible if entry.is_dir() and entry.name not in OF_STORAGE]
    files = [entry.name for entry in visible if not entry.is_dir()]
    samples = [name for name in files if _CONTAINER.fullmatch(name)]
    texts = [name for name in files if name.lower().endswith(".txt")]
    if texts and not folders and all(PART.fullmatch(name) for name in samples):  # next to folders they are lists
        samples += [name for name in texts if split_word(name)]
    return named_splits(folder, samples) is not None


def split_word(name: str) -> str | None:
    """Returns train, validation or test, by the last such word in a file's name; None if there is none."""
    base = name.rpartition("/")[2]
    pattern = _WORD_OF_TEXT if base.lower().endswith(".txt") else _WORD
    word: str | None = None
    for match in pattern.finditer(base):
        word = match.lastgroup
    return word


def named_splits(folder: Path, names: Iterable[str]) -> dict[Split, list[str]] | None:
    """Sorts the sample files of one folder by split, by their names; None if all are of one split."""
    groups: dict[str | None, list[str]] = {"train": [], "validation": [], "test": [], None: []}
    for name in sorted(names):
        groups[split_word(name)].append(name)
    validation = groups["validation"] or groups["test"]
    training, unnamed = groups["train"], groups[None]
    if validation and not training and all(PART.fullmatch(name) for name in unnamed):
        training, unnamed = unnamed, []
    if not validation or not (training or unnamed):
        return None
    if unnamed:
        raise UserError(
            f"{str(folder)!r} holds, by the names, {_counted('validation', validation)} and "
            f"{_counted('no split', unnamed)}; put the word train or validation into each name, or the files into "
            "folders `train` and `validation`"
        )
    return {"train": training, "validation": validation}


def of_split(folder: Path, names: Iterable[str], split: Split | None) -> list[str]:
    """Returns the sample files of a split, sorted; all files if their names distinguish no splits."""
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


def _counted(split: str, names: list[str]) -> str:
    more = ", ..." if len(names) > 1 else ""
    return f"{len(names):,} of {split} ({names[0]!r}{more})"


def is_split_name(name: str) -> bool:
    """Returns whether the name of a folder is a common name of a split."""
    return bool(_TRAINING.fullmatch(name) or _EVALUATION.fullmatch(name))


def split_names(folders: Iterable[str]) -> list[str]:
    """Returns which folders of one folder are splits, sorted: if one has a name that classes never have, if one is for
    training and another for evaluation, or if all have names of splits. Otherwise a single one, e.g. `dev`, may be a
    class.
    """
    names = sorted(folders)
    splits = [name for name in names if name.lower() in _NEVER_CLASSES or is_split_name(name)]
    if any(name.lower() in _NEVER_CLASSES for name in names):
        return splits
    num_training = sum(_TRAINING.fullmatch(name) is not None for name in splits)
    if 0 < num_training < len(splits) or len(splits) == len(names):
        return splits
    return []


def require_no_splits(folder: Path, folders: Iterable[str]) -> None:
    """Raises UserError if the folders in `folder` are splits, not classes."""
    if names := split_names(folders):
        raise UserError(
            f"{str(folder)!r} holds splits: {', '.join(map(repr, names))}; give one of them, or name them "
            "`train` and `validation` (or `val`, `valid`) and give the folder that holds both; a class cannot have "
            "such a name"
        )


def _folder(source: Path, split: Split) -> Path | None:
    return next((source / name for name in NAMES[split] if (source / name).is_dir()), None)

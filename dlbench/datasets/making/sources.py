"""Which files of a source are read and which are left out; none is passed over without a word.

Of a folder whose form is converted every file is a sample file of a split, a companion, or refused by its name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dlbench.datasets.file_index import load_index
from dlbench.datasets.images.image_set import JpegTree
from dlbench.datasets.images.shards import INDEX, ImageSet, ImageShards
from dlbench.datasets.manifest import FILES_NAME, NAME
from dlbench.datasets.splits import NAMES, train_folder, validation_folder
from dlbench.datasets.text.corpus import text_files
from dlbench.datasets.volumes import DensityIndex
from dlbench.errors import UserError

TEST = "test"  # the split that is left out: dlbench trains and validates
_SPLIT_OF = {name: split for split, names in NAMES.items() for name in names} | {TEST: TEST}
_COMPANION = re.compile(
    r"(readme|licen[cs]e|citation)\b.*|.*\.(md|md5|sha\d*|txt|json|lst|idx|py)|(md5|sha\d+)(sums?)?|checksums?",
    re.IGNORECASE,
)
"""Files that lie beside samples: texts, lists, indexes, checksums, and the loading scripts of Hugging Face."""

_MADE = (NAME, FILES_NAME, INDEX, "LICENSES.txt")  # what dlbench itself writes next to samples
_NAMED = 20  # names in one line; of the others the number


@dataclass(frozen=True)
class Account:
    """The files of a folder, relative to it and sorted."""

    samples: Mapping[str, list[Path]]  # by split: `train`, perhaps `validation` and `test`
    companions: list[Path]

    def line(self, counts: Mapping[str, str], reason: str) -> str:
        """Returns what is read and what is left out.

        `counts`: the files of each split in words. `reason`: why the test split is left out.
        """
        line = ", ".join(f"{split} {counts[split]}" for split in NAMES if split in counts)
        if TEST in counts:
            line += f"; left out: {TEST} ({reason}): {counts[TEST]}"
        if self.companions:
            line += f"; no samples: {', '.join(map(str, self.companions))}"
        return line


def split_called(name: str) -> str | None:
    """Returns `train`, `validation` or `test` for one of their names; None for any other."""
    return _SPLIT_OF.get(name)


def account_for(source: Path, split_of: Callable[[Path], str | None], expected: str) -> Account:
    """Lists the files of a folder, but for hidden ones.

    `split_of`: gives the split of a sample file by its relative path, None if it is none. `expected`: for messages.
    Raises UserError: a file is neither a sample file nor a companion, or none is for training.
    """
    account = Account({}, [])
    for path in sorted(_files_below(source)):
        split = split_of(path)
        if split is not None:
            account.samples.setdefault(split, []).append(path)
        elif _COMPANION.fullmatch(path.name):
            account.companions.append(path)
        else:
            raise UserError(f"{str(source / path)!r}: no sample file of a split; expected {expected}; move it away")
    if "train" not in account.samples:
        raise UserError(f"{str(source)!r} holds no training files; expected {expected}")
    return account


def _files_below(source: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename!r}: cannot be listed: {error.strerror}")

    for folder, folders, names in os.walk(source, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                yield (Path(folder) / name).relative_to(source)


def left_out(folder: Path, read: Collection[str]) -> list[str]:
    """Returns a line with the names in a folder that are not read, hidden ones and dlbench's own apart; else none."""
    names = sorted(path.name for path in folder.iterdir() if path.name not in read and path.name not in _MADE)
    names = [name for name in names if not name.startswith(".")]
    if not names:
        return []
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return [f"{str(folder)!r}: left out: {', '.join(map(repr, names[:_NAMED]))}{more}"]


def beside(source: Path, folders: Collection[Path]) -> list[str]:
    """Returns the same for what lies in a source next to the folders of its splits that are read."""
    return [] if source in folders else left_out(source, {folder.name for folder in folders})


def image_remarks(images: ImageSet) -> list[str]:
    """Returns how a set of images was understood, and which files next to shards are no shards."""
    remarks = [f"{str(images.root)!r}: {remark}" for remark in images.remarks]
    return remarks + (left_out(images.root, images.index.shards) if isinstance(images, ImageShards) else [])


def text_remarks(source: Path, folders: Collection[Path]) -> list[str]:
    """Returns which files of a text are left out, where these folders of it are read."""
    lines = beside(source, folders)
    for folder in folders:
        if folder.is_dir():
            lines += left_out(folder, {path.name for path in text_files(folder)})
    return lines


def index_remarks(source: Path) -> list[str]:
    """Returns which files the kept indexes of a set do not hold."""
    folders = [folder for folder in (train_folder(source), validation_folder(source)) if folder is not None]
    lines = beside(source, folders)
    for folder in folders:
        images, volumes = load_index(folder, JpegTree)[0], load_index(folder, DensityIndex)[0]
        if images is not None:
            lines += image_remarks(images)
        if volumes is not None:
            lines += left_out(folder, {path.relative_to(volumes.root).parts[0] for path in volumes.paths()})
    return lines

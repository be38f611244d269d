"""Sorts the files of a data set by their names into samples of each split, companions and unknown files; opens none.
Files that look like samples of another format are refused, so that no data is ignored silently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dlbench.datasets.splits import Split, of_split
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

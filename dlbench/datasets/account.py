"""The account of a data set's files by their names: samples of which split, companions, and files that nobody knows.

No file is opened. Files that look like samples and are none of the container that is read are refused by name, so that
nothing is left out silently; forms that people have and dlbench does not read are named with the way to one it reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dlbench.datasets.splits import Split, of_split
from dlbench.errors import UserError

NAMED = 20  # names of a list that are given; of the others the number
_NAMED_IN_LINE = 3
_COMPANION = re.compile(
    r"(?:licen[cs]es?|readme|copying|notice|vocabulary|[^.]*synset[^.]*|(?:md5|sha\d+)_?sums?)(?:\.\w+)?"
    r"|.*\.(?:md5|sha\d*|sha\d*sums?|idx|index|lst|list|jsonl?|md|ya?ml|csv|tsv|log|py|sh)|index\.npz|.*_label\.npy",
    re.IGNORECASE,
)
"""Files that stand beside samples: indexes, manifests, checksums, lists, licences, descriptions."""
_OURS = frozenset(("manifest.json", "manifest.files.jsonl", "LICENSES.txt", "index.npz"))
_LIKE_SAMPLES = re.compile(
    r".*(?:\.(?:h5|hdf5?|he5|tfrecords?|tar|tgz|parquet|arrow|rec|beton)|_(?:x|y|data|label)\.npy|-\d+-of-\d+)"
    r"(?:\.(?:gz|bz2|xz|zst))?|.*\.txt\.(?:gz|bz2|xz|zst)|[\w-]*\d",
    re.IGNORECASE,
)
_NUMBERED = re.compile(r"-\d+-of-(\d+)")  # In the name of a file, of how many it is one.
_FOREIGN: tuple[tuple[str, str], ...] = (
    (r".*\.(?:parquet|arrow)", "is of Hugging Face; write the images as <class>/<image>.jpg (docs/workloads.md)"),
    (r".*\.beton", "is FFCV's; give the images that it was written from"),
    (r".*\.rec", "is RecordIO of MXNet; unpack it to <class>/<image>.jpg"),
    (r".*\.(?:tgz|tar\.(?:gz|bz2|xz|zst))", "is compressed, and images are read at their place; unpack it to .tar"),
    (r".*\.(?:txt|h5|hdf5?)\.(?:gz|bz2|xz|zst)|.*\.zip", "is compressed; unpack it"),
    (r".*\.(?:png|bmp|tiff?)", "is no JPEG; convert it to .jpg"),
)


@dataclass(frozen=True, kw_only=True)
class Account:
    """Which files there are, by name."""

    splits: Mapping[str, tuple[str, ...]]
    """Names of files, or of class folders, by split; `all` where there is one."""
    others: tuple[str, ...] = ()  # companions and files that nobody knows: they are not read
    unit: str = "files"
    is_partial: bool = False  # whether only the first names were looked at

    def line(self) -> str:
        """Returns text such as `train 500 files, validation 1 (eval.txt), 1 passed over: eval.md5`."""
        parts: list[str] = []
        for split, names in self.splits.items():
            unit = "" if parts else f" {self.unit}"
            if len(names) == 1:
                unit = f"{unit.removesuffix('s')} ({names[0]})"
            numbered = _NUMBERED.search(names[0]) if names and not self.is_partial else None
            if numbered and int(numbered[1]) != len(names):
                unit += f" of {int(numbered[1]):,} by their names"
            parts.append(f"{split} {len(names):,}{unit}")
        # Without the files that dlbench itself writes.
        passed_over = [name for name in self.others if name.rpartition("/")[2] not in _OURS]
        if passed_over:
            more = ", ..." if len(passed_over) > _NAMED_IN_LINE else ""
            parts.append(f"{len(passed_over):,} passed over: {', '.join(passed_over[:_NAMED_IN_LINE])}{more}")
        if self.is_partial:
            parts.append("of the first names alone")
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
    """Returns whether a file's name is one of a description, a list, an index or a checksum."""
    return _COMPANION.fullmatch(name.rpartition("/")[2]) is not None


def sample_names(
    folder: Path, names: Iterable[str], is_sample: Callable[[str], bool], split: Split | None, layout: str
) -> list[str]:
    """Returns the sample files of one split among the names in a folder, sorted; empty if there are no samples.

    `is_sample`: whether a name is one of the container that is read. `layout`: what is read, in words.
    """
    samples, others = [], []
    for name in names:
        if is_sample(name):
            samples.append(name)
        else:
            others.append(name)
    unread = sorted(name for name in others if _LIKE_SAMPLES.fullmatch(name) and not is_companion(name))
    if samples and unread:
        raise UserError(
            f"{str(folder)!r} holds {len(unread):,} file(s) that would not be read, {unread[0]!r} first, beside "
            f"{min(samples)!r}; move them away, or bring them into the form that is read: {layout}"
        )
    return of_split(folder, samples, split)


def foreign_form(names: Iterable[str]) -> str | None:
    """Says of the first file of a form that is known and not read what to do with it; None if there is none."""
    for name in sorted(names):
        for pattern, remedy in _FOREIGN:
            if re.fullmatch(pattern, name, re.IGNORECASE):
                return f"{name!r} {remedy}"
    return None

"""Reads a whole data set and says what it is, how much is in it, what is damaged, and which public set it is.

The work is done by the functions of each format; here stands what they share: recognising the format, the splits, and
the checksums of the manifest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

from dlbench.datasets.making.journal import Journal
from dlbench.datasets.making.manifest import NAME, FileEntry, read_files, read_manifest, verify_file
from dlbench.datasets.recognition import KINDS, detect
from dlbench.datasets.splits import NAMES, Split, has_splits, train_folder, validation_folder
from dlbench.errors import UserError, nearest

Progress = Callable[[str, int, int], None]
"""Told what is counted, how many are done, and how many there are."""

TITLES = {
    "images": "a tree of images",
    "image-shards": "shards of images",
    "text": "text",
    "samples": "BERT samples",
    "density": "density volumes",
}
_PUBLIC = {"images": "ImageNet-2012", "image-shards": "ImageNet-2012", "density": "cosmoUniverse"}
_AT_ONCE = 1024
_COUNTED = re.compile(r"(\d+) of (\d+): ")


@dataclass
class Verdict:
    """What is known of a data set after all of it was read."""

    source: Path
    kind: str
    samples: dict[str, int] = field(default_factory=dict)
    """By split; a split that cannot be counted is not in it."""
    faults: list[str] = field(default_factory=list)
    """A line for each bad file, which it names, with the reason."""
    remarks: list[str] = field(default_factory=list)
    """What is odd but usable."""
    manifest: Literal["none", "whole", "altered"] = "none"
    """Whether the checksums of a manifest were met."""
    public_set: str | None = None
    """The public set that this could be, by its kind."""
    lacking: list[str] = field(default_factory=list)
    """Why it is not the whole public set, a line a split; none if it is."""

    def as_json(self) -> dict[str, object]:
        """The verdict for programs."""
        return {
            "source": str(self.source),
            "kind": self.kind,
            "whole": not self.faults,
            "samples": self.samples,
            "manifest": self.manifest,
            "public_set": self.public_set,
            "is_public_set": self.public_set is not None and not self.lacking and not self.faults,
            "lacking": self.lacking,
            "faults": self.faults,
            "remarks": self.remarks,
        }


def verify(
    source: Path,
    *,
    kind: str | None = None,
    vocabulary: str | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> Verdict:
    """Reads everything in a data set.

    Args:
        source: a set with splits, or one split, or a file of text or samples.
        kind: one of KINDS; None: recognised.
        vocabulary: path or name, to which text and samples are held.
        workers: threads or processes that read.
        progress: told how far it is.

    Raises:
        UserError: there is no data of a known kind at the source, or no such vocabulary.
    """
    if not source.exists():
        raise UserError(f"{str(source)!r}: no such file or folder")
    if kind is not None and kind not in KINDS:
        raise UserError(f"--kind {kind!r}: {nearest(kind, KINDS)}")
    verdict = Verdict(source, kind or detect(source))
    tell = progress or (lambda _what, _done, _of: None)
    if Journal.is_in(source):
        verdict.faults.append(f"{Journal.NAME}: the set is not finished; repeat the command that makes it")
    _checksums(verdict, workers, tell)
    for split, folder in _splits(source):
        _verify_split(verdict, split, folder, vocabulary, workers, tell)
    _compare_counts(verdict)
    return verdict


def _splits(source: Path) -> list[tuple[Split | None, Path]]:
    if source.is_dir() and has_splits(source):
        both: tuple[tuple[Split, Path | None], ...] = (
            ("train", train_folder(source)),
            ("validation", validation_folder(source)),
        )
        return [(split, folder) for split, folder in both if folder is not None]
    return [(None, source)]


# Checksums


def _checksums(verdict: Verdict, workers: int, tell: Progress) -> None:
    """Compares all files that the manifest names: that of the folder, or of the one above a single split."""
    root, prefix = verdict.source, ""
    if not (root / NAME).is_file() and any(root.name in names for names in NAMES.values()):
        root, prefix = root.parent, f"{root.name}/"
    manifest = read_manifest(root) if root.is_dir() else None
    if manifest is None:
        return
    found: list[str] = []
    try:
        for number, fault in enumerate(_compared(root, prefix, workers), 1):
            if fault is not None:
                found.append(fault)
            tell("checksums", number, manifest.num_files)
    except UserError as error:  # the list of files itself is damaged
        found.append(str(error))
    verdict.manifest = "altered" if found else "whole"
    verdict.faults += found


def _compared(root: Path, prefix: str, workers: int) -> Iterator[str | None]:
    wanted = (entry for entry in read_files(root) if entry.path.startswith(prefix))
    check: Callable[[FileEntry], str | None] = partial(verify_file, root)
    # Threads: digests do not hold Python's lock. Some at a time, for there may be a million.
    with ThreadPoolExecutor(workers) as pool:
        while batch := list(islice(wanted, _AT_ONCE)):
            yield from pool.map(check, batch)


def _compare_counts(verdict: Verdict) -> None:
    """Files that no manifest names would be read, too."""
    manifest = read_manifest(verdict.source) if verdict.source.is_dir() else None
    if manifest is None or verdict.faults:
        return
    for split, num in verdict.samples.items():
        expected = manifest.counts.get(split, num)
        if num != expected:
            verdict.faults.append(f"{split}: {num} samples in its files, {expected} in {NAME}; remove what was added")


# Contents


def _verify_split(
    verdict: Verdict, split: Split | None, folder: Path, vocabulary: str | None, workers: int, tell: Progress
) -> None:
    label = f"{split}: " if split else ""
    if verdict.kind in ("images", "image-shards"):
        from dlbench.datasets.images.verify import verify_images

        faults = verify_images(folder, partial(tell, f"{label}images"), workers, verdict.remarks.append)
    elif verdict.kind == "density":
        from dlbench.datasets.volumes.density import verify_density

        faults = _in_folder(split, _or_line(lambda: verify_density(folder, partial(tell, f"{label}files"), workers)))
    else:
        from dlbench.datasets.text.verify import verify_text

        def say(line: str) -> None:
            counted = _COUNTED.match(line)
            if counted is None:
                verdict.remarks.append(label + line)
            else:
                tell(f"{label}files", int(counted[1]), int(counted[2]))

        faults = _in_folder(split, verify_text(folder, vocabulary, say, workers))
    # What the checksums have found already is not told twice.
    named = {line.partition(": ")[0] for line in verdict.faults}
    verdict.faults += [line for line in faults if not _is_known(line, verdict.source, named)]
    _count(verdict, split, folder)


def _is_known(line: str, source: Path, named: set[str]) -> bool:
    file = line.partition(": ")[0].strip("'")
    return file in named or file.removeprefix(f"{source}/") in named


def _or_line(check: Callable[[], list[str]]) -> list[str]:
    """A folder that cannot be listed at all is one fault."""
    try:
        return check()
    except UserError as error:
        return [str(error)]


def _in_folder(split: Split | None, lines: list[str]) -> list[str]:
    return [f"{split}/{line}" if split and not line.startswith("'") else line for line in lines]


def _count(verdict: Verdict, split: Split | None, folder: Path) -> None:
    """Counts samples, and compares with the public set; what cannot be opened is a fault already."""
    counters: Mapping[str, Callable[[], tuple[int, str | None]]] = {
        "images": lambda: _count_images(folder, split or "train"),
        "image-shards": lambda: _count_images(folder, split or "train"),
        "density": lambda: _count_density(folder, split or "train"),
        "samples": lambda: _count_samples(folder),
    }
    if verdict.kind not in counters:
        return
    name = split or "all"
    verdict.public_set = _PUBLIC.get(verdict.kind)
    try:
        verdict.samples[name], lacking = counters[verdict.kind]()
    except UserError as error:
        lacking = f"{name}: cannot be counted"
        if not verdict.faults:
            verdict.faults.append(str(error))
    if lacking is not None:
        verdict.lacking.append(lacking)
    if split is None and verdict.public_set is not None:
        verdict.lacking.append("a single split: give the folder that holds train and validation")


def _count_images(folder: Path, split: Split) -> tuple[int, str | None]:
    from dlbench.datasets.images.image_set import completeness, open_image_set

    images = open_image_set(folder)
    return images.num_samples, completeness(images, split)


def _count_density(folder: Path, split: Split) -> tuple[int, str | None]:
    from dlbench.datasets.volumes.density import completeness, index_density

    index = index_density(folder)
    return index.num_samples, completeness(index, split)


def _count_samples(folder: Path) -> tuple[int, str | None]:
    from dlbench.datasets.text.pretraining_hdf5 import index_samples

    return index_samples(folder).num_samples, None

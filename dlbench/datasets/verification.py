"""Reads a whole data set and says what it is, how much is in it, what is damaged, and which public set it is.

Each kind of data reads its own files (`dlbench.datasets.kinds`); here are the splits and the checksums of the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

from dlbench.datasets.account import Account
from dlbench.datasets.kinds import KINDS, Checking, DataKind
from dlbench.datasets.making.production import BEGUN
from dlbench.datasets.manifest import NAME, FileEntry, read_files, read_manifest, verify_file
from dlbench.datasets.recognition import detect, take_account
from dlbench.datasets.splits import NAMES, Split, train_folder, validation_folder
from dlbench.errors import UserError

Progress = Callable[[str, int, int], None]  # given what is counted, how many are done, and how many there are

_AT_ONCE = 1024  # Files that are digested at a time.


@dataclass
class DatasetCheck:
    """What is known of a data set after all of it was read."""

    source: Path
    kind: str
    samples: dict[str, int] = field(default_factory=dict)  # by split; a split that cannot be counted is not in it
    faults: list[str] = field(default_factory=list)  # A line for each bad file, which it names, with the reason
    remarks: list[str] = field(default_factory=list)  # what is odd but usable
    manifest: Literal["none", "whole", "altered"] = "none"  # whether the checksums of a manifest were met
    public_set: str | None = None  # the public set that this could be, by its kind
    lacking: list[str] = field(default_factory=list)  # Why it is not the whole public set, a line per split.
    account: Account | None = None  # which files are read and which are not

    def as_json(self) -> dict[str, object]:
        return {
            "source": str(self.source),
            "kind": self.kind,
            "whole": not self.faults,
            "account": self.account and self.account.as_json(),
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
    vocabulary: str | None = None,
    workers: int = 1,
    progress: Progress = lambda _what, _done, _of: None,
) -> DatasetCheck:
    """Reads everything in a data set.

    `source`: a set with splits, or one split, or a file of text or samples.
    `vocabulary`: path or name, to which text and samples are held.
    """
    if not source.exists():
        raise UserError(f"{str(source)!r}: no such file or folder")
    check = DatasetCheck(source, detect(source))
    check.account = take_account(source, check.kind)
    if (source / BEGUN).is_file():
        check.faults.append(f"{BEGUN}: the set is not finished; repeat the command that makes it")
    _checksums(check, workers, progress)
    validation = validation_folder(source)
    if validation is None:
        _verify_split(check, None, source, vocabulary, workers, progress)
    else:
        _verify_split(check, "train", train_folder(source), vocabulary, workers, progress)
        _verify_split(check, "validation", validation, vocabulary, workers, progress)
    # Files that no manifest names would be read, too.
    manifest = read_manifest(source) if source.is_dir() else None
    if manifest is not None and not check.faults:
        for split, num in check.samples.items():
            expected = manifest.counts.get(split, num)
            if num != expected:
                check.faults.append(f"{split}: {num} samples in its files, {expected} in {NAME}; remove what was added")
    return check


def _checksums(check: DatasetCheck, workers: int, report: Progress) -> None:
    """Compares all files that the manifest names: that of the folder, or of the one above a single split."""
    root, prefix = check.source, ""
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
            report("checksums", number, manifest.num_files)
    except UserError as error:  # the list of files itself is damaged
        found.append(str(error))
    check.manifest = "altered" if found else "whole"
    check.faults += found


def _compared(root: Path, prefix: str, workers: int) -> Iterator[str | None]:
    wanted = (entry for entry in read_files(root) if entry.path.startswith(prefix))
    compare: Callable[[FileEntry], str | None] = partial(verify_file, root)
    # Threads: digests do not hold Python's lock. Some at a time, for there may be a million.
    with ThreadPoolExecutor(workers) as threads:
        while batch := list(islice(wanted, _AT_ONCE)):
            yield from threads.map(compare, batch)


def _verify_split(
    check: DatasetCheck, split: Split | None, folder: Path, vocabulary: str | None, workers: int, report: Progress
) -> None:
    kind = KINDS[check.kind]
    label = f"{split}: " if split else ""
    checking = Checking(split, vocabulary, workers, partial(report, f"{label}{kind.counted}"), check.remarks.append)
    try:
        faults = kind.verify(folder, checking)
    except UserError as error:  # a folder that cannot be listed at all is one fault
        faults = [str(error)]
    if folder != check.source:  # the name of the folder stands in front of the bare name of a file in it
        faults = [line if line.startswith("'") else f"{folder.name}/{line}" for line in faults]
    # What the checksums have found already is not reported twice.
    named = {line.partition(": ")[0] for line in check.faults}
    for line in faults:
        file = line.partition(": ")[0].strip("'")
        if file not in named and file.removeprefix(f"{check.source}/") not in named:
            check.faults.append(line)
    _count(check, kind, split, folder)


def _count(check: DatasetCheck, kind: DataKind, split: Split | None, folder: Path) -> None:
    """Counts samples, and compares with the public set that they could be; what cannot be opened is a fault already."""
    try:
        counted = kind.count(folder, split)
    except UserError as error:
        if not check.faults:
            check.faults.append(str(error))
        return
    if counted is None:
        return
    check.samples[split or "all"] = counted.num_samples
    check.public_set = check.public_set or counted.public_set
    if counted.public_set is None:
        return
    if counted.lacking is not None:
        check.lacking.append(counted.lacking)
    if split is None:
        check.lacking.append("a single split: give the folder that holds train and validation")

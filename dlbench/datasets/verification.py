"""Verifies a whole data set: its splits, the checksums of its manifest, damaged files, and which public set it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

from dlbench.datasets.kinds import KINDS, Checking, DataKind
from dlbench.datasets.making.production import BEGUN
from dlbench.datasets.manifest import NAME, FileEntry, read_files, read_manifest, verify_file
from dlbench.datasets.recognition import detect, take_account
from dlbench.datasets.splits import NAMES, Account, Split, train_folder, validation_folder
from dlbench.errors import UserError

Progress = Callable[[str, int, int], None]  # called with the unit, the number done, and the total

_FILES_PER_BATCH = 1024  # Files whose digests are computed at a time.


@dataclass
class DatasetCheck:
    """The result of a verification."""

    source: Path
    kind: str
    samples: dict[str, int] = field(default_factory=dict)  # by split, without splits that cannot be counted
    faults: list[str] = field(default_factory=list)  # a line for each bad file, with the reason
    remarks: list[str] = field(default_factory=list)  # lines about unusual but usable data
    manifest: Literal["none", "whole", "altered"] = "none"  # whether the checksums of the manifest are right
    public_set: str | None = None  # the public set that it may be
    lacking: list[str] = field(default_factory=list)  # differences to the complete public set, a line per split
    account: Account | None = None  # files that are read, and files that are not

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
    """Reads and checks a whole data set: with splits, one split, or a file of text or samples."""
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
    # Files that are not in the manifest would be read, too.
    manifest = read_manifest(source) if source.is_dir() else None
    if manifest is not None and not check.faults:
        for split, num in check.samples.items():
            expected = manifest.counts.get(split, num)
            if num != expected:
                check.faults.append(f"{split}: {num} samples in its files, {expected} in {NAME}; remove added files")
    return check


def _checksums(check: DatasetCheck, workers: int, report: Progress) -> None:
    """Compares all files of the manifest, which for a single split may be in the folder above."""
    root, prefix = check.source, ""
    if not (root / NAME).is_file() and any(root.name in names for names in NAMES.values()):
        root, prefix = root.parent, f"{root.name}/"
    manifest = read_manifest(root) if root.is_dir() else None
    if manifest is None:
        return
    faults: list[str] = []
    try:
        for number, fault in enumerate(_compared(root, prefix, workers), 1):
            if fault is not None:
                faults.append(fault)
            report("checksums", number, manifest.num_files)
    except UserError as error:  # the list of files itself is damaged
        faults.append(str(error))
    check.manifest = "altered" if faults else "whole"
    check.faults += faults


def _compared(root: Path, prefix: str, workers: int) -> Iterator[str | None]:
    entries = (entry for entry in read_files(root) if entry.path.startswith(prefix))
    compare: Callable[[FileEntry], str | None] = partial(verify_file, root)
    # Threads, because digests release Python's lock; in batches, because there may be a million files.
    with ThreadPoolExecutor(workers) as threads:
        while batch := list(islice(entries, _FILES_PER_BATCH)):
            yield from threads.map(compare, batch)


def _verify_split(
    check: DatasetCheck, split: Split | None, folder: Path, vocabulary: str | None, workers: int, report: Progress
) -> None:
    kind = KINDS[check.kind]
    unit = f"{split}: {kind.counted}" if split else kind.counted
    checking = Checking(split, vocabulary, workers, partial(report, unit), check.remarks.append)
    try:
        faults = kind.verify(folder, checking)
    except UserError as error:  # a folder that cannot be listed at all is one fault
        faults = [str(error)]
    # Files with a wrong checksum are not reported twice.
    reported = {line.partition(": ")[0] for line in check.faults}
    for line in faults:
        if folder != check.source and not line.startswith("'"):
            line = f"{folder.name}/{line}"
        file = line.partition(": ")[0].strip("'")
        if file not in reported and file.removeprefix(f"{check.source}/") not in reported:
            check.faults.append(line)
    _count(check, kind, split, folder)


def _count(check: DatasetCheck, kind: DataKind, split: Split | None, folder: Path) -> None:
    """Counts samples, and compares their number with that of a public set."""
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

"""Reads a whole data set and says what it is, how much is in it, what is damaged, and which public set it is.

The work is done by the functions of each format; here stands what they share: recognising the format, the splits, and
the checksums of the manifest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from dlbench import pool
from dlbench.datasets import volumes
from dlbench.datasets.account import Account
from dlbench.datasets.images.image_set import completeness, open_image_set, resembles_imagenet
from dlbench.datasets.images.jpeg_decode import decode
from dlbench.datasets.images.shards import ImageSet
from dlbench.datasets.making.production import BEGUN
from dlbench.datasets.manifest import NAME, FileEntry, read_files, read_manifest, verify_file
from dlbench.datasets.recognition import detect, take_account
from dlbench.datasets.splits import NAMES, Split, train_folder, validation_folder
from dlbench.datasets.text.corpus import UNKNOWN, load_vocabulary, read_documents, text_files
from dlbench.datasets.text.pretraining_hdf5 import file_fault, index_samples, sample_files
from dlbench.datasets.volumes import checked_file, index_density, volume_files
from dlbench.errors import UserError
from dlbench.opening import why_unreadable

Result = TypeVar("Result")
Progress = Callable[[str, int, int], None]  # given what is counted, how many are done, and how many there are
Count = Callable[[int, int], None]
Say = Callable[[str], None]

_AT_ONCE = 1024  # files that are digested, or documents that are tokenised, at a time
_AT_A_TIME = 64  # images that one task decodes


@dataclass
class Verdict:
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
) -> Verdict:
    """Reads everything in a data set.

    `source`: a set with splits, or one split, or a file of text or samples.
    `vocabulary`: path or name, to which text and samples are held.
    """
    if not source.exists():
        raise UserError(f"{str(source)!r}: no such file or folder")
    verdict = Verdict(source, detect(source))
    verdict.account = take_account(source, verdict.kind)
    if (source / BEGUN).is_file():
        verdict.faults.append(f"{BEGUN}: the set is not finished; repeat the command that makes it")
    _checksums(verdict, workers, progress)
    validation = validation_folder(source)
    if validation is None:
        _verify_split(verdict, None, source, vocabulary, workers, progress)
    else:
        _verify_split(verdict, "train", train_folder(source), vocabulary, workers, progress)
        _verify_split(verdict, "validation", validation, vocabulary, workers, progress)
    # Files that no manifest names would be read, too.
    manifest = read_manifest(source) if source.is_dir() else None
    if manifest is not None and not verdict.faults:
        for split, num in verdict.samples.items():
            expected = manifest.counts.get(split, num)
            if num != expected:
                verdict.faults.append(
                    f"{split}: {num} samples in its files, {expected} in {NAME}; remove what was added"
                )
    return verdict


# Checksums


def _checksums(verdict: Verdict, workers: int, report: Progress) -> None:
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
            report("checksums", number, manifest.num_files)
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


# Contents


def _verify_split(
    verdict: Verdict, split: Split | None, folder: Path, vocabulary: str | None, workers: int, report: Progress
) -> None:
    label = f"{split}: " if split else ""

    def remark(line: str) -> None:
        verdict.remarks.append(label + line)

    count = partial(report, f"{label}files")
    try:
        if verdict.kind in ("images", "image-shards"):
            count = partial(report, f"{label}images")
            faults = verify_images(folder, count, workers, verdict.remarks.append, split)
        elif verdict.kind == "density":
            faults = verify_density(folder, count, workers, split)
        else:
            faults = verify_text(folder, vocabulary, count, workers, split, remark)
    except UserError as error:  # a folder that cannot be listed at all is one fault
        faults = [str(error)]
    if folder != verdict.source:  # the name of the folder stands in front of the bare name of a file in it
        faults = [line if line.startswith("'") else f"{folder.name}/{line}" for line in faults]
    # What the checksums have found already is not reported twice.
    named = {line.partition(": ")[0] for line in verdict.faults}
    for line in faults:
        file = line.partition(": ")[0].strip("'")
        if file not in named and file.removeprefix(f"{verdict.source}/") not in named:
            verdict.faults.append(line)
    _count(verdict, split, folder)


def _count(verdict: Verdict, split: Split | None, folder: Path) -> None:
    """Counts samples, and compares with the public set that they could be; what cannot be opened is a fault already."""
    if verdict.kind == "text":
        return
    name, lacking = split or "all", None
    public_set = None
    try:
        if verdict.kind == "samples":
            verdict.samples[name] = index_samples(folder, split).num_samples
        elif verdict.kind == "density":
            index = index_density(folder, split)
            verdict.samples[name], lacking = index.num_samples, volumes.completeness(index, split or "train")
            if lacking is None or (index.size, index.channels, index.num_targets) == (128, 4, 4):
                public_set = "cosmoUniverse"
        else:
            images = open_image_set(folder, split)
            verdict.samples[name], lacking = images.num_samples, completeness(images, split or "train")
            if lacking is None or resembles_imagenet(images):
                public_set = "ImageNet-2012"
    except UserError as error:
        lacking = f"{name}: cannot be counted"
        if not verdict.faults:
            verdict.faults.append(str(error))
    verdict.public_set = verdict.public_set or public_set
    if lacking is not None and public_set is not None:
        verdict.lacking.append(lacking)
    if split is None and public_set is not None:
        verdict.lacking.append("a single split: give the folder that holds train and validation")


def verify_images(
    folder: Path,
    on_progress: Count = lambda _done, _total: None,
    workers: int = 1,
    on_odd: Say = lambda _line: None,
    split: Split | None = None,
) -> list[str]:
    """Decodes every image of one split of a tree or of shards wholly; TFRecords carry checksums, which are compared.

    `on_progress`: given the number of images seen, and of all. `workers`: threads; decoding does not hold Python's
    lock. `on_odd`: given one line for each way in which images are usable but not a plain RGB JPEG: grey, CMYK, a PNG
    named .jpg; and one for what was passed over. `split`: which of two splits that names tell apart is read.
    Returns one line for each bad file or sample, with its place and the reason, in the order of the set; none if all is
    well.
    """
    images = open_image_set(folder, split)
    for remark in images.remarks:
        on_odd(f"{str(images.root)!r}: {remark}")
    starts = range(0, images.num_samples, _AT_A_TIME)
    spans = [range(start, min(start + _AT_A_TIME, images.num_samples)) for start in starts]
    bad: list[str] = []
    first_odd: dict[str, str] = {}
    num_odd: Counter[str] = Counter()
    with ThreadPoolExecutor(workers) as threads:
        for span, (lines, odd) in zip(spans, threads.map(partial(_decode, images), spans), strict=True):
            bad += lines
            for name, oddity in odd:
                first_odd.setdefault(oddity, name)
                num_odd[oddity] += 1
            on_progress(span.stop, images.num_samples)
    images.close()
    for oddity, name in sorted(first_odd.items()):
        others = f" and {num_odd[oddity] - 1:,} more" if num_odd[oddity] > 1 else ""
        on_odd(f"{name}{others}: {oddity}")
    return bad


def _decode(images: ImageSet, span: range) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns lines about bad images, and the name and the oddity of odd ones."""
    bad, odd = [], []
    for index in span:
        try:
            _pixels, remark = decode(images.read(index))
        except (OSError, ValueError) as error:
            bad.append(f"{images.name(index)}: {why_unreadable(error)}")
        else:
            if remark is not None:
                odd.append((images.name(index), remark))
    return bad, odd


def verify_density(
    folder: Path, on_progress: Count = lambda _done, _total: None, workers: int = 1, split: Split | None = None
) -> list[str]:
    """Reads every sample of a folder of one split: checksums, shapes, no negative count, finite parameters.

    Returns one line `name: reason` for each bad file, by name; none if all is well.
    """
    container, names = volume_files(folder, split)
    results = _each(partial(checked_file, folder, container), names, on_progress, workers)
    shapes = {name: shape for name, shape in zip(names, results, strict=True) if not isinstance(shape, str)}
    bad = [f"{name}: {fault}" for name, fault in zip(names, results, strict=True) if isinstance(fault, str)]
    first = next(iter(shapes.items()), None)
    if first is not None:
        bad += [f"{n}: {s}, but {first[0]!r} has {first[1]}" for n, s in shapes.items() if not s.fits(first[1])]
    return sorted(bad)


def verify_text(
    source: Path,
    vocabulary: str | None = None,
    on_progress: Count = lambda _done, _total: None,
    workers: int = 1,
    split: Split | None = None,
    on_remark: Say = lambda _line: None,
) -> list[str]:
    """One line for each bad file, `<name>: <reason>`; none if all are whole.

    Raw text must be UTF-8 and hold documents, at least two in all. HDF5 samples must have types and shapes of a
    published layout, and values in range in every row.
    `source`: a text file, a folder of .txt files, or HDF5 samples (file or folder). `vocabulary`: path
    or name; with it, ids are held against its size, and the share of [UNK] is reported. `split`: which of two splits
    that names tell apart is read. `on_remark`: given what was counted.
    """
    samples = sample_files(source, split) if source.exists() else []
    if samples:
        size = None if vocabulary is None else len(load_vocabulary(vocabulary))
        faults = _each(partial(file_fault, vocab_size=size), samples, on_progress, workers)
        return [f"{path.name}: {fault}" for path, fault in zip(samples, faults, strict=True) if fault]
    files = text_files(source, split)
    read = _each(partial(_read_text, vocabulary=vocabulary), files, on_progress, workers)
    bad = [f"{path.name}: {fault}" for path, (fault, _, _, _) in zip(files, read, strict=True) if fault]
    documents = sum(count for _, count, _, _ in read)
    tokens, unknown = sum(count for _, _, count, _ in read), sum(count for *_, count in read)
    on_remark(f"{documents} documents in {len(files)} file{'s' if len(files) > 1 else ''}")
    if tokens:
        on_remark(f"{unknown / tokens:.3%} of {tokens} tokens are {UNKNOWN}")
    if not bad and documents == 1:
        bad.append(f"{source.name}: a single document; next-sentence prediction needs two, put a blank line between")
    return bad


def _each(check: Callable[..., Result], files: list[Any], on_progress: Count, workers: int) -> list[Result]:
    """What a check says of each file; it runs in several processes."""
    results: list[Result] = []
    with pool.run(check, files, workers, name=str, verb="read") as done:
        for result in pool.in_order(done):
            results.append(result)
            on_progress(len(results), len(files))
    return results


def _read_text(path: Path, vocabulary: str | None) -> tuple[str | None, int, int, int]:
    """What is wrong, documents, tokens and unknown tokens of one text file; no tokens without a vocabulary."""
    tokenizer, unknown_id = None, -1
    if vocabulary is not None:
        loaded = load_vocabulary(vocabulary)
        tokenizer, unknown_id = loaded.tokenizer(), loaded.id_of(UNKNOWN)
    documents = tokens = unknown = 0
    try:
        reading = read_documents([path])
        while batch := list(islice(reading, _AT_ONCE)):
            documents += len(batch)
            if tokenizer is not None:
                sentences = [sentence for document in batch for sentence in document]
                for encoding in tokenizer.encode_batch(sentences, add_special_tokens=False):
                    tokens += len(encoding.ids)
                    unknown += encoding.ids.count(unknown_id)
    except UserError as error:
        return str(error).removeprefix(repr(str(path))).lstrip(":, "), documents, tokens, unknown
    return (None if documents else "no text in it"), documents, tokens, unknown

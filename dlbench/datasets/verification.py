"""Reads a whole data set and says what it is, how much is in it, what is damaged, and which public set it is.

The work is done by the functions of each format; here stands what they share: recognising the format, the splits, and
the checksums of the manifest.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal, TypeVar

from dlbench import pool
from dlbench.datasets import volumes
from dlbench.datasets.account import Account
from dlbench.datasets.images.image_set import completeness, open_image_set, resembles_imagenet
from dlbench.datasets.images.jpeg_decode import decode
from dlbench.datasets.images.shards import ImageSet, ImageShards
from dlbench.datasets.making.production import Journal
from dlbench.datasets.manifest import NAME, FileEntry, read_files, read_manifest, verify_file
from dlbench.datasets.recognition import KINDS, detect, take_account
from dlbench.datasets.splits import NAMES, Split, train_folder, validation_folder
from dlbench.datasets.text.corpus import UNKNOWN, load_vocabulary, read_documents, text_files
from dlbench.datasets.text.pretraining_hdf5 import file_fault, index_samples, sample_files
from dlbench.datasets.volumes import index_density, verify_density
from dlbench.errors import UserError, nearest
from dlbench.opening import file_sha256

Progress = Callable[[str, int, int], None]  # given what is counted, how many are done, and how many there are

_AT_ONCE = 1024
_COUNTED = re.compile(r"(\d+) of (\d+): ")


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
    kind: str | None = None,
    vocabulary: str | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> Verdict:
    """Reads everything in a data set.

    `source`: a set with splits, or one split, or a file of text or samples. `kind`: one of KINDS; None: recognised.
    `vocabulary`: path or name, to which text and samples are held.
    Raises UserError: there is no data of a known kind at the source, or no such vocabulary.
    """
    if not source.exists():
        raise UserError(f"{str(source)!r}: no such file or folder")
    if kind is not None and kind not in KINDS:
        raise UserError(f"--kind {kind!r}: {nearest(kind, KINDS)}")
    verdict = Verdict(source, kind or detect(source))
    verdict.account = take_account(source, verdict.kind)
    report = progress or (lambda _what, _done, _of: None)
    if Journal.is_in(source):
        verdict.faults.append(f"{Journal.NAME}: the set is not finished; repeat the command that makes it")
    _checksums(verdict, workers, report)
    for split, folder in _splits(source):
        _verify_split(verdict, split, folder, vocabulary, workers, report)
    _compare_counts(verdict)
    return verdict


def _splits(source: Path) -> list[tuple[Split | None, Path]]:
    validation = validation_folder(source)
    if validation is None:
        return [(None, source)]
    return [("train", train_folder(source)), ("validation", validation)]


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
    verdict: Verdict, split: Split | None, folder: Path, vocabulary: str | None, workers: int, report: Progress
) -> None:
    label = f"{split}: " if split else ""
    if verdict.kind in ("images", "image-shards"):
        count = partial(report, f"{label}images")
        faults = verify_images(verdict.source, count, workers, verdict.remarks.append, split)
    elif verdict.kind == "density":
        try:
            faults = verify_density(folder, partial(report, f"{label}files"), workers, split)
        except UserError as error:  # a folder that cannot be listed at all is one fault
            faults = [str(error)]
        faults = _in_folder(verdict.source, folder, faults)
    else:

        def say(line: str) -> None:
            counted = _COUNTED.match(line)
            if counted is None:
                verdict.remarks.append(label + line)
            else:
                report(f"{label}files", int(counted[1]), int(counted[2]))

        faults = _in_folder(verdict.source, folder, verify_text(folder, vocabulary, say, workers, split))
    # What the checksums have found already is not reported twice.
    named = {line.partition(": ")[0] for line in verdict.faults}
    verdict.faults += [line for line in faults if not _is_known(line, verdict.source, named)]
    _count(verdict, split, folder)


def _is_known(line: str, source: Path, named: set[str]) -> bool:
    file = line.partition(": ")[0].strip("'")
    return file in named or file.removeprefix(f"{source}/") in named


def _in_folder(source: Path, folder: Path, lines: list[str]) -> list[str]:
    """Puts the name of the folder in front of lines that begin with the bare name of a file in it."""
    if folder == source:
        return lines
    return [line if line.startswith("'") else f"{folder.name}/{line}" for line in lines]


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


_AT_A_TIME = 64  # images that one task decodes

Found = tuple[int, list[str], list[tuple[str, str]]]  # images seen, lines about bad files, name and oddity of odd ones


def verify_images(
    folder: Path,
    on_progress: Callable[[int, int], None] | None = None,
    workers: int = 1,
    on_odd: Callable[[str], None] | None = None,
    split: Split | None = None,
) -> list[str]:
    """Decodes every image of a tree or of shards wholly, in all splits of the folder.

    Shards are also compared with the checksums in the manifest of the folder or of the one above, if there is one;
    TFRecords carry checksums of their own. `folder`: an image set, or a
    folder of the splits `train` and `validation`. `on_progress`: given the number of images seen, and of all.
    `workers`: threads; decoding and checksums do not hold Python's lock. `on_odd`: given one line for each way in which
    images are usable but not a plain RGB JPEG: grey, CMYK, a PNG named .jpg; and one for what was passed over.
    `split`: which one of two splits is read; None: all. Returns one line
    for each bad file or sample, with its place and the reason, in the order of the set; none if all is well. A set that
    cannot be opened is one line.
    """
    try:
        splits = [(name, path) for name, path in _splits(folder) if split in (None, name)]
        sets = [open_image_set(path, name) for name, path in splits]
        checksums = [_shard_checksums(images) for images in sets]
    except UserError as error:
        return [str(error)]
    total, seen = sum(images.num_samples for images in sets), 0
    bad: list[str] = []
    first_odd: dict[str, str] = {}
    num_odd: Counter[str] = Counter()
    report = on_odd or (lambda _line: None)
    with ThreadPoolExecutor(workers) as pool:
        for images, known in zip(sets, checksums, strict=True):
            for remark in images.remarks:
                report(f"{str(images.root)!r}: {remark}")
            for count, lines, odd in _in_order(pool, _tasks(images, known), 2 * workers):
                seen += count
                bad += lines
                for name, oddity in odd:
                    first_odd.setdefault(oddity, name)
                    num_odd[oddity] += 1
                if on_progress is not None and count:
                    on_progress(seen, total)
            images.close()
    for oddity, name in sorted(first_odd.items()):
        others = f" and {num_odd[oddity] - 1:,} more" if num_odd[oddity] > 1 else ""
        report(f"{name}{others}: {oddity}")
    return bad


def _tasks(images: ImageSet, checksums: Mapping[str, str]) -> Iterator[Callable[[], Found]]:
    for name, expected in checksums.items():
        yield partial(_digest, images.root / name, expected)
    for first in range(0, images.num_samples, _AT_A_TIME):
        yield partial(_decode, images, range(first, min(first + _AT_A_TIME, images.num_samples)))


def _shard_checksums(images: ImageSet) -> dict[str, str]:
    """SHA-256 of each shard, as the manifest of its folder or of the one above says; none without a manifest."""
    if not isinstance(images, ImageShards):
        return {}
    for folder, prefix in ((images.root, ""), (images.root.parent, f"{images.root.name}/")):
        if (folder / NAME).is_file():
            wanted = {prefix + name: name for name in images.index.shards}
            return {wanted[entry.path]: entry.sha256 for entry in read_files(folder) if entry.path in wanted}
    return {}


def _digest(path: Path, expected: str) -> Found:
    try:
        found = file_sha256(path)
    except OSError as error:
        return 0, [f"{str(path)!r}: {error.strerror}"], []
    return 0, [] if found == expected else [f"{str(path)!r}: altered (SHA-256 differs from the manifest)"], []


def _decode(images: ImageSet, span: range) -> Found:
    bad, odd = [], []
    for index in span:
        try:
            _pixels, remark = decode(images.read(index))
        except OSError as error:
            bad.append(f"{images.name(index)}: {error.strerror}")
        except ValueError as error:
            bad.append(f"{images.name(index)}: {error}")
        else:
            if remark is not None:
                odd.append((images.name(index), remark))
    return len(span), bad, odd


def _in_order(pool: ThreadPoolExecutor, tasks: Iterator[Callable[[], Found]], at_once: int) -> Iterator[Found]:
    """The results of tasks in their order; no more than `at_once` are waiting, however many there are."""
    waiting: list[Future[Found]] = []
    for task in tasks:
        waiting.append(pool.submit(task))
        if len(waiting) > at_once:
            yield waiting.pop(0).result()
    for future in waiting:
        yield future.result()


_R = TypeVar("_R")
_BATCH = 1024  # documents tokenised at a time


def verify_text(
    source: Path,
    vocabulary: str | None = None,
    on_progress: Callable[[str], None] | None = None,
    workers: int = 1,
    split: Split | None = None,
) -> list[str]:
    """One line for each bad file, `<name>: <reason>`; none if all are whole.

    Raw text must be UTF-8 and hold documents, at least two in all. HDF5 samples must have types and shapes of a
    published layout, and values in range in every row.
    `source`: a text file, a folder of .txt files, or HDF5 samples (file or folder). `vocabulary`: path
    or name; with it, ids are held against its size, and the share of [UNK] is reported. `on_progress`: given one line a
    file, and information at the end. `split`: which of two splits that names tell apart is read.
    Raises UserError: there is nothing at `source`, or no such vocabulary.
    """
    say = on_progress or (lambda _line: None)
    samples = sample_files(source, split) if source.exists() else []
    if samples:
        size = None if vocabulary is None else len(load_vocabulary(vocabulary))
        faults = _each(partial(file_fault, vocab_size=size), samples, say, workers)
        return [f"{path.name}: {fault}" for path, fault in zip(samples, faults, strict=True) if fault]
    files = text_files(source, split)
    read = _each(partial(_read_text, vocabulary=vocabulary), files, say, workers)
    found = [f"{path.name}: {fault}" for path, (fault, _, _, _) in zip(files, read, strict=True) if fault]
    documents = sum(count for _, count, _, _ in read)
    tokens, unknown = sum(count for _, _, count, _ in read), sum(count for *_, count in read)
    say(f"{documents} documents in {len(files)} file{'s' * (len(files) > 1)}")
    if tokens:
        say(f"{unknown / tokens:.3%} of {tokens} tokens are {UNKNOWN}")
    if not found and documents == 1:
        found.append(f"{source.name}: a single document; next-sentence prediction needs two, put a blank line between")
    return found


def _each(check: Callable[[Path], _R], files: list[Path], say: Callable[[str], None], workers: int) -> list[_R]:
    results: list[_R] = []
    with pool.run(check, files, workers, name=str, verb="read") as found:
        for number, (path, result) in enumerate(zip(files, pool.in_order(found), strict=True), 1):
            results.append(result)
            say(f"{number} of {len(files)}: {path.name}")
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
        while batch := list(islice(reading, _BATCH)):
            documents += len(batch)
            if tokenizer is not None:
                sentences = [sentence for document in batch for sentence in document]
                for encoding in tokenizer.encode_batch(sentences, add_special_tokens=False):
                    tokens += len(encoding.ids)
                    unknown += encoding.ids.count(unknown_id)
    except UserError as error:
        return str(error).removeprefix(repr(str(path))).lstrip(":, "), documents, tokens, unknown
    return (None if documents else "no text in it"), documents, tokens, unknown

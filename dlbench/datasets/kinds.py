"""One description of each kind of data set: its files, how it is judged while a run is planned, verified and counted.

`dlbench.datasets.recognition` says which kind lies in a folder.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from dlbench import pool
from dlbench.datasets import volumes
from dlbench.datasets.account import sample_names
from dlbench.datasets.images import image_set
from dlbench.datasets.images.jpeg_decode import decode
from dlbench.datasets.images.shards import CLASS_TARS, INDEX, ImageSet, holds_class_tars, load_index, shards_among
from dlbench.datasets.splits import MAX_NAMES, OF_STORAGE, Split, is_split_name, named_splits, require_no_splits
from dlbench.datasets.text import corpus, pretraining_hdf5
from dlbench.errors import UserError
from dlbench.opening import why_unreadable
from dlbench.specs.workload import TextData, Workload

Result = TypeVar("Result")

OPENED = 8  # Files whose headers are read while a run is planned, at most.
_AT_A_TIME = 64  # Images that one task decodes.
_AT_ONCE = 1024  # Documents that are tokenised at a time.
_IMAGE_SUFFIXES = tuple(os.fsdecode(suffix) for suffix in image_set.SUFFIXES)
_IMAGES_WANTED = f"images: {image_set.LAYOUT}, or shards of them (.tar, .tfrecord)"
_PUBLIC_SHAPE = (128, 4, 4)  # Edge of a volume, channels and targets of cosmoUniverse.


def holds_images(folder: Path) -> bool:
    """Returns whether a folder holds image files, by the first of its names."""
    return any(name.lower().endswith(_IMAGE_SUFFIXES) for name in names_in(folder)[0])


def names_in(folder: Path, *, folders: bool = False) -> tuple[list[str], bool]:
    """Returns names in a folder that are not hidden, or of folders alone, and whether these are all."""
    with os.scandir(folder) as entries:
        first = list(islice(entries, MAX_NAMES + 1))
        names = [e.name for e in first if not e.name.startswith(".") and (not folders or e.is_dir())]
    return names, len(first) <= MAX_NAMES


@dataclass(frozen=True, kw_only=True)
class PlannedSplit:
    """A folder, or a file, that a planned run would read one split of its data from."""

    source: Path  # The data set as the plan names it by `key`.
    key: str
    folder: Path
    inner: Sequence[str]  # Folders in it.
    split: Split
    workload: Workload
    needed: int  # Samples of one step.
    trains_on: str  # What the workload trains on, in words.

    @property
    def model(self) -> Any:
        """The network, which has the sizes that its formats of data are read in."""
        return self.workload.model

    @property
    def where(self) -> str:
        """The key of the plan and the folder, for messages."""
        return f"{self.key} {str(self.folder)!r}"


class Checking(NamedTuple):
    """How all of a split is read."""

    split: Split | None = None  # Which of two splits that names tell apart is read.
    vocabulary: str | None = None  # A path or a name, to which text and samples are held.
    workers: int = 1
    on_progress: Callable[[int, int], None] = lambda _done, _total: None
    on_remark: Callable[[str], None] = lambda _line: None  # Given what is odd but usable, or was counted, a line each.

    def each(self, check: Callable[..., Result], files: Sequence[Any]) -> list[Result]:
        """Returns what a check says of each file; it runs in several processes."""
        results: list[Result] = []
        with pool.run(check, list(files), self.workers, name=str, verb="read") as done:
            for result in pool.in_order(done):
                results.append(result)
                self.on_progress(len(results), len(files))
        return results


class SplitCount(NamedTuple):
    """The samples of a split after all of it was opened."""

    num_samples: int
    public_set: str | None = None  # The public set that it is, or may be meant to be, a split of.
    lacking: str | None = None  # Why it is not a whole split of that.


class DataKind:
    """A kind of data set; a new one is a class here and stands in `KINDS`."""

    name: ClassVar[str]
    title: ClassVar[str]
    manifest_kind: ClassVar[str]  # What its manifest calls it.
    wanted: ClassVar[str] = ""  # What a workload that trains on it asks for, in words; of the first of its kinds.
    unit: ClassVar[str] = "files"
    counted: ClassVar[str] = "files"  # What verifying it counts.
    counts_samples: ClassVar[bool] = True  # Whether counts of its manifest are of samples.

    def is_sample(self, name: str) -> bool:
        """Returns whether a file's name, relative to the set's folder, is one of its samples."""
        raise NotImplementedError

    def names(self, folder: Path) -> tuple[list[str], bool]:
        """Returns the names of files in a folder, relative to it, and whether these are all."""
        return names_in(folder)

    def sorted_out(self, folder: Path) -> tuple[list[str], list[str], bool]:
        """Returns names of samples in a folder, or of its classes, the others, and whether these are all names."""
        names, is_whole = self.names(folder)
        samples = sorted(name for name in names if self.is_sample(name))
        return samples, sorted(set(names) - set(samples)), is_whole

    def judge(self, planned: PlannedSplit) -> int | None:
        """Returns the samples of a split, None if they are not known cheaply. Raises UserError: it does not fit."""
        raise NotImplementedError

    def verify(self, folder: Path, checking: Checking) -> list[str]:
        """Reads all of a split; returns a line `name: reason` for each bad file or sample; none if all is well."""
        raise NotImplementedError

    def count(self, folder: Path, split: Split | None) -> SplitCount | None:
        """Opens a split and counts its samples; None where that says nothing."""
        raise NotImplementedError


class _Images(DataKind):
    counted = "images"

    def verify(self, folder: Path, checking: Checking) -> list[str]:
        """Decodes every image wholly, in threads; TFRecords carry checksums, which are compared.

        Remarks: one for each way in which images are usable but not a plain RGB JPEG (grey, CMYK, a PNG named .jpg),
        and one for what was passed over.
        """
        images = image_set.open_image_set(folder, checking.split)
        for remark in images.remarks:
            checking.on_remark(f"{str(images.root)!r}: {remark}")
        starts = range(0, images.num_samples, _AT_A_TIME)
        spans = [range(start, min(start + _AT_A_TIME, images.num_samples)) for start in starts]
        bad: list[str] = []
        first_odd: dict[str, str] = {}
        num_odd: Counter[str] = Counter()
        with ThreadPoolExecutor(checking.workers) as threads:
            for span, (lines, odd) in zip(spans, threads.map(partial(_decode, images), spans), strict=True):
                bad += lines
                for name, oddity in odd:
                    first_odd.setdefault(oddity, name)
                    num_odd[oddity] += 1
                checking.on_progress(span.stop, images.num_samples)
        images.close()
        for oddity, name in sorted(first_odd.items()):
            others = f" and {num_odd[oddity] - 1:,} more" if num_odd[oddity] > 1 else ""
            checking.on_remark(f"{name}{others}: {oddity}")
        return bad

    def count(self, folder: Path, split: Split | None) -> SplitCount:
        images = image_set.open_image_set(folder, split)
        lacking = image_set.completeness(images, split or "train")
        is_imagenet = lacking is None or image_set.resembles_imagenet(images)
        return SplitCount(images.num_samples, "ImageNet-2012" if is_imagenet else None, lacking)


class ImageTree(_Images):
    """`<class>/<image>.jpg`."""

    name = "images"
    title = "a tree of images"
    manifest_kind = "images"
    wanted = _IMAGES_WANTED
    unit = "class folders"

    def sorted_out(self, folder: Path) -> tuple[list[str], list[str], bool]:
        names, is_whole = names_in(folder)
        classes = sorted(name for name in names_in(folder, folders=True)[0] if name not in OF_STORAGE)
        return classes, sorted(set(names) - set(classes)), is_whole

    def judge(self, planned: PlannedSplit) -> int | None:
        if not names_in(planned.folder)[1]:
            return None
        image_set.require_classes(len(planned.inner), planned.model, planned.where)
        return _counted_images(planned.folder, planned.inner, planned.needed)


class ShardedImages(_Images):
    """Tar or TFRecord files."""

    name = "image-shards"
    title = "shards of images"
    manifest_kind = "image-shards"

    def is_sample(self, name: str) -> bool:
        return bool(shards_among([name]))

    def judge(self, planned: PlannedSplit) -> int | None:
        folder = planned.folder
        if (folder / INDEX).is_file():
            index = load_index(folder)
            image_set.require_classes(len(index.classes), planned.model, planned.where)
            return len(index.labels)
        names = names_in(folder)[0]
        if holds_class_tars(names):
            raise UserError(f"{planned.where} holds {CLASS_TARS}")
        of_container = frozenset(next(iter(shards_among(names).values())))
        sample_names(folder, names, of_container.__contains__, planned.split, _IMAGES_WANTED)
        return None


def _counted_images(folder: Path, classes: Sequence[str], needed: int) -> int | None:
    """Returns the images in a tree, or None as soon as there are as many as needed, or too many to be counted here."""
    num = looked = 0
    for name in sorted(classes):
        with os.scandir(folder / name) as entries:
            first = list(islice(entries, MAX_NAMES))
        images = sum(e.name.lower().endswith(_IMAGE_SUFFIXES) and not e.name.startswith(".") for e in first)
        num, looked = num + images, looked + len(first)
        if not images and len(first) < MAX_NAMES:
            raise UserError(f"{str(folder / name)!r} holds no {image_set.ENDINGS} file; expected {image_set.LAYOUT}")
        if num >= needed or looked >= MAX_NAMES:
            return None
    return num


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


class RawText(DataKind):
    """UTF-8 files."""

    name = "text"
    title = "text"
    manifest_kind = "text"
    wanted = f"text: {corpus.LAYOUT}, or HDF5 files of samples ({', '.join(pretraining_hdf5.SUFFIXES)})"
    counts_samples = False  # But documents.

    def is_sample(self, name: str) -> bool:
        return corpus.is_text_name(name)

    def judge(self, planned: PlannedSplit) -> int | None:
        folder = planned.folder
        texts = [folder]
        if folder.is_dir():
            names = sample_names(folder, names_in(folder)[0], corpus.is_text_name, planned.split, corpus.LAYOUT)
            texts = [folder / name for name in names[:1]]
        for path in texts:
            if not corpus.looks_like_text(path):
                raise UserError(
                    f"{planned.key} {str(planned.source)!r} holds {path.name!r}, which is not UTF-8; "
                    f"{planned.trains_on}"
                )
        return None

    def verify(self, folder: Path, checking: Checking) -> list[str]:
        """Reads UTF-8 and documents, at least two in all; with a vocabulary the share of [UNK] is remarked."""
        files = corpus.text_files(folder, checking.split)
        read = checking.each(partial(_read_text, vocabulary=checking.vocabulary), files)
        bad = [f"{path.name}: {fault}" for path, (fault, _, _, _) in zip(files, read, strict=True) if fault]
        documents = sum(count for _, count, _, _ in read)
        tokens, unknown = sum(count for _, _, count, _ in read), sum(count for *_, count in read)
        label = f"{checking.split}: " if checking.split else ""
        checking.on_remark(f"{label}{documents} documents in {len(files)} file{'s' if len(files) > 1 else ''}")
        if tokens:
            checking.on_remark(f"{label}{unknown / tokens:.3%} of {tokens} tokens are {corpus.UNKNOWN}")
        if not bad and documents == 1:
            bad.append(
                f"{folder.name}: a single document; next-sentence prediction needs two, put a blank line between"
            )
        return bad

    def count(self, folder: Path, split: Split | None) -> SplitCount | None:
        return None


class TextSamples(DataKind):
    """HDF5 files of samples."""

    name = "samples"
    title = "BERT samples"
    manifest_kind = "pretraining-samples"

    def is_sample(self, name: str) -> bool:
        return pretraining_hdf5.is_sample_file(name)

    def judge(self, planned: PlannedSplit) -> int | None:
        folder = planned.folder
        files = pretraining_hdf5.sample_files(folder, planned.split)
        is_small = (folder.is_file() or names_in(folder)[1]) and len(files) <= OPENED
        index = pretraining_hdf5.index_samples(folder if is_small else files[0], planned.split)
        data = planned.workload.data
        assert isinstance(data, TextData)  # no other workload takes such samples
        pretraining_hdf5.require_length(index.shape, data, planned.where)
        return index.num_samples if is_small else None

    def verify(self, folder: Path, checking: Checking) -> list[str]:
        """Reads every row: types and shapes of a published layout, and ids below the size of the vocabulary."""
        vocab_size = None if checking.vocabulary is None else len(corpus.load_vocabulary(checking.vocabulary))
        samples = pretraining_hdf5.sample_files(folder, checking.split)
        faults = checking.each(partial(pretraining_hdf5.file_fault, vocab_size=vocab_size), samples)
        return [f"{path.name}: {fault}" for path, fault in zip(samples, faults, strict=True) if fault]

    def count(self, folder: Path, split: Split | None) -> SplitCount:
        return SplitCount(pretraining_hdf5.index_samples(folder, split).num_samples)


def _read_text(path: Path, vocabulary: str | None) -> tuple[str | None, int, int, int]:
    """What is wrong, documents, tokens and unknown tokens of one text file; no tokens without a vocabulary."""
    tokenizer, unknown_id = None, -1
    if vocabulary is not None:
        loaded = corpus.load_vocabulary(vocabulary)
        tokenizer, unknown_id = loaded.tokenizer(), loaded.id_of(corpus.UNKNOWN)
    documents = tokens = unknown = 0
    try:
        reading = corpus.read_documents([path])
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


class DensityVolumes(DataKind):
    """Volumes with their parameters, in the folder and in its subfolders."""

    name = "density"
    title = "density volumes"
    manifest_kind = "density"
    wanted = "density volumes: files of x and y (.h5, .hdf5, .tfrecord, .tfrecord.gz, or _data.npy with _label.npy)"

    def is_sample(self, name: str) -> bool:
        return volumes.container_of(name) is not None

    def names(self, folder: Path) -> tuple[list[str], bool]:
        names, is_whole = names_in(folder)
        inner = set(names_in(folder, folders=True)[0])
        names = [name for name in names if name not in inner]
        for name in sorted(inner - OF_STORAGE):
            if len(names) > MAX_NAMES:
                return names, False
            below, is_below_whole = names_in(folder / name)
            names += [f"{name}/{base}" for base in below]
            is_whole = is_whole and is_below_whole
        return names, is_whole

    def judge(self, planned: PlannedSplit) -> int | None:
        folder, inner = planned.folder, planned.inner
        require_no_splits(folder, [name for name in inner if is_split_name(name)])
        names, is_whole = names_in(folder)
        for name in sorted(inner)[:OPENED]:
            below, is_below_whole = names_in(folder / name)
            names += [f"{name}/{base}" for base in below]
            is_whole = is_whole and is_below_whole
        files = [name for name in names if volumes.container_of(name) is not None]
        first = min(files)
        shape = volumes.file_shape(folder, first, str(volumes.container_of(first)))
        volumes.require_sizes(shape, planned.model, planned.where)
        named_splits(folder, files)
        is_small = is_whole and len(inner) <= OPENED and len(files) <= OPENED
        if is_small and volumes.container_of(first) != "tfrecord":
            return volumes.index_density(folder, planned.split).num_samples
        return None

    def verify(self, folder: Path, checking: Checking) -> list[str]:
        """Reads every sample: checksums, shapes, no negative count, finite parameters. Returns lines by name."""
        container, names = volumes.volume_files(folder, checking.split)
        results = checking.each(partial(volumes.checked_file, folder, container), names)
        shapes = {name: shape for name, shape in zip(names, results, strict=True) if not isinstance(shape, str)}
        bad = [f"{name}: {fault}" for name, fault in zip(names, results, strict=True) if isinstance(fault, str)]
        first = next(iter(shapes.items()), None)
        if first is not None:
            bad += [f"{n}: {s}, but {first[0]!r} has {first[1]}" for n, s in shapes.items() if not s.fits(first[1])]
        return sorted(bad)

    def count(self, folder: Path, split: Split | None) -> SplitCount:
        index = volumes.index_density(folder, split)
        lacking = volumes.completeness(index, split or "train")
        is_public = lacking is None or (index.size, index.channels, index.num_targets) == _PUBLIC_SHAPE
        return SplitCount(index.num_samples, "cosmoUniverse" if is_public else None, lacking)


KINDS: dict[str, DataKind] = {
    kind.name: kind for kind in (ImageTree(), ShardedImages(), RawText(), TextSamples(), DensityVolumes())
}
BY_MANIFEST = {kind.manifest_kind: kind for kind in KINDS.values()}

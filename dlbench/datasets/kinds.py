"""The kinds of data sets: for each its files, and how it is checked during planning, verified and counted."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from dlbench import pool
from dlbench.datasets import volumes
from dlbench.datasets.images import image_set
from dlbench.datasets.images.jpeg_decode import decode
from dlbench.datasets.images.shards import CLASS_TARS, INDEX, ImageSet, holds_class_tars, load_index, shards_among
from dlbench.datasets.splits import (
    MAX_NAMES,
    OF_STORAGE,
    Split,
    is_split_name,
    named_splits,
    require_no_splits,
    sample_names,
)
from dlbench.datasets.text import corpus, pretraining_hdf5
from dlbench.errors import UserError
from dlbench.opening import why_unreadable
from dlbench.specs.workload import TextData, Workload
from dlbench.units import counted

Result = TypeVar("Result")

OPENED = 8  # Most files whose headers are read during planning.
_IMAGES_PER_TASK = 64
_DOCUMENTS_PER_BATCH = 1024
_IMAGE_SUFFIXES = tuple(os.fsdecode(suffix) for suffix in image_set.SUFFIXES)
_IMAGES_WANTED = f"images: {image_set.LAYOUT}, or shards of them (.tar, .tfrecord)"
_PUBLIC_SHAPE = (128, 4, 4)  # Edge of a volume, channels and targets of cosmoUniverse.


def holds_images(folder: Path) -> bool:
    """Returns whether image files are among the first names of a folder."""
    return any(name.lower().endswith(_IMAGE_SUFFIXES) for name in names_in(folder)[0])


def names_in(folder: Path, *, folders: bool = False) -> tuple[list[str], bool]:
    """Returns the first names in a folder without hidden ones, or only folders, and whether these are all."""
    with os.scandir(folder) as entries:
        first = list(islice(entries, MAX_NAMES + 1))
        names = [e.name for e in first if not e.name.startswith(".") and (not folders or e.is_dir())]
    return names, len(first) <= MAX_NAMES


@dataclass(frozen=True, kw_only=True)
class PlannedSplit:
    """A folder, or a file, from which a planned run would read one split of its data."""

    source: Path  # The data set, the value of `key` in the plan.
    key: str
    folder: Path
    inner: Sequence[str]  # Names of folders in it.
    split: Split
    workload: Workload
    needed: int  # Samples of one step.
    trains_on: str  # The expected data, for messages.

    @property
    def model(self) -> Any:
        """The network, which defines the sizes of its samples."""
        return self.workload.model

    @property
    def where(self) -> str:
        """The key of the plan and the folder, for messages."""
        return f"{self.key} {str(self.folder)!r}"


class Checking(NamedTuple):
    """Options of the verification of a split."""

    split: Split | None = None  # Split to read if the names of files distinguish two.
    vocabulary: str | None = None  # Path or name of a vocabulary for checks of text and samples.
    workers: int = 1
    on_progress: Callable[[int, int], None] = lambda _done, _total: None
    # Called with lines about unusual but usable data, and counts.
    on_remark: Callable[[str], None] = lambda _line: None

    def each(self, check: Callable[..., Result], files: Sequence[Any]) -> list[Result]:
        """Returns the results of a check of each file, which runs in several processes."""
        results: list[Result] = []
        with pool.run(check, list(files), self.workers, name=str, verb="read") as done:
            for result in pool.in_order(done):
                results.append(result)
                self.on_progress(len(results), len(files))
        return results


class SplitCount(NamedTuple):
    """The number of samples of a split."""

    num_samples: int
    public_set: str | None = None  # Name of the public set that it may be a split of.
    lacking: str | None = None  # Difference to a complete split of the public set; None: complete.


class DataKind:
    """A kind of data set. To add one, define a subclass and add it to `KINDS`."""

    name: ClassVar[str]
    title: ClassVar[str]
    manifest_kind: ClassVar[str]  # Its `kind` in manifests.
    wanted: ClassVar[str] = ""  # Layouts that a workload for this kind reads, for messages.
    unit: ClassVar[str] = "files"
    counted: ClassVar[str] = "files"  # Unit of the progress of a verification.
    counts_samples: ClassVar[bool] = True  # Whether the counts in its manifest are numbers of samples.

    def is_sample(self, name: str) -> bool:
        """Returns whether a file, named relative to the data set, holds samples."""
        raise NotImplementedError

    def names(self, folder: Path) -> tuple[list[str], bool]:
        """Returns the names of files in a folder, relative to it, and whether these are all."""
        return names_in(folder)

    def sorted_out(self, folder: Path) -> tuple[list[str], list[str], bool]:
        """Returns the names of samples or classes in a folder, other names, and whether these are all."""
        names, is_whole = self.names(folder)
        samples = sorted(name for name in names if self.is_sample(name))
        return samples, sorted(set(names) - set(samples)), is_whole

    def judge(self, planned: PlannedSplit) -> int | None:
        """Returns the number of samples, None if counting is slow. Raises UserError: the workload cannot use it."""
        raise NotImplementedError

    def verify(self, folder: Path, checking: Checking) -> list[str]:
        """Reads a whole split; returns a line `name: reason` for each bad file or sample."""
        raise NotImplementedError

    def count(self, folder: Path, split: Split | None) -> SplitCount | None:
        """Counts the samples of a split; None if this kind has no fixed samples."""
        raise NotImplementedError


class _Images(DataKind):
    counted = "images"

    def verify(self, folder: Path, checking: Checking) -> list[str]:
        """Decodes every image in threads; remarks each kind of image that is not a plain RGB JPEG."""
        images = image_set.open_image_set(folder, checking.split)
        for remark in images.remarks:
            checking.on_remark(f"{str(images.root)!r}: {remark}")
        starts = range(0, images.num_samples, _IMAGES_PER_TASK)
        spans = [range(start, min(start + _IMAGES_PER_TASK, images.num_samples)) for start in starts]
        faults: list[str] = []
        first_name: dict[str, str] = {}  # By remark.
        counts: Counter[str] = Counter()  # By remark.
        with ThreadPoolExecutor(checking.workers) as threads:
            for span, (lines, remarks) in zip(spans, threads.map(partial(_decode, images), spans), strict=True):
                faults += lines
                for name, remark in remarks:
                    first_name.setdefault(remark, name)
                    counts[remark] += 1
                checking.on_progress(span.stop, images.num_samples)
        images.close()
        for remark, name in sorted(first_name.items()):
            more = f" and {counts[remark] - 1:,} more" if counts[remark] > 1 else ""
            checking.on_remark(f"{name}{more}: {remark}")
        return faults

    def count(self, folder: Path, split: Split | None) -> SplitCount:
        images = image_set.open_image_set(folder, split)
        lacking = image_set.completeness(images, split or "train")
        is_imagenet = lacking is None or image_set.resembles_imagenet(images)
        public_set = "ImageNet-2012" if is_imagenet else None
        return SplitCount(images.num_samples, public_set, lacking)


class ImageTree(_Images):
    """Images as `<class>/<image>.jpg`."""

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
    """Images in tar or TFRecord files."""

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
        first_container = frozenset(next(iter(shards_among(names).values())))
        sample_names(folder, names, first_container.__contains__, planned.split, _IMAGES_WANTED)
        return None


def _counted_images(folder: Path, classes: Sequence[str], needed: int) -> int | None:
    """Returns the number of images in a tree; None if it is at least `needed`, or there are too many to list."""
    num_images = num_entries = 0
    for name in sorted(classes):
        with os.scandir(folder / name) as entries:
            first = list(islice(entries, MAX_NAMES))
        in_class = sum(e.name.lower().endswith(_IMAGE_SUFFIXES) and not e.name.startswith(".") for e in first)
        num_images, num_entries = num_images + in_class, num_entries + len(first)
        if not in_class and len(first) < MAX_NAMES:
            raise UserError(f"{str(folder / name)!r} holds no {image_set.ENDINGS} file; expected {image_set.LAYOUT}")
        if num_images >= needed or num_entries >= MAX_NAMES:
            return None
    return num_images


def _decode(images: ImageSet, span: range) -> tuple[list[str], list[tuple[str, str]]]:
    faults, remarks = [], []
    for index in span:
        try:
            _pixels, remark = decode(images.read(index))
        except (OSError, ValueError) as error:
            faults.append(f"{images.name(index)}: {why_unreadable(error)}")
        else:
            if remark is not None:
                remarks.append((images.name(index), remark))
    return faults, remarks


class RawText(DataKind):
    """Text in UTF-8 files."""

    name = "text"
    title = "text"
    manifest_kind = "text"
    wanted = f"text: {corpus.LAYOUT}, or HDF5 files of samples ({', '.join(pretraining_hdf5.SUFFIXES)})"
    counts_samples = False  # The counts are documents.

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
        """Decodes UTF-8 and counts documents, at least two; with a vocabulary it remarks the share of [UNK]."""
        files = corpus.text_files(folder, checking.split)
        results = checking.each(partial(_read_text, vocabulary=checking.vocabulary), files)
        faults = []
        num_documents = num_tokens = num_unknown = 0
        for path, (fault, documents, tokens, unknown) in zip(files, results, strict=True):
            if fault:
                faults.append(f"{path.name}: {fault}")
            num_documents += documents
            num_tokens += tokens
            num_unknown += unknown
        label = f"{checking.split}: " if checking.split else ""
        checking.on_remark(f"{label}{num_documents} documents in {counted(len(files), 'file')}")
        if num_tokens:
            checking.on_remark(f"{label}{num_unknown / num_tokens:.3%} of {num_tokens} tokens are {corpus.UNKNOWN}")
        if not faults and num_documents == 1:
            faults.append(
                f"{folder.name}: a single document; next-sentence prediction needs two, separated by a blank line"
            )
        return faults

    def count(self, folder: Path, split: Split | None) -> SplitCount | None:
        return None


class TextSamples(DataKind):
    """BERT samples in HDF5 files."""

    name = "samples"
    title = "BERT samples"
    manifest_kind = "pretraining-samples"

    def is_sample(self, name: str) -> bool:
        return pretraining_hdf5.is_sample_file(name)

    def judge(self, planned: PlannedSplit) -> int | None:
        folder = planned.folder
        files = pretraining_hdf5.sample_files(folder, planned.split)
        is_small = (folder.is_file() or names_in(folder)[1]) and len(files) <= OPENED
        opened = folder if is_small else files[0]
        index = pretraining_hdf5.index_samples(opened, planned.split)
        data = planned.workload.data
        assert isinstance(data, TextData)  # no other workload takes such samples
        pretraining_hdf5.require_length(index.shape, data, planned.where)
        return index.num_samples if is_small else None

    def verify(self, folder: Path, checking: Checking) -> list[str]:
        """Checks types and shapes of a published layout, and that every id is below the size of the vocabulary."""
        vocab_size: int | None = None
        if checking.vocabulary is not None:
            vocab_size = len(corpus.load_vocabulary(checking.vocabulary))
        samples = pretraining_hdf5.sample_files(folder, checking.split)
        faults = checking.each(partial(pretraining_hdf5.file_fault, vocab_size=vocab_size), samples)
        return [f"{path.name}: {fault}" for path, fault in zip(samples, faults, strict=True) if fault]

    def count(self, folder: Path, split: Split | None) -> SplitCount:
        return SplitCount(pretraining_hdf5.index_samples(folder, split).num_samples)


def _read_text(path: Path, vocabulary: str | None) -> tuple[str | None, int, int, int]:
    """Returns a fault or None, and the numbers of documents, tokens and unknown tokens of a file."""
    tokenizer, unknown_id = None, -1
    if vocabulary is not None:
        loaded = corpus.load_vocabulary(vocabulary)
        tokenizer, unknown_id = loaded.tokenizer(), loaded.id_of(corpus.UNKNOWN)
    documents = tokens = unknown = 0
    try:
        document_iterator = corpus.read_documents([path])
        while batch := list(islice(document_iterator, _DOCUMENTS_PER_BATCH)):
            documents += len(batch)
            if tokenizer is not None:
                sentences = list(chain.from_iterable(batch))
                for encoding in tokenizer.encode_batch(sentences, add_special_tokens=False):
                    tokens += len(encoding.ids)
                    unknown += encoding.ids.count(unknown_id)
    except UserError as error:
        return str(error).removeprefix(repr(str(path))).lstrip(":, "), documents, tokens, unknown
    fault = None if documents else "contains no text"
    return fault, documents, tokens, unknown


class DensityVolumes(DataKind):
    """Volumes with their parameters, in a folder and its subfolders."""

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
        """Checks checksums and shapes, and that counts are not negative and parameters are finite."""
        container, names = volumes.volume_files(folder, checking.split)
        results = checking.each(partial(volumes.checked_file, folder, container), names)
        faults = []
        first_name, first_shape = "", None
        for name, result in zip(names, results, strict=True):
            if isinstance(result, str):
                faults.append(f"{name}: {result}")
            elif first_shape is None:
                first_name, first_shape = name, result
            elif not result.fits(first_shape):
                faults.append(f"{name}: {result}, but {first_name!r} has {first_shape}")
        return sorted(faults)

    def count(self, folder: Path, split: Split | None) -> SplitCount:
        index = volumes.index_density(folder, split)
        lacking = volumes.completeness(index, split or "train")
        is_public = lacking is None or (index.size, index.channels, index.num_targets) == _PUBLIC_SHAPE
        public_set = "cosmoUniverse" if is_public else None
        return SplitCount(index.num_samples, public_set, lacking)


KINDS: dict[str, DataKind] = {
    kind.name: kind for kind in (ImageTree(), ShardedImages(), RawText(), TextSamples(), DensityVolumes())
}
BY_MANIFEST = {kind.manifest_kind: kind for kind in KINDS.values()}

"""What lies in a folder: which kind of data set, and while a run is planned, whether it can be the workload's.

While a run is planned only what is cheap is looked at: a folder's first names, a manifest, an index, the header of a
first file. No torch, no whole set. What is not known cheaply is not judged: the ranks open everything, and refuse what
does not fit.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from dlbench.datasets import volumes
from dlbench.datasets.account import Account, foreign_form, is_companion, sample_names
from dlbench.datasets.arrays import open_hdf5
from dlbench.datasets.images import image_set
from dlbench.datasets.images.shards import CLASS_TARS, INDEX, holds_class_tars, load_index, shards_among
from dlbench.datasets.manifest import read_manifest
from dlbench.datasets.splits import (
    MAX_NAMES,
    OF_STORAGE,
    PART,
    Split,
    is_split_name,
    named_splits,
    require_no_splits,
    train_folder,
    validation_folder,
)
from dlbench.datasets.text import corpus, pretraining_hdf5
from dlbench.datasets.tfrecord import example_views, read_records
from dlbench.datasets.volumes import container_of, file_shape, index_density
from dlbench.errors import EnvironmentLacksError, UserError
from dlbench.opening import require_file, why_unreadable
from dlbench.specs.workload import CosmoFlowModel, DataSpec, ResNetModel, TextData, Workload

TITLES = {
    "images": "a tree of images",
    "image-shards": "shards of images",
    "text": "text",
    "samples": "BERT samples",
    "density": "density volumes",
}
KINDS = tuple(TITLES)
MANIFEST_KINDS = {
    "images": "images",
    "image-shards": "image-shards",
    "text": "text",
    "pretraining-samples": "samples",
    "density": "density",
}


def detect(source: Path) -> str:
    """Which of KINDS lies at a path: by its manifest, else by the files of its (training) folder."""
    manifest = read_manifest(source) if source.is_dir() else None
    if manifest is not None and manifest.kind in MANIFEST_KINDS:
        return MANIFEST_KINDS[manifest.kind]
    folder = train_folder(source)
    if not folder.is_dir():
        try:
            require_file(folder)
        except OSError as error:
            raise UserError(f"{str(source)!r}: cannot be read: {why_unreadable(error)}") from None
    paths = [folder] if folder.is_file() else sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    if (found := kind_of_files(paths)) is not None:
        return found
    if (reason := _why_unknown(folder)) is not None:
        raise UserError(f"{str(folder)!r}: {reason}")
    raise UserError(
        f"{str(source)!r}: no data set that dlbench knows; expected one of {', '.join(KINDS)}, "
        "with its files in the folder or in train/ and validation/"
    )


def _why_unknown(folder: Path) -> str | None:
    """Says of a folder that is not read as it is which files of a known form are in it, and what to do; None: none."""
    if not folder.is_dir():
        return foreign_form([folder.name])
    names = _names(folder)[0]
    inner = sorted(name for name in _names(folder, folders=True)[0] if name not in OF_STORAGE)[:_OPENED]
    for name in inner:
        names += [f"{name}/{below}" for below in _names(folder / name)[0][:_ASKED]]
    return foreign_form(names)


def _holds_images(folder: Path) -> bool:
    return any(name.lower().endswith(_JPEG_SUFFIXES) for name in _names(folder)[0])


def kind_of_files(paths: Sequence[Path], damaged: str = "density") -> str | None:
    """Which of KINDS files and folders are that lie side by side in one folder; None if they are none.

    `damaged`: what an HDF5 file that cannot be opened is taken for.
    """
    num_texts = 0
    # A damaged file says nothing of its kind but by its name, so others are asked first.
    for sure in (True, False):
        for path in paths:
            kind = _kind_of_file(path, sure, damaged) if num_texts < _ASKED and path.is_file() else None
            if kind == "text":  # or a list beside shards or classes
                num_texts += 1
            elif kind is not None:
                return kind
    visible = (path for path in paths if not path.name.startswith(".") and path.name not in OF_STORAGE)
    first_folder = next((path for path in visible if path.is_dir()), None)
    if num_texts and (first_folder is None or not _holds_images(first_folder)):
        return "text"
    if first_folder is None:
        return None
    inner = sorted(path for path in first_folder.iterdir() if path.is_file())
    if "density" in (_kind_of_file(path, False, damaged) for path in inner):
        return "density"
    return "images" if _holds_images(first_folder) else None


def _kind_of_file(path: Path, sure: bool, damaged: str) -> str | None:
    name = path.name.lower()
    if name.endswith(".txt") and not is_companion(name):
        return "text"
    if name.endswith(("_data.npy", "_label.npy")):
        return "density"
    if name.endswith((".h5", ".hdf5", ".hdf")):
        try:
            with open_hdf5(path) as file:
                return "samples" if "next_sentence_labels" in file else "density"
        except (OSError, ValueError, KeyError, RuntimeError):  # what h5py says of damage
            if sure:
                return None
            return "samples" if path.name.startswith("samples-") else damaged
    if name.endswith(".tar"):
        return "image-shards"
    if name.endswith((".tfrecord", ".tfrecords", ".tfrecord.gz", ".tfrecords.gz")) or PART.fullmatch(name):
        try:
            features = example_views(next(iter(read_records(path))))
        except (OSError, ValueError, StopIteration) as error:
            if PART.fullmatch(name) and isinstance(error, ValueError) and corpus.looks_like_text(path):
                return "text"
            if sure:
                return None
            return "density" if path.name.startswith("density-") else "image-shards"
        return "density" if "x" in features else "image-shards"
    return None


_IS_SAMPLE: dict[str, Callable[[str], bool]] = {
    "image-shards": lambda name: bool(shards_among([name])),
    "text": corpus.is_text_name,
    "samples": pretraining_hdf5.is_sample_file,
    "density": volumes.is_volume_name,
}


def take_account(source: Path, kind: str) -> Account:
    """Returns which files of a data set of one of KINDS are read for which split, and which are not, by their names.

    Looks at the first names of a folder.
    """
    if source.is_file():
        return Account(splits={"all": (source.name,)})
    train, validation = train_folder(source), validation_folder(source)
    unit = "class folders" if kind == "images" else "files"
    samples, others, whole = _sorted_out(train, kind)
    if train == source:
        named = named_splits(source, samples)
        splits: dict[str, list[str]] = {"all": samples}
        if named is not None:
            splits = {"train": named["train"], "validation": named["validation"]}
        read = {name for names in splits.values() for name in names}
        others += [name for name in samples if name not in read]
    else:
        assert validation is not None  # there is a folder of training data where there are both
        held_out, more_others, whole_too = _sorted_out(validation, kind)
        names, whole_source = _names(source)
        splits = {"train": samples, "validation": held_out}
        others = [f"{train.name}/{name}" for name in others] + [f"{validation.name}/{name}" for name in more_others]
        others += [name for name in names if name not in (train.name, validation.name)]
        whole = whole and whole_too and whole_source
    return Account(
        splits={split: tuple(names) for split, names in splits.items()},
        others=tuple(sorted(others)),
        unit=unit,
        is_partial=not whole,
    )


def _sorted_out(folder: Path, kind: str) -> tuple[list[str], list[str], bool]:
    """Returns the names of samples in a folder, or of its classes, and the others, and whether these are all."""
    names, whole = _names(folder)
    if kind == "images":
        classes = sorted(name for name in _names(folder, folders=True)[0] if name not in OF_STORAGE)
        return classes, sorted(set(names) - set(classes)), whole
    if kind == "density":
        inner = set(_names(folder, folders=True)[0])
        names = [name for name in names if name not in inner]
        for name in sorted(inner - OF_STORAGE):
            if len(names) > MAX_NAMES:
                whole = False
                break
            below, whole_below = _names(folder / name)
            names += [f"{name}/{base}" for base in below]
            whole = whole and whole_below
    samples = sorted(name for name in names if _IS_SAMPLE[kind](name))
    return samples, sorted(set(names) - set(samples)), whole


LIMIT_S = 20.0  # a file system that has not answered after so long keeps nobody from planning
_OPENED = 8  # files whose headers are read, at most
_ASKED = 64  # files that are asked what they are, where they are not what is wanted

_WANTED = {
    "images": f"images: {image_set.LAYOUT}, or shards of them (.tar, .tfrecord)",
    "text": f"text: {corpus.LAYOUT}, or HDF5 files of samples ({', '.join(pretraining_hdf5.SUFFIXES)})",
    "density": "density volumes: files of x and y (.h5, .hdf5, .tfrecord, .tfrecord.gz, or _data.npy with _label.npy)",
}

_JPEG_SUFFIXES = tuple(os.fsdecode(suffix) for suffix in image_set.SUFFIXES)


def require_fitting(
    workload: Workload,
    *,
    ranks: int,
    evaluated: bool = False,
    on_account: Callable[[Account], None] | None = None,
) -> bool:
    """Proves, as far as that is cheap, that a workload's data is of its kind and form, and large enough.

    Synthetic data, and paths that are not there, are passed over; validation data is looked at if it is `evaluated`.
    `on_account`: given which files are read and which are not.
    Returns false if the file system did not answer in time.
    """
    raised: list[Exception] = []

    def look() -> None:
        try:
            _judge(workload, ranks, evaluated=evaluated)
            account = account_for(workload.data)
            if account is not None and on_account is not None:
                on_account(account)
        except (OSError, ImportError, EnvironmentLacksError):
            return  # what cannot be read here, or lacks a library here, may be well on the nodes
        except Exception as error:  # raised where it is asked for
            raised.append(error)

    # A thread, because nothing ends a system call that a file server does not answer.
    thread = threading.Thread(target=look, daemon=True, name="look at data")
    thread.start()
    thread.join(LIMIT_S)
    if raised:
        raise raised[0]
    return not thread.is_alive()


def account_for(data: DataSpec) -> Account | None:
    """Returns the account of a plan's data; None of synthetic data, and of what is not there or not recognised."""
    source = Path(data.source)
    if data.is_synthetic or not source.exists():
        return None
    kind = _kind(train_folder(source))
    if kind not in data.kinds:  # lists beside classes, or what the ranks refuse
        kind = data.kinds[0]
    account = take_account(source, kind)
    return account if any(account.splits.values()) else None


def _judge(workload: Workload, ranks: int, *, evaluated: bool) -> None:
    data, train = workload.data, workload.train
    source = Path(data.source)
    if data.is_synthetic or not source.exists():
        return
    needed = train.batch_per_rank * ranks
    found = _look(source, train_folder(source), workload, "data.source", "train", needed)
    if found is not None and found < needed:
        raise UserError(
            f"data.source {data.source!r} has {found} samples, one step needs {needed} (train.batch_per_rank "
            f"{train.batch_per_rank} x {ranks} ranks); use more data, fewer ranks or a smaller batch"
        )
    if not evaluated:
        return
    if data.validation is None:
        folder = validation_folder(source)
        if folder is not None:
            _look(source, folder, workload, "data.source", "validation", 1)
    elif (other := Path(data.validation)).exists():
        _look(other, validation_folder(other) or other, workload, "data.validation", "validation", 1)


def _look(source: Path, folder: Path, workload: Workload, key: str, split: Split, needed: int) -> int | None:
    """The samples of one split, None if they are not known cheaply."""
    kinds, manifest = workload.data.kinds, None
    with suppress(UserError):  # training does not need it
        manifest = read_manifest(source) if source.is_dir() else None
    if manifest is not None and manifest.kind not in MANIFEST_KINDS:
        manifest = None
    model: Any = workload.model  # has the sizes that its formats of data are read in
    wanted = f"{workload.name} trains on {_WANTED[kinds[0]]}"
    if manifest is not None and MANIFEST_KINDS[manifest.kind] not in kinds:
        holds = TITLES[MANIFEST_KINDS[manifest.kind]]
        raise UserError(f"{key} {str(source)!r} holds {holds} (by its manifest); {wanted}")
    kind = "image-shards" if (folder / INDEX).is_file() else _kind(folder, workload.data.format)
    inner: list[str] = []
    if folder.is_dir():
        inner = [name for name in _names(folder, folders=True)[0] if name not in OF_STORAGE]
    if kind in (None, "images"):
        require_no_splits(folder, inner)
    if kind is None:
        if folder.is_dir() and not _names(folder)[1]:
            return None  # too many names to be judged by the first
        reason = _why_unknown(folder) or f"holds no such data; expected one of {', '.join(KINDS)}"
        raise UserError(f"{key} {str(source)!r}: {reason}; {wanted}")
    if kind not in kinds:
        raise UserError(f"{key} {str(source)!r} holds {TITLES[kind]}; {wanted}")
    if kind == "images":
        found = None
        if _names(folder)[1]:
            _require_classes(folder, len(inner), model, key)
            found = _counted_images(folder, inner, needed)
    elif kind == "image-shards":
        found = _shards(folder, model, key, split)
    elif kind == "text":
        texts, found = [folder], None
        if folder.is_dir():
            names = sample_names(folder, _names(folder)[0], corpus.is_text_name, split, corpus.LAYOUT)
            texts = [folder / name for name in names[:1]]
        for path in texts:
            if not corpus.looks_like_text(path):
                raise UserError(f"{key} {str(source)!r} holds {path.name!r}, which is not UTF-8; {wanted}")
    elif isinstance(workload.data, TextData):
        found = _samples(folder, workload.data, key, split)
    else:
        found = _volumes(folder, inner, model, key, split)
    if found is None and manifest is not None and manifest.kind != "text":  # there it counts documents
        found = manifest.counts.get(split)
    return found


def _kind(folder: Path, form: str | None = None) -> str | None:
    """Which of KINDS the first files are; None: none, or the folder cannot be listed.

    `form`: `data.format`, which says what a damaged HDF5 file was, and that a file without an ending is text.
    """
    damaged = "samples" if form == "text" else "density"
    try:
        if folder.is_file():
            kind = kind_of_files([folder], damaged)
            return "text" if kind is None and form == "text" and corpus.looks_like_text(folder) else kind
        return kind_of_files([folder / name for name in sorted(_names(folder)[0])[:_ASKED]], damaged)
    except OSError:
        return None


def _names(folder: Path, *, folders: bool = False) -> tuple[list[str], bool]:
    """Names in a folder that are not hidden, of folders alone if so wished, and whether these are all."""
    with os.scandir(folder) as entries:
        first = list(islice(entries, MAX_NAMES + 1))
        names = [e.name for e in first if not e.name.startswith(".") and (not folders or e.is_dir())]
    return names, len(first) <= MAX_NAMES


def _shards(folder: Path, model: ResNetModel, key: str, split: Split) -> int | None:
    if (folder / INDEX).is_file():
        index = load_index(folder)
        _require_classes(folder, len(index.classes), model, key)
        return len(index.labels)
    names = _names(folder)[0]
    if holds_class_tars(names):
        raise UserError(f"{key} {str(folder)!r} holds {CLASS_TARS}")
    of_container = frozenset(next(iter(shards_among(names).values())))
    sample_names(folder, names, of_container.__contains__, split, _WANTED["images"])
    return None


def _require_classes(folder: Path, classes: int, model: ResNetModel, key: str) -> None:
    if classes > model.num_classes:
        raise UserError(f"{key} {str(folder)!r} has {classes} classes, model.num_classes is {model.num_classes}")


def _counted_images(folder: Path, classes: Sequence[str], needed: int) -> int | None:
    """The images in a tree, or None as soon as there are as many as needed, or too many to be counted here."""
    num = looked = 0
    for name in sorted(classes):
        with os.scandir(folder / name) as entries:
            first = list(islice(entries, MAX_NAMES))
        images = sum(e.name.lower().endswith(_JPEG_SUFFIXES) and not e.name.startswith(".") for e in first)
        num, looked = num + images, looked + len(first)
        if not images and len(first) < MAX_NAMES:
            raise UserError(f"{str(folder / name)!r} holds no {image_set.ENDINGS} file; expected {image_set.LAYOUT}")
        if num >= needed or looked >= MAX_NAMES:
            return None
    return num


def _samples(folder: Path, data: TextData, key: str, split: Split) -> int | None:
    files, whole = pretraining_hdf5.sample_files(folder, split), folder.is_file() or _names(folder)[1]
    few = whole and len(files) <= _OPENED
    index = pretraining_hdf5.index_samples(folder if few else files[0], split)
    stored = index.shape.sequence_length
    if stored not in (None, data.sequence_length):
        raise UserError(
            f"{key} {str(folder)!r} has samples of {stored} tokens, data.sequence_length is {data.sequence_length}"
        )
    return index.num_samples if few else None


def _volumes(folder: Path, inner: Sequence[str], model: CosmoFlowModel, key: str, split: Split) -> int | None:
    require_no_splits(folder, [name for name in inner if is_split_name(name)])
    names, whole = _names(folder)
    for name in sorted(inner)[:_OPENED]:
        below, whole_below = _names(folder / name)
        names += [f"{name}/{base}" for base in below]
        whole = whole and whole_below
    files = [name for name in names if container_of(name) is not None]
    first = min(files)
    shape = file_shape(folder, first, str(container_of(first)))
    for name, stored in (
        ("input_size", shape.size),
        ("input_channels", shape.channels),
        ("num_targets", shape.num_targets),
    ):
        if stored != getattr(model, name):
            raise UserError(f"{key} {str(folder)!r} has {name} {stored}, model.{name} is {getattr(model, name)}")
    named_splits(folder, files)
    if whole and len(inner) <= _OPENED and len(files) <= _OPENED and container_of(first) != "tfrecord":
        return index_density(folder, split).num_samples
    return None

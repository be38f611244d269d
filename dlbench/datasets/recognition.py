"""What lies in a folder: which kind of data set, and while a run is planned, whether it can be the workload's.

While a run is planned only what is cheap is looked at: a folder's first names, a manifest, an index, the header of a
first file. No torch, no whole set. What is not known cheaply is not judged: the ranks open everything, and refuse what
does not fit.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from dlbench.datasets import volumes
from dlbench.datasets.account import Account, foreign_form, is_companion, sample_names
from dlbench.datasets.arrays import open_hdf5
from dlbench.datasets.file_index import load_index, save_index
from dlbench.datasets.images import image_set
from dlbench.datasets.images.shards import CLASS_TARS, INDEX, holds_class_tars, index_size, shards_among
from dlbench.datasets.manifest import Manifest, read_manifest
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
from dlbench.datasets.volumes import DensityIndex, FileShape, container_of, file_shape, first_shape, index_density
from dlbench.errors import EnvironmentLacksError, UserError
from dlbench.opening import require_file, why_unreadable
from dlbench.specs.workload import CosmoFlowModel, DataSpec, ImageData, ResNetModel, TextData, Workload

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
    """Which of KINDS lies at a path: by its manifest, else by the files of its (training) folder.

    Raises UserError: none is recognised.
    """
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
    if (form := foreign_form(names)) is not None:
        return form
    for name in inner:
        if _holds_text(folder / name):
            return (
                f"holds text or BERT samples in the folder {name!r}; give that folder itself, or, of text without an "
                "ending as wikiextractor writes it, join the files: cat FOLDER/*/* > text.txt"
            )
    return None


def _holds_images(folder: Path) -> bool:
    return any(name.lower().endswith(_JPEG_SUFFIXES) for name in _names(folder)[0])


def _holds_text(folder: Path) -> bool:
    """Returns whether the first files in a folder are text, or BERT samples, rather than images or volumes."""
    if _holds_images(folder):
        return False
    for path in [folder / name for name in sorted(_names(folder)[0])[:_OPENED]]:
        is_bare = "." not in path.name and path.is_file()
        if (is_bare and corpus.looks_like_text(path)) or _kind_of_file(path, sure=True) in ("samples", "text"):
            return True
    return False


def kind_of_files(paths: Sequence[Path]) -> str | None:
    """Which of KINDS files and folders are that lie side by side in one folder; None if they are none."""
    num_texts = 0
    # A damaged file says nothing of its kind but by its name, so others are asked first.
    for sure in (True, False):
        for path in paths:
            kind = _kind_of_file(path, sure) if num_texts < _ASKED and path.is_file() else None
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
    if "density" in (_kind_of_file(path, sure=False) for path in inner):
        return "density"
    if foreign_form(path.name for path in inner[:1]) is None and not _holds_text(first_folder):
        return "images"
    return None


def _kind_of_file(path: Path, sure: bool) -> str | None:
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
            return "samples" if path.name.startswith("samples-") else "density"
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

    Looks at the first names of a folder. Raises UserError: names tell splits apart for some of the files only.
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


def _kept_names(folder: Path, kind: str) -> list[str] | None:
    """Returns the classes or files that the index kept in a folder names; None without one that holds."""
    index = LISTED[kind][0] if kind in LISTED else None
    kept = load_index(folder, index)[0] if index is not None else None
    if isinstance(kept, DensityIndex):
        return list(kept.files)
    if isinstance(kept, image_set.JpegTree):
        return list(kept.classes)
    return None


def _sorted_out(folder: Path, kind: str) -> tuple[list[str], list[str], bool]:
    """Returns the names of samples in a folder, or of its classes, and the others, and whether these are all."""
    if (kept := _kept_names(folder, kind)) is not None:
        return kept, [], True
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


def keep_indexes(source: Path, *, anew: bool = True) -> None:
    """Keeps an index in each split of a data set, so that no run lists its files; without `anew` one that holds stays.

    Raises UserError: the files are of a kind that needs none, or damaged, or their folder cannot be written to.
    """
    kind = detect(source)
    if kind not in LISTED:
        raise UserError(f"{str(source)!r} holds {TITLES[kind]}, which need no index: {' and '.join(LISTED)} do")
    for folder in dict.fromkeys(filter(None, (train_folder(source), validation_folder(source)))):
        index, listed = LISTED[kind]
        if anew or load_index(folder, index)[0] is None:
            save_index(folder, listed)


# Kinds that may have as many files as samples, and how they are listed.
LISTED: dict[str, tuple[type[Any], Callable[[Path], Any]]] = {
    "images": (image_set.JpegTree, image_set.index_jpeg_tree),
    "density": (DensityIndex, index_density),
}

LIMIT_S = 20.0  # a file system that has not answered after so long keeps nobody from planning
_OPENED = 8  # files whose headers are read, at most
_ASKED = 64  # files that are asked what they are, where they are not what is wanted
_MAX_RECORDS = 1 << 28  # Bytes of a TFRecord file whose first volume is read: a compressed one is unpacked for it.

_WANTED = {
    "images": f"images: {image_set.LAYOUT}, or shards of them (.tar, .tfrecord)",
    "text": f"text: {corpus.LAYOUT}, or HDF5 files of samples ({', '.join(pretraining_hdf5.SUFFIXES)})",
    "density": "density volumes: files of x and y (.h5, .hdf5, .tfrecord, .tfrecord.gz, or _data.npy with _label.npy)",
}

_JPEG_SUFFIXES = tuple(os.fsdecode(suffix) for suffix in image_set.SUFFIXES)


class _NoneThereError(UserError):
    """Nothing of the wanted kind lies in a folder; the message begins with `holds`."""


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
    Raises UserError: the ranks would refuse the data.
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
    kind: str | None = data.kinds[0]
    if _kept_names(train_folder(source), data.kinds[0]) is None:
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
    """The samples of one split, None if they are not known cheaply. Raises UserError: they cannot be the workload's."""
    manifest, kinds = _manifest(source), workload.data.kinds
    model: Any = workload.model  # has the sizes that its formats of data are read in
    wanted = f"{workload.name} trains on {_WANTED[kinds[0]]}"
    if manifest is not None and MANIFEST_KINDS[manifest.kind] not in kinds:
        holds = TITLES[MANIFEST_KINDS[manifest.kind]]
        raise UserError(f"{key} {str(source)!r} holds {holds} (by its manifest); {wanted}")
    try:
        if isinstance(workload.data, ImageData):
            found = _images(folder, model, key, needed, split)
        elif isinstance(workload.data, TextData):
            found = _text(folder, workload.data, key, split)
        else:
            found = _volumes(folder, model, key, split)
    except _NoneThereError as error:
        if (reason := _why_unknown(folder)) is not None:
            raise UserError(f"{key} {str(source)!r}: {reason}; {wanted}") from None
        other = _kind(folder)
        holds = str(error) if other is None or other in kinds else f"holds {TITLES[other]}"
        raise UserError(f"{key} {str(source)!r} {holds}; {wanted}") from None
    if found is None and manifest is not None and manifest.kind != "text":  # there it counts documents
        found = manifest.counts.get(split)
    return found


def _manifest(source: Path) -> Manifest | None:
    try:
        found = read_manifest(source) if source.is_dir() else None
    except UserError:  # training does not need it
        return None
    return found if found is not None and found.kind in MANIFEST_KINDS else None


def _kind(folder: Path) -> str | None:
    """Which of KINDS the first files are."""
    try:
        paths = [folder] if folder.is_file() else [folder / name for name in sorted(_names(folder)[0])[:_ASKED]]
        return kind_of_files(paths)
    except OSError:
        return None


def _names(folder: Path, *, folders: bool = False) -> tuple[list[str], bool]:
    """Names in a folder that are not hidden, of folders alone if so wished, and whether these are all."""
    with os.scandir(folder) as entries:
        first = list(islice(entries, MAX_NAMES + 1))
        names = [e.name for e in first if not e.name.startswith(".") and (not folders or e.is_dir())]
    return names, len(first) <= MAX_NAMES


# Images


def _images(folder: Path, model: ResNetModel, key: str, needed: int, split: Split) -> int | None:
    if (folder / INDEX).is_file():
        num, classes = index_size(folder)
        _require_classes(folder, classes, model, key)
        return num
    if not folder.is_dir():
        raise _NoneThereError("is a file")
    if (kept := load_index(folder, image_set.JpegTree)[0]) is not None:
        _require_classes(folder, len(kept.classes), model, key)
        return kept.num_samples
    names, whole = _names(folder)
    if shards := shards_among(names):
        if holds_class_tars(names):
            raise UserError(f"{key} {str(folder)!r} holds {CLASS_TARS}")
        if _kind(folder) == "density":
            raise _NoneThereError("holds no images")
        of_container = frozenset(next(iter(shards.values())))
        sample_names(folder, names, of_container.__contains__, split, _WANTED["images"])
        return None
    folders = [name for name in _names(folder, folders=True)[0] if name not in OF_STORAGE]
    require_no_splits(folder, folders)
    if not whole:
        if _kind(folder) in ("text", "samples", "density"):
            raise _NoneThereError("holds no images")
        return None
    if not folders:
        raise _NoneThereError("holds no folders of classes")
    _require_classes(folder, len(folders), model, key)
    return _counted_images(folder, folders, needed)


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
            raise _NoneThereError(f"has the folder {name!r}, which holds no {image_set.ENDINGS} file")
        if num >= needed or looked >= MAX_NAMES:
            return None
    return num


# Text


def _text(folder: Path, data: TextData, key: str, split: Split) -> int | None:
    if folder.is_file() and folder.suffix.lower() not in pretraining_hdf5.SUFFIXES:
        _require_text(folder)
        return None
    if folder.is_dir():
        names, whole = _names(folder)
    else:
        names, whole = [folder.name], True
    files = sample_names(folder, names, pretraining_hdf5.is_sample_file, split, pretraining_hdf5.LAYOUT)
    if files:
        return _samples(folder, files, data, key, split, whole=whole)
    texts = sample_names(folder, names, corpus.is_text_name, split, corpus.LAYOUT)
    if not texts or not (texts[0].endswith(".txt") or corpus.looks_like_text(folder / texts[0])):
        if not whole and _kind(folder) not in ("image-shards", "density"):
            return None
        require_no_splits(folder, _names(folder, folders=True)[0])
        raise _NoneThereError("holds no .txt file and no HDF5 file")
    _require_text(folder / texts[0])
    return None


def _samples(folder: Path, names: Sequence[str], data: TextData, key: str, split: Split, *, whole: bool) -> int | None:
    few = whole and len(names) <= _OPENED
    try:
        index = pretraining_hdf5.index_samples(folder if few or folder.is_file() else folder / names[0], split)
    except UserError:
        if _kind(folder) == "density":
            raise _NoneThereError("holds no such data") from None
        raise
    stored = index.shape.sequence_length
    if stored not in (None, data.sequence_length):
        raise UserError(
            f"{key} {str(folder)!r} has samples of {stored} tokens, data.sequence_length is {data.sequence_length}"
        )
    return index.num_samples if few else None


def _require_text(path: Path) -> None:
    if not corpus.looks_like_text(path):
        raise _NoneThereError(f"holds {path.name!r}, which is not UTF-8")


# Volumes


def _volumes(folder: Path, model: CosmoFlowModel, key: str, split: Split) -> int | None:
    if not folder.is_dir():
        raise _NoneThereError("is a file")
    kept = load_index(folder, DensityIndex)[0]
    found, whole = _volume_files(folder) if kept is None else (list(kept.files), False)
    if not found:
        if whole or _why_unknown(folder) is not None or _holds_image_folders(folder):
            raise _NoneThereError(f"holds no file that ends in {', '.join(volumes.SUFFIXES)}")
        return None
    try:
        shape = kept or _first_shape(folder / min(found))
    except UserError:
        if _kind(folder) not in (None, "density"):
            raise _NoneThereError("holds no such data") from None
        raise
    if shape is None:
        return None
    for name, stored in (
        ("input_size", shape.size),
        ("input_channels", shape.channels),
        ("num_targets", shape.num_targets),
    ):
        if stored != getattr(model, name):
            raise UserError(f"{key} {str(folder)!r} has {name} {stored}, model.{name} is {getattr(model, name)}")
    if kept is not None:
        return kept.num_samples
    named_splits(folder, found)
    if whole and len(found) <= _OPENED and container_of(min(found)) != "tfrecord":
        return index_density(folder, split).num_samples
    return None


def _holds_image_folders(folder: Path) -> bool:
    """Whether the first folders in it hold JPEGs, in a folder of too many to look into each."""
    first = sorted(_names(folder, folders=True)[0])[:_OPENED]
    return bool(first) and all(_holds_images(folder / name) for name in first)


def _first_shape(path: Path) -> FileShape | None:
    """Of the volumes in one file; None where it would take too long to learn."""
    container = container_of(path.name)
    assert container is not None  # it is one of `_volume_files`
    if container != "tfrecord":
        return file_shape(path.parent, path.name, container)
    return first_shape(path, container) if path.stat().st_size <= _MAX_RECORDS else None


def _volume_files(folder: Path) -> tuple[list[str], bool]:
    """Files of volumes in a folder and in the first folders in it, and whether all was looked at."""
    names, whole = _names(folder)
    inner, whole_inner = _names(folder, folders=True)
    if splits := [name for name in inner if is_split_name(name)]:
        require_no_splits(folder, splits)
    for name in sorted(inner)[:_OPENED]:
        below, whole_below = _names(folder / name)
        names += [f"{name}/{one}" for one in below]
        whole = whole and whole_below
    return [n for n in names if container_of(n) is not None], whole and whole_inner and len(inner) <= _OPENED

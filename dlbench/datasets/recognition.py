"""What lies in a folder: which kind of data set, and while a run is planned, whether it can be the workload's.

While a run is planned only what is cheap is looked at: a folder's first names, a manifest, an index, the header of a
first file. No torch, no whole set. What is not known cheaply is not judged: the ranks open everything, and refuse what
does not fit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from dlbench.datasets.account import Account, foreign_form, is_companion
from dlbench.datasets.arrays import open_hdf5
from dlbench.datasets.images.shards import INDEX
from dlbench.datasets.kinds import BY_MANIFEST, KINDS, OPENED, PlannedSplit, holds_images, names_in
from dlbench.datasets.manifest import read_manifest
from dlbench.datasets.splits import (
    OF_STORAGE,
    PART,
    Split,
    named_splits,
    require_no_splits,
    train_folder,
    validation_folder,
)
from dlbench.datasets.text.corpus import looks_like_text
from dlbench.datasets.tfrecord import example_views, read_records
from dlbench.errors import EnvironmentLacksError, UserError
from dlbench.opening import require_file, why_unreadable
from dlbench.specs.workload import DataSpec, Workload

LIMIT_S = 20.0  # A file system that has not answered after so long keeps nobody from planning.
_ASKED = 64  # Files that are asked what they are, where they are not what is wanted.


def detect(source: Path) -> str:
    """Which of KINDS lies at a path: by its manifest, else by the files of its (training) folder."""
    manifest = read_manifest(source) if source.is_dir() else None
    if manifest is not None and manifest.kind in BY_MANIFEST:
        return BY_MANIFEST[manifest.kind].name
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
    names = names_in(folder)[0]
    inner = sorted(name for name in names_in(folder, folders=True)[0] if name not in OF_STORAGE)[:OPENED]
    for name in inner:
        names += [f"{name}/{below}" for below in names_in(folder / name)[0][:_ASKED]]
    return foreign_form(names)


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
    if num_texts and (first_folder is None or not holds_images(first_folder)):
        return "text"
    if first_folder is None:
        return None
    inner = sorted(path for path in first_folder.iterdir() if path.is_file())
    if "density" in (_kind_of_file(path, False, damaged) for path in inner):
        return "density"
    return "images" if holds_images(first_folder) else None


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
            if PART.fullmatch(name) and isinstance(error, ValueError) and looks_like_text(path):
                return "text"
            if sure:
                return None
            return "density" if path.name.startswith("density-") else "image-shards"
        return "density" if "x" in features else "image-shards"
    return None


def take_account(source: Path, kind: str) -> Account:
    """Returns which files of a data set of one of KINDS are read for which split, and which are not, by their names.

    Looks at the first names of a folder.
    """
    if source.is_file():
        return Account(splits={"all": (source.name,)})
    train, validation = train_folder(source), validation_folder(source)
    description = KINDS[kind]
    samples, others, whole = description.sorted_out(train)
    if train == source:
        named = named_splits(source, samples)
        splits: dict[str, list[str]] = {"all": samples}
        if named is not None:
            splits = {"train": named["train"], "validation": named["validation"]}
        read = {name for names in splits.values() for name in names}
        others += [name for name in samples if name not in read]
    else:
        assert validation is not None  # there is a folder of training data where there are both
        held_out, more_others, whole_too = description.sorted_out(validation)
        names, whole_source = names_in(source)
        splits = {"train": samples, "validation": held_out}
        others = [f"{train.name}/{name}" for name in others] + [f"{validation.name}/{name}" for name in more_others]
        others += [name for name in names if name not in (train.name, validation.name)]
        whole = whole and whole_too and whole_source
    return Account(
        splits={split: tuple(names) for split, names in splits.items()},
        others=tuple(sorted(others)),
        unit=description.unit,
        is_partial=not whole,
    )


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
    if not data.kinds:
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
    if not data.kinds:
        raise UserError(f"data.source {data.source!r}: {workload.name} reads no data; leave it out")
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
    kinds, manifest = workload.data.kinds, None
    with suppress(UserError):  # training does not need it
        manifest = read_manifest(source) if source.is_dir() else None
    promised = None if manifest is None else BY_MANIFEST.get(manifest.kind)
    trains_on = f"{workload.name} trains on {KINDS[kinds[0]].wanted}"
    if promised is not None and promised.name not in kinds:
        raise UserError(f"{key} {str(source)!r} holds {promised.title} (by its manifest); {trains_on}")
    kind = "image-shards" if (folder / INDEX).is_file() else _kind(folder, workload.data.format)
    inner: list[str] = []
    if folder.is_dir():
        inner = [name for name in names_in(folder, folders=True)[0] if name not in OF_STORAGE]
    if kind in (None, "images"):
        require_no_splits(folder, inner)
    if kind is None:
        if folder.is_dir() and not names_in(folder)[1]:
            return None  # too many names to be judged by the first
        reason = _why_unknown(folder) or f"holds no such data; expected one of {', '.join(KINDS)}"
        raise UserError(f"{key} {str(source)!r}: {reason}; {trains_on}")
    if kind not in kinds:
        raise UserError(f"{key} {str(source)!r} holds {KINDS[kind].title}; {trains_on}")
    planned = PlannedSplit(
        source=source,
        key=key,
        folder=folder,
        inner=inner,
        split=split,
        workload=workload,
        needed=needed,
        trains_on=trains_on,
    )
    num_samples = KINDS[kind].judge(planned)
    if num_samples is None and manifest is not None and promised is not None and promised.counts_samples:
        return manifest.counts.get(split)
    return num_samples


def _kind(folder: Path, form: str | None = None) -> str | None:
    """Which of KINDS the first files are; None: none, or the folder cannot be listed.

    `form`: `data.format`, which says what a damaged HDF5 file was, and that a file without an ending is text.
    """
    damaged = "samples" if form == "text" else "density"
    try:
        if folder.is_file():
            kind = kind_of_files([folder], damaged)
            return "text" if kind is None and form == "text" and looks_like_text(folder) else kind
        return kind_of_files([folder / name for name in sorted(names_in(folder)[0])[:_ASKED]], damaged)
    except OSError:
        return None

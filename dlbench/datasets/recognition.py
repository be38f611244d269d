"""Determines the kind of data in a folder, and during planning whether a workload can use it. Planning reads only
names, a manifest, an index and the headers of a few files, and imports no torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from dlbench.datasets.arrays import open_hdf5
from dlbench.datasets.images.shards import INDEX
from dlbench.datasets.kinds import BY_MANIFEST, KINDS, OPENED, PlannedSplit, holds_images, names_in
from dlbench.datasets.manifest import Manifest, read_manifest
from dlbench.datasets.splits import (
    OF_STORAGE,
    PART,
    Account,
    Split,
    foreign_form,
    is_companion,
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

LIMIT_S = 20.0  # Seconds that planning waits for a file system.
_MAX_FILES = 64  # Most files that are opened to determine a kind.


def detect(source: Path) -> str:
    """Returns the kind, a key of KINDS, of a data set: by its manifest, else by the files of its training folder."""
    manifest = _manifest(source)
    if manifest is not None and manifest.kind in BY_MANIFEST:
        return BY_MANIFEST[manifest.kind].name
    folder = train_folder(source)
    paths = [folder]
    if folder.is_dir():
        paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    else:
        try:
            require_file(folder)
        except OSError as error:
            raise UserError(f"{str(source)!r}: cannot be read: {why_unreadable(error)}") from None
    if (kind := kind_of_files(paths)) is not None:
        return kind
    if (reason := _foreign_files(folder)) is not None:
        raise UserError(f"{str(folder)!r}: {reason}")
    raise UserError(
        f"{str(source)!r}: unknown kind of data; expected one of {', '.join(KINDS)}, "
        "with its files in the folder or in train/ and validation/"
    )


def _manifest(source: Path) -> Manifest | None:
    return read_manifest(source) if source.is_dir() else None


def _foreign_files(folder: Path) -> str | None:
    if not folder.is_dir():
        return foreign_form([folder.name])
    names = names_in(folder)[0]
    inner = sorted(name for name in names_in(folder, folders=True)[0] if name not in OF_STORAGE)[:OPENED]
    for name in inner:
        names += [f"{name}/{below}" for below in names_in(folder / name)[0][:_MAX_FILES]]
    return foreign_form(names)


def kind_of_files(paths: Sequence[Path], damaged: str = "density") -> str | None:
    """Returns the kind of files and folders, None if unknown. `damaged`: kind of an HDF5 file that cannot be opened."""
    num_texts = 0
    # The kind of a damaged file is known only by its name, so that intact files count first.
    for sure in (True, False):
        for path in paths:
            if num_texts >= _MAX_FILES or not path.is_file():
                continue
            kind = _kind_of_file(path, sure, damaged)
            if kind == "text":  # it may also be a list next to shards or classes
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
    """Returns the kind of a file, or None. `sure`: not by the name of a file that cannot be opened."""
    name = path.name.lower()
    if name.endswith(".txt") and not is_companion(name):
        return "text"
    if name.endswith(("_data.npy", "_label.npy")):
        return "density"
    if name.endswith((".h5", ".hdf5", ".hdf")):
        try:
            with open_hdf5(path) as file:
                return "samples" if "next_sentence_labels" in file else "density"
        except (OSError, ValueError, KeyError, RuntimeError):  # h5py's errors on damage
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
    """Returns which files of a data set are read for which split, and which are not, by the first names of a folder."""
    if source.is_file():
        return Account(splits={"all": (source.name,)})
    train, validation = train_folder(source), validation_folder(source)
    description = KINDS[kind]
    samples, others, is_complete = description.sorted_out(train)
    if train == source:
        by_split = named_splits(source, samples)
        splits: dict[str, list[str]] = {"all": samples}
        if by_split is not None:
            splits = {"train": by_split["train"], "validation": by_split["validation"]}
        split_names = set(chain.from_iterable(splits.values()))
        others += [name for name in samples if name not in split_names]
    else:
        assert validation is not None  # a separate training folder exists only together with a validation folder
        validation_samples, validation_others, is_validation_complete = description.sorted_out(validation)
        names, is_source_complete = names_in(source)
        splits = {"train": samples, "validation": validation_samples}
        others = [f"{train.name}/{name}" for name in others]
        others += [f"{validation.name}/{name}" for name in validation_others]
        others += [name for name in names if name not in (train.name, validation.name)]
        is_complete = is_complete and is_validation_complete and is_source_complete
    return Account(
        splits={split: tuple(names) for split, names in splits.items()},
        others=tuple(sorted(others)),
        unit=description.unit,
        is_partial=not is_complete,
    )


def require_fitting(
    workload: Workload, *, ranks: int, evaluated: bool = False, on_account: Callable[[Account], None] | None = None
) -> bool:
    """Checks cheaply that a workload can use its data; validation data if it is `evaluated`. Returns False if the file
    system did not answer in time. Raises UserError: the workload cannot use the data.
    """
    errors: list[Exception] = []

    def check() -> None:
        try:
            _judge(workload, ranks, evaluated=evaluated)
            account = account_for(workload.data)
            if account is not None and on_account is not None:
                on_account(account)
        except (OSError, ImportError, EnvironmentLacksError):
            return  # the nodes may be able to read it, or have the library
        except Exception as error:  # raised in the calling thread
            errors.append(error)

    # In a thread, because a system call that waits for a file server cannot be interrupted.
    thread = threading.Thread(target=check, daemon=True, name="check data")
    thread.start()
    thread.join(LIMIT_S)
    if errors:
        raise errors[0]
    return not thread.is_alive()


def account_for(data: DataSpec) -> Account | None:
    """Returns the account of a plan's data; None if it is synthetic, missing or of unknown kind."""
    source = Path(data.source)
    if data.is_synthetic or not source.exists() or not data.kinds:
        return None
    kind = _kind(train_folder(source))
    if kind not in data.kinds:  # for example lists next to classes
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
    num_samples = _checked_samples(source, train_folder(source), workload, "data.source", "train", needed)
    if num_samples is not None and num_samples < needed:
        raise UserError(
            f"data.source {data.source!r} has {num_samples} samples, one step needs {needed} (train.batch_per_rank "
            f"{train.batch_per_rank} x {ranks} ranks); use more data, fewer ranks or a smaller batch"
        )
    if not evaluated:
        return
    if data.validation is None:
        folder = validation_folder(source)
        if folder is not None:
            _checked_samples(source, folder, workload, "data.source", "validation", 1)
    elif (path := Path(data.validation)).exists():
        _checked_samples(path, validation_folder(path) or path, workload, "data.validation", "validation", 1)


def _checked_samples(source: Path, folder: Path, workload: Workload, key: str, split: Split, needed: int) -> int | None:
    """Checks one split; returns its number of samples, None if counting is expensive."""
    kinds = workload.data.kinds
    manifest: Manifest | None = None
    with suppress(UserError):  # training does not need the manifest
        manifest = _manifest(source)
    manifest_kind = BY_MANIFEST.get(manifest.kind) if manifest else None
    trains_on = f"{workload.name} trains on {KINDS[kinds[0]].wanted}"
    if manifest_kind is not None and manifest_kind.name not in kinds:
        raise UserError(f"{key} {str(source)!r} holds {manifest_kind.title} (by its manifest); {trains_on}")
    kind: str | None = "image-shards"
    if not (folder / INDEX).is_file():
        kind = _kind(folder, workload.data.format)
    inner: list[str] = []
    if folder.is_dir():
        inner = [name for name in names_in(folder, folders=True)[0] if name not in OF_STORAGE]
    if kind in (None, "images"):
        require_no_splits(folder, inner)
    if kind is None:
        if folder.is_dir() and not names_in(folder)[1]:
            return None  # too many names: the first ones do not determine the kind
        reason = _foreign_files(folder) or f"holds no such data; expected one of {', '.join(KINDS)}"
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
    if num_samples is None and manifest is not None and manifest_kind is not None and manifest_kind.counts_samples:
        return manifest.counts.get(split)
    return num_samples


def _kind(folder: Path, data_format: str | None = None) -> str | None:
    """Returns the kind of the first files, or None; `data_format`: decides the kind of a damaged HDF5 file."""
    damaged = "samples" if data_format == "text" else "density"
    with suppress(OSError):
        if not folder.is_file():
            return kind_of_files([folder / name for name in sorted(names_in(folder)[0])[:_MAX_FILES]], damaged)
        kind = kind_of_files([folder], damaged)
        if kind is None and data_format == "text" and looks_like_text(folder):
            return "text"
        return kind
    return None

"""Makes data sets: several processes write parts, and production can be resumed after any interruption. Parts are
written in `.partial/`, synced and renamed, so that a part with its final name is complete. During production the folder
holds a locked `.production.json`, `{"format": "dlbench.production", "version": 1, "kind", "made_with"}`. The manifest
is written last.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import IO, Protocol

from dlbench import pool
from dlbench.datasets.manifest import (
    FILES_NAME,
    NAME,
    FileEntry,
    MadeWith,
    Manifest,
    describe_files,
    read_manifest,
    save_manifest,
)
from dlbench.datasets.splits import Split
from dlbench.errors import DlbenchError, UserError, refused

FORMAT = "dlbench.production"
VERSION = 1
BEGUN = ".production.json"
PARTIAL = ".partial"  # the folder of parts that are being written

Progress = Callable[[int, int, int], None]
"""Called with samples done, all samples, and bytes done; the first time before anything is made."""


@dataclass(frozen=True)
class DatasetPart:
    """A file or folder of a data set that one process writes."""

    name: str  # relative path with `/`, such as `train/density-00000.h5`
    split: Split
    first: int  # number of its first sample within the split
    count: int  # number of its samples


def numbered_parts(split: Split, stem: str, suffix: str, num_samples: int, samples_per_file: int) -> list[DatasetPart]:
    """Returns the files of one split, `<split>/<stem>-00000.<suffix>`, ...; the last may have fewer samples."""
    parts = []
    for number, first in enumerate(range(0, num_samples, samples_per_file)):
        count = min(samples_per_file, num_samples - first)
        parts.append(DatasetPart(f"{split}/{stem}-{number:05d}.{suffix}", split, first, count))
    return parts


class Recipe(Protocol):
    """A description of a data set and how to make it; a frozen dataclass that can be pickled."""

    @property
    def kind(self) -> str:
        """The kind of the data set, as in its manifest."""

    @property
    def made_with(self) -> MadeWith:
        """All values that decide the bytes of the data set."""

    def parts(self) -> Sequence[DatasetPart]:
        """Returns all parts, train before validation."""

    def write(self, part: DatasetPart, path: Path) -> None:
        """Writes one part, in a worker process, to `path`, which does not exist yet."""

    def finish(self, folder: Path) -> None:
        """Writes small files next to the parts, after all parts."""


def produce(
    recipe: Recipe, folder: Path, *, workers: int = 1, progress: Progress = lambda _done, _total, _num_bytes: None
) -> Manifest:
    """Makes the missing parts of a data set; returns its manifest. Raises UserError: the folder is unsuitable."""
    made_with = dict(recipe.made_with)
    manifest = _finished(recipe.kind, made_with, folder)
    begun = folder / BEGUN
    if manifest is None:
        existed = folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with begun.open("a+", encoding="ascii") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise UserError(f"{str(folder)!r} is being made by another process; wait for it") from None
                except OSError:
                    pass  # a file system without locks, e.g. Lustre: the user must not start a second process
                manifest = _make(recipe, made_with, folder, file, workers, progress)
        except OSError as error:
            raise refused(error, f"{str(folder)!r}: cannot be made: {error.strerror or error}", UserError) from None
        finally:
            with suppress(OSError):  # removes empty files and the folder after an error
                if not begun.stat().st_size:
                    begun.unlink()
                if not existed:
                    folder.rmdir()
    begun.unlink(missing_ok=True)
    return manifest


def require_ours(recipe: Recipe, folder: Path) -> bool:
    """Returns whether a folder holds this data set, complete. Raises UserError: it holds something else."""
    # `made_with` is evaluated last, because it may take seconds.
    return folder.exists() and _finished(recipe.kind, dict(recipe.made_with), folder) is not None


def _finished(kind: str, made_with: MadeWith, folder: Path) -> Manifest | None:
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise UserError(f"{str(folder)!r} is not a folder")
    manifest = read_manifest(folder)
    if manifest is not None:
        _require_same(folder, "holds", (manifest.kind, manifest.made_with), (kind, made_with))
    elif not (folder / BEGUN).exists() and any(folder.iterdir()):
        raise UserError(f"{str(folder)!r} exists without a {NAME} of dlbench; give another folder")
    return manifest


def _require_same(folder: Path, verb: str, existing: tuple[str, MadeWith], requested: tuple[str, MadeWith]) -> None:
    requested_values = {"kind": requested[0], **requested[1]}
    existing_values = {"kind": existing[0], **existing[1]}
    for key in {**requested_values, **existing_values}:
        if requested_values.get(key) != existing_values.get(key):
            raise UserError(
                f"{str(folder)!r} {verb} a data set with {key} {existing_values.get(key)!r}, requested is "
                f"{requested_values.get(key)!r}; give another folder or remove it"
            )


def _make(
    recipe: Recipe, made_with: MadeWith, folder: Path, begun: IO[str], workers: int, progress: Progress
) -> Manifest:
    begun.seek(0)
    content = begun.read()
    if content:
        _require_same(folder, "holds a part of", _recipe_of(begun.name, content), (recipe.kind, made_with))
    parts = recipe.parts()
    files = {part.name: _entries(folder / part.name, part.name) for part in parts if (folder / part.name).exists()}
    missing = [part for part in parts if part.name not in files]
    total = sum(part.count for part in parts)
    done = total - sum(part.count for part in missing)
    num_bytes = sum(entry.num_bytes for entry in chain.from_iterable(files.values()))
    if not content:
        head = {"format": FORMAT, "version": VERSION, "kind": recipe.kind, "made_with": dict(made_with)}
        begun.write(json.dumps(head))
        begun.flush()
    shutil.rmtree(folder / PARTIAL, ignore_errors=True)
    progress(done, total, num_bytes)
    try:
        write = partial(_write, recipe, folder / PARTIAL)
        with pool.run(write, missing, workers, name=attrgetter("name"), verb="made") as results:
            for number, entries in results:
                part = missing[number]
                (folder / part.name).parent.mkdir(parents=True, exist_ok=True)
                (folder / PARTIAL / part.name).rename(folder / part.name)
                files[part.name] = entries
                done += part.count
                num_bytes += sum(entry.num_bytes for entry in entries)
                progress(done, total, num_bytes)
    finally:
        shutil.rmtree(folder / PARTIAL, ignore_errors=True)
    return _complete(recipe, made_with, folder, parts, files)


def _recipe_of(path: str, content: str) -> tuple[str, MadeWith]:
    try:
        head = json.loads(content)
        file_format, version = head["format"], head["version"]
        recipe = str(head["kind"]), dict(head["made_with"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: is damaged ({error}); remove the folder") from None
    if (file_format, version) != (FORMAT, VERSION):
        raise UserError(f"{path}: is of version {version!r}, not {VERSION}; remove the folder")
    return recipe


def _write(recipe: Recipe, temporary: Path, part: DatasetPart) -> list[FileEntry]:
    path = temporary / part.name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        recipe.write(part, path)
        for written in (path, *path.rglob("*")):
            handle = os.open(written, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        return _entries(path, part.name)
    except DlbenchError as error:
        raise type(error)(f"{part.name}: {error}") from None
    except OSError as error:
        reason = error.strerror or str(error)
        if error.filename is not None and not str(error.filename).startswith(str(path)):
            reason = f"{error.filename}: {reason}"
        raise refused(error, f"{part.name}: cannot be made: {reason}", UserError) from None


def _entries(path: Path, name: str) -> list[FileEntry]:
    if not path.is_dir():
        return [replace(entry, path=name) for entry in describe_files(path)]
    return [replace(entry, path=f"{name}/{entry.path}") for entry in describe_files(path)]


def _complete(
    recipe: Recipe, made_with: MadeWith, folder: Path, parts: Sequence[DatasetPart], files: dict[str, list[FileEntry]]
) -> Manifest:
    recipe.finish(folder)
    counts: dict[str, int] = {}
    entries: list[FileEntry] = []
    for part in parts:
        counts[part.split] = counts.get(part.split, 0) + part.count
        entries += files[part.name]
    names = {NAME, FILES_NAME, *(entry.path for entry in entries)}
    entries += describe_files(folder, skip=names.__contains__)
    return save_manifest(folder, kind=recipe.kind, made_with=made_with, counts=counts, files=entries)

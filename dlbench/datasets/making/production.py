"""The engine that makes data sets: parts written by several processes, and continued after any interruption.

A `Recipe` says what a set consists of and writes one part at a time; `produce` does the rest. Parts are written in
`.partial/`, synced and renamed, so that what has its own name is whole. While a set is being made its folder holds
`.production.json`, `{"format": "dlbench.production", "version": 1, "kind", "made_with"}`, which is locked. The last act
is the manifest.
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
"""Told done samples, all samples, and bytes of what is done; the first time before anything is made."""


@dataclass(frozen=True)
class DatasetPart:
    """A piece of a data set that one process writes at once: a file or a folder."""

    name: str  # relative path with `/`, such as `train/density-00000.h5`
    split: Split
    first: int  # number of its first sample within the split
    count: int  # samples in it


def numbered_parts(split: Split, stem: str, suffix: str, num_samples: int, samples_per_file: int) -> list[DatasetPart]:
    """Returns the files of one split, `<split>/<stem>-00000.<suffix>`, ...; the last may hold fewer samples."""
    parts = []
    for number, first in enumerate(range(0, num_samples, samples_per_file)):
        count = min(samples_per_file, num_samples - first)
        parts.append(DatasetPart(f"{split}/{stem}-{number:05d}.{suffix}", split, first, count))
    return parts


class Recipe(Protocol):
    """How a data set is made: picklable, a frozen dataclass."""

    @property
    def kind(self) -> str:
        """One word for what is made."""

    @property
    def made_with(self) -> MadeWith:
        """Everything that decides the bytes."""

    def parts(self) -> Sequence[DatasetPart]:
        """All parts, train before validation."""

    def write(self, part: DatasetPart, path: Path) -> None:
        """Writes one part as a whole at `path`, which is not there yet and has the part's last name.

        Runs in a worker process. The bytes depend on the recipe and the part alone.
        """

    def finish(self, folder: Path) -> None:
        """Writes small files next to the parts, once all are there."""


def produce(
    recipe: Recipe,
    folder: Path,
    *,
    workers: int = 1,
    progress: Progress = lambda _done, _total, _num_bytes: None,
) -> Manifest:
    """Makes a data set, or the rest of one; at once if it is there.

    `folder`: made if it is not there. Otherwise empty, or holding this very set, finished or begun. `workers`:
    processes that write; with 1 this one writes.
    Returns the manifest of the finished set.
    """
    made_with = dict(recipe.made_with)
    manifest = _finished(recipe.kind, made_with, folder)
    begun = folder / BEGUN
    if manifest is None:
        was_there = folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with begun.open("a+", encoding="ascii") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise UserError(f"{str(folder)!r} is being made by another process; wait for it") from None
                except OSError:
                    pass  # no locks, such as Lustre mounted without them: a second maker is the user's to avoid
                manifest = _make(recipe, made_with, folder, file, workers, progress)
        except OSError as error:
            raise refused(error, f"{str(folder)!r}: cannot be made: {error.strerror or error}", UserError) from None
        finally:
            with suppress(OSError):  # after a refusal nothing of ours is left, not even the folder
                if not begun.stat().st_size:
                    begun.unlink()
                if not was_there:
                    folder.rmdir()
    begun.unlink(missing_ok=True)
    return manifest


def require_ours(recipe: Recipe, folder: Path) -> bool:
    """Whether a folder holds this very set, finished; touches nothing."""
    # What a set is made with may take seconds to find out.
    return folder.exists() and _finished(recipe.kind, dict(recipe.made_with), folder) is not None


def _finished(kind: str, made_with: MadeWith, folder: Path) -> Manifest | None:
    """The manifest of a folder that holds what is wanted; None where it has to be made."""
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


def _require_same(folder: Path, verb: str, there: tuple[str, MadeWith], wanted: tuple[str, MadeWith]) -> None:
    ours, theirs = {"kind": wanted[0], **wanted[1]}, {"kind": there[0], **there[1]}
    for key in [*ours, *(k for k in theirs if k not in ours)]:
        if ours.get(key) != theirs.get(key):
            raise UserError(
                f"{str(folder)!r} {verb} a data set with {key} {theirs.get(key)!r}, asked for {ours.get(key)!r}; "
                "give another folder or remove it"
            )


def _make(
    recipe: Recipe,
    made_with: MadeWith,
    folder: Path,
    begun: IO[str],
    workers: int,
    progress: Progress,
) -> Manifest:
    begun.seek(0)
    content = begun.read()
    if content:
        _require_same(folder, "is the beginning of", _recipe_of(begun.name, content), (recipe.kind, made_with))
    parts = recipe.parts()
    files = {part.name: _entries(folder / part.name, part.name) for part in parts if (folder / part.name).exists()}
    left = [part for part in parts if part.name not in files]
    total = sum(part.count for part in parts)
    done = total - sum(part.count for part in left)
    num_bytes = sum(entry.num_bytes for entries in files.values() for entry in entries)
    if not content:
        head = {"format": FORMAT, "version": VERSION, "kind": recipe.kind, "made_with": dict(made_with)}
        begun.write(json.dumps(head))
        begun.flush()
    shutil.rmtree(folder / PARTIAL, ignore_errors=True)
    progress(done, total, num_bytes)
    try:
        write = partial(_write, recipe, folder / PARTIAL)
        with pool.run(write, left, workers, name=lambda part: part.name, verb="made") as results:
            for number, entries in results:
                part = left[number]
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
        form, recipe = (head["format"], head["version"]), (str(head["kind"]), dict(head["made_with"]))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: is damaged ({error}); remove the folder") from None
    if form != (FORMAT, VERSION):
        raise UserError(f"{path}: is of version {form[1]!r}, not {VERSION}; remove the folder")
    return recipe


def _write(recipe: Recipe, temporary: Path, part: DatasetPart) -> list[FileEntry]:
    """Writes and syncs one part below a temporary folder. Returns its files, relative to the data set."""
    path = temporary / part.name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        recipe.write(part, path)
        for written in path.rglob("*") if path.is_dir() else (path,):
            handle = os.open(written, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        return _entries(path, part.name)
    except DlbenchError as error:
        raise type(error)(f"{part.name}: {error}") from None
    except OSError as error:
        of_this = error.filename is None or str(error.filename).startswith(str(path))
        reason = error.strerror or str(error)
        reason = reason if of_this else f"{error.filename}: {reason}"
        raise refused(error, f"{part.name}: cannot be made: {reason}", UserError) from None


def _entries(path: Path, name: str) -> list[FileEntry]:
    if not path.is_dir():
        return [replace(entry, path=name) for entry in describe_files(path)]
    return [replace(entry, path=f"{name}/{entry.path}") for entry in describe_files(path)]


def _complete(
    recipe: Recipe, made_with: MadeWith, folder: Path, parts: Sequence[DatasetPart], files: dict[str, list[FileEntry]]
) -> Manifest:
    recipe.finish(folder)
    in_parts = [entry for part in parts for entry in files[part.name]]
    names = {entry.path for entry in in_parts}
    others = describe_files(folder, skip=lambda name: name in names or name in (NAME, FILES_NAME))
    counts: dict[str, int] = {}
    for part in parts:
        counts[part.split] = counts.get(part.split, 0) + part.count
    return save_manifest(
        folder,
        kind=recipe.kind,
        made_with=made_with,
        counts=counts,
        files=[*in_parts, *others],
    )

"""The engine that makes data sets: parts written by several processes, and continued after any interruption.

A `Recipe` says what a set consists of and writes one part at a time; `produce` does the rest. While a set is being made
its folder holds a journal, `.production.jsonl`: a first line with the recipe, then a line a finished part. Parts are
written in `.partial/` and renamed, so that nothing under its own name is ever half there. The last act is the manifest.

`.production.jsonl`: the first line is `{"format": "dlbench.production", "version": 1, "kind", "made_with"}`, every
other one `{"part": name, "samples": count, "files": [{"path", "sha256", "bytes"}]}`. A torn last line is cut off. It is
locked while it is open, which keeps two makers apart.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

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
from dlbench.errors import DlbenchError, EnvironmentLacksError, UserError, refused
from dlbench.units import format_bytes


@dataclass(frozen=True)
class Part:
    """A piece of a data set that one process writes at once: a file or a folder."""

    name: str  # relative path with `/`, such as `train/density-00000.h5`
    split: Split
    first: int  # number of its first sample within the split
    count: int  # samples in it


class Recipe(Protocol):
    """How a data set is made: picklable, a frozen dataclass.

    It may also have `estimated_bytes` (integer), which is compared with the free space before anything is made, and
    `distinct_bytes` (integer), the bytes of content before it repeats, which the manifest keeps.
    """

    @property
    def kind(self) -> str:
        """One word for what is made."""

    @property
    def made_with(self) -> MadeWith:
        """Everything that decides the bytes."""

    def parts(self) -> Sequence[Part]:
        """All parts, train before validation."""

    def write(self, part: Part, path: Path) -> None:
        """Writes one part as a whole at `path`, which is not there yet and has the part's last name.

        Runs in a worker process. The bytes depend on the recipe and the part alone.
        """

    def finish(self, folder: Path) -> None:
        """Writes small files next to the parts, once all are there."""


FORMAT = "dlbench.production"
VERSION = 1
PARTIAL = ".partial"  # the folder of parts that are being written
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""What file systems answer that have no locks, such as Lustre mounted without them."""


class Journal:
    """The journal of one folder, locked while it is open (a context manager).

    Raises UserError: another process holds it, or it is damaged, or of another form. OSError: the disk refuses.
    """

    NAME = ".production.jsonl"

    def __init__(self, folder: Path) -> None:
        self._path = folder / self.NAME
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self.recipe: tuple[str, MadeWith] | None = None  # kind and `made_with`; none before `begin`
        self.done: dict[str, list[FileEntry]] = {}  # the files of every finished part
        self._is_ours = False
        try:
            self._lock()
            self._load()
            self._is_ours = True
        except BaseException:
            self.close()
            raise

    @classmethod
    def is_in(cls, folder: Path) -> bool:
        """Whether a folder is the beginning of a data set."""
        return (folder / cls.NAME).is_file()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes and unlocks it; one that was never begun is removed."""
        if self._is_ours and self.recipe is None:
            self._path.unlink(missing_ok=True)
        os.close(self._file)

    def begin(self, kind: str, made_with: MadeWith) -> None:
        self.recipe = (kind, made_with)
        self._append({"format": FORMAT, "version": VERSION, "kind": kind, "made_with": dict(made_with)})

    def add(self, part: Part, files: list[FileEntry]) -> None:
        """Says that a part is in its place; on disk when this returns."""
        self._append({"part": part.name, "samples": part.count, "files": [f.as_json() for f in files]})

    def _append(self, content: Mapping[str, object]) -> None:
        # One write: a line is there or torn at the end, never mixed.
        os.write(self._file, (json.dumps(content, ensure_ascii=True, separators=(",", ":")) + "\n").encode("ascii"))
        os.fdatasync(self._file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{str(self._path.parent)!r} is being made by another process; wait for it") from None
        except OSError as error:
            # Without locks a second maker is the user's to avoid; refusing to make data there would help nobody.
            if error.errno not in _NO_LOCKS:
                raise
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            raise UserError(f"{self._path}: is no regular file; remove it")
        if os.fstat(self._file).st_nlink == 0:  # removed since it was opened
            raise UserError(f"{str(self._path.parent)!r} was being made by another process; try again")

    def _load(self) -> None:
        good = 0
        with open(self._file, "rb", closefd=False) as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break  # torn by a kill
                try:
                    self._take(json.loads(line))
                except (ValueError, KeyError, TypeError) as error:
                    raise UserError(f"{self._path}: line {number} is damaged ({error}); remove the folder") from None
                good += len(line)
        os.ftruncate(self._file, good)

    def _take(self, content: Mapping[str, object]) -> None:
        if self.recipe is not None:
            files = content["files"]
            if not isinstance(files, list):
                raise TypeError("files is no list")
            self.done[str(content["part"])] = [FileEntry.from_json(f) for f in files]
            return
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            raise ValueError(f"format {content['format']!r}, version {content['version']!r}")
        made_with = content["made_with"]
        if not isinstance(made_with, dict):
            raise TypeError("made_with is no mapping")
        self.recipe = (str(content["kind"]), made_with)


__all__ = ["Part", "Recipe", "produce", "require_ours"]

Progress = Callable[[int, int, int], None]
"""Told done samples, all samples, and bytes of what is done; the first time before anything is made."""


def produce(
    recipe: Recipe,
    folder: Path,
    *,
    workers: int = 1,
    progress: Progress | None = None,
    estimated_bytes: int | None = None,
) -> Manifest:
    """Makes a data set, or the rest of one; at once if it is there.

    `folder`: made if it is not there. Otherwise empty, or holding this very set, finished or begun. `workers`:
    processes that write; with 1 this one writes. `estimated_bytes`: what the set will need on disk, where the recipe
    itself does not say.
    Returns the manifest of the finished set.
    Raises UserError: the folder holds something else or is being written, or a part cannot be made from its sources.
    EnvironmentLacksError: the disk has no room. RunError: a worker process died. KeyboardInterrupt: after the workers
    have ended; the same call continues.
    """
    if workers < 1:
        raise UserError(f"workers {workers}: must be 1 or more")
    made_with = dict(recipe.made_with)
    found = _finished(recipe.kind, made_with, folder)
    if found is None:
        try:
            there = folder.exists()
            needed = getattr(recipe, "estimated_bytes", estimated_bytes)
            found = _make(
                recipe, made_with, folder, workers, progress or (lambda _done, _total, _num_bytes: None), needed
            )
        except OSError as error:
            raise refused(error, f"{str(folder)!r}: cannot be made: {error.strerror or error}", UserError) from None
        finally:
            if not there:
                with suppress(OSError):  # after a refusal nothing of ours is left, not even the folder
                    folder.rmdir()
    (folder / Journal.NAME).unlink(missing_ok=True)
    return found


def require_ours(recipe: Recipe, folder: Path) -> bool:
    """Whether a folder holds this very set, finished; touches nothing. Raises UserError: it holds something else."""
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
    elif not Journal.is_in(folder) and any(folder.iterdir()):
        raise UserError(f"{str(folder)!r} exists without a {NAME} of dlbench; give another folder")
    return manifest


def _require_same(folder: Path, verb: str, there: tuple[str, MadeWith], wanted: tuple[str, MadeWith]) -> None:
    """Compares two recipes, each its kind and `made_with`.

    Raises UserError: they differ; names the first key that does, and both values.
    """
    ours, theirs = {"kind": wanted[0], **wanted[1]}, {"kind": there[0], **there[1]}
    for key in [*ours, *(k for k in theirs if k not in ours)]:
        if ours.get(key) != theirs.get(key):
            raise UserError(
                f"{str(folder)!r} {verb} a data set with {key} {theirs.get(key)!r}, asked for {ours.get(key)!r}; "
                "give another folder or remove it"
            )


def _make(
    recipe: Recipe, made_with: MadeWith, folder: Path, workers: int, progress: Progress, needed: int | None
) -> Manifest:
    folder.mkdir(parents=True, exist_ok=True)
    with Journal(folder) as journal:
        if (manifest := _finished(recipe.kind, made_with, folder)) is not None:
            return manifest  # another process was faster
        if journal.recipe is not None:
            _require_same(folder, "is the beginning of", journal.recipe, (recipe.kind, made_with))
        parts = recipe.parts()
        _check_names(parts)
        state = _State(sum(p.count for p in parts), progress)
        left = _left(parts, journal, folder, state)
        if needed is not None:
            _require_space(needed - state.num_bytes, folder)
        if journal.recipe is None:
            journal.begin(recipe.kind, made_with)
        shutil.rmtree(folder / PARTIAL, ignore_errors=True)
        state.report()
        try:
            write = partial(_write, recipe, folder / PARTIAL)
            with pool.run(write, left, workers, name=lambda part: part.name, verb="made") as results:
                for number, files in results:
                    part = left[number]
                    _put(folder / PARTIAL / part.name, folder / part.name)
                    journal.add(part, files)
                    state.add(part, files)
        finally:
            shutil.rmtree(folder / PARTIAL, ignore_errors=True)
        return _complete(recipe, made_with, folder, parts, state)


def _check_names(parts: Sequence[Part]) -> None:
    names = {p.name for p in parts}
    assert len(names) == len(parts), "two parts of one name"
    assert all(n and not n.startswith(("/", ".")) and ".." not in n.split("/") for n in names), "not a relative path"


@dataclass
class _State:
    """How far a set is."""

    total: int
    progress: Progress
    done: int = 0
    num_bytes: int = 0
    files: dict[str, list[FileEntry]] = field(default_factory=dict)  # by part

    def add(self, part: Part, files: list[FileEntry], *, report: bool = True) -> None:
        self.done += part.count
        self.num_bytes += sum(f.num_bytes for f in files)
        self.files[part.name] = files
        if report:
            self.report()

    def report(self) -> None:
        self.progress(self.done, self.total, self.num_bytes)


def _left(parts: Sequence[Part], journal: Journal, folder: Path, state: _State) -> list[Part]:
    """The parts that are not done; one whose files are gone or cut off, as a power cut may leave them, is not."""
    left = []
    for part in parts:
        files = journal.done.get(part.name)
        if files is not None and all(_has_size(folder / f.path, f.num_bytes) for f in files):
            state.add(part, files, report=False)
        else:
            left.append(part)
    return left


def _has_size(path: Path, num_bytes: int) -> bool:
    try:
        return path.stat().st_size == num_bytes
    except FileNotFoundError:
        return False


def _require_space(needed: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise EnvironmentLacksError(
            f"{str(folder)!r}: needs about {format_bytes(needed)} more, its disk has {format_bytes(free)} free"
        )


def _write(recipe: Recipe, temporary: Path, part: Part) -> list[FileEntry]:
    """Writes and syncs one part below a temporary folder.

    Returns its files, relative to the data set.
    Raises DlbenchError: as the recipe, with the part's name; UserError for a system error.
    """
    path = temporary / part.name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        recipe.write(part, path)
        return [_synced(path, part.name, entry) for entry in describe_files(path)]
    except DlbenchError as error:
        raise type(error)(f"{part.name}: {error}") from None
    except OSError as error:
        of_this = error.filename is None or str(error.filename).startswith(str(path))
        reason = error.strerror or str(error)
        reason = reason if of_this else f"{error.filename}: {reason}"
        raise refused(error, f"{part.name}: cannot be made: {reason}", UserError) from None


def _synced(path: Path, name: str, entry: FileEntry) -> FileEntry:
    """Brings a file to the disk; returns its entry with the path from the data set's folder."""
    inside = path.is_dir()
    handle = os.open(path / entry.path if inside else path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    return FileEntry(f"{name}/{entry.path}" if inside else name, entry.sha256, entry.num_bytes)


def _put(path: Path, target: Path) -> None:
    """Renames a part to its place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        # Left by a process that was killed between the rename and the journal's line; no folder replaces a full one.
        shutil.rmtree(target)
    path.rename(target)


def _complete(recipe: Recipe, made_with: MadeWith, folder: Path, parts: Sequence[Part], state: _State) -> Manifest:
    recipe.finish(folder)
    in_parts = [entry for part in parts for entry in state.files[part.name]]
    known = {entry.path for entry in in_parts}
    others = describe_files(folder, skip=lambda name: name in known or name in (NAME, FILES_NAME))
    counts: dict[str, int] = {}
    for part in parts:
        counts[part.split] = counts.get(part.split, 0) + part.count
    return save_manifest(
        folder,
        kind=recipe.kind,
        made_with=made_with,
        counts=counts,
        files=[*in_parts, *others],
        distinct_bytes=getattr(recipe, "distinct_bytes", None),
    )

"""Runs of a history as a tar archive, and such archives as runs; `dlbench.history.tar_stream` reads the members.

An archive is written in GNU's format: first `manifest.json`, the runs' folders with their content digests, then every
file of every run, sorted, with times, owners and modes that say nothing of where it was made, so that equal runs give
equal bytes. Archives that `tar --format=gnu` made of folders of runs are read, too.
"""

from __future__ import annotations

import gzip
import json
import os
import secrets
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence, Set
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, Literal

from pydantic import Field, ValidationError

from dlbench.errors import IncompleteDataError, RunError, UserError, refused
from dlbench.history.content import content_digest, files_of
from dlbench.history.entry import HistoryEntry
from dlbench.history.files import sync_folder
from dlbench.history.importing import Candidate, Outcome
from dlbench.history.store import History
from dlbench.history.tar_stream import Limits, Member, members
from dlbench.opening import open_file, parse_json
from dlbench.records.files import TEMPORARY_SUFFIX, is_stream
from dlbench.records.folder import RunFolder
from dlbench.specs.base import Spec
from dlbench.units import format_bytes

MANIFEST = "manifest.json"
PLAN = "plan.json"
MAX_MANIFEST_BYTES = 1 << 28
COMPRESSED = (".gz", ".tgz")
_LEVEL = 6
_PIECE = 1 << 20
_SPARE_BYTES = 1 << 20


Sink = IO[bytes] | gzip.GzipFile


class Manifest(Spec):
    """`manifest.json` of an archive."""

    format: Literal["dlbench.history-archive"] = Field("dlbench.history-archive", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    runs: dict[str, str] = Field(description="Content digest of each run, by its folder in the archive.")


def write_archive(history: History, entries: Sequence[HistoryEntry], output: Path) -> None:
    """Runs as one file, whole or not at all.

    Args:
        history: where the runs are.
        entries: the runs.
        output: the archive; compressed if its name ends in `.gz` or `.tgz`.

    Raises:
        UserError: the file cannot be written.
        IncompleteDataError: a run cannot be read, or its files are not those that the index knows.
    """
    if is_stream(output):
        raise UserError(f"-o {output}: is a device or a pipe; an archive needs a file of its own")
    temporary = output.with_name(f".{output.name}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    ordered = sorted(entries, key=lambda entry: entry.folder)
    try:
        with temporary.open("xb") as file:
            if output.name.endswith(COMPRESSED):
                # Neither name nor time of the file: equal runs give equal bytes.
                with gzip.GzipFile("", "wb", _LEVEL, file, mtime=0) as packed:
                    _write_members(history, ordered, packed)
            else:
                _write_members(history, ordered, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(output)
        sync_folder(output.parent)
    except OSError as error:
        raise refused(error, f"-o {output}: cannot be written: {error.strerror or error}", UserError) from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _write_members(history: History, entries: Sequence[HistoryEntry], sink: Sink) -> None:
    manifest = Manifest(runs={entry.folder: entry.content_digest for entry in entries})
    content = json.dumps(manifest.model_dump(mode="json"), indent=1, sort_keys=True).encode()
    _write_header(sink, MANIFEST, len(content))
    sink.write(content)
    _fill(sink, len(content), tarfile.BLOCKSIZE)
    written = _rounded(len(content)) + tarfile.BLOCKSIZE
    for entry in entries:
        path = history.run_folder(entry)
        if content_digest(RunFolder(path)) != entry.content_digest:
            raise IncompleteDataError(f"{path}: was changed since it was indexed; see `dlbench history rebuild`")
        for name, status in sorted(files_of(path).items()):
            written += _write_header(sink, f"{entry.folder}/{name}", status.st_size) + _rounded(status.st_size)
            _write_content(sink, path / name, status.st_size)
    sink.write(bytes(2 * tarfile.BLOCKSIZE))
    _fill(sink, written + 2 * tarfile.BLOCKSIZE, tarfile.RECORDSIZE)


def _write_header(sink: Sink, name: str, num_bytes: int) -> int:
    info = tarfile.TarInfo(name)
    info.size = num_bytes
    header = info.tobuf(tarfile.GNU_FORMAT, "utf-8", "strict")
    return sink.write(header)


def _write_content(sink: Sink, path: Path, num_bytes: int) -> None:
    left = num_bytes
    try:
        file = open_file(path, follow=False)
    except OSError as error:
        raise IncompleteDataError(f"{path}: cannot be read: {error.strerror or error}") from None
    with file:
        while left:
            piece = file.read(min(left, _PIECE))
            if not piece:
                raise IncompleteDataError(f"{path}: became shorter while it was read")
            sink.write(piece)
            left -= len(piece)
    _fill(sink, num_bytes, tarfile.BLOCKSIZE)


def _rounded(num_bytes: int) -> int:
    return num_bytes + -num_bytes % tarfile.BLOCKSIZE


def _fill(sink: Sink, num_bytes: int, unit: int) -> None:
    sink.write(bytes(-num_bytes % unit))


def read_archive(
    path: Path, history: History, room: Path, limits: Limits | None = None
) -> Iterator[Candidate | Outcome]:
    """The runs of an archive, each unpacked by itself below the store, from where it may be moved.

    What is wrong with the archive ends it, as an outcome `damaged`; the runs before it are whole.

    Args:
        path: the archive.
        history: runs that it holds already are passed over, where the archive's list names them.
        room: where to unpack, from `Store.room`.
        limits: what the archive may not exceed.

    Raises:
        UserError: the archive cannot be read.
        RunError: no space for a member.
    """
    try:
        inner = Path(tempfile.mkdtemp(prefix="archive-", dir=room))
    except OSError as error:
        raise refused(error, f"{room}: cannot be written: {error.strerror or error}") from None
    try:
        yield from _runs(path, history, inner, limits or Limits())
    except IncompleteDataError as error:
        yield Outcome(name=str(path), verdict="damaged", why=str(error))


def _runs(path: Path, history: History, room: Path, limits: Limits) -> Iterator[Candidate | Outcome]:
    plans = _folders_with_plans(path, limits)
    manifest: Manifest | None = None
    missing: set[str] = set()
    name: str | None = None
    target: Path | None = None
    for number, member in enumerate(members(path, limits)):
        if number == 0 and member.parts == (MANIFEST,):
            manifest = _manifest(member)
            missing = set(manifest.runs)
            continue
        folder = _folder_of(member.parts, plans) if manifest is None else _listed(member.parts, manifest)
        if folder != name:
            if name is not None and target is not None:
                yield _candidate(path, name, target, manifest, history)
            name = folder
            missing.discard(folder)
            target = room / f"run-{number}"
            if _is_known(folder, history, manifest):
                target = None
                yield Outcome(name=f"{path}: {folder}", verdict="already there")
        if target is not None:
            _unpack(member, target.joinpath(*member.parts[folder.count("/") + 1 if folder else 0 :]))
    if name is not None and target is not None:
        yield _candidate(path, name, target, manifest, history)
    for folder in sorted(missing):
        yield Outcome(
            name=f"{path}: {folder}", verdict="damaged", why="the archive's list names it, and it is not there"
        )


def _manifest(member: Member) -> Manifest:
    if member.num_bytes > MAX_MANIFEST_BYTES:
        raise IncompleteDataError(f"refused: {MANIFEST} of {member.num_bytes} bytes")
    try:
        return Manifest.model_validate(parse_json(b"".join(member.pieces())))
    except (ValueError, ValidationError) as error:
        raise IncompleteDataError(f"{MANIFEST}: damaged: {str(error).splitlines()[0]}") from None


def _folders_with_plans(path: Path, limits: Limits) -> Set[str]:
    """The folders of runs of an archive without a list, from a first walk over its headers.

    Raises:
        UserError: the archive cannot be read.
        IncompleteDataError: files of a run come after those of another: of such a run only a part would come in.
    """
    plans: set[str] = set()
    # Of each file, but for those that lie in the same folder as the one before.
    visited: list[tuple[str, ...]] = []
    # The same error ends the walk in which runs are unpacked, which reports it after the runs that were whole.
    with suppress(IncompleteDataError), closing(members(path, limits)) as found:
        for number, member in enumerate(found):
            if number == 0 and member.parts == (MANIFEST,):
                return set()
            if not visited or visited[-1] != member.parts[:-1]:
                visited.append(member.parts[:-1])
            if member.parts[-1] == PLAN:
                plans.add("/".join(member.parts[:-1]))
    left: set[str] = set()
    current: str | None = None
    for folder in (_folder_of((*parts, ""), plans) for parts in visited):
        if folder in left and folder in plans and folder != current:
            raise IncompleteDataError(
                f"the files of {folder or 'the archive itself'} do not lie together; make the archive of whole folders"
            )
        left.add(folder)
        current = folder
    return plans


def _listed(parts: tuple[str, ...], manifest: Manifest) -> str:
    """The run's folder that a file belongs to, as the manifest has it."""
    for length in range(len(parts) - 1, 0, -1):
        if "/".join(parts[:length]) in manifest.runs:
            return "/".join(parts[:length])
    raise IncompleteDataError(f"refused: {'/'.join(parts)!a} belongs to no run of its {MANIFEST}")


def _folder_of(parts: tuple[str, ...], plans: Set[str]) -> str:
    """The run's folder that a file belongs to, the outermost with a plan; else the folder it lies in."""
    for length in range(len(parts)):
        if (folder := "/".join(parts[:length])) in plans:
            return folder
    folders = parts[:-1]
    return "/".join(folders[: folders.index("checkpoints")] if "checkpoints" in folders else folders)


def _is_known(folder: str, history: History, manifest: Manifest | None) -> bool:
    """Whether the history holds a run that the manifest names: it need not be unpacked then."""
    if manifest is None:
        return False
    known = history.find(folder.rpartition("/")[2])
    return known is not None and known.content_digest == manifest.runs[folder]


def _candidate(path: Path, name: str, target: Path, manifest: Manifest | None, history: History) -> Candidate | Outcome:
    shown = f"{path}: {name or 'the archive itself'}"
    folder = RunFolder(target)
    if not folder.plan.exists():
        history.store.delete_staged(target)
        return Outcome(name=shown, verdict="damaged" if manifest else "skipped", why="no plan.json: not a run")
    try:
        for inner in {file.parent for file in target.rglob("*")}:
            sync_folder(inner)
    except OSError as error:
        raise refused(error, f"{target}: cannot be written: {error.strerror or error}") from None
    return Candidate(folder=folder, name=shown, staged=True, digest=manifest.runs[name] if manifest else "")


def _unpack(member: Member, target: Path) -> None:
    """Writes one file below the store."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if member.num_bytes + _SPARE_BYTES > free:
            raise RunError(
                f"{target.parent}: no space for {'/'.join(member.parts)}: {format_bytes(member.num_bytes)} needed, "
                f"{format_bytes(free)} free"
            )
        with target.open("xb") as file:
            for piece in member.pieces():
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise IncompleteDataError(f"refused: {'/'.join(member.parts)!a} is there twice") from None
    except OSError as error:
        raise refused(error, f"{target}: cannot be written: {error.strerror or error}") from None

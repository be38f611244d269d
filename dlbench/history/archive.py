"""Runs of a history as a tar archive, and such archives as runs.

An archive is written in GNU's format: first `manifest.json`, the runs' folders with their content digests, then every
file of every run, sorted, with times, owners and modes that say nothing of where it was made, so that equal runs give
equal bytes. Archives that `tar --format=gnu` made of folders of runs are read, too.

Nothing of an archive of unknown origin is extracted by the standard library, whose extraction has been got around again
and again (CVE-2025-4517 and its kin) and whose data filter lets links and absolute names pass: it reads headers alone.
Regular files, folders (passed over) and GNU's long names are known; links, devices, sparse files and the headers of
other formats end it. Names are taken apart and must be harmless. Counts, sizes, names, and how far an archive unfolds
are limited.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import secrets
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Generator, Iterator, Sequence, Set
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, NamedTuple, Self, cast

from pydantic import Field

from dlbench.errors import IncompleteDataError, RunError, UserError, refused
from dlbench.history.entry import HistoryEntry
from dlbench.history.files import content_digest, files_of, sync_folder
from dlbench.history.importing import Candidate, Outcome
from dlbench.history.store import History
from dlbench.opening import UnfitFileError, open_file, parse_json, why_unreadable
from dlbench.records.files import TEMPORARY_SUFFIX, is_stream
from dlbench.records.folder import RunFolder
from dlbench.specs.base import Spec
from dlbench.units import format_bytes

_GZIP_MAGIC = b"\x1f\x8b"
_MAX_PART_BYTES = 255
_PIECE = 1 << 20

_REFUSED = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a named pipe",
    b"7": "a contiguous file",
    b"K": "a link with a long name",
    b"S": "a sparse file",
    b"x": "a header of the pax format (make the archive with `tar --format=gnu`)",
    b"g": "a header of the pax format (make the archive with `tar --format=gnu`)",
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What an archive may not exceed."""

    members: int = 5_000_000
    file_bytes: int = 1 << 37  # Of one member: 128 GiB.
    total_bytes: int = 1 << 42  # Of all members: 4 TiB.
    name_bytes: int = 1000
    unfolding: int = 200  # Bytes that a compressed byte may become, on average, beyond `unfolding_from` bytes.
    unfolding_from: int = 1 << 28


class Member(NamedTuple):
    """A regular file of an archive; its content must be read before the next member is asked for, or is lost."""

    parts: tuple[str, ...]  # Of its name; none is `.`, `..`, or begins with a dot, none holds a control character.
    num_bytes: int
    file: IO[bytes]  # Its content; an archive that ends too early, or is damaged, is an `IncompleteDataError`.


class _Stream:
    """The archive's bytes, unfolded and counted."""

    def __init__(self, raw: IO[bytes], limits: Limits) -> None:
        self._raw = raw
        self._limits = limits
        is_packed = raw.read(2) == _GZIP_MAGIC
        raw.seek(0)
        self._file: IO[bytes] | gzip.GzipFile = gzip.GzipFile(fileobj=raw) if is_packed else raw
        self._position = 0
        self.may_end = False

    def read(self, num_bytes: int) -> bytes:
        """Up to `num_bytes` bytes; fewer at the end alone."""
        try:
            found = self._file.read(num_bytes)
        except (EOFError, gzip.BadGzipFile, zlib.error, OSError) as error:
            raise IncompleteDataError(f"damaged: {error}") from None
        if not found and not self.may_end:
            raise IncompleteDataError("damaged: ends in the middle: copied in part?")
        self._position += len(found)
        limits = self._limits
        if self._position > limits.unfolding_from and self._position > limits.unfolding * self._raw.tell():
            raise IncompleteDataError(f"refused: unfolds to more than {limits.unfolding} times its size")
        return found


class _Header(tarfile.TarInfo):
    """A header of a known kind; what follows one of another kind is never read."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            found = super().frombuf(buf, encoding, errors)
        except (tarfile.HeaderError, ValueError) as error:
            if not any(buf):
                raise
            raise IncompleteDataError(f"no tar archive, or damaged: {error}") from None
        if found.type == tarfile.GNUTYPE_LONGNAME:
            if not 0 < found.size <= Limits.name_bytes:
                raise IncompleteDataError(f"refused: a name of {found.size} bytes")
        elif found.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
            kind = _REFUSED.get(found.type, "of an unknown kind")
            raise IncompleteDataError(f"refused: {ascii(found.name)[:200]} is {kind}")
        return found


def members(path: Path, limits: Limits) -> Generator[Member, None, None]:
    """The regular files of an archive, in order; hidden ones are passed over.

    Raises `UserError`: the file cannot be read, or is no plain file, which alone can be read twice.
    `IncompleteDataError`: it is no archive, a damaged one, or one that holds what none of dlbench's does.
    """
    try:
        raw = open_file(path)
    except UnfitFileError as error:
        raise UserError(f"{path}: {error.strerror}; write the archive to a file first") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    with raw:
        try:
            stream = _Stream(raw, limits)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
        try:
            yield from _members(stream, limits)
        except UnicodeDecodeError:
            raise IncompleteDataError("refused: a name that is not UTF-8") from None
        except RecursionError:
            raise IncompleteDataError("refused: names of names") from None
        except tarfile.TarError as error:
            raise IncompleteDataError(f"no tar archive, or damaged: {error}") from None


def _members(stream: _Stream, limits: Limits) -> Iterator[Member]:
    source = cast("IO[bytes]", stream)
    with tarfile.open(
        fileobj=source, mode="r|", bufsize=_PIECE, tarinfo=_Header, encoding="utf-8", errors="strict"
    ) as opened:
        count = total = 0
        while (info := opened.next()) is not None:
            # They are kept otherwise, millions of them.
            opened.members.clear()  # type: ignore[attr-defined]
            count, total = count + 1, total + info.size
            if count > limits.members:
                raise IncompleteDataError(f"refused: more than {limits.members} members")
            if not 0 <= info.size <= limits.file_bytes or (info.isdir() and info.size):
                raise IncompleteDataError(f"refused: {ascii(info.name)[:200]} has {info.size} bytes")
            if total > limits.total_bytes:
                raise IncompleteDataError(f"refused: more than {format_bytes(limits.total_bytes)}")
            parts = safe_parts(info.name, limits)
            if info.isreg() and parts is not None and (file := opened.extractfile(info)) is not None:
                yield Member(parts, info.size, file)
        # The end of a compressed file says whether it was whole; behind the end of a tar archive is padding.
        stream.may_end = True
        rest = cast("IO[bytes]", opened.fileobj)
        if any(rest.read(_PIECE)) or rest.read(1):
            raise IncompleteDataError("refused: something stands behind its end")


def safe_parts(name: str, limits: Limits) -> tuple[str, ...] | None:
    """The parts of a member's name; None for hidden files, which no run has.

    Raises `IncompleteDataError`: a name that leads out of its folder, or that no file of dlbench's has.
    """
    shown = ascii(name)[:200]
    if name.startswith("/") or "\\" in name or not name.isprintable() or len(name.encode()) > limits.name_bytes:
        raise IncompleteDataError(f"refused: the name {shown}")
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts or any(len(part.encode()) > _MAX_PART_BYTES for part in parts):
        raise IncompleteDataError(f"refused: the name {shown}")
    return parts if parts and not any(part.startswith(".") for part in parts) else None


MANIFEST = "manifest.json"
PLAN = "plan.json"
MAX_MANIFEST_BYTES = 1 << 28
COMPRESSED = (".gz", ".tgz")
_LEVEL = 6
_SPARE_BYTES = 1 << 20


class Manifest(Spec):
    """`manifest.json` of an archive."""

    format: Literal["dlbench.history-archive"] = Field("dlbench.history-archive", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    runs: dict[str, str] = Field(description="Content digest of each run, by its folder in the archive.")


def write_archive(history: History, entries: Sequence[HistoryEntry], output: Path) -> None:
    """Runs as one file, whole or not at all; compressed if its name ends in `.gz` or `.tgz`.

    Raises `UserError`: the file cannot be written. `IncompleteDataError`: a run cannot be read, or its files are not
    those that the index knows.
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
                    _write_members(history, ordered, cast("IO[bytes]", packed))
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


def _write_members(history: History, entries: Sequence[HistoryEntry], sink: IO[bytes]) -> None:
    manifest = Manifest(runs={entry.folder: entry.content_digest for entry in entries})
    content = json.dumps(manifest.model_dump(mode="json"), indent=1, sort_keys=True).encode()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="strict") as opened:
        _write_member(opened, MANIFEST, len(content), io.BytesIO(content))
        for entry in entries:
            path = history.run_folder(entry)
            if content_digest(RunFolder(path)) != entry.content_digest:
                raise IncompleteDataError(f"{path}: changed since it was indexed; delete the index and export again")
            for name, status in sorted(files_of(path).items()):
                try:
                    file = open_file(path / name, follow=False)
                except OSError as error:
                    why = error.strerror or error
                    raise IncompleteDataError(f"{path / name}: cannot be read: {why}") from None
                with file:
                    if os.fstat(file.fileno()).st_size < status.st_size:
                        raise IncompleteDataError(f"{path / name}: became shorter while it was read")
                    _write_member(opened, f"{entry.folder}/{name}", status.st_size, file)


def _write_member(opened: tarfile.TarFile, name: str, num_bytes: int, content: IO[bytes]) -> None:
    # Modes, times and owners of a new header say nothing.
    info = tarfile.TarInfo(name)
    info.size = num_bytes
    opened.addfile(info, content)
    opened.members.clear()  # type: ignore[attr-defined]


def read_archive(
    path: Path, history: History, room: Path, limits: Limits | None = None
) -> Iterator[Candidate | Outcome]:
    """The runs of an archive, each unpacked by itself in `room` (of `Store.room`), from where it may be moved.

    Runs that the history holds already are passed over, where the archive's list names them. What is wrong with the
    archive ends it, as an outcome `damaged`; the runs before it are whole.

    Raises `UserError`: the archive cannot be read. `RunError`: no space for a member.
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
            known = None if manifest is None else history.find(folder.rpartition("/")[2])
            if manifest and known and known.content_digest == manifest.runs[folder]:
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
        return Manifest.model_validate(parse_json(member.file.read()))
    except ValueError as error:
        raise IncompleteDataError(f"{MANIFEST}: damaged: {why_unreadable(error)}") from None


def _folders_with_plans(path: Path, limits: Limits) -> Set[str]:
    """The folders of runs of an archive without a list, from a first walk over its headers.

    Raises `UserError`: the archive cannot be read. `IncompleteDataError`: files of a run come after those of another:
    of such a run only a part would come in.
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
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if member.num_bytes + _SPARE_BYTES > free:
            raise RunError(
                f"{target.parent}: no space for {'/'.join(member.parts)}: {format_bytes(member.num_bytes)} needed, "
                f"{format_bytes(free)} free"
            )
        with target.open("xb") as file:
            shutil.copyfileobj(member.file, file, _PIECE)
            file.flush()
            os.fsync(file.fileno())
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise IncompleteDataError(f"refused: {'/'.join(member.parts)!a} is there twice") from None
    except OSError as error:
        raise refused(error, f"{target}: cannot be written: {error.strerror or error}") from None

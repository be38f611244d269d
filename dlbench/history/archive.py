"""Exports runs of a history as a tar archive, and imports such archives.

An archive is in GNU's format: `manifest.json`, then the files of the runs, sorted, without times and owners, so that
equal runs give equal bytes. Members other than files and folders are refused: the known ways around tarfile's data
filter (such as CVE-2025-4517) need links, and headers of other formats may be of any size.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import secrets
import tarfile
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import IO, Literal, Self, cast

from pydantic import Field

from dlbench.errors import MACHINE_ERRORS, EnvironmentLacksError, IncompleteDataError, UserError, refused
from dlbench.history.entry import HistoryEntry
from dlbench.history.history import History
from dlbench.history.importing import Candidate, ImportOutcome, content_digest, files_of
from dlbench.opening import UnfitFileError, open_file
from dlbench.records.files import large_result, sync_folder
from dlbench.records.folder import RunFolder
from dlbench.records.scan import load_file, run_folders
from dlbench.specs.base import Spec
from dlbench.units import format_bytes

MANIFEST = "manifest.json"
COMPRESSED = (".gz", ".tgz")
_MAX_MANIFEST_BYTES = 1 << 28
_MAX_NAME_BYTES = 1000
_GZIP_MAGIC = b"\x1f\x8b"
_LEVEL = 6
_PIECE = 1 << 20
_KINDS = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE)


@dataclass(frozen=True, kw_only=True)
class ArchiveLimits:
    """Limits of an archive that is read."""

    members: int = 5_000_000
    total_bytes: int = 1 << 42  # Unpacked size: 4 TiB.
    unfolding: int = 200  # Largest ratio of unpacked to packed bytes, for more than `unfolding_from` unpacked bytes.
    unfolding_from: int = 1 << 28  # Bytes.


class ArchiveManifest(Spec):
    """`manifest.json` of an archive."""

    format: Literal["dlbench.history-archive"] = Field("dlbench.history-archive", description="What this file is.")
    version: Literal[1] = Field(1, description="Version of the format.")
    runs: dict[str, str] = Field(description="Content digest of each run, by its folder in the archive.")


def write_archive(history: History, entries: Sequence[HistoryEntry], output: Path) -> None:
    """Writes runs as one file atomically; compressed if its name ends in `.gz` or `.tgz`."""
    manifest = ArchiveManifest(runs={entry.folder: entry.content_digest for entry in entries})
    content = json.dumps(manifest.model_dump(mode="json"), indent=1, sort_keys=True).encode()
    level = _LEVEL if output.name.endswith(COMPRESSED) else None
    with (
        large_result(output, "an archive", level) as sink,
        tarfile.open(fileobj=sink, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="strict") as opened,
    ):
        _write_member(opened, MANIFEST, len(content), io.BytesIO(content))
        for entry in sorted(entries, key=attrgetter("folder")):
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
                        raise IncompleteDataError(f"{path / name}: was truncated while it was read")
                    _write_member(opened, f"{entry.folder}/{name}", status.st_size, file)


def _write_member(opened: tarfile.TarFile, name: str, num_bytes: int, content: IO[bytes]) -> None:
    # A new header has default mode, time and owner.
    info = tarfile.TarInfo(name)
    info.size = num_bytes
    opened.addfile(info, content)
    opened.members.clear()  # type: ignore[attr-defined]


def read_archive(path: Path, room: Path, limits: ArchiveLimits | None = None) -> Iterator[Candidate | ImportOutcome]:
    """Yields the runs of an archive, unpacked in `room` (of `Store.room`); a bad archive is one outcome `damaged`."""
    if not hasattr(tarfile, "data_filter"):
        raise EnvironmentLacksError(
            f"{path}: archives are read with Python 3.11.4 or later; unpack it with tar and import the folder"
        )
    try:
        file = open_file(path)
    except UnfitFileError as error:
        raise UserError(f"{path}: {error.strerror}; write the archive to a file first") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    folder = room / f"archive-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
        with file:
            _unpack(file, folder, limits or ArchiveLimits())
        for parent, _, names in os.walk(folder):
            for name in names:
                with open_file(Path(parent, name), follow=False) as unpacked:
                    os.fsync(unpacked.fileno())
            sync_folder(Path(parent))
        manifest = load_file(folder / MANIFEST, ArchiveManifest, _MAX_MANIFEST_BYTES)
    except IncompleteDataError as error:
        yield ImportOutcome(name=str(path), verdict="damaged", why=str(error).replace(f"{folder}/", ""))
        return
    except OSError as error:
        raise refused(error, f"{room}: cannot be written: {error.strerror or error}") from None
    yield from _runs(path, folder, manifest)


class _Header(tarfile.TarInfo):
    """A header of a file, a folder, or a long name; any other raises an error."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            # Zeros end an archive. tarfile would take any other invalid header for the end, too.
            if buf and not any(buf):
                raise
            raise IncompleteDataError(f"not a tar archive, or damaged: {error}") from None
        if header.type == tarfile.GNUTYPE_LONGNAME and 0 < header.size <= _MAX_NAME_BYTES:
            return header
        if header.type not in _KINDS or header.size < 0:
            raise IncompleteDataError(
                f"refused: {ascii(header.name)[:200]} is neither a file nor a folder, or its name is too long; make the"
                f" archive of plain files, with `tar --format=gnu`"
            )
        return header


def _unpack(file: IO[bytes], folder: Path, limits: ArchiveLimits) -> None:
    """Unpacks an archive into a folder. Raises `IncompleteDataError`: not an archive, damaged, or refused."""
    most_bytes = min(limits.total_bytes, max(limits.unfolding_from, limits.unfolding * os.fstat(file.fileno()).st_size))
    num_members = num_bytes = 0
    content = file
    is_compressed = file.read(2) == _GZIP_MAGIC
    file.seek(0)
    if is_compressed:
        content = cast("IO[bytes]", gzip.GzipFile(fileobj=file))
    try:
        # Mode "r|" reads a stream, in which no header can seek back.
        with tarfile.open(
            fileobj=content, mode="r|", bufsize=_PIECE, tarinfo=_Header, encoding="utf-8", errors="strict"
        ) as archive:
            for member in archive:
                num_members += 1
                num_bytes += member.size
                if num_members > limits.members or num_bytes > most_bytes:
                    size = f"{limits.members} members or {format_bytes(most_bytes)}"
                    raise IncompleteDataError(f"refused: unpacks to more than {size}")
                archive.extract(member, folder, filter=_filtered)
                # tarfile keeps all members otherwise, possibly millions.
                archive.members.clear()  # type: ignore[attr-defined]
        # The checksum at the end of a compressed file shows whether it is complete.
        while content.read(_PIECE):
            pass
    except UnicodeDecodeError:
        raise IncompleteDataError("refused: a name that is not UTF-8") from None
    except tarfile.FilterError as error:
        raise IncompleteDataError(f"refused: {error.tarinfo.name!a} is outside of the archive") from None
    except (tarfile.TarError, EOFError, RecursionError, ValueError, zlib.error) as error:
        raise IncompleteDataError(f"not a tar archive, or damaged: {error}") from None
    except OSError as error:
        if error.errno in MACHINE_ERRORS:
            raise
        raise IncompleteDataError(f"damaged: {error.strerror or error}") from None


def _filtered(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """Returns a member that is safe to unpack; None for a hidden file, which no run has."""
    if member.name.startswith("/"):
        raise tarfile.AbsolutePathError(member)
    safe = tarfile.data_filter(member, folder)
    if any(part.startswith(".") for part in Path(member.name).parts):
        return None
    return safe.replace(mtime=time.time(), deep=False)


def _runs(path: Path, folder: Path, manifest: ArchiveManifest | None) -> Iterator[Candidate | ImportOutcome]:
    digest_by_name = dict(manifest.runs) if manifest else {}
    # An archive may contain its runs under a long path: they are in the first folder with more than one entry.
    root = folder
    while len(entries := list(root.iterdir())) == 1 and entries[0].is_dir():
        root = entries[0]
    runs = run_folders(root)
    if not runs and not digest_by_name:
        yield ImportOutcome(name=str(path), verdict="skipped", why="it contains no run")
    for run in runs:
        name = str(run.path.relative_to(folder))
        shown_name = f"{path}: the archive itself" if run.path == folder else f"{path}: {name}"
        if manifest and name not in digest_by_name:
            yield ImportOutcome(name=shown_name, verdict="damaged", why=f"{MANIFEST} does not list it")
            continue
        yield Candidate(folder=run, name=shown_name, staged=True, digest=digest_by_name.pop(name, ""))
    for name in sorted(digest_by_name):
        yield ImportOutcome(name=f"{path}: {name}", verdict="damaged", why=f"{MANIFEST} lists it, but it is missing")

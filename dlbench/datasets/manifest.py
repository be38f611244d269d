"""The manifest of a prepared data set: `manifest.json` is `{"format": "dlbench.dataset", "version": 1, "kind",
"made_with": {...}, "counts": {...}, "files": {"list": "manifest.files.jsonl", "sha256" of that list, "count",
"bytes"}}`. The list has one line per file, `{"path", "sha256", "bytes"}`, so that a million files need not be in memory
at once. Bytes of a name that are not UTF-8 are stored as Python's surrogate escapes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlbench.errors import UserError
from dlbench.opening import file_sha256, open_file, parse_json, read_json, why_unreadable

NAME = "manifest.json"
FILES_NAME = "manifest.files.jsonl"
FORMAT = "dlbench.dataset"
VERSION = 1
MAX_BYTES = 1 << 24  # largest `manifest.json`, which does not list files
MAX_LINE = 1 << 20  # longest line of `manifest.files.jsonl` in bytes; it names one file, and paths have 4,096 bytes

Value = str | int | float | bool
MadeWith = Mapping[str, Value]  # what determines the content: generator, its version, seed, sources


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a data set."""

    path: str  # relative to the set's folder, with `/`
    sha256: str
    num_bytes: int

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> FileEntry:
        """Parses an entry. Raises TypeError, KeyError or ValueError: it is damaged, or names a file outside the set."""
        path = str(content["path"])
        if path.startswith("/") or not path or {"", "..", "."} & set(path.split("/")) or "\0" in path:
            raise ValueError(f"{path!r} is not a path of a file in the set")
        return FileEntry(path, str(content["sha256"]), int(content["bytes"]))


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a `manifest.json`, without the single files."""

    kind: str
    made_with: MadeWith
    counts: Mapping[str, int]  # samples of each split
    num_files: int
    num_bytes: int  # of all files together
    files_sha256: str = ""  # SHA-256 over the list of files; equal for equal sets


def save_manifest(
    folder: Path, *, kind: str, made_with: MadeWith, counts: Mapping[str, int], files: Iterable[FileEntry]
) -> Manifest:
    """Writes the list of files and then the manifest, each completely or not at all. Raises OSError: disk full etc."""
    digest, count, total = hashlib.sha256(), 0, 0
    listing = folder / f".{FILES_NAME}.partial"
    with listing.open("wb") as file:
        for entry in files:
            # ASCII only, so that escaped file names stay valid JSON text.
            fields = {"path": entry.path, "sha256": entry.sha256, "bytes": entry.num_bytes}
            line = json.dumps(fields, ensure_ascii=True).encode("ascii") + b"\n"
            file.write(line)
            digest.update(line)
            count, total = count + 1, total + entry.num_bytes
        file.flush()
        os.fsync(file.fileno())
    listing.replace(folder / FILES_NAME)
    content: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "kind": kind,
        "made_with": dict(made_with),
        "counts": dict(counts),
        "files": {"list": FILES_NAME, "sha256": digest.hexdigest(), "count": count, "bytes": total},
    }
    temporary = folder / f".{NAME}.partial"
    with temporary.open("w", encoding="ascii") as text:
        text.write(json.dumps(content, indent=2, ensure_ascii=True) + "\n")
        text.flush()
        os.fsync(text.fileno())
    temporary.replace(folder / NAME)
    return _parse(content)


def read_manifest(folder: Path) -> Manifest | None:
    """Reads the manifest of a folder; None if it has none. Raises UserError: it is damaged."""
    content = _read(folder)
    if content is None:
        return None
    try:
        return _parse(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(folder, error) from None


def read_files(folder: Path) -> Iterator[FileEntry]:
    """Yields the files in the manifest of a data set. Raises UserError: it has none, or the list is damaged."""
    content = _read(folder)
    if content is None:
        raise UserError(f"{str(folder)!r} has no {NAME}: dlbench did not prepare it, so its files cannot be verified")
    try:
        path, digest = folder / FILES_NAME, hashlib.sha256()
        with open_file(path) as file:
            while line := file.readline(MAX_LINE):
                digest.update(line)
                yield FileEntry.from_json(parse_json(line))
        if digest.hexdigest() != content["files"]["sha256"]:
            raise UserError(f"{path}: altered (SHA-256 differs from that in {NAME})")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder, error) from None


def verify_file(folder: Path, entry: FileEntry) -> str | None:
    """Returns how a file differs from its entry, as a line that begins with its path; None if it is equal."""
    path = folder / entry.path
    try:
        size = path.stat().st_size
        if size != entry.num_bytes:
            return f"{entry.path}: {size} bytes, expected {entry.num_bytes}"
        if file_sha256(path) != entry.sha256:
            return f"{entry.path}: altered (SHA-256 differs)"
    except FileNotFoundError:
        return f"{entry.path}: missing"
    except OSError as error:
        return f"{entry.path}: cannot be read: {error.strerror or error}"
    return None


def describe_files(folder: Path, skip: Callable[[str], bool] | None = None) -> list[FileEntry]:
    """Returns entries of the visible files below a folder, or of a file; `skip`: whether to leave out a path."""
    if not folder.is_dir():
        return [FileEntry(folder.name, file_sha256(folder), folder.stat().st_size)]
    entries = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if not name.startswith(".") and not (skip is not None and skip(name)):
            entries.append(FileEntry(name, file_sha256(path), path.stat().st_size))
    return entries


def _read(folder: Path) -> dict[str, Any] | None:
    path = folder / NAME
    try:
        content = read_json(path, MAX_BYTES, follow=True)
        file_format, version = content["format"], content["version"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, error) from None
    if (file_format, version) != (FORMAT, VERSION):
        raise UserError(f"{path}: format {file_format!r}, version {version!r}; expected {FORMAT!r}, version {VERSION}")
    assert isinstance(content, dict)
    return content


def _parse(content: Mapping[str, Any]) -> Manifest:
    files = content["files"]
    return Manifest(
        kind=content["kind"],
        made_with=dict(content["made_with"]),
        counts=dict(content["counts"]),
        num_files=files["count"],
        num_bytes=files["bytes"],
        files_sha256=files["sha256"],
    )


def _damaged(folder: Path, error: Exception) -> UserError:
    return UserError(f"{folder / NAME}: not a manifest of dlbench: {why_unreadable(error)}")

"""What a prepared data set consists of: `manifest.json`, and in `manifest.files.jsonl` the SHA-256 of every other file.

The form: `{"format": "dlbench.dataset", "version": 1, "kind", "made_with": {...}, "counts": {...}, "files": {"list":
"manifest.files.jsonl", "sha256" of that list, "count", "bytes"}}`. The list has one line per file, `{"path", "sha256",
"bytes"}`, so that a million of them need not be in memory at once. Paths are relative and use `/`; bytes of a name that
are not UTF-8 are kept as Python's surrogate escapes.
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
MAX_BYTES = 1 << 24  # of `manifest.json` at most: it says what a set was made with, and lists no file
MAX_LINE = 1 << 20  # of a line of `manifest.files.jsonl` at most: it names one file, and paths have 4,096 bytes

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
        """The reverse; TypeError, KeyError or ValueError if it is none, or names a file outside of the set."""
        path = str(content["path"])
        if path.startswith("/") or not path or {"", "..", "."} & set(path.split("/")) or "\0" in path:
            raise ValueError(f"{path!r} is no path of a file in the set")
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
    folder: Path,
    *,
    kind: str,
    made_with: MadeWith,
    counts: Mapping[str, int],
    files: Iterable[FileEntry],
) -> Manifest:
    """Writes a manifest of files that are digested already; the list first, the manifest last, both as a whole.

    Raises OSError: the disk refuses.
    """
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
    """The manifest of a folder; None if it has none."""
    content = _read(folder)
    if content is None:
        return None
    try:
        return _parse(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(folder, error) from None


def read_files(folder: Path) -> Iterator[FileEntry]:
    """The files of a prepared data set, one at a time."""
    content = _read(folder)
    if content is None:
        raise UserError(f"{str(folder)!r} has no {NAME}: it was not prepared by dlbench, nothing to verify against")
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
    """What is wrong with one file, in one line that begins with its path; None if nothing is."""
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


def describe_files(folder: Path, skip: Callable[[str], bool] = lambda _name: False) -> list[FileEntry]:
    """Digests the files below a folder, sorted by path, apart from those at its top whose name begins with a dot.

    `folder`: where to look; or one file, which gives one entry with its name. `skip`: is given a relative path; such
    files are left out.
    """
    if not folder.is_dir():
        return [FileEntry(folder.name, file_sha256(folder), folder.stat().st_size)]
    found = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if not name.startswith(".") and not skip(name):
            found.append(FileEntry(name, file_sha256(path), path.stat().st_size))
    return found


def _read(folder: Path) -> dict[str, Any] | None:
    path = folder / NAME
    try:
        content = read_json(path, MAX_BYTES, follow=True)
        form = content["format"], content["version"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, error) from None
    if form != (FORMAT, VERSION):
        raise UserError(f"{path}: format {form[0]!r}, version {form[1]!r}; expected {FORMAT!r}, version {VERSION}")
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

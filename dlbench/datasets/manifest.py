"""What a prepared data set consists of: a `manifest.json` in its folder, with the SHA-256 of every other file.

Form 1: `{"format": "dlbench.dataset", "version": 1, "kind", "made_with": {...}, "counts": {...}, "files": {relative
path: {"sha256", "bytes"}}}`. Paths use `/`; bytes of a name that are not UTF-8 are kept as Python's surrogate escapes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dlbench.errors import UserError

NAME = "manifest.json"
FORMAT = "dlbench.dataset"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a `manifest.json`."""

    kind: str
    made_with: Mapping[str, str | int]
    """What determines the content: generator, its version, seed, sources."""
    counts: Mapping[str, int]
    files: Mapping[str, str]
    """SHA-256 by path relative to the folder."""
    sizes: Mapping[str, int]
    """Bytes by path."""


def write_manifest(folder: Path, *, kind: str, made_with: Mapping[str, str | int], counts: Mapping[str, int]) -> None:
    """Digests every file below a folder and writes its manifest."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / NAME):
        files[path.relative_to(folder).as_posix()] = {"sha256": file_sha256(path), "bytes": path.stat().st_size}
    content = {
        "format": FORMAT,
        "version": VERSION,
        "kind": kind,
        "made_with": dict(made_with),
        "counts": dict(counts),
        "files": files,
    }
    # ASCII only, so that escaped file names stay valid JSON text.
    (folder / NAME).write_text(json.dumps(content, indent=2, ensure_ascii=True) + "\n", encoding="ascii")


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None if it has none.

    Raises:
        UserError: there is one, but not of this form.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="ascii"))
        form = content["format"], content["version"]
        manifest = Manifest(
            kind=content["kind"],
            made_with=content["made_with"],
            counts=content["counts"],
            files={name: entry["sha256"] for name, entry in content["files"].items()},
            sizes={name: entry["bytes"] for name, entry in content["files"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a manifest of dlbench: {str(error).splitlines()[0]}") from None
    if form != (FORMAT, VERSION):
        raise UserError(f"{path}: format {form[0]!r}, version {form[1]!r}; expected {FORMAT!r}, version {VERSION}")
    return manifest


def verify_manifest(folder: Path) -> list[str]:
    """Reads every file of a prepared data set; returns one line for each that is missing or altered, none if whole.

    Raises:
        UserError: the folder has no manifest, or a damaged one.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(f"{str(folder)!r} has no {NAME}: it was not prepared by dlbench, nothing to verify against")
    found = []
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{name}: missing")
        elif path.stat().st_size != manifest.sizes[name]:
            found.append(f"{name}: {path.stat().st_size} bytes, expected {manifest.sizes[name]}")
        elif file_sha256(path) != expected:
            found.append(f"{name}: altered (SHA-256 differs)")
    return found


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()

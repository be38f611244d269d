"""What an image holds: a Python becomes a list of entries, by their names in the image. Nothing is written.

An environment lies in `env/`, with the interpreter of a virtual one: Python finds its library beside itself, so that it
can be moved, and nothing has to be written where it is unpacked. Links are relative, and programs in `env/bin` find
their Python beside them. Nothing is left out but what no module can be loaded from: packages installed for the
interpreter, which a virtual environment does not see, and conda's other environments and its store of packages.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dlbench.errors import UserError
from dlbench.opening import read_bytes
from dlbench.setup.image.survey import Survey

ENV = "env"

_BUNDLED = ("workloads", "systems", "slurm", "reports")
_OTHERS_OF_CONDA = ("envs", "pkgs")
_SCRIPT_BYTES = 1 << 20
_PATHS_BYTES = 1 << 16
_PROGRAM_BYTES = 1 << 28

# As `pip` and `uv` write it for programs that may be moved: sh reads a line, Python a text.
_HEAD = b'#!/bin/sh\n\'\'\'exec\' "$(dirname -- "$(realpath -- "$0")")"/python "$0" "$@"\n\' \'\'\'\n'


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file of an image."""

    name: str
    """In the image."""
    path: Path | None = None
    """Whose bytes and times it has."""
    content: bytes | None = None
    """Its bytes, where they differ from those of the path."""
    link: str | None = None
    """What it leads to, where it is a symbolic link."""


@dataclass(kw_only=True)
class Contents:
    """All of an image."""

    entries: list[Entry] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    """Folders that modules are loaded from and that are not in it."""


def contents_of(found: Survey) -> Contents:
    """Everything that the ranks of a Python load, in the order of their names.

    Raises `UserError`: a folder of it cannot be read.
    """
    contents = Contents()
    is_editable = found.prefix not in found.dlbench.parents
    left_out = {found.site / "dlbench"} if is_editable else set()
    if not found.is_virtual:
        left_out |= {found.prefix / name for name in _OTHERS_OF_CONDA}
    for path in _files(found.prefix, left_out):
        entry = _of_environment(path, found, contents)
        if entry is not None:
            contents.entries.append(entry)
    if is_editable:
        site = f"{ENV}/{found.site.relative_to(found.prefix)}/dlbench"
        contents.entries += _checkout(found.dlbench, site)
        commit = f"{found.commit}\n".encode()
        contents.entries.append(
            Entry(name=f"{site}/_bundled/COMMIT", path=found.dlbench / "__init__.py", content=commit)
        )
    if found.is_virtual and found.holds_interpreter:
        contents.entries += _interpreter(found)
    contents.entries.sort(key=lambda entry: entry.name)
    return contents


def _files(root: Path, left_out: Collection[Path] = ()) -> Iterator[Path]:
    """Files and links below a folder."""

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}")

    for folder, folders, files in os.walk(root, onerror=refuse):
        here = Path(folder)
        folders[:] = [name for name in folders if here / name not in left_out]
        yield from (here / name for name in files)
        yield from (here / name for name in folders if (here / name).is_symlink())


def _of_environment(path: Path, found: Survey, contents: Contents) -> Entry | None:
    name = f"{ENV}/{path.relative_to(found.prefix)}"
    if path.is_symlink():
        return _link(path, name, found, contents)
    if path == found.prefix / "pyvenv.cfg" and found.holds_interpreter:  # it would lead to another one
        return None
    if path.parent == found.site and path.suffix == ".pth":
        return _paths(path, name, found, contents)
    if path.parent == found.prefix / "bin" and path.stat().st_size < _SCRIPT_BYTES:
        return _program(path, name, found)
    return Entry(name=name, path=path)


def _link(path: Path, name: str, found: Survey, contents: Contents) -> Entry | None:
    """A link within the environment stays one; one to the interpreter leads to the image's; others are followed."""
    target = path.resolve()
    if not target.exists():
        return None
    direct = Path(os.path.normpath(path.parent / path.readlink()))
    if found.is_virtual and target == found.base_executable and found.holds_interpreter:
        return None if path.name == target.name else Entry(name=name, link=target.name)
    if found.prefix in direct.parents:
        return Entry(name=name, link=os.path.relpath(direct, path.parent))
    if target == found.base_executable:
        return Entry(name=name, link=str(direct))
    if target.is_dir():
        contents.outside.append(str(target))
        return Entry(name=name, link=str(target))
    return Entry(name=name, path=target)


def _paths(path: Path, name: str, found: Survey, contents: Contents) -> Entry | None:
    """A .pth file without the line by which an editable dlbench is found: it is in the image."""
    lines = []
    for line in read_bytes(path, _PATHS_BYTES).decode().splitlines():
        folder = Path(line.strip())
        if line.strip() and folder.is_absolute() and folder.is_dir() and found.prefix not in folder.parents:
            if (folder / "dlbench" / "__init__.py").exists():
                continue
            contents.outside.append(str(folder))
        lines.append(line)
    return Entry(name=name, path=path, content="".join(f"{line}\n" for line in lines).encode()) if lines else None


def _program(path: Path, name: str, found: Survey) -> Entry:
    """A program of the environment: one that names its Python by a path finds it beside itself."""
    content = read_bytes(path, _SCRIPT_BYTES)
    first, _, rest = content.partition(b"\n")
    own = os.fsencode(found.prefix / "bin") + b"/python"
    return Entry(name=name, path=path, content=_HEAD + rest if first.startswith(b"#!" + own) else None)


def _checkout(package: Path, name: str) -> Iterator[Entry]:
    """A checkout's dlbench as a wheel holds it."""
    for path in _files(package, {package / "_bundled"}):
        if path.parent.name != "__pycache__":
            yield Entry(name=f"{name}/{path.relative_to(package)}", path=path)
    for kind in _BUNDLED:
        root = package / "_bundled" / kind
        root = root if root.is_dir() else package.parent / kind
        for path in _files(root):
            yield Entry(name=f"{name}/_bundled/{kind}/{path.relative_to(root)}", path=path)


def _interpreter(found: Survey) -> Iterator[Entry]:
    """The program, its standard library, and the shared libraries beside that."""
    yield Entry(
        name=f"{ENV}/bin/{found.base_executable.name}",
        path=found.base_executable,
        content=_movable(found.base_executable, found, "$ORIGIN/../lib"),
    )
    root, stdlib = found.base_prefix.resolve(), found.stdlib.resolve()
    for path in _files(stdlib, {stdlib / "site-packages"}):
        name = f"{ENV}/{path.relative_to(root)}"
        if path.exists():
            above = "/".join(".." for _ in path.parent.relative_to(stdlib.parent).parts)
            is_library = path.suffix == ".so"
            content = _movable(path, found, f"$ORIGIN/{above}") if is_library else None
            yield Entry(name=name, path=path.resolve(), content=content)
    for path in sorted(stdlib.parent.iterdir()):
        if ".so" in path.suffixes and path.is_file():
            content = _movable(path.resolve(), found, "$ORIGIN")
            yield Entry(name=f"{ENV}/{path.relative_to(root)}", path=path.resolve(), content=content)


def _movable(program: Path, found: Survey, libraries: str) -> bytes:
    """A program or library that looks in this folder where it looked in that of the interpreter (ld.so(8), $ORIGIN).

    The text in it keeps its length; one that is too short for the new text stays.
    """
    old = b"\0" + os.fsencode(found.base_prefix / "lib") + b"\0"
    new = b"\0" + libraries.encode() + b"\0"
    content = read_bytes(program, _PROGRAM_BYTES)
    return content.replace(old, new.ljust(len(old), b"\0")) if len(new) <= len(old) else content

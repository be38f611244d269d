"""The environment of a Python as one file, FILE.tar, .tar.zst or .sqsh, with its description next to it.

It lies in `env/`, with the interpreter of a virtual one: Python finds its library next to itself, so that it can be
moved, and nothing has to be written where it is unpacked. Links are relative, and programs in `env/bin` find their
Python next to them. Nothing is left out but what no module can be loaded from: packages installed for the interpreter,
which a virtual environment does not see, and conda's other environments and its store of packages.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from dlbench.errors import EnvironmentLacksError, RunError, UserError, refused
from dlbench.opening import file_sha256, open_file, read_bytes, why_unreadable
from dlbench.specs.container import ImageDescription, description_of
from dlbench.units import utc_now

_LONG_S = 120  # A Python on a file system of a cluster is slow at first.

# -P: modules come from where they are installed, not from the folder in which this is called.
_QUESTION = """
import json, os, platform, sys, sysconfig
import dlbench
from dlbench import bundled
print(json.dumps({
    "executable": sys.executable, "prefix": sys.prefix, "base_prefix": sys.base_prefix,
    "base_executable": os.path.realpath(sys._base_executable), "stdlib": sysconfig.get_path("stdlib"),
    "site": sysconfig.get_path("purelib"), "version": platform.python_version(), "machine": platform.machine(),
    "libc": " ".join(platform.libc_ver()), "dlbench": os.path.dirname(os.path.realpath(dlbench.__file__)),
    "dlbench_version": dlbench.__version__, "commit": bundled.commit(),
}))
"""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """One Python."""

    executable: Path
    prefix: Path  # Its environment.
    base_prefix: Path  # Where the interpreter was installed; the prefix, where it is no virtual environment (conda).
    base_executable: Path
    stdlib: Path
    site: Path  # Its installed packages.
    version: str
    machine: str
    libc: str
    dlbench: Path  # The package that it imports, which is elsewhere where dlbench is installed editable.
    dlbench_version: str
    commit: str

    @property
    def is_virtual(self) -> bool:
        """Whether the interpreter lies elsewhere."""
        return self.prefix != self.base_prefix

    @property
    def holds_interpreter(self) -> bool:
        """Whether an image must hold the interpreter: that of the operating system is on each node."""
        return self.base_prefix != Path("/usr")


def survey(python: str) -> Survey:
    """Asks a Python.

    Raises `EnvironmentLacksError`: it cannot be executed, or has no dlbench. `UserError`: it has no environment of its
    own.
    """
    try:
        done = subprocess.run(
            [python, "-P", "-c", _QUESTION], capture_output=True, text=True, timeout=_LONG_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentLacksError(f"--python {python}: cannot be executed: {error}") from None
    if done.returncode != 0:
        last = done.stderr.strip().rpartition("\n")[2]
        raise EnvironmentLacksError(f"--python {python}: cannot load dlbench (Python 3.11 or later is needed): {last}")
    answer = json.loads(done.stdout.strip().rpartition("\n")[2])
    texts = {key: answer.pop(key) for key in ("version", "machine", "libc", "dlbench_version", "commit")}
    fields: dict[str, Any] = {key: Path(value) for key, value in answer.items()} | texts
    found = Survey(**fields)
    if not found.is_virtual and not found.holds_interpreter:
        raise UserError(
            f"--python {python}: is the operating system's own, with its packages among the system's; make a virtual "
            "environment (python3 -m venv) and install dlbench there"
        )
    return found


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

    name: str  # In the image.
    path: Path | None = None  # Whose bytes and times it has.
    content: bytes | None = None  # Its bytes, where they differ from those of the path.
    link: str | None = None  # What it leads to, where it is a symbolic link.


@dataclass(kw_only=True)
class Contents:
    """All of an image."""

    entries: list[Entry] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)  # Folders that modules are loaded from and that are not in it.


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
        # A program of the environment: one that names its Python by a path finds it next to itself.
        content = read_bytes(path, _SCRIPT_BYTES)
        first, _, rest = content.partition(b"\n")
        own = os.fsencode(found.prefix / "bin") + b"/python"
        return Entry(name=name, path=path, content=_HEAD + rest if first.startswith(b"#!" + own) else None)
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
    """The program, its standard library, and the shared libraries next to that."""
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


SUFFIXES = (".tar", ".tar.zst", ".sqsh", ".squashfs")
_PIECE = 1 << 22
_INSIDE = "image.json"  # What the image says of itself, in it.

# Not by the times of the sources, but never: what was packed does not change.
_COMPILE = """
import json, py_compile, sys
never = py_compile.PycInvalidationMode.UNCHECKED_HASH
for source, target in json.load(sys.stdin):
    try:
        py_compile.compile(source, target, doraise=True, invalidation_mode=never)
    except Exception:
        pass
"""


class _Hashed:
    """A file that is written, and the SHA-256 of what was."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.bytes += len(data)
        return self._file.write(data)


def pack(found: Survey, file: Path, say: Callable[[str], None]) -> ImageDescription:
    """Writes the image of a Python, and its description next to it; returns the latter.

    `file`: the image; its name says its kind.
    Raises `UserError`: the name is of no kind, or a file of the environment cannot be read. `EnvironmentLacksError`:
    the program that packs this kind is not installed. `RunError`: the file cannot be written.
    """
    command = _packer(file)
    contents = contents_of(found)
    with tempfile.TemporaryDirectory(prefix="dlbench-image-") as folder:
        contents.entries += _compiled(found, contents.entries, Path(folder))
        say(f"{len(contents.entries):,} files into {file}")
        partial = file.with_name(f".{file.name}.partial")
        try:
            described = _written(found, contents, partial, command)
            partial.replace(file)
        except OSError as error:
            raise refused(error, f"{file}: cannot be written: {error.strerror or error}") from None
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
    description_of(file).write_text(described.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return described


def _packer(file: Path) -> Sequence[str]:
    """The program that a tar stream goes through; none for FILE.tar.

    Raises `UserError`: the name is of no kind. `EnvironmentLacksError`: the program is not installed.
    """
    if file.name.endswith(".tar"):
        return ()
    if file.name.endswith(".tar.zst"):
        program, words = "zstd", ["-q", "-f", "-T0", "-o", "{}", "-"]
    elif file.name.endswith((".sqsh", ".squashfs")):
        program, words = "mksquashfs", ["-", "{}", "-tar", "-noappend", "-quiet", "-no-progress", "-comp", "zstd"]
    else:
        raise UserError(f"-o {file}: its name says its kind and ends with {', '.join(SUFFIXES)}")
    if shutil.which(program) is None:
        raise EnvironmentLacksError(f"-o {file}: {program} is not installed; FILE.tar needs no other program")
    return (program, *words)


def _compiled(found: Survey, entries: Sequence[Entry], folder: Path) -> list[Entry]:
    """Compiled forms of the modules that have none: no rank writes any, and each would compile them anew."""
    names = {entry.name for entry in entries}
    tag = "cpython-" + "".join(found.version.split(".")[:2])
    wanted: list[tuple[str, Path]] = []
    for entry in entries:
        head, _, name = entry.name.rpartition("/")
        target = f"{head}/__pycache__/{name.removesuffix('.py')}.{tag}.pyc"
        if name.endswith(".py") and entry.path is not None and entry.link is None and target not in names:
            wanted.append((target, entry.path))
    order = [(str(path), str(folder / str(number))) for number, (_, path) in enumerate(wanted)]
    subprocess.run(
        [str(found.executable), "-I", "-W", "ignore", "-c", _COMPILE], input=json.dumps(order), text=True, check=True
    )
    made = [(target, folder / str(number)) for number, (target, _) in enumerate(wanted)]
    made = [(target, path) for target, path in made if path.exists()]
    for _, path in made:
        os.utime(path, (0, 0))  # so that the same environment is the same image
    return [Entry(name=target, path=path) for target, path in made]


def _written(found: Survey, contents: Contents, file: Path, command: Sequence[str]) -> ImageDescription:
    inside = {"python_version": found.version, "machine": found.machine, "libc": found.libc}
    commit = f" {found.commit}" if found.commit else ""
    inside |= {"dlbench": f"{found.dlbench_version}{commit}", "commit": found.commit}
    with _sink(file, command) as sink:
        unpacked = _stream(contents, json.dumps(inside).encode(), sink)
        sha256, size = sink.digest.hexdigest(), sink.bytes
    if command:
        sha256, size = file_sha256(file), file.stat().st_size
    return ImageDescription(
        sha256=sha256,
        bytes=size,
        unpacked_bytes=unpacked,
        files=len(contents.entries) + 1,
        created=utc_now(),
        python=str(found.executable),
        python_version=found.version,
        machine=found.machine,
        libc=found.libc,
        dlbench=inside["dlbench"],
        holds_interpreter=found.holds_interpreter,
        outside=tuple(sorted(set(contents.outside))),
    )


@contextmanager
def _sink(file: Path, command: Sequence[str]) -> Iterator[_Hashed]:
    """Where the tar stream goes; when it is closed the file is whole. Raises `RunError`: the program failed."""
    if not command:
        with file.open("wb", buffering=_PIECE) as plain:
            yield _Hashed(plain)
        return
    process = subprocess.Popen([word.format(file) for word in command], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    try:
        with suppress(BrokenPipeError):  # it has said why
            yield _Hashed(process.stdin)
    finally:
        _, said = process.communicate()
    if process.returncode != 0:
        last = said.decode(errors="replace").strip().rpartition("\n")[2]
        raise RunError(f"{command[0]} ended with {process.returncode}: {last}")


def _stream(contents: Contents, inside: bytes, sink: _Hashed) -> int:
    """Writes a tar; returns the bytes of its files. Owners and the order of folders say nothing, and are the same."""
    total = len(inside)
    with tarfile.open(mode="w|", fileobj=sink, format=tarfile.PAX_FORMAT, bufsize=_PIECE) as tar:  # type: ignore[call-overload]
        _add(tar, tarfile.TarInfo(_INSIDE), io.BytesIO(inside), len(inside))
        for entry in contents.entries:
            info = tarfile.TarInfo(entry.name)
            if entry.link is not None:
                info.type, info.linkname = tarfile.SYMTYPE, entry.link
                tar.addfile(info)
                continue
            assert entry.path is not None
            with _source(entry.path) as file:
                known = entry.path.stat()
                info.mode, info.mtime = known.st_mode & 0o755 | 0o600, int(known.st_mtime)
                size = known.st_size if entry.content is None else len(entry.content)
                _add(tar, info, file if entry.content is None else io.BytesIO(entry.content), size)
            total += size
    return total


def _source(path: Path) -> IO[bytes]:
    try:
        return open_file(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {why_unreadable(error)}") from None


def _add(tar: tarfile.TarFile, info: tarfile.TarInfo, file: IO[bytes], size: int) -> None:
    info.size = size
    tar.addfile(info, file)

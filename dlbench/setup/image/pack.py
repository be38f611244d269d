"""The contents of an image become one file, and its description beside it: FILE.tar, .tar.zst, .sqsh."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from dlbench.errors import EnvironmentLacksError, RunError, UserError, refused
from dlbench.opening import file_sha256, open_file, why_unreadable
from dlbench.setup.image.contents import Contents, Entry, contents_of
from dlbench.setup.image.survey import Survey
from dlbench.specs.container import ImageDescription, description_of
from dlbench.units import utc_now

SUFFIXES = (".tar", ".tar.zst", ".sqsh", ".squashfs")
_PIECE = 1 << 22
_INSIDE = "image.json"
"""What the image says of itself, in it."""

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
    """Writes the image of a Python, and its description beside it; returns the latter.

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

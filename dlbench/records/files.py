"""Writes files atomically: under a temporary name next to the target, synced, then renamed."""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol, cast

from dlbench.errors import RunError, UserError, refused
from dlbench.units import utf8_text

TEMPORARY_SUFFIX = ".partial"


class _Folder(Protocol):
    @property
    def path(self) -> Path: ...


class Named:
    """An attribute of a folder's class: the path of its file or folder of that name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: _Folder, owner: object = None) -> Path:
        return folder.path / self.name


class Numbered:
    """An attribute of a folder's class: a function that returns the path of a rank's or node's file by its number."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: _Folder, owner: object = None) -> Callable[[int], Path]:
        return lambda number: folder.path / self.name.format(number)


def write_atomic(path: Path, content: bytes | str, *, follow: bool = True) -> None:
    """Puts `content` at `path` as a whole, or raises RunError and leaves what was there. `follow`: folder links."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    folder = None
    try:
        # Everything else is relative to this descriptor, so a link that replaces the folder has no effect.
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
        with os.fdopen(os.open(temporary, flags, 0o666, dir_fd=folder), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        if folder is not None:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
        raise refused(error, f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        if folder is not None:
            os.close(folder)


def write_result(path: Path, content: bytes | str) -> None:
    """Writes to a path of a user: into a device or pipe (`-o /dev/null`), or as a whole; of links to the target."""
    if not is_stream(path):
        target = Path(os.path.realpath(path)) if path.is_symlink() else path
        write_atomic(target, content)
        return
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        # Not blocking, as a pipe may have no reader.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY), "wb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            if not (stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)):
                raise RunError(f"{path}: cannot be written: is neither a file nor a pipe")
            os.set_blocking(stream.fileno(), True)
            stream.write(data)
    except OSError as error:
        raise refused(error, f"{path}: cannot be written: {error.strerror or error}") from None


@contextmanager
def large_result(path: Path, content_name: str, level: int | None) -> Iterator[IO[bytes]]:
    """Opens a file `-o` to be written in pieces; it appears complete or not at all. `level`: level of gzip, or None."""
    import gzip

    if is_stream(path):
        raise UserError(f"-o {path}: is a device or a pipe; {content_name} needs a regular file")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("xb") as file:
            if level is None:
                yield file
            else:
                # Neither name nor time of the file: equal content gives equal bytes.
                with gzip.GzipFile("", "wb", level, file, mtime=0) as packed:
                    yield cast("IO[bytes]", packed)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise refused(error, f"-o {path}: cannot be written: {error.strerror or error}", UserError) from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Syncs the names in a folder to disk. Raises `OSError`: the file system refuses."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_stream(path: Path) -> bool:
    """Returns whether the path, with links followed, is neither a regular file nor a folder but exists."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes JSON; bytes that are not UTF-8 become escapes like ``\\xff``. Raises ValueError: not finite numbers."""
    text = json_text(content)
    try:
        data = text.encode()
    except UnicodeEncodeError:
        data = json_text(_in_utf8(content)).encode()
    write_atomic(path, data, follow=False)


def json_text(content: Mapping[str, Any]) -> str:
    """Returns JSON with sorted keys and a line break at the end. Raises ValueError: a number is not finite."""
    return json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def _in_utf8(content: Any) -> Any:
    if isinstance(content, str):
        return utf8_text(content)
    if isinstance(content, Mapping):
        return {_in_utf8(key): _in_utf8(value) for key, value in content.items()}
    return [_in_utf8(item) for item in content] if isinstance(content, (list, tuple)) else content

"""The one way of opening a file or a folder that somebody else may have put there.

Run folders, histories, baselines and data sets lie where colleagues write. A named pipe in place of a file would hold a
reader for ever, a device has no end, and a link leads somewhere else. Hence:

- A file is opened without waiting and read only if it is a regular one; what is read whole has a limit, which the
  caller states. What is wrong is an `UnfitFileError`, an OSError whose `strerror` says it. Every function here raises
  these two, unless it says otherwise.
- A link to a regular file is followed in data sets (`follow`): images are often links into a common store. In a run's
  folder no file is a link, and within a history neither a file nor a folder is.
- What a person names may also be a pipe, e.g. `--baseline <(git show main:baseline.json)`: `read_named`.

Files of the kernel (`/proc`, `/sys`) and of the installation are opened as usual.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE = 1 << 20
_MAX_DIGITS = len(str(-(1 << 63)))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class UnfitFileError(OSError):
    """A file that is there and is none to be read: not a regular one, a link where none may be, or too large."""

    def __init__(self, path: Path | str, why: str) -> None:
        super().__init__(errno.EINVAL, why, str(path))


def why_unreadable(error: Exception) -> str:
    """What is wrong with a file, in one line without its name."""
    if hasattr(error, "error_count"):  # pydantic's ValidationError, whose words are no person's
        return "not as dlbench writes it"
    reason = error.strerror if isinstance(error, OSError) else None
    return reason or (str(error).splitlines() or [type(error).__name__])[0]


def descriptor(path: Path | str, *, follow: bool = True, pipes: bool = False, folder: int | None = None) -> int:
    """A descriptor of a regular file, or where `pipes` says so of a pipe, for reading; whoever asks closes it.

    `folder`: a descriptor of the folder that it lies in, by which it is opened.
    """
    # Without O_NONBLOCK the opening of a pipe waits for a writer; with it a regular file is read as without.
    try:
        flags = _FILE if follow else _FILE | os.O_NOFOLLOW
        opened = os.open(path if folder is None else Path(path).name, flags, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise UnfitFileError(path, "is a link, not a regular file") from None
        if error.errno == errno.ENXIO:
            raise UnfitFileError(path, "is a socket or a device, not a regular file") from None
        raise
    mode = os.fstat(opened).st_mode
    if stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode)):
        return opened
    os.close(opened)
    raise UnfitFileError(path, f"is {kind_of(mode)}, not a regular file")


def open_file(path: Path, *, follow: bool = True) -> BufferedReader:
    """A regular file, open for reading."""
    return os.fdopen(descriptor(path, follow=follow), "rb")


def require_file(path: Path) -> None:
    """Proves that a path is a regular file, or a link to one, before a library opens it by itself."""
    os.close(descriptor(path))


def read_bytes(path: Path | str, limit: int, *, follow: bool = True, pipes: bool = False) -> bytes:
    """The whole content of a regular file, or where `pipes` says so of a pipe, of at most `limit` bytes."""
    opened = descriptor(path, follow=follow, pipes=pipes)
    status = os.fstat(opened)
    is_file = stat.S_ISREG(status.st_mode)
    at_once = min(limit, status.st_size) + 1 if is_file else _PIECE
    content = b""
    try:
        os.set_blocking(opened, True)
        while not (is_file and status.st_size > limit) and len(content) <= limit:
            part = os.read(opened, at_once)
            if not part:
                return content
            content += part
    finally:
        os.close(opened)
    raise UnfitFileError(path, f"is larger than {limit} bytes, which no such file is")


def open_inside(path: Path) -> IO[bytes]:
    """A regular file, open for reading; neither it nor its folder is a link, also if one is put there meanwhile."""
    try:
        with folder_below(path.parent.parent, path.parent.name) as folder:
            return os.fdopen(descriptor(path, follow=False, folder=folder), "rb")
    except NotADirectoryError:
        raise UnfitFileError(path.parent, "is a link or a file, not a folder") from None


def read_end(path: Path, num_bytes: int) -> bytes:
    """The last bytes of a regular file, which is no link, however large it is."""
    with open_file(path, follow=False) as file:
        file.seek(-min(num_bytes, file.seek(0, os.SEEK_END)), os.SEEK_END)
        return file.read(num_bytes)


def read_text(path: Path, limit: int) -> str:
    """The whole content of a file in UTF-8; as `read_bytes`. Raises `UnicodeDecodeError`: it is not UTF-8."""
    return read_bytes(path, limit).decode("utf-8")


def file_sha256(path: Path) -> str:
    """SHA-256 of a regular file, hexadecimal; read piece by piece."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path, limit: int, *, follow: bool = False) -> Any:
    """The value in a JSON file; as `read_bytes`, but for a link, which is not followed unless `follow` says so.

    Raises `ValueError`: it is not JSON in UTF-8, nested too deeply, or holds a text that no file can be written with.
    """
    content = read_bytes(path, limit, follow=follow)
    value = parse_json(content.decode("utf-8"))
    # Escapes such as \ud800 may stand for half a character, which UTF-8 does not have.
    if _SURROGATE.search(content):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("holds half a character (a lone surrogate)") from None
    return value


def parse_json(text: str | bytes) -> Any:
    """A value in JSON.

    Raises `ValueError`: it is none, is nested too deeply, or holds a whole number of more than 64 bits.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode(json.detect_encoding(text), "surrogatepass")
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _bounded(digits: str) -> int:
    # numpy, SQLite and struct take no more; the length comes first, since Python refuses to read thousands of digits.
    number = int(digits) if len(digits) <= _MAX_DIGITS else None
    if number is None or not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"holds a number of {len(digits.lstrip('-'))} digits, more than 64 bits")
    return number


_DECODER = json.JSONDecoder(parse_int=_bounded)  # `json.loads` makes one anew for each of a run's thousand headers.


def read_named(path: Path, limit: int) -> bytes:
    """The whole content of a file that a person named, which may be a pipe; one that nobody writes to is empty."""
    return read_bytes(path, limit, pipes=True)


def kind_of(mode: int) -> str:
    """What a path is, by its mode: `a named pipe`, `a folder`, ..."""
    kinds = (
        (stat.S_ISREG, "a file"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISLNK, "a link"),
        (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISSOCK, "a socket"),
    )
    return next((name for test, name in kinds if test(mode)), "a device")


@contextmanager
def folder_below(root: Path, *names: str, create: bool = False) -> Iterator[int]:
    """A descriptor of the folder `names` below `root`, for calls that take `dir_fd`.

    `root` itself may be a link, because a person named it. Behind it each folder is opened from the one before and
    never through a link: whoever swaps one for a link, before or meanwhile, leads nowhere.

    With `create` those that are not there are made.
    """
    opened = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names:
            if create:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=opened)
            inner = os.open(name, _FOLDER, dir_fd=opened)
            os.close(opened)
            opened = inner
        yield opened
    finally:
        os.close(opened)


def delete_below(root: Path, *names: str) -> None:
    """Deletes the folder `names` below `root` with all that is in it, following no link; what cannot go stays."""
    *parents, last = names
    try:
        with folder_below(root, *parents) as folder:
            shutil.rmtree(last, ignore_errors=True, dir_fd=folder)
    except OSError:
        return

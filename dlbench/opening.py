"""Opens files and folders that other users may have written or share: run folders, histories, baselines, data sets.

A named pipe in place of a file would block a reader, a device has no end, and a link may lead anywhere. So a file is
opened without blocking and read only if it is a regular one, up to a limit; others raise `UnfitFileError`. All
functions raise OSError only, unless documented otherwise. Links to files are followed in data sets (`follow`); in a
run's folder no file may be one, and in a history neither files nor folders. A file that the user names may be a pipe,
e.g. `--baseline <(git show main:baseline.json)`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pwd
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from dlbench.errors import IncompleteDataError

_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE = 1 << 20
_MAX_DIGITS = len(str(-(1 << 63)))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class UnfitFileError(OSError):
    """A file that exists and must not be read: not a regular one, a link that is not allowed, or too large."""

    def __init__(self, path: Path | str, why: str) -> None:
        super().__init__(errno.EINVAL, why, str(path))


def why_unreadable(error: Exception) -> str:
    """Returns the problem of a file in one line without its name."""
    if hasattr(error, "error_count"):  # pydantic's ValidationError, whose message has many lines
        return "not in the format that dlbench writes"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]


def descriptor(path: Path | str, *, follow: bool = True, pipes: bool = False, folder: int | None = None) -> int:
    """Opens a regular file, or a pipe if `pipes`, in an open `folder` if given; the caller closes the descriptor."""
    flags = _FILE
    if not follow:
        flags |= os.O_NOFOLLOW
    if folder is not None:
        path = Path(path).name
    # Without O_NONBLOCK opening a pipe waits for a writer; regular files are not affected by it.
    try:
        opened = os.open(path, flags, dir_fd=folder)
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
    """Opens a regular file for reading."""
    return os.fdopen(descriptor(path, follow=follow), "rb")


def require_file(path: Path) -> None:
    """Checks that a path is a regular file, or a link to one, before a library opens it."""
    os.close(descriptor(path))


def read_bytes(path: Path | str, limit: int, *, follow: bool = True, pipes: bool = False) -> bytes:
    """Reads the whole content of a regular file, or of a pipe if `pipes`, of at most `limit` bytes."""
    opened = descriptor(path, follow=follow, pipes=pipes)
    status = os.fstat(opened)
    is_file = stat.S_ISREG(status.st_mode)
    piece = min(limit, status.st_size) + 1 if is_file else _PIECE
    content = b""
    try:
        os.set_blocking(opened, True)
        while not (is_file and status.st_size > limit) and len(content) <= limit:
            part = os.read(opened, piece)
            if not part:
                return content
            content += part
    finally:
        os.close(opened)
    raise UnfitFileError(path, f"is larger than {limit} bytes, the limit of such files")


def open_inside(path: Path) -> IO[bytes]:
    """Opens a regular file for reading; neither it nor its folder may be a link, even if replaced meanwhile."""
    try:
        with folder_below(path.parent.parent, path.parent.name) as folder:
            return os.fdopen(descriptor(path, follow=False, folder=folder), "rb")
    except NotADirectoryError:
        raise UnfitFileError(path.parent, "is a link or a file, not a folder") from None


def read_end(path: Path, num_bytes: int) -> bytes:
    """Reads the last bytes of a regular file of any size, which must not be a link."""
    with open_file(path, follow=False) as file:
        file.seek(-min(num_bytes, file.seek(0, os.SEEK_END)), os.SEEK_END)
        return file.read(num_bytes)


def read_text(path: Path, limit: int) -> str:
    """Reads a file in UTF-8, see `read_bytes`. Raises `UnicodeDecodeError`: it is not UTF-8."""
    return read_bytes(path, limit).decode("utf-8")


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a regular file, hexadecimal."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path, limit: int, *, follow: bool = False) -> Any:
    """Reads a JSON file of at most `limit` bytes; links are not followed by default.

    Raises `ValueError`: it is not JSON in UTF-8, nested too deeply, or has text that cannot be written in UTF-8.
    """
    content = read_bytes(path, limit, follow=follow)
    value = parse_json(content.decode("utf-8"))
    # Escapes such as \ud800 may be half a character, which UTF-8 does not have.
    if _SURROGATE.search(content):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("holds half a character (a lone surrogate)") from None
    return value


def parse_json(text: str | bytes) -> Any:
    """Parses JSON. Raises `ValueError`: it is invalid, nested too deeply, or has an integer of more than 64 bits."""
    try:
        if isinstance(text, bytes):
            text = text.decode(json.detect_encoding(text), "surrogatepass")
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _bounded(digits: str) -> int:
    # The limit of numpy, SQLite and struct; the length is checked first, because Python refuses thousands of digits.
    if len(digits) <= _MAX_DIGITS:
        number = int(digits)
        if -(1 << 63) <= number < 1 << 63:
            return number
    raise ValueError(f"has a number of {len(digits.lstrip('-'))} digits, more than 64 bits")


_DECODER = json.JSONDecoder(parse_int=_bounded)  # One for all: `json.loads` would make one for each of many headers.


def read_named(path: Path, limit: int) -> bytes:
    """Reads a file that the user named, which may be a pipe; a pipe without a writer is empty."""
    return read_bytes(path, limit, pipes=True)


def kind_of(mode: int) -> str:
    """Returns the kind of a path from its mode: `a named pipe`, `a folder`, ..."""
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
    """Opens the folder `names` below `root` and yields its descriptor, for calls with `dir_fd`.

    Only `root` may be a link, because the user named it; none is followed below, even if replaced meanwhile.
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
    """Deletes the folder `names` below `root` with its content as far as possible, without following links."""
    *parents, last = names
    try:
        with folder_below(root, *parents) as folder:
            shutil.rmtree(last, ignore_errors=True, dir_fd=folder)
    except OSError:
        return


class WithheldError(IncompleteDataError):
    """A file of another user that this one may not read, which is no damage."""


def may_not_read(path: Path, error: OSError) -> IncompleteDataError:
    """Returns the error of a file that may not be read, of another user or of this one."""
    owner = other_owner(path)
    if owner:
        return WithheldError(f"{path.parent}: owned by user {owner}, not readable")
    return IncompleteDataError(f"{path}: cannot be read: {error.strerror}")


def user_name(uid: int | None = None) -> str:
    """Returns the login name of a user (default: that of this process), or the number if there is none."""
    if uid is None:
        uid = os.geteuid()
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def other_owner(path: Path) -> str:
    """Returns the owner of a path, or of the nearest accessible folder above; empty if it is this user."""
    for candidate in (path, *path.parents):
        try:
            uid = candidate.stat().st_uid
        except OSError:
            continue
        return "" if uid == os.geteuid() else user_name(uid)
    return ""


def is_shared(folder: Path) -> bool:
    """Returns whether a folder is shared: its files belong to its group (setgid), which may write there."""
    try:
        mode = folder.stat().st_mode
    except OSError:
        return False
    group_bits = stat.S_ISGID | stat.S_IRGRP | stat.S_IWGRP | stat.S_IXGRP
    return mode & group_bits == group_bits


def share(folder: Path) -> None:
    """Lets the group read files of this process in a shared folder, by the umask, which jobs inherit from sbatch."""
    if is_shared(folder):
        os.umask(os.umask(0o077) & ~0o050)


def make_shared(root: Path, folder: Path) -> None:
    """Makes a folder in a folder of runs; in a shared one the group may write into it, whatever the umask."""
    try:
        folder.mkdir()
    except FileExistsError:
        return
    if is_shared(root):
        folder.chmod(stat.S_IMODE(root.stat().st_mode))

"""Folders and files that root may believe: nobody but root and the caller can have written or replaced them.

As OpenSSH checks the folders above a key (`safe_path` in its misc.c): owner and mode of each folder up to the root. A
folder with the sticky bit (/tmp) may be written by all, because nobody can replace in it what is not theirs.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from dlbench.errors import UserError
from dlbench.opening import open_file

MAX_STATE_BYTES = 2**20


def check_folder(folder: Path) -> None:
    """Refuses a folder, there or yet to be made, that somebody else could write or replace.

    Args:
        folder: absolute.

    Raises:
        UserError: names the folder, or the one above it, that is not to be trusted, and why.
    """
    if folder.is_symlink():
        raise UserError(f"a box cannot be kept in {folder}: it is a symbolic link; name the folder itself")
    try:
        # As written too, because a link on the way decides where it leads.
        for path in (folder, Path(os.path.realpath(folder))):
            for part in reversed((path, *path.parents)):
                _check_part(folder, part, is_last=part == path)
    except OSError as error:
        raise UserError(f"a box cannot be kept in {folder}: {error.strerror}") from None


def check_entries(folder: Path) -> None:
    """Refuses a folder that holds a link, or anything that somebody else owns or may write.

    Raises:
        UserError: names it.
        OSError: the folder cannot be read.
    """
    for entry in sorted(folder.iterdir()):
        found = entry.lstat()
        if stat.S_ISLNK(found.st_mode):
            raise UserError(f"a box cannot be kept in {folder}: {entry} is a symbolic link, which no box makes")
        _refuse(folder, entry, found.st_uid, found.st_mode)


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it that are missing, writable by the caller alone whatever the umask."""
    for part in reversed((folder, *folder.parents)):
        if not part.exists():
            part.mkdir(mode=0o755, exist_ok=True)


def write_new(path: Path, content: str, mode: int = 0o644) -> None:
    """Writes a file anew: never into one that is there, never through a link.

    Raises:
        OSError: the file system refuses.
    """
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, mode), "w", encoding="utf-8") as file:
        file.write(content)


def read_trusted(path: Path) -> str:
    """A file that only root or the caller can have written.

    Raises:
        UserError: it is a link, somebody else's or writable by others, or far too long.
        FileNotFoundError: there is none.
        OSError: it is no regular file, or cannot be read.
        ValueError: it is no text.
    """
    if path.is_symlink():
        raise UserError(f"{path} is a symbolic link; a box writes a file there")
    with open_file(path, follow=False) as file:
        found = os.fstat(file.fileno())
        _refuse(path.parent, path, found.st_uid, found.st_mode)
        content = file.read(MAX_STATE_BYTES + 1)
    if len(content) > MAX_STATE_BYTES:
        raise UserError(f"{path} is over {MAX_STATE_BYTES} bytes long; a box's state is not")
    return content.decode("utf-8")


def _check_part(folder: Path, part: Path, *, is_last: bool) -> None:
    try:
        found = part.lstat()
    except FileNotFoundError:
        return  # it will be made, by this process
    # A link's mode says nothing, and in a folder with the sticky bit nobody replaces what is not theirs.
    is_open_to_all = stat.S_ISLNK(found.st_mode) or (found.st_mode & stat.S_ISVTX and not is_last)
    _refuse(folder, part, found.st_uid, found.st_mode & ~0o022 if is_open_to_all else found.st_mode)


def _refuse(folder: Path, path: Path, owner: int, mode: int) -> None:
    if owner not in (0, os.geteuid()):
        raise UserError(
            f"a box in {folder} cannot be trusted: {path} belongs to user {owner}, who could change what the box does "
            "as root; name a folder that root alone can write, such as a new one in /tmp"
        )
    if mode & 0o022 and not stat.S_ISSOCK(mode):
        raise UserError(
            f"a box in {folder} cannot be trusted: others may write {path} (mode {stat.S_IMODE(mode):04o}) and so "
            "change what the box does as root; take that away (chmod go-w), or name a new folder"
        )

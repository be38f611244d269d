"""Folders of runs that several people share: whose they are, and who may read what is put there."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

from dlbench.errors import IncompleteDataError


class WithheldError(IncompleteDataError):
    """A file is another user's, who does not let this one read it: nothing is damaged."""


def may_not_read(path: Path, error: OSError) -> IncompleteDataError:
    """The error of a file that may not be read: another user's, or this user's own."""
    if owner := other_owner(path):
        return WithheldError(f"{path.parent}: of user {owner}, not readable")
    return IncompleteDataError(f"{path}: cannot be read: {error.strerror}")


def user_name(uid: int | None = None) -> str:
    """The login name of a user, else the number; of this process, if none is named."""
    number = os.geteuid() if uid is None else uid
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def other_owner(path: Path) -> str:
    """Who owns a path, or the nearest folder above that can be looked at; empty if it is this user."""
    for one in (path, *path.parents):
        try:
            uid = one.stat().st_uid
        except OSError:
            continue
        return "" if uid == os.geteuid() else user_name(uid)
    return ""


def is_shared(folder: Path) -> bool:
    """Whether a folder is its group's: what is made in it belongs to the group (setgid), which may write there."""
    try:
        mode = folder.stat().st_mode
    except OSError:
        return False
    wanted = stat.S_ISGID | stat.S_IRGRP | stat.S_IWGRP | stat.S_IXGRP
    return mode & wanted == wanted


def share(folder: Path) -> None:
    """Lets the group read what this process, and jobs that it submits, put into a folder that is the group's.

    Elsewhere the umask stays as it is. Slurm gives a job the umask of its sbatch.
    """
    if is_shared(folder):
        os.umask(os.umask(0o077) & ~0o050)


def make_shared(root: Path, folder: Path) -> None:
    """Makes a folder below one of all runs; in a shared one the group may write into it, whatever the umask.

    Raises `OSError`: it cannot be made.
    """
    try:
        folder.mkdir()
    except FileExistsError:
        return
    if is_shared(root):
        folder.chmod(stat.S_IMODE(root.stat().st_mode))

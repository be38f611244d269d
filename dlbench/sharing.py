"""Folders of runs that several users share: owners and permissions."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

from dlbench.errors import IncompleteDataError


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
    """Makes a folder in a folder of runs; in a shared one the group may write into it, whatever the umask.

    Raises `OSError`: it cannot be made.
    """
    try:
        folder.mkdir()
    except FileExistsError:
        return
    if is_shared(root):
        folder.chmod(stat.S_IMODE(root.stat().st_mode))

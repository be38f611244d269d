"""Files and folders that somebody else may have put there: reached through no link, named if they are none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def folder_below(root: Path, *names: str, create: bool = False) -> Iterator[int]:
    """A descriptor of the folder `names` below `root`, for calls that take `dir_fd`.

    `root` itself may be a link, because a person named it. Behind it each folder is opened from the one before and
    never through a link: whoever swaps one for a link, before or meanwhile, leads nowhere.

    Args:
        root: where to begin.
        names: one folder each.
        create: make those that are not there.

    Raises:
        OSError: one of them is no folder (ENOTDIR), is not there, or may not be opened.
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

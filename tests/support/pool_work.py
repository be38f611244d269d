"""What worker processes do in tests of the pool; imports little, because they import it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from dlbench.errors import UserError

"""Bytes that no pipe holds."""


def square(item: int) -> int:
    return item * item


def process_of(_item: int) -> int:
    return os.getpid()


def together(folder: Path, _item: int) -> int:
    """Which process did it; none is done before two have begun."""
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.01)
    return os.getpid()


def wait_for_go(folder: Path, item: int) -> int:
    """Item 0 is not done before there is a file `go`."""
    while item == 0 and not (folder / "go").exists():
        time.sleep(0.01)
    return item


def begin(folder: Path, item: int) -> int:
    (folder / str(item)).touch()
    return item


def begin_and_stay(folder: Path, item: int, but: int | None = None) -> None:
    begin(folder, item)
    if item != but:
        time.sleep(600)


def fail(how: str, item: int, home: int | None = None) -> object:
    """Item 3 fails; where `home` is the caller's process, any of another process."""
    if os.getpid() == home:
        time.sleep(0.1)
        return item
    if item != 3 and home is None:
        return item
    if how == "user":
        raise UserError("source.jpg is no JPEG")
    if how == "system":
        raise OSError(5, "Input/output error", "/mnt/source")
    if how == "defect":
        raise ZeroDivisionError("division by zero")
    if how == "ends":
        os._exit(7)
    os.kill(os.getpid(), signal.SIGKILL)
    return None

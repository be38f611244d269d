"""What worker processes do in tests of the pool; imports little, because they import it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from dlbench.errors import UserError

LARGE = 8 << 20
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


def end_elsewhere(home: int, item: int) -> int:
    if os.getpid() != home:
        os._exit(7)
    time.sleep(0.1)
    return item


def wait_for_go(folder: Path, item: int) -> int:
    """Item 0 is not done before there is a file `go`."""
    while item == 0 and not (folder / "go").exists():
        time.sleep(0.01)
    return item


def begin(folder: Path, item: int) -> int:
    (folder / str(item)).touch()
    return item


def begin_and_stay(folder: Path, item: int) -> None:
    begin(folder, item)
    time.sleep(600)


def stay_after_sigterm(folder: Path, item: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    begin(folder, item)
    if item:
        time.sleep(600)


def fail(how: str, item: int) -> object:
    if item != 3:
        return item
    if how == "user":
        raise UserError("source.jpg is no JPEG")
    if how == "system":
        raise OSError(5, "Input/output error", "/mnt/source")
    if how == "defect":
        raise ZeroDivisionError("division by zero")
    if how == "unsendable":
        return threading.Lock()
    if how == "ends":
        os._exit(7)
    os.kill(os.getpid(), signal.SIGKILL)
    return None


def die_answering(folder: Path, item: int) -> bytes:
    """Item 0 sends more than a pipe holds and is killed meanwhile."""
    wait_for_go(folder, item)
    if item == 0:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        return bytes(LARGE)
    return b""


class _Unreadable:
    def __reduce__(self) -> tuple[object, ...]:
        return int, ("not to be unpacked",)


def unreadable(answered: Path, starter: int, item: int) -> object:
    """Of another process, for which the starter waits, an answer that its reader cannot unpack."""
    if os.getpid() != starter:
        answered.touch()
        return _Unreadable()
    while not answered.exists():
        time.sleep(0.01)
    return item


def echo(item: bytes) -> bytes:
    return item

"""A rank's status in memory that it shares with its supervisor, which writes it when the rank ends without a word.

While a rank trains it touches no file: each step and each second it notes here how far it is. If it says nothing before
it ends (a signal, a crash in a library), its supervisor writes the file in its place, with the last step.

Loads nothing but the standard library's smallest parts: every rank is started by a process that imports this.
"""

# pathlib would double the time that the supervisor of a rank takes to start.
# ruff: noqa: PTH115

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import MutableMapping
from contextlib import suppress
from datetime import UTC, datetime

VARIABLE = "DLBENCH_STATUS_FD"  # Tells a rank the descriptor of the memory.

STEP, TIME = b"@step@", b"@time@"  # Stand in the text for what is noted next to it.

_EPOCH_S = time.time() - time.monotonic()
_SIZE = 1 << 16
_NAME = "dlbench-status"
# Last step begun, seconds since 1970 of the last sign of life, bytes of path and text (0: nothing is to be written).
_STEP, _TIME, _LENGTHS = struct.Struct("=q"), struct.Struct("=d"), struct.Struct("=II")
_STEP_AT, _TIME_AT, _LENGTHS_AT, _TEXT_AT = 0, 8, 16, 24


def wall_time() -> float:
    """Seconds since 1970, counted on from the start of this process.

    What a process says later is so never older than what it said before, though somebody sets the clock meanwhile.
    """
    return _EPOCH_S + time.monotonic()


class FinalStatus:
    """The memory; made by the supervisor, found by the rank. `descriptor`: of a file in memory."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _SIZE)

    @classmethod
    def make(cls) -> FinalStatus:
        """A new one, which programs that are started inherit.

        Raises `OSError`: there is no memory, or no descriptor.
        """
        descriptor = os.memfd_create(_NAME, 0)
        os.ftruncate(descriptor, _SIZE)
        return cls(descriptor)

    @classmethod
    def found(cls, variables: MutableMapping[str, str]) -> FinalStatus | None:
        """That of this process's supervisor; None without one. No program that this one starts will find it."""
        number = variables.pop(VARIABLE, "")
        with suppress(OSError, ValueError):
            if number.isdigit() and os.readlink(f"/proc/self/fd/{number}").startswith(f"/memfd:{_NAME}"):
                os.set_inheritable(int(number), False)
                return cls(int(number))
        return None

    def step(self, number: int) -> None:
        """A step begins."""
        _STEP.pack_into(self._memory, _STEP_AT, number)
        self.lives()

    def lives(self) -> None:
        """A sign of life."""
        _TIME.pack_into(self._memory, _TIME_AT, wall_time())

    def say(self, path: bytes, text: bytes) -> None:
        """What is to be written, and where, if this process ends without a word; `STEP` and `TIME` are filled in."""
        self.clear()
        if len(path) + len(text) <= _SIZE - _TEXT_AT:
            self._memory[_TEXT_AT : _TEXT_AT + len(path) + len(text)] = path + text
            _LENGTHS.pack_into(self._memory, _LENGTHS_AT, len(path), len(text))

    def clear(self) -> None:
        """Nothing is to be written."""
        _LENGTHS.pack_into(self._memory, _LENGTHS_AT, 0, 0)

    def left(self) -> tuple[bytes, bytes] | None:
        """Path and content of the file that the rank did not write; None where it said all."""
        path, text = _LENGTHS.unpack_from(self._memory, _LENGTHS_AT)
        if not text or path + text > _SIZE - _TEXT_AT:
            return None
        whole = self._memory[_TEXT_AT : _TEXT_AT + path + text]
        at = datetime.fromtimestamp(_TIME.unpack_from(self._memory, _TIME_AT)[0], UTC)
        step = _STEP.unpack_from(self._memory, _STEP_AT)[0]
        filled = whole[path:].replace(STEP, str(step).encode())
        return whole[:path], filled.replace(TIME, at.strftime("%Y-%m-%dT%H:%M:%S.%fZ").encode())

    def write(self, folder: int) -> None:
        """Writes that file, whole or not at all; a folder that is gone, or a disk that is full, is passed over.

        `folder`: of the run, open since before the rank began: what stands at its path by now may be another one's.
        """
        left = self.left()
        if left is None:
            return
        path, content = left
        name = path.rpartition(b"/")[2]
        temporary = b"." + name + b".%d.partial" % os.getpid()
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(temporary, flags | os.O_EXCL, 0o666, dir_fd=folder)
            try:
                os.write(file, content)
                os.fsync(file)
            finally:
                os.close(file)
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)

"""A rank's status in memory shared with its supervisor, which writes the status file if the rank crashes.

While a rank trains it writes no file: each step and each second it updates its progress here. If it ends without
writing its status (a signal, a crash in a library), its supervisor writes the file with the last step.

Imports only small modules of the standard library: every rank is started by a process that imports this.
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

VARIABLE = "DLBENCH_STATUS_FD"  # Environment variable with the descriptor of the memory.

STEP, TIME = b"@step@", b"@time@"  # Placeholders in the text for the last step and time.

_EPOCH_S = time.time() - time.monotonic()
_SIZE = 1 << 16
_NAME = "dlbench-status"
# Last started step, seconds since 1970 of the last update, bytes of path and text (0: no file is to be written).
_STEP, _TIME, _LENGTHS = struct.Struct("=q"), struct.Struct("=d"), struct.Struct("=II")
_STEP_AT, _TIME_AT, _LENGTHS_AT, _TEXT_AT = 0, 8, 16, 24


def wall_time() -> float:
    """Returns the seconds since 1970, by a monotonic clock since the start of this process.

    Times of a process never decrease, even if the system clock is set meanwhile.
    """
    return _EPOCH_S + time.monotonic()


class FinalStatus:
    """The shared memory; made by the supervisor, opened by the rank. `descriptor`: of a file in memory."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _SIZE)

    @classmethod
    def make(cls) -> FinalStatus:
        """Makes the memory; child programs inherit it. Raises `OSError`: there is no memory, or no descriptor."""
        descriptor = os.memfd_create(_NAME, 0)
        os.ftruncate(descriptor, _SIZE)
        return cls(descriptor)

    @classmethod
    def found(cls, variables: MutableMapping[str, str]) -> FinalStatus | None:
        """Opens the memory of this process's supervisor; None without one. Child programs do not inherit it."""
        number = variables.pop(VARIABLE, "")
        with suppress(OSError, ValueError):
            if number.isdigit() and os.readlink(f"/proc/self/fd/{number}").startswith(f"/memfd:{_NAME}"):
                os.set_inheritable(int(number), False)
                return cls(int(number))
        return None

    def step(self, number: int) -> None:
        """Records the start of a step."""
        _STEP.pack_into(self._memory, _STEP_AT, number)
        self.lives()

    def lives(self) -> None:
        """Records the time, as a sign that the rank is alive."""
        _TIME.pack_into(self._memory, _TIME_AT, wall_time())

    def say(self, path: bytes, text: bytes) -> None:
        """Sets the file to write if this process crashes; `STEP` and `TIME` in the text are replaced."""
        self.clear()
        if len(path) + len(text) <= _SIZE - _TEXT_AT:
            self._memory[_TEXT_AT : _TEXT_AT + len(path) + len(text)] = path + text
            _LENGTHS.pack_into(self._memory, _LENGTHS_AT, len(path), len(text))

    def clear(self) -> None:
        """Sets that no file is to be written."""
        _LENGTHS.pack_into(self._memory, _LENGTHS_AT, 0, 0)

    def left(self) -> tuple[bytes, bytes] | None:
        """Returns path and content of the file that the rank did not write; None if no file is to be written."""
        path, text = _LENGTHS.unpack_from(self._memory, _LENGTHS_AT)
        if not text or path + text > _SIZE - _TEXT_AT:
            return None
        path_and_text = self._memory[_TEXT_AT : _TEXT_AT + path + text]
        at = datetime.fromtimestamp(_TIME.unpack_from(self._memory, _TIME_AT)[0], UTC)
        step = _STEP.unpack_from(self._memory, _STEP_AT)[0]
        filled = path_and_text[path:].replace(STEP, str(step).encode())
        return path_and_text[:path], filled.replace(TIME, at.strftime("%Y-%m-%dT%H:%M:%S.%fZ").encode())

    def write(self, folder: int) -> None:
        """Writes that file atomically; a missing folder or a full disk is ignored.

        `folder`: descriptor of the run's folder, opened before the rank started: its path may have been replaced.
        """
        missing_file = self.left()
        if missing_file is None:
            return
        path, content = missing_file
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

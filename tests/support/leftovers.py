"""What a command leaves behind: processes, names in /dev/shm, and files in its temporary folder.

    with Leftovers() as leftovers:
        run = subprocess.Popen([...], env=leftovers.environment)
        ...                        # harm is done, the run ends
        assert leftovers.within() == []

`environment` marks everything that is started with it, at any depth and in any session, and gives it a temporary folder
of its own: other tests on the same machine do not disturb. `within` returns nothing as soon as nothing is left, or
after so many seconds one line for each thing that is: what is killed needs a core to end, which others may have. Names
in /dev/shm carry no mark: one that is new and that no living foreign process maps or holds open counts. The end of the
`with` kills what was left and removes it, so that a test that fails leaves nothing to the next.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_MARK = "DLBENCH_TEST_MARK"
_LIBRARIES = ("sem.mp-", "psm_", "torch_", "vader_segment.", "sm_segment.", "nccl-", "dlb-")
"""How names begin in /dev/shm that libraries and dlbench choose."""


class Leftovers:
    """What was there before, and what is new since.

    Args:
        base: the environment that the mark is added to; by default that of this process.
    """

    def __init__(self, base: Mapping[str, str] = os.environ) -> None:
        self._mark = f"{_MARK}={secrets.token_hex(8)}"
        # Short: names of Unix sockets below it have 107 characters in all.
        self.folder = Path(tempfile.mkdtemp(prefix="left-", dir="/tmp"))
        name, _, value = self._mark.partition("=")
        self.environment = {**base, name: value, "TMPDIR": str(self.folder)}
        self._names = _names()

    def processes(self) -> dict[int, str]:
        """Number and command line of each living process with the mark; of a zombie, none."""
        found = {}
        for pid in _pids():
            with suppress(OSError):
                if self._mark.encode() in (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0"):
                    words = (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[pid] = words.decode(errors="replace").strip()
        return found

    def shared_memory(self) -> list[str]:
        """New names in /dev/shm that no living foreign process uses."""
        new = _names() - self._names
        if not new:
            return []
        own = self.processes()
        used: set[str | int] = {0}  # gone since
        used |= {one for pid in _pids() if pid not in own for one in _used(pid)}
        return sorted(name for name in new - used if _inode(name) not in used)

    def files(self) -> list[str]:
        found: list[Path] = []
        for at, folders, files in os.walk(self.folder):  # which passes over what goes meanwhile
            found += [Path(at, name) for name in (*folders, *files)]
        return sorted(str(path.relative_to(self.folder)) for path in found)

    def now(self, *, files: bool = True) -> list[str]:
        """One line for each thing that is left at this moment; of the temporary folder, if `files` count."""
        processes = [f"process {pid} ({_state(pid)}): {words}" for pid, words in self.processes().items()]
        names = [f"{SHARED_MEMORY}/{name}" for name in self.shared_memory()]
        return processes + names + [f"temporary {name}" for name in self.files() if files]

    def within(self, seconds: float = 20.0, *, files: bool = True) -> list[str]:
        """What is left after so many seconds, or nothing as soon as nothing is."""
        deadline = time.monotonic() + seconds
        while (left := self.now(files=files)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def __enter__(self) -> Leftovers:
        return self

    def __exit__(self, *error: object) -> None:
        deadline = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for name in self.shared_memory():
            if not name.startswith(_LIBRARIES):  # perhaps somebody's data
                continue
            path = SHARED_MEMORY / name
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.rmtree(self.folder, ignore_errors=True)


def _names() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()}


def _inode(name: str) -> int:
    with suppress(OSError):
        return (SHARED_MEMORY / name).lstat().st_ino
    return 0


def interrupt(words: Sequence[str], number: int, folder: Path, *, processes: int) -> None:
    """Starts dlbench in an empty folder, ends it by a signal when it has so many processes, and finds nothing left."""
    with Leftovers() as leftovers:
        command = [sys.executable, "-P", "-m", "dlbench", *words]
        process = subprocess.Popen(command, cwd=folder, env=leftovers.environment, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 60
        while len(leftovers.processes()) < processes and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(number)
        _, said = process.communicate(timeout=120)
        assert process.returncode == 130
        assert said.decode().splitlines()[-1] == "dlbench: interrupted"
        assert leftovers.within() == []
        assert list(folder.iterdir()) == []


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())


def _state(pid: int) -> str:
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return "gone"


def _used(pid: int) -> Iterator[str | int]:
    """What a process maps or holds open in /dev/shm: inodes, and the first part of the names.

    glibc gives a semaphore its name only after it was mapped: in the maps of the process that made it, it has another.
    """
    paths = []
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            fields = line.split(None, 5)
            if len(fields) == 6 and fields[5].startswith(f"{SHARED_MEMORY}/"):
                yield int(fields[4])
                paths.append(fields[5])
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                paths.append(str(Path(entry.path).readlink()))
    for path in paths:
        if path.startswith(f"{SHARED_MEMORY}/"):
            yield Path(path).relative_to(SHARED_MEMORY).parts[0]

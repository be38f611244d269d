"""A file system that reads no faster than asked: a parallel file system beside a node's own disk, on one machine.

    with slow_storage(bytes_per_s=20e6, size_bytes=200 << 20) as shared:
        fill(shared.path)
        shared.drop_caches()
        ...                        # cold reads below shared.path come at 20 MB/s in all

An ext4 file system in memory, on a loop device that the blkio controller (cgroup v1) throttles for all processes of
this process's cgroup: those that it starts, too. Writing is not throttled, nor is what the page cache has. A guard
process unmounts it also where the test is killed.

`calls_in` says how often ranks call the file system that their run's folder is on, as strace(1) of them tells it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dlbench.errors import RunError
from dlbench.records.folder import RunFolder
from dlbench.records.rows.steps import read_steps
from dlbench.records.scan import Run
from tests.slurm_box import host

STRACE = ("strace", "-f", "-qq", "-y", "-ttt", "-e", "trace=%file", "-e", "signal=none")
_CALL = re.compile(r"^\d+ +(\d+\.\d+) (\w+)\((.*)$")
_FOLDER = re.compile(r"(?:AT_FDCWD|\d+)<([^>]*)>")
_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')
__all__ = ["NoSlowStorageError", "SlowStorage", "slow_storage", "why_no_storage"]
MKFS = ["mkfs.ext4", "-q", "-F", "-m0", "-O", "^has_journal"]
CONTROLLER = Path("/sys/fs/cgroup/blkio")
_READ_LIMIT = "blkio.throttle.read_bps_device"
_GUARD = """
import os, subprocess, sys
mount, device, limit, number = sys.argv[1:]
sys.stdin.buffer.read()
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
with open(limit, "w") as file:
    file.write(f"{number} 0")
if subprocess.run(["umount", mount], **quiet).returncode:
    subprocess.run(["umount", "-l", mount], **quiet)
subprocess.run(["losetup", "-d", device], **quiet)
os.rmdir(mount)
"""


def calls_in(trace: Path, shared: Sequence[Path]) -> list[tuple[float, str, str]]:
    """Time (seconds since 1970), call and path of each call on one of the folders."""
    roots = tuple(f"{root}/" for root in shared)
    found = []
    for line in trace.read_text(encoding="utf-8", errors="replace").splitlines():
        told = _CALL.match(line)
        if told is None:
            continue
        for path in _paths(told[3].partition(", [")[0] if told[2].startswith("execve") else told[3]):
            if f"{path}/".startswith(roots):
                found.append((float(told[1]), told[2], path))
                break
    return found


def _paths(arguments: str) -> Iterable[str]:
    """Absolute paths of a call's arguments; a relative one belongs to the folder that stands before it."""
    folder = _FOLDER.search(arguments)
    texts = _TEXT.findall(arguments)
    for text in texts or [""]:
        yield text if text.startswith("/") else os.path.normpath(f"{folder[1] if folder else ''}/{text}")


def periods(run: Run, rank: int) -> tuple[float, float, float]:
    """When a rank's first step began, and its first measured one, and when the last ended: seconds since 1970."""
    # The trace has the clock of the day, steps have CLOCK_MONOTONIC; one machine has all nodes.
    offset_s = time.time() - time.monotonic()
    steps = read_steps(RunFolder(run.folder.path).steps(rank)).steps
    measured = steps[steps["warmup"] == 0]
    end_ns = measured["start_ns"][-1] + measured["step_ns"][-1]
    first, begin, end = (float(ns) / 1e9 + offset_s for ns in (steps["start_ns"][0], measured["start_ns"][0], end_ns))
    return first, begin, end


def why_no_storage() -> str | None:
    """Why this machine cannot have throttled storage, in a line; None where it can."""
    if os.geteuid():
        return "a throttled file system needs root"
    if not Path("/dev/loop-control").exists():
        return "a throttled file system needs loop devices: no /dev/loop-control"
    if not (CONTROLLER / "blkio.throttle.read_bps_device").exists():
        return f"a throttled file system needs the blkio controller of cgroup v1: nothing of it in {CONTROLLER}"
    return None


class NoSlowStorageError(Exception):
    """This machine cannot throttle a file system; `str` says why, in a line."""


class SlowStorage:
    """A mounted file system with a limit on reading."""

    def __init__(self, path: Path, device: str) -> None:
        self.path = path
        """The mount point."""
        self._device = device

    def drop_caches(self) -> None:
        """Makes every byte of it cold, contents and names; caches of other file systems stay where that is possible."""
        os.sync()
        try:
            host.call(["umount", str(self.path)])
        except RunError:
            # Somebody has a file open: what is not in use goes, on all file systems.
            Path("/proc/sys/vm/drop_caches").write_text("3")
            return
        _mount(self._device, self.path)


@contextmanager
def slow_storage(bytes_per_s: float, size_bytes: int) -> Iterator[SlowStorage]:
    """A new, empty file system whose cold reads come at `bytes_per_s` in all; gone at the end.

    Args:
        bytes_per_s: limit on reading, over all processes together.
        size_bytes: of the file system, in memory as far as it is filled; ext4 keeps a few per cent for itself.

    Raises:
        NoSlowStorageError: this machine cannot have one.
    """
    if (reason := why_no_storage()) is not None:
        raise NoSlowStorageError(reason)
    path = Path(tempfile.mkdtemp(prefix="slow-", dir="/tmp"))
    try:
        device = _loop_device(size_bytes)
        try:
            # Complete: nothing is written to it later in the background.
            host.call([*MKFS, "-E", "lazy_itable_init=0", device])
            _mount(device, path)
        except RunError:
            host.call(["losetup", "-d", device])
            raise
    except BaseException as error:
        path.rmdir()
        if isinstance(error, RunError):
            raise NoSlowStorageError(str(error)) from None
        raise
    number = Path("/sys/block", Path(device).name, "dev").read_text().strip()
    words = [str(path), device, str(_cgroup() / _READ_LIMIT), number]
    guard = subprocess.Popen(
        # A session of its own: what ends the test by its group does not end the guard.
        [sys.executable, "-I", "-c", _GUARD, *words],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        (_cgroup() / _READ_LIMIT).write_text(f"{number} {int(bytes_per_s)}")
        yield SlowStorage(path, device)
    finally:
        guard.communicate()


def _loop_device(size_bytes: int) -> str:
    """A loop device on memory that no name leads to, and that is freed with the device."""
    memory = os.memfd_create("slow-storage")
    try:
        os.truncate(memory, size_bytes)
        return _attached(f"/proc/self/fd/{memory}", memory)
    finally:
        os.close(memory)


def _cgroup() -> Path:
    """This process's cgroup of the blkio controller."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "blkio" in controllers.split(","):
            return CONTROLLER / path.lstrip("/")
    return CONTROLLER


def _attached(backing: str, descriptor: int) -> str:
    """A new loop device on a file, whose path names a descriptor. Raises `RunError`: there is none to be had."""
    for attempt in range(5):
        try:
            return host.call(["losetup", "--find", "--show", backing], pass_fds=[descriptor]).strip()
        except RunError:
            if attempt == 4:  # else another process took the free one that was found
                raise
    raise AssertionError


def _mount(device: str, path: Path) -> None:
    """Mounts a device without noting when files were read."""
    host.call(["mount", "-o", "noatime,nodev,nosuid", device, str(path)])

"""A file system that reads and writes no faster than asked: a parallel one beside a node's own disk, on one machine.

ext4 on a loop device, which the blkio controller (cgroup v1) throttles for the processes of one cgroup together. What
the page cache has is not throttled, nor is writing back from it: cold reads and direct writes are.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dlbench.errors import EnvironmentLacksError, RunError, UserError
from dlbench.jobs.box import host

CONTROLLER = Path("/sys/fs/cgroup/blkio")
_RATE = re.compile(r"([1-9]\d{0,5})(k|M|G)B/s")
_FACTOR = {"k": 10**3, "M": 10**6, "G": 10**9}
_MKFS = ["mkfs.ext4", "-q", "-F", "-m0", "-O", "^has_journal"]


def parse_rate(text: str) -> int:
    """Bytes a second of a rate such as ``10MB/s``.

    Raises:
        UserError: it is none.
    """
    match = _RATE.fullmatch(text)
    if match is None:
        raise UserError(f"{text!r} is no rate of a file system: write a number and kB/s, MB/s or GB/s, e.g. 10MB/s")
    return int(match[1]) * _FACTOR[match[2]]


def why_not() -> str | None:
    """Why this machine cannot have throttled storage, in a line; None where it can."""
    if os.geteuid():
        return "a throttled file system needs root"
    if not Path("/dev/loop-control").exists():
        return "a throttled file system needs loop devices: no /dev/loop-control"
    if not (CONTROLLER / "blkio.throttle.read_bps_device").exists():
        return f"a throttled file system needs the blkio controller of cgroup v1: nothing of it in {CONTROLLER}"
    return None


def loop_device(backing: str, pass_fds: Sequence[int] = (), environment: Mapping[str, str] | None = None) -> str:
    """A new loop device on a file, whose path may name one of `pass_fds`.

    Raises:
        RunError: there is none to be had.
    """
    for attempt in range(5):
        try:
            command = ["losetup", "--find", "--show", backing]
            return host.call(command, environment=environment, pass_fds=pass_fds).strip()
        except RunError:
            if attempt == 4:  # else another process took the free one that was found
                raise
    raise AssertionError


def make_file_system(device: str) -> None:
    """An empty one, complete: nothing is written to it later in the background."""
    host.call([*_MKFS, "-E", "lazy_itable_init=0", device])


def mount(device: str, path: Path, environment: Mapping[str, str] | None = None) -> None:
    """Mounts a device without noting when files were read."""
    host.call(["mount", "-o", "noatime,nodev,nosuid", device, str(path)], environment=environment)


def limit(cgroup: Path, device: str, bytes_per_s: int, *, writes: bool) -> None:
    """Throttles a device for the processes of a cgroup together; 0 lifts it."""
    number = Path("/sys/block", Path(device).name, "dev").read_text().strip()
    for verb in ["read", "write"] if writes else ["read"]:
        (cgroup / f"blkio.throttle.{verb}_bps_device").write_text(f"{number} {bytes_per_s}")


def provide(
    image: Path, path: Path, cgroup: Path, bytes_per_s: int, size_bytes: int, environment: Mapping[str, str]
) -> None:
    """Mounts a new file system of a sparse file on `path`, for all users, throttled for a new cgroup.

    `environment` marks the programs that do it.

    Raises:
        EnvironmentLacksError: this machine cannot have one.
        RunError: a step failed; `withdraw` takes back what was done.
    """
    if (reason := why_not()) is not None:
        raise EnvironmentLacksError(reason)
    cgroup.mkdir()
    image.touch(0o600, exist_ok=False)
    os.truncate(image, size_bytes)
    # On the file, not on its device: the image knows its size, and the writes need no loop.
    host.call([*_MKFS, str(image)], environment=environment)
    path.mkdir()
    device = loop_device(str(image), environment=environment)
    limit(cgroup, device, bytes_per_s, writes=True)
    mount(device, path, environment)
    path.chmod(0o1777)


def withdraw(image: Path, path: Path, cgroup: Path) -> list[str]:
    """Takes away all that `provide` made, however far it came; what could not be is returned as sentences."""
    failures = []
    if os.path.ismount(path):
        try:
            host.call(["umount", str(path)])
        except RunError:
            # Somebody of this machine has a file open in it: it goes with the last of them.
            host.call(["umount", "--lazy", str(path)])
    if image.exists():
        listed = host.call(["losetup", "--noheadings", "--output", "NAME", "--associated", str(image)])
        for device in listed.split():
            with suppress(RunError):  # gone with the mount
                host.call(["losetup", "--detach", device])
        image.unlink()
    if path.exists():
        path.rmdir()
    deadline = time.monotonic() + 2
    while cgroup.exists():
        try:
            cgroup.rmdir()
        except OSError as error:  # the kernel counts processes as there that have just ended
            if time.monotonic() > deadline:
                failures.append(f"the cgroup {cgroup} cannot be removed: {error.strerror}")
                break
            time.sleep(0.02)
    return failures

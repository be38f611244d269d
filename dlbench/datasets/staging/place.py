"""Where samples are staged to on a node: the tier's folder, a private folder in it, and what is free there.

A private folder has mode 0700 and a lock that its job holds (flock(2)), which the kernel takes away however the job
ends. One that is not kept is a `HeldFolder` with a name of its own for each run. A kept one has the same name for the
same data, and one job at a time: a second one gets a folder that is not kept, so that the two never mix.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dlbench.errors import EnvironmentLacksError, UserError
from dlbench.process_tree import HeldFolder, also_remove, remove_abandoned, supervised_folder
from dlbench.specs.system import StagingTier, TierSpec
from dlbench.units import format_bytes

_VARIABLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
_LOCK = ".held"
_KEPT = "dlbench-staged-"
_LABEL = "staged-"


@dataclass(frozen=True)
class Room:
    """What is free for staging at a place, bytes."""

    free: int
    limit: str = ""  # what limits `free` besides the file system, in words


def tier_path(
    tier: TierSpec, key: StagingTier, variables: Mapping[str, str], host: str, *, where: str | None = None
) -> Path:
    """The folder of a tier on this node.

    `variables`: of the job on this node; $TMPDIR means what it was before dlbench gave the rank its own. `host`: stands
    for {host}. `where`: the setting that names it, for messages; None: `storage.<key>.path`.
    """
    where = f"{where or f'storage.{key}.path'} {tier.path!r}"
    text = tier.path.replace("{host}", host)
    own = supervised_folder(variables)
    for name in dict.fromkeys(_VARIABLE.findall(text)):
        value = os.path.dirname(own) if name == "TMPDIR" and own is not None else variables.get(name, "")  # noqa: PTH120
        if not value:
            raise EnvironmentLacksError(
                f"{where}: ${name} is not set on {host}; name another folder in the system file"
            )
        text = text.replace(f"${name}", value)
    path = Path(text).expanduser()
    if not path.is_absolute():
        raise EnvironmentLacksError(f"{where}: on {host} it becomes {text!r}, which does not begin with /")
    try:
        status = path.stat()
    except OSError as error:
        raise EnvironmentLacksError(f"{where}: {str(path)!r} on {host}: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise EnvironmentLacksError(f"{where}: {str(path)!r} on {host} is not a folder")
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise EnvironmentLacksError(
            f"{where}: {str(path)!r} on {host} may be written by everybody and is not sticky, so that anybody could "
            "exchange what is staged; make it sticky (chmod +t), or name another folder"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise EnvironmentLacksError(f"{where}: {str(path)!r} on {host} is not writable")
    return path


class StagingFolder:
    """A private folder for staged samples, held by this process.

    `identity`: the same for the same data, staged in the same way. `keep`: leave it for the next run. `host`: this
    node; folders of others at the same place, if it is shared, are never touched.
    """

    def __init__(self, place: Path, key: StagingTier, identity: str, *, keep: bool, host: str) -> None:
        self._place, self._key, self._host = place, key, host
        self.kept = keep
        self.warning = ""  # why it is another folder than was asked for; empty if it is the one
        self._held: HeldFolder | None = None
        self._lock = -1
        node = hashlib.sha256(host.encode()).hexdigest()[:6]
        self._label = f"{_LABEL}{node}-"
        remove_abandoned([str(place)], self._label)
        try:
            if not (keep and self._take(place / f"{_KEPT}{identity}-{node}")):
                self.kept = False
                self._held = HeldFolder([str(place)], self._label)
                self.path = Path(self._held.path)
                with suppress(OSError):  # whoever stages here next removes it
                    also_remove(self._held.path, os.environ)
        except OSError as error:
            raise EnvironmentLacksError(
                f"storage.{key}.path: no folder can be made in {str(place)!r} on {host}: {error.strerror}"
            ) from None

    def _take(self, path: Path) -> bool:
        """Holds the kept folder of the data; False if another job does."""
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise EnvironmentLacksError(
                f"storage.{self._key}.path: {str(path)!r} on {self._host} is not a folder of this user alone (mode "
                "0700): remove it, or name another place"
            )
        lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            self.warning = (
                f"data.keep_staged: another job on {self._host} uses {str(path)!r}; this run staged to a folder of its "
                "own, which was not kept"
            )
            return False
        self.path, self._lock = path, lock
        return True

    def require(self, needed: int, files: int, capacity: int | None, room_in_memory: int | None) -> Room:
        """What is free.

        `capacity`: `capacity_bytes` of the tier. `room_in_memory`: bytes that memory limits allow where the place is in
        memory; None elsewhere.
        """
        room = self.room(room_in_memory)
        what = f"staging to storage.{self._key} {str(self._place)!r} on {self._host} needs {format_bytes(needed)}"
        if capacity is not None and needed > capacity:
            raise EnvironmentLacksError(f"{what}, storage.{self._key}.capacity_bytes is {format_bytes(capacity)}")
        if needed > room.free:
            raise EnvironmentLacksError(f"{what}; {format_bytes(room.free)} are free{room.limit}")
        status = os.statvfs(self.path)
        if status.f_files and files > status.f_favail:
            raise EnvironmentLacksError(f"{what} in {files:,} files; {status.f_favail:,} more files can be made there")
        return room

    def room(self, room_in_memory: int | None = None) -> Room:
        """What is free there."""
        status = os.statvfs(self.path)
        free = status.f_bavail * status.f_frsize
        if room_in_memory is not None and room_in_memory < free:
            return Room(room_in_memory, " within the job's limit of memory")
        return Room(free)

    def empty(self) -> None:
        for entry in os.scandir(self.path):
            if entry.name == _LOCK:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                with suppress(OSError):
                    Path(entry.path).unlink()

    def close(self, *, keep: bool = True) -> None:
        """Lets go of it; removes it unless it is kept, and with `keep` False also then. Twice does no harm."""
        held, self._held = self._held, None
        if held is not None:
            held.remove()
        if self._lock >= 0:
            if not keep:
                shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def rounded(num_bytes: int, block: int) -> int:
    """What a file of a size takes on a disk of such blocks, at most one more for its name."""
    return -(-num_bytes // block) * block


def block_of(folder: Path) -> int:
    """Bytes of a block of a folder's file system."""
    return max(1, os.statvfs(folder).f_frsize)


def staging_identity(**parts: object) -> str:
    """A name of 16 characters for what these values say together."""
    return hashlib.sha256(repr(sorted(parts.items())).encode(errors="surrogateescape")).hexdigest()[:16]


def user_error(path: Path, why: str) -> UserError:
    """What the data set has that cannot be staged."""
    return UserError(f"data.source: {str(path)!r} {why}")

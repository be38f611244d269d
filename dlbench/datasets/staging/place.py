"""Finds the folder of a storage tier on a node, makes a private folder in it for staging, and checks its free space.

A private folder has mode 0700, and its job holds a lock (flock(2)) that the kernel releases however the job ends. A
temporary folder is a `HeldFolder` with a different name for each run. A kept folder has the same name for the same
data, and is used by one job at a time: a second job gets a temporary folder.
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
    """The free space for staging."""

    free: int  # bytes
    limit: str = ""  # limit other than the file system's free space, as text


def tier_path(
    tier: TierSpec, key: StagingTier, variables: Mapping[str, str], host: str, *, where: str | None = None
) -> Path:
    """Returns the folder of a tier on this node. Raises EnvironmentLacksError: it cannot be used.

    `variables`: of the job on this node; $TMPDIR means its value before dlbench gave the rank its own. `host`: value of
    {host}. `where`: the setting that names it, for messages; None: `storage.<key>.path`.
    """
    where = f"{where or f'storage.{key}.path'} {tier.path!r}"
    text = tier.path.replace("{host}", host)
    rank_folder = supervised_folder(variables)
    for name in dict.fromkeys(_VARIABLE.findall(text)):
        value = variables.get(name, "")
        if name == "TMPDIR" and rank_folder is not None:
            value = str(Path(rank_folder).parent)
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
            f"{where}: {str(path)!r} on {host} is writable by everybody and not sticky, so that other users could "
            "replace staged data; make it sticky (chmod +t), or name another folder"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise EnvironmentLacksError(f"{where}: {str(path)!r} on {host} is not writable")
    return path


class StagingFolder:
    """A private folder for staged samples, locked by this process.

    `place`: folder of the tier. `identity`: equal for equal data that is staged in the same way. `keep`: keep it for
    the next run. `host`: this node; folders of other nodes in a shared tier are never touched.
    """

    def __init__(self, place: Path, key: StagingTier, identity: str, *, keep: bool, host: str) -> None:
        self._place, self._key, self._host = place, key, host
        self.kept = keep
        self.warning = ""  # why a temporary folder is used although `keep` was set; empty if it is not
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
                with suppress(OSError):  # then the next staging run in this tier removes it
                    also_remove(self._held.path, os.environ)
        except OSError as error:
            raise EnvironmentLacksError(
                f"storage.{key}.path: a folder cannot be created in {str(place)!r} on {host}: {error.strerror}"
            ) from None

    def _take(self, path: Path) -> bool:
        """Locks the kept folder of the data; returns False if another job uses it."""
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise EnvironmentLacksError(
                f"storage.{self._key}.path: {str(path)!r} on {self._host} is not a private folder of this user (mode "
                "0700): remove it, or name another folder"
            )
        lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            self.warning = (
                f"data.keep_staged: another job on {self._host} uses {str(path)!r}; this run staged to a temporary "
                "folder, which was not kept"
            )
            return False
        self.path, self._lock = path, lock
        return True

    def require(self, needed: int, files: int, capacity: int | None, room_in_memory: int | None) -> Room:
        """Returns the free space. Raises EnvironmentLacksError: it is less than `needed` bytes or `files` files.

        `capacity`: `capacity_bytes` of the tier. `room_in_memory`: bytes that memory limits allow if the tier is in
        memory, else None.
        """
        room = self.room(room_in_memory)
        request = f"staging to storage.{self._key} {str(self._place)!r} on {self._host} needs {format_bytes(needed)}"
        if capacity is not None and needed > capacity:
            raise EnvironmentLacksError(f"{request}, storage.{self._key}.capacity_bytes is {format_bytes(capacity)}")
        if needed > room.free:
            raise EnvironmentLacksError(f"{request}; {format_bytes(room.free)} are free{room.limit}")
        status = os.statvfs(self.path)
        if status.f_files and files > status.f_favail:
            raise EnvironmentLacksError(f"{request} in {files:,} files; only {status.f_favail:,} can be created there")
        return room

    def room(self, room_in_memory: int | None = None) -> Room:
        """Returns the free space; `room_in_memory` as in `require`."""
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
        """Releases the folder, and removes it unless it is a kept one and `keep` is set. May be called twice."""
        temporary_folder, self._held = self._held, None
        if temporary_folder is not None:
            temporary_folder.remove()
        if self._lock >= 0:
            if not keep:
                shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def rounded(num_bytes: int, block: int) -> int:
    """Returns the disk space of a file with that many bytes, without its directory entry."""
    return -(-num_bytes // block) * block


def block_of(folder: Path) -> int:
    """Returns the block size of a folder's file system in bytes."""
    return max(1, os.statvfs(folder).f_frsize)


def staging_identity(**parts: object) -> str:
    """Returns a digest of these values, 16 characters long."""
    return hashlib.sha256(repr(sorted(parts.items())).encode(errors="surrogateescape")).hexdigest()[:16]


def user_error(path: Path, reason: str) -> UserError:
    """Returns the error for an entry of the data set that cannot be staged."""
    return UserError(f"data.source: {str(path)!r} {reason}")

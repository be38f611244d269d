"""Finding and ending all processes of a run, and removing what they may leave in /dev/shm and in temporary folders.

- A tree is found, not remembered: by who descends from whom, or by a variable that its processes inherited. Sessions,
  process groups and parents that ended early hide nobody.
- A folder of a run is held by a lock (flock(2)), which the kernel takes from a process that ends, however it ends: a
  folder without a holder is nobody's any more, and whoever comes next removes it.

Loads nothing but the standard library's smallest parts: every rank is started by a process that imports this.
"""

# pathlib, shutil and tempfile would double the time that the supervisor of a rank takes to start.
# ruff: noqa: PTH102, PTH106, PTH108, PTH110, PTH123, PTH208

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress

ENDED_MARK = "DLBENCH-ENDED "
"""Begins the line in which a supervisor reports to the launcher how its rank ended."""
LAUNCHER = "launcher"  # Stands behind that in place of a rank's number.

SHARED_MEMORY = "/dev/shm"  # noqa: S108  (the place of POSIX shared memory, not a temporary file)

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_FOLDER = "dlb-"
_LOCK = ".held"
_GONE = ".gone"
_ALSO = ".also"  # In a supervisor's folder: names of folders that its program made elsewhere, to be removed with it.
_DEATH_S = 1.7
_LOOK_S = 0.02
_SOCKET_PATH_BYTES = 107 - len("/dlb-01234567/pymp-01234567/listener-01234567")
"""Longest folder below which multiprocessing's Unix sockets still have a name (unix(7))."""
_NAMELESS = ("torch_", "vader_segment.", "sm_segment.", "nccl-")
"""Names in /dev/shm that a library chose, so that nobody looks for them again. Others may hold a data set."""


def end_with_parent(number: int, parent: int) -> None:
    """From now on the kernel sends this process a signal when its parent ends; at once if it has ended (prctl(2)).

    `parent`: number of the process that started this one. What counts is the end of the thread that did.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """From now on descendants of this process whose parent ends become its children."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(of: int) -> set[int]:
    """Living processes that a process or its descendants started."""
    children: dict[int, list[int]] = {}
    for pid in _all():
        state, parent = _state_and_parent(pid)
        if state not in "ZX":
            children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    waiting = [of]
    while waiting:
        new = children.get(waiting.pop(), [])
        found.update(new)
        waiting += new
    return found


def with_variable(name: str, value: str) -> set[int]:
    """Living processes, but this one, whose environment held a variable when they were started."""
    wanted = f"{name}={value}".encode()
    return {
        pid
        for pid in _all()
        if pid != os.getpid() and wanted in _read(pid, "environ").split(b"\0") and _state_and_parent(pid)[0] not in "ZX"
    }


def end(find: Callable[[], set[int]], grace_s: float, look: Callable[[], object] = lambda: None) -> None:
    """Ends processes, and waits until they have ended.

    One that hangs in the kernel (a driver, a dead file system) cannot be ended; it is waited for so long as `_DEATH_S`.

    `find`: tells those that still live. `grace_s`: seconds between SIGTERM and SIGKILL; with none there is no SIGTERM.
    `look`: called between two looks; for collecting exit codes.
    """
    asked: set[int] = set()
    files: set[int] = set()
    kill_at = time.monotonic() + grace_s
    while left := find():
        now = time.monotonic()
        if now > kill_at + _DEATH_S:
            return
        files |= {inode for pid in left for inode in _mapped(pid)}
        if now >= kill_at:
            _send(left, signal.SIGKILL)
        else:
            _send(left - asked, signal.SIGTERM)
            _send(left - asked, signal.SIGCONT)
            asked |= left
        look()
        time.sleep(_LOOK_S)
        look()
    _unlink_unused(files)


def _send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _all() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    """A file of a process in /proc; empty if the process is gone or somebody else's."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _state_and_parent(pid: int) -> tuple[str, int]:
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return (fields[0].decode(), int(fields[1])) if len(fields) > 1 else ("X", 0)


def _mapped(pid: int) -> Iterator[int]:
    """Inodes of the files in /dev/shm that a process maps."""
    for line in _read(pid, "maps").splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[5].startswith(SHARED_MEMORY.encode() + b"/"):
            yield int(fields[4])


def _unlink_unused(inodes: set[int]) -> None:
    """Removes the files whose names nobody knows any more: of these inodes, named by a library, mapped by nobody."""
    if not inodes:
        return
    left = [entry for entry in os.scandir(SHARED_MEMORY) if entry.name.startswith(_NAMELESS)]
    left = [entry for entry in left if entry.is_file(follow_symlinks=False) and entry.inode() in inodes]
    used = {inode for pid in _all() for inode in _mapped(pid)} if left else set()
    for entry in left:
        if entry.inode() not in used:
            with suppress(OSError):
                os.unlink(entry.path)


def temporary_places(environment: Mapping[str, str]) -> list[str]:
    """Where folders of a run may be, the preferred place first."""
    wish = environment.get("TMPDIR", "")
    wished = [wish] if wish.startswith("/") and len(os.fsencode(wish)) <= _SOCKET_PATH_BYTES else []
    return [*wished, "/tmp", "/var/tmp"]  # noqa: S108  (a folder of mode 0700 and an unguessed name is made there)


class HeldFolder:
    """A new folder of this user alone; gone with `remove`, or after the end of this process with `remove_abandoned`.

    `places`: where it may be made, the first that serves is taken. `label`: comes into its name; letters, digits and
    dashes.
    Raises `OSError`: it can be made nowhere.
    """

    def __init__(self, places: Iterable[str], label: str = "") -> None:
        problem: OSError | None = None
        for place in places:
            try:
                self.path, self._lock = _make(place, label)
            except OSError as error:
                problem = error
            else:
                return
        raise problem or FileNotFoundError("no place for a temporary folder")

    def remove(self) -> None:
        """Removes it and all that is in it, and what `also_remove` named; what cannot be removed stays."""
        _remove_also(self.path, is_over=True)
        _remove_tree(self.path)
        os.close(self._lock)


def supervised_folder(environment: Mapping[str, str]) -> str | None:
    """The temporary folder that a supervisor made for this process; None without a supervisor."""
    folder = environment.get("TMPDIR", "")
    is_one = folder.rpartition("/")[2].startswith(_FOLDER) and os.path.exists(f"{folder}/{_LOCK}")
    return folder if is_one else None


def also_remove(path: str, environment: Mapping[str, str]) -> None:
    """Has the supervisor of this process remove a `HeldFolder` of it, too, however the process ends.

    Without a supervisor nothing happens; `remove_abandoned` finds such a folder later.
    """
    folder = supervised_folder(environment)
    if folder is not None:
        with open(f"{folder}/{_ALSO}", "ab") as file:
            file.write(os.fsencode(path) + b"\0")


def _remove_also(path: str, *, is_over: bool = False) -> None:
    """Removes the folders that were named in a folder, if they are folders of a run that nobody holds any more.

    With `is_over` also held ones: who held them was ended, and may still hang in a read from a slow file system.
    """
    try:
        with open(f"{path}/{_ALSO}", "rb") as file:
            names = file.read().split(b"\0")
    except OSError:
        return
    for name in names:
        other = os.fsdecode(name)
        if other.rpartition("/")[2].startswith(_FOLDER):
            with suppress(OSError):
                if is_over and os.lstat(other).st_uid == os.getuid() and os.path.exists(f"{other}/{_LOCK}"):
                    _remove_tree(other)
                else:
                    _remove_if_abandoned(other)


def _make(place: str, label: str) -> tuple[str, int]:
    for _ in range(100):
        path = f"{place.rstrip('/')}/{_FOLDER}{label}{os.urandom(4).hex()}"
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            continue
        try:
            lock = os.open(f"{path}/{_LOCK}", os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:  # a full disk
            os.rmdir(path)
            raise
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process is removing it as abandoned
            os.close(lock)
            continue
        except OSError:  # a file system without locks: nobody will think it abandoned
            return path, lock
        if os.path.exists(f"{path}/{_LOCK}"):
            return path, lock
        os.close(lock)
    raise FileExistsError(f"{place}: no new folder can be made")


def remove_abandoned(places: Iterable[str], label: str = "") -> None:
    """Removes all folders of this user whose holder has ended; with `label` only those that have it in their names."""
    for place in dict.fromkeys(places if label else [*places, SHARED_MEMORY]):
        try:
            names = [name for name in os.listdir(place) if name.startswith(_FOLDER + label)]
        except OSError:
            continue
        for name in names:
            with suppress(OSError):
                _remove_if_abandoned(f"{place.rstrip('/')}/{name}")


def _remove_if_abandoned(path: str) -> None:
    if os.lstat(path).st_uid != os.getuid():
        return
    try:
        lock = os.open(f"{path}/{_LOCK}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        # Somebody is making the folder; or was killed while removing it, when the lock was gone already.
        if path.endswith(_GONE):
            _remove_tree(path)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove_also(path)
        _remove_tree(path)
    finally:
        os.close(lock)


def _remove_tree(path: str) -> None:
    """Removes a folder as shutil.rmtree does: never through a link.

    First it is renamed, so that a process of another rank that still writes there by its name makes nothing anew.
    """
    with suppress(OSError):
        gone = path if path.endswith(_GONE) else path + _GONE
        os.rename(path, gone)  # noqa: PTH104
        path = gone
    with suppress(OSError):
        for _, folders, files, here in os.fwalk(path, topdown=False, follow_symlinks=False):
            for name in files:
                with suppress(OSError):
                    os.unlink(name, dir_fd=here)
            for name in folders:
                try:
                    os.rmdir(name, dir_fd=here)
                except NotADirectoryError:  # a link to a folder
                    os.unlink(name, dir_fd=here)
                except OSError:
                    pass
        os.rmdir(path)

"""Ends all processes of a run, and removes their files in /dev/shm and in temporary folders.

- Processes are found by descent, or by an inherited variable, independent of sessions, process groups and parents that
  ended early.
- A folder of a run is locked (flock(2)); the kernel releases the lock when the process ends for any reason. Later runs
  remove folders without a lock.

Imports only small modules of the standard library: every rank is started by a process that imports this.
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
"""Prefix of the line in which a supervisor reports the end of its rank to the launcher."""
LAUNCHER = "launcher"  # Follows it in place of a rank's number.

SHARED_MEMORY = "/dev/shm"  # noqa: S108  (the place of POSIX shared memory, not a temporary file)

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_FOLDER = "dlb-"
_LOCK = ".held"
_GONE = ".gone"
_ALSO = ".also"  # File in a supervisor's folder with the paths of further folders to remove with it.
_DEATH_S = 1.7  # Maximum wait for killed processes, seconds.
_LOOK_S = 0.02  # Polling interval, seconds.
_SOCKET_PATH_BYTES = 107 - len("/dlb-01234567/pymp-01234567/listener-01234567")
"""Maximum length of a folder whose multiprocessing sockets have paths within the limit of unix(7)."""
_NAMELESS = ("torch_", "vader_segment.", "sm_segment.", "nccl-")
"""Prefixes of names in /dev/shm that libraries chose and no process opens again. Other files may be data sets."""


def end_with_parent(number: int, parent: int) -> None:
    """Makes the kernel send this process a signal when its parent ends, or sends it now if it has ended (prctl(2)).

    `parent`: pid of the parent. The signal comes when the thread that started this process ends.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Makes descendants of this process its children when their parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(ancestor: int) -> set[int]:
    """Returns the living processes that a process or its descendants started."""
    children: dict[int, list[int]] = {}
    for pid in _all():
        state, parent = _state_and_parent(pid)
        if state not in "ZX":
            children.setdefault(parent, []).append(pid)
    pids: set[int] = set()
    waiting = [ancestor]
    while waiting:
        new = children.get(waiting.pop(), [])
        pids.update(new)
        waiting += new
    return pids


def with_variable(name: str, value: str) -> set[int]:
    """Returns the living processes, except this one, that were started with an environment variable."""
    assignment = f"{name}={value}".encode()
    return {
        pid
        for pid in _all()
        if pid != os.getpid()
        and assignment in _read(pid, "environ").split(b"\0")
        and _state_and_parent(pid)[0] not in "ZX"
    }


def end(find: Callable[[], set[int]], grace_s: float, look: Callable[[], object] = lambda: None) -> None:
    """Ends processes, and waits until they have ended.

    A process that hangs in the kernel (a driver, a dead file system) cannot be ended; the wait for it is `_DEATH_S`.

    `find`: returns the living processes. `grace_s`: seconds between SIGTERM and SIGKILL; 0: no SIGTERM. `look`: called
    while polling, to collect exit codes.
    """
    terminated: set[int] = set()
    files: set[int] = set()
    kill_at = time.monotonic() + grace_s
    while living := find():
        now = time.monotonic()
        if now > kill_at + _DEATH_S:
            return
        files.update(*map(_mapped, living))
        if now >= kill_at:
            _send(living, signal.SIGKILL)
        else:
            _send(living - terminated, signal.SIGTERM)
            _send(living - terminated, signal.SIGCONT)
            terminated |= living
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
    """Reads a file of a process in /proc; empty if the process has ended or belongs to another user."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _state_and_parent(pid: int) -> tuple[str, int]:
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    if len(fields) < 2:
        return "X", 0
    return fields[0].decode(), int(fields[1])


def _mapped(pid: int) -> Iterator[int]:
    """Yields the inodes of the files in /dev/shm that a process maps."""
    for line in _read(pid, "maps").splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[5].startswith(SHARED_MEMORY.encode() + b"/"):
            yield int(fields[4])


def _unlink_unused(inodes: set[int]) -> None:
    """Removes files of these inodes that a library named and no process maps any more."""
    if not inodes:
        return
    unnamed_files = [entry for entry in os.scandir(SHARED_MEMORY) if entry.name.startswith(_NAMELESS)]
    unnamed_files = [
        entry for entry in unnamed_files if entry.is_file(follow_symlinks=False) and entry.inode() in inodes
    ]
    if not unnamed_files:
        return
    used = set[int]().union(*map(_mapped, _all()))
    for entry in unnamed_files:
        if entry.inode() not in used:
            with suppress(OSError):
                os.unlink(entry.path)


def temporary_places(environment: Mapping[str, str]) -> list[str]:
    """Returns the possible places of a run's folder, the preferred one first."""
    places = ["/tmp", "/var/tmp"]  # noqa: S108  (a folder of mode 0700 and a random name is made there)
    preferred = environment.get("TMPDIR", "")
    if preferred.startswith("/") and len(os.fsencode(preferred)) <= _SOCKET_PATH_BYTES:
        places.insert(0, preferred)
    return places


class HeldFolder:
    """A new private folder; removed by `remove`, or after the end of this process by `remove_abandoned`.

    `places`: possible parents, of which the first that works is used. `label`: part of its name; letters, digits and
    dashes. Raises `OSError`: it can be made in none of them.
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
        """Removes it with its content, and the folders of `also_remove`, as far as possible."""
        _remove_also(self.path, is_over=True)
        _remove_tree(self.path)
        os.close(self._lock)


def supervised_folder(environment: Mapping[str, str]) -> str | None:
    """Returns the temporary folder that a supervisor made for this process; None without a supervisor."""
    folder = environment.get("TMPDIR", "")
    if folder.rpartition("/")[2].startswith(_FOLDER) and os.path.exists(f"{folder}/{_LOCK}"):
        return folder
    return None


def also_remove(path: str, environment: Mapping[str, str]) -> None:
    """Makes the supervisor remove a `HeldFolder` of this process, too, for any end of the process.

    Without a supervisor this does nothing; `remove_abandoned` removes such a folder later.
    """
    folder = supervised_folder(environment)
    if folder is not None:
        with open(f"{folder}/{_ALSO}", "ab") as file:
            file.write(os.fsencode(path) + b"\0")


def _remove_also(path: str, *, is_over: bool = False) -> None:
    """Removes the folders of `also_remove`, if they are folders of a run without a lock.

    With `is_over` also locked ones: their process was ended, but may still hang in a read from a slow file system.
    """
    try:
        with open(f"{path}/{_ALSO}", "rb") as file:
            names = file.read().split(b"\0")
    except OSError:
        return
    for name in names:
        folder = os.fsdecode(name)
        if folder.rpartition("/")[2].startswith(_FOLDER):
            with suppress(OSError):
                if is_over and os.lstat(folder).st_uid == os.getuid() and os.path.exists(f"{folder}/{_LOCK}"):
                    _remove_tree(folder)
                else:
                    _remove_if_abandoned(folder)


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
        except OSError:  # a file system without locks: no process will remove it as abandoned
            return path, lock
        if os.path.exists(f"{path}/{_LOCK}"):
            return path, lock
        os.close(lock)
    raise FileExistsError(f"{place}: no new folder can be made")


def remove_abandoned(places: Iterable[str], label: str = "") -> None:
    """Removes all folders of this user whose process has ended; with `label` only those with it in their names."""
    if not label:
        places = [*places, SHARED_MEMORY]
    for place in dict.fromkeys(places):
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
        # A process is making the folder, or was killed while it removed the folder without its lock.
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
    """Removes a folder like shutil.rmtree, never through a link.

    First it is renamed, so that another rank that still writes there by its path cannot create it again.
    """
    with suppress(OSError):
        renamed = path.removesuffix(_GONE) + _GONE
        os.rename(path, renamed)  # noqa: PTH104
        path = renamed
    with suppress(OSError):
        for _, folders, files, descriptor in os.fwalk(path, topdown=False, follow_symlinks=False):
            for name in files:
                with suppress(OSError):
                    os.unlink(name, dir_fd=descriptor)
            for name in folders:
                try:
                    os.rmdir(name, dir_fd=descriptor)
                except NotADirectoryError:  # a link to a folder
                    os.unlink(name, dir_fd=descriptor)
                except OSError:
                    pass
        os.rmdir(path)

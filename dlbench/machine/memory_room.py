"""How many bytes a job may still put into memory: what the machine has available, and what limits of cgroups leave."""

from __future__ import annotations

from pathlib import Path

from dlbench.machine.cgroup import Group, memory_limit, own_group
from dlbench.machine.mounts import file_system_of
from dlbench.machine.readings import ReadingFailedError, read_number
from dlbench.opening import read_text

_MAX_FILE = 1 << 20
_IN_MEMORY = ("tmpfs", "ramfs")


def lies_in_memory(folder: Path, root: Path = Path("/")) -> bool:
    """Whether a folder's file system is in memory, by the mount point nearest above it (/proc/self/mountinfo)."""
    return file_system_of(folder, root) in _IN_MEMORY


def memory_room(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still put into memory; page cache counts as free. None where nobody tells.

    Args:
        root: where `proc` and the mounted hierarchies are.
    """
    rooms = []
    try:
        lines = read_text(root / "proc/meminfo", _MAX_FILE).splitlines()
        rooms += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        pass
    try:
        group = own_group(root, "memory")
    except ReadingFailedError:
        return min(rooms, default=None)
    for folder in group.upwards():
        room = _room(group, folder)
        if room is not None:
            rooms.append(room)
    return min(rooms, default=None)


def _room(group: Group, folder: Path) -> int | None:
    """What a group's limit leaves; None without a limit, or where it cannot be read."""
    names = ("memory.usage_in_bytes", "total_") if group.version == 1 else ("memory.current", "")
    try:
        limit = memory_limit(group, folder)
        if limit is None:
            return None
        used = int(read_number(folder / names[0]))
        cached = 0
        for line in read_text(folder / "memory.stat", _MAX_FILE).splitlines():
            name, _, value = line.partition(" ")
            if name in (f"{names[1]}inactive_file", f"{names[1]}active_file"):
                cached += int(value)
    except (ReadingFailedError, OSError, ValueError):
        return None
    return max(0, int(limit) - max(0, used - cached))

"""How much a job may still put into memory, on machines made of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlbench.machine.memory import lies_in_memory, memory_room

GIB = 1 << 30


def machine(root: Path, version: int, limits: dict[str, tuple[str, int, int]]) -> Path:
    """`limits`: of each group, from the top: its limit, bytes in use, and of these page cache."""
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    if version == 2:
        names = ("memory.max", "memory.current", "")
    own = list(limits)[-1]
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {64 * GIB // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(f"4:memory:{own}\n" if version == 1 else f"0::{own}\n")
    kind = "cgroup cgroup rw,memory" if version == 1 else "cgroup2 cgroup2 rw"
    (root / "proc/self/mountinfo").write_text(f"30 24 0:27 / /sys/fs/cgroup/m rw - {kind}\n")
    for group, (limit, used, cached) in limits.items():
        folder = root / "sys/fs/cgroup/m" / group.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names[0]).write_text(f"{limit}\n")
        (folder / names[1]).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"{names[2]}inactive_file {cached}\n{names[2]}active_file 0\nx 1\n")
    return root


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_limit_counts_and_page_cache_is_free(tmp_path: Path, version: int) -> None:
    root = machine(
        tmp_path,
        version,
        {"/job": (str(10 * GIB), 7 * GIB, 2 * GIB), "/job/step": (str(20 * GIB), 7 * GIB, 2 * GIB)},
    )
    assert memory_room(root) == 5 * GIB


def test_without_a_limit_what_the_machine_has_counts(tmp_path: Path) -> None:
    assert memory_room(machine(tmp_path, 2, {"/job": ("max", GIB, 0)})) == 64 * GIB
    assert memory_room(tmp_path / "nowhere") is None


def test_what_is_over_its_limit_has_no_room(tmp_path: Path) -> None:
    assert memory_room(machine(tmp_path, 2, {"/job": (str(GIB), 2 * GIB, 0)})) == 0


def test_a_tmpfs_lies_in_memory(tmp_path: Path) -> None:
    assert lies_in_memory(Path("/dev/shm"))
    assert not lies_in_memory(Path("/proc"))

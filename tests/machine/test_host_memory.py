"""Memory that a job may still use, and the kernel's out-of-memory killer, on machines made of files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dlbench.machine.host_memory import MemoryKills, available_bytes

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
        tmp_path, version, {"/job": (str(10 * GIB), 7 * GIB, 2 * GIB), "/job/step": (str(20 * GIB), 7 * GIB, 2 * GIB)}
    )
    assert available_bytes(root) == 5 * GIB


def test_without_a_limit_what_the_machine_has_counts(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, 2, {"/job": ("max", GIB, 0)})) == 64 * GIB
    assert available_bytes(tmp_path / "nowhere") is None


Write = Callable[[str, object], None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def put(path: str, content: object) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")

    return put


def version_2(write: Write, *, kills: int, oom: int, own_oom: int = 0) -> None:
    write("proc/self/cgroup", "0::/job/step")
    write("proc/self/mountinfo", "30 23 0:26 / /cg rw - cgroup2 cgroup2 rw")
    write("cg/job/memory.max", 2 << 30)
    write("cg/job/memory.events", f"low 0\nhigh 0\nmax 9\noom {oom}\noom_kill {kills}")
    write("cg/job/step/memory.max", "max")
    write("cg/job/step/memory.events", f"low 0\nhigh 0\nmax 0\noom {own_oom}\noom_kill {kills}")


def test_the_limit_that_was_met_is_named_under_version_2(tmp_path: Path, write: Write) -> None:
    version_2(write, kills=3, oom=5)
    watch = MemoryKills(tmp_path)
    assert watch.cause_of_kill() == ""
    version_2(write, kills=4, oom=6)
    assert watch.cause_of_kill() == "the cgroup's limit is 2 GiB (memory.max)"
    assert MemoryKills(tmp_path).cause_of_kill() == ""


def test_a_limit_that_was_met_without_a_kill_proves_nothing(tmp_path: Path, write: Write) -> None:
    version_2(write, kills=3, oom=5)
    watch = MemoryKills(tmp_path)
    version_2(write, kills=3, oom=6)
    assert watch.cause_of_kill() == ""


def test_version_1(tmp_path: Path, write: Write) -> None:
    write("proc/self/cgroup", "4:memory:/job")
    write("proc/self/mountinfo", "35 31 0:29 / /cg/memory rw - cgroup cgroup rw,memory")
    write("cg/memory/memory.limit_in_bytes", 2**63 - 4096)
    write("cg/memory/memory.failcnt", 0)
    write("cg/memory/job/memory.limit_in_bytes", 700 << 20)
    write("cg/memory/job/memory.failcnt", 7)
    write("cg/memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1")
    watch = MemoryKills(tmp_path)
    write("cg/memory/job/memory.failcnt", 90)
    write("cg/memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2")
    assert watch.cause_of_kill() == "the cgroup's limit is 700 MiB (memory.limit_in_bytes)"

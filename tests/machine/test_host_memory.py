"""Host memory and page cache."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlbench.machine import page_cache
from dlbench.machine.cgroup import MemoryKills, available_bytes
from dlbench.machine.page_cache import CachedPages, cached_pages, evict, fill
from dlbench.machine.storage import storage_reads

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


NOBODY = 65534
FEW = 0.05
"""Pages that a core held in a list of its own are not evicted at once; the kernel may take some when memory is short; a
read that may not wait gives up where another process holds what it needs."""
NONE = Path("/there is no such file")


@pytest.fixture
def files() -> Iterator[list[Path]]:
    """Eight files of 300 kB, open to everybody, on a file system with a page cache behind it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        folder.chmod(0o755)
        paths = [folder / str(number) for number in range(8)]
        for path in paths:
            path.write_bytes(os.urandom(300_000))
        done(evict(paths, [], NONE))
        if cached_pages(paths).share == 1:
            pytest.skip(f"{temporary} lies in memory: set TMPDIR to a folder on a disk")
        yield paths


def done(work: Iterator[None]) -> None:
    for _ in work:
        pass


def evicted(files: list[Path]) -> CachedPages:
    told: list[str] = []
    done(evict(files, told, NONE))
    assert told[0] == "emptied of these files by posix_fadvise"
    assert told[1].startswith("names and attributes of files ")
    return cached_pages(files)


def filled(files: list[Path]) -> CachedPages:
    told: list[str] = []
    done(fill(files, told))
    assert told == ["filled by reading 2,400,000 bytes"]
    return cached_pages(files)


def test_files_leave_the_cache_and_come_back(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert (evicted(files).share or 0) <= FEW
    assert (filled(files).share or 0) >= 1 - FEW
    files[0].write_bytes(os.urandom(300_000))  # what is dirty is written first
    before = evicted(files)
    assert (before.share or 0) <= FEW
    # Looking brings nothing in: what is not there would be read by the kernel with its neighbours.
    assert (cached_pages(files).share or 0) <= FEW
    files[1].read_bytes()
    seen = cached_pages(files)
    assert seen.share == pytest.approx(1 / 8, abs=FEW)
    # A kernel before 6.5; of 64 pages of each file.
    monkeypatch.setattr(page_cache, "_CACHESTAT", 9999)
    older = cached_pages(files)
    assert older.share == pytest.approx(1 / 8, abs=FEW)
    assert older.evidence == "512 pages of 8 files tested by reads with RWF_NOWAIT"


def test_the_whole_cache_is_dropped_where_that_is_allowed(files: list[Path], tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "drop_caches").touch()
    done(evict(files, told, tmp_path / "drop_caches"))
    assert told[1:] == [f"names and attributes of files dropped by {tmp_path / 'drop_caches'}"]
    assert (tmp_path / "drop_caches").read_text() == "2\n"


def test_what_does_not_fit_into_memory_is_not_read(files: list[Path]) -> None:
    evicted(files)
    told: list[str] = []
    done(fill(files, told, room_bytes=1_000_000))
    assert told == ["900,000 of 2,400,000 bytes were read: available memory is 1,000,000 bytes"]
    assert cached_pages(files).share == pytest.approx(3 / 8, abs=FEW)


def test_only_what_storage_gave_to_this_thread_is_counted(files: list[Path]) -> None:
    if storage_reads() is None:
        pytest.skip("this kernel does not count (CONFIG_TASK_IO_ACCOUNTING)")
    evicted(files)

    def read(path: Path) -> int:
        before = storage_reads()
        path.read_bytes()
        return (storage_reads() or 0) - (before or 0)

    assert read(files[0]) >= 300_000
    assert read(files[0]) == 0  # from the page cache
    before = storage_reads()
    thread = threading.Thread(target=read, args=(files[1],))
    thread.start()
    thread.join()
    assert storage_reads() == before

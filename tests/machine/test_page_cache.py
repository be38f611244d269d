"""The page cache, of a real file system: evicted, filled, and looked at without being changed by the look."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlbench.machine import page_cache
from dlbench.machine.page_cache import CachedPages, cached_pages, evict, fill
from dlbench.machine.storage import storage_reads

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

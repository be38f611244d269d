"""What a rank of a pre-flight asks of its node: places, libraries."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlbench.jobs.preflight.check import plan_of
from dlbench.machine.storage import file_system_of
from dlbench.node import site_check as libraries_of
from dlbench.node.cores import CoreBinding
from dlbench.node.site_check import libraries, scratch
from dlbench.specs.choices import choose_system
from dlbench.specs.system import StorageSpec, TierSpec
from tests.support.rank_places import rank_place
from tests.support.run_factory import NOW


def test_a_place_is_written_and_left_as_it_was(tmp_path: Path) -> None:
    found = scratch(StorageSpec(local=TierSpec(path="$HERE/{host}")), "local", {"HERE": str(tmp_path)}, "n1")
    assert "No such file" in found.problem
    (tmp_path / "n1").mkdir()
    found = scratch(StorageSpec(local=TierSpec(path="$HERE/{host}")), "local", {"HERE": str(tmp_path)}, "n1")
    assert (found.problem, found.path) == ("", str(tmp_path / "n1"))
    assert found.free_bytes
    assert found.file_system
    assert list((tmp_path / "n1").iterdir()) == []


def test_the_file_system_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "a b").mkdir()
    place = str(tmp_path / "a b").replace(" ", "\\040")
    lines = (
        "21 1 0:1 / / rw - ext4 /dev/sda rw",
        f"22 21 0:2 / {place} rw,relatime shared:1 - lustre mgs rw",
        f"23 21 0:3 / {place}x rw - nfs x rw",
    )
    (tmp_path / "proc/self/mountinfo").write_text("\n".join(lines) + "\n")
    assert file_system_of(tmp_path / "a b", tmp_path) == "lustre"
    assert file_system_of(tmp_path, tmp_path) == "ext4"
    assert file_system_of(tmp_path / "missing", tmp_path) == ""


def test_a_library_that_does_not_import_is_told_from_one_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "brokenlib.py").write_text("raise ImportError('libnothing.so: cannot open')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(libraries_of, "REQUIRED", ("numpy", "brokenlib", "nosuchlib"))
    monkeypatch.setattr(libraries_of, "_OPTIONAL", ())
    versions, broken = libraries()
    assert set(versions) == {"python", "dlbench", "numpy"}
    assert set(broken) == {"brokenlib"}
    assert broken["brokenlib"] == "ImportError: libnothing.so: cannot open"


def test_what_compiling_lacks_is_asked_for_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(choose_system("local", {}), 1, machine_cores=1, now=NOW)
    monkeypatch.setattr(libraries_of, "libraries", lambda: ({"torch": "2.13.0"}, {}))
    monkeypatch.setattr(
        libraries_of, "bind", lambda plan, place: CoreBinding(cores=(0,), pinned=True, threads=1, warnings=())
    )
    monkeypatch.setattr(libraries_of, "compiler_lacks", lambda *, on_gpu: ("no gcc", "install it"))
    place = rank_place(0, 1)
    for gpu, said in ((None, ""), ("GPU-0", "no gcc; install it")):
        monkeypatch.setattr(libraries_of, "_gpu", lambda *given, gpu=gpu: (gpu, ""))
        assert libraries_of.check_rank(plan, place).compiler == said

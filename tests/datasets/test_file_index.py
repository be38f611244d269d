"""A data set with an index is opened without listing a folder; as soon as a file comes or goes it is listed."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from dlbench.cli import cli
from dlbench.datasets import file_index
from dlbench.datasets.file_index import NAME, Files, load_index, packed, save_index
from dlbench.datasets.images.image_set import JpegTree, index_jpeg_tree, open_image_set
from dlbench.datasets.recognition import keep_indexes, require_fitting
from dlbench.datasets.volumes import DensityIndex
from dlbench.errors import UserError
from dlbench.machine import storage
from dlbench.machine.storage import call_rates
from dlbench.node.data.source import build_source
from tests.support.jpeg_files import write_tree
from tests.support.one_rank import trained
from tests.support.run_factory import plans
from tests.support.volumes import write_volumes

NAMES = st.binary(min_size=1, max_size=6).filter(lambda name: not {b"/"[0], 0} & set(name) and name[:1] != b".")
TREES = st.dictionaries(NAMES.map(os.fsdecode), st.sets(NAMES, min_size=1, max_size=4), min_size=1, max_size=4)


def same(one: JpegTree, other: JpegTree) -> bool:
    return all(np.array_equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(JpegTree))


@settings(max_examples=12)
@given(tree=TREES)
def test_what_is_kept_is_what_is_listed(tree: dict[str, set[bytes]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "photographs"
        for name, files in tree.items():
            (root / f"{name}-class").mkdir(parents=True)
            for file in files:
                (root / f"{name}-class" / os.fsdecode(file + b".jpg")).touch()
        listed = index_jpeg_tree(root)
        save_index(root, index_jpeg_tree)
        root = root.rename(Path(folder) / "moved")
        found = open_image_set(root)
        assert isinstance(found, JpegTree)
        assert found.names_from == NAME
        assert same(found, replace(listed, root=root, names_from=NAME))
        assert [path.exists() for path in found.files()] == [True] * sum(map(len, tree.values()))


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a folder was listed, by its name."""
    found: Counter[str] = Counter()

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def count(folder: Any = ".") -> Any:
            found[os.path.basename(os.fsdecode(folder))] += 1  # noqa: PTH119
            return call(folder)

        return count

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    return found


def source_of(workload: str, folder: Path) -> Path:
    for split in ("train", "validation"):
        if workload == "resnet50":
            write_tree(folder / split)
        else:
            pytest.importorskip("h5py")
            write_volumes(folder / split, 6, seed=1)
    return folder


@pytest.mark.parametrize("workload", ["resnet50", "cosmoflow"])
def test_planning_and_opening_list_nothing(workload: str, tmp_path: Path, listed: Counter[str]) -> None:
    source = source_of(workload, tmp_path / "set")
    (plan,) = plans(workload=workload, preset="ci", data=str(source), points=(1,), repeats=1)
    train = plan.workload

    def opened() -> tuple[dict[str, Any], list[Path]]:
        listed.clear()
        assert require_fitting(train, ranks=1, evaluated=True)
        reader = build_source(train.model, train.data, batch_size=2, rank=0, world_size=1, seed=1)
        reader.close()
        return dict(reader.describe()), list(listed)

    before, folders = opened()
    assert "train" in folders
    assert before["names_from"] == "its folders"
    keep_indexes(source)
    after, folders = opened()
    assert set(folders) <= {"set"}  # which holds two folders, and perhaps what is passed over
    assert after == {**before, "names_from": NAME}


def add(source: Path) -> str:
    shutil.copy(source / "class 1" / '"0".jpg', source / "class 1" / "new.jpg")
    return f"'class 1' changed after {NAME} was made"


def remove(source: Path) -> str:
    shutil.rmtree(source / "class 2")
    return "'train' changed after"


def rename(source: Path) -> str:
    (source / "class 0" / '"1".jpg').rename(source / "class 0" / "other.jpg")
    return "'class 0' changed after"


def damage(source: Path) -> str:
    content = bytearray((source / NAME).read_bytes())
    content[len(content) // 2] ^= 1
    return overwritten(source, bytes(content), "is altered or cut off")


def cut(source: Path) -> str:
    return overwritten(source, (source / NAME).read_bytes()[:-9], "is altered or cut off")


def empty(source: Path) -> str:
    return overwritten(source, b"", "is altered or cut off")


def other_kind(source: Path) -> str:
    about: dict[str, Any] = {"container": "npy", "size": 1, "channels": 1, "num_targets": 1, "sha256": ""}
    files = {"files": ("a_x.npy",), "offsets": np.arange(2), "chunks_span_samples": False}
    save_index(source, lambda folder: DensityIndex(root=folder, **about, **files))
    return "not a packed index: 'DensityIndex'"


def other_version(source: Path) -> str:
    content = b"".join(packed((file_index.FORMAT, 9, (), 0, index_jpeg_tree(source))))
    return overwritten(source, content + file_index.hashlib.sha256(content).digest(), "is of version 9, not 1")


def overwritten(source: Path, content: bytes, told: str) -> str:
    (source / NAME).write_bytes(content)
    return told


@pytest.mark.parametrize("change", [add, remove, rename, damage, cut, empty, other_kind, other_version])
def test_an_index_that_does_not_hold_is_said_and_the_folders_are_listed(
    change: Callable[[Path], str], tmp_path: Path
) -> None:
    source = write_tree(tmp_path / "train")
    save_index(source, index_jpeg_tree)
    told = change(source)
    found = open_image_set(source)
    assert isinstance(found, JpegTree)
    assert found.names_from is not None
    assert found.names_from.startswith("its folders: ")
    assert told in found.names_from
    assert same(replace(found, names_from=None), index_jpeg_tree(source))
    save_index(source, index_jpeg_tree)
    assert load_index(source, JpegTree)[1] == NAME, "made anew it holds"


def test_what_changes_while_it_is_listed_is_told(tmp_path: Path) -> None:
    source = write_tree(tmp_path / "train")

    def changing(folder: Path) -> JpegTree:
        found = index_jpeg_tree(folder)
        add(folder)
        return found

    with pytest.raises(UserError, match="changed while its files were listed; try again"):
        save_index(source, changing)
    assert not list(source.glob(".dlbench*")), "nothing is left"


def test_no_link_is_written_through(tmp_path: Path) -> None:
    source, other = write_tree(tmp_path / "train"), tmp_path / "other"
    other.write_text("precious")
    for name in (NAME, f"{NAME}.partial"):
        (source / name).symlink_to(other)
    save_index(source, index_jpeg_tree)
    assert other.read_text() == "precious"
    assert load_index(source, JpegTree)[1] == NAME


def test_the_command_and_made_sets(tmp_path: Path) -> None:
    def call(*words: str) -> Any:
        return CliRunner().invoke(cli, ["data", *words])

    assert call("make", "images", str(tmp_path / "made"), "--samples", "20", "--size", "64x64").exit_code == 0
    assert [load_index(tmp_path / "made" / split, JpegTree)[1] for split in ("train", "validation")] == [NAME, NAME]
    assert call("verify", str(tmp_path / "made")).exit_code == 0
    tree = write_tree(tmp_path / "own" / "train").parent
    write_tree(tree / "validation")
    assert call("index", str(tree)).stdout == f"{tree}\n"
    assert all((tree / split / NAME).is_file() for split in ("train", "validation"))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("One.\n")
    refused = call("index", str(tmp_path / "text")).exception
    assert isinstance(refused, UserError)
    assert str(refused) == f"{str(tmp_path / 'text')!r} holds text, which need no index: images and density do"


def test_a_run_says_that_its_index_is_old(tmp_path: Path) -> None:
    train = source_of("cosmoflow", tmp_path / "set") / "train"
    keep_indexes(train)
    shutil.copy(train / "density-0.h5", train / "density-1.h5")
    run = trained(tmp_path, 1, data__source=str(train), train__batch_per_rank=1)
    assert run.record is not None, run.detail
    told = f"names of files are from its folders: 'train' changed after {NAME} was made; `dlbench data index` makes it"
    assert any(text.startswith(told) for text in run.record.warnings)


# Paths


@given(num=st.integers(0, 20), at=st.slices(20) | st.integers(-20, 19))
def test_files_are_a_sequence_of_paths(num: int, at: slice | int) -> None:
    plain = [Path(str(n)) for n in range(num)]
    files = Files(num, lambda n: Path(str(n)))
    assert list(files) == plain
    assert len(files) == num
    if isinstance(at, slice):
        assert list(files[at]) == plain[at]
    elif -num <= at < num:
        assert files[at] == plain[at]
    else:
        with pytest.raises(IndexError):
            files[at]


def test_threads_share_the_paths() -> None:
    taken: list[Path] = []
    shared = iter(Files(2000, lambda n: Path(str(n))))
    threads = [threading.Thread(target=lambda: taken.extend(shared)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(int(path.name) for path in taken) == list(range(2000))


# Calls


def test_nothing_is_asked_twice_and_rates_are_calls_over_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = index_jpeg_tree(write_tree(tmp_path / "train")).files()
    clock = iter(range(10**6))
    monkeypatch.setattr(storage, "perf_counter", lambda: 0.25 * next(clock))
    asked: dict[str, list[str]] = {"open": [], "stat": [], "scandir": []}
    for name in asked:
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda path, *a, n=name, r=real: (asked[n].append(path), r(path, *a))[1])
    found = call_rates(files, 100.0, seed=1)
    monkeypatch.undo()
    # Each call takes a quarter of a second; a folder has five names.
    assert found == {"opens_per_s": 4.0, "stats_per_s": 4.0, "names_per_s": 20.0}
    assert sorted(asked["open"] + asked["stat"]) == sorted(map(str, files))
    assert sorted(asked["scandir"]) == sorted(str(tmp_path / "train" / f"class {n}") for n in range(3))
    assert set(call_rates(files[:1], 100.0, seed=1)) == set(found), "one file is asked for both"

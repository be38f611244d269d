"""Paths of many files are made when they are asked for, and calls of a file system are counted as they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.datasets.file_index import Files
from dlbench.datasets.images.image_set import index_jpeg_tree
from dlbench.machine import storage
from dlbench.machine.storage import call_rates
from tests.support.jpeg_files import write_tree


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

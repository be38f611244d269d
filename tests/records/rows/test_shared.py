"""The rows of several ranks in one file: what each rank reads, whatever was torn or damaged in between."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.errors import IncompleteDataError, RunError
from dlbench.records.folder import RunFolder
from dlbench.records.rows.reader import read_columns
from dlbench.records.rows.shared import HEAD_BYTES, block, read_parts
from dlbench.records.rows.steps import StepReader, StepWriter, read_steps

ROW = (0, 10, 20, 1, 2, 3, 4, 5, 5, 8, 0.5)


def writer(path: Path, rank: int, capacity: int = 2) -> StepWriter:
    return StepWriter(path, {"rank": rank, "run_id": "x"}, capacity)


def rows(path: Path, ranks: int, steps: int) -> None:
    """Ranks take turns, each a block of two steps."""
    writers = [writer(path, rank) for rank in range(ranks)]
    for step in range(steps):
        for rank, one in enumerate(writers):
            one.append((step, *ROW[:-1], float(rank)))
    for one in writers:
        one.close()


def steps_of(path: Path, rank: int) -> list[int]:
    found = read_steps(path / f"rank-{rank:04d}")
    assert set(found.steps["loss"]) <= {float(rank)}
    assert found.header["rank"] == rank
    return [int(step) for step in found.steps["step"]]


def run_folder(path: Path, nodes: int, ranks: int) -> RunFolder:
    folder = RunFolder(path)
    folder.plan.write_text(json.dumps({"layout": {"nodes": nodes, "ranks": ranks}}))
    return folder


def test_ranks_share_the_file_of_their_node(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, 2, 4)
    for rank in range(4):
        with writer(folder.node_steps(rank // 2), rank) as one:
            one.append((rank, *ROW))
    assert sorted(path.name for path in tmp_path.glob("*.steps")) == ["node-0000.steps", "node-0001.steps"]
    readers = [StepReader(folder.steps(rank)) for rank in range(4)]
    found = read_columns(readers, ("step",))
    assert found["step"].ravel().tolist() == [0, 1, 2, 3]
    assert str(folder.steps(3)) == f"{tmp_path}/node-0001.steps/rank-0003"
    with pytest.raises(IncompleteDataError, match=r"node-0002\.steps/rank-0004: cannot be read: No such file"):
        read_steps(folder.steps(4))


def test_a_rank_begins_once(tmp_path: Path) -> None:
    path = tmp_path / "node-0000.steps"
    rows(path, 2, 2)
    before = path.read_bytes()
    with pytest.raises(RunError, match=r"node-0000\.steps: cannot be written: already contains rows of rank 1; start"):
        writer(path, 1)
    assert path.read_bytes() == before
    path.write_bytes(b"of something else, and longer than a head")
    with pytest.raises(RunError, match="already contains data that no rank wrote"):
        writer(path, 1)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RunError, match="cannot be written"):
        writer(path, 1)


@given(cut=st.integers(1, 400), steps=st.integers(2, 6))
def test_a_file_that_ends_anywhere_reads_up_to_there(
    tmp_path_factory: pytest.TempPathFactory, cut: int, steps: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "node-0000.steps"
    rows(path, 2, steps)
    whole = path.read_bytes()
    left = max(HEAD_BYTES, len(whole) - cut)
    path.write_bytes(whole[:left])
    starts = [mark.start() for mark in re.finditer(re.escape(whole[:10]), whole)]
    ends = dict(zip(starts, [*starts[1:], len(whole)], strict=True))
    read, torn = 0, 0
    for rank in range(2):
        # Ranks take turns: a header each, then blocks of two steps.
        header, *blocks = [ends[start] <= left for start in starts if whole[start + 16] == rank]
        if not header:
            with pytest.raises(IncompleteDataError):
                read_steps(path / f"rank-{rank:04d}")
            continue
        found = read_steps(path / f"rank-{rank:04d}")
        assert found.steps["step"].tolist() == list(range(min(steps, 2 * sum(blocks))))
        read, torn = read + 1, torn + found.torn_bytes
    assert read < 2 or (torn == 0) == (left in ends.values())


@given(st.lists(st.integers(0, 2), max_size=12), st.data())
def test_torn_chunks_between_whole_ones_are_passed_over(
    tmp_path_factory: pytest.TempPathFactory, order: Sequence[int], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("torn") / "node-0000.steps"
    rows(path, 3, 1)
    blocks = {rank: part.blocks for rank, part in read_parts(path).items()}
    content, number = b"", dict.fromkeys(range(3), 0)
    for rank in (0, 1, 2, *order):
        first, later = blocks[rank]
        one, seed = (later, first.check) if number[rank] else (first, 0)
        made = block(rank, number[rank], one.json, one.rows, seed)
        if data.draw(st.booleans()):  # the disk was full for a moment: a part of it, and then the whole
            content += made[: data.draw(st.integers(0, len(made) - 1))]
        content += made
        number[rank] += 1
    path.write_bytes(content)
    for rank in range(3):
        found = read_steps(path / f"rank-{rank:04d}")
        assert len(found.steps) == order.count(rank)
        assert found.torn_bytes == 0


def test_ranks_append_at_once(tmp_path: Path) -> None:
    path = tmp_path / "node-0000.steps"

    def write(rank: int) -> None:
        with writer(path, rank, 1) as one:
            for step in range(200):
                one.append((step, *ROW[:-1], float(rank)))

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(steps_of(path, rank) == list(range(200)) for rank in range(8))


def test_a_plan_that_says_nothing_of_nodes_is_named(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, 2, 4)
    assert folder.steps(3).parent == folder.node_steps(1)
    for content in (
        "",
        "[]",
        '{"layout": 3}',
        '{"layout": {"ranks": 4, "nodes": 0}}',
        '{"layout": {"ranks": 1, "nodes": 2}}',
    ):
        folder.plan.write_text(content)
        with pytest.raises(IncompleteDataError, match=r"plan\.json: does not show which node has rank 3: "):
            folder.steps(3)
    folder.plan.unlink()
    with pytest.raises(IncompleteDataError, match=r"plan\.json: does not show which node has rank 3: No such file"):
        folder.spans(3)
    assert str(run_folder(tmp_path, 1, 4).steps(3)) == f"{tmp_path}/node-0000.steps/rank-0003"


def test_a_missing_chunk_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "node-0000.steps"
    rows(path, 1, 1)
    header, later = read_parts(path)[0].blocks
    path.write_bytes(block(0, 0, header.json, header.rows, 0) + block(0, 2, later.json, later.rows, header.check))
    with pytest.raises(IncompleteDataError, match="a block is damaged"):
        read_steps(path / "rank-0000")

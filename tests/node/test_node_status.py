"""One status file for a node, whichever of its ranks live."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from dlbench.node.ranks import RankPlace
from dlbench.node.training import progress as node_status
from dlbench.node.training.progress import NodeStatus
from dlbench.records.folder import RunFolder
from dlbench.records.status import read_statuses, write_status
from tests.support.run_factory import status
from tests.support.training_data import rank_place


def place(rank: int, local_size: int = 2) -> RankPlace:
    return rank_place(rank, 4, local_size, token="start-1")


@pytest.fixture
def said(tmp_path: Path) -> Iterator[Callable[..., NodeStatus]]:
    """Makes what ranks of a node say of themselves, into one folder."""
    with ExitStack() as stack:

        def make(rank: int, local_size: int = 2) -> NodeStatus:
            return stack.enter_context(closing(NodeStatus(RunFolder(tmp_path), place(rank, local_size))))

        yield make


def stages(folder: RunFolder) -> list[tuple[int, str]]:
    return [(one.rank, one.stage) for one in read_statuses(folder)]


def names(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in folder.path.iterdir())


def test_the_first_rank_of_a_node_writes_for_all(tmp_path: Path, said: Callable[..., NodeStatus]) -> None:
    folder = RunFolder(tmp_path)
    first, second = (said(rank) for rank in (2, 3))
    second.report(status(3, "n1", "measuring"))
    assert names(folder) == []
    first.report(status(2, "n1", "measuring"))
    assert names(folder) == ["node-0001.status.json"]
    assert stages(folder) == [(2, "measuring"), (3, "measuring")]


def test_a_rank_that_begins_before_the_first_is_heard_later(tmp_path: Path, said: Callable[..., NodeStatus]) -> None:
    folder = RunFolder(tmp_path)
    second = said(1)
    second.report(status(1, "n0", "starting"))
    first = said(0)
    first.report(status(0, "n0", "starting"))
    assert stages(folder) == [(0, "starting")]
    second.tick()
    first.tick()
    assert stages(folder) == [(0, "starting"), (1, "starting")]
    assert names(folder) == ["node-0000.status.json"]


def test_a_rank_without_its_first_one_writes_a_file_of_its_own(
    tmp_path: Path, said: Callable[..., NodeStatus], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    second = said(1)
    second.report(status(1, "n0", "starting"))
    second.tick()
    assert names(folder) == []
    monkeypatch.setattr(node_status, "ALONE_AFTER_S", -1.0)
    second.tick()
    assert stages(folder) == [(1, "starting")]
    second.report(status(1, "n0", "done"))
    assert stages(folder) == [(1, "done")]


def test_the_newest_word_of_a_rank_counts(tmp_path: Path, said: Callable[..., NodeStatus]) -> None:
    folder = RunFolder(tmp_path)
    only = said(0, 1)
    only.report(status(0, "n0", "measuring", updated="2026-03-01T12:00:00Z"))
    write_status(folder, status(0, "n0", "failed", updated="2026-03-01T12:00:01Z"))
    assert stages(folder) == [(0, "failed")]
    only.report(status(0, "n0", "starting", updated="2026-03-01T12:00:02Z"))  # another attempt in the same folder
    assert stages(folder) == [(0, "starting")]

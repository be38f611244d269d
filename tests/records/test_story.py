"""Which of several failed ranks is told first, and what is said of those that only lost it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from dlbench.errors import RunError
from dlbench.records import status as status_module
from dlbench.records.files import write_json
from dlbench.records.folder import RunFolder
from dlbench.records.status import Failure, RankStatus, failure_line, first_cause, room_for_failure, write_failure
from tests.support.run_factory import status

BAD = "'a.jpg': damaged"
EARLY, LATE = "2026-03-01T12:00:00.100000Z", "2026-03-01T12:00:00.200000Z"


def failed(rank: int, reason: str, kind: str, at: str = EARLY) -> RankStatus:
    return status(rank, "n0", "failed", reason, failure=kind, failed_at=at)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_whoever_failed_by_itself_is_told_first_whatever_its_number(order: tuple[int, ...]) -> None:
    own, stalled, peer = order
    ranks = [
        failed(own, BAD, "own", LATE),
        failed(stalled, "no progress for 30 s", "stalled", EARLY),
        failed(peer, "Connection closed by peer", "peer", EARLY),
    ]
    ranks.sort(key=lambda one: one.rank)
    cause = first_cause(ranks)
    assert cause.rank == own
    story = failure_line(ranks, None, "step")
    assert story == f"rank {own} on n0 failed at step 7: {BAD}; 2 other ranks ended with it"


def test_of_two_that_failed_by_themselves_the_earlier_is_told() -> None:
    story = failure_line([failed(0, "second", "own", LATE), failed(1, "first", "own", EARLY)], None, "step")
    assert story == "rank 1 on n0 failed at step 7: first; 1 other rank ended with it"


def test_a_rank_that_the_launcher_ended_has_not_vanished() -> None:
    story = failure_line([status(0, "n0", "measuring"), failed(1, BAD, "own")], None, "step")
    assert story == f"rank 1 on n0 failed at step 7: {BAD}; 1 other rank ended with it"
    seen = Failure(reason="rank 1 was the first to end, with exit code 1: no torch (see rank-0001.log)", rank=1)
    assert failure_line([status(0, "n0", "starting")], seen, "step") == f"{seen.reason}; 1 other rank ended with it"


def test_who_went_without_a_word_comes_before_those_who_lost_it_and_the_step_may_be_old() -> None:
    ranks = [failed(0, "Connection closed", "peer"), status(1, "n1", "measuring"), failed(2, "the same", "peer")]
    told = "vanished at step 7 or later (measuring); 2 other ranks ended with it"
    assert failure_line(ranks, None, "step") == f"rank 1 on n1 {told}"
    seen = Failure(reason="rank 1 was the first to end, by signal SIGKILL", rank=1)
    assert failure_line(ranks, seen, "step") == (
        f"{seen.reason}; it was on n1, at step 7 or later (measuring); 2 other ranks ended with it"
    )


def test_a_rank_that_was_stopped_has_not_vanished() -> None:
    ranks = [failed(0, "no progress for 30 s", "stalled"), status(1, "n1", "measuring"), status(2, "n2", "measuring")]
    story = failure_line(ranks, Failure(reason="", stopped=(2,)), "step")
    assert story.startswith("rank 2 on n2 was stopped (state T: SIGSTOP, Ctrl-Z or a debugger) at step 7")
    assert "rank 2 on n2 vanished" not in story


def test_peers_alone_are_told_once() -> None:
    ranks = [failed(0, "Connection closed by peer", "peer", LATE), failed(1, "Broken pipe", "peer", EARLY)]
    assert failure_line(ranks, None, "step") == "rank 1 on n0 failed at step 7: Broken pipe; 1 other rank ended with it"


def test_an_interruption_names_no_rank() -> None:
    ranks = [status(0, "n0", "measuring"), status(1, "n0", "measuring")]
    assert failure_line(ranks, Failure(reason="interrupted by the user"), "step") == "interrupted by the user"


def test_a_full_disk_has_room_for_why_the_run_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)

    def write(path: Path, content: Any) -> None:
        if any(tmp_path.iterdir()):  # nothing fits beside what is there
            raise RunError(f"{path}: cannot be written: No space left on device")
        write_json(path, content)

    monkeypatch.setattr(status_module, "write_json", write)
    with room_for_failure(folder):
        write_failure(folder, "rank 1: disk full", rank=1)
    assert [path.name for path in tmp_path.iterdir()] == ["failure.json"]
    with room_for_failure(RunFolder(tmp_path / "gone")):  # nothing to keep room in: no error
        pass
    with room_for_failure(folder):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["failure.json"]


def test_what_is_not_utf8_is_written_as_escapes(tmp_path: Path) -> None:
    odd = b"h\xff\xc3\xa4".decode("utf-8", "surrogateescape")
    write_json(tmp_path / "x.json", {"host": odd, "list": [odd, 1], odd: "\ud800", "plain": "ä"})
    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert '"host": "h\\\\xffä"' in text
    assert '"plain": "ä"' in text

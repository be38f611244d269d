"""Projections that are recorded, changed, lost, and scored against what was measured afterwards."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.errors import UserError
from dlbench.projection import ledger
from dlbench.projection.ledger import MeasuredRun, RecordedProjection, against, read_ledger, record, score
from dlbench.projection.projected import Projection
from dlbench.records.scan import scan
from tests.projection.hand_made import band, ingredients, projection, target

NOW = datetime(2026, 11, 24, 18, 0, tzinfo=UTC)
LATER = "2026-11-25T08:00:00Z"


def kept(folder: Path, made: Projection | None = None, now: datetime = NOW, **given: object) -> Path:
    return record(folder, ingredients(**given), made or projection(), now)


def run(step_s: float, ranks: int = 64, created: str = LATER, **changes: object) -> MeasuredRun:
    fields = {"configuration": "c0ffee", "ranks": ranks, "nodes": ranks, "created": created, "step_s": step_s}
    return MeasuredRun(**(fields | changes))


def test_what_is_recorded_is_read_back_whole(tmp_path: Path) -> None:
    path = kept(tmp_path, now=NOW.astimezone(timezone(timedelta(hours=5))))
    assert path.parent == tmp_path / ".projections"
    assert path.name.startswith("20261124T180000Z-")
    (one,) = read_ledger(tmp_path)[0]
    assert one.created == "2026-11-24T18:00:00Z"
    assert [two.ranks for two in one.targets] == [64, 256]
    assert one.targets[0].step_s == band(0.14).quantiles
    assert one.ingredients == ingredients().model_dump(mode="json")
    assert "1024 ranks are more than 64 times" in one.refused[0]
    assert kept(tmp_path) == path  # The same again is the same file, and another one stands beside it.
    assert kept(tmp_path, projection(target(64))) != path
    assert len(read_ledger(tmp_path, tmp_path)[0]) == 2
    assert scan(tmp_path).runs == []
    assert scan(tmp_path).problems == []


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b'{"format": "dlbench.projection", "version": 2}'])
def test_damaged_and_foreign_files_are_a_line_each(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / ".projections"
    folder.mkdir()
    good = kept(tmp_path)
    (folder / "notes.txt").write_bytes(content)
    (folder / f"20261124T180000Z-{ledger.digest_of(content)}.json").write_bytes(content)
    (folder / "20261124T180000Z-0123456789ab.json").mkdir()
    (folder / "20261124T180001Z-0123456789ab.json").symlink_to(good)
    (folder / ".20261124.partial").write_bytes(content)
    found, problems = read_ledger(tmp_path)
    assert (len(found), len(problems)) == (1, 4)
    assert all(line.count("\n") == 0 and "is ignored: " in line for line in problems)


def test_nothing_is_recorded_of_nothing_or_into_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no rank count was projected"):
        kept(tmp_path, replace(projection(), targets=()))
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(UserError, match="single run"):
        kept(tmp_path)


def test_only_later_runs_of_the_same_configuration_and_place_count(tmp_path: Path) -> None:
    kept(tmp_path)
    book = read_ledger(tmp_path)[0]
    for other in (
        run(0.14, created="2026-11-24T18:00:00Z"),
        run(0.14, configuration="other"),
        run(0.14, ranks=128),
        run(0.14, nodes=32),
    ):
        assert against(book, [other]) == ()
    (row,) = against(book, [run(0.15), run(0.16)])
    assert row.measured_s == pytest.approx(math.sqrt(0.15 * 0.16))
    assert row.accuracy == pytest.approx(1 - abs(0.14 / row.measured_s - 1))
    assert (row.is_in_80, row.is_in_95, row.doublings) == (False, False, 3.0)
    # By hand: 80 % of the draws lie from 0.133 to 0.147.
    assert row.interval_score == pytest.approx((0.014 + 10 * (row.measured_s - 0.147)) / row.measured_s)


def test_of_repeated_projections_the_last_before_the_first_run_counts(tmp_path: Path) -> None:
    for hours, step in ((0, 0.10), (1, 0.11), (3, 0.12)):
        kept(tmp_path, projection(target(64, step)), NOW + timedelta(hours=hours))
    book = read_ledger(tmp_path)[0]
    runs = [run(0.13, created=f"2026-11-24T{hour}:00:00Z") for hour in (20, 22)]
    (row,) = against(book, runs)
    assert row.projected.value == pytest.approx(0.11)
    assert row.runs == 2


def test_scores_are_by_doublings(tmp_path: Path) -> None:
    kept(tmp_path, projection(*(target(8 * 2**n) for n in (1, 2, 3, 4))))
    rows = against(read_ledger(tmp_path)[0], [run(0.14 * (1 + n / 25), ranks=8 * 2**n) for n in (1, 2, 3, 4)])
    found = {one.scope: one for one in score(rows)}
    assert {scope: one.rows for scope, one in found.items()} == {
        "in all": 4,
        "up to one doubling": 1,
        "two doublings": 1,
        "three doublings or more": 2,
    }
    assert found["in all"].in_80 == 1
    assert found["up to one doubling"].mean_accuracy == pytest.approx(1 - (1 - 1 / 1.04))
    assert score(()) == ()


@given(st.lists(st.floats(-0.3, 0.3), min_size=10, max_size=14))
def test_ten_rows_of_a_system_speak_of_its_model_error(errors: list[float]) -> None:
    rows = [
        row
        for n, error in enumerate(errors)
        for row in against(
            [book_of(target(64), configuration=str(n))], [run(0.14 * math.exp(error), configuration=str(n))]
        )
    ]
    found = ledger.misses_of(rows, "box")
    assert [one.error for one in found] == pytest.approx(errors)
    assert {one.doublings for one in found} == {3.0}
    assert ledger.misses_of([replace(row, by="points") for row in rows], "box") == ()
    assert ledger.misses_of(rows, "other") == ledger.misses_of(rows[:9], "box") == ()


def book_of(*targets: object, **given: object) -> RecordedProjection:
    made = projection(*targets)  # type: ignore[arg-type]
    return ledger.recorded(ingredients(**given), made, NOW)

"""Projections that are recorded, changed, lost, and scored against what was measured afterwards."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.errors import UserError
from dlbench.projection import ledger
from dlbench.projection.ledger import MeasuredRun, RecordedProjection, against, read_ledger, record, recorded, score
from dlbench.projection.projected import Projection
from dlbench.projection.step import project
from dlbench.records.comm import scan_comm
from dlbench.records.scan import scan
from tests.conftest import Cli
from tests.projection.hand_made import band, ingredients, projection, target
from tests.projection.test_gathering import NETWORK, read, write
from tests.support.schemas import validator

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


EARLY = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / "box.network.json"
    inside = NETWORK.model_copy(update={"inside": NETWORK.across})
    path.write_text(inside.model_dump_json())
    return path


def test_a_recorded_projection_is_scored_by_runs_planned_since(cli: Cli, tmp_path: Path, costs: Path) -> None:
    runs = tmp_path / "runs"
    write(runs)
    asked = ("project", "runs", runs, "--to", "16", "--network", costs, "--record", "--format", "json")
    done = cli(*asked)
    assert done.returncode == 0, done.stderr
    (file,) = (runs / ".projections").iterdir()
    assert f"{file}: recorded" in done.stderr
    assert [one["ranks"] for one in json.loads(file.read_text())["targets"]] == [16]
    assert not scan_comm(runs).runs
    assert [one["ranks"] for one in json.loads(done.stdout)["groups"][0]["costs"]] == [16]

    # The larger runs of this test are planned before today, so it is recorded as of an earlier day.
    waiting = cli("project", "score", runs)
    assert waiting.returncode == 4
    assert "no recorded projection was measured since" in waiting.stderr
    found, _, _ = read(runs)
    projection = project(found.model_copy(update={"network": None}), (16,))
    record(runs, found, projection, EARLY)
    write(runs, (8,), series="larger")
    scored = cli("project", "score", runs, "--format", "json")
    assert scored.returncode == 0, scored.stderr
    content = json.loads(scored.stdout)
    validator("projection").validate(content)
    (row,) = content["ledger"]
    assert (row["anchor_ranks"], row["ranks"], row["runs"], row["doublings"]) == (8, 16, 3, 1.0)
    assert row["accuracy"] == pytest.approx(1 - abs(row["projected"]["value"] / row["measured_s"] - 1))
    table = cli("project", "runs", runs, "--to", "32", "--network", costs, "--format", "csv")
    assert table.stdout.startswith("group,ranks,nodes,")


def test_a_changed_record_is_a_line_and_a_code(cli: Cli, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write(runs)
    found, _, _ = read(runs)
    path = record(runs, found, project(found, (16,)), EARLY)
    path.write_text(path.read_text().replace('"ranks": 16', '"ranks": 32').replace('"ranks":16', '"ranks":32'))
    scored = cli("project", "score", runs)
    assert scored.returncode == 4
    assert f"{path}: is ignored: it was changed after it was recorded" in scored.stderr
    assert "Traceback" not in scored.stderr
    warned = cli("project", "runs", runs, "--to", "16")
    assert "changed after it was recorded" in " ".join(warned.stdout.split())
    store = tmp_path / "store"
    brought = cli("history", "import", runs, "--store", store)
    assert brought.returncode == 4
    assert "changed after it was recorded" in brought.stderr
    path.write_text(recorded(found, project(found, (16,)), EARLY).model_dump_json(indent=1) + "\n")
    assert "1 recorded projections imported" in cli("history", "import", runs, "--store", store).stdout
    assert (store / ".projections" / path.name).read_bytes() == path.read_bytes()
    again = cli("history", "import", runs, "--store", store)
    assert (again.returncode, "recorded projections" in again.stdout) == (0, False)
    assert "no recorded projection" in cli("project", "score", store).stderr


def test_measured_strategies_stand_beside_the_model(cli: Cli, tmp_path: Path, costs: Path) -> None:
    """Runs that differ in strategy alone: 4 and 8 ranks of replicas, then 4 of sharded and of local training."""
    runs = tmp_path / "runs"
    write(runs, engine="ddp")
    asked = ("project", "runs", runs, "--network", costs, "--to", "16,4", "--strategy", "all", "--format", "json")
    local = {"sync.average_every": 4}
    write(runs, (2,), engine="fsdp", series="sharded")
    write(runs, (2,), engine="ddp", series="local", overrides=local)
    write(runs, (2,), engine="ddp", series="other", overrides={**local, "train.optimizer.learning_rate": 0.5})
    content = json.loads(cli(*asked).stdout)
    (data,) = [
        group for group in content["groups"] if group["label"].count("PyTorch DDP, ") and "local" not in group["label"]
    ]
    measured = {(row["strategy"], row["ranks"]): row for row in data["strategies"] if row["measured_s"] is not None}
    assert sorted(measured) == [("data", 2), ("data", 4), ("data", 8), ("fsdp", 4), ("local-sgd", 4)]
    row = measured["local-sgd", 4]
    assert row["measured_s"] == pytest.approx(measured["data", 4]["measured_s"], rel=1e-3)
    assert row["average_every"] == 4
    assert (row["measured_sent_bytes"], row["measured_memory_bytes"]) == (1e6, None)
    # Momentum is averaged as well.
    assert row["sent_bytes"] == pytest.approx(2 * measured["data", 4]["sent_bytes"] / 4)
    # Over Gloo, but for the root, which is gathered once.
    assert measured["fsdp", 4]["sent_bytes"] == pytest.approx(2 * measured["data", 4]["sent_bytes"], rel=1e-3)
    words = " ".join(cli(*asked[:-2]).stdout.split())
    assert "local-sgd at 4 ranks:" in words
    assert "bytes sent" in words


def test_measured_slabs_stand_beside_the_cut_that_was_run(cli: Cli, tmp_path: Path, costs: Path) -> None:
    runs, asked = tmp_path / "runs", {"workload": "cosmoflow", "preset": "ci", "engine": "ddp"}
    write(runs, **asked)
    write(runs, (1, 2), series="cut", overrides={"engine.ddp.spatial_ranks": 2}, **asked)
    words = ("project", "runs", runs, "--network", costs, "--to", "16", "--strategy", "all", "--format", "json")
    cut = {}
    for group in json.loads(cli(*words).stdout)["groups"]:
        for row in group["strategies"]:
            if "spatial" in row["strategy"] and row["measured_s"] is not None:
                cut[row["strategy"]] = row["replicas"], row["sent_bytes"]
    # As counted by real runs of these settings: an all-reduce of 1,218,676 gradients, and 606,208 bytes of planes.
    gradients = 2 * 4 * 1_218_676
    assert cut == {"spatial": (1, gradients / 2 + 606_208), "data+spatial": (2, gradients * 3 / 4 + 606_208)}

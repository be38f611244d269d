"""`dlbench project runs --record` and `project score`: from a projection to its score once larger runs are there."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dlbench.projection.ledger import record, recorded
from dlbench.projection.step import project
from dlbench.records.comm import scan_comm
from tests.conftest import Cli
from tests.projection.test_gathering import NETWORK, read, write
from tests.support.schemas import validator

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

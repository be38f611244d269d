"""`dlbench project --record` and `--against`: from a projection of runs to its score once larger ones are there."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import jsonschema
import pytest

from dlbench.cli.show import schema
from dlbench.projection.ledger import record, recorded
from dlbench.projection.step import project
from dlbench.records.comm import scan_comm
from tests.conftest import Cli
from tests.projection.test_gathering import NETWORK, read, write

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
    asked = ("project", runs, "--to", "16", "--network", costs, "--record", "--format", "json")
    done = cli(*asked)
    assert done.returncode == 0, done.stderr
    (file,) = (runs / ".projections").iterdir()
    assert f"{file}: recorded" in done.stderr
    assert [one["ranks"] for one in json.loads(file.read_text())["targets"]] == [16]
    assert not scan_comm(runs).runs
    levels = {level["level"]: level["phi"] for level in json.loads(done.stdout)["groups"][0]["network"]}
    assert [one["ranks"] for one in json.loads(done.stdout)["groups"][0]["costs"]] == [16]
    assert levels == {"inside": None, "across": 1.0}  # A ring crosses each node's link once at a time.

    # The larger runs of this test are planned before today, so it is recorded as of an earlier day.
    waiting = cli("project", runs, "--against")
    assert waiting.returncode == 4
    assert "no recorded target was measured since" in waiting.stderr
    found, _, _ = read(runs)
    projection = project(found.model_copy(update={"network": None}), (16,))
    record(runs, found, projection, EARLY)
    write(runs, (8,), series="larger")
    scored = cli("project", runs, "--against", "--format", "json")
    assert scored.returncode == 0, scored.stderr
    content = json.loads(scored.stdout)
    jsonschema.validate(content, schema("projection"), cls=jsonschema.Draft202012Validator)
    (row,) = content["ledger"]
    assert (row["anchor_ranks"], row["ranks"], row["runs"], row["doublings"]) == (8, 16, 3, 1.0)
    assert row["accuracy"] == pytest.approx(1 - abs(row["projected"]["value"] / row["measured_s"] - 1))
    table = cli("project", runs, "--to", "32", "--network", costs, "--format", "csv")
    assert table.stdout.startswith("group,ranks,nodes,")


def test_a_changed_record_is_a_line_and_a_code(cli: Cli, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write(runs)
    found, _, _ = read(runs)
    path = record(runs, found, project(found, (16,)), EARLY)
    path.write_text(path.read_text().replace('"ranks": 16', '"ranks": 32').replace('"ranks":16', '"ranks":32'))
    scored = cli("project", runs, "--against")
    assert scored.returncode == 4
    assert f"{path}: does not count: it was changed after it was recorded" in scored.stderr
    assert "Traceback" not in scored.stderr
    warned = cli("project", runs, "--to", "16")
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
    assert "no recorded target" in cli("project", store, "--against").stderr

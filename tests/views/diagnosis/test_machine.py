"""Telemetry and energy as `dlbench diagnose` tells them: words, JSON, which runs count; no raw text on the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dlbench.cli import cli
from tests.support.run_factory import Story, constant, edit_json, plans, write_run
from tests.support.watch_factory import write_samples
from tests.views.test_telemetry import COLUMNS, nodes_plans, one_run, rows

S = 1_000_000_000


def run_cli(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(cli, list(map(str, arguments)), catch_exceptions=False)
    for text in (result.stdout, result.stderr):
        assert not set(text) & {"\x1b", "\x07", "\r"}
    return result


def runs_of(found: dict[str, Any], view: str = "telemetry") -> list[dict[str, Any]]:
    return [run for group in found["groups"] for run in group[view]["runs"]]


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def as_json(out: Path, code: int = 0) -> dict[str, Any]:
    result = run_cli("diagnose", out, "--format", "json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout, parse_constant=refuse)


# Words and JSON


def test_json_has_every_field(tmp_path: Path) -> None:
    folder = one_run(tmp_path)
    (told,) = runs_of(as_json(tmp_path))
    assert (told["run_id"], told["not_measured"]) == (folder.path.name, {})
    (node,) = told["nodes"]
    assert set(COLUMNS) - {"gpu.0.clock_reasons"} <= set(node["fields"])
    assert node["fields"]["gpu.0.power_w"]["mean"] == pytest.approx(250)
    assert node["fields"]["gpu.0.sm_clock_hz"]["mean"] == pytest.approx(1.425e9)
    received = node["fields"]["host.net.eth0.received_bytes"]
    assert (received["is_rate"], received["mean"]) == (True, pytest.approx(2e6))
    assert node["clock_reasons"] == {"gpu.0": {"sw_thermal_slowdown": pytest.approx(0.25)}}
    assert (node["num_gaps"], node["missing"], node["num_samples"]) == (0, 0.0, 12)


def test_of_many_nodes_twelve_are_shown_and_all_are_in_the_json(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path, nodes_plans((14,))[0], constant([100, 0, 300, 400, 100, 100]), Story(host=lambda rank: f"n{rank}")
    )
    for node in range(14):
        # Each rank of the factory starts a second later than the one before.
        moved = [(row[0] + node * S, *row[1:]) for row in rows()]
        write_samples(folder, node, COLUMNS, moved, host=f"n{node}")
    text = " ".join(run_cli("diagnose", "--full", tmp_path).stdout.split())
    assert "At 14 ranks on 14 nodes: 12 of 14 nodes, the most throttled first." in text
    (told,) = runs_of(as_json(tmp_path))
    assert [node["host"] for node in told["nodes"]] == [f"n{node}" for node in range(14)]
    assert all(node["num_samples"] == 12 for node in told["nodes"])


# Which runs count, and how it ends


def test_steps_that_disagree_with_the_record_give_no_energy(tmp_path: Path) -> None:
    first, second = (one_run(tmp_path, plan) for plan in plans(points=(1,), repeats=2))
    ranks = json.loads(first.record.read_text(encoding="utf-8"))["ranks"]
    edit_json(first.record, ranks=[{**rank, "samples": rank["samples"] * 2} for rank in ranks])
    assert [run["run_id"] for run in runs_of(as_json(tmp_path, code=4), "energy")] == [second.path.name]

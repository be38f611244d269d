"""Telemetry and energy as `dlbench diagnose` tells them: words, JSON, which runs count; no raw text on the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dlbench.cli import cli
from dlbench.records.folder import RunFolder
from dlbench.specs.plan import RunPlan
from tests.support.run_factory import Story, constant, edit_json, plans, write_run
from tests.support.watch_factory import write_samples

S = 1_000_000_000
THERMAL = 0x20
COLUMNS = [
    *(f"gpu.0.{name}" for name in ("power_w", "sm_clock_hz", "clock_reasons", "temperature_c")),
    *("host.cpu.0.busy", "host.memory_used_bytes", "host.net.eth0.received_bytes", "host.net.eth1.received_bytes"),
    "host.energy.package-0_j",
]


def values(t: float) -> list[float]:
    """A GPU that throttles for a quarter of the measured window, from second 4 to 16; eth1 is at rest."""
    throttled = 10 < t < 13
    return [250.0, 1.2e9 if throttled else 1.5e9, THERMAL if throttled else 0, 61, 0.5, 3e9, 1e12 + 2e6 * t, 7, 80 * t]


def rows(make: Callable[[float], Sequence[float]] = values) -> list[tuple[float, ...]]:
    """Every second, in its middle, from before the first step to behind the last."""
    return [(round((number + 0.5) * S), *make(number + 0.5)) for number in range(-3, 19)]


def one_run(out: Path, plan: RunPlan | None = None, device: str = "cuda:0 (NVIDIA A100)", **more: Any) -> RunFolder:
    """One rank, steps of a second, and samples."""
    plan = plan or plans(points=(1,), repeats=1)[0]
    folder = write_run(out, plan, constant([100, 0, 300, 400, 100, 100]), Story(device=device))
    write_samples(folder, 0, more.pop("columns", COLUMNS), more.pop("rows", rows()), **more)
    return folder


def many_nodes(nodes: int) -> RunPlan:
    return plans(
        system="example-gpu",
        points=(nodes,),
        ranks_per_node=1,
        repeats=1,
        overrides={"layout.cores_per_rank": 1, "system.node.gpus": 1},
    )[0]


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
        tmp_path, many_nodes(14), constant([100, 0, 300, 400, 100, 100]), Story(host=lambda rank: f"n{rank}")
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

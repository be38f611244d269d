"""`dlbench.open`: what a notebook sees of runs is what the report says, with units."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dlbench
from dlbench.errors import IncompleteDataError, UserError
from tests.conftest import Cli
from tests.support.run_factory import write_scaling
from tests.support.watch_factory import large_run

NOTEBOOK = """
import dlbench
runs = dlbench.open("runs")
points = runs.points()
slowest = points.loc[points.efficiency.idxmin()]
steps = runs.steps(runs.runs().run_id[0])
measured = steps[~steps.warmup]
mean_ms = measured.step_ns.mean() / 1e6
print(int(slowest.ranks), points.attrs["units"]["step_s"], mean_ms, steps.attrs["units"]["step_ns"])
"""


def test_a_notebook_reads_runs(tmp_path: Path) -> None:
    write_scaling(tmp_path / "runs", points=(1, 2))
    done = subprocess.run([sys.executable, "-c", NOTEBOOK], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "s", "100.0", "ns"]


@pytest.mark.parametrize("name", ["runs", "points", "parts"])
def test_a_frame_is_the_table_as_csv(cli: Cli, tmp_path: Path, name: str) -> None:
    write_scaling(tmp_path / "runs", points=(1, 2))
    written = cli("report", tmp_path / "runs", "--format", "csv", "--table", name).stdout
    rows = list(csv.DictReader(io.StringIO(written)))
    frame = dlbench.open(tmp_path / "runs").table(name)
    assert list(frame.columns) == list(rows[0])
    as_text = frame.astype(object).where(frame.notna(), "").map(str).to_dict("records")
    assert as_text == rows


def test_messages_and_telemetry_are_the_rows_of_a_watched_run(tmp_path: Path) -> None:
    run = large_run(tmp_path / "runs", ranks=2, steps=20, ranks_per_node=1)
    opened = dlbench.open(tmp_path / "runs")
    name = run.path.name
    messages = opened.messages(name)
    assert set(messages["rank"]) == {0, 1}
    assert (messages.duration_ns > 0).all()
    assert (messages.num_bytes > 0).all()
    telemetry = opened.telemetry(name)
    assert set(telemetry["node"]) == {0, 1}
    power = next(column for column in telemetry.columns if column.endswith("power_w"))
    assert telemetry.attrs["units"][power] == "W"
    steps = opened.steps(name)
    assert len(steps) == 2 * 20
    begin = steps.groupby("step").start_ns.agg(np.ptp)
    assert begin.max() < steps.step_ns.max()  # one clock: ranks of two nodes begin a step together


def test_what_is_missing_or_damaged_is_said(tmp_path: Path) -> None:
    (plan, *_) = write_scaling(tmp_path / "runs", points=(1,))
    opened = dlbench.open(tmp_path / "runs")
    assert opened.telemetry(plan.run_id).empty
    with pytest.raises(UserError, match=plan.run_id[:10]):
        opened.steps(plan.run_id[:-1])
    with pytest.raises(UserError, match="points"):
        opened.table("point")
    (tmp_path / "runs" / plan.run_id / "node-0000.steps").write_bytes(b"torn")
    with pytest.raises(IncompleteDataError, match=plan.run_id):
        dlbench.open(tmp_path / "runs").steps(plan.run_id)
    with pytest.raises(UserError):
        dlbench.open(tmp_path / "none")


def test_where_rows_count_different_samples_the_units_hold_all_and_each_row_says_its_own(tmp_path: Path) -> None:
    write_scaling(tmp_path, points=(1, 2))
    write_scaling(tmp_path, workload="cosmoflow", preset="ci", data="synthetic", series="s2", points=(1, 2))
    opened = dlbench.open(tmp_path)
    for name in ("points", "time-to-train"):
        frame = opened.table(name)
        assert set(frame.attrs["units"]["throughput_per_s"].split(" or ")) == {"images/s", "volumes/s"}
        assert frame.groupby("group").sample_unit.unique().map(list).tolist() in (
            [["images"], ["volumes"]],
            [["volumes"], ["images"]],
        )
    assert opened.points().attrs["units"]["step_s"] == "s"

"""A network from outside of dlbench, the example of docs/architecture.md: found by DLBENCH_PATH and trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

FOLDER = ROOT / "tests" / "support" / "unet3d"

COUNTED = """
from dlbench.node.models.build import build_model, forward_macs, training_flops_per_sample
from dlbench.specs.choices import WorkloadFile, choose
from dlbench.specs.files import find
chosen = choose(WorkloadFile(find("workloads", "unet3d")), None, {})
layers = forward_macs(chosen.model, chosen.data)
assert training_flops_per_sample(layers) == chosen.model.training_flops(chosen.data) > 0
assert sum(p.numel() for p in build_model(chosen.model).parameters()) == 43_505
assert chosen.sample_unit == "volumes"
"""


def call(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "DLBENCH_PATH": str(FOLDER)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def test_both_halves_count_the_same_work(tmp_path: Path) -> None:
    done = call("-c", COUNTED, folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_it_trains_and_is_reported(tmp_path: Path) -> None:
    done = call(
        *("-m", "dlbench", "run", "unet3d", "--ranks", "1", "--engine", "single", "--out", "runs"),
        *("--set", "measure.warmup_s=0", "--set", "measure.measured_s=0", "--set", "layout.cores_per_rank=1"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "runs").glob("*/record.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    (rank,) = record["ranks"]
    assert (record["state"], record["steps"]) == ("valid", 12)
    assert rank["last_loss"] < 0.9 * rank["first_loss"]
    assert "volumes/s" in done.stdout
    report = call("-m", "dlbench", "report", "runs", "--format", "json", folder=tmp_path)
    assert report.returncode == 0, report.stderr
    assert json.loads(report.stdout)["groups"]


def test_a_module_that_cannot_be_loaded_stops_only_its_own_workload(tmp_path: Path) -> None:
    (tmp_path / "workloads").mkdir()
    (tmp_path / "workloads" / "unet3d.yaml").write_bytes((FOLDER / "workloads" / "unet3d.yaml").read_bytes())
    (tmp_path / "workloads" / "unet3d.py").write_text("print('loud')\nraise SystemExit(0)\n")
    environment = {**os.environ, "DLBENCH_PATH": str(tmp_path)}
    command = [sys.executable, "-m", "dlbench"]

    def dlbench(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)

    listed = dlbench("ls", "--json")
    assert json.loads(listed.stdout)
    assert dlbench("run", "resnet50", "--preset", "ci", "--dry-run").returncode == 0
    refused = dlbench("run", "unet3d", "--dry-run")
    assert refused.returncode == 2
    assert "unet3d.py: cannot be loaded: SystemExit" in refused.stderr

"""Networks from outside of dlbench, the examples of docs/architecture.md: found by DLBENCH_PATH and trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

FOLDER = ROOT / "tests" / "support" / "unet3d"
VGG16 = ROOT / "examples" / "vgg16"

COUNTED = """
import torch
from dlbench.node.models.build import build_model, forward_macs, training_flops_per_sample
from dlbench.specs.choices import WorkloadFile, choose
from dlbench.specs.files import find
for name in ("unet3d", "vgg16"):
    chosen = choose(WorkloadFile(find("workloads", name)), None, {})
    counted = forward_macs(chosen.model, chosen.data)
    assert training_flops_per_sample(counted) == chosen.model.training_flops(chosen.data) > 0
    with torch.device("meta"):
        print(sum(p.numel() for p in build_model(chosen.model).parameters()), chosen.sample_unit)
table = chosen.model.layer_table(chosen.data)
print(sum(layer.weights for layer in table))
assert {layer.name: layer.macs for layer in counted} == {layer.name: layer.macs for layer in table if layer.macs}
"""


def call(*arguments: str, folder: Path, path: Path | str = FOLDER) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "DLBENCH_PATH": str(path)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def test_both_halves_count_the_same_work(tmp_path: Path) -> None:
    done = call("-c", COUNTED, folder=tmp_path, path=f"{FOLDER}:{VGG16}")
    # 138,357,544: torchvision's VGG16_Weights.IMAGENET1K_V1, num_params.
    assert done.stdout.splitlines() == ["43505 volumes", "138357544 images", "138357544"], done.stderr


def test_vgg16_trains_with_wire_int8(tmp_path: Path) -> None:
    done = call(
        *("-m", "dlbench", "run", "vgg16", "--preset", "ci", "--ranks", "2", "--engine", "ddp", "--out", "runs"),
        *("--set", "measure.warmup_s=0", "--set", "measure.measured_s=0", "--set", "layout.cores_per_rank=1"),
        *("--set", "sync.wire=int8"),
        folder=tmp_path,
        path=VGG16,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = (json.loads(path.read_text(encoding="utf-8")) for path in (tmp_path / "runs").glob("*/record.json"))
    wire = next(setting for setting in record["settings"] if setting["key"] == "sync.wire")
    assert (record["state"], wire["requested"], wire["effective"]) == ("valid", "int8", "int8")
    assert sum(message["num_bytes"] for message in record["exchange"]["messages"]) == 4 * 239_538
    assert record["exchange"]["bytes_inside"] == pytest.approx(239_538, rel=0.002)  # of 2 ranks: 1 byte a value
    assert min(record["exchange"]["packing_s"], record["exchange"]["merging_s"]) > 0


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

"""Containers in a job of a real Slurm: every rank of two nodes in a root file system of its own."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import Cli
from tests.real.test_slurm_runs import wait_for
from tests.slurm_box.box import Box
from tests.support import apptainer_stand_in, container_root
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

HAS_NO_APPTAINER = shutil.which("apptainer") is None


def system_with(folder: Path, **container: object) -> Path:
    """The box's system, whose ranks are in a container; its jobs find programs where this test does."""
    content = yaml.safe_load((ROOT / "systems" / "box.yaml").read_text())
    content["slurm"]["export"] = ["PYTHONPATH", "PATH"]
    content["container"] = {"python": sys.executable, "mounts": container_root.mounts(), **container}
    file = folder / "contained.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.mark.skipif(
    HAS_NO_APPTAINER and bool(apptainer_stand_in.lacking()), reason=f"no apptainer, and {apptainer_stand_in.lacking()}"
)
def test_ranks_of_two_nodes_train_in_a_container(cli: Cli, slurm_box: Box, tmp_path: Path) -> None:
    """In Apptainer, or, where there is none, in a stand-in that takes what `apptainer exec` takes."""
    if HAS_NO_APPTAINER:
        apptainer_stand_in.install(tmp_path)
    image = container_root.packed(container_root.made(tmp_path / "root"))
    done = cli(
        *("submit", "cosmoflow", "--preset", "ci", "--nodes", "2", "--engine", "ddp", "--launcher", "srun-gloo"),
        *("--system", system_with(tmp_path, kind="apptainer", image=str(image)), "--data", "synthetic"),
        *("--set", "measure.warmup_steps=1", "--set", "measure.measured_steps=2"),
        **{**slurm_box.environment, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    (run,) = wait_for(tmp_path / "runs", 1)
    logs = "\n".join(path.read_text(errors="replace") for path in run.folder.path.glob("*.out"))
    assert run.record is not None, f"{run.detail}\n{logs}"
    assert run.state == "valid", run.detail
    record = json.loads((run.folder.path / "record.json").read_text())
    assert record["environment"]["container.image"] == str(image)
    assert record["environment"]["container.sha256"] == hashlib.sha256(image.read_bytes()).hexdigest()
    assert record["environment"]["os"] == "Linux"  # the image has no /etc/os-release
    assert len({rank["host"] for rank in record["ranks"]}) == 2

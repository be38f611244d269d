"""What users install: built, installed into a clean environment, run outside the checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    # The sdist first and the wheel from it, as a release is made: what the sdist lacks is missing in the wheel.
    done = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return next(out.glob("dlbench-*.whl"))


def test_the_wheel_holds_choices_and_templates_and_nothing_else_beside_the_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for expected in (
        "dlbench/_bundled/workloads/resnet50.yaml",
        "dlbench/_bundled/workloads/vocabularies/english-4096.txt",
        "dlbench/_bundled/systems/local.yaml",
        "dlbench/_bundled/slurm/job.sbatch.j2",
        "dlbench/_bundled/slurm/box/slurm.conf.j2",
        "dlbench/py.typed",
    ):
        assert expected in names
    assert any(name.startswith("dlbench/_bundled/reports/") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"dlbench"}
    assert not [name for name in names if "tests/" in name or name.endswith((".pyc", ".orig"))]


def test_a_clean_login_node_plans_and_renders_without_torch(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    installed = subprocess.run([*pip, str(wheel)], capture_output=True, text=True, check=False)
    assert installed.returncode == 0, installed.stderr[-2000:]

    def dlbench(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(environment / "bin" / "dlbench"), *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    absent = subprocess.run(
        [str(environment / "bin" / "python"), "-c", "import torch"], capture_output=True, check=False
    )
    assert absent.returncode != 0
    assert "resnet50" in dlbench("ls").stdout
    assert dlbench("show", "bert", "--preset", "ci").returncode == 0
    script = dlbench("submit", "resnet50", "--preset", "ci", "--system", "box", "--nodes", "1,2", "--dry-run")
    assert script.returncode == 0, script.stderr
    assert script.stdout.count("#!/bin/bash\n") == 2
    doctor = dlbench("doctor")
    assert "absent  PyTorch" in doctor.stdout
    trains = dlbench("run", "resnet50", "--preset", "ci", "--data", "synthetic")
    assert trains.returncode == 5
    assert "dlbench[node]" in trains.stderr
    reports = dlbench("report", ".")
    assert reports.returncode == 5
    assert "dlbench[analysis]" in reports.stderr

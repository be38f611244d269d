"""What users install: built, installed into a clean environment, run outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from email import message_from_string
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.paths import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    # The sdist first and the wheel from it, as a release is made: what the sdist lacks is missing in the wheel.
    done = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
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
        "dlbench/py.typed",
    ):
        assert expected in names
    assert any(name.startswith("dlbench/_bundled/reports/") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"dlbench"}
    assert not [name for name in names if "tests/" in name or name.endswith((".pyc", ".orig"))]


def declared(name: str, seen: dict[str, Distribution]) -> dict[str, Distribution]:
    """A distribution that is installed here and all that it needs, by their declarations without extras."""
    if name not in seen:
        seen[name] = distribution(name)
        for text in seen[name].requires or ():
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                declared(need.name, seen)
    return seen


def environment_of(folder: Path, *sources: Path) -> Path:
    """The Python of a new environment with nothing but these files and folders in it."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    for source in sources:
        (packages / source.name).symlink_to(source)
    return folder / "bin" / "python"


def plans_and_renders_without_torch(python: Path, cwd: Path) -> None:
    def dlbench(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(python), "-m", "dlbench", *arguments],
            cwd=cwd,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=120,
        )

    absent = subprocess.run([str(python), "-I", "-c", "import torch"], capture_output=True, check=False, timeout=120)
    assert absent.returncode != 0
    assert "resnet50" in dlbench("ls").stdout
    assert dlbench("show", "bert", "--preset", "ci").returncode == 0
    script = dlbench(
        "submit", "resnet50", "--preset", "ci", "--system", "box", "--nodes", "1,2", "--dry-run", "--all-scripts"
    )
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


def test_a_login_node_plans_and_renders_with_what_the_wheel_declares(wheel: Path, tmp_path: Path) -> None:
    """The wheel unpacked beside links to the packages that it declares, and to what those declare."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    needs = message_from_string((tmp_path / "unpacked" / metadata).read_text(encoding="utf-8")).get_all("Requires-Dist")
    found: dict[str, Distribution] = {}
    for need in map(Requirement, needs or ()):
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            declared(need.name, found)
    linked = {
        Path(str(one.locate_file(file.parts[0])))
        for one in found.values()
        for file in one.files or ()
        if file.parts[0] not in ("..", "__pycache__")
    }
    python = environment_of(tmp_path / "venv", *(tmp_path / "unpacked").iterdir(), *linked)
    plans_and_renders_without_torch(python, tmp_path)


@pytest.mark.nightly
def test_pip_makes_a_clean_login_node(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True, timeout=300)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    installed = subprocess.run([*pip, str(wheel)], capture_output=True, text=True, check=False, timeout=600)
    assert installed.returncode == 0, installed.stderr[-2000:]
    plans_and_renders_without_torch(environment / "bin" / "python", tmp_path)
    done = subprocess.run([str(environment / "bin" / "dlbench"), "ls"], capture_output=True, check=False, timeout=120)
    assert done.returncode == 0

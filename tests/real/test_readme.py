"""The commands of the README and of the tour, as they stand and in their order, in a fresh checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.run_factory import write_scaling

pytestmark = [pytest.mark.slow, pytest.mark.horovod]

# `dlbench ... # exit 6: why`: what the page says the command ends with.
SAYS_ITS_CODE = re.compile(r"^(dlbench .*?)\s+# exit (\d+)\b.*$", re.MULTILINE)


def script_of(page: Path) -> str:
    """All shell blocks of a page as one script; `make` is tried by the project's CI."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    script = "".join(block for block in blocks if not re.search(r"^make ", block, re.MULTILINE))
    return "set -e\n" + SAYS_ITS_CODE.sub(r"{ \1; code=$?; } || code=$?; test $code -eq \2", script)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the files under version control, with this environment as `.venv`, after `make demo`."""
    folder = tmp_path / "dlbench"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix, target_is_directory=True)
    write_scaling(folder / "runs" / "demo-20260101-000000")
    return folder


def run_commands(page: str, checkout: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DLBENCH_", "SLURM_"))}
    return subprocess.run(
        ["bash", "-x", "-c", script_of(ROOT / page)],
        cwd=checkout,
        env={**environment, "PYTHONPATH": str(checkout)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )


def test_commands_of_the_readme_run_as_they_stand(checkout: Path, horovod_installed: None) -> None:
    result = run_commands("README.md", checkout, timeout_s=300)
    assert result.returncode == 0, result.stdout[-6000:]
    assert (checkout / "report.html").stat().st_size > 0
    assert not (checkout / "runs" / "demo-20260101-000000" / "plan.json").exists()


@pytest.mark.nightly
def test_commands_of_the_tour_run_as_they_stand(checkout: Path, horovod_installed: None) -> None:
    result = run_commands("docs/tour.md", checkout, timeout_s=3600)
    assert result.returncode == 0, result.stdout[-6000:]

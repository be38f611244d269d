"""The commands of the README, the tour and the questions, as they stand and in their order, in a fresh checkout."""

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

# What a verdict is depends on the machine and its load: met, missed or open.
VERDICT = re.compile(r"^(dlbench (?:check|compare|estimate) .*?)(?:\s+#.*)?$", re.MULTILINE)

QUESTIONS = sorted((ROOT / "docs" / "questions").glob("*.md"))


def blocks_of(page: Path, without: str) -> str:
    """All shell blocks of a page in their order, but those in which a line matches `without`."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return "".join(block for block in blocks if not re.search(without, block, re.MULTILINE))


def held_to_its_codes(script: str) -> str:
    return "set -e\n" + SAYS_ITS_CODE.sub(r"{ \1; code=$?; } || code=$?; test $code -eq \2", script)


def script_of(page: Path) -> str:
    """The commands of a page, each held to the code that stands beside it; `make` is tried by the project's CI."""
    return held_to_its_codes(blocks_of(page, without=r"^make "))


def script_without_a_cluster(page: Path) -> str:
    """The commands of a page that need no Slurm; verdicts may be of any kind."""
    script = blocks_of(page, without=r"dlbench box|\bsubmit\b|^salloc ")
    return held_to_its_codes(VERDICT.sub(r"\1 || [[ $? == [16] ]]", script.replace("\\\n", " ")))


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


def run_script(script: str, checkout: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DLBENCH_", "SLURM_"))}
    return subprocess.run(
        ["bash", "-x", "-c", script],
        cwd=checkout,
        env={**environment, "PYTHONPATH": str(checkout)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )


def test_commands_of_the_readme_run_as_they_stand(checkout: Path, horovod_installed: None) -> None:
    result = run_script(script_of(ROOT / "README.md"), checkout, timeout_s=300)
    assert result.returncode == 0, result.stdout[-6000:]
    assert (checkout / "report.html").stat().st_size > 0
    assert not (checkout / "runs" / "demo-20260101-000000" / "plan.json").exists()


@pytest.mark.nightly
def test_commands_of_the_tour_run_as_they_stand(checkout: Path, horovod_installed: None) -> None:
    result = run_script(script_of(ROOT / "docs" / "tour.md"), checkout, timeout_s=3600)
    assert result.returncode == 0, result.stdout[-6000:]


@pytest.mark.nightly
@pytest.mark.parametrize("page", QUESTIONS, ids=lambda page: page.stem)
def test_commands_of_a_question_run_as_they_stand(page: Path, checkout: Path, horovod_installed: None) -> None:
    script = script_without_a_cluster(page)
    assert "\ndlbench " in script
    result = run_script(script, checkout, timeout_s=3600)
    assert result.returncode == 0, result.stdout[-6000:]

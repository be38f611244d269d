"""The commands of the README and of every page of docs/, in their order, in a fresh checkout."""

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

NOT_RUN = {
    r"make (demo|test) ": "the project's CI runs it",
    r"make gpu-check |dlbench run \S+ --preset gpu ": "needs a GPU",
    r'eval "\$\(python -m tests|python -m tests|salloc |dlbench (preflight|wait) ': "needs Slurm",
    r"dlbench (comm report links|diagnose steps)$": "needs a cluster's runs",
    r"dlbench (project runs|diagnose runs --network) ": "needs runs on several nodes",
    r"dlbench estimate scaling .*GPU-hour": "needs runs on GPUs",
    r"dlbench trace .* --ranks 0,8-15": "names ranks of a large run",
    r".* (/shared|/data|/scratch|nccl-8\.txt|latency\.txt)[/ ]": "names files of the reader",
    r"dlbench setup |python3 -m venv|\$HOME/": "installs, which tests/real/test_wheel.py does",
    r"dlbench run .* measure.warmup_steps=1300": "takes an hour on two cores",
}
"""How commands begin that are not run here, and why. All others are run, those that submit as dry runs."""

BEFORE = {
    "watching.md": "dlbench data demo data/demo\ndlbench run cosmoflow --preset ci --ranks 2 --data synthetic",
}
"""What the reader of a page has done already."""

PLACEHOLDER = re.compile(r"\bruns/(RUN|NAME-OF-THE-RUN|NAME)\b")
"""Stands in a page for the newest run of the reader."""

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# `dlbench ... # exit 6: why`: what the page says the command ends with.
SAYS_ITS_CODE = re.compile(r"^(dlbench .*?)\s+# exit (\d+)\b.*$", re.MULTILINE)

AS_WRITTEN = ("README.md", "tour.md")  # Pages whose verdicts are those that they print.

# What a verdict is depends on the machine and its load: met, missed or open.
VERDICT = re.compile(r"^(dlbench (?:check|compare|estimate) .*?)(?:\s+#.*)?$", re.MULTILINE)


def commands_of(page: Path) -> list[str]:
    """The commands of all shell blocks of a page in their order, each in one line."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def is_run(command: str) -> bool:
    return not any(re.match(pattern, command) for pattern in NOT_RUN)


def shortened(command: str) -> str:
    """The same runs, two of each, with few steps, epochs and sizes."""
    command = re.sub(r"--repeats \d+", "--repeats 2", command)
    words, hash_sign, comment = command.partition(" #")
    if words.startswith("dlbench run ") and not re.search("--to-accuracy|--set measure|--dry-run", words):
        words += " --set measure.warmup_steps=2 --set measure.measured_steps=3"
    if "--to-accuracy" in words and "quality." not in words:
        epochs = 8 if "--resume" in words else 6
        words += f" --set quality.max_epochs={epochs}"
    if words.startswith("dlbench comm run ") and "--sizes" not in words:
        words += " --sizes 1KiB:1MiB"
    return f"{words}{hash_sign}{comment}"


def script_of(page: Path) -> str:
    """The commands of a page that run here, each held to the code that stands beside it."""
    lines = ["set -e", ". .venv/bin/activate", BEFORE.get(page.name, "")]
    for command in filter(is_run, commands_of(page)):
        line = PLACEHOLDER.sub('"$(ls -td $(dirname $(find runs -name record.json)) | head -1)"', command)
        if re.match(r"dlbench (comm )?submit ", line) and not re.search("--(dry-run|write-only)", line):
            line = re.sub(r"( #.*)?$", " --dry-run", line, count=1)
        if page.parent.name == "docs" and page.name not in AS_WRITTEN:
            line = shortened(line)
        if page.name not in AS_WRITTEN:
            line = VERDICT.sub(r"\1 || [[ $? == [16] ]]", line)
        lines.append(SAYS_ITS_CODE.sub(r"{ \1; code=$?; } || code=$?; test $code -eq \2", line))
    return "\n".join(lines)


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
    shutil.copy2(folder / "systems" / "example-gpu.yaml", folder / "my-cluster.yaml")
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


def test_every_reason_not_to_run_a_command_is_that_of_some() -> None:
    commands = [command for page in PAGES for command in commands_of(page)]
    assert [pattern for pattern in NOT_RUN if not any(re.match(pattern, command) for command in commands)] == []


def test_commands_of_the_readme_run_as_they_stand(checkout: Path, horovod_installed: None) -> None:
    result = run_script(script_of(ROOT / "README.md"), checkout, timeout_s=300)
    assert result.returncode == 0, result.stdout[-6000:]
    assert (checkout / "report.html").stat().st_size > 0
    assert not (checkout / "runs" / "demo-20260101-000000" / "plan.json").exists()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "page", [page for page in PAGES[1:] if any(map(is_run, commands_of(page)))], ids=lambda page: page.stem
)
def test_commands_of_a_page_run_in_their_order(page: Path, checkout: Path, horovod_installed: None) -> None:
    result = run_script(script_of(page), checkout, timeout_s=3600)
    assert result.returncode == 0, result.stdout[-6000:]

"""What users do first: install the wheel outside the checkout, run the commands of the README and of docs/ in order."""

from __future__ import annotations

import os
import re
import shutil
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
from tests.support.run_factory import write_scaling

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


NOT_RUN = {
    r"make (demo|test) ": "the project's CI runs it",
    r"make gpu-check |dlbench run \S+ --preset gpu ": "needs a GPU",
    r'eval "\$\(python -m tests|python -m tests|salloc |dlbench (preflight|wait) ': "needs Slurm",
    r"dlbench (comm report links|diagnose steps)$": "needs a cluster's runs",
    r"dlbench (project runs|diagnose runs --network) ": "needs runs on several nodes",
    r"dlbench estimate scaling .*GPU-hour": "needs runs on GPUs",
    r"dlbench trace .* --ranks 0,8-15": "names ranks of a large run",
    r".* (/shared|/data|/scratch|nccl-8\.txt|latency\.txt)[/ ]": "names files of the reader",
    r"dlbench setup |python3 -m venv|\$HOME/": "installs, which the test of the wheel does",
    r"dlbench run .* measure.warmup_steps=1300": "takes an hour on two cores",
}
"""How commands begin that are not run here, and why. All others are run, those that submit as dry runs."""

BEFORE = {"watching.md": "dlbench data demo data/demo\ndlbench run cosmoflow --preset ci --ranks 2 --data synthetic"}
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


@pytest.mark.horovod
def test_every_reason_not_to_run_a_command_is_that_of_some() -> None:
    commands = [command for page in PAGES for command in commands_of(page)]
    assert [pattern for pattern in NOT_RUN if not any(re.match(pattern, command) for command in commands)] == []


@pytest.mark.horovod
def test_commands_of_the_readme_run_as_they_stand(checkout: Path, horovod_installed: None) -> None:
    result = run_script(script_of(ROOT / "README.md"), checkout, timeout_s=300)
    assert result.returncode == 0, result.stdout[-6000:]
    assert (checkout / "report.html").stat().st_size > 0
    assert not (checkout / "runs" / "demo-20260101-000000" / "plan.json").exists()


@pytest.mark.horovod
@pytest.mark.nightly
@pytest.mark.parametrize(
    "page", [page for page in PAGES[1:] if any(map(is_run, commands_of(page)))], ids=lambda page: page.stem
)
def test_commands_of_a_page_run_in_their_order(page: Path, checkout: Path, horovod_installed: None) -> None:
    result = run_script(script_of(page), checkout, timeout_s=3600)
    assert result.returncode == 0, result.stdout[-6000:]

"""The examples for CI and ReFrame: valid files, real commands, scripts that wait and end as they say."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest
from ruamel.yaml import YAML

from dlbench.cli import cli as dlbench_cli
from dlbench.specs.choices import WorkloadFile
from dlbench.specs.files import find
from tests.slurm_box.box import Box
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"
GITLAB = EXAMPLES / "gitlab" / ".gitlab-ci.yml"
GITHUB = EXAMPLES / "github" / "dlbench.yml"
REFRAME = EXAMPLES / "reframe"

# What a shell or a CI would put there.
VALUES = {
    "DLBENCH_SYSTEM": "box",
    "DLBENCH_NODES": "1,2",
    # The box has no GPU.
    "DLBENCH_PRESET": "ci",
    "DLBENCH_REPEATS": "5",
    "DLBENCH_WAIT_MINUTES": "1",
    "DLBENCH_RUNS": "runs",
    "DLBENCH_CHECKOUT": "dlbench",
    "CI_PIPELINE_ID": "17",
    "CI_COMMIT_SHA": "0123456789abcdef0123456789abcdef01234567",
    "CI_DEFAULT_BRANCH": "main",
    "GITHUB_SHA": "0123456789abcdef0123456789abcdef01234567",
    "GITHUB_RUN_ID": "99",
    "GITHUB_RUN_ATTEMPT": "1",
    "GITHUB_STEP_SUMMARY": "summary.md",
}


def load(path: Path) -> Any:
    return YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))


def gitlab_script() -> str:
    """All blocks: GitLab runs them in one shell."""
    return "\n".join(load(GITLAB)["dlbench"]["script"])


def github_steps() -> dict[str, str]:
    steps = load(GITHUB)["jobs"]["measure"]["steps"]
    return {step["name"]: step["run"] for step in steps if "run" in step}


def scripts() -> dict[str, str]:
    return {"gitlab": gitlab_script(), **{f"github: {name}": text for name, text in github_steps().items()}}


def command_lines(script: str) -> list[list[str]]:
    """Every call of dlbench, its variables filled in."""
    joined = script.replace("\\\n", " ")
    filled = re.sub(r"\$\{?(\w+)(?::-)?\}?", lambda name: VALUES.get(name[1], name[0]), joined)
    calls = []
    for line in filled.splitlines():
        if line.lstrip().startswith(("#", "echo")):
            continue
        for match in re.finditer(r'(?:^|[ (])(?:"[^"]*/)?dlbench"? ((?:[a-z]+-?)+ [^;&|)]*)', line):
            words = shlex.split(match[1])
            calls.append(words[: words.index(">>")] if ">>" in words else words)
    return calls


def parse(words: list[str]) -> None:
    """Proves that the command and all its options are there, without running it."""
    context: click.Context = click.Context(dlbench_cli)
    command: click.Command = dlbench_cli
    rest = list(words)
    while isinstance(command, click.Group):
        _, found, rest = command.resolve_command(context, rest)
        assert found is not None
        command = found
        context = click.Context(command, parent=context, info_name=words[0])
    command.make_context(words[0], rest, parent=context.parent)


@pytest.mark.parametrize("name", ["gitlab", "github"])
def test_every_command_is_a_real_one(name: str) -> None:
    script = gitlab_script() if name == "gitlab" else "\n".join(github_steps().values())
    calls = command_lines(script)
    commands = {words[0] for words in calls}
    assert commands == {"setup", "submit", "wait", "status", "report", "baseline", "check", "history"}
    assert len(calls) >= 10
    for words in [*calls, ["cancel", "nightly", "--out", "runs"]]:  # that one stands in a trap
        parse(words)
    assert "trap 'dlbench cancel nightly --out \"$DLBENCH_RUNS\"' EXIT" in script


@pytest.mark.parametrize("words", [["check", "--baselin", "x"], ["history", "trend"], ["submit", "--node", "x"]])
def test_the_parser_of_this_test_sees_mistakes(words: list[str]) -> None:
    with pytest.raises((click.ClickException, AssertionError)):
        parse(words)


@pytest.mark.parametrize("name", sorted(scripts()))
def test_scripts_are_shell(name: str, tmp_path: Path) -> None:
    path = tmp_path / "script.sh"
    path.write_text(scripts()[name], encoding="utf-8")
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    shellcheck = shutil.which("shellcheck")
    if shellcheck is not None:
        done = subprocess.run(
            [shellcheck, "--shell=bash", "--severity=warning", str(path)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout


def test_what_is_gated_is_a_preset_that_means_something_on_a_cluster() -> None:
    """Of a variable, so that who has no GPUs, or only tries the pipeline, changes one line."""
    workflow = load(GITHUB)["jobs"]["measure"]
    for script, variables, text in (
        (gitlab_script(), load(GITLAB)["variables"], GITLAB.read_text()),
        (github_steps()["Measure through Slurm"], workflow["env"], GITHUB.read_text()),
    ):
        assert 'submit resnet50 --preset "$DLBENCH_PRESET"' in script
        assert WorkloadFile(find("workloads", "resnet50")).is_meant_for_gpus(variables["DLBENCH_PRESET"])
        assert "--preset ci" not in text
    assert 'preset = variable(str, value="gpu")' in (REFRAME / "dlbench_check.py").read_text()


def test_files_are_what_the_servers_expect() -> None:
    job = load(GITLAB)["dlbench"]
    assert job["allow_failure"] == {"exit_codes": [6]}
    assert job["artifacts"]["reports"]["junit"] == "junit.xml"
    assert job["stage"] in load(GITLAB)["stages"]
    workflow = load(GITHUB)
    assert "schedule" in workflow["on"]
    assert workflow["permissions"] == {"contents": "read"}
    uploaded = next(step for step in workflow["jobs"]["measure"]["steps"] if "upload" in step.get("uses", ""))
    for name in ("report.html", "trends.html", "junit.xml"):
        assert name in uploaded["with"]["path"]
        assert f" {name}" in gitlab_script()


# The scripts with stand-ins for Slurm and dlbench


class Stage:
    """A folder with stand-ins first on PATH; each writes what it was called with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.log = folder / "calls.log"
        self.dlbench(check=0)

    def stand_in(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> "{self.log}"\n{body}\n', encoding="utf-8")
        path.chmod(0o755)

    def dlbench(self, *, submit: int = 0, wait: int = 0, check: int = 0, drift: int = 0) -> None:
        body = (
            'case "$1 $2 $3" in\n'
            f'  submit*) printf "41\\n42\\n"; exit {submit};;\n'
            f"  wait*) exit {wait};;\n"
            f"  check*) exit {check};;\n"
            f'  "history trends --fail-on-regression") exit {drift};;\n'
            "  baseline*) touch baseline.json;;\n"
            "esac"
        )
        self.stand_in("dlbench", body)
        venv = self.folder / "dlbench-venv" / "bin"
        venv.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.bin / "dlbench", venv / "dlbench")

    def run(self, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **VALUES,
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.folder),
            **variables,
        }
        return subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    @property
    def calls(self) -> list[str]:
        return self.log.read_text(encoding="utf-8").splitlines()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


MEASURE = ("gitlab", "github: Measure through Slurm")


@pytest.mark.parametrize("name", MEASURE)
@pytest.mark.parametrize(("waited", "code", "is_cancelled"), [(0, 0, False), (3, 0, False), (124, 124, True)])
def test_it_waits_for_the_series_and_cancels_what_does_not_end(
    stage: Stage, name: str, waited: int, code: int, is_cancelled: bool
) -> None:
    """A failed run is the gate's business; a series that did not end in time is the job's own end."""
    stage.dlbench(wait=waited)
    (stage.folder / "baseline.json").write_text("{}", encoding="utf-8")
    done = stage.run(scripts()[name])
    assert done.returncode == code, done.stderr
    (waits,) = (call for call in stage.calls if call.startswith("dlbench wait"))
    assert waits.endswith("--timeout 1m")
    assert any(call.startswith("dlbench cancel nightly") for call in stage.calls) == is_cancelled


@pytest.mark.parametrize("name", MEASURE)
def test_what_ends_the_submission_cancels_its_jobs(stage: Stage, name: str) -> None:
    stage.dlbench(submit=3)
    assert stage.run(scripts()[name]).returncode == 3
    assert not [call for call in stage.calls if call.startswith("dlbench wait")]
    assert any(call.startswith("dlbench cancel nightly") for call in stage.calls)


@pytest.mark.parametrize("name", ["gitlab", "github: Environment"])
def test_it_is_installed_from_a_checkout(stage: Stage, name: str) -> None:
    """No index has dlbench: whoever took the name there would run on the login node."""
    (installed,) = re.findall(r"pip\S* install.*", scripts()[name])
    assert installed == 'pip" install --quiet "${DLBENCH_CHECKOUT}[analysis,node]"'


@pytest.mark.parametrize(("check", "drift", "code"), [(0, 0, 0), (1, 0, 1), (6, 0, 6), (4, 1, 4), (0, 1, 1)])
def test_gitlab_ends_with_the_code_of_the_gate(stage: Stage, check: int, drift: int, code: int) -> None:
    stage.dlbench(check=check, drift=drift)
    (stage.folder / "baseline.json").write_text("{}", encoding="utf-8")
    done = stage.run(gitlab_script(), CI_COMMIT_BRANCH="main")
    assert done.returncode == code, done.stderr
    assert f"dlbench history import {stage.folder}/dlbench-ci/17" in stage.calls


def test_a_merge_request_leaves_the_history_alone(stage: Stage) -> None:
    (stage.folder / "baseline.json").write_text("{}", encoding="utf-8")
    assert stage.run(gitlab_script()).returncode == 0
    assert not [call for call in stage.calls if call.startswith("dlbench history")]


NIGHT = {"CI_COMMIT_BRANCH": "main", "GITHUB_EVENT_NAME": "schedule"}
REQUEST = {"GITHUB_EVENT_NAME": "pull_request"}


@pytest.mark.parametrize("name", ["gitlab", "github: Gate"])
def test_nights_make_the_baseline_from_the_history(stage: Stage, name: str) -> None:
    done = stage.run(scripts()[name], DLBENCH_HISTORY="store", **NIGHT)
    assert done.returncode == 0, done.stderr
    assert (stage.folder / "baseline.json").exists()
    (made,) = (call for call in stage.calls if call.startswith("dlbench baseline"))
    # GitLab's script names the store itself.
    assert shlex.split(made)[2] == (f"{stage.folder}/dlbench-history" if name == "gitlab" else "store")
    assert not [call for call in stage.calls if call.startswith("dlbench check")]


@pytest.mark.parametrize("name", ["gitlab", "github: Gate"])
def test_a_request_before_there_is_a_baseline_is_compared_with_nothing(stage: Stage, name: str) -> None:
    done = stage.run(scripts()[name], **REQUEST)
    assert done.returncode == 0, done.stderr
    assert "nothing is compared" in done.stdout
    calls = stage.calls if stage.log.exists() else []
    assert not [call for call in calls if call.startswith(("dlbench check", "dlbench baseline"))]


def test_github_imports_before_the_gate() -> None:
    names = [step.get("name") for step in load(GITHUB)["jobs"]["measure"]["steps"]]
    assert names.index("Import") < names.index("Gate") < names.index("History")


@pytest.mark.parametrize(("check", "code"), [(0, 0), (1, 1), (2, 2), (4, 4), (6, 0)])
def test_github_warns_where_the_gate_cannot_say(stage: Stage, check: int, code: int) -> None:
    stage.dlbench(check=check)
    (stage.folder / "baseline.json").write_text("{}", encoding="utf-8")
    done = stage.run(github_steps()["Gate"])
    assert done.returncode == code
    assert ("::warning::" in done.stdout) == (check == 6)


# ReFrame itself


def reframe(
    folder: Path, *arguments: str, settings: Path = REFRAME / "settings.py", **variables: str
) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("reframe", reason="ReFrame is not installed")
    environment: Mapping[str, str] = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("RFM_", "DLBENCH_"))},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    return subprocess.run(
        [
            *(sys.executable, "-c", "from reframe.frontend.cli import main; main()"),
            *("-C", str(settings), "-c", str(REFRAME / "dlbench_check.py")),
            # As a person without a GPU would.
            *("-S", "preset=ci", "--prefix", str(folder), "--report-file", str(folder / "report.json"), *arguments),
        ],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_reframe_lists_the_checks(tmp_path: Path) -> None:
    done = reframe(tmp_path, "-l")
    assert done.returncode == 0, done.stdout + done.stderr
    for workload in ("resnet50", "bert", "cosmoflow"):
        assert f"%workload={workload}" in done.stdout
    assert "DlbenchGate" in done.stdout


FEW_STEPS = "settings=measure.warmup_steps=1,measure.measured_steps=3,train.batch_per_rank=1"


@pytest.mark.nightly
@pytest.mark.slow
def test_reframe_runs_dlbench_and_reads_its_figures(tmp_path: Path) -> None:
    done = reframe(tmp_path, "-n", "DlbenchScaling.*cosmoflow", "-S", "repeats=1", "-S", FEW_STEPS, "-r")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    _figures_are_read(tmp_path)


@pytest.mark.slurm
def test_reframe_submits_to_slurm_and_dlbench_uses_what_it_asked_for(tmp_path: Path, whole_box: Box) -> None:
    """ReFrame's Slurm scheduler asks accounting for its job."""
    partition = {"name": "box", "scheduler": "slurm", "launcher": "local", "environs": ["builtin"]}
    system = {"name": "box", "descr": "box", "hostnames": [".*"], "partitions": [partition]}
    settings = tmp_path / "settings.py"
    settings.write_text(f"site_configuration = {{'systems': [{system}]}}\n", encoding="utf-8")
    steps = f"{FEW_STEPS},system.launch.launcher=srun-gloo"
    asked = ("-S", "system=box", "-S", "nodes=2", "-S", "repeats=1", "-S", steps)
    root = {"PYTHONPATH": str(ROOT), **whole_box.environment}
    done = reframe(tmp_path, "-n", "DlbenchScaling.*cosmoflow", *asked, "-r", settings=settings, **root)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    _figures_are_read(tmp_path)
    asked_of_slurm = (tmp_path / "report.json").read_text(encoding="utf-8")
    assert '"scheduler": "slurm"' in asked_of_slurm


def _figures_are_read(tmp_path: Path) -> None:
    case = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["runs"][0]["testcases"][0]
    assert case["result"] == "pass"
    figures = {name.rpartition(":")[2]: value for name, (value, *_) in case["perfvalues"].items()}
    assert figures.keys() == {"throughput", "efficiency", "step_time"}
    assert figures["throughput"] > 0
    assert figures["efficiency"] > 0  # beside other work, of two short runs, it may be any
    # Throughput and step time tell of the same steps: batch 1 on 2 ranks. Of three steps, the first is their mean and
    # the other their median, which is no more than one and a half times the mean and may be far less beside other work.
    assert 0.02 < figures["throughput"] * figures["step_time"] / 1000 / 2 < 1.6


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("place", ["this-machine:default", "another:gpu"])
def test_reframe_judges_by_the_references_of_a_site(tmp_path: Path, place: str) -> None:
    """Far too high ones fail, as does a file without those of this machine."""
    known = {place: {"cosmoflow 1,2": {"throughput": [1e9, -0.05, None, "samples/s"]}}}
    (tmp_path / "references.json").write_text(json.dumps(known), encoding="utf-8")
    given = ("-S", f"references={tmp_path / 'references.json'}", "-S", "repeats=1", "-S", FEW_STEPS)
    done = reframe(tmp_path, "-n", "DlbenchScaling.*cosmoflow", *given, "-r")
    assert done.returncode == 1
    said = "failed to meet reference" if place == "this-machine:default" else "has no values for 'cosmoflow 1,2'"
    assert said in done.stdout + done.stderr


@pytest.mark.slow
def test_reframe_fails_a_run_that_dlbench_fails(tmp_path: Path) -> None:
    done = reframe(tmp_path, "-n", "DlbenchScaling.*cosmoflow", "-S", "repeats=1", "-S", "engine=nosuch", "-r")
    assert done.returncode == 1
    assert "FAILED" in done.stdout


@pytest.mark.slow
def test_the_gate_needs_a_baseline(tmp_path: Path) -> None:
    done = reframe(tmp_path, "-n", "DlbenchGate", "-r")
    assert done.returncode == 0, done.stdout
    assert "SKIP" in done.stdout

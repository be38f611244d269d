"""Differences between Slurm sites, containers included."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import dlbench
from dlbench.records.scan import Run, scan
from tests.conftest import Cli
from tests.real.test_slurm_runs import SHORT, wait_for
from tests.slurm_box.box import Box
from tests.slurm_box.config import Equipment
from tests.support import apptainer_stand_in
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SUBMIT = ("submit", "cosmoflow", "--preset", "ci", "--system", "box", "--engine", "ddp")
SUBMIT += ("--data", "synthetic", *SHORT)
SECRET = "hunter2-of-the-shell"
SHELL = {
    "SBATCH_PARTITION": "nowhere",
    "SBATCH_TIMELIMIT": "77",
    "SBATCH_ARRAY_INX": "0-3",
    "SBATCH_EXPORT": "NONE",
    "SLURM_CPU_BIND": "map_cpu:99",
    "SLURM_MEM_PER_CPU": "1",
    "SLURM_JOB_ID": "4711",
    "SQUEUE_FORMAT": "%N",
    "OF_THE_SHELL": "1",
    "NCCL_ALGO": "Tree",
    "SITE_TOKEN": SECRET,
}
"""Of a shell in a job of somebody's, with settings of its own."""


@pytest.fixture
def two_kinds(slurm_box: Box) -> Iterator[Box]:
    """The box with a feature on each node."""

    def update(**features: str) -> None:
        for node, feature in features.items():
            words = [
                "scontrol",
                "update",
                f"NodeName={node}",
                f"AvailableFeatures={feature}",
                f"ActiveFeatures={feature}",
            ]
            environment = {"PATH": "/usr/sbin:/usr/bin:/bin", **slurm_box.environment}
            subprocess.run(words, env=environment, check=True, timeout=120, capture_output=True)

    update(n1="a100", n2="h100")
    yield slurm_box
    update(n1="", n2="")


def submitted(cli: Cli, box: Box, tmp_path: Path, *words: str, launcher: str = "srun-gloo") -> Run:
    done = cli(*SUBMIT, "--launcher", launcher, *words, **SHELL, **box.environment)
    assert done.returncode == 0, done.stderr
    (run,) = wait_for(tmp_path / "runs", 1)
    return run


def test_the_system_file_decides_and_the_shell_does_not(cli: Cli, two_kinds: Box, tmp_path: Path) -> None:
    settings = {
        "constraint": "a100|h100",
        "srun_args": "--cpu-freq=high --exact",
        "extra": "--comment='of the site' --nice=1",
        "hint": "nomultithread",
    }
    sets = [word for key, value in settings.items() for word in ("--set", f"system.slurm.{key}={value}")]
    asked = ("--set", "system.launch.environment.API_TOKEN.variable=SITE_TOKEN")
    asked += ("--set", f"system.setup=env > {tmp_path}/seen; scontrol -o show job $SLURM_JOB_ID > {tmp_path}/job")
    asked += ("--set", "system.modules=site/1", "--set", "system.modules_init=module() { LOADEDMODULES=$2; }")
    run = submitted(cli, two_kinds, tmp_path, "--nodes", "2", *sets, *asked)
    assert run.state == "valid", run.detail
    assert [rank.host for rank in run.record.ranks] == ["n1", "n2"]
    assert run.record.environment_differences == ()
    # What Slurm took in.
    job = (tmp_path / "job").read_text()
    for words in ("Partition=box", "TimeLimit=00:10:00", "Features=a100|h100", "Comment=of the site", "Nice=1"):
        assert f" {words} " in job
    # What the job got of the shell.
    seen = dict(line.partition("=")[::2] for line in (tmp_path / "seen").read_text().splitlines())
    assert not {"OF_THE_SHELL", "NCCL_ALGO", "SLURM_CPU_BIND", "SLURM_MEM_PER_CPU", "SLURM_EXPORT_ENV"} & set(seen)
    assert (seen["SITE_TOKEN"], seen["SLURM_JOB_ID"] != "4711") == (SECRET, True)
    kept = json.loads(run.folder.submission.read_text())
    assert "SITE_TOKEN" in kept["variables"]
    written = [path for path in run.folder.path.rglob("*") if path.is_file()]
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]
    # What srun got, and what the ranks met of it.
    assert "variable.NCCL_ALGO" not in run.record.environment
    assert run.record.environment["variable.SLURM_DISTRIBUTION"] == "block:block"
    assert "variable.PATH" in run.record.environment
    log = (run.folder.path / f"slurm-{kept['job_id']}.out").read_text()
    assert {"0: ", "1: "} <= {line[:3] for line in log.splitlines()}
    assert " --cpu-freq=high --exact " in run.folder.script.read_text()


ASKED_OF_SLURM = (
    "Partition|NumNodes|NumTasks|CPUs/Task|TimeLimit|Requeue|WorkDir|Command|Nice|OverSubscribe|MinCPUsNode"
)


@pytest.mark.parametrize("kind", ["--pack=points", pytest.param("--one-run-per-job", marks=pytest.mark.nightly)])
def test_sbatch_by_hand_is_the_same_job_as_by_dlbench_submit(
    cli: Cli, slurm_box: Box, tmp_path: Path, kind: str
) -> None:
    """From another folder and shell: what Slurm is asked for, what the ranks get, and where output goes."""
    python = tmp_path / "python"  # stands for that of the nodes
    python.write_text('#!/bin/bash\nfor plan; do :; done\nenv -0 > "${plan%/*}/rank-env"\n')
    python.chmod(0o755)
    asked = (*SUBMIT, "--launcher", "srun-gloo", "--series", "same", "--nodes", "2", "--repeats", "2", kind)
    asked += ("--set", f"system.python={python}", "--set", "system.slurm.extra=hold", "--set", "system.slurm.mem=0")
    outs = (tmp_path / "submitted", tmp_path / """by "hand" #1's 100%j""")
    done = cli(*asked, "--out", outs[0], **SHELL, **slurm_box.environment)
    assert done.returncode == 0, done.stderr
    written = cli(*asked, "--out", outs[1], "--write-only", **slurm_box.environment)
    assert written.returncode == 0, written.stderr
    theirs = {name: value for name, value in SHELL.items() if not name.startswith(("SBATCH_", "SITE_"))}
    for_srun = {"MPI_TYPE": "nosuch", "EXCLUSIVE": "1", "EXPORT_ENV": "NONE", "TIMELIMIT": "nosuch", "STEP_ID": "7"}
    for_srun |= {"CPU_FREQ_REQ": "high", "WORKING_DIR": "/nosuch"}
    theirs |= {"TMPDIR": "/nosuch", **{f"SLURM_{name}": value for name, value in for_srun.items()}}
    shell = {**os.environ, **theirs, **slurm_box.environment}
    typed = subprocess.run(
        ["bash", "-c", written.stdout], cwd="/", env=shell, capture_output=True, text=True, timeout=120, check=True
    )
    jobs = (done.stdout.strip(), typed.stdout.split()[-1])
    own = {**os.environ, **slurm_box.environment}

    def slurm(*words: str) -> str:
        return subprocess.run(words, env=own, capture_output=True, text=True, timeout=120, check=True).stdout

    seen = []
    for out, job in zip(outs, jobs, strict=True):
        told = slurm("scontrol", "show", "job", "--oneliner", job).splitlines()[0].replace(str(out), "OUT")
        found = dict(re.findall(rf" ({ASKED_OF_SLURM})=(\S+)", told))
        seen.append(found)
        assert len(found) == len(ASKED_OF_SLURM.split("|"))
    assert seen[0] == seen[1]
    for out, job in zip(outs, jobs, strict=True):
        slurm("scontrol", "release", job)
        waited = cli("wait", out, "--timeout", "120s", "--every", "1s", **slurm_box.environment)
        assert waited.stdout == "series same: 0 of 2 runs valid, 2 failed\n", waited.stderr
        first = min(out.glob("same-*"))
        assert json.loads((first / "submission.json").read_text())["job_id"].partition("_")[0] == job
        assert [path for path in first.glob("slurm-*.out") if job in path.name]
    environments: list[set[str]] = []
    of_slurm: list[set[str]] = []
    for out in outs:
        pairs = (max(out.glob("same-*")) / "rank-env").read_text().replace(str(out), "OUT").split("\0")[:-1]
        of_slurm.append({pair.partition("=")[0] for pair in pairs if pair.startswith(("SLURM", "SRUN"))})
        environments.append({pair for pair in pairs if not re.match(r"SLURM|SRUN|_=|USER=|LOGNAME=|SHELL=", pair)})
    assert environments[0] == environments[1]
    assert of_slurm[0] == of_slurm[1]
    assert not [pair for pair in environments[1] if pair.startswith(("OF_THE_SHELL", "NCCL_ALGO"))]


@pytest.mark.parametrize(
    "request_", ["gres", "gpus-per-task", pytest.param("gpus-per-node", marks=pytest.mark.nightly)]
)
def test_ranks_on_a_shared_node_are_shown_the_gpus_of_their_job(
    cli: Cli, slurm_folder: Path, tmp_path: Path, request_: str
) -> None:
    python = tmp_path / "python"  # stands for that of the nodes
    python.write_text(
        '#!/bin/bash\nfor plan; do :; done\necho "$CUDA_VISIBLE_DEVICES" >"${plan%/*}/gpus-$SLURM_PROCID"\n'
    )
    python.chmod(0o755)
    asked = {"slurm.gpu_request": request_, "node.gpus": 4, "node.cores": 2, "python": python}
    sets = [word for key, value in asked.items() for word in ("--set", f"system.{key}={value}")]
    with Box.start(slurm_folder, nodes=1, cpus_per_node=4, has=Equipment(gres=("gpu:4",))) as box:
        words = ("sbatch", "--gres=gpu:2", "--output=/dev/null", "--wrap", "sleep 300")
        subprocess.run(words, env={**os.environ, **box.environment}, cwd=tmp_path, check=True, timeout=120)
        done = cli(
            *SUBMIT, "--launcher", "srun-gloo", "--nodes", "1", "--ranks-per-node", "2", *sets, **box.environment
        )
        assert done.returncode == 0, done.stderr
        cli("wait", tmp_path / "runs", "--timeout", "120s", "--every", "1s", **box.environment)
    (run,) = scan(tmp_path / "runs").runs
    assert [(run.folder.path / f"gpus-{rank}").read_text() for rank in (0, 1)] == ["2,3\n", "2,3\n"]


def test_ranks_of_another_version_refuse_the_plan(cli: Cli, slurm_box: Box, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text("import dlbench\ndlbench.__version__ = '99.0'\n")
    setup = f"export PYTHONPATH={tmp_path}/other:$PYTHONPATH"
    run = submitted(cli, slurm_box, tmp_path, "--nodes", "1", "--set", f"system.setup={setup}")
    assert run.state == "failed"
    assert f"has dlbench 99.0, but version {dlbench.__version__} made the plan: set system.python" in run.detail
    assert {status.exit_code for status in run.statuses} == {5}


@pytest.mark.nightly
def test_what_setup_sets_reaches_the_ranks_of_mpirun_on_other_nodes(cli: Cli, slurm_box: Box, tmp_path: Path) -> None:
    """Its daemons are a step of srun, which hands on what the script has; -x has the plan's names alone."""
    as_root = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    setup = f"export {as_root} NCCL_ALGO=Ring PATH={tmp_path}/bin:$PATH"
    asked = ("--nodes", "2", "--set", f"system.setup={setup}")
    run = submitted(cli, slurm_box, tmp_path, *asked, launcher="mpirun")
    assert run.state == "valid", run.detail
    assert [rank.host for rank in run.record.ranks] == ["n1", "n2"]
    assert run.record.environment["variable.NCCL_ALGO"] == "Ring"
    assert run.record.environment_differences == ()


HAS_NO_APPTAINER = shutil.which("apptainer") is None


def system_with(folder: Path, **container: object) -> Path:
    """The box's system, whose ranks are in a container; its jobs find programs where this test does."""
    content = yaml.safe_load((ROOT / "systems" / "box.yaml").read_text())
    content["slurm"]["export"] = ["PYTHONPATH", "PATH"]
    content["container"] = {"python": sys.executable, "mounts": apptainer_stand_in.mounts(), **container}
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
    image = apptainer_stand_in.packed(apptainer_stand_in.made(tmp_path / "root"))
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

"""Ranks in containers: the commands by their runtimes' options, what a node refuses, and runs that really enter one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlbench.analysis.comparability import averaged_id
from dlbench.errors import UserError
from dlbench.jobs.campaign.campaign import job_of
from dlbench.jobs.scripts import launch
from dlbench.jobs.scripts.containers import RunWords
from dlbench.jobs.scripts.launch import render_job, render_run_script
from dlbench.records.folder import RunFolder
from dlbench.records.scan import Run
from dlbench.specs.plan import RunPlan
from dlbench.specs.system import ContainerSpec, SystemSpec, with_image
from tests.jobs.test_requeue_script import plan_of
from tests.support import apptainer_stand_in
from tests.support.paths import ROOT

PYTHON = "/opt/python"
DIGEST = "ab" * 32


def contained(launcher: str = "srun-gloo", environment: dict[str, Any] | None = None, **keys: Any) -> RunPlan:
    plan = plan_of(launcher)
    system = plan.system.model_dump() | {"container": keys}
    system["launch"]["environment"] = environment or {}
    return plan.model_copy(update={"system": SystemSpec.model_validate(system)})


def words_of(plan: RunPlan) -> list[str]:
    return launch.launcher_command(plan, RunWords("/runs/x", "x"), plan.system.container.python)


def test_apptainer_is_started_by_each_rank() -> None:
    for launcher in ("srun-gloo", "mpirun"):
        words = words_of(contained(launcher, kind="apptainer", image="/i/a.sif", gpu="amd", mounts="/opt/x,/a:/b:ro"))
        start = words.index("apptainer")
        assert launcher.startswith(words[0])
        assert words[words.index("env") + 1 : start - 1 : 2] == ["-u"] * 7
        assert {"LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"} <= set(words[:start])
        end = words.index("/i/a.sif")
        assert words[start : start + 4] == ["apptainer", "exec", "--no-home", "--rocm"]
        mounts = [words[at + 1] for at in range(start, end) if words[at] == "--bind"]
        assert [mounts[0], *mounts[-2:]] == ["/runs/x:/runs/x", "/opt/x:/opt/x", "/a:/b:ro"]
        assert f"{ROOT}/dlbench:{ROOT}/dlbench:ro" in mounts
        assert words[end + 1 : end + 6] == ["python3", "-P", "-m", "dlbench.supervisor", "-m"]


def test_pyxis_is_told_by_srun() -> None:
    name = f"nvcr.example#team/torch@sha256:{DIGEST}"
    plan = contained(kind="pyxis", image=name, environment={"NCCL_ALGO": "Ring"}, mount_dlbench=False)
    words = words_of(plan)
    srun = words[words.index("srun") :]
    assert words[:3] == ["env", "-u", "LD_LIBRARY_PATH"]
    assert f"--container-image={name}" in srun
    assert {"--no-container-mount-home", "--no-container-entrypoint", "--container-readonly"} <= set(srun)
    assert any(word.startswith("--container-env=NCCL_ALGO,PYTHON") for word in srun)
    assert next(word for word in srun if word.startswith("--container-mounts=")).count(",") == 1
    assert srun[srun.index("python3") :][:4] == ["python3", "-P", "-m", "dlbench.supervisor"]
    assert plan.system.container.digest == DIGEST
    # An image has one of its own, which would go before.
    (named,) = [word for word in words_of(contained(kind="pyxis", image=name)) if word.startswith("--container-env=")]
    assert "PYTHONPATH" in named.partition("=")[2].split(",")


def test_podman_passes_in_what_is_named() -> None:
    given = {"API": {"variable": "API"}}
    for kind, gpu in (("podman-hpc", "--gpu"), ("podman", "--device=nvidia.com/gpu=all")):
        words = words_of(contained(kind=kind, image="torch:1", gpu="nvidia", pass_in="MY", environment=given))
        assert words[words.index(kind) : words.index(kind) + 2] == [kind, "run"]
        assert {gpu, "--env=API", "--env=MY", "--env=SLURM*", "--network=host", "--ipc=host", "--read-only"} <= set(
            words
        )
        assert {"--env=CUDA_VISIBLE_DEVICES", "--env=ROCR_VISIBLE_DEVICES"} <= set(words)  # the job's, not the node's
        assert words[words.index("torch:1") + 1 :][:3] == ["python3", "-P", "-m"]


def test_no_place_is_mounted_twice() -> None:
    plan = contained(kind="podman", image="torch:1", mounts=["/runs/x:/runs/x:rw", "/a", "/a:/b"])
    mounts = [word.removeprefix("--volume=") for word in words_of(plan) if word.startswith("--volume=")]
    assert mounts[-3:] == ["/runs/x:/runs/x:rw", "/a:/a", "/a:/b"]
    places = [mount.split(":")[1] for mount in mounts]
    assert len(places) == len(set(places))


@pytest.mark.parametrize(
    ("path", "mounted"),
    [
        ("$SCRATCH/a-b", '"$SCRATCH"/a-b'),
        ("$SCRATCH.d/x", '"$SCRATCH".d/x'),
        ("$SCRATCH-7", '"$SCRATCH"-7'),
        ("/scratch/$USER/{host}", '/scratch/"$USER"'),
        ("/local/of-{host}/x", "/local"),
        ("~/x y", "\"$HOME\"'/x y'"),
        ("/local-{host}", ""),
    ],
)
def test_what_samples_are_staged_to_is_mounted(path: str, mounted: str) -> None:
    plan = contained(kind="apptainer", image="/a.sif")
    system = plan.system.model_dump() | {"storage": {"local": {"path": path}}}
    data = plan.workload.data.model_copy(update={"staging": "replicate", "staging_tier": "local"})
    workload = plan.workload.model_copy(update={"data": data})
    plan = plan.model_copy(update={"system": SystemSpec.model_validate(system), "workload": workload})
    if not mounted:
        with pytest.raises(UserError, match=r"/local-\{host\}: cannot be mounted"):
            words_of(plan)
        return
    script = render_job(job_of([plan]), [RunFolder(Path("/runs/x"))], PYTHON)
    told = subprocess.run(
        ["/bin/bash", "-c", f"printf %s {mounted}:{mounted}"],
        capture_output=True, text=True, check=True, env=(places := {"SCRATCH": "/s", "USER": "me", "HOME": "/h"}),
    ).stdout  # fmt: skip
    line = next(line for line in script.splitlines() if "apptainer exec" in line)
    start = f"srun() {{ printf '%s\\n' \"$@\"; }}; TMPDIR=/tmp dlbench_run=/runs/x; {line}"
    words = subprocess.run(["/bin/bash", "-c", start], capture_output=True, text=True, check=True, env=places).stdout
    assert told in words.splitlines()


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"image": "/a.sif"}, "needs a kind"),
        ({"kind": "apptainer"}, "needs an image"),
        ({"kind": "docker", "image": "x"}, "apptainer"),
        ({"kind": "apptainer", "image": "docker://x"}, "is not a path"),
        ({"kind": "pyxis", "image": "/a.sif"}, "sqsh"),
        ({"kind": "podman", "image": f"a@sha256:{DIGEST}", "sha256": "0" * 64}, "but the image.s name has"),
        ({"kind": "podman", "image": "a", "mounts": ["x/y"]}, "mounts"),
        ({"kind": "podman", "image": "--privileged"}, "image"),
    ],
)
def test_what_cannot_be_is_refused(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ContainerSpec.model_validate(keys)


def test_what_does_not_fit_the_launcher_is_refused() -> None:
    with pytest.raises(ValueError, match="srun"):
        contained("mpirun", kind="pyxis", image="a")
    with pytest.raises(ValueError, match="APPTAINERENV_PATH"):
        contained(kind="apptainer", image="/a.sif", environment={"PATH": "/x"})


def test_the_digest_is_taken_once_and_a_changed_image_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLBENCH_CACHE", str(tmp_path / "cache"))
    image = tmp_path / "a.sif"
    with pytest.raises(UserError, match=r"container\.image .*a\.sif"):
        with_image(ContainerSpec(kind="apptainer", image=str(image)))
    image.write_bytes(b"one")
    asked = ContainerSpec(kind="apptainer", image=str(image))
    found = with_image(asked)
    assert found.sha256 == hashlib.sha256(b"one").hexdigest()
    (kept,) = (tmp_path / "cache" / "containers").iterdir()
    assert kept.read_text().endswith(str(found.sha256))
    with pytest.raises(UserError, match="another image"):
        with_image(asked.model_copy(update={"sha256": DIGEST}))
    one = contained(**found.model_dump())
    image.write_bytes(b"other")
    other = contained(**with_image(asked).model_dump())
    runs = [cast("Run", SimpleNamespace(plan=plan, record=None)) for plan in (one, other)]
    assert len({averaged_id(run) for run in runs}) == 2

    apptainer_stand_in.install(tmp_path)
    lost = contained(**with_image(asked).model_dump() | {"mounts": ["/nowhere/at/all"]})
    for plan, path, code, told in (
        (one, f"{tmp_path}:/usr/bin:/bin", 4, "is not on this node as it was when the run was planned"),
        (other, "/usr/bin:/bin", 5, "apptainer is not on PATH on this node; load its module"),
        (lost, f"{tmp_path}:/usr/bin:/bin", 5, "container.mounts: /nowhere/at/all: no such path on this node"),
    ):
        ended, line = started(plan, tmp_path, path)
        assert (ended, told in line) == (code, True), line


def started(plan: RunPlan, folder: Path, path: str) -> tuple[int, str]:
    """What a launch ends with on this machine, and the end of what it says."""
    script = folder / "launch.sh"
    script.write_text(render_run_script(plan, RunFolder(folder / "run"), sys.executable))
    done = subprocess.run(["bash", script], env={"PATH": path}, capture_output=True, text=True, check=False, timeout=60)
    (line,) = done.stderr.splitlines()
    return done.returncode, line.removeprefix("dlbench: error: ")


@settings(max_examples=25, deadline=None)
@given(st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=30))
def test_nothing_of_it_is_run_by_the_shell(text: str) -> None:
    plan = contained(kind="podman", image=f"i{text}", args=[f"--label={text}".replace(",", "")])
    script = render_job(job_of([plan]), [RunFolder(Path("/runs/x"))], PYTHON)
    line = next(line for line in script.splitlines() if "podman run" in line)
    told = subprocess.run(
        ["/bin/bash", "-c", f"srun() {{ printf '%s\\0' \"$@\"; }}; TMPDIR=/tmp dlbench_run=/runs/x; {line}"],
        capture_output=True, check=True, timeout=60, env={"PATH": "/nowhere"},
    )  # fmt: skip
    words = told.stdout.decode().split("\0")
    assert f"i{text}" in words
    assert f"--label={text}".replace(",", "") in words


@pytest.fixture
def image(tmp_path: Path) -> Path:
    return apptainer_stand_in.made(tmp_path / "root")


def run_contained(tmp_path: Path, launcher: str, ranks: int, path: str, **container: Any) -> dict[str, Any]:
    """The record's environment of a run whose ranks are in a container."""
    system = tmp_path / "contained.yaml"
    keys = {"python": sys.executable, "mounts": apptainer_stand_in.mounts(), **container}
    content = {"format": "dlbench.system", "version": 1, "name": "contained", "title": "T", "node": {"cores": 2}}
    system.write_text(json.dumps({**content, "launch": {"launcher": launcher}, "container": keys}))
    words = ["run", "cosmoflow", "--preset", "ci", "--engine", "ddp" if ranks > 1 else "single"]
    words += ["--ranks", str(ranks), "--system", str(system), "--out", str(tmp_path / "runs")]
    own = {"PATH": path, "PYTHONPATH": str(ROOT), "VIRTUAL_ENV": "/of/the/host", "DLBENCH_CACHE": str(tmp_path)}
    own |= dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "dlbench", *words, "--set", "measure.measured_steps=2"],
        env={**os.environ, **own}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    logs = "".join(log.read_text() for log in (tmp_path / "runs").glob("*/*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    (record,) = (tmp_path / "runs").glob("*/record.json")
    environment: dict[str, Any] = json.loads(record.read_text())["environment"]
    return environment


@pytest.mark.nightly  # tests/real/test_slurm_runs.py has it on two nodes
@pytest.mark.skipif(bool(apptainer_stand_in.lacking()), reason=apptainer_stand_in.lacking())
def test_a_run_in_a_root_of_its_own(tmp_path: Path, image: Path) -> None:
    apptainer_stand_in.install(tmp_path)
    path = f"{tmp_path}:{os.environ['PATH']}"
    file = apptainer_stand_in.packed(image)
    found = run_contained(tmp_path, "local", 1, path, kind="apptainer", image=str(file))
    assert found["container.image"] == str(file)
    assert found["container.sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert found["os"] == "Linux"  # the image has no /etc/os-release
    left = subprocess.run(["pgrep", "-f", str(tmp_path / "runs")], capture_output=True, text=True, check=False)
    assert left.stdout == ""


@pytest.mark.skipif(
    shutil.which("apptainer") is None,
    reason="Apptainer is not installed: neither Debian 12 nor PyPI has it, and its source needs Go modules to build",
)
@pytest.mark.parametrize("launcher", ["local", "mpirun"])
def test_a_run_in_apptainer(tmp_path: Path, image: Path, launcher: str) -> None:
    found = run_contained(
        tmp_path, launcher, 2, os.environ["PATH"], kind="apptainer", image=str(apptainer_stand_in.packed(image))
    )
    assert found["container.kind"] == "apptainer"


@pytest.mark.nightly
@pytest.mark.skipif(bool(apptainer_stand_in.lacking()), reason=apptainer_stand_in.lacking())
def test_mpirun_starts_a_container_for_each_rank(tmp_path: Path, image: Path) -> None:
    apptainer_stand_in.install(tmp_path)
    path = f"{tmp_path}:{os.environ['PATH']}"
    found = run_contained(tmp_path, "mpirun", 2, path, kind="apptainer", image=str(apptainer_stand_in.packed(image)))
    assert found["container.kind"] == "apptainer"


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("podman") is None or os.geteuid() != 0, reason="needs podman, and root to use it here")
def test_a_run_in_podman(tmp_path: Path, image: Path) -> None:
    for name in (str(tmp_path), str(ROOT / "dlbench"), sys.prefix, sys.base_prefix):
        (image / name.lstrip("/")).mkdir(parents=True, exist_ok=True)
    args = ["--runtime=runc", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"]
    found = run_contained(
        tmp_path, "local", 2, os.environ["PATH"], kind="podman", image=str(image), args=args
    )  # fmt: skip
    assert found["container.kind"] == "podman"
    left = subprocess.run(["podman", "ps", "--all", "--quiet"], capture_output=True, text=True, check=True)
    assert left.stdout == ""


def test_a_secret_by_its_variable_reaches_neither_plan_nor_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t" * 6)
    for keys in ({"kind": "podman", "image": "a"}, {"kind": "apptainer", "image": "/a.sif"}):
        plan = contained(environment={"WANDB_API_KEY": "env:WANDB_API_KEY"}, **keys)
        script = render_job(job_of([plan]), [RunFolder(Path("/runs/x"))], PYTHON)
        assert 'export WANDB_API_KEY="$WANDB_API_KEY"' in script
        assert "s3cr3t" not in script + plan.model_dump_json()

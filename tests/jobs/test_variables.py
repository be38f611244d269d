"""Variables of `launch.environment` given by reference: where their values are seen, and where never."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlbench.errors import UserError
from dlbench.jobs.campaign.campaign import job_of
from dlbench.jobs.scripts import launch
from dlbench.jobs.scripts.containers import words_of
from dlbench.jobs.scripts.launch import MAX_BYTES, render_job, resolve
from dlbench.records.folder import RunFolder
from dlbench.specs.expand import expand
from dlbench.specs.launch import VariableSource
from dlbench.specs.plan import RunPlan
from dlbench.specs.requests import Request

VALUE = "hunter2-never-written-down"


def plan_with(environment: dict[str, Any], *, launcher: str = "mpirun") -> RunPlan:
    (plan,) = expand(Request(workload="bert", preset="ci", engine="ddp", points=(2,)), machine_cores=2)
    content = plan.model_dump(mode="json")
    content["system"]["launch"] |= {"launcher": launcher, "environment": environment}
    return RunPlan.model_validate(content)


def test_the_value_is_in_no_plan_script_or_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITE_TOKEN", VALUE)
    (tmp_path / "secret").write_text(VALUE + "\n")
    plan = plan_with({"API_TOKEN": {"variable": "SITE_TOKEN"}, "PASSWORD": {"file": str(tmp_path / "secret")}})
    folder = RunFolder(tmp_path / "run")
    made = [
        json.dumps(plan.model_dump(mode="json")),
        " ".join(launch.launcher_command(plan, words_of(folder), "python3")),
        " ".join(launch.launcher_command(plan, words_of(folder), "python3")),
        render_job(job_of([plan]), [folder], "python3"),
    ]
    assert not [text for text in made if VALUE in text]
    assert RunPlan.model_validate(plan.model_dump(mode="json")) == plan
    assert plan.system.launch.referenced == {"API_TOKEN", "PASSWORD", "SITE_TOKEN"}
    found = resolve(launch.rank_environment(plan))
    assert (found["API_TOKEN"], found["PASSWORD"]) == (VALUE, VALUE)


STUB = """#!/bin/sh
printf '%s\\n' "$@" > "$DUMP/words"
printf '%s|%s|%s' "$API_TOKEN" "$PASSWORD" "$DLBENCH_LAUNCH_TOKEN" > "$DUMP/values"
exit 1
"""


def dlbench(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own; nothing heavy is loaded where no rank starts."""
    command = [sys.executable, "-P", "-m", "dlbench", *words]
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_run_hands_secrets_to_mpirun_by_its_environment_alone(tmp_path: Path) -> None:
    for name in ("bin", "dump"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin" / "mpirun").write_text(STUB)
    (tmp_path / "bin" / "mpirun").chmod(0o755)
    (tmp_path / "secret").write_text(VALUE + "-2\n")
    words = ("run", "bert", "--preset", "ci", "--engine", "ddp", "--data", "synthetic", "--ranks", "2")
    sets = ("API_TOKEN.variable=SITE_TOKEN", f"PASSWORD.file={tmp_path / 'secret'}")
    words += tuple(word for one in sets for word in ("--set", f"system.launch.environment.{one}"))
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    known = {"PATH": path, "DUMP": str(tmp_path / "dump"), "SITE_TOKEN": VALUE}
    done = dlbench(*words, "--launcher", "mpirun", cwd=tmp_path, **known)
    assert done.returncode == 3, done.stderr  # the stub starts no rank
    one, two, token = (tmp_path / "dump" / "values").read_text().split("|")
    assert (one, two) == (VALUE, VALUE + "-2")
    told = (tmp_path / "dump" / "words").read_text()
    assert token
    assert {VALUE, token} & set(told.split()) == set()
    assert not [file for file in (tmp_path / "runs").rglob("*") if file.is_file() and VALUE in file.read_text()]


def test_a_run_without_its_secret_makes_no_folder(tmp_path: Path) -> None:
    words = ("run", "bert", "--preset", "ci", "--engine", "ddp", "--data", "synthetic", "--ranks", "2")
    told = dlbench(*words, "--set", "system.launch.environment.API_TOKEN.variable=NOT_SET", cwd=tmp_path)
    assert told.returncode == 2
    assert "launch.environment.API_TOKEN: NOT_SET is not set where dlbench runs" in told.stderr
    assert not (tmp_path / "runs").exists()


def test_a_variable_that_is_not_set_is_one_line() -> None:
    with pytest.raises(UserError, match=r"^launch\.environment\.X: NOT_SET is not set where dlbench runs"):
        resolve({"X": VariableSource(variable="NOT_SET")}, {})


@pytest.mark.parametrize("kind", ["missing", "folder", "fifo", "long", "nul"])
def test_a_file_that_holds_no_value_is_one_line_without_its_content(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "secret"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind != "missing":
        path.write_bytes(VALUE.encode() + (b"x" * MAX_BYTES if kind == "long" else b"\0"))
    with pytest.raises(UserError, match=r"launch\.environment\.X: ") as told:
        resolve({"X": VariableSource(file=str(path))})
    assert VALUE not in str(told.value)
    assert str(path) in str(told.value)


def test_a_file_s_text_is_taken_without_the_end_of_its_line(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"two\nlines \xff\n")
    found = resolve({"X": VariableSource(file=str(tmp_path / "secret"))})
    assert os.fsencode(found["X"]) == b"two\nlines \xff"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("API_TOKEN", "x"),
        ("UCX_AUTH", "x"),
        ("OMPI_MCA_x_bearer", "x"),
        ("WANDB_API_KEY", "x"),
        ("GLOO_URL", "http://user:pass@h/"),
        ("HTTPS_PROXY", "http://user:pass@proxy:3128"),
    ],
)
def test_a_secret_in_the_open_is_refused_with_what_to_write(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} looks like a secret.*{name}: {{variable: {name}}}, or") as told:
        plan_with({name: value})
    assert f"={value}" not in str(told.value)


@pytest.mark.parametrize(
    "environment",
    [
        {"NCCL_IB_PKEY": "7", "UCX_IB_PKEY": "0x8001", "OMP_NUM_THREADS": "4", "UCX_NET_DEVICES": "mlx5_0:1"},
        {"LD_PRELOAD": "/spack/gcc-12/jemalloc-5.3.0-abcdefgh2jklmnopqrstuvwxyz234567/lib/libjemalloc.so"},
        {"OMPI_MCA_btl_tcp_if_include": "192.0.2.0/24,eth0", "CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c-4106-c12f"},
        {"API_TOKEN": ""},
    ],
)
def test_settings_are_no_secrets(environment: dict[str, str]) -> None:
    assert plan_with(environment).system.launch.environment == environment


@pytest.mark.parametrize(
    "source", [{}, {"variable": "A", "file": "/b"}, {"variable": "A B"}, {"file": "b"}, {"file": ""}, {"from": "A"}]
)
def test_a_reference_is_one_of_two_things(source: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="environment"):
        plan_with({"X": source})

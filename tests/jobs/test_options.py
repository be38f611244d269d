"""What sbatch and srun are asked for beyond a plan's size, what a job gets of the shell that submits it, and variables
of `launch.environment` given by reference: where their values are seen, and where never."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.cli.options import preset_notes
from dlbench.errors import UserError
from dlbench.jobs.campaign.campaign import job_of
from dlbench.jobs.scripts import launch
from dlbench.jobs.scripts.containers import words_of
from dlbench.jobs.scripts.job import PLAIN_PATH
from dlbench.jobs.scripts.launch import MAX_BYTES, render_job, resolve, sbatch_options
from dlbench.jobs.slurm.environment import client_environment, exported_names, job_environment
from dlbench.records.folder import RunFolder
from dlbench.specs.expand import expand
from dlbench.specs.launch import VariableSource, compressed, expanded
from dlbench.specs.plan import RunPlan
from dlbench.specs.requests import Request
from tests.jobs.test_jobs import PYTHON, Cluster, cluster, folder_of, plan_of, render_script, sides_of, with_system

__all__ = ["cluster"]


def test_memory_and_cores_are_asked_for_once() -> None:
    plan = plan_of(system="example-gpu")

    def asked(**changes: Any) -> list[str]:
        words = sbatch_options(with_system(plan, slurm=changes))
        return [word for word in words if word.startswith(("--mem", "--cpus"))]

    cores = "--cpus-per-task=16"
    assert asked() == [cores, "--mem=0"]
    assert asked(exclusive=False) == [cores]
    assert asked(mem="site") == [cores]
    assert asked(mem="200G", exclusive=False) == [cores, "--mem=200G"]
    assert asked(extra="mem-per-cpu=2G") == [cores, "--mem-per-cpu=2G"]
    assert asked(mem_per_gpu="60G", cpus_per_gpu=8) == ["--cpus-per-gpu=8", "--mem-per-gpu=60G"]
    for wrong in (
        {"mem": "1G", "mem_per_gpu": "1G"},
        {"mem": "1G", "extra": "mem-per-cpu=2G"},
        {"mem_per_gpu": "1G", "extra": "mem-per-cpu=2G"},
        {"gpu_request": "none", "cpus_per_gpu": 1},
        {"gres": "craynetwork:1,gpu:4"},
        {"mem": "-1"},
    ):
        with pytest.raises(ValueError, match=r"mem|gpu"):
            asked(**wrong)


@pytest.mark.parametrize(
    ("key", "given", "words"),
    [
        ("extra", ["array=0-3"], "--array is not allowed: it would start several jobs in one run folder"),
        ("extra", "--arr=0-3", "--arr, which is short for --array, is not allowed"),
        ("extra", ["--switches=1", "nodes=7"], "--nodes is not allowed: the plan sets it"),
        ("extra", "ntasks-per-n=2", "short for --ntasks-per-node"),
        ("extra", "wrap=id", "--wrap is not allowed"),
        ("extra", "partition=gpu", "use system.slurm.partition"),
        ("extra", "export=ALL", "use system.slurm.export"),
        ("extra", ["-N7"], "'-N7' is not a long option"),
        ("extra", "--switches 1", "'1' is not a long option"),
        ("extra", ["Nodes=7"], "is not a long option"),
        ("extra", ["licenses=a\nb"], "cannot be printed"),
        ("extra", "it's", "is not a list of words"),
        ("srun_args", "--label", "dlbench sets it"),
        ("srun_args", "--mpi=none", "use system.launch.mpi_plugin"),
        ("srun_args", "--cpu-b=cores", "short for --cpu-bind"),
    ],
)
def test_an_option_that_would_break_the_plan_is_refused_with_the_key(key: str, given: Any, words: str) -> None:
    if isinstance(given, str):
        with pytest.raises(UserError) as told:
            plan_of(overrides={f"system.slurm.{key}": given})
        assert f"system.slurm.{key}: " in str(told.value)
        assert len(str(told.value).splitlines()) == 1
        assert words in str(told.value)
    else:
        with pytest.raises(ValueError, match=re.escape(words)):
            with_system(plan_of(), slurm={key: given})


def test_bindings_and_further_options_reach_srun_alone() -> None:
    asked = {"cpu_bind": "mask_cpu:0xf,0xf0", "mem_bind": "local", "distribution": "cyclic"}
    plan = plan_of(overrides={f"system.slurm.{key}": value for key, value in asked.items()})
    plan = with_system(plan, slurm={"srun_args": "--network='a b' overlap"})
    words = launch.launcher_command(plan, words_of(folder_of(plan)), PYTHON)
    given = {"--cpu-bind=mask_cpu:0xf,0xf0", "--mem-bind=local", "--distribution=cyclic", "--network=a b", "--overlap"}
    assert given <= set(words)
    assert not given & set(sbatch_options(plan))
    hinted = with_system(plan_of(), slurm={"threads_per_core": 1, "distribution": "site"})
    assert "--threads-per-core=1" in sbatch_options(hinted)
    words = launch.launcher_command(hinted, words_of(folder_of(hinted)), PYTHON)
    assert "--threads-per-core=1" in words
    assert not any(word.startswith("--distribution") for word in words)
    sides_of({}, {"system.slurm.cpu_bind": "cores"})  # of one job


# Lists of hosts


@given(
    st.sets(
        st.builds(
            lambda prefix, number, width: f"{prefix}{number:0{width}d}",
            st.sampled_from(["n", "rack1-n", "gpu0", "m-"]),
            st.integers(0, 1200),
            st.integers(1, 4),
        )
        | st.sampled_from(["login", "7", "n01-ib", "a[1-2]"]),
        max_size=40,
    )
)
def test_a_short_list_of_hosts_names_each_once(hosts: set[str]) -> None:
    found = list(expanded(compressed(hosts)))
    assert sorted(found) == sorted({name for host in hosts for name in expanded(host)} if hosts else [])


def test_hosts_are_written_as_slurm_writes_them() -> None:
    assert compressed(["n7", "n1", "n2", "n3", "m5"]) == "m5,n[1-3,7]"
    assert compressed(["n009", "n010", "n011"]) == "n[009-011]"
    assert compressed(["n9", "n10"]) == "n[9-10]"
    assert compressed(["n09", "n9"]) == "n[09,9]" or compressed(["n09", "n9"]) == "n9,n09"
    assert compressed([]) == ""
    many = [f"node-a100-{number:04d}" for number in range(1, 2001)]
    excluded = with_system(plan_of(), slurm={"exclude": many})
    assert "--exclude=node-a100-[0001-2000]" in sbatch_options(excluded)
    written = plan_of(overrides={"system.slurm.exclude": ",".join(many[:3])})
    assert written.system.slurm.exclude == "node-a100-[0001-0003]"


# The environment of a job

SHELL = {
    "HOME": "/home/ann",
    "PATH": f"/opt/conda/bin:{os.environ['PATH']}",
    "LD_LIBRARY_PATH": "/opt/conda/lib",
    "SITE_TOKEN": "hunter2",
    "PROJECT": "7",
    "SLURM_CONF": "/etc/slurm.conf",
    "SLURM_JWT": "token",
    **dict.fromkeys(("SBATCH_PARTITION", "SBATCH_ARRAY_INX", "SLURM_CPU_BIND", "SLURM_MEM_PER_CPU"), "other"),
    **dict.fromkeys(("SLURM_TRES_PER_TASK", "SLURM_JOB_ID", "SQUEUE_FORMAT", "SLURM_TIME_FORMAT"), "other"),
}


def test_a_job_gets_nothing_of_the_shell_but_what_its_system_names() -> None:
    plan = with_system(plan_of(), launch={"environment": {"TOKEN_FILE": {"variable": "SITE_TOKEN"}, "X": "1"}})
    plan = with_system(plan, slurm={"export": []})
    client = {"SLURM_CONF": "/etc/slurm.conf", "SLURM_JWT": "token"}
    found = job_environment([plan], SHELL)
    assert found.pop("PATH").endswith(PLAIN_PATH)
    assert "/opt/conda" not in job_environment([plan], SHELL)["PATH"]
    assert set(found) == {"HOME", "USER", "LOGNAME", "SHELL", "SITE_TOKEN", *client}
    assert found.items() >= {"HOME": "/home/ann", "SITE_TOKEN": "hunter2", **client}.items()
    named = with_system(plan, slurm={"export": "PROJECT, LD_LIBRARY_PATH, NOT_SET"})
    assert set(job_environment([named], SHELL)) == {*found, "PATH", "PROJECT", "LD_LIBRARY_PATH"}
    everything = with_system(plan, slurm={"export": "ALL"})
    kept = {name for name in SHELL if SHELL[name] != "other"}
    assert set(job_environment([everything], SHELL)) == set(client_environment(SHELL)) == kept
    assert exported_names([everything]) == ("ALL",)


def test_what_a_job_will_not_get_is_said_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = with_system(plan_of(), launch={"environment": {"API_TOKEN": {"variable": "SITE_TOKEN"}}})
    monkeypatch.delenv("SITE_TOKEN", raising=False)
    (note,) = [note for note in preset_notes([plan, plan]) if "SITE_TOKEN" in note]
    assert note.startswith("note: launch.environment.API_TOKEN: SITE_TOKEN is not set here: ")
    monkeypatch.setenv("SITE_TOKEN", "hunter2")
    assert not any("SITE_TOKEN" in note for note in preset_notes([plan]))
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    monkeypatch.setenv("SBATCH_QOS", "low")
    assert [note for note in preset_notes([plan, plan]) if "SBATCH" in note] == [
        "note: SBATCH_ACCOUNT, SBATCH_QOS: set here but not used: jobs are requested as in system box (slurm.*)"
    ]


@pytest.mark.parametrize(("named", "hint"), [("", None), ("NCCL_ALGO, PATH, TMPDIR", "nomultithread")])
def test_by_hand_the_job_gets_no_more_of_the_shell_than_by_dlbench(
    cluster: Cluster, named: str, hint: str | None
) -> None:
    """sbatch hands over the whole shell (--export=ALL), of which `dlbench submit` holds all other things back."""
    plan = with_system(
        plan_of(),
        launch={"launcher": "srun-gloo", "environment": {"API_TOKEN": {"variable": "SITE_TOKEN"}}},
        slurm={"export": named, "hint": hint},
        setup=[f"export DUMP={cluster.dump} STUB_CODE=0; {'' if named else 'echo $PATH > $DUMP/path'}"],
    )
    of_srun = ("SLURM_CPU_BIND", "SLURM_STEP_ID", "SLURM_STEPID", "SLURM_MPI_TYPE", "SLURM_CPU_FREQ_REQ")
    of_srun += ("SLURM_EXPORT_ENV", "SLURM_MEM_BIND_TYPE", "SLURM_TIMELIMIT", "SLURM_WORKING_DIR", "SRUN_CONTAINER")
    shell = {
        "NCCL_ALGO": "Tree",
        "OMP_NUM_THREADS": "77",
        "BASH_FUNC_python%%": "() { false; }",
        "odd.name": "1",
        **dict.fromkeys(of_srun, "map_cpu:99"),
        "SLURM_NNODES": "2",
        "SLURM_STEPMGR": "n1",
        "SLURM_HINT": "nomultithread",
        "SLURM_CONF": "/etc/slurm.conf",
        "TMPDIR": "/nosuch",
        "SITE_TOKEN": "hunter2",
    }
    done = cluster.run(render_script(plan, folder_of(plan), PYTHON), **shell, DLBENCH_SUBMITTED="")
    assert (done.returncode, done.stderr) == (0, "")
    seen = cluster.environment("srun")
    assert not {"OMP_NUM_THREADS", "BASH_FUNC_python%%", "odd.name", "DLBENCH_SUBMITTED", *of_srun} & set(seen)
    # What sbatch sets for the job stays, an option's of this job among it.
    kept = ("SLURM_NNODES", "SLURM_STEPMGR", "SLURM_CONF", "SLURM_HINT")
    assert [name for name in kept if name in seen] == list(kept if hint else kept[:3])
    assert seen["SITE_TOKEN"] == "hunter2"
    assert seen["TMPDIR"] == ("/nosuch" if named else "/tmp")
    assert ("NCCL_ALGO" in seen) is bool(named)
    if not named:
        # Slurm's programs are found where the shell found them.
        assert (cluster.dump / "path").read_text() == f"{cluster.bin}:{PLAIN_PATH}\n"
    everything = with_system(plan, slurm={"export": "ALL"})
    assert cluster.run(render_script(everything, folder_of(plan), PYTHON), **shell).returncode == 0
    assert cluster.environment("srun")["OMP_NUM_THREADS"] == "77"
    assert "DLBENCH_SUBMITTED" not in cluster.environment("srun")


# Modules

MODULE = """module() {
  echo "$*" >> "$DUMP/module"
  case "$1 $2" in
    "load gcc/12") export LOADEDMODULES=gcc/12:$LOADEDMODULES ;;
    "load openmpi") export LOADEDMODULES=openmpi/4.1:$LOADEDMODULES ;;
    "load alias") export LOADEDMODULES=other/1:$LOADEDMODULES ;;
    "load broken") echo 'broken(1):ERROR: cannot load' >&2; return 1 ;;
  esac
}"""


@pytest.mark.parametrize(
    ("modules", "reset", "missing"),
    [
        (["gcc/12", "openmpi", "alias", "gcc/12"], "purge", None),
        (["gcc/12"], "reset", None),
        (["gcc/12"], "none", None),
        (["gcc/12", "silent/1", "openmpi"], "purge", "silent/1"),
        (["broken"], "purge", "broken"),
        (["gcc/1"], "none", "gcc/1"),
    ],
)
def test_every_module_is_loaded_or_the_job_says_which_is_not(
    cluster: Cluster, modules: list[str], reset: str, missing: str | None
) -> None:
    """Also where `module` fails without an exit code, as its version 3 does."""
    asked = {"modules": modules, "modules_reset": reset, "modules_init": MODULE, "setup": "export AFTER=1"}
    plan = with_system(plan_of(), **asked)
    done = cluster.run(render_script(plan, folder_of(plan), PYTHON))
    words = (cluster.dump / "module").read_text().splitlines()
    assert (words[0] == reset) is (reset != "none")
    if missing is None:
        assert (done.returncode, done.stderr) == (0, "")
        assert [word for word in words if word.startswith("load")] == [f"load {name}" for name in modules]
        assert cluster.environment("srun")["AFTER"] == "1"
        return
    assert done.returncode == 5
    assert words[-1] == f"load {missing}"
    line = done.stderr.splitlines()[-1]
    assert line.startswith("dlbench: error: ")
    assert f"module {missing} was not loaded" in line
    assert "srun" not in cluster.called()


def test_a_node_without_the_command_module_says_what_to_set(cluster: Cluster, tmp_path: Path) -> None:
    plan = with_system(plan_of(), modules=["gcc/12"], modules_init="true")
    done = cluster.run(render_script(plan, folder_of(plan), PYTHON))
    assert done.returncode == 5
    (line,) = done.stderr.splitlines()
    assert "there is no command module: set modules_init" in line


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

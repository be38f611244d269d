"""What ranks would refuse of their Horovod is refused before any job or run is there; a dry run warns of it."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

from dlbench.errors import EnvironmentLacksError
from dlbench.setup import requirements
from dlbench.specs.expand import expand
from dlbench.specs.requests import Request
from tests.conftest import Cli
from tests.support.gpus import gpu_files
from tests.support.horovod import stand_in_horovod
from tests.support.programs import on_path

RUN = ("run", "cosmoflow", "--preset", "ci", "--engine", "horovod", "--data", "synthetic")
SUBMIT = ("submit", "cosmoflow", "--preset", "ci", "--engine", "horovod", "--data", "synthetic", "--system", "box")
HIERARCHICAL = ("--set", "sync.exchange=horovod-hierarchical")
WITHOUT_MPI = "engine horovod: this Horovod was built without MPI, which launchers mpirun and srun-mpi need; use "
GPU_SYSTEM = """\
format: dlbench.system
version: 1
name: gpus
title: GPUs
scheduler: slurm
slurm: {partition: gpu, gpu_request: gpus-per-node}
node: {cores: 8, gpus: 4, ranks: 4}
launch: {launcher: srun-mpi}
"""


@pytest.fixture
def programs(tmp_path: Path) -> str:
    """A PATH with stand-ins of what starts ranks and jobs; what they are called with is in `called`."""
    names = ("mpirun", "srun", "sbatch")
    said = f'[ "$1" = --version ] || echo "$0" >>{tmp_path / "called"}\nexit 7'
    return on_path(tmp_path / "bin", **dict.fromkeys(names, said))


@pytest.mark.parametrize(
    ("arguments", "built", "words"),
    [
        ((*RUN, "--ranks", "2", "--launcher", "mpirun"), {"mpi": False}, [WITHOUT_MPI, "without Slurm: local"]),
        ((*SUBMIT, "--nodes", "1,2"), {"mpi": False}, [WITHOUT_MPI, "--launcher srun-gloo", "--engine ddp"]),
        ((*SUBMIT, "--nodes", "2", *HIERARCHICAL), {}, ["without NCCL", "use sync.exchange=hierarchical"]),
        ((*RUN, "--ranks", "2", "--set", "sync.exchange=horovod-torus"), {}, ["without NCCL", "hierarchical"]),
        (
            (*SUBMIT, "--nodes", "2", "--launcher", "srun-gloo", *HIERARCHICAL),
            {"nccl": True},
            ["by MPI here and ignores the flag without it; use an MPI launcher"],
        ),
        ((*RUN, "--ranks", "2"), {"gloo": False}, ["built without Gloo; run `dlbench setup horovod`"]),
    ],
)
def test_a_build_that_ranks_refuse_is_refused_before_any_job(
    cli: Cli, tmp_path: Path, programs: str, arguments: tuple[str, ...], built: dict[str, bool], words: list[str]
) -> None:
    variables = {**stand_in_horovod(tmp_path, **built), "PATH": programs}
    done = cli(*arguments, **variables)
    assert (done.returncode, done.stdout) == (5, ""), done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("dlbench: error: ")
    assert [word for word in words if word not in line] == [], line
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "called").exists()
    # What a dry run says is the same, and it goes on.
    dry = cli(*arguments, "--dry-run", **variables)
    assert dry.returncode == 0, dry.stderr
    assert line.replace("dlbench: error: ", "warning: ") in dry.stderr.splitlines()
    assert dry.stdout


@pytest.mark.parametrize(
    ("arguments", "built"),
    [
        ((*SUBMIT, "--nodes", "2"), {}),
        ((*SUBMIT, "--nodes", "2", "--launcher", "srun-gloo"), {"mpi": False}),
        ((*SUBMIT, "--nodes", "2", "--engine", "ddp"), {"mpi": False}),
        ((*RUN, "--ranks", "2"), {"mpi": False}),
        # What these bring is not known here.
        ((*SUBMIT, "--nodes", "2", "--set", "system.modules=openmpi"), {"mpi": False}),
        ((*SUBMIT, "--nodes", "2", "--set", "system.setup=. /site/env"), {"mpi": False}),
        ((*SUBMIT, "--nodes", "2", "--set", "system.python=/not/here/python"), {"mpi": False}),
        ((*SUBMIT, "--nodes", "2", "--set", "system.python=python3"), {"mpi": False}),
        ((*SUBMIT, "--nodes", "2", "--set", "system.launch.environment.PYTHONPATH=/site"), {"mpi": False}),
    ],
)
def test_what_works_or_is_not_known_here_is_not_refused(
    cli: Cli, tmp_path: Path, arguments: tuple[str, ...], built: dict[str, bool]
) -> None:
    done = cli(*arguments, "--dry-run", **stand_in_horovod(tmp_path, **built))
    assert done.returncode == 0, done.stderr
    assert "Horovod" not in done.stderr


def test_ranks_on_gpus_need_nccl_where_torch_is_built_for_them(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "gpus.yaml").write_text(GPU_SYSTEM)
    asked = ("submit", "resnet50", "--preset", "full", "--system", "gpus.yaml", "--nodes", "2", "--data", "synthetic")
    asked += ("--engine", "horovod", "--dry-run")
    done = cli(*asked, **stand_in_horovod(tmp_path, cuda="13.0"))
    assert done.returncode == 0
    assert "without NCCL, which 8 ranks on GPUs need; for one with it, run `dlbench setup horovod`" in done.stderr
    done = cli(*asked, **stand_in_horovod(tmp_path, cuda="13.0", nccl=True))
    assert "NCCL" not in done.stderr
    done = cli(*asked, **stand_in_horovod(tmp_path))  # a torch for CPUs computes on CPUs there, too
    assert "NCCL" not in done.stderr


@pytest.mark.parametrize(
    ("asked", "code"), [("python=", 0), ("slurm.login_shell=true", 0), (f"python={sys.executable}", 5)]
)
def test_what_the_nodes_may_have_is_asked_here_and_only_warned_of(
    cli: Cli, tmp_path: Path, asked: str, code: int
) -> None:
    """Another Python's path may hold something else there, and a login profile may bring it."""
    other = tmp_path / "other-python"
    variables = stand_in_horovod(tmp_path, mpi=False)
    other.write_text(f'#!/bin/sh\nPYTHONPATH={variables.pop("PYTHONPATH")} exec {sys.executable} "$@"\n')
    other.chmod(0o755)
    if asked == "python=":
        asked += str(other)
    else:
        variables = stand_in_horovod(tmp_path, mpi=False)
    words = (*SUBMIT, "--nodes", "1,2", "--set", f"system.{asked}", "--write-only")
    done = cli(*words, **variables)
    assert (done.returncode, done.stdout.count("sbatch ")) == (code, 2 if code == 0 else 0), done.stderr
    told = f"{'dlbench: error' if code else 'warning'}: {WITHOUT_MPI}"
    assert [line.startswith(told) for line in done.stderr.splitlines() if "MPI" in line] == [True], done.stderr


def test_an_answer_is_kept_until_horovod_is_another(cli: Cli, tmp_path: Path) -> None:
    variables = stand_in_horovod(tmp_path, mpi=False)
    asked = tmp_path / "packages" / "horovod" / "torch" / "__init__.py"
    asked.write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write('x')\n" + asked.read_text())
    for _ in range(2):
        assert WITHOUT_MPI in cli(*SUBMIT, "--nodes", "2", "--dry-run", **variables).stderr
    assert (tmp_path / "imported").read_text() == "x"
    stand_in_horovod(tmp_path)
    assert cli(*SUBMIT, "--nodes", "2", "--dry-run", **variables).stderr == ""
    for kept in (tmp_path / "cache").rglob("asked/*"):
        kept.write_text("damaged")
    assert cli(*SUBMIT, "--nodes", "2", "--dry-run", **variables).stderr == ""


@pytest.mark.parametrize("sees", [False, True])
def test_a_torch_that_cannot_use_the_gpu_here_is_refused_before_any_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sees: bool
) -> None:
    """By its version and the driver's; where CUDA itself begins, libraries for forward compatibility are here."""
    root = gpu_files(tmp_path / "gpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    python = tmp_path / "python"
    where = '{"prefix": "/venv", "installed": ["torch"], "torch": ["2.13.0", "13.0", null], "files": []}'
    answers = f"case \"$*\" in *is_available*) echo '{{\"sees\": {str(sees).lower()}}}' ;; *) echo '{where}' ;; esac"
    python.write_text(f"#!/bin/sh\n{answers}\n")
    python.chmod(0o755)
    for name in ("is_given_gpu", "unusable"):
        monkeypatch.setattr(requirements, name, partial(getattr(requirements, name), root=root))

    def refused(**launch: str) -> object:
        overrides = {
            "system.python": str(python),
            **{f"system.launch.environment.{key}": launch[key] for key in launch},
        }
        asked = Request(workload="resnet50", preset="ci", engine="single", points=(1,), overrides=overrides)
        return requirements.refusal(expand(asked, machine_cores=2)[0])

    assert refused(CUDA_VISIBLE_DEVICES="-1") is None
    if sees:
        assert refused() is None
    else:
        error = refused()
        assert isinstance(error, EnvironmentLacksError)
        assert str(error).startswith(
            "this machine has a GPU that torch cannot use: torch 2.13.0 is built for CUDA 13.0, which needs driver 580 "
            "or newer, and the driver is 535.183.01; pip install torch==2.13.0+cu126 with PIP_EXTRA_INDEX_URL"
        )

"""Refused before any run is there: a preset that nobody chose, arithmetic that is not here, needs of ranks."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from dlbench.cli import cli
from dlbench.cli.options import expand_request
from dlbench.cli.streams import ending_of
from dlbench.errors import EnvironmentLacksError, UserError
from dlbench.jobs import local
from dlbench.setup import probes
from dlbench.specs.expand import expand
from dlbench.specs.files import find
from dlbench.specs.requests import Request
from dlbench.units import format_bytes
from tests.conftest import Cli
from tests.specs.test_refusals import SHORT
from tests.support.gpus import gpu_files
from tests.support.horovod import stand_in_horovod
from tests.support.programs import on_path


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPU, of unknown memory, whose CPU has fp32 alone."""
    monkeypatch.setattr(local, "total_bytes", lambda: None)
    monkeypatch.setattr(local, "has_gpu", lambda: False)
    monkeypatch.setattr(local, "product_rate", lambda: 1e9)
    monkeypatch.setattr(
        local, "lacking_arithmetic", lambda wanted: "" if wanted == "fp32" else f"no {wanted} arithmetic"
    )


def test_a_preset_that_nobody_chose_is_refused_with_what_it_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlbench.cli.options.os.sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(UserError) as raised:
        expand_request(Request(workload="resnet50", repeats=2))
    said = str(raised.value)
    assert "no --preset" in said
    assert "did you mean --preset ci? --preset full runs it anyway" in said
    # 2 runs of 120 steps of 64 images of 24.3 GFLOP (3 x 2 x 4.09 G, less one pass of the first convolution).
    assert "takes at least 51 h 50 min on 2 cores for 2 runs (its model FLOPs" in said
    monkeypatch.setattr(local, "product_rate", lambda: None)
    with pytest.raises(UserError, match="the default, did you mean"):
        expand_request(Request(workload="resnet50"))


def test_a_chosen_preset_a_gpu_a_single_preset_and_a_cluster_are_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert expand_request(Request(workload="resnet50", preset="full"))
    assert expand_request(Request(workload="resnet50", system="box", points_are="nodes"))
    mine = tmp_path / "mine.yaml"
    mine.write_text(SHORT.partition("  bf16:")[0])
    assert expand_request(Request(workload=str(mine)))
    monkeypatch.setattr(local, "has_gpu", lambda: True)
    assert expand_request(Request(workload="resnet50"))


def preset_taken(request: Request) -> str:
    (preset,) = {plan.workload.preset for plan in expand_request(request)}
    return preset


def test_a_system_with_gpus_takes_preset_gpu_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the system file alone: who plans on a login node has no GPU there."""
    cluster = {"system": "example-gpu", "points_are": "nodes", "points": (1, 2)}
    assert preset_taken(Request(workload="resnet50", **cluster)) == "gpu"
    assert capsys.readouterr().err == (
        "note: preset gpu, because no --preset is given and system example-gpu has GPUs (node.gpus); on CPUs it would "
        "be full\n"
    )
    assert preset_taken(Request(workload="resnet50", preset="full", **cluster)) == "full"
    without = {"system.node.gpus": 0, "system.node.ranks": 4}
    assert preset_taken(Request(workload="resnet50", overrides=without, **cluster)) == "full"
    assert capsys.readouterr().err == ""
    mine = tmp_path / "mine.yaml"
    mine.write_text(SHORT.replace("  gpu:", "  large:"))
    assert preset_taken(Request(workload=str(mine), **cluster)) == "large"
    assert capsys.readouterr().err == ""
    # Here, where the system file names no GPU, a GPU changes nothing but is told of.
    monkeypatch.setattr(local, "has_gpu", lambda: True)
    assert preset_taken(Request(workload="resnet50")) == "full"
    assert "for the GPU of this machine: --preset gpu" in capsys.readouterr().err
    monkeypatch.setattr(local, "lacking_arithmetic", lambda _: "")
    assert preset_taken(Request(workload="resnet50", overrides={"system.node.gpus": 1})) == "gpu"


@pytest.mark.parametrize(
    ("command", "option", "use"),
    [
        ("run", "--gpus", "use --ranks N (one rank per GPU)."),
        ("submit", "--nproc", "use --ranks N (one rank per GPU)."),
        ("run", "--nodes", "use --ranks N on this machine, or `dlbench submit` with --nodes N."),
        ("run", "--batch-size", "use --set train.batch_per_rank=N."),
        ("run", "--epochs", "use --to-accuracy and --set quality.max_epochs=N; "),
        ("run", "--lr", "use --set train.optimizer.learning_rate=X."),
        ("submit", "--workers", "use --set data.loader_workers=N."),
        ("run", "--fp16", "use --set train.precision=bf16"),
        ("run", "--amp", "use --set train.precision=bf16"),
        ("io", "--gpus", "use --ranks N"),
    ],
)
def test_options_of_other_programs_are_answered_with_those_of_this_one(command: str, option: str, use: str) -> None:
    with pytest.raises(click.NoSuchOption) as raised:
        cli.main([command, "resnet50", option, "4"], standalone_mode=False)
    said = ending_of(raised.value)
    assert said.code == 2
    assert f"No such option {option!r}: {use}" in said.line


@pytest.mark.parametrize("preset", ["gpu", "gpu-compiled", "phase1", "phase2"])
def test_a_preset_for_gpus_is_refused_on_a_machine_without_one(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(workload="bert", preset=preset, scaling="strong")
    with pytest.raises(UserError) as raised:
        expand_request(request)
    assert str(raised.value) == (
        f"bert: preset {preset} is made for GPUs, and this machine has none: did you mean --preset ci? "
        "--set meant_for=any runs it anyway"
    )
    anyway = {"meant_for": "any", "train.precision": "fp32"}
    assert expand_request(Request(workload="bert", preset=preset, overrides=anyway))
    monkeypatch.setattr(local, "has_gpu", lambda: True)
    monkeypatch.setattr(local, "lacking_arithmetic", lambda _: "")
    assert expand_request(request)


def with_memory(tmp_path: Path, size: str) -> Path:
    """Returns a system with GPUs of that memory."""
    system = tmp_path / "gpus.yaml"
    text = find("systems", "example-gpu").read_text()
    system.write_text(f"{text}device: {{memory_bytes: {size}, source: the site}}\n")
    return system


LARGE_BERT = {"workload": "bert", "preset": "175b"}
STATE_BYTES = 16 * 174_663_874_364  # Parameters, gradients, and two values of the optimizer, all fp32.


@pytest.mark.parametrize(
    ("settings", "ranks", "share"),
    [
        ({"engine.name": "ddp"}, 8, 1.0),
        ({"engine.name": "ddp", "engine.ddp.shard_optimizer": True}, 8, 0.5 + 0.5 / 8),
        ({"engine.name": "fsdp"}, 64, 1 / 64),
        ({"engine.name": "fsdp", "engine.fsdp.shard_ranks": "node"}, 64, 1 / 4),
        ({"engine.name": "fsdp", "engine.fsdp.tensor_ranks": 4, "train.precision": "bf16"}, 4, 1 / 4),
        ({"engine.name": "ddp", "train.optimizer_state": "host"}, 8, 1 / 4),
    ],
)
def test_a_share_of_the_state_beyond_the_memory_of_a_device_is_refused_with_both(
    tmp_path: Path, settings: dict[str, Any], ranks: int, share: float
) -> None:
    asked: dict[str, Any] = {**LARGE_BERT, "points": (ranks,), "overrides": settings}
    with pytest.raises(UserError) as raised:
        expand_request(Request(**asked, system=str(with_memory(tmp_path, "16GiB"))))
    said = str(raised.value)
    assert f"{format_bytes(share * STATE_BYTES)} for " in said
    assert "optimizer state of 174.7 billion parameters" in said
    assert "it has 16 GiB (device.memory_bytes of example-gpu)" in said
    assert ("a rank's share of parameters" in said) == (share < 1)
    assert expand_request(Request(**asked, system=str(with_memory(tmp_path, "3TiB"))))
    assert expand_request(Request(**asked, system="example-gpu"))  # Its memory is not known.


def test_activations_count_as_long_as_no_setting_lets_them_leave(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"workload": "bert", "preset": "gpu", "points": (4,)}
    system = str(with_memory(tmp_path, "15GiB"))
    with pytest.raises(UserError, match=r"12\.06 GiB for activations of 56 samples; it has 15 GiB"):
        expand_request(Request(**asked, system=system))
    for settings in ({"train.recompute": "blocks"}, {"train.batch_per_rank": 40}, {"train.gradient_accumulation": 2}):
        assert expand_request(Request(**asked, system=system, overrides=settings))


@pytest.mark.parametrize("words", ["run --ranks 2", "run --ranks 2 --dry-run", "submit --nodes 1 --dry-run"])
def test_every_command_that_trains_refuses_what_its_memory_cannot_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setattr(local, "total_bytes", lambda: 2**35)
    name, *options = words.split()
    system = "local" if name == "run" else str(with_memory(tmp_path, "16GiB"))
    done = CliRunner().invoke(cli, [name, "bert", "--preset", "175b", "--system", system, *options])
    said = str(done.exception)
    assert isinstance(done.exception, UserError)
    assert "2.542 TiB for parameters, gradients and optimizer state" in said
    assert "it has 16 GiB" in said


def test_planning_warns_of_jobs_that_ask_for_no_gpu_of_nodes_that_have_some(capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = {"workload": "resnet50", "system": "box", "points": (1, 2), "points_are": "nodes"}
    gpus = {"system.node.gpus": 4}
    warning = "warning: system box has GPUs (node.gpus 4), but its jobs request none: ranks may see none and train on "
    expand_request(Request(**asked, overrides=gpus))
    assert capsys.readouterr().err.count(warning) == 1
    for enough in ({"system.slurm.gpu_request": "gres"}, {"system.slurm.extra": "--tres-per-node=gres/gpu:4"}):
        expand_request(Request(**asked, overrides={**gpus, **enough}))
        assert "warning: " not in capsys.readouterr().err


def test_planning_tells_of_a_cluster_without_gpus_and_of_a_batch_beyond_the_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    expand_request(Request(workload="resnet50", preset="gpu", system="box", points_are="nodes"))
    assert "system box has none (node.gpus) and requests none (slurm.gpu_request)" in capsys.readouterr().err
    expand_request(Request(workload="resnet50", preset="gpu", system="example-gpu", points=(16,), points_are="nodes"))
    said = capsys.readouterr().err
    assert said.startswith("note: a global batch of 16,384 is beyond the last row of train.optimizer.learning_rate_tab")
    assert len(said.splitlines()) == 1
    expand_request(Request(workload="resnet50", preset="gpu", system="example-gpu", points=(4,), points_are="nodes"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_precision_that_is_not_here_is_refused_unless_emulation_is_asked_for(precision: str) -> None:
    def asked(**more: Any) -> Request:
        settings = {"train.precision": precision, **more.pop("overrides", {})}
        return Request(workload="cosmoflow", preset="ci", overrides=settings, **more)

    with pytest.raises(EnvironmentLacksError) as raised:
        expand_request(asked())
    assert str(raised.value).startswith(f"train.precision {precision}: no {precision} arithmetic; use fp32, or ")
    assert expand_request(asked(overrides={"train.allow_emulation": True}))
    assert expand_request(asked(system="box", points_are="nodes"))  # the nodes are other machines


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"train.precision": "fp8"}, "fp8 is not supported: .*; bf16 is the narrowest"),
        ({"train.cudnn_benchmark": "on"}, "has no effect in any run of this request: the network has no convolutions"),
        ({"model.attention": "unpadded"}, "has no effect in any run of this request: synthetic text has no padding"),
        ({"model.attention": "unpadded", "train.compile": "default"}, "attention unpadded and train.compile default"),
        (
            {"train.optimizer.implementation": "fused", "train.optimizer_state": "host"},
            "implementation fused and optimizer_state host exclude each other for lamb",
        ),
    ],
)
def test_what_the_plan_shows_cannot_act_is_refused(settings: dict[str, Any], refusal: str) -> None:
    with pytest.raises(UserError, match=refusal):
        expand_request(Request(workload="bert", preset="ci", overrides=settings))


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
        monkeypatch.setattr(probes, name, partial(getattr(probes, name), root=root))

    def refused(**launch: str) -> object:
        overrides = {
            "system.python": str(python),
            **{f"system.launch.environment.{key}": launch[key] for key in launch},
        }
        asked = Request(workload="resnet50", preset="ci", engine="single", points=(1,), overrides=overrides)
        return probes.refusal(expand(asked, machine_cores=2)[0])

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

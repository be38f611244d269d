"""Refused before a series starts on this machine: a preset that nobody chose, and arithmetic that is not here."""

from __future__ import annotations

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
from dlbench.specs.files import find
from dlbench.specs.requests import Request
from dlbench.units import format_bytes
from tests.specs.test_keys import SHORT


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

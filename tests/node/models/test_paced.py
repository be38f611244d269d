"""The paced network: pauses by a clock of the test's own, gradients by autograd; and its layers from a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from dlbench.cli import cli
from dlbench.node.models import paced
from dlbench.node.models.build import build_model, forward_macs, loss_for
from dlbench.node.training.loop import _step_seed
from dlbench.records.layer_profile import with_layers
from dlbench.records.scan import read_run
from dlbench.specs.workload import NoData, PacedLayer, PacedModel
from dlbench.views.doubts import run_doubts
from tests.support.run_factory import Story, constant, exchange_result, plans, write_run

LAYERS = tuple(
    PacedLayer(bytes=4 * size, forward_s=forward, backward_s=backward)
    for size, forward, backward in ((10, 0.25, 0.5), (1000, 0.125, 1.0), (7, 0.0, 0.0625))
)
NONE = NoData(format="none")


class Clock:
    """Seconds pass by sleeping alone, and each sleep ends `late_s` late."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now, self.late_s = 0.0, late_s

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + self.late_s


def spec(**more: Any) -> PacedModel:
    return PacedModel.model_validate({"family": "paced", "layers": LAYERS, **more})


def step(model: PacedModel, clock: Clock, monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> list[tuple[str, float]]:
    """When the forward pass ended, and when each gradient was there."""
    monkeypatch.setattr(paced, "time", clock)
    network, seen = build_model(model), []
    batch = paced.NETWORK.synthetic(model, NONE, 2, torch.Generator().manual_seed(1_000_003 + rank), counts=False)
    for name, parameter in network.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda one, name=name: seen.append((name, clock.now)))
    loss = loss_for(model)(network, batch)
    seen.append(("forward", clock.now))
    loss.backward()
    for parameter in network.parameters():
        assert parameter.grad is not None
        # Of (mean - target)^2 by each layer's share in the mean, in all of its entries.
        assert torch.allclose(parameter.grad, torch.full_like(parameter, -2 / 3 * float(batch["target"].mean())))
    return seen


def test_gradients_become_ready_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = step(spec(), Clock(), monkeypatch)
    names = [f"layers.{number}.weight" for number in (2, 1, 0)]
    # A batch of two.
    assert seen == [("forward", 0.75), *zip(names, (0.875, 2.875, 3.875), strict=True)]
    assert step(spec(speed=2.0), Clock(), monkeypatch)[-1] == (names[-1], 3.875 / 2)


def test_jitter_is_of_a_rank_and_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def took(rank: int, number: int, **jitter: float) -> float:
        torch.manual_seed(_step_seed(0, rank, number))
        return math.log(step(spec(**jitter), Clock(), monkeypatch, rank)[-1][1] / 3.875)

    by_rank = [[took(rank, number, rank_jitter=0.1) for number in range(2)] for rank in range(40)]
    assert all(one == two for one, two in by_rank)
    assert torch.tensor(by_rank)[:, 0].std().item() == pytest.approx(0.1, rel=0.3)
    by_step = [took(0, number, step_jitter=0.2) for number in range(40)]
    assert torch.tensor(by_step).std().item() == pytest.approx(0.2, rel=0.3)
    assert took(3, 5, rank_jitter=0.1, step_jitter=0.2) == took(3, 5, rank_jitter=0.1, step_jitter=0.2)


def test_both_halves_count_no_work() -> None:
    assert forward_macs(spec(), NONE) == []
    assert spec().training_flops(NONE) == 0


def run_cli(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, list(arguments))
    return result.exit_code, str(result.exception) if result.exit_code else result.stderr


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("train.precision=bf16", "train.precision bf16: has no effect on a paced network"),
        ("train.compile=default", "train.compile default"),
        ("train.recompute=blocks", "train.recompute blocks"),
        ("train.optimizer_state=host", "set it to device"),
        ("data.source=/tmp", "reads no data"),
        ("train.label_smoothing=0.1", "no effect on model.family 'paced'"),
        ("measure.until=quality", "no `quality` section"),
        ("measure.noise_scale=true", "have no noise"),
        ("model.layers=[]", "model.layers: is empty"),
        ("model.speed=0", "model.speed"),
        ("model.layers_from=/nowhere", "/nowhere: no plan.json"),
    ],
)
def test_what_a_paced_network_cannot_do_is_refused(setting: str, said: str) -> None:
    code, error = run_cli("run", "paced", "--preset", "ci", "--ranks", "2", "--dry-run", "--set", setting)
    assert code
    assert said in error


def recorded(folder: Path, **exchange: Any) -> str:
    """The folder of a run of cosmoflow at 2 ranks, batch 4, 200 ms of forward pass, with three gradients."""
    ready = [{"name": name, "num_bytes": size, "ready_s": at} for name, size, at in GRADIENTS]
    (plan,) = plans(workload="cosmoflow", preset="ci", points=(2,), repeats=1, engine="ddp")
    result = exchange_result(plan, gradients=[one[1:] for one in GRADIENTS], alpha_s=0.0, beta_s_per_byte=0.0)
    result |= {"gradients": ready, "backward_s": 0.5, **exchange}
    write_run(folder, plan, constant((1, 0, 200, 500, 50, 3)), Story(exchange=result))
    return str(folder / plan.run_id)


GRADIENTS = [("dense.weight", 4000, 0.1), ("dense.bias", 40, 0.1), ("conv.weight", 800, 0.4)]


def test_layers_are_those_of_a_run(tmp_path: Path) -> None:
    where = recorded(tmp_path)
    for path in (where, f"{where}/record.json"):
        (asked,) = plans(workload="paced", preset="ci", points=(2,), repeats=1, overrides={"model.layers_from": path})
        plan, note = with_layers(asked)
        model = plan.workload.model
        assert isinstance(model, PacedModel)
        assert [layer.bytes for layer in model.layers] == [800, 40, 4000]
        # The rest of the backward pass is the last gradient's; the forward pass is shared out as the backward pass.
        assert [4 * layer.backward_s for layer in model.layers] == pytest.approx([0.4, 0.0, 0.1])
        assert [4 * layer.forward_s for layer in model.layers] == pytest.approx([0.16, 0.0, 0.04])
        assert model.layers_from == Path(where).name
        assert note is not None
        assert "train.batch_per_rank=4 repeats it" in note


def test_every_run_says_that_its_computing_is_a_pause(tmp_path: Path) -> None:
    (plan,) = plans(workload="paced", preset="ci", points=(2,), repeats=1, engine="ddp")
    write_run(tmp_path, plan, constant((1, 0, 5, 10, 5, 1)))
    found = {doubt.code: doubt for doubt in run_doubts(read_run(tmp_path / plan.run_id))}
    assert found["paced"].severity == "serious"
    assert "computing is a pause" in found["paced"].text
    assert "synthetic-data" not in found

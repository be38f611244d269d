"""Ranks that share each layer's work: what is refused, dropout of heads, and two dimensions by four ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dlbench.errors import UserError
from dlbench.node.sync.fsdp.tensor import SharedLayers
from dlbench.records.rows.steps import read_steps
from dlbench.specs.plan import RunPlan
from tests.support.forked_runs import planned, run_forked

SHARED = ("--engine", "fsdp", "--set", "engine.fsdp.tensor_ranks=2")


@pytest.mark.parametrize(
    ("workload", "words", "why"),
    [
        ("resnet50", (), "resnet50 has no layers that tensor parallelism divides; .* filter, channel or spatial"),
        ("cosmoflow", (), "cosmoflow has no layers that tensor parallelism divides; .* filter, channel or spatial"),
        ("bert", ("--ranks", "3"), "a node has 3; set it to a divisor"),
        ("bert", ("--ranks", "1"), "a node has 1; set it to a divisor"),
        ("bert", ("--set", "model.num_heads=1"), "layers.0.attention.scores has 1 heads, which 2 ranks cannot share"),
        ("bert", ("--set", "model.intermediate_size=511"), "layers.0.expand has 511 outputs"),
        ("bert", ("--set", "train.precision=fp16"), "train.precision fp16 does not go with it"),
        ("bert", ("--set", "sync.wire=bf16"), "sync.wire bf16 does not go with it: all ranks are one replica"),
        ("bert", ("--set", "engine.fsdp.wrap=network"), "engine.fsdp.wrap does not go with it"),
    ],
)
def test_what_cannot_share_layers_is_refused_by_name(workload: str, words: tuple[str, ...], why: str) -> None:
    with pytest.raises(UserError, match=f"engine.fsdp.tensor_ranks 2: .*{why}"):
        planned(workload, "--preset", "ci", "--ranks", "2", *SHARED, *words)


def test_heads_draw_dropout_of_their_own_and_whole_tensors_the_same() -> None:
    plan: RunPlan = planned("bert", "--preset", "ci", "--ranks", "2", *SHARED)[0][0]
    attention, drawn = nn.Dropout(0.5), []
    for rank in (0, 1, 1):
        mesh = SimpleNamespace(size=lambda: 2, get_local_rank=lambda rank=rank: rank)
        layers = SharedLayers(cast(Any, mesh), torch.device("cpu"), cast(Any, None), plan)
        torch.manual_seed(7)
        of_rank = [torch.rand(4)]
        for _ in range(2):
            layers._enter_heads(attention, ())
            of_rank.append(torch.rand(4))
            layers._leave_heads(attention, (), None)
            of_rank.append(torch.rand(4))
        drawn.append(of_rank)
    first, second, again = (torch.stack(each) for each in drawn)
    assert torch.equal(second, again)
    assert torch.equal(first[::2], second[::2])
    assert len(torch.cat((first, second[1::2])).unique(dim=0)) == 7


@pytest.mark.nightly
@pytest.mark.slow
def test_four_ranks_shard_what_pairs_of_them_share(tmp_path: Path) -> None:
    alike = ("bert", "--preset", "ci", "--ranks", "4", "--repeats", "1", "--set", "measure.measured_steps=3")
    alike = (*alike, "--set", "measure.warmup_steps=2", "--set", "checkpoint.every_steps=5")
    ways = {"ddp": ("--engine", "ddp"), "fsdp+tensor": SHARED, "fsdp": ("--engine", "fsdp")}
    runs = {name: run_forked(*alike, *words, "--out", tmp_path / name)[0] for name, words in ways.items()}
    records = {name: run.record for name, run in runs.items()}
    assert {name: run.plan.strategy for name, run in runs.items()} == {
        name: {"ddp": "data"}.get(name, name) for name in ways
    }
    assert {name: found and found.state for name, found in records.items()} == dict.fromkeys(ways, "valid")
    losses = {
        name: torch.tensor([read_steps(run.folder.steps(rank)).steps["loss"].tolist() for rank in range(4)])
        for name, run in runs.items()
    }
    assert torch.equal(losses["fsdp+tensor"][::2], losses["fsdp+tensor"][1::2])
    tensors = {name: load_file(run.folder.checkpoint(5)) for name, run in runs.items()}
    for name in ("fsdp", "fsdp+tensor"):
        assert losses[name].mean(0).tolist() == pytest.approx(losses["ddp"].mean(0).tolist(), rel=1e-5)
        for key, tensor in tensors["ddp"].items():
            assert torch.allclose(tensors[name][key], tensor, rtol=1e-5, atol=1e-5), (name, key)
    found = records["fsdp+tensor"]
    assert found is not None
    assert found.inert == ()
    keys = {one.key: (one.effective, one.evidence) for one in found.settings}
    assert keys["engine.fsdp.tensor_ranks"][0] == 2
    assert keys["engine.fsdp.shard"][0] == "parameters"

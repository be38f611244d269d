"""Ranks that share each layer's work: what is refused, dropout of heads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from dlbench.errors import UserError
from dlbench.node.sync.fsdp.tensor import SharedLayers
from dlbench.specs.plan import RunPlan
from dlbench.specs.strategies import strategy_problem
from tests.support.forked_runs import planned

SHARED = ("--engine", "fsdp", "--set", "engine.fsdp.tensor_ranks=2")


@pytest.mark.parametrize(
    ("workload", "words", "why"),
    [
        ("resnet50", (), "resnet50 has no layers that tensor parallelism divides; .* filter, channel or spatial"),
        ("cosmoflow", (), "cosmoflow has no layers that tensor parallelism divides; .* filter, channel or spatial"),
        ("bert", ("--ranks", "3"), "a node has 3; set it to a divisor"),
        ("bert", ("--ranks", "1"), "a node has 1; set it to a divisor"),
        ("bert", ("--set", "model.num_heads=1"), "layers.0.attention.scores has 1 heads, which 2 ranks cannot divide"),
        ("bert", ("--set", "model.intermediate_size=511"), "layers.0.expand has 511 outputs"),
        (
            "bert",
            ("--set", "train.precision=fp16"),
            "cannot be combined with train.precision fp16.*; leave one of them out",
        ),
        ("bert", ("--set", "sync.wire=bf16"), "cannot be combined with sync.wire bf16: all ranks are one replica"),
        ("bert", ("--set", "engine.fsdp.wrap=network"), "cannot be combined with engine.fsdp.wrap"),
    ],
)
def test_what_cannot_share_layers_is_refused_by_name(workload: str, words: tuple[str, ...], why: str) -> None:
    with pytest.raises(UserError, match=f"engine.fsdp.tensor_ranks 2: .*{why}"):
        planned(workload, "--preset", "ci", "--ranks", "2", *SHARED, *words)


@pytest.mark.parametrize(("per_node", "is_refused"), [(2, True), (4, False)])
def test_shards_within_nodes_need_two_replicas_a_node(per_node: int, is_refused: bool) -> None:
    plan: RunPlan = planned("bert", "--preset", "ci", "--ranks", "2", *SHARED)[0][0]
    engine = plan.engine.model_copy(update={"fsdp": plan.engine.fsdp.model_copy(update={"shard_ranks": "node"})})
    parts = (plan.workload, engine, plan.sync, plan.measure)
    problem = strategy_problem(*parts, ranks=2 * per_node, ranks_per_node=per_node)
    assert ("cannot be combined with engine.fsdp.shard_ranks node" in (problem or "")) == is_refused


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

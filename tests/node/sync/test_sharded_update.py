"""ZeRO-1 where no training is needed: bytes of its broadcasts, where weights lie, and what it does not go with."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dlbench.errors import UserError
from dlbench.node.models.optimizers import build_optimizer
from dlbench.node.sync.sharded_update import ShardedUpdate, sharding_setting
from dlbench.node.sync.timing import Clock, tree_bytes
from dlbench.specs.training import OptimizerSpec
from tests.support.run_factory import plans

SHARDED = {"engine.ddp.shard_optimizer": True}


@given(groups=st.integers(1, 4), size=st.integers(1, 4), unit=st.integers(0, 9))
def test_tree_bytes_by_walking_each_tree(groups: int, size: int, unit: int) -> None:
    """In round i the ranks that have it, counted from the root below 2^i, send to those 2^i further on."""
    ranks = groups * size
    shares = [unit * (rank + 1) for rank in range(ranks)]
    sent = {True: 0, False: 0}
    for root, share in enumerate(shares):
        has = [root]
        while len(has) < ranks:
            given_to = [(root + place + len(has)) % ranks for place in range(min(len(has), ranks - len(has)))]
            for sender, receiver in zip(has, given_to, strict=False):
                sent[sender // size == receiver // size] += share
            has += given_to
    inside, across = tree_bytes(shares, groups=groups)
    assert (inside * ranks, across * ranks) == (pytest.approx(sent[True]), pytest.approx(sent[False]))
    assert inside + across == pytest.approx((ranks - 1) / ranks * sum(shares))


def test_channels_last_weights_stay_so_in_the_buckets_of_zero() -> None:
    torch.manual_seed(1)
    spec = OptimizerSpec(name="sgd", learning_rate=0.1, momentum=0.9)
    plain, shared = (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)) for _ in range(2))
    shared.load_state_dict(plain.state_dict())
    for model in (plain, shared):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        optimizers = build_optimizer(plain, spec), ShardedUpdate(build_optimizer(shared, spec), Clock())
        for model, optimizer in zip((plain, shared), optimizers, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = 0.5
            model(torch.arange(300.0).view(1, 3, 10, 10)).square().sum().backward()
            optimizer.step()
    finally:
        dist.destroy_process_group()
    for mine, other in zip(shared.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other)
        assert mine.stride() == other.stride()
    assert shared[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert optimizers[1].share()[2] == sum(p.nbytes for p in shared.parameters())


@pytest.mark.parametrize(
    ("kept", "is_partial", "words"),
    [
        ([], False, "one rank keeps all"),
        ([0, 0], False, "keeps no state"),
        ([8, 0], False, "largest over mean 2.000"),
        ([6, 2], True, "6 + 2 = 8 (8 B); largest over mean 1.500"),
        ([2] * 9, True, "at most 2, in all = 18"),
    ],
)
def test_sharding_is_in_force_where_no_rank_keeps_all(kept: list[int], is_partial: bool, words: str) -> None:
    setting = sharding_setting(kept)
    assert setting.effective is is_partial
    assert words in setting.evidence


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ({"sync.fusion": "own:4MiB"}, "own exchange"),
        ({"sync.exchange": "none"}, "sync.exchange none"),
        ({"train.optimizer_state": "host"}, "train.optimizer_state host"),
        ({"train.recompute": "planned", "train.memory.capacity": "8GiB"}, "train.recompute"),
    ],
)
def test_what_does_not_go_with_a_sharded_update_is_refused_by_name(others: dict[str, str], named: str) -> None:
    with pytest.raises(UserError, match=rf"engine\.ddp\.shard_optimizer: .*{named}.* leave one of them out"):
        plans(workload="bert", preset="ci", engine="ddp", points=(2,), overrides=SHARDED | others)


@pytest.mark.parametrize(("engine", "ranks"), [("ddp", 1), ("horovod", 2), ("fsdp", 2)])
def test_without_others_to_share_with_the_setting_has_no_effect(engine: str, ranks: int) -> None:
    with pytest.raises(UserError, match=r"engine\.ddp\.shard_optimizer: has no effect"):
        plans(workload="bert", preset="ci", engine=engine, points=(ranks,), overrides=SHARDED)

"""Checkpoints under local and partial shuffling, and what the record says of how samples were shuffled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dlbench.errors import UserError
from dlbench.node.data.read_audit import ReadAudit
from dlbench.node.data.sharding import HeldOrder, Position
from dlbench.node.training.checkpoint import (
    SHARED_BY,
    Checkpoint,
    require_same_holders,
    trained_identity,
)
from dlbench.node.training.run_record import sample_summary, shuffled
from dlbench.specs.plan import RunPlan
from tests.node.data.test_read_audit import Changed, order_of
from tests.support.one_rank import progress_at, write_checkpoint
from tests.support.run_factory import plans
from tests.support.training_data import NumberReader


def plan_of(ranks: int = 2, shuffle: str = "local", **data: Any) -> RunPlan:
    overrides = {"data.shuffle": shuffle, **{f"data.{key}": value for key, value in data.items()}}
    if shuffle.startswith("partial"):
        overrides["data.staging"] = "shard"
    (plan,) = plans(points=(ranks,), repeats=1, data="/data/pictures", overrides=overrides)
    return plan


def checkpoint_of(path: Path, plan: RunPlan, place: int) -> Checkpoint:
    model = nn.Linear(1, 1)
    progress = progress_at(4, epoch=1.0, position=Position(epoch=1, place=place))
    optimizer = torch.optim.SGD(model.parameters())
    write_checkpoint(path, model, optimizer, progress, {**trained_identity(plan), SHARED_BY: plan.layout.ranks})
    return Checkpoint(path)


@pytest.mark.parametrize("shuffle", ["local", "partial:0.3"])
def test_other_ranks_go_on_at_the_end_of_an_epoch_only(tmp_path: Path, shuffle: str) -> None:
    middle = checkpoint_of(tmp_path / "middle", plan_of(2, shuffle), place=8)
    end = checkpoint_of(tmp_path / "end", plan_of(2, shuffle), place=0)
    require_same_holders(plan_of(2, shuffle), middle)
    require_same_holders(plan_of(4, shuffle), end)
    with pytest.raises(UserError, match="written within epoch 1 by 2 ranks, each of which has read a part"):
        require_same_holders(plan_of(4, shuffle), middle)
    # Under global shuffling a place means the same for any number of ranks.
    require_same_holders(plan_of(4, "global"), checkpoint_of(tmp_path / "global", plan_of(2, "global"), place=8))


@pytest.mark.parametrize(
    ("before", "after", "key"),
    [
        ({"shuffle": "local"}, {"shuffle": "global"}, "data.shuffle 'local', the plan has 'global'"),
        ({"shuffle": "global"}, {"shuffle": "partial:0.1"}, "data.shuffle 'global', the plan has 'partial:0.1'"),
        ({"shuffle": "partial:0.1"}, {"shuffle": "partial:0.2"}, "data.shuffle 'partial:0.1', the plan has"),
        ({"partition": "contiguous"}, {"partition": "shuffled"}, "data.partition 'contiguous', the plan has"),
    ],
)
def test_another_shuffle_share_or_partition_is_refused(
    tmp_path: Path, before: dict[str, str], after: dict[str, str], key: str
) -> None:
    kept = checkpoint_of(tmp_path / "kept", plan_of(**before), place=0)
    kept.require(trained_identity(plan_of(**before)))
    with pytest.raises(UserError, match=key):
        kept.require(trained_identity(plan_of(**after)))


class Read:
    """What the record asks of a source."""

    exchange = None
    num_samples = 48

    def __init__(self, order: HeldOrder | Changed, batches: int) -> None:
        from dlbench.node.data.loader import LoadedSource

        reader = NumberReader(self.num_samples)
        self.audit = ReadAudit(order, num_samples=self.num_samples, ranks=3, labels=reader.labels())
        source = LoadedSource(reader, order, loader_workers=0, on_bad_sample="stop", audit=self.audit)
        for _ in range(batches):
            next(source)

    def sample_name(self, index: int) -> str:
        return f"number {index}"


def test_the_record_says_how_samples_were_shuffled_and_the_check_fails_with_names() -> None:
    good = [Read(order_of(rank, 48, share=0.0), 8) for rank in range(3)]  # type: ignore[arg-type]
    told = [sample_summary(each) for each in good]  # type: ignore[arg-type]
    plan = plan_of(3, "local", partition="contiguous")
    found = shuffled(plan, good[0], told, lambda value: [value])  # type: ignore[arg-type]
    assert (found.result.shuffle, found.result.partition, found.result.exchanged_share) == ("local", "contiguous", 0)
    assert found.result.audit_s > 0
    (check,) = found.checks
    assert (check.passed, check.detail) == (True, "2 complete epochs, in each 48 samples read and 0 left out")
    assert [(s.requested, s.effective) for s in found.settings] == [("local", "local")]

    wrong = Changed(48, batch_size=4, rank=0, world_size=3, seed=5)
    others = [order_of(rank, 48, share=None) for rank in (1, 2)]
    wrong.instead = (0, 0, int(others[0].epoch(0)[0]))
    bad = [Read(order, 4) for order in (wrong, *others)]  # type: ignore[arg-type]
    told = [sample_summary(each) for each in bad]  # type: ignore[arg-type]
    lists: list[Any] = [each.audit.lists([0]) for each in bad]
    failed = shuffled(plan_of(3, "global"), bad[0], told, lambda value: lists)  # type: ignore[arg-type]
    (check,) = failed.checks
    assert not check.passed
    assert f"epoch 0: number {wrong.instead[2]} was read twice (ranks 0, 1)" in check.detail
    assert f"number {wrong.epoch(0)[0]} was read never" in check.detail

"""Sharded, tensor-parallel and local training, by two ranks that are started once and train every strategy in turn."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import pytest
from safetensors import safe_open

from dlbench.jobs.scripts.launch import local_environments, resolve
from dlbench.node import __main__ as node
from dlbench.records.folder import create, prepare_output
from dlbench.records.record import Record
from dlbench.records.scan import Run, scan
from tests.support.forked_runs import planned
from tests.support.forks import run_ranks

ALIKE = ("--ranks", "2", "--repeats", "1", "--preset", "ci", "--set", "measure.warmup_steps=3")
TRAINED = {"measure.measured_steps": 2, "train.gradient_accumulation": 2, "checkpoint.every_steps": 5}
STRATEGIES: dict[str, tuple[str, ...]] = {
    "ddp": ("--engine", "ddp"),
    # --- FSDP
    # --- ZeRO-1
    "zero-1": ("--engine", "ddp", "--set", "engine.ddp.shard_optimizer=true"),
    # --- local SGD
    # --- tensor parallel
}
"""What `dlbench run bert` is asked for, besides what all are; BERT has LAMB and clips."""


def every_plan(arguments: list[str]) -> int:
    """One rank: trains plan after plan in this process."""
    return max(node.main([path]) for path in arguments)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Run]:
    """A valid run of every strategy."""
    root = prepare_output(tmp_path_factory.mktemp("strategies") / "runs")
    shared = [word for key, value in TRAINED.items() for word in ("--set", f"{key}={value}")]
    plans = {name: planned("bert", *ALIKE, *shared, *words, "--out", root)[0][0] for name, words in STRATEGIES.items()}
    folders = [create(root, plan) for plan in plans.values()]
    environments = [resolve(one) for one in local_environments(plans["ddp"], secrets.token_hex(8))]
    codes, said = run_ranks(every_plan, [str(folder.plan) for folder in folders], environments, root.parent)
    assert codes == [0, 0], "\n".join(text[-4000:] for text in said)
    found = {run.plan.run_id: run for run in scan(root).runs}
    return {name: found[plan.run_id] for name, plan in plans.items()}


def record(run: Run) -> Record:
    assert run.record is not None
    return run.record


def test_every_strategy_ends_with_a_valid_record(trained: Mapping[str, Run]) -> None:
    assert {name: record(run).state for name, run in trained.items()} == dict.fromkeys(STRATEGIES, "valid")


def test_a_sharded_update_is_bit_for_bit_that_of_every_rank(trained: Mapping[str, Run]) -> None:
    ddp, zero = record(trained["ddp"]), record(trained["zero-1"])
    found, expected = ({rank.final_parameters_sha256 for rank in one.ranks} for one in (zero, ddp))
    assert len(found) == 1
    assert found == expected
    assert [rank.last_loss for rank in zero.ranks] == [rank.last_loss for rank in ddp.ranks]


def test_each_rank_keeps_a_part_of_the_optimizers_state_and_tells_how_much(trained: Mapping[str, Run]) -> None:
    run = trained["zero-1"]
    (setting,) = [one for one in record(run).settings if one.key == "engine.ddp.shard_optimizer"]
    told, _, rest = setting.evidence.removeprefix("bytes of state by rank: ").partition(" = ")
    by_rank = [int(size) for size in told.split(" + ")]
    (path,) = run.folder.checkpoints.glob("*.safetensors")
    with safe_open(path, "pt") as file:
        moments = [name for name in file.keys() if name.startswith("optimizer/")]  # noqa: SIM118
        whole = sum(file.get_tensor(name).nbytes for name in moments)
    assert len(by_rank) == 2
    assert all(0 < size < whole for size in by_rank)
    assert sum(by_rank) == whole
    assert f"largest over mean {max(by_rank) / (whole / 2):.3f}" in rest
    assert setting.effective is True


def test_updated_parameters_are_broadcast_within_the_update(trained: Mapping[str, Run]) -> None:
    ddp, zero = record(trained["ddp"]), record(trained["zero-1"])
    assert ddp.exchange is not None
    assert zero.exchange is not None
    assert zero.exchange.of_gradients == zero.exchange.messages[: len(zero.exchange.of_gradients)]
    sent = zero.exchange.messages[len(zero.exchange.of_gradients) :]
    # All parameters of BERT are trained, so that they are as long as their gradients.
    assert sum(message.num_bytes for message in sent) == zero.gradient_bytes
    assert {message.method for message in sent} == {"gloo broadcast"}
    # The mean of two ranks, of which each sends its share to the other one.
    assert ddp.exchange.bytes_inside is not None
    assert zero.exchange.bytes_inside == ddp.exchange.bytes_inside + zero.gradient_bytes / 2
    for rank in zero.ranks:
        assert rank.waits is not None
        assert 0 < rank.waits.exchange_s["optimizer"] < rank.measured_s
        assert not rank.waits.gather_s
    assert all(rank.waits is None for rank in ddp.ranks)

"""Sharded, tensor-parallel and local training, by two ranks that are started once and train every strategy in turn."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import pytest

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

"""Sharded, tensor-parallel and pipelined training over four ranks that take this machine for two nodes."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dlbench.jobs.scripts.launch import local_environments, resolve
from dlbench.records.folder import create, prepare_output
from dlbench.records.scan import Run, scan
from dlbench.specs.plan import RunPlan
from tests.node.sync.test_strategies import every_plan
from tests.support.forked_runs import mean_losses, planned
from tests.support.forks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

STEPS = 4
SHORT = (
    *("--preset", "ci", "--repeats", "1", "--set", "watch.sampler=false", "--set", "measure.warmup_steps=2"),
    *("--set", f"measure.measured_steps={STEPS - 2}", "--set", f"checkpoint.every_steps={STEPS}"),
    *("--set", "train.optimizer.learning_rate=0.001", "--set", "train.optimizer.learning_rate_scaling=none"),
)
FSDP = ("--engine", "fsdp")
ZERO = ("--engine", "ddp", "--set", "engine.ddp.shard_optimizer=true")
TENSOR = (*FSDP, "--set", "engine.fsdp.tensor_ranks=2")
FOUR = {
    "ddp": ("--engine", "ddp"),
    "shares by node": FSDP,
    "shares by node, gradients": (*FSDP, "--set", "engine.fsdp.shard=gradients"),
    "two dimensions": TENSOR,
    "zero-1": ZERO,
}


def trained(folder: Path, plans: Mapping[str, RunPlan], *, reads: bool = False) -> tuple[dict[str, Run], list[Path]]:
    """Valid runs of plans of equally many ranks; where asked for, each then reads the checkpoint of each, and the
    files that say what differs.
    """
    root, again = prepare_output(folder / "runs"), prepare_output(folder / "again")
    folders = [create(root, plan) for plan in plans.values()]
    lines = [f"TRAIN {one.plan}" for one in folders]
    reading = [create(again, plan).plan for plan in plans.values()] if reads else []
    lines += [f"READ {path} {' '.join(str(one.checkpoint(STEPS)) for one in folders)}" for path in reading]
    codes, said = run_ranks(every_plan, lines, environments(next(iter(plans.values()))), folder)
    assert set(codes) == {0}, "\n".join(text[-4000:] for text in said)
    found = {run.plan.run_id: run for run in scan(root).runs}
    return {name: found[plan.run_id] for name, plan in plans.items()}, [
        path.with_name("differing.json") for path in reading
    ]


def environments(plan: RunPlan) -> list[dict[str, str]]:
    """The variables of each rank: those of `dlbench run`, and those of srun for a plan of two nodes."""
    ranks = [resolve(variables) for variables in local_environments(plan, secrets.token_hex(8))]
    for rank, variables in enumerate(ranks):
        local_rank = rank % plan.layout.ranks_per_node
        variables |= {"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(len(ranks)), "SLURM_LOCALID": str(local_rank)}
    return ranks


def require_same(runs: Mapping[str, Run]) -> None:
    """Losses of each step, and what the checkpoint after the last one holds, are those of DDP."""
    expected, held = mean_losses(runs["ddp"]), load_file(runs["ddp"].folder.checkpoint(STEPS))
    assert len(set(expected)) == STEPS
    for name, run in runs.items():
        assert (name, run.state) == (name, "valid")
        assert mean_losses(run) == pytest.approx(expected, rel=1e-5), name
        found = load_file(run.folder.checkpoint(STEPS))
        assert found.keys() == held.keys(), name
        for key, tensor in held.items():
            scale = float(tensor.abs().max()) if tensor.numel() else 0.0
            assert torch.allclose(found[key], tensor, rtol=1e-5, atol=1e-5 * max(scale, 1.0)), (name, key)


def test_four_ranks_are_two_replicas_of_two_stages_or_four_stages(tmp_path: Path) -> None:
    pipeline = ("--engine", "pipeline")
    several = {"ddp": FOUR["ddp"], "replicas": pipeline, "four": (*pipeline, "--set", "engine.pipeline.stages=4")}
    plans = {name: planned("bert", *SHORT, "--ranks", "4", *words)[0][0] for name, words in several.items()}
    runs, differing = trained(tmp_path, plans, reads=True)
    require_same(runs)
    assert [run.plan.strategy for run in runs.values()] == ["data", "data+pipeline", "pipeline"]
    assert [json.loads(path.read_text()) for path in differing] == [[[]] * len(plans)] * len(plans)


def test_ranks_on_two_nodes_share_by_node_and_by_layer(tmp_path: Path) -> None:
    """The mathematics of DDP, and each reads each other's checkpoint bit for bit."""
    plans = {}
    for name, words in FOUR.items():
        plan = planned("bert", *SHORT, "--ranks", "4", *words, "--out", tmp_path)[0][0]
        # Planning for this machine refuses what needs two nodes.
        launch = plan.system.launch.model_copy(update={"launcher": "srun-gloo"})
        changes = {
            "layout": plan.layout.model_copy(update={"nodes": 2}),
            "system": plan.system.model_copy(update={"launch": launch}),
        }
        if "by node" in name:
            fsdp = plan.engine.fsdp.model_copy(update={"shard_ranks": "node"})
            changes["engine"] = plan.engine.model_copy(update={"fsdp": fsdp})
        plans[name] = plan.model_copy(update=changes)
    runs, differing = trained(tmp_path, plans, reads=True)
    require_same(runs)
    assert [json.loads(path.read_text()) for path in differing] == [[[]] * len(plans)] * len(plans)

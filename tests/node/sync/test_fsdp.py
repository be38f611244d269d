"""FSDP, also with ranks that share each layer's work, apart from what tests/node/sync/test_strategies.py trains."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dlbench.errors import UserError
from dlbench.node.models.build import build_model
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.fsdp.engine import FsdpEngine, blocks_of
from dlbench.node.sync.fsdp.shared_layers import SharedLayers
from dlbench.node.sync.fsdp.watched_comm import GATHER, REDUCE, SCATTER, Call, CommWatch, WatchedCalls
from dlbench.node.sync.timing import Clock
from dlbench.records.exchange import carried
from dlbench.records.folder import RunFolder
from dlbench.setup.probes import refusal
from dlbench.specs.plan import RunPlan
from dlbench.specs.strategies import strategy_problem
from tests.support.forked_runs import planned

ALIKE = ("--repeats", "1", "--preset", "ci", "--set", "measure.warmup_steps=2", "--set", "measure.measured_steps=2")


def plan_of(*words: str, out: Path = Path("runs")) -> RunPlan:
    (plan,), _ = planned(*words, *ALIKE, "--out", out)
    return plan


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["train.compile=default"], "cannot be combined with train.compile"),
        (["train.recompute=blocks"], "with train.recompute and train.swap: "),
        (["train.optimizer_state=host"], "try engine.fsdp.offload"),
        (["measure.noise_scale=true"], "measure.noise_scale"),
        (["sync.exchange=hierarchical", "sync.group_size=2"], "sync.exchange hierarchical"),
        (["sync.exchange=none"], "cannot be combined with sync.exchange none: a pass cannot begin without"),
        (["sync.fusion=64MiB"], "sync.fusion 64MiB"),
        (["sync.average_every=2"], "sync.average_every"),
        (["sync.wire=topk"], "sync.wire topk"),
        (["sync.wire=powersgd"], "sync.wire powersgd"),
        (["sync.wire=fp16"], "sums fp32 or bf16"),
        (["sync.wire=bf16", "train.gradient_accumulation=2"], "sums the parts of a batch in bf16"),
        (["train.optimizer.implementation=fused"], "fused of lamb: norms of whole tensors"),
        (["train.precision=fp16", "engine.fsdp.offload=true"], "agree on overflows"),
        (["engine.fsdp.shard_ranks=node"], "engine.fsdp.shard_ranks: has no effect .*: the ranks of one node"),
        (["engine.fsdp.wrap=network", "engine.fsdp.prefetch=2"], "engine.fsdp.prefetch: has no effect"),
        (["engine.ddp.backend=gloo"], "engine.ddp.backend: has no effect"),
        (["sync.group_size=2"], "sync.group_size: has no effect"),
    ],
)
def test_what_does_not_go_with_sharding_is_refused_with_the_reason(settings: list[str], why: str) -> None:
    words = [word for setting in settings for word in ("--set", setting)]
    with pytest.raises(UserError, match=why):
        plan_of("bert", "--engine", "fsdp", "--ranks", "4", *words)


@pytest.mark.parametrize(("optimizer", "fails"), [("sgd", True), ("adamw", False)])
def test_a_fused_update_is_refused_where_torch_has_none_for_shares(optimizer: str, fails: bool) -> None:
    """If torch learns to share out what it cannot, this says so."""
    words = ("--engine", "fsdp", "--ranks", "2", "--set", "train.optimizer.implementation=fused")
    if fails:
        with pytest.raises(UserError, match="fused of sgd: torch supports this kernel"):
            plan_of("cosmoflow", *words)
    else:
        plan_of("cosmoflow", *words, "--set", "train.optimizer.name=adamw")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = fully_shard(nn.Linear(4, 2), mesh=init_device_mesh("cpu", (2,)))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
        step = kind(model.parameters(), lr=0.1, fused=True).step
        if fails:
            with pytest.raises(NotImplementedError, match="_fused_sgd_"):
                step()
        else:
            step()
    finally:
        dist.destroy_process_group()


def test_offload_without_a_gpu_is_refused_before_ranks_start() -> None:
    plan = plan_of("bert", "--engine", "fsdp", "--ranks", "2", "--set", "engine.fsdp.offload=true")
    said = str(refusal(plan))
    assert said.startswith("engine.fsdp.offload: system local has no GPU")
    system = plan.system.model_copy(
        update={"scheduler": "slurm", "node": plan.system.node.model_copy(update={"gpus": 4})}
    )
    assert "offload" not in str(refusal(plan.model_copy(update={"system": system})))


@pytest.mark.parametrize(("workload", "num"), [("bert", 2), ("resnet50", 16), ("cosmoflow", 8), ("paced", 4)])
def test_networks_name_their_blocks_in_the_order_of_computing(workload: str, num: int) -> None:
    model = build_model(plan_of(workload, "--engine", "fsdp", "--ranks", "2").workload.model)
    blocks = blocks_of(model)
    assert len(blocks) == num
    shared = Counter(id(parameter) for block in blocks for parameter in block.parameters())
    assert set(shared.values()) == {1}
    assert all(any(True for _ in block.parameters()) for block in blocks)
    assert [module for module in model.modules() if module in blocks] == blocks
    assert blocks_of(nn.Linear(2, 2)) == []


def test_the_end_of_the_backward_pass_is_the_last_scatter_of_the_step_before() -> None:
    class Group:
        def size(self) -> int:
            return 2

    marks: list[int] = []
    done: list[str] = []
    watch = CommWatch(torch.device("cpu"), lambda: marks.append(len(done)), lambda what: None, "gloo")
    watch.close()
    for scatters in (3, 3, 2, 3):
        done.clear()
        for number in range(scatters):
            what: dict[str, Any] = {"method": SCATTER, "phase": "backward", "module": str(number), "num_tensors": 1}
            watch.run_collective(lambda: done.append("one"), torch.zeros(6), Group(), **what)
        watch.end_backward()
        watch.end_step()
    # Not known in the first step; one more or less than in the step before is marked at the end, or too early.
    assert marks == [3, 2, 2, 1]
    assert [(one.phase, one.sent_bytes) for one in watch.last] == [("backward", 24), *[("exchange", 24)] * 2]


@pytest.mark.parametrize(("where", "is_there"), [("cpu", True), ("meta", False)])
def test_offload_is_in_force_where_shares_lie_on_the_host(tmp_path: Path, where: str, is_there: bool) -> None:
    plan = plan_of("bert", "--engine", "fsdp", "--ranks", "1", "--set", "engine.fsdp.offload=true")
    place = RankPlace(rank=0, size=1, local_rank=0, local_size=1, node_rank=0, num_nodes=1, host="a", token="t")
    engine = FsdpEngine(plan, RunFolder(tmp_path), place, torch.device("cpu"), None)
    engine._shards = {"weight": nn.Parameter(torch.zeros(3, device=where))}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        (row,) = [one for one in engine.settings() if one.key == "engine.fsdp.offload"]
    finally:
        dist.destroy_process_group()
    assert (row.requested, row.effective, row.evidence[: len(where) + 4]) == (True, is_there, f"{where}: 12")


class StreamClock(Clock):
    """A GPU's, of which moments are given as seconds."""

    marks_are_free = False

    def between(self, first: Any, last: Any) -> float:
        return float(last - first)


def test_on_a_gpu_exposed_is_what_the_computing_stream_waited() -> None:
    watch = CommWatch(torch.device("cpu"), lambda: None, lambda what: None, "gloo")
    watch.clock = StreamClock()
    of_one: dict[str, Any] = {"num_bytes": 8, "num_tensors": 1, "ranks": 2, "rounds": 1}
    step = WatchedCalls(
        calls=[
            Call(method=GATHER, phase="forward", module="a", handed=0.0, done=3.0, **of_one),  # computing came at 1
            Call(method=GATHER, phase="forward", module="b", handed=3.0, done=4.0, **of_one),  # ahead: it came at 6
            Call(method=GATHER, phase="backward", module="b", handed=7.0, done=8.5, **of_one),
            Call(method=SCATTER, phase="backward", module="b", handed=9.0, done=12.0, **of_one),  # a's leave at 11
            Call(method=SCATTER, phase="exchange", module="a", handed=12.0, done=14.0, **of_one),
            Call(method=REDUCE, phase="optimizer", module="", handed=15.0, done=15.5, **of_one),
        ]
    )
    step.arrivals |= {("a", "forward"): [1.0], ("b", "forward"): [6.0], ("b", "backward"): [8.0]}
    step.arrivals |= {("a", "leave"): [2.0, 11.0], ("b", "leave"): [1.5, 9.0]}
    assert watch.exposed(step) == [2.0, 0.0, 0.5, 1.0, 0.0, 0.5]
    watch.steps, watch.measured = [step, step], 10
    assert watch.seconds() == {
        (GATHER, "forward"): 20.0,
        (GATHER, "backward"): 5.0,
        (SCATTER, "backward"): 10.0,
        (SCATTER, "exchange"): 0.0,
        (REDUCE, "optimizer"): 5.0,
    }
    assert watch.times() == {"communication_s": 11.0, "exposed_s": 4.0, "hidden_s": 7.0}


@pytest.mark.parametrize(
    ("method", "what"),
    [
        ("all-gather", "parameter"),
        ("gloo broadcast", "parameter"),
        ("reduce-scatter", "gradient"),
        ("all-reduce", "gradient"),
        ("all-reduce of activations", "tensor"),
        ("average every 8 updates", "tensor"),
    ],
)
def test_traces_name_what_a_message_carries(method: str, what: str) -> None:
    assert carried(method) == what


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

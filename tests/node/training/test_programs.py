"""The network as a program: what is refused where, and what compiling and capturing leave as they found it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlbench.errors import EnvironmentLacksError, RunError
from dlbench.machine.cuda_parts import compiler_lacks
from dlbench.node.data.synthetic import synthetic_batch
from dlbench.node.models.build import build_model, loss_for
from dlbench.node.part import TrialPasses
from dlbench.node.training import programs
from dlbench.node.training.precision import Precision
from dlbench.node.training.programs import Compilation, NetworkGraphs, require_mode
from dlbench.specs.expand import expand
from dlbench.specs.plan import RunPlan
from dlbench.specs.requests import Request, parse_set

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def plan_of(*settings: str, engine: str = "single") -> RunPlan:
    request = Request(workload="resnet50", preset="ci", engine=engine, points=(1,), overrides=parse_set((*settings,)))
    (plan,) = expand(request, machine_cores=2)
    return plan


class Network(nn.Module):
    """With all that a pass could leave changed; its second argument may be missing, as BERT's mask may."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dense, self.dropout = nn.BatchNorm1d(4), nn.Linear(4, 3), nn.Dropout(0.5)

    def forward(self, x: Tensor, mask: Tensor | None, shift: Tensor) -> tuple[Tensor, Tensor]:
        out = self.dropout(self.dense(self.norm(x))) + shift
        return out if mask is None else out * mask, out.sum(1)


def loss_with(model: nn.Module) -> Callable[[dict[str, Tensor]], Tensor]:
    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        first, second = model(batch["x"], None, batch["shift"])
        return first.float().square().mean() + second.float().mean()

    return loss_of


def batch_of(samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(samples, 4, generator=generator), "shift": torch.randn(samples, 3, generator=generator)}


def left(model: nn.Module) -> tuple[dict[str, Tensor], Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()


def assert_as_before(model: nn.Module, before: tuple[dict[str, Tensor], Tensor]) -> None:
    state, random = left(model)
    assert all(torch.equal(state[name], value) for name, value in before[0].items())
    assert torch.equal(random, before[1])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_modes_that_would_be_default_are_refused_on_a_cpu() -> None:
    for mode in ("reduce-overhead", "max-autotune"):
        with pytest.raises(EnvironmentLacksError, match=f"train.compile {mode}: .* use default"):
            require_mode(mode, CPU)
        require_mode(mode, GPU)
    require_mode("default", CPU)


def test_compiling_before_the_first_step_changes_nothing_and_calls_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[dict[str, Any]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **words: compiled.append(words))
    plan = plan_of("train.compile=default", "train.batch_per_rank=8", "train.gradient_accumulation=2")
    model, hooked, sizes, said = Network(), [], [], []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hooked.append)
    before = left(model)

    def sampled(samples: int) -> dict[str, Tensor]:
        sizes.append(samples)
        return batch_of(samples)

    compilation = Compilation(plan, CPU)
    compilation.after_wrap(replace(passes_of(model, samples=4), batch_of=sampled, beat=said.append), model)
    assert compiled == [{"dynamic": False, "mode": "default"}]
    assert sizes == [4]  # of one part
    assert said == ["compiling the network, pass 1 of 1"]
    assert hooked == []
    assert_as_before(model, before)


@pytest.mark.parametrize("workload", ["resnet50", "bert", "cosmoflow"])
def test_a_network_is_one_graph_for_the_compiler(workload: str) -> None:
    """What it fuses lies in one graph: each break would be a border that no kernel reaches across."""
    from torch._dynamo import explain

    request = Request(workload=workload, preset="ci", engine="single", points=(1,))
    (plan,) = expand(request, machine_cores=2)
    model, loss = build_model(plan.workload.model), loss_for(plan.workload.model)
    batch = synthetic_batch(plan.workload.model, plan.workload.data, 2, torch.Generator().manual_seed(1))
    given: list[tuple[Any, ...]] = []
    model.register_forward_pre_hook(lambda _module, arguments: given.append(arguments))
    with torch.autocast("cpu", torch.bfloat16):
        loss(model, batch)
        model._forward_pre_hooks.clear()
        found = explain(model)(*given[0])
    assert (found.graph_count, found.break_reasons) == (1, [])


class Graphed(torch.autograd.Function):
    """Named as torch's own, for the network's outputs come from it."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(one.clone() for one in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


class Capturing:
    """Stands in for torch.cuda.make_graphed_callables: passes before the capture, and a forward pass that replays."""

    def __init__(self) -> None:
        self.passes = 0
        self.samples: tuple[Tensor, ...] = ()
        self.caches: list[bool] = []
        self.error = ""

    def __call__(self, model: nn.Module, samples: tuple[Tensor, ...], num_warmup_iters: int) -> nn.Module:
        assert all(isinstance(one, Tensor) for one in samples)
        assert not model._forward_pre_hooks
        self.passes, self.samples, eager = num_warmup_iters, samples, model.forward
        if self.error:
            raise RuntimeError(f"{self.error}\nC++ stack")
        for _ in range(num_warmup_iters):
            torch.autograd.grad(eager(*samples)[0].sum(), list(model.parameters()), allow_unused=True)

        def replay(*tensors: Tensor) -> tuple[Tensor, ...]:
            found: tuple[Tensor, ...] = Graphed.apply(*eager(*tensors))  # type: ignore[no-untyped-call]
            return found

        model.forward = replay
        return model


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Capturing:
    made = Capturing()
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    reserved = iter((1 << 20, 3 << 20))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: next(reserved))
    return made


def passes_of(model: nn.Module, samples: int = 8) -> TrialPasses:
    nothing: Any = lambda _what: None  # noqa: E731
    return TrialPasses(
        model=model, loss_of=loss_with(model), batch_of=batch_of, samples=samples, beat=nothing, stage=nothing
    )


def captured(plan: RunPlan, model: nn.Module, device: torch.device = GPU) -> NetworkGraphs:
    graphs = NetworkGraphs(plan, device, Precision(plan.workload.train, CPU))
    graphs.before_wrap(passes_of(model))
    return graphs


def test_no_network_is_captured_on_a_cpu() -> None:
    with pytest.raises(EnvironmentLacksError, match="network: this rank computes on a CPU"):
        captured(plan_of("train.cuda_graphs=network"), Network(), CPU)


@pytest.mark.parametrize(("engine", "passes"), [("single", 3), ("ddp", 11)])
def test_a_captured_network_trains_as_it_did(capturing: Capturing, engine: str, passes: int) -> None:
    model = Network()
    eager, before = Network(), left(model)
    eager.load_state_dict(model.state_dict())
    graphs = captured(plan_of("train.cuda_graphs=network", engine=engine), model)
    assert_as_before(model, before)
    assert capturing.passes == passes
    (setting,) = graphs.settings()
    assert (setting.key, setting.effective) == ("train.cuda_graphs", "network")
    assert "uses 2 MiB of the GPU's memory" in setting.evidence
    assert graphs.warnings == []

    losses = []
    for one in (model, eager):
        torch.manual_seed(3)
        loss = loss_with(one)(batch_of(8))
        loss.backward()
        losses.append((loss.item(), *[parameter.grad for parameter in one.parameters()]))
    assert losses[0][0] == losses[1][0]
    assert all(torch.equal(a, b) for a, b in zip(losses[0][1:], losses[1][1:], strict=True))


def test_an_evaluation_runs_the_network_itself_and_a_step_of_another_shape_ends_the_run(capturing: Capturing) -> None:
    model = Network()
    captured(plan_of("train.cuda_graphs=network"), model)
    with pytest.raises(RunError, match=r"captured for inputs of 8x4, None, 8x3, and a step gives it 6x4, None, 6x3"):
        loss_with(model)(batch_of(6))
    model.eval()
    outputs, _ = model(batch_of(6)["x"], None, batch_of(6)["shift"])
    assert type(outputs.grad_fn).__name__ != "GraphedBackward"


def test_what_cannot_be_captured_is_said_in_one_line(capturing: Capturing) -> None:
    model = Network()
    capturing.error = "operation not permitted when stream is capturing"
    with pytest.raises(EnvironmentLacksError, match=r"cannot capture the network here \(operation not permitted"):
        captured(plan_of("train.cuda_graphs=network"), model)
    model(batch_of(5)["x"], None, batch_of(5)["shift"])  # as it was written


@pytest.mark.parametrize(
    ("device", "variables", "programs_here", "header", "said"),
    [
        (
            GPU,
            {},
            [],
            True,
            "Triton needs a C compiler, and there is neither gcc nor clang; install gcc, or name a compi",
        ),
        (
            GPU,
            {"CC": "icx"},
            ["gcc"],
            True,
            "Triton needs a C compiler, and CC=icx is not found; install gcc, or name a",
        ),
        (GPU, {}, ["gcc"], False, "Python's header is missing ("),
        (CPU, {}, [], False, "Python's header is missing ("),
        (GPU, {}, ["clang"], True, ""),
        (GPU, {"CC": "cc"}, ["cc"], True, ""),
        (CPU, {}, [], True, ""),
    ],
)
def test_what_compiling_needs_is_asked_for_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    device: torch.device,
    variables: dict[str, str],
    programs_here: list[str],
    header: bool,
    said: str,
) -> None:
    """Triton compiles C against Python.h for its first kernel: in step 1, and a hundred lines are its answer."""
    for name in programs_here:
        (tmp_path / name).touch(mode=0o755)
    if header:
        (tmp_path / "Python.h").touch()
    lacks = functools.partial(compiler_lacks, environment={"PATH": str(tmp_path), **variables}, include=tmp_path)
    monkeypatch.setattr(programs, "compiler_lacks", lacks)
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "g++")
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    asked = device, "train.optimizer.implementation fused", "set it to foreach"
    if not said:
        programs.require_compiler(*asked)
        return
    with pytest.raises(EnvironmentLacksError) as raised:
        programs.require_compiler(*asked)
    assert str(raised.value).startswith(f"train.optimizer.implementation fused: {said}")
    assert str(raised.value).endswith(", or set it to foreach")

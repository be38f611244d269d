"""Kernels change no result: channels-last weights, attention with no mask or padding, optimizers' updates."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dlbench.errors import EnvironmentLacksError
from dlbench.node.data.synthetic import synthetic_batch
from dlbench.node.data.text import arranged, parts
from dlbench.node.models import bert, optimizers
from dlbench.node.models.bert import decoder_logits
from dlbench.node.models.build import Batch, build_model, loss_for
from dlbench.node.models.optimizers import build_optimizer, optimizer_of, update_evidence
from dlbench.node.training.checkpoint import Checkpoint
from dlbench.node.training.checks import parameters_digest
from dlbench.node.training.precision import Kernels
from dlbench.specs.plan import RunPlan
from dlbench.specs.training import OptimizerSpec
from dlbench.specs.workload import BertModel
from tests.support.forked_runs import planned
from tests.support.one_rank import progress_at, write_checkpoint
from tests.support.text_batches import BERT, LENGTH, UNPADDED, text_batch

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def trained(batch: Batch, num_parts: int) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of the parts, and gradients, of the same network each time."""
    torch.manual_seed(3)
    model, loss = build_model(BERT), loss_for(BERT)
    losses = [loss(model, part) for part in parts(batch, num_parts)]
    for one in losses:
        (one / num_parts).backward()  # type: ignore[no-untyped-call]
    return [one.item() for one in losses], [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("kind", "bound"), [(None, 0.0), (torch.bfloat16, 2e-2)])
def test_casting_once_changes_no_loss(kind: torch.dtype | None, bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit in fp32; in bf16 losses too, and gradients within the rounding of a sum of three in bf16."""

    def steps() -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(3)
        model, loss_of = build_model(BERT), loss_for(BERT)
        with torch.autocast("cpu", kind, enabled=kind is not None):
            loss = loss_of(model, text_batch([LENGTH, 5, 7], 1))
        loss.backward()  # type: ignore[no-untyped-call]
        return [loss.item()], [p.grad for p in model.parameters() if p.grad is not None]

    losses, gradients = steps()
    monkeypatch.setattr(bert, "autocast_type", lambda _device: None)
    before, others = steps()
    assert losses == before
    largest = max(gradient.abs().max().item() for gradient in others)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=bound * largest)


def test_rows_that_pad_the_decoder_change_neither_loss_nor_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here in fp32, which nothing is padded in, so that nothing but the padding differs."""

    def passed() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(2)
        masked, weight, bias = (
            torch.randn(*s, generator=generator).requires_grad_() for s in ((2, 3, 8), (61, 8), (61,))
        )
        logits = decoder_logits(masked, weight, bias)
        assert logits.shape == (2, 3, 61)
        logits.float().flatten(0, 1).logsumexp(1).sum().backward()  # type: ignore[no-untyped-call]
        return [logits, *(one.grad for one in (masked, weight, bias) if one.grad is not None)]

    plain = passed()
    monkeypatch.setattr(bert, "autocast_type", lambda _device: torch.float32)
    monkeypatch.setattr(bert, "decoder_padding", lambda *_arguments: 3)
    for one, other in zip(passed(), plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("vocab_size", "kind", "device", "rows"),
    [
        (30522, torch.bfloat16, GPU, 6),
        (30528, torch.bfloat16, GPU, 0),
        (30522, None, GPU, 0),
        (30522, torch.bfloat16, CPU, 0),
    ],
)
def test_the_decoder_is_padded_for_tensor_cores_alone(
    vocab_size: int, kind: torch.dtype | None, device: torch.device, rows: int
) -> None:
    assert bert.decoder_padding(vocab_size, device, kind) == rows


@settings(max_examples=12)
@given(lengths=st.lists(st.integers(1, LENGTH), min_size=6, max_size=6), num_parts=st.sampled_from([1, 2, 3]))
def test_without_padding_losses_and_gradients_are_the_same(lengths: list[int], num_parts: int) -> None:
    batch = text_batch(lengths, seed=sum(lengths))
    losses, gradients = trained(batch, num_parts)
    unpadded = arranged(batch, UNPADDED, num_parts)
    assert "attention_mask" not in unpadded
    assert ("tokens@0" in unpadded) == (min(lengths) < LENGTH)
    found, others = trained(unpadded, num_parts)
    # fp32: sums over tokens in another order.
    assert found == pytest.approx(losses, rel=1e-5)
    largest = max(g.abs().max().item() for g in gradients)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-5 * largest)


def test_the_mask_is_left_away_where_nothing_is_padding() -> None:
    whole, padded = text_batch([LENGTH] * 3, 1), text_batch([LENGTH, 4, 6], 1)
    bare = arranged(whole, BERT)
    assert set(whole) - set(bare) == {"attention_mask"}
    assert arranged(padded, BERT) == padded
    assert arranged(whole, BERT.model_copy(update={"attention": "masked"})) == whole
    losses, gradients = trained(whole, 1)
    found, others = trained(bare, 1)
    assert found == pytest.approx(losses, rel=1e-6)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


def plan_of(*words: str) -> RunPlan:
    plans, _ = planned(*words)
    return plans[0]


ORDERS = {"resnet50": torch.channels_last, "cosmoflow": torch.channels_last_3d}


@pytest.mark.parametrize("workload", ["resnet50", "cosmoflow"])
def test_weights_and_gradients_lie_as_activations(workload: str, tmp_path: Path) -> None:
    words = (workload, "--preset", "ci", "--engine", "single", "--ranks", "1", "--data", "synthetic")
    last, plain = (plan_of(*words, "--set", f"model.memory_format={form}") for form in ("channels-last", "contiguous"))
    spec = OptimizerSpec(name="sgd", learning_rate=0.1, implementation="fused")
    found: dict[str, Any] = {}
    for name, plan in {"last": last, "plain": plain}.items():
        torch.manual_seed(5)
        kernels, work = Kernels(plan, CPU), plan.workload
        model = kernels.placed(build_model(work.model)).eval()
        start = parameters_digest(model)
        batch = synthetic_batch(work.model, work.data, 2, torch.Generator().manual_seed(6))
        optimizer = build_optimizer(model, spec)
        loss = loss_for(work.model)(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found[name] = model, optimizer, loss.item(), start
        told = {setting.key: setting.effective for setting in kernels.settings()}
        assert told.get("model.memory_format.weights") == ("channels-last" if name == "last" else None)
    model, optimizer, loss, start = found["last"]
    other, _, expected, other_start = found["plain"]
    assert loss == pytest.approx(expected, rel=1e-5)
    assert start == other_start
    large = [p for p in model.parameters() if p.ndim > 3 and p.shape[1] > 1 and p.shape[-1] > 1]
    assert large
    for parameter in large:
        assert parameter.is_contiguous(memory_format=ORDERS[workload])
        assert parameter.grad.stride() == parameter.stride()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.contiguous(), two, rtol=1e-4, atol=1e-5)
    _read_under_the_other_form(tmp_path / "c", (model, optimizer), (other, build_optimizer(other, spec)))


def _read_under_the_other_form(path: Path, written: tuple[Any, Any], into: tuple[Any, Any]) -> None:
    progress = progress_at(1)
    write_checkpoint(path, *written, progress, {})
    Checkpoint(path).restore(*into)
    (model, optimizer), (other, restored) = written, into
    assert parameters_digest(other) == parameters_digest(model)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        mine, theirs = (of.state[p]["momentum_buffer"] for of, p in ((optimizer, one), (restored, two)))
        assert theirs.stride() == two.stride()
        assert torch.equal(mine.contiguous(), theirs.contiguous())


@pytest.mark.parametrize(
    ("ranks", "sync"),
    # One rank as more, whose efficiency it is the reference of; dlbench's own exchange over it too: Horovod broadcasts
    # the weights.
    [("1", ()), ("2", ()), ("2", ("--set", "sync.fusion=own:single"))],
)
def test_horovod_keeps_weights_contiguous_and_says_so(ranks: str, sync: tuple[str, ...]) -> None:
    words = ("--preset", "ci", "--ranks", ranks, "--set", "model.memory_format=channels-last")
    plan = plan_of("cosmoflow", *words, *sync)
    kernels = Kernels(plan, CPU)
    model = kernels.placed(build_model(plan.workload.model))
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    (told,) = kernels.settings()
    assert (told.effective, told.evidence) == ("contiguous", "Horovod takes only contiguous tensors")


@pytest.fixture
def search() -> Iterator[None]:
    yield
    torch.backends.cudnn.benchmark = False


@pytest.mark.usefixtures("search")
def test_cudnn_searches_on_gpus_alone() -> None:
    for asked, device, expected in (("auto", GPU, True), ("off", GPU, False), ("on", GPU, True), ("auto", CPU, False)):
        plan = plan_of("resnet50", "--preset", "ci", "--ranks", "1", "--set", f"train.cudnn_benchmark={asked}")
        told = {setting.key: setting for setting in Kernels(plan, device).settings()}
        assert torch.backends.cudnn.benchmark is expected
        if device is GPU:
            setting = told["train.cudnn_benchmark"]
            assert (setting.requested, setting.effective) == (asked, "on" if expected else "off")
        else:
            assert not told
    with pytest.raises(EnvironmentLacksError, match=r"train\.cudnn_benchmark on: this rank computes on a CPU"):
        Kernels(plan_of("resnet50", "--preset", "ci", "--ranks", "1", "--set", "train.cudnn_benchmark=on"), CPU)


def test_the_record_counts_what_attention_was_given() -> None:
    plan = plan_of("bert", "--preset", "ci", "--ranks", "1", "--data", "synthetic")
    kernels, work = Kernels(plan, CPU), plan.workload
    assert isinstance(work.model, BertModel)
    model, loss = build_model(work.model), kernels.around_loss(loss_for(work.model))
    batch = synthetic_batch(work.model, work.data, 2, torch.Generator().manual_seed(6))
    for one in (batch, arranged(batch, work.model)):
        loss(model, one)
    (setting,) = kernels.settings()
    assert setting.requested == "auto"
    assert "1 masked, 1 unmasked" in setting.evidence


def test_bf16_gradients_of_cosmoflow_are_near_those_of_fp32_on_a_cpu() -> None:
    """Its last convolution gets inputs 2 voxels deep, whose gradient torch 2.13 gets wrong in bf16."""
    gradients: dict[str, list[torch.Tensor]] = {}
    for precision in ("fp32", "bf16"):
        words = ("--preset", "ci", "--ranks", "1", "--data", "synthetic", "--set", f"train.precision={precision}")
        plan = plan_of("cosmoflow", *words)
        kernels, work = Kernels(plan, CPU), plan.workload
        torch.manual_seed(5)
        model, loss_of = build_model(work.model), kernels.around_loss(loss_for(work.model))
        gradients[precision] = []
        for seed in range(3):
            batch = synthetic_batch(work.model, work.data, 2, torch.Generator().manual_seed(seed))
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = loss_of(model, batch)
            model.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            gradients[precision] += [p.grad for p in model.parameters() if p.grad is not None]
        settings = {setting.key: setting.effective for setting in kernels.settings()}
        assert settings == ({} if precision == "fp32" else {"train.precision.convolutions": "fp32 in 1 of 5"})
    for exact, low in zip(gradients["fp32"], gradients["bf16"], strict=True):
        # Half of the entries of the wrong gradient are wrong, so that it is 0.5 or more apart; rounding makes 0.3.
        assert (low - exact).norm() < 0.4 * exact.norm()


SHAPES = [(3, 4, 2, 2), (5,), (6, 3), (1, 2, 3, 3, 3)]


def spec_of(name: Any, **changes: Any) -> OptimizerSpec:
    return OptimizerSpec.model_validate({"name": name, "learning_rate": 0.1, "weight_decay": 0.01, **changes})


def made(spec: OptimizerSpec) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    values[0] = values[0].contiguous(memory_format=torch.channels_last)
    values[3] = torch.zeros(SHAPES[3])  # whose ratio is 1
    parameters = [nn.Parameter(value) for value in values]
    return parameters, optimizer_of(parameters, spec)


def updated(spec: OptimizerSpec, steps: int, *, in_bucket: bool = False) -> list[Tensor]:
    """Parameters after some steps, each with a rate of its own.

    `in_bucket`: gradients are views of one buffer, as DDP's are on GPUs, which lays them out anew after the first step.
    """
    parameters, optimizer = made(spec)
    generator = torch.Generator().manual_seed(2)
    bucket = torch.zeros(sum(parameter.numel() for parameter in parameters))
    for step in range(steps):
        offsets, end = dict[nn.Parameter, int](), 0
        for parameter in parameters if step else reversed(parameters):
            offsets[parameter], end = end, end + parameter.numel()
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator)
            room = torch.empty_like(parameter)
            if in_bucket:
                room = bucket.as_strided(parameter.shape, parameter.stride(), offsets[parameter])
            parameter.grad = room.copy_(gradient)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + step)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@given(decay=st.sampled_from([0.0, 0.1]), rate=st.floats(1e-4, 0.5), seed=st.integers(0, 99))
def test_adamw_against_numpy(decay: float, rate: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = [rng.normal(size=shape) for shape in ((3, 2), (4,))]
    model = nn.ParameterList([nn.Parameter(torch.from_numpy(w.copy())) for w in weights])
    spec = spec_of("adamw", weight_decay=decay, learning_rate=rate, betas=(0.8, 0.99), epsilon=1e-3)
    optimizer = build_optimizer(model, spec)
    m, v = [np.zeros_like(w) for w in weights], [np.zeros_like(w) for w in weights]
    for step in range(1, 4):
        for i, parameter in enumerate(model):
            g = rng.normal(size=weights[i].shape)
            parameter.grad = torch.from_numpy(g)
            m[i], v[i] = 0.8 * m[i] + 0.2 * g, 0.99 * v[i] + 0.01 * g**2
            own = decay if weights[i].ndim > 1 else 0.0
            change = (m[i] / (1 - 0.8**step)) / (np.sqrt(v[i] / (1 - 0.99**step)) + 1e-3)
            weights[i] = weights[i] * (1 - rate * own) - rate * change
        optimizer.step()
    for parameter, w in zip(model, weights, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), w, rtol=1e-10)


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_own_steps_are_those_of_torch(name: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(name, implementation=implementation)
    own = updated(spec, 3)
    monkeypatch.setattr(optimizers, "Sgd", torch.optim.SGD)
    monkeypatch.setattr(optimizers, "AdamW", torch.optim.AdamW)
    for one, two in zip(own, updated(spec, 3), strict=True):
        assert torch.equal(one, two)


def test_no_optimizer_of_a_rank_imports_the_compiler() -> None:
    """It is 800 modules, 2 s of CPU in the first step of each rank of each run."""
    code = (
        "import sys, torch\n"
        "from dlbench.node.models.optimizers import optimizer_of\n"
        "from dlbench.specs.training import OptimizerSpec\n"
        "for name in ('sgd', 'adamw', 'lars', 'lamb'):\n"
        "    parameter = torch.nn.Parameter(torch.ones(2, 2))\n"
        "    optimizer = optimizer_of([parameter], OptimizerSpec(name=name, learning_rate=0.1))\n"
        "    parameter.sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "    optimizer.load_state_dict(optimizer.state_dict())\n"
        "    assert 'torch._dynamo' not in sys.modules, name\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_fused_kernels_make_the_same_update(name: str) -> None:
    plain, fused = updated(spec_of(name), 5), updated(spec_of(name, implementation="fused"), 5, in_bucket=True)
    for one, two in zip(plain, fused, strict=True):
        # fp32 with operations in another order: a few units in the last place a step.
        torch.testing.assert_close(two, one, rtol=1e-6, atol=1e-7)
    assert not torch.equal(plain[0], made(spec_of(name))[0][0])


@pytest.fixture
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Chooses what torch's compiler makes programs with."""
    plain = torch.compile

    def choose(backend: str) -> None:
        monkeypatch.setattr(torch, "compile", lambda *args, **named: plain(*args, backend=backend, **named))

    torch._dynamo.reset()
    optimizers._compiled.cache_clear()
    yield choose
    optimizers._compiled.cache_clear()
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=(pytest.mark.slow, pytest.mark.nightly))]
)
@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_compiled_updates_are_compiled_once_whatever_the_rate_and_wherever_gradients_lie(
    compiler: Callable[[str], None], name: str, backend: str
) -> None:
    compiler(backend)
    spec = spec_of(name, implementation="fused")
    plain, compiled = updated(spec_of(name), 30), updated(spec, 30, in_bucket=True)
    for one, two in zip(plain, compiled, strict=True):
        # Rates are fp32 tensors instead of fp64 numbers; 30 steps add up their rounding.
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)
    # One for the decayed tensors, one for the rest.
    assert update_evidence(spec) == "torch.compile of the update: 2 graphs"

"""Updates by other kernels are the same updates; compiled ones are compiled once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dlbench.node.models import optimizers
from dlbench.node.models.optimizers import build_optimizer, optimizer_of, update_evidence
from dlbench.specs.training import OptimizerSpec

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

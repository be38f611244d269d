"""The network as CUDA graphs: the parameters of eager after some steps, and fewer launches."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.programs import Trained, plan_of, trained

pytestmark = [
    pytest.mark.gpu,
    # What `warn_only` below warns of: cuBLAS, and kernels that have no order of their sums.
    pytest.mark.filterwarnings("ignore:.*eterministic"),
]

STEPS = 5
WORKLOADS = {
    "resnet50": ("train.precision=bf16", "model.memory_format=channels-last"),
    "bert": ("train.precision=bf16",),
    "cosmoflow": ("train.precision=fp32",),
}


@pytest.fixture(autouse=True)
def _same_kernels() -> object:
    """Kernels whose sums have one order, so that two runs of one program are equal."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield None
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_a_captured_network_trains_as_eager_does(workload: str) -> None:
    settings = WORKLOADS[workload]
    eager = trained(plan_of(workload, *settings), STEPS, counts=True)
    found = trained(plan_of(workload, *settings, "train.cuda_graphs=network"), STEPS, forbids_waits=True, counts=True)
    # The same kernels in the same order, dropout's numbers included; what is left are sums that have no fixed order.
    assert found.losses == pytest.approx(eager.losses, rel=1e-2 if "train.precision=bf16" in settings else 1e-4)
    assert _largest_difference(found, eager) < 5e-2
    assert found.graphs is not None
    (setting,) = found.graphs.settings()
    assert setting.effective == "network", setting.evidence
    # Forward and backward pass are a launch each; loss, update and copies stay.
    assert found.kernels < eager.kernels / 2, (found.kernels, eager.kernels)


def test_an_evaluation_takes_a_short_batch() -> None:
    found = trained(plan_of("resnet50", "train.cuda_graphs=network"), STEPS)
    found.model.eval()
    with torch.no_grad():
        assert len(found.model(torch.rand(3, 3, 64, 64, device="cuda"))) == 3


def _largest_difference(one: Trained, other: Trained) -> float:
    """Of parameters and buffers, over the largest absolute value of each tensor."""
    pairs = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    return max(float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp(min=1e-3)) for a, b in pairs)

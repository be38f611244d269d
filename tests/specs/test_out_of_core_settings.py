"""Settings of memory: what can be given as text, and what is refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from dlbench.specs.out_of_core import MemorySpec
from dlbench.specs.training import OptimizerSpec, TrainSpec


def test_blocks_are_a_list_or_a_text() -> None:
    wanted = ("layers.0", "layers.8")
    assert MemorySpec(blocks="layers.0, layers.8").blocks == wanted  # type: ignore[arg-type]
    assert MemorySpec(blocks=wanted).blocks == wanted
    assert MemorySpec(blocks="").blocks == ()  # type: ignore[arg-type]


def test_a_capacity_is_bytes_or_a_share_of_training_in_core() -> None:
    assert MemorySpec(capacity="2KiB").capacity_bytes(10_000) == 2048
    assert MemorySpec(capacity="50%").capacity_bytes(10_000) == 5000
    assert MemorySpec().capacity_bytes(10_000) is None
    for text in ("0%", "x%", "1.2.3%", "0B", "2000%"):
        with pytest.raises(ValidationError):
            MemorySpec(capacity=text)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"recompute": "planned"}, "needs memory.capacity"),
        ({"recompute": "blocks", "swap": "planned", "memory": {"capacity": "50%"}}, "exclude each other"),
        ({"recompute": "planned", "swap": "offload", "memory": {"capacity": "50%"}}, "exclude each other"),
        ({"activation_budget": 0.5}, "needs compile default"),
        ({"activation_budget": 0.5, "compile": "default", "swap": "offload"}, "recompute and swap none"),
        ({"cuda_graphs": "network", "compile": "default"}, "exclude each other"),
        ({"cuda_graphs": "network", "optimizer_state": "host"}, "exclude each other"),
        ({"cuda_graphs": "network", "recompute": "blocks"}, "cuda_graphs network needs recompute and swap none"),
        ({"compile": "max-autotune", "swap": "offload"}, "compile max-autotune needs recompute and swap none"),
        ({"cuda_graphs": "network", "gradient_accumulation": 2}, "needs gradient_accumulation 1"),
        ({"compile": "reduce-overhead", "gradient_accumulation": 4}, "needs gradient_accumulation 1"),
    ],
)
def test_methods_that_do_not_go_together_are_refused(given: dict[str, object], said: str) -> None:
    optimizer = OptimizerSpec(name="sgd", learning_rate=0.1)
    with pytest.raises(ValidationError, match=said):
        TrainSpec(batch_per_rank=4, optimizer=optimizer, **given)  # type: ignore[arg-type]

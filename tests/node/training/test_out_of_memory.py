"""Out of memory: one line that names the batch that fits, found by trying, and files that stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlbench.errors import RunError
from dlbench.node.models.build import loss_for
from dlbench.node.out_of_core import device_memory
from dlbench.node.out_of_core.device_memory import BatchFit, largest_batch, missing_state_bytes, out_of_memory
from dlbench.node.training import run
from dlbench.specs.training import OptimizerSpec
from tests.support.one_rank import trained

pytestmark = pytest.mark.usefixtures("one_thread")


@given(most=st.integers(0, 4095), more=st.integers(1, 2000))
def test_the_largest_batch_is_found_by_few_trials(most: int, more: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= most

    upper_bound = min(most + more, 4096)
    fit = largest_batch(fits, upper_bound)
    assert fit == BatchFit(batch=most, is_largest=True, trials=len(tried))
    assert len(tried) <= device_memory.MAX_TRIALS
    assert max(tried, default=0) < upper_bound


def test_a_search_that_takes_too_long_says_what_it_knows() -> None:
    clock = iter(range(0, 1000, 25))
    fit = largest_batch(lambda batch: batch <= 70, 1000, lambda: float(next(clock)))
    assert (fit.is_largest, fit.trials) == (False, 2)
    said = out_of_memory("no room", BatchFit(batch=64, is_largest=False, trials=2), rank=1, batch=128, accumulation=2)
    assert "at least 128 fits" in str(said)
    none = out_of_memory("no room", BatchFit(batch=0, is_largest=True, trials=3), rank=1, batch=8, accumulation=1)
    assert "not even one sample fits" in str(none)
    late = out_of_memory("no room", None, rank=1, batch=8, accumulation=1, startup_bytes=3 << 30)
    assert "train.batch_per_rank 8, which fitted before the measured steps (3 GiB): no room; a smaller" in str(late)
    assert "train.recompute, needs less" in str(out_of_memory("no room", None, rank=1, batch=8, accumulation=1))


def test_the_state_that_is_still_to_come_is_kept_free() -> None:
    model = torch.nn.Linear(10, 9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    spec = OptimizerSpec.model_validate({"name": "sgd", "learning_rate": 0.1, "momentum": 0.9})
    assert missing_state_bytes(model, optimizer, spec) == 4 * 99
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    assert missing_state_bytes(model, optimizer, spec) == 0


def test_a_run_without_enough_memory_names_the_batch_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def scarce(*arguments: Any) -> Callable[..., torch.Tensor]:
        plain = loss_for(*arguments)

        def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            samples = len(next(iter(batch.values())))
            tried.append(samples)
            if samples > 5:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
            return plain(model, batch)

        return loss

    def scarce_for(model: Any, label_smoothing: float = 0.0) -> Callable[..., torch.Tensor]:
        return scarce(model, label_smoothing)

    monkeypatch.setattr(run, "loss_for", scarce_for)
    with pytest.raises(RunError) as caught:
        trained(tmp_path, 4, train__batch_per_rank=16)
    assert int(caught.value.exit_code) == 3
    assert not torch.autograd._profiler_enabled()  # Python would crash at its end
    assert str(caught.value) == (
        "rank 0 is out of memory at train.batch_per_rank 16: CUDA out of memory. Tried to allocate 2 GiB; 5 fits (by 4 "
        "trials of forward and backward passes on this rank): set train.batch_per_rank to that, or to a little less, "
        "because fragmentation and exchange buffers need memory too"
    )
    assert tried == [16, 8, 4, 6, 5]
    (folder,) = [path.parent for path in tmp_path.rglob("plan.json")]
    assert list(folder.glob("**/*.steps*")) or list(folder.iterdir())

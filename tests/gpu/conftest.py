"""How tests run where they have GPUs: which stand first, and what torch may say."""

from __future__ import annotations

import pytest
import torch

from tests.support.gpus import is_for_gpus


def pytest_configure(config: pytest.Config) -> None:
    """Warnings of torch's GPU paths are no failures: which there are depends on card, cuDNN and driver.

    They are listed by pytest, and on the page of `make gpu-check`. Directly behind `error`, so that what pyproject.toml
    ignores stays ignored, and all other categories stay errors.
    """
    if is_for_gpus(config):
        config.getini("filterwarnings").insert(1, "default::UserWarning")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests whose processes need the GPU come before this one has a context: in exclusive-process mode a GPU takes one
    process at a time, and what pytest's allocator has cached is missing to others.
    """
    if is_for_gpus(config):
        items.sort(key=lambda item: item.get_closest_marker("gpu_process") is None)


@pytest.fixture(autouse=True)
def no_context_yet(request: pytest.FixtureRequest) -> None:
    """A test that starts processes for the GPU fails here, and not in exclusive-process mode alone."""
    if request.node.get_closest_marker("gpu_process"):
        begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        assert not begun, "this process has begun with CUDA before a test of another process"

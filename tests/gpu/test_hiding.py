"""A run of pytest for GPUs shows them to torch."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_a_run_for_gpus_computes_on_one() -> None:
    assert torch.cuda.device_count() >= 1
    # 1 + 2 + ... + 1,000, exact in fp32.
    assert torch.arange(1001, dtype=torch.float32, device="cuda").sum().item() == 500_500

"""Freed tensors are given back to the system where that is asked for."""

from __future__ import annotations

import pytest
import torch

from dlbench.machine.resident import resident_bytes
from dlbench.node.memory.allocator import give_back_freed


def test_what_is_freed_is_no_longer_resident() -> None:
    words = give_back_freed(True)
    if words is None:
        pytest.skip("not glibc")
    try:
        assert "from 1 MiB on" in words
        before = resident_bytes()
        tensors = [torch.ones(1 << 20) for _ in range(32)]
        held = resident_bytes()
        del tensors[::2]  # every second one: holes that a heap would keep
        after = resident_bytes()
        assert before is not None
        assert held is not None
        assert after is not None
        assert held - before > 100 << 20
        assert held - after > 50 << 20
    finally:
        assert give_back_freed(False) is not None

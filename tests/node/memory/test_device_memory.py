"""Freed tensors are given back to the system where that is asked for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

_PROGRAM = """
import json
import torch
from dlbench.machine.memory import resident_bytes
from dlbench.node.memory.device_memory import give_back_freed

words = give_back_freed(True)
torch.ones(1 << 20).sum()
before = resident_bytes()
tensors = [torch.ones(1 << 20) for _ in range(32)]
held = resident_bytes()
del tensors[::2]  # every second one: holes that a heap would keep
after = resident_bytes()
print(json.dumps([words, before, held, after, give_back_freed(False)]))
"""


def test_what_is_freed_is_no_longer_resident() -> None:
    # In a process of its own: what other tests have freed is used again, and other threads free what they hold.
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=120)
    words, before, held, after, again = json.loads(done.stdout)
    if words is None:
        pytest.skip("not glibc")
    assert "from 1 MiB on" in words
    assert held - before > 100 << 20
    assert held - after > 50 << 20
    assert again is not None

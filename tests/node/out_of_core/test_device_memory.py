"""What tensors free stays with the process, unless its environment chose an allocator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from dlbench.node.out_of_core.device_memory import KEPT_FREED

_PROGRAM = """
import json
import resource
import torch
from dlbench.node.out_of_core.device_memory import keep_freed

found = keep_freed()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def fill():
    tensors = [torch.ones(12 << 20) for _ in range(2)]  # 48 MiB each: by itself glibc maps them one by one

for _ in range(20):  # glibc before 2.38 gives aligned memory from larger pieces than were freed
    fill()
before = faults()
fill()
print(json.dumps([found, faults() - before]))
"""


def _kept(**variables: str) -> Any:
    """In a process of its own: what other tests have freed is used again."""
    command, clean = [sys.executable, "-c", _PROGRAM], {k: v for k, v in os.environ.items() if "MALLOC" not in k}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=clean | variables)
    return json.loads(done.stdout)


def test_pages_of_freed_tensors_are_used_again() -> None:
    found, faults = _kept()
    if "not glibc" in found:
        pytest.skip(found)
    assert found == KEPT_FREED
    assert faults < (96 << 20) // 4096 // 4


def test_an_allocator_of_the_environment_stays_as_it_is() -> None:
    found, faults = _kept(MALLOC_MMAP_THRESHOLD_=str(1 << 20))
    assert found == "as MALLOC_MMAP_THRESHOLD_ of the rank's environment set it"
    assert faults >= (96 << 20) // 4096 // 2

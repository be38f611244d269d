"""Horovod on one GPU: what its build finds, that its CUDA parts run, and that a closed timeline changes no step.

Horovod runs in processes of its own: it is started once in a process, and its variables are read then.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dlbench.node.sync.horovod.timeline import parse_timeline
from dlbench.setup.horovod import toolchain
from tests.support.gpus import gpu_facts

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_process]

_LIMIT_S = 120
"""For a process that imports torch, begins with CUDA and starts Horovod; most of it is reading files."""

_START = """
import ctypes, json, os, sys, time
os.environ |= {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
import torch
import horovod.torch as hvd
"""

_LOAD = """
from horovod.torch import mpi_lib_v2
library = ctypes.CDLL(mpi_lib_v2.__file__)
with open("/proc/self/maps") as maps:
    found = {line.split()[-1] for line in maps if "libnccl" in line}
print(json.dumps({"nccl": bool(hvd.nccl_built()), "cuda": bool(hvd.cuda_built()), "libraries": sorted(found),
    "free": hasattr(library, "horovod_closed_timeline_is_free")}))
"""

# One message by itself with a factor (kernel ScaleBuffer), and three in one buffer (kernel BatchedD2DMemcpy).
_SUMS = """
hvd.init()
one = torch.arange(1000, dtype=torch.float32, device="cuda")
scaled = hvd.allreduce(one, op=hvd.Sum, name="scaled", prescale_factor=0.5)
many = [torch.full((size,), float(size), device="cuda") for size in (3, 70_000, 11)]
fused = hvd.grouped_allreduce(many, op=hvd.Average, name="fused")
hvd.broadcast_(one, root_rank=0, name="own")
print(json.dumps({"scaled": torch.equal(scaled, one / 2), "device": str(scaled.device),
    "fused": all(torch.equal(a, b) for a, b in zip(many, fused)), "own": one.sum().item()}))
hvd.shutdown()
"""

# While the GPU is kept busy in front of a message, does Horovod's own thread wait for it on the host? Then a message of
# the CPU, which it would negotiate and exchange next, comes back as late as the GPU's.
_PATHS = """
os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
hvd.init()
own, gpu = torch.ones(8), torch.ones(1 << 20, device="cuda")
file = sys.argv[1]

def busy(cycles):
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    return start, end

def seconds(events):
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / 1e3

def wait_of_the_cpus_message():
    events = busy(cycles)
    handle = hvd.allreduce_async_(gpu, op=hvd.Sum, name="gpu")
    time.sleep(0.05)  # Horovod's cycle is 1 ms: the message is under way, or waited for
    start = time.monotonic()
    hvd.allreduce(own, op=hvd.Sum, name="cpu")
    waited = time.monotonic() - start
    hvd.synchronize(handle)
    return {"waited": waited, "busy": seconds(events)}

for _ in range(3):  # communicators, streams and the cache of negotiated messages
    hvd.allreduce_(gpu, op=hvd.Sum, name="gpu")
    hvd.allreduce(own, op=hvd.Sum, name="cpu")
seconds(busy(1_000_000))
cycles = int(1e8 * 0.5 / seconds(busy(100_000_000)))  # half a second on this GPU
found = {"before": wait_of_the_cpus_message()}
hvd.start_timeline(file, mark_cycles=True)
found["open"] = wait_of_the_cpus_message()
hvd.stop_timeline()
found["after"] = wait_of_the_cpus_message()
print(json.dumps(found))
hvd.shutdown()
"""

# The engine itself, as one rank uses it; with any build of Horovod.
_STEP = """
from pathlib import Path
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.horovod.engine import HorovodEngine
from dlbench.records.folder import RunFolder
from tests.support.run_factory import plans
place = RankPlace(rank=0, size=1, local_rank=0, local_size=1, node_rank=0, num_nodes=1, host="here", token="t")
(plan,) = plans(points=(1,), repeats=1, engine="horovod")
engine = HorovodEngine(plan, RunFolder(Path(sys.argv[1]).parent), place, torch.device("cuda"), None)
engine.start()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2).cuda()
before = model.weight.detach().clone()
model, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), lambda: None)
engine.begin_backward()
model(torch.ones(3, 4, device="cuda")).sum().backward()
engine.finish_exchange()
engine.step(lambda optimizer: optimizer.step())
# Each weight's gradient is 3, the number of samples.
print(json.dumps({"moved": (before - model.weight.detach()).cpu().tolist(),
    "operations": [row.effective for row in engine.settings() if row.key == "engine.horovod.operations"]}))
engine.stop()
"""


def in_a_process(code: str, *arguments: str) -> dict[str, Any]:
    """What a script says in its last line, as JSON."""
    words = [sys.executable, "-c", _START + code, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def loaded() -> dict[str, Any]:
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed: `dlbench setup horovod` builds it")
    return in_a_process(_LOAD)


@pytest.fixture(scope="module")
def with_nccl(loaded: dict[str, Any]) -> dict[str, Any]:
    if not loaded["nccl"]:
        lacks = toolchain()["cuda_lacks"]
        pytest.skip(f"this Horovod was built without NCCL: {lacks or 'run `dlbench setup horovod`'}")
    return loaded


def test_the_build_finds_nccl_and_builds_for_this_gpu() -> None:
    facts = toolchain()
    assert facts["cuda"] == torch.version.cuda
    own = Path(torch.__file__).parent.parent / "nvidia/nccl/include/nccl.h"
    if lacks := facts["cuda_lacks"]:
        assert "nccl.h" not in lacks or not own.is_file()
        pytest.skip(lacks)
    assert facts["architectures"] is not None
    assert "".join(map(str, gpu_facts()["capability"])) in facts["architectures"].split(",")


def test_horovod_shares_one_nccl_with_torch_and_is_patched(with_nccl: dict[str, Any]) -> None:
    assert with_nccl["cuda"]
    assert with_nccl["free"], "built before the timeline's patch: `dlbench setup horovod`"
    assert len(with_nccl["libraries"]) <= 1, "two NCCLs in one process"


def test_nccl_and_horovods_kernels_compute(with_nccl: dict[str, Any]) -> None:
    said = in_a_process(_SUMS)
    assert said == {"scaled": True, "device": "cuda:0", "fused": True, "own": 499_500.0}


def test_horovod_waits_for_the_gpu_only_while_its_timeline_is_open(with_nccl: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    said = in_a_process(_PATHS, str(file))
    for found in said.values():
        assert found["busy"] > 0.3, "the GPU was not kept busy"
    # Open, it must wait: else this test could not tell the two ways apart. 0.05 s had passed before.
    assert said["open"]["waited"] > 0.5 * said["open"]["busy"]
    for when in ("before", "after"):
        assert said[when]["waited"] < 0.25 * said[when]["busy"], f"waits on the host {when} the window"
    timeline = parse_timeline(file.read_text())
    assert timeline.epoch_us is not None
    assert not timeline.is_torn
    assert timeline.methods == {"NCCL_ALLREDUCE": 1, "GLOO_ALLREDUCE": 1}


def test_one_rank_trains_whatever_horovod_was_built_with(loaded: dict[str, Any], tmp_path: Path) -> None:
    said = in_a_process(_STEP, str(tmp_path / "rendezvous.json"))
    assert said["moved"] == [[1.5] * 4] * 2
    assert said["operations"] == ["nccl" if loaded["nccl"] else "gloo"]

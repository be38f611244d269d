"""On a real GPU: which device a rank takes, its UUID and place, cores beside it, NCCL's log, memory that ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dlbench.machine.gpus import BY_BUS, ORDER, gpu_trouble, gpus_of_node
from dlbench.node.devices import parsed, rank_gpu
from dlbench.node.out_of_core.device_memory import fits_in_memory, largest_batch

pytestmark = pytest.mark.gpu


@pytest.mark.gpu_process
def test_nvml_and_cuda_name_the_same_gpus_in_the_same_order() -> None:
    """In a process of its own: the order must be set before CUDA starts."""
    code = (
        "import os\nfrom pathlib import Path\n"
        "from dlbench.machine.gpus import gpus_of_node\n"
        "told = gpus_of_node(os.environ)\n"
        "import torch\nfrom dlbench.node.devices import rank_gpu\n"
        "found = [rank_gpu(torch.device('cuda', n)) for n in range(torch.cuda.device_count())]\n"
        "assert [one.uuid for one in told] == [one.uuid for one in found], (told, found)\n"
        "known = [rank_gpu(torch.device('cuda', n), one) for n, one in enumerate(told)]\n"
        "buses = [one.pci_bus_id for one in found]\n"
        "assert all(a in (None, b.pci_bus_id) for a, b in zip(buses, known)), (buses, known)\n"
    )
    environment = {**os.environ, ORDER: BY_BUS}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_gpu_is_named_and_answers() -> None:
    gpu = rank_gpu(torch.device("cuda", 0))
    assert gpu is not None
    assert gpu.uuid[:4] in ("GPU-", "MIG-")
    assert gpu.visible == torch.cuda.device_count()
    assert 0 not in gpu.no_peer_access
    if not gpu.is_slice:
        assert gpu_trouble(gpu.uuid) == ""


def test_where_a_gpu_is_the_kernel_knows() -> None:
    for gpu in gpus_of_node({**os.environ, ORDER: BY_BUS}):
        assert Path("/sys/bus/pci/devices", gpu.pci_bus_id).is_dir()
        assert (gpu.numa_node is None) == (not gpu.cores)


NCCL = """
import os, tempfile, torch, torch.distributed as dist
from dlbench.node.devices import NcclLog
log = NcclLog()
store = dist.TCPStore("127.0.0.1", 0, 1, True)
device = torch.device("cuda", 0)
torch.cuda.set_device(device)
dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
dist.all_reduce(torch.ones(1 << 20, device=device))
torch.cuda.synchronize()
told = log.read()
assert told is not None, log.why
assert told["version"], told
assert "NCCL_DEBUG" not in os.environ
dist.destroy_process_group()
log.close()
"""


@pytest.mark.gpu_process
def test_nccl_tells_its_version_in_its_log() -> None:
    """One rank has no ways to others; several GPUs are needed for those."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NCCL_")}
    done = subprocess.run([sys.executable, "-c", NCCL], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert parsed(["x [0] NCCL INFO NCCL version 2.27.3+cuda12.9"]).version == "2.27.3+cuda12.9"


def test_the_batch_that_fits_is_found_on_the_device() -> None:
    """Half of the memory is taken; a batch of rows then fits in what is left, and one row more does not."""
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()
    row_bytes = torch.cuda.mem_get_info(device)[0] // 64
    model = torch.nn.Linear(1, 1).to(device)

    def loss_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = model(batch["x"][:1, :1]).sum()
        return found

    def batch_of(rows: int) -> dict[str, torch.Tensor]:
        return {"x": torch.zeros(rows, row_bytes // 4, device=device)}

    fits = fits_in_memory(model, loss_of, batch_of, device, reserved_bytes=32 * row_bytes)
    fit = largest_batch(fits, 64)
    assert fit.is_largest
    assert 24 <= fit.batch <= 32
    assert fits(fit.batch)
    assert not fits(fit.batch + 1)

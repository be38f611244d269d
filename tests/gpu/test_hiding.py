"""A run of pytest for GPUs shows them to torch; what is hidden means the CPU, and driver and mode are known."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from dlbench.machine.arithmetic import has_gpu
from dlbench.machine.gpus import driver_version, gpus_of_node, hidden_gpus, is_given_gpu, nvml_session, restricted_mode

pytestmark = pytest.mark.gpu


def test_a_run_for_gpus_computes_on_one() -> None:
    assert torch.cuda.device_count() >= 1
    # 1 + 2 + ... + 1,000, exact in fp32.
    assert torch.arange(1001, dtype=torch.float32, device="cuda").sum().item() == 500_500


def test_a_gpu_that_torch_sees_is_given_to_this_process() -> None:
    assert has_gpu()
    assert is_given_gpu()
    assert hidden_gpus() is None


@pytest.mark.parametrize("hides", ["", "-1"])
def test_a_hidden_gpu_means_the_cpu(hides: str) -> None:
    code = (
        "from dlbench.machine.gpus import hidden_gpus, is_given_gpu\n"
        "from dlbench.node.devices import device_for\n"
        "from tests.node.test_devices import place, plan_of\n"
        "assert not is_given_gpu() and hidden_gpus() is None\n"
        "assert device_for(plan_of('none'), place(0, 1)).type == 'cpu'\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": hides}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_kernel_module_and_nvml_name_one_driver() -> None:
    with nvml_session() as nvml:
        if nvml is None:
            pytest.skip("no NVML: its package (nvidia-ml-py), its library or the driver is missing")
        assert driver_version() == nvml.nvmlSystemGetDriverVersion()


def test_compute_modes_are_answered_for() -> None:
    """An exclusive mode may be set here; then this process is the one that computes, unless its number is another's."""
    for gpu in gpus_of_node(os.environ):
        assert restricted_mode(gpu.uuid).partition(",")[0] in ("", "exclusive process mode", "prohibited mode")

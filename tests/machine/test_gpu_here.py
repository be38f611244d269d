"""Whether ranks started here would find a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlbench.machine.arithmetic import has_gpu


@pytest.mark.parametrize("visible", [None, "0", "1,0", " 3", "GPU-8932f937-d72c", "MIG-2a6f", "0,-1"])
@pytest.mark.parametrize("device", ["nvidiactl", "kfd"])
def test_a_driver_s_device_file_is_a_gpu(tmp_path: Path, device: str, visible: str | None) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert not has_gpu(tmp_path, environment)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / device).touch()
    assert has_gpu(tmp_path, environment)


@pytest.mark.parametrize("visible", ["", "-1", "-1,0", "NoDevFiles", "none"])
def test_a_list_that_names_none_hides_every_gpu(tmp_path: Path, visible: str) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    assert not has_gpu(tmp_path, {"CUDA_VISIBLE_DEVICES": visible})


def test_tests_see_no_gpu_nor_does_what_they_start() -> None:
    code = "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "''" == repr(os.environ["CUDA_VISIBLE_DEVICES"])
    assert not has_gpu()

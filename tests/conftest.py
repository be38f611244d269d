"""Fixtures that many tests share."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser_fixtures import browser
from tests.slurm_fixtures import slurm_box, slurm_can_run, slurm_folder

__all__ = ["browser", "slurm_box", "slurm_can_run", "slurm_folder"]

ROOT = Path(__file__).resolve().parents[1]

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Runs ``dlbench`` as a user does: a process of its own, in a folder of its own."""

    def call(
        *arguments: str | Path, cwd: Path = tmp_path, timeout: float = 300, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if k not in ("DLBENCH_PATH", "COLUMNS")}
        return subprocess.run(
            [sys.executable, "-m", "dlbench", *map(str, arguments)],
            cwd=cwd,
            env={**environment, **variables},
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    return call


@pytest.fixture
def horovod_installed() -> None:
    """Skips the test that asks for it where Horovod is not installed."""
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed: `dlbench setup horovod` builds it")

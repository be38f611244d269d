"""A real Slurm cluster for the whole test session; what needs it is skipped, with the reasons, where none can run."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlbench.jobs.box.box import Box, check_requirements


@pytest.fixture(scope="session")
def slurm_can_run() -> None:
    """Skips the test that asks for it where no box can run."""
    missing = check_requirements()
    if missing:
        pytest.skip("no Slurm in a box: " + "; ".join(missing))


@pytest.fixture
def slurm_folder(slurm_can_run: None) -> Iterator[Path]:
    """A new folder that a box can live in: pytest's own may be too deep for Slurm's sockets."""
    with tempfile.TemporaryDirectory(prefix="dlbench-box-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def slurm_box(slurm_can_run: None) -> Iterator[Box]:
    """Two nodes with two processors each. Leave no job behind, and no limit on its links."""
    folder = Path(tempfile.mkdtemp(prefix="dlbench-box-", dir="/tmp"))
    # Where start or stop fails, the folder stays for its logs.
    with Box.start(folder) as box:
        yield box
    shutil.rmtree(folder)

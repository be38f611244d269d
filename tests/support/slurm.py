"""A real Slurm cluster for the whole test session; what needs it is skipped, with the reasons, where none can run."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.slurm_box.box import Box, check_requirements
from tests.slurm_box.config import Equipment

WHOLE = Equipment(
    gres=("gpu:a100:4",),
    features=("a100,nvlink",),
    partitions=("batch", "debug Nodes=n1 MaxTime=30"),
    switches=1,
    memory_mb=8000,
    accounting=True,
    accounts=("lab",),
    qos=("low", "high Preempt=low"),
    users=("nobody",),
    preempt="qos",
)
"""All that a box can have."""


@pytest.fixture(scope="session")
def slurm_can_run() -> None:
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


@pytest.fixture(scope="session")
def whole_box(slurm_can_run: None) -> Iterator[Box]:
    """A box with all that a box can have, in a folder that other users can enter."""
    if lacks := check_requirements(WHOLE):
        pytest.skip("; ".join(lacks))
    folder = Path(tempfile.mkdtemp(prefix="dlbench-box-", dir="/tmp"))
    folder.chmod(0o755)
    has = replace(WHOLE, switches=2)
    with Box.start(folder / "box", has=has) as box:
        yield box
    shutil.rmtree(folder)

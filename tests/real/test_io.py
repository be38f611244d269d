"""`dlbench io` with real readers: on a small data set, and interrupted."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.conftest import Cli
from tests.support.leftovers import interrupt
from tests.support.volumes import write_volumes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough of them that no repeat is over at once."""
    folder = tmp_path_factory.mktemp("data") / "volumes"
    write_volumes(folder, 64, seed=1)
    return folder


@pytest.mark.nightly
def test_readers_are_measured_cold_and_warm(cli: Cli, volumes: Path) -> None:
    done = cli("io", "cosmoflow", "--preset", "ci", "--data", volumes, "--seconds", "0.2", "--repeats", "1", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    cold, warm = found["supplies"]
    assert warm["in_force"]
    assert warm["samples_per_s"]["value"] > 0
    assert warm["fetch_share"]["value"] + warm["prepare_share"]["value"] == pytest.approx(1)
    # Nobody but root may empty the page cache for certain.
    assert cold["in_force"] or cold["samples_per_s"] is None
    assert [need["demand"]["accelerator"] for need in found["needs"]] == ["H100", "A100", "V100"]


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_reader_leaves_nothing(tmp_path: Path, volumes: Path, number: int) -> None:
    words = ["io", "cosmoflow", "--preset", "ci", "--data", str(volumes), "--ranks", "2", "--seconds", "60"]
    interrupt([*words, "--set", "data.loader_workers=1"], number, tmp_path, processes=6)

"""`dlbench memory plan` with a real profile: of a small network, of none, and interrupted; and `dlbench layer`."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.conftest import Cli
from tests.support.leftovers import interrupt

pytestmark = pytest.mark.slow

SMALL = ("cosmoflow", "--preset", "ci", "--set", "model.input_size=32", "--batch", "2")


def test_a_chain_is_measured_by_a_process_of_its_own_and_planned(cli: Cli, tmp_path: Path) -> None:
    words = ("--set", f"train.memory.swap_folder={tmp_path}", "--capacity", "95%", "--json")
    done = cli("memory", "plan", *SMALL, *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "measuring cosmoflow (ci), 2 volumes per step\n"
    found = json.loads(done.stdout)
    assert found["measured"]["device"].startswith("cpu, ")
    assert found["chain"]["batch"] == 2
    names = [unit["name"] for unit in found["chain"]["units"]]
    assert names[0] == "features.0"
    assert sum(unit["saved_bytes"] + unit["input_bytes"] for unit in found["chain"]["units"]) > 1 << 20
    assert found["rates"]["out_bytes_per_s"] > 0
    assert found["plan"]["predicted"]["peak_bytes"] <= found["capacity_bytes"] < found["in_core_bytes"]
    assert list(tmp_path.iterdir()) == []


def test_a_layer_is_timed_by_the_same_program(cli: Cli) -> None:
    done = cli("layer", *SMALL[:-2], "--parts", "2", "--repeats", "1", "--json")
    assert done.returncode == 0, done.stderr
    whole, *parts = json.loads(done.stdout)["measured"]["parts"]
    assert [part["cut"] for part in (whole, *parts)] == ["whole", "filters", "channels", "extent"]
    assert all(min(seconds) > 0 for part in parts for seconds in part["seconds"].values())


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_profile_leaves_nothing(tmp_path: Path, number: int) -> None:
    words = ["memory", "plan", "resnet50", "--preset", "ci", "--batch", "256", "--capacity", "50%"]
    interrupt(words, number, tmp_path, processes=3)

"""`dlbench memory plan` with a program at its boundary that answers as the profile would; what its settings refuse."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from pydantic import ValidationError

from dlbench.cli import cli
from dlbench.errors import ExitCode
from dlbench.jobs import node_program
from dlbench.records.out_of_core import MemoryProfile
from dlbench.specs.out_of_core import MemorySpec
from dlbench.specs.training import OptimizerSpec, TrainSpec
from tests.support.out_of_core_factory import MIB, RATES, a_chain, method_plans, write_memory_run
from tests.support.programs import Answering, answer_with, one_line

CHAIN = a_chain(32)
ANSWER = MemoryProfile(
    format="dlbench.memory-profile", device="cpu, 2 threads", chain=CHAIN, rates=RATES, warnings=("it was warm",)
).model_dump_json()


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Answering:
    return partial(answer_with, monkeypatch, tmp_path / "profile.py")


def plan(*words: object) -> Result:
    return CliRunner().invoke(cli, ["memory", "plan", *map(str, words)])


def refused(*words: object, code: ExitCode = ExitCode.USAGE) -> str:
    return one_line(plan(*words), code)


def test_a_workload_is_measured_planned_and_told_in_eighty_columns(
    answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(f"import sys\nassert '\"batch_per_rank\": 32' in sys.stdin.read()\nprint({ANSWER!r})")
    monkeypatch.setattr("socket.gethostname", lambda: "n0")
    result = plan("resnet50", "--preset", "ci", "--batch", 32, "--capacity", "20MiB")
    assert result.exit_code == 0, result.exception
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "Measured on this machine (n0), cpu, 2 threads; to a file on node-local disk" in result.stdout
    for title in ("The plan", "Methods with batch 32"):
        assert title in lines


def test_the_plan_of_the_json_keeps_to_its_capacity_and_says_what_else_would(answering: Answering) -> None:
    answering(f"print({ANSWER!r})")
    found = json.loads(plan("resnet50", "--preset", "ci", "--capacity", "50%", "--json").stdout)
    assert (found["format"], found["version"]) == ("dlbench.memory-plan", 1)
    assert found["in_core_bytes"] == 41 * MIB
    assert found["capacity_bytes"] == round(20.5 * MIB)
    assert found["plan"]["predicted"]["peak_bytes"] <= found["capacity_bytes"]
    assert max(one["end_s"] for one in found["operations"]) == pytest.approx(found["plan"]["predicted"]["pass_s"])
    assert [block["number"] for block in found["blocks"]] == list(range(len(found["plan"]["blocks"])))
    in_core = next(one for one in found["methods"] if one["method"] == "in core")
    assert not in_core["fits"]
    assert in_core["pass_s"] == pytest.approx(CHAIN.useful_s)
    # All but the state is in proportion to the batch.
    assert found["in_core_batch"] == int((20.5 - 4) / (37 / 32))
    fits = {one["batch"]: one["fits"] for one in found["by_batch"] if one["method"] == "in core"}
    assert all(is_in == (batch <= found["in_core_batch"]) for batch, is_in in fits.items())
    assert len(fits) > 4


def test_a_capacity_that_no_plan_fits_ends_with_the_smallest_that_would(answering: Answering) -> None:
    answering(f"print({ANSWER!r})")
    line = refused("resnet50", "--preset", "ci", "--capacity", "6MiB", code=ExitCode.ENVIRONMENT)
    assert "does not fit into 6 MiB with any plan" in line
    smallest = int(re.findall(r"needs at least (\d+) B", line)[0])
    assert plan("resnet50", "--preset", "ci", "--capacity", smallest).exit_code == 0
    refused("resnet50", "--preset", "ci", "--capacity", smallest - 1, code=ExitCode.ENVIRONMENT)


def test_a_finished_run_is_planned_anew_without_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_program, "supervised", lambda python, module: ["/nowhere"])
    (planned,) = method_plans([("planned", "planned")], batches=(32,), repeats=1)
    (in_core,) = method_plans([("none", "none")], batches=(32,), repeats=1)
    told = write_memory_run(tmp_path, planned)
    write_memory_run(tmp_path, in_core)
    folder = tmp_path / planned.run_id
    found = json.loads(plan(folder, "--json").stdout)
    assert found["plan"] == told.plan.model_dump(mode="json")
    assert found["measured"]["where"] == f"run {planned.run_id}"
    larger = json.loads(plan(folder, "--batch", 64, "--capacity", "30MiB", "--json").stdout)
    assert larger["chain"]["batch"] == 64
    assert larger["in_core_bytes"] == (4 + 2 * 37) * MIB
    assert "Scaled from the measured 32 to 64" in larger["measured"]["warnings"][0]
    assert "did not recompute or swap" in refused(tmp_path / in_core.run_id)
    assert "--preset: has no effect on a finished run" in refused(folder, "--preset", "ci")
    assert "--capacity lots: is no size" in refused(folder, "--capacity", "lots")


def test_a_page_has_the_schedule_drawn(answering: Answering, tmp_path: Path) -> None:
    answering(f"print({ANSWER!r})")
    page = tmp_path / "plan.html"
    assert plan("resnet50", "--preset", "ci", "--capacity", "20MiB", "-o", page).exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert "chart-memory-plan-lanes" in text


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["resnet50"], "give --capacity"),
        (["resnet50", "--capacity", "lots"], "capacity"),
        (["resnet50", "--capacity", "0"], "must be more than no bytes"),
        (["resnet50", "--capacity", "1GiB", "--set", "train.swap=none"], "--set train.swap: is set by this command"),
        (["resnet50", "--capacity", "1GiB", "--json", "-o", "a.json"], "--json and -o exclude each other"),
        (["resnet50", "--capacity", "1GiB", "-o", "a.csv"], "an unknown suffix '.csv'"),
        (["nope", "--capacity", "1GiB"], "unknown workload"),
    ],
)
def test_wrong_requests_are_one_line(words: list[str], answer: str) -> None:
    assert answer in refused(*words)


def test_blocks_are_a_list_or_a_text() -> None:
    wanted = ("layers.0", "layers.8")
    assert MemorySpec(blocks="layers.0, layers.8").blocks == wanted  # type: ignore[arg-type]
    assert MemorySpec(blocks=wanted).blocks == wanted
    assert MemorySpec(blocks="").blocks == ()  # type: ignore[arg-type]


def test_a_capacity_is_bytes_or_a_share_of_training_in_core() -> None:
    assert MemorySpec(capacity="2KiB").capacity_bytes(10_000) == 2048
    assert MemorySpec(capacity="50%").capacity_bytes(10_000) == 5000
    assert MemorySpec().capacity_bytes(10_000) is None
    for text in ("0%", "x%", "1.2.3%", "0B", "2000%"):
        with pytest.raises(ValidationError):
            MemorySpec(capacity=text)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"recompute": "planned"}, "needs memory.capacity"),
        ({"recompute": "blocks", "swap": "planned", "memory": {"capacity": "50%"}}, "exclude each other"),
        ({"recompute": "planned", "swap": "offload", "memory": {"capacity": "50%"}}, "exclude each other"),
        ({"activation_budget": 0.5}, "needs compile default"),
        ({"activation_budget": 0.5, "compile": "default", "swap": "offload"}, "recompute and swap none"),
        ({"cuda_graphs": "network", "compile": "default"}, "exclude each other"),
        ({"cuda_graphs": "network", "optimizer_state": "host"}, "exclude each other"),
        ({"cuda_graphs": "network", "recompute": "blocks"}, "cuda_graphs network needs recompute and swap none"),
        ({"compile": "max-autotune", "swap": "offload"}, "compile max-autotune needs recompute and swap none"),
        ({"cuda_graphs": "network", "gradient_accumulation": 2}, "needs gradient_accumulation 1"),
        ({"compile": "reduce-overhead", "gradient_accumulation": 4}, "needs gradient_accumulation 1"),
    ],
)
def test_methods_that_do_not_go_together_are_refused(given: dict[str, object], said: str) -> None:
    optimizer = OptimizerSpec(name="sgd", learning_rate=0.1)
    with pytest.raises(ValidationError, match=said):
        TrainSpec(batch_per_rank=4, optimizer=optimizer, **given)  # type: ignore[arg-type]

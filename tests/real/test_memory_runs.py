"""Runs that save memory: recomputing, swapping, planned memory, updates on the host."""

from __future__ import annotations

import json
import secrets
import signal
from pathlib import Path

import pytest

from dlbench.errors import ExitCode
from dlbench.jobs.scripts.launch import local_environments, resolve
from dlbench.records.folder import create, prepare_output
from dlbench.records.record import Record
from dlbench.records.rows.spans import LANES, SWAP, SpanReader
from dlbench.records.rows.steps import read_steps
from dlbench.records.scan import Run
from tests.conftest import Cli
from tests.support.forked_runs import planned, rank, run_forked
from tests.support.forks import run_ranks
from tests.support.leftovers import interrupt
from tests.support.run_factory import record_of

pytestmark = pytest.mark.slow

SMALL = (
    *("--preset", "ci", "--set", "system.launch.pin=false", "--set", "layout.cores_per_rank=1"),
    *("--set", "measure.warmup_steps=2", "--set", "measure.measured_steps=3"),
)
COSMOFLOW = ("cosmoflow", *SMALL)
ALONE = ("--engine", "single", "--ranks", "1")
PLANNED = ("train.recompute=planned", "train.swap=planned", "train.memory.capacity=90%")


def settings(folder: Path, *keys: str) -> tuple[str, ...]:
    """Options; whatever swaps does so to the folder."""
    given = list(keys)
    if any(key.startswith("train.swap=") for key in keys):
        given.append(f"train.memory.swap_folder={folder}")
    return tuple(word for key in given for word in ("--set", key))


def run_of(folder: Path, series: str, *words: str | Path) -> tuple[Run, Record]:
    (run,) = run_forked(*words, "--series", series, "--out", folder / "runs")
    assert run.record is not None, run.detail
    assert run.state == "valid", run.detail
    return run, run.record


def left_behind(run: Run) -> tuple[object, ...]:
    """Losses of every rank and step, and parameters, to the last bit."""
    assert run.record is not None
    losses = [tuple(read_steps(run.folder.steps(one)).steps["loss"]) for one in range(run.plan.layout.ranks)]
    return (losses, [result.final_parameters_sha256 for result in run.record.ranks])


def test_a_run_says_what_its_activations_did(tmp_path: Path) -> None:
    words = (*COSMOFLOW, *ALONE)
    in_core, plain = run_of(tmp_path, "core", *words)
    for attempt in range(3):
        swapped, record = run_of(tmp_path, f"swap-{attempt}", *words, *settings(tmp_path, "train.swap=streamed"))
        (told,), predicted = record.memory.ranks, record.memory.plan.predicted
        if told.swapped_in_bytes and told.device_peak_bytes <= 1.1 * predicted.peak_bytes:
            break  # else the disk was slower than when it was measured, and more stayed
    assert left_behind(swapped) == left_behind(in_core)
    assert plain.memory is None
    # Both treat freed memory alike, and say how.
    assert plain.environment["memory.allocator"] == record.environment["memory.allocator"]

    memory = record.memory
    assert memory.tier == memory.rates.tier
    assert str(tmp_path) in memory.tier
    assert told.steps == 3
    # What has not left when it is needed again stays: a slow disk moves less than was planned.
    assert 0 < told.swapped_in_bytes <= told.swapped_out_bytes <= 3 * predicted.swapped_bytes
    assert told.activation_peak_bytes
    assert told.activation_peak_bytes <= memory.in_core_bytes - memory.chain.fixed_bytes
    # By every tensor that came and went in the first step, those included that left for the disk.
    assert told.device_peak_bytes == record.ranks[0].held.peak
    assert "not seen to be released" not in record.ranks[0].held.evidence
    assert told.device_peak_bytes <= 1.1 * predicted.peak_bytes
    # Peaks are those of the measured steps, by the kernel's own count of the process.
    assert record.ranks[0].peak_memory_bytes == record.ranks[0].peak_resident_bytes
    assert not any("does not let it begin anew" in text for text in record.warnings)
    assert {span.lane for span in memory.timeline} == {"compute", "out", "in"}
    assert {setting.key: setting.effective for setting in record.settings}["train.swap"] == "streamed"
    assert record.inert == ()
    assert not list(tmp_path.glob("*swap*"))

    reader = SpanReader(path=swapped.folder.spans(0))
    seen = {(LANES[row["lane"]], int(row["track"])) for rows in reader.blocks() for row in rows if row["lane"] == SWAP}
    assert {("swap", 1), ("swap", 2)} <= seen


@pytest.mark.horovod
@pytest.mark.parametrize("engine", ["horovod", pytest.param("ddp", marks=pytest.mark.nightly)])
def test_two_ranks_under_a_plan_train_as_in_core(tmp_path: Path, engine: str, horovod_installed: None) -> None:
    words = (*COSMOFLOW, "--engine", engine, "--ranks", "2", "--set", "train.gradient_accumulation=2")
    in_core, _ = run_of(tmp_path, "core", *words)
    under, record = run_of(tmp_path, "plan", *words, *settings(tmp_path, *PLANNED))
    assert left_behind(under) == left_behind(in_core)
    memory = record.memory
    assert [one.rank for one in memory.ranks] == [0, 1]
    assert all(one.steps == 3 and not one.over_budget_bytes for one in memory.ranks)
    assert memory.parts == 2
    assert any(block.decision != "keep" for block in memory.plan.blocks)
    assert record.exchange is not None
    # How much of it hides is the machine's affair; that it is timed under a plan too is ours.
    assert engine != "horovod" or record.exchange.hidden_s is not None


def ends(folder: Path, *words: str | Path, **variables: str) -> tuple[int, str]:
    """How a run of one rank ends, and what it says; with more variables in its environment."""
    (plan,), out = planned(*words, "--series", "end", "--out", folder / "runs")
    run = create(prepare_output(out), plan)
    environments = [resolve(one) | variables for one in local_environments(plan, secrets.token_hex(8))]
    logs = folder / "logs"
    logs.mkdir()
    codes, said = run_ranks(rank, [str(run.plan)], environments, logs)
    return codes[0], said[0]


def test_a_block_that_is_none_is_named_with_its_nearest(tmp_path: Path) -> None:
    keys = ("train.recompute=blocks", "train.memory.blocks=feature.3")
    code, said = ends(tmp_path, *COSMOFLOW, *ALONE, *settings(tmp_path, *keys))
    assert code == ExitCode.USAGE
    assert "train.memory.blocks" in said
    assert "did you mean features.3" in said


@pytest.mark.nightly
@pytest.mark.parametrize(
    "workload",
    [
        # With fewer samples the optimizer's update is what takes most, and nothing can be saved.
        ("resnet50", "--set", "train.batch_per_rank=24"),
        ("bert", "--set", "model.num_layers=24", "--set", "model.hidden_size=64", "--set", "model.num_heads=4"),
        ("bert", "--set", "train.precision=bf16", "--set", "train.allow_emulation=true"),
    ],
    ids=["resnet50", "deep bert", "bf16"],
)
@pytest.mark.parametrize(
    "keys",
    [
        ("train.recompute=blocks",),
        ("train.swap=offload",),
        ("train.swap=streamed", "train.memory.verify=true"),
        ("train.recompute=blocks", "train.swap=streamed"),
        ("train.recompute=planned", "train.swap=planned", "train.memory.capacity=97%"),
    ],
    ids=["blocks", "offload", "streamed", "blocks streamed", "planned"],
)
def test_every_method_trains_as_in_core(tmp_path: Path, workload: tuple[str, ...], keys: tuple[str, ...]) -> None:
    words = (*workload, *SMALL, *ALONE)
    in_core, _ = run_of(tmp_path, "core", *words)
    other, _ = run_of(tmp_path, "other", *words, *settings(tmp_path, *keys))
    assert left_behind(other) == left_behind(in_core)


@pytest.mark.nightly
@pytest.mark.parametrize("keys", [(), ("train.recompute=blocks", "train.memory.blocks=features.0,features.6")])
def test_compiled_losses_are_those_of_eager(
    tmp_path: Path, keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a second run loads the programs that the first one made, which both say."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "programs"))
    eager, _ = run_of(tmp_path, "eager", *COSMOFLOW, *ALONE)
    compiled, record = run_of(
        tmp_path, "compiled", *COSMOFLOW, *ALONE, *settings(tmp_path, "train.compile=default", *keys)
    )
    first, second = (read_steps(run.folder.steps(0)).steps["loss"] for run in (eager, compiled))
    assert first == pytest.approx(second, rel=1e-4)
    (setting,) = [setting for setting in record.settings if setting.key == "train.compile"]
    assert setting.effective == "default"
    assert setting.evidence.endswith("in the warm-up" if keys else "before the first step")
    assert not any("compiled in measured steps" in text for text in record.warnings)
    _, again = run_of(tmp_path, "again", *COSMOFLOW, *ALONE, *settings(tmp_path, "train.compile=default", *keys))
    cold, warm = record.ranks[0].compiling, again.ranks[0].compiling
    assert cold is not None
    assert warm is not None
    assert (cold.from_cache, warm.from_cache) == (0, cold.programs)
    assert cold.programs == warm.programs > 1


TINY_COSMOFLOW = ("cosmoflow", "--preset", "ci", "--set", "model.input_size=32", "--batch", "2")


def test_a_chain_is_measured_by_a_process_of_its_own_and_planned(cli: Cli, tmp_path: Path) -> None:
    words = ("--set", f"train.memory.swap_folder={tmp_path}", "--capacity", "95%", "--json")
    done = cli("memory", "plan", *TINY_COSMOFLOW, *words)
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
    done = cli("layer", *TINY_COSMOFLOW[:-2], "--parts", "2", "--repeats", "1", "--json")
    assert done.returncode == 0, done.stderr
    whole, *parts = json.loads(done.stdout)["measured"]["parts"]
    assert [part["cut"] for part in (whole, *parts)] == ["whole", "filters", "channels", "extent"]
    assert all(min(seconds) > 0 for part in parts for seconds in part["seconds"].values())


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_profile_leaves_nothing(tmp_path: Path, number: int) -> None:
    words = ["memory", "plan", "resnet50", "--preset", "ci", "--batch", "256", "--capacity", "50%"]
    interrupt(words, number, tmp_path, processes=3)


SHORT = (
    *("--ranks", "2", "--preset", "ci", "--set", "train.batch_per_rank=2", "--set", "layout.cores_per_rank=1"),
    *("--set", "measure.warmup_steps=5", "--set", "measure.measured_steps=2", "--set", "system.launch.pin=false"),
)
CASES = {
    "ddp": ("--engine", "ddp"),
    "horovod": ("--engine", "horovod"),
    # Buffers that hold gradients are arranged anew in the warm-up, the second time after its fourth step.
    "own exchange": ("--engine", "ddp", "--set", "sync.fusion=own:mgwfbp"),
}


@pytest.mark.horovod
@pytest.mark.usefixtures("horovod_installed")
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.nightly) if case == "ddp" else case for case in CASES]
)
def test_two_ranks_train_the_same_numbers(case: str, tmp_path: Path) -> None:
    found = {}
    for where in ("device", "host"):
        setting = ("--set", f"train.optimizer_state={where}")
        (run,) = run_forked("cosmoflow", *SHORT, *CASES[case], *setting, "--series", where, "--out", tmp_path / where)
        found[where] = record_of(run)
    device, host = found["device"], found["host"]
    assert [r.final_parameters_sha256 for r in host.ranks] == [r.final_parameters_sha256 for r in device.ranks]
    assert device.host_update is None
    assert host.host_update.update_s > 0
    assert host.host_update.copied_bytes == 0
    assert any("only the overlap is tested" in text for text in host.warnings)
    assert [s.effective for s in host.settings if s.key == "train.optimizer_state"] == ["host"]

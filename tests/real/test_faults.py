"""Faults of real ranks, planted or not, and training out of core that cannot be: the cause is told first."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from dlbench.errors import ExitCode, UserError
from dlbench.jobs.scripts.launch import local_environments, resolve
from dlbench.node.data.sharding import ShardedOrder
from dlbench.node.training import checks
from dlbench.node.training import optional_parts as fault_module
from dlbench.node.training.optional_parts import InjectedFault
from dlbench.records.folder import RunFolder, create, prepare_output
from dlbench.records.record import RankResult, Record
from dlbench.records.registry import describe
from dlbench.records.rows.steps import read_steps
from dlbench.records.scan import Run, scan
from dlbench.records.status import read_statuses
from dlbench.specs.plan import RunPlan
from dlbench.specs.watch import FaultSpec
from tests.conftest import Cli
from tests.support import forked_runs
from tests.support.datasets import encode
from tests.support.forked_runs import planned, run_forked
from tests.support.forks import run_ranks
from tests.support.run_factory import constant, differences, plans, write_run

COSMO = ("run", "cosmoflow", "--preset", "ci", "--data", "synthetic", "--set", "train.batch_per_rank=2")
SHORT = ("--set", "measure.warmup_steps=1", "--set", "measure.measured_steps=3", "--set", "layout.cores_per_rank=1")

DELAY_S = 0.01


def slept_at_least(fault: InjectedFault, seconds: float) -> bool:
    # time.sleep never ends early by the monotonic clock (PEP 475, and its documentation).
    return fault.injected_s >= seconds


# --- what is said -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "ranks"), [(1, (1,)), ("1", (1,)), ("3,0", (0, 3)), ([2, 1], (1, 2)), ((5,), (5,)), (None, None)]
)
def test_ranks_are_numbers_or_text_with_commas(said: object, ranks: tuple[int, ...] | None) -> None:
    spec = FaultSpec.model_validate({"ranks": said, "step_delay_s": 0.1})
    assert spec.ranks == ranks
    assert FaultSpec.model_validate(spec.model_dump(mode="json")) == spec
    assert [rank for rank in range(6) if spec.acts_on(rank)] == list(range(6) if ranks is None else ranks)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"ranks": "1;2", "step_delay_s": 0.1}, "separated by commas"),
        ({"ranks": "-1", "step_delay_s": 0.1}, "separated by commas"),
        ({"ranks": -1, "step_delay_s": 0.1}, "greater than or equal to 0"),
        ({"ranks": True, "step_delay_s": 0.1}, "tuple"),
        ({"ranks": "1,1", "step_delay_s": 0.1}, "twice"),
        ({"ranks": [], "step_delay_s": 0.1}, "at least 1"),
        ({"compute_factor": 0.9}, "greater than or equal to 1"),
        ({"ranks": 1}, "sets no fault"),
        ({}, "sets no fault"),
    ],
)
def test_a_fault_that_is_none_is_refused(said: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        FaultSpec.model_validate(said)


def test_a_fault_on_a_rank_that_no_run_has_is_refused_and_one_that_some_have_is_not() -> None:
    on_rank_1 = {"fault.step_delay_s": 0.1, "fault.ranks": 1}
    assert [plan.fault for plan in plans(points=(1, 2), repeats=1, overrides=on_rank_1)] == [
        FaultSpec(ranks=(1,), step_delay_s=0.1)
    ] * 2
    with pytest.raises(UserError) as caught:
        plans(points=(1, 2), repeats=1, overrides={**on_rank_1, "fault.ranks": "1,2"})
    assert str(caught.value).startswith("fault.ranks: rank 2 is in no run")
    assert len(str(caught.value).splitlines()) == 1


def one(**overrides: Any) -> RunPlan:
    (plan,) = plans(points=(2,), repeats=1, overrides=overrides)
    return plan


def test_a_fault_is_told_with_every_figure(tmp_path: Path) -> None:
    plan = one(**{"fault.compute_factor": 1.3, "fault.ranks": 1, "fault.input_delay_s": 0.04})
    (text,) = checks.planned_warnings(plan)
    for words in ("a fault is injected on purpose on rank 1:", "1.3 times as long", "delayed by 40 ms"):
        assert words in text
    assert checks.planned_warnings(one()) == []
    (alone,) = plans(points=(1, 2), repeats=1, overrides={"fault.ranks": 1, "fault.step_delay_s": 0.1})[:1]
    assert "on none of the ranks of this run" in checks.planned_warnings(alone)[0]
    write_run(tmp_path, plan, constant([1.0] * 6))
    (healthy,) = plans(points=(2,), repeats=1, series="s2")
    write_run(tmp_path, healthy, constant([1.0] * 6))
    faulty, sound = sorted(scan(tmp_path).runs, key=lambda run: run.plan.fault is None)
    assert describe(sound)["fault"] == ""
    assert [line for line in differences(faulty, sound) if line.startswith("Planted fault: ranks=[1]")] != []


# --- what it does -----------------------------------------------------------------------------------------------------


def batches(count: int) -> Iterator[dict[str, torch.Tensor]]:
    for number in range(count):
        yield {"x": torch.full((1, 2), float(number))}


def test_batches_come_later_and_only_measured_ones_count() -> None:
    fault = InjectedFault(FaultSpec(input_delay_s=DELAY_S), rank=0)
    delayed = fault.around_batches(batches(5))
    seen = [next(delayed), next(delayed)]
    assert fault.injected_s == 0
    fault.begin_measuring()
    seen += list(delayed)
    assert [int(batch["x"][0, 0]) for batch in seen] == [0, 1, 2, 3, 4]
    assert slept_at_least(fault, 3 * DELAY_S)


def test_steps_end_later() -> None:
    fault = InjectedFault(FaultSpec(step_delay_s=DELAY_S), rank=0)
    fault.end_step()
    fault.begin_measuring()
    for _ in range(4):
        fault.end_step()
    assert slept_at_least(fault, 4 * DELAY_S)


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    value: torch.Tensor = model(batch["x"]).sum()
    return value


@given(factor=st.floats(1.001, 5), forward_ns=st.integers(1, 10**9))
def test_computation_takes_the_factor_as_long_backward_counted_as_two_forwards(factor: float, forward_ns: int) -> None:
    """With a clock of its own: a forward pass takes `forward_ns`, sleeping takes what it is told."""
    now, slept = [0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += round(seconds * 1e9)

    def forward(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        now[0] += forward_ns
        return loss(model, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fault_module.time, "sleep", sleep)
        patch.setattr(fault_module.time, "monotonic_ns", lambda: now[0])
        fault = InjectedFault(FaultSpec(compute_factor=factor), rank=0)
        fault.begin_measuring()
        model, batch = nn.Linear(2, 1), next(batches(1))
        slow = fault.around_loss(forward)
        assert torch.equal(slow(model, batch), loss(model, batch))
        # (forward + sleep + backward) / (forward + backward) with a backward pass of two forward ones.
        assert (3 * forward_ns / 1e9 + slept[0]) / (3 * forward_ns / 1e9) == pytest.approx(factor)
        assert fault.injected_s == pytest.approx(slept[0], abs=1e-9)


def never(seconds: float) -> None:
    raise AssertionError(f"slept {seconds} s")


def test_other_ranks_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_module.time, "sleep", never)
    spec = FaultSpec(ranks=(1,), compute_factor=2.0, input_delay_s=1.0, step_delay_s=1.0)
    fault = InjectedFault(spec, rank=0)
    fault.begin_measuring()
    assert fault.around_loss(loss) is loss
    assert len(list(fault.around_batches(batches(3)))) == 3
    fault.end_step()
    assert fault.injected_s == 0


# --- ranks that train apart -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"sync.wire": "fp16"}, "sync.wire has no effect"),
        ({"sync.fusion": "own:single"}, "sync.fusion has no effect"),
        ({"sync.fusion": "auto"}, "--set sync.fusion: has no effect"),
        ({"engine.horovod.cycle_time_ms": 2.0}, "--set engine.horovod.cycle_time_ms: has no effect"),
        ({"checkpoint.every_steps": 2}, "leave out checkpoints"),
        ({"measure.noise_scale": True}, "needs averaged gradients"),
    ],
)
def test_what_has_no_meaning_without_exchange_is_refused(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        plans(points=(2,), repeats=1, engine="horovod", overrides={"sync.exchange": "none", **overrides})
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_one_rank_has_nothing_to_go_without() -> None:
    with pytest.raises(UserError, match="has no effect in any run"):
        plans(points=(1,), repeats=1, overrides={"sync.exchange": "none"})
    assert len(plans(points=(1, 2), repeats=1, overrides={"sync.exchange": "none"})) == 2


def result(rank: int, final: str) -> RankResult:
    return RankResult.model_validate(
        {
            "rank": rank,
            "node_rank": 0,
            "host": "n0",
            "device": "cpu",
            "cores": [rank],
            "threads": 1,
            "pinned": True,
            "samples": 48,
            "measured_s": 1.0,
            "first_loss": 2.0,
            "last_loss": 1.0,
            "losses_finite": True,
            "initial_parameters_sha256": "0" * 64,
            "final_parameters_sha256": final * 64,
            "peak_memory_bytes": 1,
            "startup_s": 1.0,
            "bad_sample_count": 0,
        }
    )


@pytest.mark.parametrize(
    ("exchange", "finals", "name", "passed"),
    [
        ("none", "12", "parameters apart", True),
        ("none", "11", "parameters apart", False),
        ("flat", "11", "identical parameters", True),
        ("flat", "12", "identical parameters", False),
    ],
)
def test_ranks_end_apart_exactly_where_they_exchange_nothing(
    exchange: str, finals: str, name: str, passed: bool
) -> None:
    plan = one(**({"sync.exchange": "none"} if exchange == "none" else {}))
    made = checks.check(plan, [result(rank, final) for rank, final in enumerate(finals)], measured_steps=12)
    found = {check.name: check.passed for check in made}
    assert found.pop(name) is passed
    assert all(found.values())
    assert any("not exchanged" in text for text in checks.planned_warnings(plan)) is (exchange == "none")


# --- real ranks -------------------------------------------------------------------------------------------------------


def only_record(folder: Path) -> tuple[Run, Record]:
    (run,) = scan(folder).runs
    assert run.record is not None, run.detail
    assert run.state == "valid", run.detail
    return run, run.record


def measured_s(run: Run, rank: int, column: Callable[[Any], Any]) -> float:
    return float(column(read_steps(run.folder.steps(rank)).measured).sum()) / 1e9


@pytest.mark.slow
def test_a_fault_on_one_of_two_ranks_adds_what_it_says(tmp_path: Path) -> None:
    delays = ("--set", "fault.input_delay_s=0.05", "--set", "fault.step_delay_s=0.03")
    factor = ("--set", "fault.compute_factor=1.5", "--set", "fault.ranks=1")
    run_forked(*COSMO[1:], "--out", tmp_path, "--engine", "ddp", "--ranks", "2", *SHORT, *delays, *factor)
    run, record = only_record(tmp_path)
    sound, slow = record.ranks
    assert sound.planted_s == 0
    waited = measured_s(run, 1, lambda steps: steps["input_ns"])
    assert waited >= 3 * 0.05
    forward = measured_s(run, 1, lambda steps: steps["forward_ns"])
    between = measured_s(run, 1, lambda steps: steps["step_ns"]) - sum(
        measured_s(run, 1, lambda steps, phase=phase: steps[f"{phase}_ns"])
        for phase in ("input", "h2d", "forward", "backward", "exchange", "optimizer")
    )
    assert between >= 3 * 0.03
    # Slept a little longer than asked for, and half of three forward passes besides; all of it within these phases.
    assert 3 * (0.05 + 0.03) < slow.planted_s <= waited + forward + between
    assert any(text.startswith("a fault is injected on purpose on rank 1:") for text in record.warnings)


def assert_trained_apart(run: Run, record: Record) -> None:
    assert len({rank.initial_parameters_sha256 for rank in record.ranks}) == 1
    assert len({rank.final_parameters_sha256 for rank in record.ranks}) == 2
    assert record.exchange is None
    assert record.inert == ()
    assert {s.key: (s.requested, s.effective) for s in record.settings}["sync.exchange"] == ("none", "none")
    assert describe(run)["exchange"] == "exchange=none"
    assert any("gradients are not exchanged" in text for text in record.warnings)


@pytest.mark.nightly
@pytest.mark.slow
def test_two_ranks_of_ddp_train_apart(cli: Cli, tmp_path: Path) -> None:
    done = cli(*COSMO, "--engine", "ddp", "--ranks", "2", *SHORT, "--set", "sync.exchange=none")
    assert done.returncode == 0, done.stderr
    assert_trained_apart(*only_record(tmp_path / "runs"))


@pytest.mark.horovod
@pytest.mark.slow
def test_two_ranks_of_horovod_train_apart(tmp_path: Path, horovod_installed: None) -> None:
    parts = ("--set", "train.gradient_accumulation=2")
    apart = ("--set", "sync.exchange=none")
    run_forked(*COSMO[1:], "--out", tmp_path, "--engine", "horovod", "--ranks", "2", *SHORT, *parts, *apart)
    assert_trained_apart(*only_record(tmp_path))


BATCH = 2
TWO_RANKS = (
    *("--preset", "ci", "--ranks", "2", "--no-progress", "--set", "layout.cores_per_rank=1"),
    *("--set", "measure.warmup_steps=1", "--set", f"train.batch_per_rank={BATCH}"),
)
DDP = (*TWO_RANKS, "--engine", "ddp")
ENDLESS = ("--set", "measure.measured_steps=100000", "--set", "measure.stall_timeout_s=20")


def images(folder: Path, bad_of: int | None = None) -> Path:
    """Two classes of JPEGs; one that rank `bad_of` of two meets in its third step is cut off."""
    for label in range(2):
        (folder / f"class{label}").mkdir(parents=True)
        for number in range(16):
            (folder / f"class{label}" / f"{number:02}.jpg").write_bytes(encode((64, 64, 3), seed=100 * label + number))
    if bad_of is not None:
        order = ShardedOrder(32, batch_size=BATCH, rank=bad_of, world_size=2, seed=0)
        batches = order.batches()
        third = [next(batches) for _ in range(3)][2]
        path = sorted(folder.rglob("*.jpg"))[third[0][1]]
        path.write_bytes(path.read_bytes()[:200])
    return folder


def only_run(folder: Path) -> Run:
    (found,) = scan(folder).runs
    return found


def started(root: Path, rank: int, stage: str = "measuring") -> int:
    """Process id of a rank, once it measures."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for run in scan(root).runs if root.is_dir() else []:
            for status in run.statuses:
                if status.rank == rank and status.stage == stage:
                    return status.pid
        time.sleep(0.1)
    raise AssertionError(f"rank {rank} never came to {stage}")


@contextmanager
def running(tmp_path: Path, *words: str | Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "dlbench", "run", *map(str, words), "--out", str(tmp_path / "runs")]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        with process:
            yield process
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("bad_of", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_bad_sample_is_told_alike_whichever_rank_meets_it(cli: Cli, tmp_path: Path, bad_of: int) -> None:
    data = images(tmp_path / "images", bad_of)
    done = cli("run", "resnet50", *DDP, "--data", data, "--repeats", "2", "--set", "measure.measured_steps=4")
    # Wrong data is wrong for the second run, too.
    assert done.returncode == 2, done.stderr
    run = only_run(tmp_path / "runs")
    assert run.detail.startswith(f"rank {bad_of} on ")
    assert "failed at step 2: " in run.detail
    assert ".jpg" in run.detail
    assert run.detail.endswith("; 1 other rank ended with it")
    assert run.detail in done.stderr
    (other,) = (status for status in run.statuses if status.rank != bad_of)
    assert (other.failure, other.exit_code) == ("peer", 3)
    assert len(other.reason) < 300  # one line of Gloo's, of two that it has
    said = run.folder.log(other.rank).read_text()  # and there all that torch said
    assert "Connection closed by peer" in said or "Connection reset by peer" in said


@pytest.mark.nightly
@pytest.mark.slow
def test_a_stopped_rank_has_not_vanished(tmp_path: Path) -> None:
    with running(tmp_path, "bert", *DDP, "--data", "synthetic", *ENDLESS) as process:
        os.kill(started(tmp_path / "runs", 1), signal.SIGSTOP)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 124
    assert "rank 1 on " in errors
    assert "was stopped (state T" in errors
    assert "vanished" not in errors


MEMORY_V1 = Path("/sys/fs/cgroup/memory")


@pytest.mark.nightly
@pytest.mark.slow
def test_a_rank_that_the_kernel_kills_for_want_of_memory_is_told_with_the_limit(cli: Cli, tmp_path: Path) -> None:
    group = MEMORY_V1 / f"dlbench-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(700 << 20))
    except OSError:
        pytest.skip("no cgroup of version 1 can be made here")
    try:
        words = ("bert", *TWO_RANKS[:-2], "--engine", "ddp", "--data", "synthetic", "--set", "train.batch_per_rank=256")
        command = [sys.executable, "-m", "dlbench", "run", *words, "--out", str(tmp_path / "runs")]
        script = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        done = subprocess.run(
            ["bash", "-c", script, "bash", *command], capture_output=True, text=True, timeout=200, check=False
        )
    finally:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                group.rmdir()
                break
            except OSError:  # its processes are still ending
                time.sleep(0.2)
    assert done.returncode == 3
    assert "out-of-memory killer" in done.stderr
    assert "the cgroup's limit is 700 MiB (memory.limit_in_bytes)" in done.stderr


def in_namespace(kind: str, script: str, *words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs `dlbench run ...` after a bash script in a namespace of its own."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", kind, "true"], check=False).returncode != 0:
        pytest.skip(f"unshare {kind} is not possible here")
    command = [sys.executable, "-m", "dlbench", "run", *map(str, words), "--out", str(cwd / "runs")]
    return subprocess.run(
        ["unshare", kind, "bash", "-euc", f'{script}; "$@"', "bash", *command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


SMALL = "mount -t tmpfs -o size={size} none /dev/shm"


MEASURING = "grep -qs measuring runs/*/node-0000.status.json"
OURS = "[ $p/cwd -ef . ] && grep -qs ^python $p/comm"
LOADERS = f"for p in /proc/[0-9]*; do {OURS} && grep -qs forkserver $p/cmdline && break; done"


def filled(path: str, when: str = MEASURING) -> str:
    """In the background, for two minutes at most: once that is so, fills the disk of this path."""
    wait = f"for i in {{1..12000}}; do {when} && break; sleep 0.01; done"
    # Again and again: what others set free meanwhile.
    fill = f"for i in {{1..6000}}; do cat /dev/zero >> {path}; sleep 0.01; done"
    return f"({wait}; {fill}) > /dev/null 2>&1 & true"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        SMALL.format(size="256k"),
        # When loader processes start: later they need no more, as batches use the memory of earlier ones.
        f"{SMALL.format(size='8m')}; {filled('/dev/shm/x', LOADERS)}",
    ],
    ids=["small", "full"],
)
def test_shared_memory_that_is_too_small_ends_a_run_at_once(tmp_path: Path, script: str) -> None:
    data = images(tmp_path / "images")
    loaders = ("--set", "data.loader_workers=1", "--set", "measure.measured_steps=100000")
    began = time.monotonic()
    done = in_namespace("-m", script, "resnet50", *DDP, *loaders, "--data", data, cwd=tmp_path)
    assert done.returncode == 5, done.stderr
    assert "/dev/shm" in done.stderr
    assert "make it larger (containers: --shm-size)" in done.stderr
    assert time.monotonic() - began < 120  # the stall limit is 600


KILL_ALL = f"for p in /proc/[0-9]*; do {OURS} && kill -9 ${{p#/proc/}}; done"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("wait_s", [0.0, 0.2, 1.0, 5.0])
def test_all_killed_at_once_leave_nothing_in_shared_memory(tmp_path: Path, wait_s: float) -> None:
    """Launcher, supervisors, ranks, loader processes and resource trackers, some time after the first loader."""
    data = images(tmp_path / "images")
    await_loader = f"for i in {{1..12000}}; do {LOADERS} && break; sleep 0.01; done"
    kill = f"(set +e; {await_loader}; sleep {wait_s}; for i in 1 2 3; do {KILL_ALL}; done) > /dev/null 2>&1 &"
    script = f"{SMALL.format(size='256m')}; {kill} trap 'wait; ls /dev/shm > left' EXIT"
    loaders = ("--set", "data.loader_workers=2", "--set", "measure.measured_steps=100000")
    done = in_namespace("-m", script, "resnet50", *DDP, *loaders, "--data", data, cwd=tmp_path)
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert (tmp_path / "left").read_text() == ""


@pytest.mark.nightly
@pytest.mark.slow
def test_a_full_disk_in_mid_run_is_told_with_the_rank_and_the_file(tmp_path: Path) -> None:
    script = (
        f"mkdir runs; mount -t tmpfs -o size=400k none runs; {filled('runs/x')}; trap 'cp -r runs kept; rm kept/x' EXIT"
    )
    words = ("bert", *DDP, "--data", "synthetic", "--set", "measure.measured_steps=100000")
    done = in_namespace("-m", script, *words, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "No space left on device" in done.stderr
    run = only_run(tmp_path / "kept")
    assert run.state == "failed"
    assert run.detail.startswith("rank ")
    assert "No space left on device" in run.detail


SWAPPED = (
    *("cosmoflow", "--preset", "ci", "--engine", "single", "--ranks", "1", "--set", "train.batch_per_rank=2"),
    # Endless: a rank that is not refused is killed.
    *("--set", "measure.warmup_steps=1", "--set", "measure.measured_steps=100000"),
    *("--set", "layout.cores_per_rank=1", "--set", "system.launch.pin=false"),
)
STREAMED = ("--set", "train.swap=streamed")


def start(
    tmp_path: Path, *words: str | Path, meanwhile: Callable[[RunFolder], None] = lambda _: None
) -> tuple[int, str, RunFolder]:
    """Exit code and output of the one rank of a run, and its folder; `meanwhile` is called while it runs."""
    (plan,), out = planned(*SWAPPED, *words, "--out", tmp_path / "runs")
    folder = create(prepare_output(out), plan)
    environments = [resolve(one) for one in local_environments(plan, secrets.token_hex(8))]
    logs = tmp_path / "logs"
    logs.mkdir()
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(run_ranks, forked_runs.rank, [str(folder.plan)], environments, logs)
        meanwhile(folder)
        (code,), (said,) = ended.result()
    assert not folder.record.exists()
    return code, said, folder


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """A small file system of its own, or the test is skipped."""
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "swap", folder], check=False).returncode:
        pytest.skip("a file system can only be mounted by root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_capacity_that_is_too_small_ends_with_the_smallest_that_would_do(tmp_path: Path) -> None:
    where = ("--set", f"train.memory.swap_folder={tmp_path}", "--set", "train.swap=planned")
    code, said, _ = start(tmp_path, *where, "--set", "train.memory.capacity=1MiB")
    assert code == ExitCode.ENVIRONMENT
    (line,) = [line for line in said.splitlines() if line.startswith("dlbench: error:")]
    assert "does not fit" in line
    assert "needs at least" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "runs"]


@pytest.mark.parametrize(
    ("options", "words"),
    [(None, "no such file or directory"), ("ro", "is not writable"), ("size=1m", "1 mib are free")],
)
def test_a_swap_folder_that_cannot_be_used_is_named(options: str | None, words: str, tmp_path: Path) -> None:
    folder = tmp_path / "swap"
    if options is None:
        code, said, _ = start(tmp_path, *STREAMED, "--set", f"train.memory.swap_folder={folder}")
    else:
        with tmpfs(folder, options):
            code, said, _ = start(tmp_path, *STREAMED, "--set", f"train.memory.swap_folder={folder}")
            assert list(folder.iterdir()) == []
    assert code == ExitCode.ENVIRONMENT
    (line,) = [line for line in said.splitlines() if line.startswith("dlbench: error:")]
    assert str(folder) in line
    assert words in line.lower()


def test_a_rank_that_is_killed_while_it_swaps_leaves_no_file_and_no_process(tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    processes: list[int] = []

    def kill(folder: RunFolder) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            told = next(iter(read_statuses(folder)), None)
            if told is not None and told.stage == "measuring":
                break
            time.sleep(0.02)
        else:
            pytest.fail("the rank never measured")
        rank = told.pid
        processes.extend([rank, *_children(rank)])
        assert _has_nameless_file(rank, swap)
        os.kill(rank, signal.SIGKILL)

    code, _, _ = start(tmp_path, *STREAMED, "--set", f"train.memory.swap_folder={swap}", meanwhile=kill)
    assert code == -signal.SIGKILL
    assert list(swap.iterdir()) == []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in processes):
        time.sleep(0.05)
    assert [pid for pid in processes if Path(f"/proc/{pid}").exists()] == []


def _children(process: int) -> list[int]:
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(one) for one in found]


def _has_nameless_file(process: int, folder: Path) -> bool:
    """Whether a process holds a file of a folder that has no name there."""
    links = [str(link.readlink()) for link in Path(f"/proc/{process}/fd").iterdir()]
    return any(link.startswith(str(folder)) and link.endswith("(deleted)") for link in links)

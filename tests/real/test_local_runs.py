"""Local runs, reading of files, interruption."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from dlbench.datasets.making.catalogue import prepare_demo_data
from dlbench.errors import ExitCode
from dlbench.records.rows.steps import PHASES, read_steps
from dlbench.records.scan import Run, scan
from tests.conftest import Cli
from tests.support.datasets import write_volumes
from tests.support.forked_runs import run_forked
from tests.support.forks import call_dlbench, start_forks
from tests.support.horovod import require_horovod_over_mpi
from tests.support.leftovers import Leftovers, interrupt
from tests.support.run_factory import record_of
from tests.support.slow_storage import STRACE, calls_in, periods

pytestmark = pytest.mark.slow

SHORT = ("--set", "measure.warmup_steps=1", "--set", "measure.measured_steps=3")
COSMO = ("run", "cosmoflow", "--preset", "ci", "--data", "synthetic")
# As in a series that goes up to two ranks; not pinned, because other tests' ranks may be pinned there.
ONE_CORE = ("--set", "layout.cores_per_rank=1", "--set", "system.launch.pin=false")


@pytest.fixture(scope="module")
def demo_data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = prepare_demo_data(tmp_path_factory.mktemp("data"))
    return {"resnet50": made["images"], "bert": made["text"], "cosmoflow": made["density"]}


def only_runs(folder: Path, count: int) -> list[Run]:
    found = scan(folder)
    assert found.problems == []
    assert len(found.runs) == count
    return found.runs


def losses(run: Run, rank: int = 0) -> list[float]:
    return [float(x) for x in read_steps(run.folder.steps(rank)).steps["loss"]]


Series = Callable[[str], list[Run]]
"""The runs of one of SERIES, made when they are first asked for, in the order in which they ran."""

SERIES: dict[str, tuple[str, ...]] = {
    "sizes": ("--engine", "ddp", "--ranks", "1,2", "--repeats", "2", "--scaling", "strong"),
    "other seed": ("--engine", "ddp", "--ranks", "1", *ONE_CORE, "--set", "train.seed=5"),
    "bf16": (
        *("--engine", "ddp", "--ranks", "1", *ONE_CORE, "--set", "measure.phases=synchronised"),
        *("--set", "train.precision=bf16", "--set", "train.allow_emulation=true"),
    ),
}


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory, demo_data: dict[str, Path]) -> Series:
    kept: dict[str, list[Run]] = {}

    def runs(name: str) -> list[Run]:
        if name not in kept:
            out = tmp_path_factory.mktemp("series")
            words = ["cosmoflow", "--preset", "ci", "--data", str(demo_data["cosmoflow"]), *SERIES[name], *SHORT]
            if name == "sizes":
                done = call_dlbench("run", *words, "--out", out, cwd=out)
                assert done.returncode == 0, done.stderr
                kept[name] = scan(out).runs
                assert re.findall(r"^ *(\d+) ranks? ", done.stdout, re.MULTILINE) == ["1", "2"], done.stdout
                assert done.stderr.splitlines()[-1].startswith(f"next: dlbench report {out} --where series=")
            else:
                kept[name] = run_forked(*words, "--out", out)
            assert [run.state for run in kept[name]] == ["valid"] * len(kept[name])
        return kept[name]

    return runs


@pytest.mark.horovod
@pytest.mark.parametrize(
    "workload",
    ["resnet50", pytest.param("bert", marks=pytest.mark.nightly), pytest.param("cosmoflow", marks=pytest.mark.nightly)],
)
def test_two_horovod_ranks_train_on_real_input(
    cli: Cli, tmp_path: Path, demo_data: dict[str, Path], workload: str, horovod_installed: None
) -> None:
    done = cli("run", workload, "--preset", "ci", "--ranks", "2", "--data", demo_data[workload], *SHORT)
    assert done.returncode == 0, done.stderr
    (run,) = only_runs(tmp_path / "runs", 1)
    record = record_of(run)
    assert run.state == "valid"
    assert [r.samples for r in record.ranks] == [3 * run.plan.workload.train.batch_per_rank] * 2
    assert len({r.final_parameters_sha256 for r in record.ranks}) == 1
    assert record.ranks[0].initial_parameters_sha256 != record.ranks[0].final_parameters_sha256
    assert record.data["kind"] != "synthetic"
    effective = {s.key: (s.requested, s.effective) for s in record.settings}
    assert effective["sync.fusion"] == ("128MiB", "128MiB")
    assert effective["engine.horovod.cycle_time_ms"] == (1.0, 1.0)
    assert effective["engine.horovod.operations"][1] == "gloo"
    # Ranks read different samples.
    assert losses(run, 0) != losses(run, 1)


def test_every_step_of_every_rank_is_kept_raw(series: Series) -> None:
    runs = series("sizes")
    assert [r.plan.layout.ranks for r in runs] == [1, 2, 2, 1]  # there and back again
    for run in runs:
        for rank in record_of(run).ranks:
            steps = read_steps(run.folder.steps(rank.rank))
            assert steps.torn_bytes == 0
            assert list(steps.steps["step"]) == [0, 1, 2, 3]
            assert list(steps.steps["warmup"]) == [1, 0, 0, 0]
            parts = sum(steps.steps[f"{phase}_ns"] for phase in PHASES)
            assert (steps.steps["step_ns"] >= parts).all()
            assert all((steps.steps[f"{phase}_ns"] >= 0).all() for phase in PHASES)
            assert rank.measured_s == pytest.approx(steps.measured["step_ns"].sum() / 1e9)
        # Some of each: the model's work, and an exchange where there are two ranks.
        assert (steps.steps["forward_ns"] > 0).all()
        assert (steps.steps["backward_ns"] > 0).all()
        assert (steps.steps["exchange_ns"] > 0).all()


@pytest.mark.horovod
def test_mpirun_carries_horovod_over_mpi(cli: Cli, tmp_path: Path, horovod_installed: None) -> None:
    require_horovod_over_mpi()
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = cli(*COSMO, "--ranks", "2", "--launcher", "mpirun", *SHORT, **root)
    assert done.returncode == 0, done.stderr
    (run,) = only_runs(tmp_path / "runs", 1)
    assert {s.key: s.effective for s in record_of(run).settings}["engine.horovod.operations"] == "mpi"


def test_the_same_seed_gives_the_same_losses(series: Series) -> None:
    one, two, again_two, again_one = series("sizes")
    assert losses(one) == losses(again_one)
    assert [losses(two, rank) for rank in range(2)] == [losses(again_two, rank) for rank in range(2)]
    assert losses(one) != losses(series("other seed")[0])


def test_ranks_are_pinned_apart(series: Series) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")
    run = series("sizes")[1]
    first, second = (set(r.cores) for r in record_of(run).ranks)
    assert not first & second
    assert {r.threads for r in record_of(run).ranks} == {run.plan.layout.cores_per_rank}


def test_a_diverging_run_yields_no_figure(cli: Cli, tmp_path: Path) -> None:
    done = cli(*COSMO, "--engine", "single", *ONE_CORE, "--set", "train.optimizer.learning_rate=1e30", *SHORT)
    assert done.returncode == 3
    assert "finite loss" in done.stderr
    (run,) = only_runs(tmp_path / "runs", 1)
    assert run.state == "invalid"
    assert [check.name for check in record_of(run, "invalid").checks if not check.passed] == ["finite loss"]


class Running:
    """A long two-rank run with loader processes in the background, for doing harm to.

    Its working directory holds modules that must not be executed.
    """

    def __init__(self, folder: Path, data: Path, *extra: str) -> None:
        for name in ("platform", "profile", "statistics", "pynvml", "json", "torch", "sampler"):
            (folder / f"{name}.py").write_text(f"open({str(folder)!r} + '/canary-{name}', 'w')\n")
        command = [sys.executable, "-P", "-m", "dlbench", "run", "cosmoflow", "--preset", "ci", "--ranks", "2"]
        command += ["--data", str(data), "--set", "data.loader_workers=1", "--engine", "ddp", *extra]
        command += ["--set", "measure.measured_steps=100000", "--set", "measure.warmup_steps=1"]
        self.folder = folder / "runs"
        self.leftovers = Leftovers()
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=self.leftovers.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def measures(self) -> bool:
        """Waits until both ranks measure; False where the run ended before."""
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            runs = scan(self.folder).runs if self.folder.is_dir() else []
            if runs and len(runs[0].statuses) == 2 and all(s.stage == "measuring" for s in runs[0].statuses):
                return True
            if self.process.poll() is not None:
                return False
            time.sleep(0.1)
        pytest.fail("the run never came to measure")

    def wait_until_measuring(self) -> None:
        if not self.measures():
            pytest.fail(f"the run ended before it measured: {self.end()}")

    def listening(self) -> list[str]:
        launcher = psutil.Process(self.process.pid)
        connections = [one for child in launcher.children(recursive=True) for one in child.net_connections("inet")]
        return [one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN]

    def pid(self, rank: int) -> int:
        return scan(self.folder).runs[0].statuses[rank].pid

    def end(self) -> tuple[int, str]:
        """Exit code and standard error, after nothing is left of the run."""
        _, errors = self.process.communicate(timeout=120)
        assert self.leftovers.within() == []
        assert list(self.folder.parent.glob("canary-*")) == []
        return self.process.returncode, errors

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()  # which ends the ranks, too
        self.process.communicate(timeout=120)
        self.leftovers.__exit__()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(("--set", "data.staging=lazy"), id="lazy", marks=pytest.mark.nightly),
        pytest.param(("--engine", "fsdp", "--set", "data.staging=lazy"), id="fsdp", marks=pytest.mark.nightly),
        # While samples travel between the ranks, too.
        pytest.param(("--set", "data.staging=shard", "--set", "data.shuffle=partial:0.5"), id="partial shuffling"),
    ],
)
def test_a_killed_rank_ends_the_run_and_is_named(
    tmp_path: Path, demo_data: dict[str, Path], settings: tuple[str, ...]
) -> None:
    with Running(tmp_path, demo_data["cosmoflow"], *settings) as running:
        running.wait_until_measuring()
        assert set(running.listening()) == {"127.0.0.1"}
        # Kept by both ranks' loader processes, or staged; gone with the run, as `end` asserts.
        assert list(running.leftovers.folder.glob("dlb-staged-*/*/0/*"))
        assert sum("multiprocessing" in words for words in running.leftovers.processes().values()) >= 4
        os.kill(running.pid(1), signal.SIGKILL)
        code, errors = running.end()
    assert code == 3
    assert "rank 1" in errors
    assert "SIGKILL" in errors
    (run,) = only_runs(running.folder, 1)
    assert run.state == "failed"
    assert "rank 1 was the first to end, by signal SIGKILL" in run.detail


def test_a_hung_rank_is_noticed_by_the_watchdog(tmp_path: Path, demo_data: dict[str, Path]) -> None:
    # Long enough for the start, too, on a machine that does other things.
    for stall_s in (10, 30, 120):
        folder = tmp_path / str(stall_s)
        folder.mkdir()
        with Running(folder, demo_data["cosmoflow"], "--set", f"measure.stall_timeout_s={stall_s}") as running:
            is_measuring = running.measures()
            if is_measuring:
                os.kill(running.pid(1), signal.SIGSTOP)
            code, errors = running.end()
        if is_measuring:
            break
    assert is_measuring
    assert code == 124
    assert "no progress" in errors
    log = (scan(running.folder).runs[0].folder.log(0)).read_text()
    assert "Thread" in log  # where every thread stood


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_interrupting_ends_all_ranks(tmp_path: Path, demo_data: dict[str, Path], number: signal.Signals) -> None:
    """Twice, and although one of them is stopped."""
    with Running(tmp_path, demo_data["cosmoflow"]) as running:
        running.wait_until_measuring()
        os.kill(running.pid(0), signal.SIGSTOP)
        running.process.send_signal(number)
        time.sleep(0.3)
        running.process.send_signal(number)
        code, errors = running.end()
    assert "Traceback" not in errors
    (run,) = only_runs(running.folder, 1)
    assert (run.state, run.detail) == ("failed", "interrupted by the user or by a signal to dlbench")
    assert code == 130


def test_a_killed_launcher_leaves_a_readable_folder(tmp_path: Path, demo_data: dict[str, Path]) -> None:
    with Running(tmp_path, demo_data["cosmoflow"]) as running:
        running.wait_until_measuring()
        running.process.kill()
        # Ranks must not go on computing on the cores of the next measurement.
        running.end()
    (run,) = only_runs(running.folder, 1)
    assert run.state == "incomplete"
    assert "2 of 2 ranks started" in run.detail
    assert "measuring" in run.detail
    assert run.record is None


@pytest.mark.horovod
@pytest.mark.parametrize(
    "victim",
    ["mpirun", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("supervisor", "rank", "launcher"))],
)
def test_nothing_is_left_under_mpirun(
    tmp_path: Path, demo_data: dict[str, Path], victim: str, horovod_installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its session folder, its shared memory and the ranks are gone, too."""
    require_horovod_over_mpi()
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    with Running(tmp_path, demo_data["cosmoflow"], "--engine", "horovod", "--launcher", "mpirun") as running:
        running.wait_until_measuring()
        (mpirun,) = (pid for pid, words in running.leftovers.processes().items() if words.startswith("mpirun"))
        culprits = {"mpirun": mpirun, "rank": running.pid(1), "launcher": running.process.pid}
        culprits["supervisor"] = psutil.Process(mpirun).ppid()
        os.kill(culprits[victim], signal.SIGKILL)
        code, errors = running.end()
    assert code == (-signal.SIGKILL if victim == "launcher" else 3)
    if victim != "launcher":
        culprit = {"rank": "rank 1", "supervisor": "the supervisor of mpirun"}.get(victim, "mpirun")
        assert f": {culprit} was the first to end, by signal" in errors


MOST_CALLS = 100  # Of both ranks on their run's folder, from their start to their first step.
FORTY_STEPS = (
    *("--set", "measure.warmup_steps=2", "--set", "measure.measured_steps=40"),
    *("--set", "train.batch_per_rank=1"),
)


@contextmanager
def traced(process: int, out: Path) -> Iterator[None]:
    tracer = subprocess.Popen([*STRACE, "-o", str(out), "-p", str(process)], stderr=subprocess.DEVNULL)
    try:
        status = Path(f"/proc/{process}/status")
        deadline = time.monotonic() + 60
        while f"TracerPid:\t{tracer.pid}\n" not in status.read_text():
            if tracer.poll() is not None or time.monotonic() > deadline:
                pytest.skip("no process may be traced here")
            time.sleep(0.01)
        yield
    finally:
        tracer.send_signal(signal.SIGINT)
        tracer.wait(timeout=60)


def test_ranks_leave_the_shared_folder_alone_while_they_are_measured(tmp_path: Path) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    out = tmp_path / "runs"
    with traced(start_forks(), tmp_path / "trace"):
        words = ("cosmoflow", "--preset", "ci", "--ranks", "2", "--engine", "ddp", "--data", "synthetic", "--out", out)
        (run,) = run_forked(*words, *FORTY_STEPS)
    # Of both ranks together, but for loading Python.
    calls = calls_in(tmp_path / "trace", [run.folder.path])
    first, begin, end = periods(run, 0)
    assert 0 < sum(at < first for at, _, _ in calls) <= MOST_CALLS
    # The sampler opens its file once, when it has started: ranks that import nothing may be measuring by then.
    assert [call for call in calls if begin <= call[0] < end and not call[2].endswith(".samples")] == []
    assert sorted(path.name for path in run.folder.path.glob("*.status.json")) == ["node-0000.status.json"]


BOUND_S = 240


def begun(out: Path, *words: str, engine: str = "ddp") -> subprocess.Popen[str]:
    """`dlbench run` with two ranks that would train for long; returns when a measured step has begun."""
    command = [sys.executable, "-P", "-m", "dlbench", "run", "resnet50", "--preset", "ci", "--ranks", "2"]
    command += ["--out", str(out), "--data", "synthetic", "--engine", engine]
    command += ["--set", "measure.measured_steps=1000", "--set", "measure.warmup_steps=1"]
    command += words
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    deadline = time.monotonic() + BOUND_S
    while not any("measuring" in path.read_text() for path in out.glob("*/node-*.status.json")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return process


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp", marks=pytest.mark.nightly)])
def test_sigusr1_to_one_rank_ends_all_after_one_step_with_a_checkpoint(tmp_path: Path, engine: str) -> None:
    process = begun(tmp_path, "--set", "checkpoint.every_steps=3", engine=engine)
    try:
        second = next(status for status in only_runs(tmp_path, 1)[0].statuses if status.rank == 1)
        os.kill(second.pid, signal.SIGUSR1)
        said = process.communicate(timeout=BOUND_S)[1]
    finally:
        process.kill()
    assert process.returncode == ExitCode.REQUEUE, said
    (run,) = only_runs(tmp_path, 1)
    assert run.state == "interrupted"
    step = run.interrupted.step
    assert run.interrupted.checkpoint == f"step-{step:08d}.safetensors"
    assert (run.folder.checkpoints / run.interrupted.checkpoint).exists()
    assert f"interrupted after step {step} of attempt 1" in said
    assert [status.exit_code for status in run.statuses] == [75, 75]


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

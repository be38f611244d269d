"""What watching leaves of real runs, with every engine; that it changes nothing, and that nothing of it stays."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlbench.node.part import plan_schedule
from dlbench.node.training.checks import watch_warnings, with_layers_noted
from dlbench.node.training.run import Rank
from dlbench.node.watching.spans import ANCHOR
from dlbench.records.exchange import ExchangeResult
from dlbench.records.folder import RunFolder, create
from dlbench.records.rows.steps import PHASES, read_steps
from dlbench.records.scan import Run, read_run
from dlbench.records.status import RankStatus, read_statuses
from dlbench.records.watch import WatchResult
from dlbench.specs.plan import RunPlan
from tests.records.rows.test_spans import Seen, read_spans
from tests.support.datasets import write_volumes
from tests.support.forked_runs import run_forked
from tests.support.one_rank import context_of
from tests.support.run_factory import plans, record_of

STAGES = ["starting", "building", "warm-up", "measuring", "finishing"]
SMALL: dict[str, Any] = {"conv_channels": (2, 3, 4, 5, 6), "dense_sizes": (8, 4), "dropout": 0.1}
SLACK_NS = 1_000_000
"""Horovod's timeline counts whole microseconds and begins where a wall clock said."""


# --- one rank, in this process


def plan_of(series: str, **overrides: Any) -> RunPlan:
    settings = {"measure.warmup_steps": 4, "measure.measured_steps": 3, "watch.sampler": False, **overrides}
    return plans(
        workload="cosmoflow", preset="ci", points=(1,), repeats=1, engine="single", series=series, overrides=settings
    )[0]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def density(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("density") / "train"
    write_volumes(folder, 24, seed=0)
    return folder


def trained(out: Path, series: str, data: Path | None = None, **overrides: Any) -> Run:
    """A run of one rank without a launcher; what begins with `watch` is set past the checks of a request."""
    watch = {key.removeprefix("watch."): value for key, value in overrides.items() if key.startswith("watch.")}
    plan = plan_of(series, **{key: value for key, value in overrides.items() if not key.startswith("watch.")})
    plan = plan.model_copy(update={"watch": plan.watch.model_copy(update=watch)})
    parts: dict[str, Any] = {"model": plan.workload.model.model_copy(update=SMALL)}
    if data is not None:
        parts["data"] = plan.workload.data.model_copy(update={"source": str(data)})
    plan = plan.model_copy(update={"workload": plan.workload.model_copy(update=parts)})
    folder = create(out, plan)
    context = context_of(plan, folder)
    try:
        Rank(context).train()
    finally:
        context.watch.close()
    return read_run(folder.path)


def watch_of(run: Run) -> WatchResult:
    found = record_of(run).watch
    assert found is not None
    return found


def lane(spans: list[Seen], name: str) -> list[Seen]:
    return [span for span in spans if span.lane == name]


def within_steps(run: Run, rank: int, spans: list[Seen], phases: tuple[str, ...], slack_ns: int = 0) -> None:
    """Whether spans lie in the named neighbouring phases of their own steps, by the step file."""
    steps = read_steps(run.folder.steps(rank)).steps
    for span in spans:
        row = steps[span.step]
        assert row["warmup"] == 1
        before = sum(int(row[f"{phase}_ns"]) for phase in PHASES[: PHASES.index(phases[0])])
        start = int(row["start_ns"]) + before
        end = start + sum(int(row[f"{phase}_ns"]) for phase in phases)
        assert start - slack_ns <= span.start_ns <= span.end_ns <= end + slack_ns, span


def test_every_layer_of_the_window_lies_in_its_step_and_phase(tmp_path: Path) -> None:
    run = trained(tmp_path, "one")
    spans = read_spans(run.folder.spans(0))
    stages = lane(spans, "stage")
    assert [span.name for span in stages] == STAGES
    assert all(one.end_ns == other.start_ns for one, other in itertools.pairwise(stages))
    layers = lane(spans, "compute")
    assert {span.step for span in layers} == {1, 2, 3}
    forward = [span for span in layers if span.name.startswith("forward ")]
    backward = [span for span in layers if span.name.startswith("backward ")]
    assert len(forward) == len(backward) == len(layers) / 2
    within_steps(run, 0, forward, ("forward",))
    within_steps(run, 0, backward, ("backward",))
    for step in (1, 2, 3):
        order = sorted((span for span in layers if span.step == step), key=lambda span: span.start_ns)
        assert all(one.end_ns <= other.start_ns for one, other in itertools.pairwise(order))
        names = [span.name.split()[1] for span in order]
        half = len(names) // 2
        assert names[half:] == names[:half][::-1]
        assert names[0] == "features.0"
    steps = read_steps(run.folder.steps(0)).steps
    (warmup,) = (span for span in stages if span.name == "warm-up")
    (measuring,) = (span for span in stages if span.name == "measuring")
    assert warmup.start_ns <= steps["start_ns"][0] < warmup.end_ns <= steps["start_ns"][4] < measuring.end_ns
    assert (steps["start_ns"] + steps["step_ns"])[-1] <= measuring.end_ns
    found = watch_of(run)
    assert (found.window_ranks, found.window_first_step, found.window_num_steps) == ((0,), 1, 3)
    assert (found.num_spans, found.dropped_spans, found.nodes) == (len(spans), 0, ())
    assert found.trace_bytes == run.folder.node_spans(0).stat().st_size
    assert (found.overhead.low, found.overhead.high, found.overhead.num_pairs) == (0.0, 0.0, 0)


WAYS: dict[str, dict[str, Any]] = {
    "unwatched": {"watch.window_steps": 0},
    "watched": {},
    "profiled": {"watch.profiler": True, "watch.window_steps": 4},
}


def test_training_is_the_same_to_the_bit_watched_or_not(tmp_path: Path) -> None:
    runs = [trained(tmp_path, name, **{"train.gradient_accumulation": 2, **way}) for name, way in WAYS.items()]
    ends = [record_of(run).ranks[0].final_parameters_sha256 for run in runs]
    losses = [read_steps(run.folder.steps(0)).steps["loss"].tolist() for run in runs]
    assert len(set(ends)) == 1
    assert losses[0] == losses[1] == losses[2]
    layers = [len(lane(read_spans(run.folder.spans(0)), "compute")) for run in runs[1:]]
    # Two parts per batch, 3 steps (the first is left out), and the profile's anchor.
    assert layers[0] == layers[1] - 1 > 0
    (doubt,) = record_of(runs[2]).warnings
    assert doubt == (
        "watch.window_steps 4: layers could be profiled in only 3 steps: the warm-up has 4 steps, of which the "
        "first is not profiled; set measure.warmup_steps to 8"
    )


def test_a_profile_stands_beside_the_spans(tmp_path: Path) -> None:
    run = trained(tmp_path, "profiled", **{"watch.profiler": True})
    spans = lane(read_spans(run.folder.spans(0)), "compute")
    content = json.loads(run.folder.profile(0).read_text())
    (anchor,) = (span for span in spans if span.name == ANCHOR)
    (mark,) = (entry for entry in content["traceEvents"] if entry.get("name") == ANCHOR and entry.get("ph") == "X")
    shift_ns = anchor.start_ns - mark["ts"] * 1e3
    # The longer, the busier the machine was at the anchor.
    slack_ns = anchor.end_ns - anchor.start_ns + SLACK_NS
    kernels = [e for e in content["traceEvents"] if e.get("cat") == "cpu_op" and e["name"] == "aten::conv3d"]
    forward = [span for span in spans if span.name == "forward features.0"]
    first = sorted(e["ts"] for e in kernels)[:: len(SMALL["conv_channels"])]
    assert len(forward) == len(first) == 3
    for span, at in zip(forward, first, strict=True):
        # Each call of the layer has its convolution, once the profile's clock is set on this one.
        assert span.start_ns - slack_ns <= at * 1e3 + shift_ns <= span.end_ns + slack_ns


def test_reading_and_pauses_have_spans(tmp_path: Path, density: Path) -> None:
    run = trained(tmp_path, "read", density, **{"checkpoint.every_steps": 2})
    spans = read_spans(run.folder.spans(0))
    reads = lane(spans, "input")
    assert {(span.name, span.track) for span in reads} == {("read batch", 1)}
    # Read in the training process, a batch is read within the step that trains with it.
    assert [span.step for span in reads] == [1, 2, 3]
    within_steps(run, 0, reads, ("input",))
    stages = lane(spans, "stage")
    assert [span.name for span in stages] == [
        *("starting", "building", "warm-up", "checkpoint", "warm-up", "checkpoint", "warm-up"),
        *("measuring", "checkpoint", "measuring", "checkpoint", "measuring", "finishing"),
    ]
    assert all(one.end_ns == other.start_ns for one, other in itertools.pairwise(stages))
    steps = read_steps(run.folder.steps(0)).steps
    for pause in (span for span in stages if span.name == "checkpoint"):
        for row in steps:
            assert not row["start_ns"] < pause.start_ns < row["start_ns"] + row["step_ns"]


# --- what the record says of the exchange


def exchange(**changes: Any) -> ExchangeResult:
    plain = {
        "carrier": "gloo",
        "by": "backend",
        "exchange": "flat",
        "fusion": "128MiB",
        "wire": "fp32",
        "group_size": 1,
        "num_groups": 2,
        "window_steps": 3,
        "evidence": "seen",
    }
    return ExchangeResult.model_validate({**plain, **changes})


@pytest.mark.parametrize(
    ("warmup", "settings", "changes", "is_mixed"),
    [
        (4, {}, {}, True),
        (6, {}, {}, True),
        (7, {}, {}, False),
        (4, {"watch.window_steps": 0}, {}, False),
        (4, {}, {"by": "dlbench"}, False),
        (4, {}, {"window_steps": 0}, False),
        (4, {"sync.fusion": "own:mgwfbp"}, {}, False),
    ],
)
@pytest.mark.parametrize("profiler", [False, True])
def test_times_of_the_exchange_tell_what_lengthened_them(
    warmup: int, settings: dict[str, Any], changes: dict[str, Any], is_mixed: bool, profiler: bool
) -> None:
    plan = plans(points=(2,), repeats=1, engine="ddp", overrides={"measure.warmup_steps": warmup, **settings})[0]
    plan = plan.model_copy(update={"watch": plan.watch.model_copy(update={"profiler": profiler})})
    course = plan_schedule(plan, first=0, batches_per_epoch=None)
    result = with_layers_noted(plan, course, exchange(**changes))
    assert (result.evidence != "seen") == is_mixed
    doubts = [text for text in watch_warnings(plan, course, [], result) if "makes it slower" in text]
    assert len(doubts) == int(is_mixed and profiler)
    assert all(text.endswith("set measure.warmup_steps to 7") for text in doubts)


# --- what the record says watching cost


# --- real ranks

Runs = Callable[[str], Run]

ENGINES: dict[str, tuple[str, ...]] = {
    "ddp": ("--engine", "ddp", "--set", "sync.fusion=64KiB"),
    "horovod": ("--engine", "horovod", "--set", "engine.horovod.cycle_time_ms=5.0"),
    "own": ("--engine", "ddp", "--set", "sync.fusion=own:100kB"),
    "timed": ("--engine", "ddp", "--set", "measure.warmup_s=1.0", "--set", "measure.measured_s=2.0"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A run of two ranks with an engine, made when it is first asked for."""
    out = tmp_path_factory.mktemp("runs")
    kept: dict[str, Run] = {}

    def run(name: str) -> Run:
        if name not in kept:
            (kept[name],) = run_forked(
                *("cosmoflow", "--preset", "ci", "--data", "synthetic", "--ranks", "2", "--series", name),
                *("--out", out, "--set", "train.batch_per_rank=1", "--set", "measure.measured_steps=4"),
                *("--set", "measure.warmup_steps=4", "--set", "watch.period_s=0.1"),
                *ENGINES[name],
            )
        return kept[name]

    return run


ENGINE = pytest.mark.parametrize(
    "engine",
    [
        pytest.param("ddp", marks=pytest.mark.slow),
        pytest.param("horovod", marks=[pytest.mark.slow, pytest.mark.horovod]),
        pytest.param("own", marks=pytest.mark.slow),
    ],
)


@ENGINE
def test_messages_of_the_window_are_all_gradients_once(runs: Runs, engine: str, request: pytest.FixtureRequest) -> None:
    if engine == "horovod":
        request.getfixturevalue("horovod_installed")
    run = runs(engine)
    record = record_of(run)
    # A ring of two ranks sends each vector once.
    assert record.exchange.bytes_inside == record.gradient_bytes
    for rank in range(2):
        spans = read_spans(run.folder.spans(rank))
        messages = lane(spans, "exchange")
        if engine == "horovod" and rank == 1:
            assert messages == []  # its timeline is rank 0's
            continue
        assert {span.step for span in messages} == {1, 2, 3}
        for step in (1, 2, 3):
            own = [span for span in messages if span.step == step]
            assert sum(span.num_bytes for span in own) == record.gradient_bytes
            assert sum(int(span.name.split(", ")[1].split()[0]) for span in own) == 16
            assert [span.track for span in own] == list(range(len(own)))
            # How many Horovod finds in a cycle of its thread is up to the machine.
            assert len(own) > 1 or engine == "horovod"
        assert all(span.queued_ns >= 0 for span in messages)
        within_steps(run, rank, messages, ("backward", "exchange"), slack_ns=SLACK_NS)
        # A message was ready within the backward pass.
        ready = [
            Seen(**{**vars(span), "start_ns": span.start_ns - span.queued_ns, "end_ns": span.start_ns - span.queued_ns})
            for span in messages
        ]
        within_steps(run, rank, ready, ("backward", "exchange"), slack_ns=SLACK_NS)


@pytest.mark.slow
def test_all_ranks_make_as_many_steps_as_seconds_take_and_watch_the_last_of_the_warm_up(runs: Runs) -> None:
    run = runs("timed")
    files = [read_steps(run.folder.steps(rank)).steps for rank in range(2)]
    warmup, *others = {int((rows["warmup"] == 1).sum()) for rows in files}
    (total, *more) = {len(rows) for rows in files}
    assert (others, more) == ([], [])
    told = " ".join(record_of(run).warnings)
    for rows in files:
        took = rows["step_ns"] / 1e9
        assert took[1:warmup].sum() >= 0.5  # more than half of them are made after they were counted
    # Whether steps are as long as in the warm-up is up to the machine; rank 0 says it.
    assert files[0]["step_ns"][warmup:].sum() / 1e9 >= 0.9 * 2.0 or "instead of 2 s" in told
    asked = {setting.key: setting for setting in record_of(run).settings if setting.key.startswith("measure.")}
    assert [(key, one.effective) for key, one in sorted(asked.items())] == [
        ("measure.measured_s", 2.0),
        ("measure.warmup_s", 1.0),
    ]
    assert warmup > 4
    (step_s,) = {float(one.evidence.split("steps of ")[1].split()[0]) for one in asked.values()}
    # Four at least, and of a printed length one more or less.
    assert total - warmup == pytest.approx(max(4, math.ceil(2.0 / step_s)), abs=1)
    for rank in range(2):
        spans = read_spans(run.folder.spans(rank))
        assert {span.step for span in lane(spans, "compute")} == set(range(warmup - 6, warmup - 3))
        assert {span.step for span in lane(spans, "exchange")} == set(range(warmup - 3, warmup))
    found = record_of(run).exchange
    assert found.window_steps == 3
    assert "layers were profiled" not in found.evidence


def children(pid: int) -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            child = int(stat.parent.name)
            found |= {child} | children(child)
    return found


def is_sampler(pid: int) -> bool:
    try:
        return "dlbench.node.watching.sampler" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def awaited(condition: Callable[[], Any], seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_killed_rank_leaves_no_sampler(tmp_path: Path, victim: int) -> None:
    command = (
        *(sys.executable, "-m", "dlbench", "run", "cosmoflow", "--preset", "ci", "--data", "synthetic"),
        *("--engine", "ddp", "--ranks", "2", "--out", str(tmp_path), "--set", "train.batch_per_rank=1"),
        *("--set", "measure.warmup_steps=1", "--set", "measure.measured_steps=100000"),
    )
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:

        def statuses() -> list[RankStatus]:
            return [
                status
                for folder in tmp_path.iterdir()
                if folder.is_dir()
                for status in read_statuses(RunFolder(folder))
            ]

        awaited(lambda: [status.stage for status in statuses()] == ["measuring"] * 2)
        below = children(running.pid)
        samplers = {pid for pid in below if is_sampler(pid)}
        assert len(samplers) == 1
        os.kill(statuses()[victim].pid, signal.SIGKILL)
        _, errors = running.communicate(timeout=120)
        assert running.returncode == 3, errors
        awaited(lambda: not any(map(is_alive, below)))
    finally:
        if running.poll() is None:
            running.kill()
            running.communicate()
    # What was written before is readable.
    (folder,) = tmp_path.iterdir()
    assert [span.name for span in read_spans(RunFolder(folder).spans(1 - victim))][:2] == ["starting", "building"]

"""Run folders: files are whole or absent, step times survive a torn tail, damage is named, saved formats still read."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlbench.analysis.comparability import group_id, planned_id
from dlbench.errors import RunError, UserError
from dlbench.jobs.scheduler import read_submission
from dlbench.records.files import write_atomic, write_json, write_result
from dlbench.records.folder import RunFolder, create, prepare_output
from dlbench.records.registry import KEYS, describe
from dlbench.records.rows.samples import SamplesReader
from dlbench.records.rows.spans import COMPUTE, EXCHANGE, STAGE, SpanReader
from dlbench.records.rows.steps import FIELDS, PHASES, StepReader, StepWriter, read_steps
from dlbench.records.scan import Run, read_run, scan
from dlbench.records.status import read_statuses, write_status
from dlbench.specs.plan import RunPlan
from tests.support import run_factory
from tests.support.paths import DATA
from tests.support.run_factory import Story, constant, differences, edit_json, status, write_run, write_unfinished
from tests.support.watch_factory import clock_line, node_watch, watch_result, write_samples, write_spans

FORMATS = DATA / "formats"
TIMES = constant([1, 0, 3, 5, 0, 1], other=0.5)
CHECK = {"name": "finite loss", "passed": False, "detail": "the loss of rank 1 is not finite"}


def plans(**request: Any) -> list[RunPlan]:
    return run_factory.plans(**{"workload": "resnet50", "preset": "ci", **request})


# Files that are never half there


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def refuse_to_write(path: Path, content: bytes | str) -> str:
    with pytest.raises(RunError) as caught:
        write_atomic(path, content)
    told = str(caught.value)
    assert told.startswith(f"{path}: cannot be written: ")
    return told


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "a b\n'c'.json"
    write_atomic(path, "é\n")
    assert path.read_bytes() == b"\xc3\xa9\n"
    write_atomic(path, b"\0\xff")
    assert path.read_bytes() == b"\0\xff"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_content(small_disk: Path) -> None:
    path = small_disk / "record.json"
    write_atomic(path, "old")
    assert os.strerror(errno.ENOSPC) in refuse_to_write(path, b"x" * 200_000)
    assert path.read_text() == "old"
    assert list(small_disk.iterdir()) == [path]
    write_atomic(path, "new")  # and what was half written takes no room
    assert path.read_text() == "new"


def test_places_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for path in (
        tmp_path / "missing" / "x",
        tmp_path / "folder",
        tmp_path / "file" / "x",
        tmp_path / ("n" * 250),
        Path("/proc/dlbench-test"),
    ):
        refuse_to_write(path, "new")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_device_is_written_to_and_stays(tmp_path: Path) -> None:
    """`-o /dev/null` by root put a file in its place."""
    reading, writing = os.pipe()
    link = tmp_path / "out"
    link.symlink_to(f"/proc/self/fd/{writing}")
    write_result(link, "all of it")
    assert os.read(reading, 100) == b"all of it"
    os.close(reading)
    os.close(writing)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(RunError, match=os.strerror(errno.ENXIO)):  # nobody reads; not waited for
        write_result(pipe, "x")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert link.is_symlink()
    link.unlink()
    link.symlink_to("file")  # as /dev/stdout, where standard output is a file
    write_result(link, "x")
    assert (link.is_symlink(), link.read_text()) == (True, "x")
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        return  # for root
    write_result(device, "x")
    assert stat.S_ISCHR(device.stat().st_mode)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file", device, link, pipe]


def test_json_has_no_infinity(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": "é", "b": [1.5, None]})
    before = path.read_bytes()
    for value in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ValueError, match="JSON"):
            write_json(path, {"a": [value]})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


KILLER = """
import os, random, signal, sys, time
from pathlib import Path
from dlbench.records.files import write_atomic

target, rounds = Path(sys.argv[1]), int(sys.argv[2])
random.seed(0)
write_atomic(target, b"0" * 400_000)
for _ in range(rounds):
    child = os.fork()
    if child == 0:
        while True:
            for letter in b"123456789":
                write_atomic(target, bytes([letter]) * 400_000)
    for _ in range(3):
        time.sleep(random.uniform(0.001, 0.01))
        content = target.read_bytes()
        assert len(content) == 400_000 and len(set(content)) == 1, ("half", len(content), set(content))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    content = target.read_bytes()
    assert len(content) == 400_000 and len(set(content)) == 1, ("half", len(content), set(content))
print("whole", rounds)
"""


def test_a_killed_writer_leaves_no_half_file(tmp_path: Path) -> None:
    """50 processes, killed somewhere in a loop of writing."""
    target = tmp_path / "runs" / "one" / "record.json"
    target.parent.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(target), "50"], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "whole 50\n"), done.stderr
    # What a kill leaves beside it is hidden and has a name of its own.
    assert all(p == target or p.name.startswith(".") for p in target.parent.iterdir())


# Folders


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    (plan, other) = plans(points=(1,), repeats=2)
    folder = create(tmp_path, plan)
    before = folder.plan.read_bytes()
    with pytest.raises(UserError, match="exists already"):
        create(tmp_path, plan)
    assert folder.plan.read_bytes() == before
    assert json.loads(before)["run_id"] == folder.path.name == plan.run_id
    create(tmp_path, other)
    assert [p.name for p in sorted(tmp_path.iterdir())] == sorted([plan.run_id, other.run_id])


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/dlbench-test", "/dev/null"])
def test_an_output_folder_that_cannot_be(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(UserError) as caught:
        prepare_output(tmp_path / place)
    assert str(caught.value).startswith(f"--out {tmp_path / place}: cannot be written")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


# Step times


def step_record(number: int) -> tuple[float, ...]:
    return (number, 0, 10**15 + number, 60 + number, *(10 + k for k in range(len(PHASES))), 4, 0.5 * number)


def noisy_steps(count: int, seed: int) -> list[tuple[float, ...]]:
    """Steps of 100 ms whose phases vary by 2 %, as measured ones do."""
    rng = np.random.default_rng(seed)
    means = np.array([4e6, 1e6, 30e6, 55e6, 12e6, 6e6])
    phases = np.rint(means * rng.lognormal(0, 0.02, (count, len(PHASES)))).astype(np.int64)
    took = phases.sum(axis=1) + rng.integers(1_900_000, 2_100_000, count)
    starts = 10**14 + np.concatenate([[0], np.cumsum(took)[:-1]])
    losses = (2.5 * np.exp(-np.arange(count) / 400) + rng.normal(0, 0.05, count)).astype(np.float32)
    return [
        (n, int(n < 20), int(starts[n]), int(took[n]), *phases[n].tolist(), 32, float(losses[n])) for n in range(count)
    ]


def test_a_step_takes_49_bytes(tmp_path: Path) -> None:
    """What docs/formats.md promises of times below 4.29 s."""
    path = tmp_path / "x.steps"
    records = noisy_steps(1000, seed=1)
    with StepWriter(path, {"rank": 0}) as writer:
        for record in records:
            writer.append(record)
    assert [tuple(row) for row in read_steps(path).steps.tolist()] == records
    assert 49 < path.stat().st_size / len(records) < 50
    assert np.dtype([*FIELDS]).itemsize == 80


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf"), 1e300, -1e300, 3.5e38])
def test_a_loss_that_diverged_is_kept(tmp_path: Path, loss: float) -> None:
    path = tmp_path / "x.steps"
    with StepWriter(path, {"rank": 0}, capacity=2) as writer:
        for number in range(3):
            writer.append((*step_record(number)[:-1], loss if number == 1 else 0.5))
    with np.errstate(over="ignore"):
        wanted = np.array([0.5, loss, 0.5]).astype("f4")
    assert np.array_equal(read_steps(path).steps["loss"], wanted, equal_nan=True)
    assert list(read_steps(path).steps["step"]) == [0, 1, 2]


def test_a_disk_that_fails_names_the_steps_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    writer = StepWriter(tmp_path / "x.steps", {"rank": 0})
    writer.append(step_record(0))
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(RunError, match=r"x\.steps: cannot be written: Input/output error"):
        writer.sync()
    monkeypatch.undo()
    monkeypatch.setattr(writer, "flush", lambda: failing(0))
    with pytest.raises(ValueError, match="the first"), writer:
        raise ValueError("the first to go wrong")


# Scanning


def test_the_states_of_runs(tmp_path: Path) -> None:
    valid, invalid, failed, killed, waiting = plans(points=(2,), repeats=5)
    write_run(tmp_path, valid, TIMES)
    write_run(tmp_path, invalid, TIMES, Story(state="invalid", checks=[CHECK]))
    write_unfinished(tmp_path, failed, "failed", "RuntimeError: out of memory", host="node-b")
    write_unfinished(tmp_path, killed, "measuring", host="node-c")
    create(tmp_path, waiting)
    found = scan(tmp_path)
    assert found.problems == []
    assert [run.plan for run in found.runs] == [valid, invalid, failed, killed, waiting]
    assert [run.state for run in found.runs] == ["valid", "invalid", "failed", "incomplete", "incomplete"]
    stories = [run.detail for run in found.runs]
    assert stories[0] == ""
    assert stories[1] == "finite loss: the loss of rank 1 is not finite"
    assert "rank 0 on node-b failed at step 7: RuntimeError: out of memory" in stories[2]
    assert stories[2].endswith("; 1 other rank ended with it")
    assert stories[3].startswith("2 of 2 ranks started")
    assert "on node-c, measuring, step 7" in stories[3]
    assert stories[4] == "not started: no rank wrote a status"
    # One run alone is read from its own folder.
    assert [run.plan for run in scan(tmp_path / failed.run_id).runs] == [failed]


def test_a_record_of_another_run_is_named_with_both(tmp_path: Path) -> None:
    one, other = plans(points=(1,), repeats=2)
    first, second = (write_run(tmp_path, plan, TIMES) for plan in (one, other))
    shutil.copyfile(first.record, second.record)
    (problem,) = scan(tmp_path).problems
    assert problem == f"{second.record}: belongs to run {one.run_id}, not to {other.run_id}"


def test_a_folder_without_a_plan_is_named(tmp_path: Path) -> None:
    (plan,) = plans(points=(1,), repeats=1)
    folder = write_run(tmp_path, plan, TIMES)
    folder.plan.unlink()
    found = scan(tmp_path)
    assert found.runs == []
    assert found.problems == [f"{folder.path}: no plan.json; not a run, or copied in part"]


@pytest.mark.parametrize("name", ["a b", "q'u\"o", "new\nline", "$(id)", "*", "é", "[x]", "%s", "-r"])
def test_folders_may_be_renamed(tmp_path: Path, name: str) -> None:
    """A run is known by its plan; a folder's name is its owner's business."""
    (plan,) = plans(points=(1,), repeats=1)
    root = tmp_path / name
    folder = write_run(root, plan, TIMES)
    folder.path.rename(root / name)
    (run,) = scan(root).runs
    assert (run.state, run.plan) == ("valid", plan)
    (root / name / "plan.json").write_text("{")
    (problem,) = scan(root).problems
    assert str(root / name / "plan.json") in problem


def test_statuses_are_in_the_order_of_ranks(tmp_path: Path) -> None:
    (plan,) = plans(points=(1,), repeats=1)
    folder = create(tmp_path, plan)
    for rank in (10_001, 2, 9_999, 0):
        write_status(folder, status(rank, f"n{rank}", "measuring"))
    assert [s.rank for s in read_statuses(folder)] == [0, 2, 9_999, 10_001]
    write_status(folder, status(2, "n2", "done"))
    assert [s.stage for s in read_statuses(folder)] == ["measuring", "done", "measuring", "measuring"]


# The registry


def run_of(tmp_path: Path, series: str, **request: Any) -> Run:
    (plan,) = plans(points=request.pop("points", (1,)), repeats=1, series=series, **request)
    return read_run(write_run(tmp_path, plan, TIMES).path)


@pytest.mark.parametrize(
    ("request_", "title", "values"),
    [
        ({"workload": "cosmoflow"}, "Workload", ("resnet50", "cosmoflow")),
        ({"engine": "ddp"}, "Engine", ("horovod", "ddp")),
        ({"points": (2,), "overrides": {"engine.horovod.cycle_time_ms": 2.5}}, "Engine settings", ("=1.0", "=2.5")),
        ({"points": (2,), "overrides": {"sync.average_every": 4}}, "Gradient exchange", ("average_every=4",)),
        ({"overrides": {"train.precision": "bf16"}}, "Precision", ("fp32", "bf16")),
        ({"overrides": {"data.synthetic_on": "device"}}, "Data source", ("synthetic, on the device",)),
        ({"data": "/data/jpeg"}, "Data source", ("synthetic", "real: /data/jpeg")),
        ({"overrides": {"train.batch_per_rank": 7}}, "Batch per rank", ("against 7",)),
        ({"scaling": "strong"}, "Scaling", ("weak", "strong")),
        ({"launcher": "mpirun"}, "Launcher", ("local", "mpirun")),
        ({"overrides": {"layout.cores_per_rank": 3}}, "Cores per rank", ("1", "3")),
        ({"overrides": {"measure.phases": "synchronised"}}, "Phase mode", ("overlapped", "synchronised")),
        ({"system": "box"}, "System", ("local", "box")),
    ],
)
def test_a_difference_that_forbids_comparison_is_named(
    tmp_path: Path, request_: dict[str, Any], title: str, values: tuple[str, ...]
) -> None:
    one, other = run_of(tmp_path, "one"), run_of(tmp_path, "other", **request_)
    told = differences(one, other)
    (line,) = [line for line in told if line.startswith(f"{title}: ")]
    assert " against " in line
    assert all(value in line for value in values)
    assert len(differences(other, one)) == len(told)


def test_runs_that_may_be_compared(tmp_path: Path) -> None:
    one, two, more = run_of(tmp_path, "one"), run_of(tmp_path, "two"), run_of(tmp_path, "more", points=(1, 2)[1:])
    assert differences(one, two) == []
    # Rank and node counts are what a scaling series varies; cores per rank were shared out anew.
    assert [line for line in differences(one, more) if "Cores per rank" not in line] == []
    assert describe(one)["ranks"] == "1"
    assert describe(more)["ranks"] == "2"
    assert set(describe(one)) == {key.name for key in KEYS}


def test_a_gpu_is_told_from_a_cpu(tmp_path: Path) -> None:
    one, two, other = (run_of(tmp_path, name) for name in ("one", "two", "other"))

    def on(run: Run, device: str) -> Run:
        content = json.loads(run.folder.record.read_text())
        content["ranks"][0]["device"] = device
        run.folder.record.write_text(json.dumps(content))
        return read_run(run.folder.path)

    first, second = on(one, "cuda:0 (NVIDIA H200)"), on(two, "cuda:3 (NVIDIA H200)")
    assert differences(first, second) == []  # which of a node's GPUs it was is no difference
    (line,) = differences(first, on(other, "cuda:0 (NVIDIA A100)"))
    assert line.startswith("Device: ")
    assert "NVIDIA H200" in line
    assert "NVIDIA A100" in line
    (line,) = differences(first, run_of(tmp_path, "cpu"))
    assert line.startswith("Device: ")


def test_emulated_arithmetic_is_compared_with_native_nowhere(tmp_path: Path) -> None:
    settings = {"train.precision": "bf16", "train.allow_emulation": True}
    one, other = (run_of(tmp_path, name, overrides=settings) for name in ("one", "other"))
    assert differences(one, other) == []
    edit_json(other.folder.record, emulates_precision=True)
    emulated = read_run(other.folder.path)
    assert differences(one, emulated) == ["Precision: bf16 against bf16 emulated"]
    assert group_id(one) != group_id(emulated)
    assert planned_id(one) == planned_id(emulated)  # where runs that died belong is known without a record


def test_runs_whose_weights_lay_otherwise_are_no_group(tmp_path: Path) -> None:
    """As those of Horovod at one rank and at several would, were they placed by unlike rules."""
    asked = {"model.memory_format": "channels-last"}
    one, other = (run_of(tmp_path, name, overrides=asked) for name in ("one", "other"))
    assert differences(one, other) == []
    weights = {"key": "model.memory_format.weights", "requested": None, "evidence": "read back"}
    placed = []
    for run, order in ((one, "channels-last"), (other, "contiguous")):
        edit_json(run.folder.record, settings=[{**weights, "effective": order}])
        placed.append(read_run(run.folder.path))
    assert differences(*placed) == ["Memory format: channels-last against channels-last, weights contiguous"]
    assert group_id(placed[0]) != group_id(placed[1])
    assert planned_id(placed[0]) == planned_id(placed[1])


# Saved formats


def test_samples_of_version_1_still_read() -> None:
    found = scan(FORMATS / "v1")
    assert found.problems == []
    runs = {run.plan.series.id: run for run in found.runs}
    states = {name: run.state for name, run in runs.items()}
    assert states == {"valid": "valid", "invalid": "invalid", "failed": "failed", "submitted": "incomplete"}
    valid = runs["valid"]
    assert valid.record is not None
    assert (valid.plan.workload.name, valid.plan.layout.ranks, valid.plan.engine.name) == ("cosmoflow", 2, "horovod")
    assert valid.record.num_parameters == 4_778_788
    assert valid.record.gradient_bytes == 4 * valid.record.num_parameters
    assert valid.statuses == []  # the record says more
    assert [s.stage for s in read_statuses(valid.folder)] == ["done", "done"]
    for rank in valid.record.ranks:
        steps = read_steps(valid.folder.steps(rank.rank))
        assert list(steps.steps["warmup"]) == [1, 0, 0, 0]
        assert steps.torn_bytes == 0
        assert steps.measured["samples"].sum() == rank.samples == 3 * valid.plan.workload.train.batch_per_rank
        assert steps.measured["step_ns"].sum() / 1e9 == pytest.approx(rank.measured_s)
    assert runs["invalid"].detail.startswith("finite loss: ")
    assert runs["invalid"].record.ranks[0].last_loss is None
    story = runs["failed"].detail
    assert story.startswith("rank 1 was the first to end, by signal SIGKILL; rank 1 on node-a vanished at step 1")
    submission = read_submission(runs["submitted"].folder)
    assert submission.job_id == "4711"
    assert submission.command[0] == "sbatch"
    assert read_submission(valid.folder) is None


def test_a_record_without_the_keys_that_have_defaults_is_read(tmp_path: Path) -> None:
    (source,) = (FORMATS / "v1").glob("valid-*")
    shutil.copytree(source, tmp_path / source.name)
    folder = RunFolder(tmp_path / source.name)
    whole = read_run(folder.path).record
    bare = whole.model_dump(mode="json", exclude_defaults=True)
    assert not {"quality", "events", "exchange", "watch", "first_step"} & bare.keys()
    write_json(folder.record, {"format": whole.format, "version": whole.version, **bare})
    assert read_run(folder.path).record == whole


def write_watched_run(out: Path) -> RunFolder:
    """The watched run of which a sample is kept: every file that watching leaves."""
    (plan,) = run_factory.plans(points=(2,), repeats=1, series="watched")
    clock = clock_line(0, "n0", wall_offset_ns=1_772_366_400 * 10**9)
    watch = watch_result(
        nodes=[node_watch(num_samples=20, clock=clock)], num_spans=4, window_ranks=[0], window_first_step=0
    )
    times = constant([4.321, 0, 30.123, 50.456, 9.876, 6.543], other=1.234)
    folder = write_run(out, plan, times, Story(record={"watch": {**watch, "window_num_steps": 3}}))
    for rank in range(2):
        write_spans(folder, rank, SAVED_SPANS)
    columns = ["gpu.0.power_w", "gpu.0.energy_j", "host.cpu.0.busy"]
    failed = [{"failed": "gpu.0.energy_j", "time_ns": 10**9, "reason": "GPU is lost"}]
    missing = {"host.energy": "the kernel offers no RAPL counters"}
    write_samples(folder, 0, columns, SAVED_ROWS, unavailable=missing, failures=failed, end={"num_samples": 20})
    write_json(folder.clock, {"format": "dlbench.clock", "version": 1, "address": "127.0.0.1", "port": 5, "token": "t"})
    return folder


SAVED_SPANS: list[dict[str, Any]] = [
    {"lane": STAGE, "name": "measuring", "start_ns": 10**9, "end_ns": 4 * 10**9},
    {"lane": COMPUTE, "name": "forward layer1", "start_ns": 10**9 + 5, "end_ns": 10**9 + 9, "step": 2},
    {
        "lane": EXCHANGE,
        "name": "flat, 15 gradients",
        "start_ns": 10**9 + 20,
        "end_ns": 10**9 + 50,
        "step": 2,
        "track": 3,
        "num_bytes": 9_000_000,
        "queued_ns": 4,
    },
    {"lane": COMPUTE, "name": "forward layer1", "start_ns": 10**9 - 5, "end_ns": 10**9 - 1, "step": 1},
]
SAVED_ROWS = [(10**9 * n, 250.5 + n, 1e6 + 2.0**-10 * n, float("nan") if n % 10 else 0.5) for n in range(20)]


def test_a_saved_watched_run_still_reads(tmp_path: Path) -> None:
    """Steps, spans, samples: as they were written then, and as they are written now."""
    (saved,) = (RunFolder(path) for path in (FORMATS / "watched" / "v1").iterdir())
    for folder in (saved, write_watched_run(tmp_path)):
        run = read_run(folder.path)
        assert run.state == "valid"
        assert run.record.watch.nodes[0].clock.wall_offset_ns == 1_772_366_400 * 10**9
        for rank in range(2):
            head = StepReader(folder.steps(rank)).header
            assert (head["format"], head["version"], head["rank"]) == ("dlbench.steps", 1, rank)
            steps = read_steps(folder.steps(rank))
            assert list(steps.steps["step"]) == list(range(15))
            assert list(steps.steps["warmup"]) == [1] * 3 + [0] * 12
            assert set(steps.steps["forward_ns"]) == {30_123_000}
            assert list(np.diff(steps.steps["start_ns"])) == [102_553_000] * 14
            spans = SpanReader(path=folder.spans(rank))
            (block,) = spans.blocks()
            assert [spans.names[number] for number in block["name"]] == [span["name"] for span in SAVED_SPANS]
            for key, default in (("start_ns", 0), ("lane", 0), ("step", -1), ("num_bytes", -1), ("track", 0)):
                assert list(block[key]) == [span.get(key, default) for span in SAVED_SPANS]
        samples = SamplesReader(path=folder.samples(0))
        rows = np.concatenate(list(samples.blocks()))
        for number, name in enumerate(["time_ns", *samples.columns]):
            assert np.array_equal(rows[name], [row[number] for row in SAVED_ROWS], equal_nan=True)
        assert samples.columns == ["gpu.0.power_w", "gpu.0.energy_j", "host.cpu.0.busy"]
        assert [note["reason"] for note in samples.failures] == ["GPU is lost"]
        assert samples.end == {"num_samples": 20}
        content = json.loads(folder.clock.read_bytes())
        assert (content["format"], content["version"]) == ("dlbench.clock", 1)

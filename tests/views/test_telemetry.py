"""The report on the machine: telemetry, energy, data path, memory, against brute force; gaps stay gaps."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from dlbench.analysis import scaling
from dlbench.analysis.table import tabulate
from dlbench.analysis.telemetry import readings as machine_readings
from dlbench.analysis.telemetry.node_samples import NodeSamples
from dlbench.cli import cli
from dlbench.records.folder import RunFolder
from dlbench.records.rows.spans import STAGE
from dlbench.records.scan import scan
from dlbench.report.document import Section
from dlbench.report.table import Sheet
from dlbench.report.wording import percent
from dlbench.specs.plan import RunPlan
from dlbench.specs.requests import parse_set, parse_sweep
from dlbench.views.data_path import DataPath, DataPathView
from dlbench.views.energy import Energy, EnergyView
from dlbench.views.model import GroupView, ReportGroup, Views
from dlbench.views.peak_memory import Memory, MemoryView, memory
from dlbench.views.scaling_report import assemble
from dlbench.views.telemetry import Telemetry, TelemetryView
from tests.support.run_factory import Story, constant, edit_json, plans, write_run, write_unfinished
from tests.support.watch_factory import write_samples, write_spans

VIEWS = Views(group=(DataPathView(), MemoryView(), TelemetryView(), EnergyView()))

S = 1_000_000_000
THERMAL = 0x20

OF_GPU = ("power_w", "energy_j", "sm_clock_hz", "utilization", "clock_reasons", "memory_used_bytes")
COLUMNS = [
    *(f"gpu.0.{name}" for name in OF_GPU),
    *("host.cpu.0.busy", "host.cpu.1.busy", "host.memory_used_bytes", "host.net.eth0.received_bytes"),
    *("host.disk.sda.read_bytes", "host.energy.package-0_j"),
]

STEP_MS = [100, 0, 300, 400, 100, 100]
"""Steps of a second; 3 of warm-up and 12 measured ones on rank 0, from second 1: measured from second 4 to 16."""


def values(t: float, watts: float = 250.0) -> list[float]:
    """A GPU that throttles from second 10 to 13; disks read 5 MB/s."""
    throttled = 10 < t < 13
    gpu = [watts, watts * (t + 9), 1.2e9 if throttled else 1.5e9, 0.9, THERMAL if throttled else 0, 2.0 * 2**30]
    return [*gpu, 0.4, 0.6, 3.0 * 2**30, 1e12 + 2e6 * t, 5e6 * (t + 9), 80 * (t + 9)]


def rows(
    make: Callable[[float], Sequence[float]] = values, keep: Callable[[float], bool] = lambda t: True
) -> list[tuple[float, ...]]:
    """Every second, in its middle, from before the first step to behind the last."""
    times = (number + 0.5 for number in range(-3, 19))
    return [(round(t * S), *make(t)) for t in times if keep(t)]


def one_run(out: Path, plan: RunPlan | None = None, device: str = "cuda:0 (NVIDIA A100)", **more: Any) -> RunFolder:
    plan = plan or plans(points=(1,), repeats=1)[0]
    folder = write_run(out, plan, constant(STEP_MS), more.pop("story", Story(device=device)))
    write_samples(folder, 0, more.pop("columns", COLUMNS), more.pop("rows", rows()), **more)
    return folder


def nodes_plans(points: Sequence[int], repeats: int = 1) -> list[RunPlan]:
    return plans(
        system="example-gpu",
        points=tuple(points),
        ranks_per_node=1,
        repeats=repeats,
        overrides={"layout.cores_per_rank": 1, "system.node.gpus": 1},
    )


def group_of(out: Path) -> ReportGroup:
    (group,) = assemble(scan(out), views=VIEWS, with_digests=False).groups
    return group


def view(name: str) -> GroupView:
    return next(view for view in VIEWS.group if view.id == name)


def section(group: ReportGroup, name: str) -> Section:
    return view(name).section(group)


def sheet(group: ReportGroup, name: str) -> Sheet[Any]:
    sections = filter(None, (one.section(group) for one in VIEWS.group))
    return next(sheet for found in sections for sheet in found.sheets if sheet.name == name)


# Telemetry


def test_means_of_a_run_are_those_of_its_samples(tmp_path: Path) -> None:
    one_run(tmp_path)
    group = group_of(tmp_path)
    (told,) = group.of(Telemetry).nodes
    assert told.gpu_power_w == pytest.approx(250)
    # Nine of the twelve samples in the window at 1.5 GHz.
    assert told.sm_clock_hz == pytest.approx((9 * 1.5e9 + 3 * 1.2e9) / 12)
    assert told.throttled == pytest.approx(0.25)
    assert told.throttled_by == "GPU 0, sw_thermal_slowdown"
    assert (told.cpu_busy, told.num_samples, told.num_gaps) == (pytest.approx(0.5), 12, 0)
    assert told.network_received == pytest.approx(2e6)
    row = next(sheet(group, "telemetry").records())
    assert (row["gpu_power_w"], row["throttled_share"]) == (told.gpu_power_w, told.throttled)
    assert "throttled 25.0 % of the time: n0, GPU 0, sw_thermal_slowdown" in section(group, "telemetry").headline


@pytest.mark.parametrize("telling", [1, 2])
def test_power_of_some_gpus_is_not_that_of_the_node(tmp_path: Path, telling: int) -> None:
    columns = ["gpu.0.power_w", "gpu.1.power_w", "gpu.0.sm_clock_hz", "gpu.1.sm_clock_hz", COLUMNS[-3]]
    kept = [name for name in columns if telling == 2 or name != "gpu.1.power_w"]
    told = {"gpu.0.power_w": 250.0, "gpu.1.power_w": 350.0, "gpu.0.sm_clock_hz": 1e9, "gpu.1.sm_clock_hz": 1e9}
    (plan,) = plans(points=(2,), repeats=1)
    one_run(tmp_path, plan, columns=kept, rows=rows(lambda t: [told.get(name, 1e12 + 2 * 2**20 * t) for name in kept]))
    group = group_of(tmp_path)
    (node,) = group.of(Telemetry).nodes
    assert (node.num_gpus, node.num_power) == (2, telling)
    assert node.gpu_power_w == (pytest.approx(600) if telling == 2 else None)
    table = sheet(group, "telemetry").to_display()
    cells = dict(zip(table.header, map(str, table.rows[0].cells), strict=True))
    assert cells["Power of its GPUs"] == ("600.0 W" if telling == 2 else "reported by 1 of 2 GPUs")
    assert cells["Received"] == "2 MiB/s"


# Energy


def test_energy_of_a_sample_against_the_baseline(tmp_path: Path) -> None:
    for plan in nodes_plans((1, 2), repeats=5):
        watts = 250.0 if plan.layout.nodes == 1 else 500.0
        folder = write_run(
            tmp_path, plan, constant(STEP_MS), Story(device="cuda:0 (NVIDIA A100)", host=lambda rank: f"n{rank}")
        )
        for number in range(plan.layout.nodes):
            write_samples(folder, number, COLUMNS, rows(lambda t, w=watts: values(t, w)), host=f"n{number}")
    group = group_of(tmp_path)
    one, two = group.of(Energy).points
    batch = group.points[0].batch_per_rank
    assert one.kinds[0].energy_per_sample.value == pytest.approx(250 / batch)
    gpu, host = two.kinds
    assert gpu.energy_per_sample.value == pytest.approx(500 / batch)
    assert (gpu.efficiency.value, gpu.efficiency.kind) == (pytest.approx(0.5), "Student t")
    assert host.efficiency.value == pytest.approx(1.0)
    assert one.kinds[0].efficiency.kind == "by definition"
    assert gpu.methods == ("energy counter",)
    rows_ = {(row["ranks"], row["kind"]): row for row in sheet(group, "energy").records()}
    assert rows_[2, "GPUs"]["energy_efficiency"] == gpu.efficiency.value
    # Stages sum to the whole of a run that repeats without scatter.
    for point in group.of(Energy).points:
        for kind in point.kinds:
            assert sum(figure.value for _, figure in kind.stages) == pytest.approx(kind.whole.value)
    assert "125.0 J of GPUs" in section(group, "energy").headline


# How much is read


def test_every_file_of_samples_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for plan in nodes_plans((1, 2), repeats=2):
        folder = write_run(tmp_path, plan, constant(STEP_MS), Story(device="cuda:0 (NVIDIA A100)"))
        for number in range(plan.layout.nodes):
            write_samples(folder, number, COLUMNS, rows())
    read: list[tuple[str, int]] = []
    own = machine_readings.read_node

    def counted(run: Any, number: int, wanted: Any) -> NodeSamples:
        read.append((run.plan.run_id, number))
        return own(run, number, wanted)

    monkeypatch.setattr(machine_readings, "read_node", counted)
    assemble(scan(tmp_path))
    assert len(read) == len(set(read)) == 6


def test_large_tables_are_read_in_part_from_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = nodes_plans((1, 4), repeats=3)
    for plan in made:
        slower = [part * (1 + plan.series.repeat / 100) for part in STEP_MS]
        folder = write_run(tmp_path, plan, constant(slower), Story(device="cuda:0 (NVIDIA A100)"))
        for number in range(plan.layout.nodes):
            write_samples(folder, number, COLUMNS, rows())
    table = tabulate(scan(tmp_path))

    def read(most: int) -> list[tuple[int, int]]:
        monkeypatch.setattr(machine_readings, "MAX_NODES", most)
        readings = machine_readings.read_machines(table.points.values(), "some")
        runs = [table.runs[run_id] for run_id in readings]
        return [(run.plan.layout.nodes, run.plan.series.repeat) for run in runs]

    assert len(read(100)) == 6
    # Of each point the run in the middle (repeat 1), then the next ones as long as nodes are left.
    assert read(5) == [(4, 1), (1, 1)]
    assert read(9) == [(4, 1), (1, 1), (4, 2)] or read(9) == [(4, 1), (1, 1), (4, 0)]
    assert read(4) == [(4, 1)]
    assert read(0) == []


def test_a_run_of_too_many_nodes_is_looked_at_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for plan in nodes_plans((6,), repeats=2):
        folder = write_run(tmp_path, plan, constant(STEP_MS), Story(device="cuda:0 (NVIDIA A100)"))
        for number in range(6):
            write_samples(folder, number, COLUMNS, rows(), host=f"n{number}")
    monkeypatch.setattr(machine_readings, "MAX_NODES", 5)
    monkeypatch.setattr(machine_readings, "MAX_NODES_OF_LARGE_RUN", 2)
    group = group_of(tmp_path)
    assert [told.node_rank for told in group.of(Telemetry).nodes] == [0, 3]
    assert group.of(Energy) is None
    assert any("2 of 6 nodes were read" in note for note in group.of(Telemetry).notes)


def test_damage_that_reading_for_energy_meets_is_named(tmp_path: Path) -> None:
    folder = one_run(tmp_path)
    write_spans(folder, 0, [{"lane": STAGE, "name": "evaluation", "start_ns": 5 * S, "end_ns": 6 * S}])
    content = bytearray(folder.node_spans(0).read_bytes())
    content[-8] ^= 0xFF  # in the last block, which only reading meets
    folder.node_spans(0).write_bytes(content)
    assert str(folder.spans(0)) in assemble(scan(tmp_path), views=VIEWS, with_digests=False).damaged[0]


# Data path


def test_waits_stalls_and_disks(tmp_path: Path) -> None:
    """Every fourth step of rank 1 waits for half of its time."""

    def times(rank: int, step: int) -> tuple[list[int], int]:
        slow = rank == 1 and step % 4 == 0
        return [
            round(part * 1e6) for part in ([500, 0, 100, 200, 100, 100] if slow else [50, 0, 450, 300, 100, 100])
        ], 0

    plan = plans(points=(2,), repeats=1, overrides={"data.source": "/data/jpegs", "data.loader_workers": 3})[0]
    data = {"kind": "images", "num_samples": 1000, "dropped_per_epoch": 7, "decoder": "simplejpeg"}
    folder = write_run(tmp_path, plan, times, Story(data=data))
    write_samples(folder, 0, COLUMNS, rows())
    group = group_of(tmp_path)
    (point,) = group.of(DataPath).points
    first, count = plan.measure.warmup_steps, plan.measure.measured_steps
    slow = sum(step % 4 == 0 for step in range(first, first + count))
    wait = ((2 * count - slow) * 0.05 + slow * 0.5) / (2 * count)
    assert point.wait.value == pytest.approx(wait)
    assert point.utilisation.value == pytest.approx(1 - wait)
    assert point.stalled == pytest.approx(slow / (2 * count))
    assert (point.stall_steps, point.longest_wait_s) == (2 * count, pytest.approx(0.5))
    assert group.of(DataPath).verdict == (
        f"mean input wait {percent(point.wait_share.value)} of the step (2 ranks); "
        f"{percent(slow / (2 * count))} of the steps stall"
    )
    row = next(sheet(group, "data-path").records())
    assert (row["input_wait_s"], row["stalled_share"]) == (point.wait.value, point.stalled)


# Memory


def test_memory_by_rank_count_and_batch(tmp_path: Path) -> None:
    for batch, held in ((4, 500), (8, 900)):
        for plan in plans(points=(1, 2), repeats=1, series=f"b{batch}", overrides={"train.batch_per_rank": batch}):
            folder = write_run(tmp_path, plan, constant(STEP_MS), Story())
            content = json.loads(folder.record.read_text())
            for rank in content["ranks"]:
                rank["peak_memory_bytes"] = (held + rank["rank"]) * 2**20
            edit_json(folder.record, ranks=content["ranks"])
    failed = plans(points=(2,), repeats=1, series="b16", overrides={"train.batch_per_rank": 16})[0]
    write_unfinished(tmp_path, failed, "failed", "CUDA out of memory. Tried to allocate 2.00 GiB")
    report = assemble(scan(tmp_path))
    group = next(group for group in report.groups if group.points[0].batch_per_rank == 8)
    assert [point.peak.value / 2**20 for point in group.of(Memory).points] == [900, 901]
    assert [
        (b.batch, b.peak_bytes and b.peak_bytes / 2**20, b.num_without_memory) for b in group.of(Memory).batches
    ] == [(4, 501, 0), (8, 901, 0), (16, None, 1)]
    assert "16 samples ran out of memory" in group.of(Memory).limit
    assert [row["peak_bytes"] for row in sheet(group, "memory-batches").records()] == [501 * 2**20, 901 * 2**20, None]


def batches(out: Path, fitted: Sequence[int], ended: Sequence[int], **overrides: Any) -> None:
    """A run of one rank for each batch that fitted, and one for each that ended without memory."""
    for kind, wanted in (("fit", fitted), ("end", ended)):
        for number, batch in enumerate(wanted):
            chosen = {"train.batch_per_rank": batch, **overrides}
            (plan,) = plans(points=(1,), repeats=1, series=f"{kind}{number}-{len(overrides)}", overrides=chosen)
            if kind == "fit":
                write_run(out, plan, constant(STEP_MS))
            else:
                write_unfinished(out, plan, "failed", "CUDA out of memory")


def limit_of(out: Path, precision: str = "fp32") -> str:
    groups = assemble(scan(out)).groups
    group = next(group for group in groups if {c.name: c.value for c in group.conditions}["precision"] == precision)
    return group.of(Memory).limit


def test_the_limit_lies_above_what_fitted(tmp_path: Path) -> None:
    batches(tmp_path, [8], [4, 16, 32])
    limit = limit_of(tmp_path)
    assert limit == (
        "8 samples per rank fitted in fp32 (500 MiB); 4 samples ran out of memory in 1 run, though larger "
        "batches fitted; 16 samples ran out of memory."
    )


def test_the_command_for_larger_batches_repeats_the_runs(tmp_path: Path) -> None:
    """Through the parser of commands: it asks for the plan of the group but for the batch."""
    chosen = {"train.optimizer.learning_rate": 0.5, "watch.sampler": False, "data.source": "/data/it's here"}
    (made,) = plans(points=(2,), repeats=1, engine="ddp", overrides={**chosen, "train.batch_per_rank": 8})
    write_run(tmp_path, made, constant(STEP_MS))
    words = shlex.split(limit_of(tmp_path).partition("Try larger ones: dlbench run ")[2])
    command = cli.get_command(click.Context(cli), "run")
    with command.make_context("run", words) as context:
        asked = context.params
    assert (asked["workload"], asked["preset"], asked["engine"], asked["ranks"]) == ("sample", "tiny", "ddp", "2")
    assert asked["data"] == chosen.pop("data.source")
    assert parse_set(asked["overrides"]) == chosen
    assert parse_sweep(asked["sweep"]) == {"train.batch_per_rank": (16, 32, 64)}


def test_words_that_hold_oom_are_no_lack_of_memory(tmp_path: Path) -> None:
    reasons = {
        "torch.OutOfMemoryError: CUDA out of memory": True,
        "OSError: [Errno 12] Cannot allocate memory": True,
        "MemoryError: Unable to allocate 3 GiB": True,
        "slurmstepd: Detected 1 oom_kill event": True,
        "OOMKilled": True,
        "rank 3: OOM": True,
        "node bloom3 went down": False,
        "no room left on device": False,
        "the zoom of augmentation is below 1": False,
        "node bloom killed by signal 9": False,
    }
    (plan,) = plans(points=(1,), repeats=1)
    write_run(tmp_path, plan, constant(STEP_MS))
    for number, reason in enumerate(reasons):
        chosen = {"train.batch_per_rank": 100 + number}
        (failed,) = plans(points=(1,), repeats=1, series=f"f{number}", overrides=chosen)
        write_unfinished(tmp_path, failed, "failed", reason)
    table = tabulate(scan(tmp_path))
    found = memory(scaling.groups(table)[0], table)
    told = {batch.batch - 100 for batch in found.batches if batch.num_without_memory}
    assert told == {number for number, is_lack in enumerate(reasons.values()) if is_lack}


def run_cli(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(cli, list(map(str, arguments)), catch_exceptions=False)
    for text in (result.stdout, result.stderr):
        assert not set(text) & {"\x1b", "\x07", "\r"}
    return result


def runs_of(found: dict[str, Any], view: str = "telemetry") -> list[dict[str, Any]]:
    return [run for group in found["groups"] for run in group[view]["runs"]]


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def as_json(out: Path, code: int = 0) -> dict[str, Any]:
    result = run_cli("diagnose", out, "--format", "json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout, parse_constant=refuse)


# Words and JSON


def test_json_has_every_field(tmp_path: Path) -> None:
    folder = one_run(tmp_path)
    (told,) = runs_of(as_json(tmp_path))
    assert (told["run_id"], told["not_measured"]) == (folder.path.name, {})
    (node,) = told["nodes"]
    assert set(COLUMNS) - {"gpu.0.clock_reasons"} <= set(node["fields"])
    assert node["fields"]["gpu.0.power_w"]["mean"] == pytest.approx(250)
    assert node["fields"]["gpu.0.sm_clock_hz"]["mean"] == pytest.approx(1.425e9)
    received = node["fields"]["host.net.eth0.received_bytes"]
    assert (received["is_rate"], received["mean"]) == (True, pytest.approx(2e6))
    assert node["clock_reasons"] == {"gpu.0": {"sw_thermal_slowdown": pytest.approx(0.25)}}
    assert (node["num_gaps"], node["missing"], node["num_samples"]) == (0, 0.0, 12)


def test_of_many_nodes_twelve_are_shown_and_all_are_in_the_json(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path, nodes_plans((14,))[0], constant([100, 0, 300, 400, 100, 100]), Story(host=lambda rank: f"n{rank}")
    )
    for node in range(14):
        # Each rank of the factory starts a second later than the one before.
        moved = [(row[0] + node * S, *row[1:]) for row in rows()]
        write_samples(folder, node, COLUMNS, moved, host=f"n{node}")
    text = " ".join(run_cli("diagnose", "--full", tmp_path).stdout.split())
    assert "At 14 ranks on 14 nodes: 12 of 14 nodes, the most throttled first." in text
    (told,) = runs_of(as_json(tmp_path))
    assert [node["host"] for node in told["nodes"]] == [f"n{node}" for node in range(14)]
    assert all(node["num_samples"] == 12 for node in told["nodes"])


# Which runs count, and how it ends


def test_steps_that_disagree_with_the_record_give_no_energy(tmp_path: Path) -> None:
    first, second = (one_run(tmp_path, plan) for plan in plans(points=(1,), repeats=2))
    ranks = json.loads(first.record.read_text(encoding="utf-8"))["ranks"]
    edit_json(first.record, ranks=[{**rank, "samples": rank["samples"] * 2} for rank in ranks])
    assert [run["run_id"] for run in runs_of(as_json(tmp_path, code=4), "energy")] == [second.path.name]

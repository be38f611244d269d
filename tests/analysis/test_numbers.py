"""Numbers made of runs: closed-form oracles, and properties that hold whatever the times are."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlbench.analysis.causes import causes_of
from dlbench.analysis.comparability import group_id
from dlbench.analysis.measures import load_steps, measure
from dlbench.analysis.scaling import Group, groups
from dlbench.analysis.table import tabulate
from dlbench.errors import IncompleteDataError
from dlbench.records.rows.shared import HEAD_BYTES, file_of, read_parts
from dlbench.records.rows.steps import StepWriter, read_steps
from dlbench.records.scan import read_run, scan
from dlbench.report.wording import basis_text
from dlbench.specs.plan import RunPlan
from dlbench.stats.estimates import Estimate
from dlbench.views.doubts import group_doubts, run_doubts
from tests.support.run_factory import (
    MS,
    NOW,
    Story,
    constant,
    edit_json,
    plans,
    write_run,
    write_scaling,
    write_unfinished,
)
from tests.support.watch_factory import leave_out, with_header

PHASES = (5.0, 1.0, 30.0, 50.0, 20.0, 10.0)
OTHER = 4.0  # 120 ms a step in all
S = 1_000_000_000


def one_plan(ranks: int = 1, **request: Any) -> RunPlan:
    return plans(points=(ranks,), repeats=1, **request)[0]


def only_group(folder: Path) -> Group:
    (found,) = groups(tabulate(scan(folder)))
    return found


def codes(folder: Path) -> set[str]:
    table = tabulate(scan(folder))
    return {doubt.code for group in groups(table) for doubt in group_doubts(group, table)}


# One run


def test_warm_up_steps_do_not_count(tmp_path: Path) -> None:
    plan = one_plan()
    warmup = plan.measure.warmup_steps

    def times(rank: int, step: int) -> tuple[Sequence[int], int]:
        return [0, 0, 0, (1000 if step < warmup else 100) * MS, 0, 0], 0

    found = measure(read_run(write_run(tmp_path, plan, times).path))
    assert found.step_median_s == 0.1
    assert found.throughput == pytest.approx(40)


@pytest.mark.parametrize("slow_rank", [0, 19])
def test_steps_of_any_length_are_counted_exactly(tmp_path: Path, slow_rank: int) -> None:
    """One rank computes longer than 4-byte integers hold; the others, in the same and other nodes, do not."""
    seconds = [2 if rank != slow_rank else 7 for rank in range(20)]
    folder = write_run(
        tmp_path, one_plan(20), lambda rank, step: ([0, 0, 0, seconds[rank] * S, (8 - seconds[rank]) * S, 0], 0)
    )
    run = read_run(folder.path)
    steps = load_steps(run)
    assert steps.phase_ns["backward"].tolist() == [[value * S] * len(steps.numbers) for value in seconds]
    causes = causes_of(run, steps)
    assert causes.seconds["compute"] + causes.seconds["straggler"] == pytest.approx(8 - 1)
    assert [late.rank for late in causes.waiting.ranks] == [slow_rank]
    assert causes.work_ns == tuple(value * S * len(steps.numbers) for value in seconds)


def test_the_slowest_rank_makes_the_step(tmp_path: Path) -> None:
    """Ranks take turns in being slow: each step takes 110 ms although each rank's mean is 105 ms."""

    def times(rank: int, step: int) -> tuple[Sequence[int], int]:
        return [0, 0, 0, (110 if (rank + step) % 2 else 100) * MS, 0, 0], 0

    found = measure(read_run(write_run(tmp_path, one_plan(2), times).path))
    assert found.step_median_s == 0.11
    assert found.parts["imbalance"] == pytest.approx(0, abs=1e-12)
    assert sum(found.parts.values()) == pytest.approx(0.105, abs=1e-12)


times_of_steps = st.lists(st.lists(st.integers(0, 10**9), min_size=7, max_size=7), min_size=1, max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=times_of_steps, ranks=st.integers(1, 3))
def test_parts_sum_to_the_step_for_any_times(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[list[int]], ranks: int
) -> None:
    def times(rank: int, step: int) -> tuple[Sequence[int], int]:
        row = drawn[(step + 5 * rank) % len(drawn)]
        return row[:6], row[6] + 1

    found = measure(read_run(write_run(tmp_path_factory.mktemp("runs"), one_plan(ranks), times).path))
    assert math.isclose(sum(found.parts.values()), found.measured_s / found.steps, rel_tol=1e-12)
    assert all(seconds >= -1e-15 for seconds in found.parts.values())
    assert 0 <= found.exchange_wait_s <= found.parts["exchange"] + 1e-15


@pytest.mark.parametrize("odd", [None, 0, 7, 18])
def test_ranks_whose_files_are_written_otherwise_are_read_as_well(tmp_path: Path, odd: int | None) -> None:
    """Files that are alike are read together, others one by one; one rank flushed at other steps than the rest."""
    plan = one_plan(19)
    folder = write_run(
        tmp_path, plan, lambda rank, step: ([MS * (1 + rank + step), 0, 0, 0, 7 * (rank == step), 0], 100 + rank)
    )
    if odd is not None:
        whole = read_steps(folder.steps(odd))
        header = {key: value for key, value in whole.header.items() if key != "fields"}
        leave_out(folder.steps(odd))
        with StepWriter(file_of(folder.steps(odd)), header, capacity=3) as writer:
            for row in whole.steps.tolist():
                writer.append(row)
    found = load_steps(read_run(folder.path))
    warmup, steps = plan.measure.warmup_steps, plan.measure.measured_steps
    assert found.numbers.tolist() == list(range(warmup, warmup + steps))
    for rank in range(19):
        own = read_steps(folder.steps(rank)).measured
        assert found.step_ns[rank].tolist() == own["step_ns"].tolist()
        assert all(found.phase_ns[name][rank].tolist() == own[f"{name}_ns"].tolist() for name in found.phase_ns)
        assert found.begin_ns[rank] == own["start_ns"][0]
        assert found.end_ns[rank] == own["start_ns"][-1] + own["step_ns"][-1]


# Runs that must yield no figure


def damage(folder: Path, what: str) -> None:
    steps = folder / "node-0000.steps"
    if what == "missing":
        steps.unlink()
    elif what == "torn":
        steps.write_bytes(steps.read_bytes()[:-5])
    elif what == "short":  # without the last block, that of rank 1
        last = read_parts(steps)[1].blocks[-1]
        steps.write_bytes(steps.read_bytes()[: -HEAD_BYTES - len(last.rows)])
    elif what == "no header":
        steps.write_bytes(b"\x00" * 100)
    elif what == "other rank":
        parts = read_parts(steps)
        steps.write_bytes(with_header(parts[0], ".steps", 0) + with_header(parts[0], ".steps", 1))
    elif what == "negative phase":
        leave_out(steps / "rank-0001")
        with StepWriter(steps, {"rank": 1, "run_id": folder.name}) as writer:
            for row in read_steps(steps / "rank-0000").steps.tolist():
                writer.append((*row[:4], -5, *row[5:]))
    elif what in ("samples", "measured_s"):
        ranks = json.loads((folder / "record.json").read_text())["ranks"]
        ranks[1][what] *= 3
        edit_json(folder / "record.json", ranks=ranks)
    elif what == "fewer ranks":
        edit_json(folder / "record.json", ranks=json.loads((folder / "record.json").read_text())["ranks"][:1])


DAMAGES = ("missing", "torn", "short", "no header", "other rank", "negative phase", "samples", "measured_s")


@pytest.mark.parametrize("what", [*DAMAGES, "fewer ranks"])
def test_damaged_run_yields_no_figure_and_is_named(tmp_path: Path, what: str) -> None:
    made = plans(repeats=1)
    folders = [write_run(tmp_path, plan, constant(PHASES, OTHER)) for plan in made]
    damage(folders[1].path, what)
    with pytest.raises(IncompleteDataError):
        measure(read_run(folders[1].path))
    table = tabulate(scan(tmp_path))
    assert list(table.figures) == [made[0].run_id]
    # A record that does not fit its plan is no run's at all.
    assert [item.state for item in table.without] == ["damaged"] * (what != "fewer ranks")
    assert len(table.damaged) == 1
    assert made[1].run_id in table.damaged[0]


def test_runs_that_did_not_work_are_listed_with_their_story(tmp_path: Path) -> None:
    made = plans(repeats=2)
    write_run(tmp_path, made[0], constant(PHASES))
    failed = {"name": "finite loss", "passed": False, "detail": "loss not finite on rank 1"}
    write_run(tmp_path, made[1], constant(PHASES), Story(state="invalid", checks=[failed]))
    write_unfinished(tmp_path, made[2], "failed", "the reason")
    write_unfinished(tmp_path, made[3])
    table = tabulate(scan(tmp_path))
    assert list(table.figures) == [made[0].run_id]
    found = {item.run.plan.run_id: (item.state, item.why) for item in table.without}
    assert found[made[1].run_id] == ("invalid", "finite loss: loss not finite on rank 1")
    assert found[made[2].run_id][0] == "failed"
    assert "the reason" in found[made[2].run_id][1]
    assert found[made[3].run_id][0] == "incomplete"
    assert table.damaged == ()
    with pytest.raises(ValueError, match="no figures"):
        measure(table.without[0].run)


def test_copied_folder_is_no_second_measurement(tmp_path: Path) -> None:
    plan = one_plan()
    folder = write_run(tmp_path, plan, constant(PHASES))
    shutil.copytree(folder.path, tmp_path / "zz-copy")
    table = tabulate(scan(tmp_path))
    assert len(table.figures) == 1
    assert "the copy is left out" in table.damaged[0]


# Scaling


def test_weak_efficiency_is_the_ratio_of_step_times(tmp_path: Path) -> None:
    write_scaling(tmp_path, base_ms=100, exchange_ms=25, points=(1, 2, 4))
    group = only_group(tmp_path)
    assert [point.ranks for point in group.points] == [1, 2, 4]
    assert group.baseline.efficiency == Estimate(1.0, None, None, 5, "by definition", "fraction")
    for point in group.points[1:]:
        assert point.efficiency.value == pytest.approx(100 / 125, rel=1e-9)
        assert point.speedup.value == pytest.approx(point.ranks * 0.8, rel=1e-9)
        assert point.ideal_speedup == point.ranks
        assert point.serial_fraction is None
        assert point.paired_with_baseline
        # Every repeat drifts by the same factor on both sides, so pairs all agree.
        assert point.efficiency.low == pytest.approx(0.8, rel=1e-9)
        assert point.efficiency.high == pytest.approx(0.8, rel=1e-9)
    # Repeats drift by a thousandth each.
    drift = math.prod(1 + repeat / 1000 for repeat in range(5)) ** (1 / 5)
    assert group.baseline.throughput.value == pytest.approx(4 / (0.1 * drift), rel=1e-9)
    assert group.points[2].throughput_per_rank.value == pytest.approx(4 / (0.125 * drift), rel=1e-9)
    assert group.is_sufficient


def write_strong(folder: Path, serial_ms: float, parallel_ms: float, points: tuple[int, ...]) -> None:
    """Amdahl's law: a serial part (optimizer) and a parallel one (backward)."""
    for plan in plans(points=points, scaling="strong", overrides={"train.batch_per_rank": 8}):
        shared = parallel_ms * points[0] / plan.layout.ranks
        write_run(folder, plan, constant([0, 0, 0, shared, 0, serial_ms]))


def test_the_baseline_is_the_fewest_ranks_whatever_their_nodes(tmp_path: Path) -> None:
    for nodes, ranks_per_node in ((2, 1), (1, 4)):
        layout = {"system": "box", "points_are": "nodes", "ranks_per_node": ranks_per_node}
        (plan,) = plans(points=(nodes,), repeats=1, series=f"s{nodes}", **layout)
        write_run(tmp_path, plan, constant([0, 0, 40, 50, 0, 10]))
    (group,) = groups(tabulate(scan(tmp_path)))
    places = [(point.ranks, point.nodes, point.is_baseline) for point in group.points]
    assert places == [(2, 2, True), (4, 1, False)]


def test_strong_scaling_finds_amdahls_serial_fraction(tmp_path: Path) -> None:
    write_strong(tmp_path, serial_ms=20, parallel_ms=80, points=(1, 2, 4))
    group = only_group(tmp_path)
    assert group.scaling == "strong"
    assert [point.batch_per_rank for point in group.points] == [8, 4, 2]
    for point in group.points[1:]:
        step = 20 + 80 / point.ranks
        assert point.speedup.value == pytest.approx(100 / step, rel=1e-9)
        assert point.efficiency.value == pytest.approx(100 / step / point.ranks, rel=1e-9)
        assert point.serial_fraction.value == pytest.approx(0.2, rel=1e-6)


# What may be compared


@pytest.mark.parametrize(
    ("change", "apart"),
    [
        ({}, False),
        ({"series": "later"}, False),
        ({"overrides": {"measure.stall_timeout_s": 30.0}}, False),
        ({"engine": "ddp"}, True),
        ({"data": "/data/jpeg"}, True),
        ({"overrides": {"train.batch_per_rank": 8}}, True),
        ({"overrides": {"train.precision": "bf16"}}, True),
        ({"overrides": {"model.image_size": 32}}, True),
        ({"overrides": {"train.optimizer.learning_rate": 0.5}}, True),
        ({"overrides": {"measure.measured_steps": 13}}, True),
        ({"overrides": {"layout.cores_per_rank": 2}}, True),
        ({"overrides": {"system.launch.pin": False}}, True),
        ({"scaling": "strong"}, True),
    ],
)
def test_only_equal_work_is_compared(tmp_path: Path, change: dict[str, Any], apart: bool) -> None:
    write_run(tmp_path / "a", one_plan(), constant(PHASES))
    write_run(tmp_path / "b", one_plan(**change), constant(PHASES))
    one, other = (scan(tmp_path / name).runs[0] for name in "ab")
    assert (group_id(one) != group_id(other)) is apart


# Doubts


def test_healthy_runs_raise_one_note_only(tmp_path: Path) -> None:
    write_scaling(tmp_path)
    assert codes(tmp_path) == {"synthetic-data"}


@pytest.mark.parametrize(
    ("story", "code"),
    [
        (Story(pinned=False), "not-pinned"),
        (Story(threads=3), "oversubscribed"),
        (Story(cores=lambda rank: (0,)), "oversubscribed"),
        (Story(warnings=["the machine was warm"]), "recorded"),
        (Story(bad_sample_count=2), "bad-samples"),
        (Story(environment_differences=["rank 1: kernel: 1, rank 0 has 2"]), "rank-environment"),
        (Story(settings=[{"key": "k", "requested": 1, "effective": 2, "evidence": "read back"}]), "inert"),
        (Story(environment={"dlbench.version": "0.0.1"}), "other-dlbench"),
        (Story(environment={"dlbench.commit": "0123456789ab"}), "other-dlbench"),
        (Story(environment={"variable.CUDA_LAUNCH_BLOCKING": "1"}, device="cuda:0 (A100)"), "launch-blocking"),
    ],
)
def test_doubts_of_a_run_are_told(tmp_path: Path, story: Story, code: str) -> None:
    run = read_run(write_run(tmp_path, one_plan(2), constant(PHASES), story).path)
    assert code in {doubt.code for doubt in run_doubts(run)}
    assert code in codes(tmp_path)


FAR = {"numa_node": 1}
SHARED_MEMORY = {"nccl": {"channels": {"SHM/direct/direct": 4}}}
DIRECT = {"nccl": {"channels": {"P2P/CUMEM": 4}}}


@pytest.mark.parametrize(
    ("gpu", "numa_nodes", "record", "expected"),
    [
        ({}, (), {}, set()),
        ({"numa_node": 0}, (0,), {}, set()),
        (FAR, (), {}, set()),  # the machine tells nothing of the cores
        (FAR, (0,), {}, {("gpu-remote", "serious")}),
        (FAR, (0, 1), {}, {("gpu-remote", "note")}),
        ({"uuid": "MIG-1", "is_slice": True}, (), {}, {("gpu-slice", "note")}),
        ({"visible": 1}, (), {}, {("no-peer-access", "serious")}),
        ({"no_peer_access": (1,)}, (), {}, {("no-peer-access", "serious")}),
        ({}, (), SHARED_MEMORY, {("no-peer-access", "serious")}),
        ({"visible": 1}, (), DIRECT, set()),  # what NCCL did counts more than what might be
    ],
)
def test_where_gpus_stand_is_told_where_it_costs(
    tmp_path: Path,
    gpu: dict[str, Any],
    numa_nodes: tuple[int, ...],
    record: dict[str, Any],
    expected: set[tuple[str, str]],
) -> None:
    story = Story(device="cuda:0 (A100)", gpu=gpu, numa_nodes=numa_nodes, record=record)
    run = read_run(write_run(tmp_path, one_plan(2), constant(PHASES), story).path)
    assert {(doubt.code, doubt.severity) for doubt in run_doubts(run)} == {("synthetic-data", "note"), *expected}


@pytest.mark.parametrize(
    ("torch", "cudnn", "asked", "expected"),
    [
        ("2.8.0", "91002", {}, "wrong results for large volumes"),
        ("2.9.0+cu128", "91002", {"model.memory_format": "channels-last"}, "use torch's own, slower kernels"),
        ("2.9.0", "91002", {"train.precision": "fp32"}, None),
        ("2.10.0", "91400", {}, "use torch's own, slower kernels"),
        ("2.10.0", "91400", {"model.memory_format": "channels-last"}, None),
        ("2.10.0", "91501", {}, None),
        ("2.8.0", "90701", {}, None),
    ],
)
def test_versions_of_cudnn_with_broken_3_d_convolutions_are_a_serious_warning(
    tmp_path: Path, torch: str, cudnn: str, asked: dict[str, Any], expected: str | None
) -> None:
    wanted = {"train.precision": "bf16", **asked}
    plans = {name: one_plan(1, workload=name, overrides=wanted) for name in ("cosmoflow", "resnet50")}
    versions = {"package.torch": torch, "torch.cudnn": cudnn}
    for name, plan in plans.items():
        for device in ("cpu", "cuda:0 (A100)"):
            story = Story(device=device, environment=versions)
            run = read_run(write_run(tmp_path / name / device[:3], plan, constant(PHASES), story).path)
            found = {doubt.text for doubt in run_doubts(run) if doubt.code == "conv3d"}
            if name == "cosmoflow" and device != "cpu" and expected:
                (text,) = found
                assert expected in text
                assert text.startswith(f"cuDNN 9.{cudnn[1:3].lstrip('0')} and torch {torch}: 3-D convolutions")
            else:
                assert found == set()


def doubts_of_network(
    folder: Path, channels: dict[str, int], adapters: dict[str, str], variables: dict[str, str] | None = None
) -> dict[str, tuple[str, str]]:
    """Severity and text by code, of a run whose NCCL log and environment say this."""
    environment = {f"variable.{name}": value for name, value in (variables or {}).items()}
    nccl = {"channels": {"P2P/CUMEM": 4, **channels}, "adapters": adapters}
    story = Story(device="cuda:0 (A100)", record={"nccl": nccl}, environment=environment)
    found = run_doubts(read_run(write_run(folder, one_plan(2), constant(PHASES), story).path))
    return {one.code: (one.severity, one.text) for one in found if one.code.startswith("nccl-")}


MLX = {"mlx5_0": "InfiniBand", "mlx5_1": "InfiniBand"}


@pytest.mark.parametrize(
    ("channels", "adapters", "variables", "expected"),
    [
        ({"NET/Socket": 8}, {}, {}, None),  # a network of Ethernet alone
        ({}, MLX, {}, None),  # one node
        ({"NET/IB/GDRDMA": 8}, MLX, {"NCCL_IB_DISABLE": "0"}, None),
        # Plugins: aws-ofi-nccl's, and one of NCCL's own interface; they need not say how they go.
        ({"NET/AWS Libfabric": 8}, {"efa_0": "EFA"}, {}, None),
        ({"NET/IBext_v9": 4, "NET/IBext_v9/GDRDMA": 4}, MLX, {}, None),
        (
            {"NET/Socket": 6, "NET/Socket/Shared": 2},
            MLX,
            {"NCCL_IB_DISABLE": "0", "NCCL_NET": "IB"},
            "NCCL used TCP sockets between nodes (8 connections), although they have mlx5_0 (InfiniBand), mlx5_1 "
            "(InfiniBand): to use them NCCL needs libibverbs and /dev/infiniband, in a container too",
        ),
        (
            {"NET/Socket": 8},
            {"cxi0": "Slingshot"},
            {},
            "NCCL used TCP sockets between nodes (8 connections), although they have cxi0 (Slingshot): to use them "
            "NCCL needs its plugin aws-ofi-nccl (libnccl-net.so)",
        ),
        (
            {"NET/Socket": 8},
            {f"efa_{number}": "EFA" for number in range(8)},
            {"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"},
            "NCCL used TCP sockets between nodes (8 connections), although they have efa_0 (EFA), efa_1 (EFA), "
            "efa_2 (EFA), efa_3 (EFA), efa_4 (EFA), efa_5 (EFA) and 2 more: NCCL_NET=Socket was set and "
            "NCCL_IB_DISABLE=1 was set",
        ),
    ],
)
def test_sockets_where_nodes_have_adapters_are_a_serious_warning(
    tmp_path: Path, channels: dict[str, int], adapters: dict[str, str], variables: dict[str, str], expected: str | None
) -> None:
    found = doubts_of_network(tmp_path, channels, adapters, variables)
    assert found == ({} if expected is None else {"nccl-socket": ("serious", expected)})


def test_messages_between_nodes_by_the_host_s_memory_are_noted(tmp_path: Path) -> None:
    found = doubts_of_network(tmp_path, {"NET/IB": 2, "NET/IB/GDRDMA": 6}, MLX)
    assert found == {
        "nccl-no-gdrdma": (
            "note",
            "2 of NCCL's 8 connections between nodes had no GPUDirect RDMA, through the host's memory: check "
            "nvidia-peermem or DMA-BUF, and the distance of adapters from the GPUs",
        )
    }


def test_inert_setting_is_told_once(tmp_path: Path) -> None:
    story = Story(
        settings=[{"key": "k", "requested": 1, "effective": 2, "evidence": ""}],
        warnings=["k: 1 was asked for, 2 was in force ()"],
    )
    run = read_run(write_run(tmp_path, one_plan(), constant(PHASES), story).path)
    assert sorted(doubt.code for doubt in run_doubts(run)) == ["recorded", "synthetic-data"]


def write_pair(folder: Path, first: Story, second: Story) -> None:
    for plan, story in zip(plans(repeats=1), (first, second), strict=True):
        write_run(folder, plan, constant(PHASES), story)


def test_scatter_between_sessions_stands_beside_that_within_them(tmp_path: Path) -> None:
    """Ten runs of two days, 4 % apart: 1 % of scatter within a day says nothing of the next one."""
    for number, (day, slow) in enumerate((("monday", 1.0), ("friday", 1.04))):
        for plan in plans(points=(1,), repeats=5, series=day):
            factor = slow * (1 + 0.01 * (plan.series.repeat - 2) / 1.58)
            told = Story(finished=NOW + timedelta(days=4 * number))
            write_run(tmp_path, plan, constant([part * factor for part in PHASES]), told)
    table = tabulate(scan(tmp_path))
    (group,) = groups(table)
    (doubt,) = [doubt for doubt in group_doubts(group, table) if doubt.code == "pooled-sessions"]
    assert doubt.text == (
        "2 sessions are pooled at 1 rank: throughput scatters by 2.7 % between and 1.0 % within them; until there are "
        "5, intervals are their range: choose one by --where series=NAME"
    )
    assert basis_text(group.baseline.throughput) == "range of 2 sessions of 10 runs, 50 %"


# The login node

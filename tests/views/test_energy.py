"""Energy from samples against closed forms: integrals, stages, methods, doubts, Slurm's account, the words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.analysis import scaling
from dlbench.analysis.table import tabulate
from dlbench.analysis.telemetry.energy import KINDS, Kind, RunEnergy, run_energy
from dlbench.analysis.telemetry.node_samples import Curve, counter_curve, rate_curve
from dlbench.errors import IncompleteDataError
from dlbench.jobs.scheduler import Submission
from dlbench.jobs.slurm.accounting import with_accounting
from dlbench.records.files import write_json
from dlbench.records.folder import RunFolder
from dlbench.records.rows.samples import sample_writer
from dlbench.records.rows.spans import STAGE
from dlbench.records.rows.steps import StepWriter
from dlbench.records.scan import Run, read_run, scan
from dlbench.specs.plan import RunPlan
from dlbench.views.energy import DetailedEnergy, KindEnergy, detailed_energy
from tests.support.programs import on_path
from tests.support.run_factory import Story, constant, plans, write_run
from tests.support.watch_factory import write_samples, write_spans

S = 1_000_000_000
STEP_S = 1.0
"""Of every step; 3 of warm-up and 12 measured ones, from second 1 of rank 0 and second 2 of rank 1."""

Power = Callable[[float], float]


def step_times() -> Any:
    return constant([1000 * STEP_S * part for part in (0.1, 0.0, 0.3, 0.4, 0.1, 0.1)])


def one_node(points: int = 1, **request: Any) -> RunPlan:
    return plans(points=(points,), repeats=1, **request)[0]


def two_nodes() -> RunPlan:
    return plans(
        system="example-gpu",
        points=(2,),
        ranks_per_node=1,
        repeats=1,
        overrides={"layout.cores_per_rank": 1, "system.node.gpus": 1},
    )[0]


def stage(name: str, begin_s: float, end_s: float) -> dict[str, Any]:
    return {"lane": STAGE, "name": name, "start_ns": round(begin_s * S), "end_ns": round(end_s * S)}


def stages(begin_s: float = 1.0) -> list[dict[str, Any]]:
    """Of a rank whose first step starts at `begin_s`: 4 s of start and building, a second at the end."""
    return [
        stage("starting", begin_s - 4, begin_s - 3),
        stage("building", begin_s - 3, begin_s),
        stage("warm-up", begin_s, begin_s + 3),
        stage("measuring", begin_s + 3, begin_s + 15),
        stage("finishing", begin_s + 15, begin_s + 16),
    ]


def gpu_story(**changes: Any) -> Story:
    return Story(device="cuda:0 (NVIDIA A100)", **changes)


def make_run(
    out: Path,
    columns: Sequence[str],
    rows: Iterable[Sequence[float]],
    *,
    story: Story | None = None,
    plan: RunPlan | None = None,
    spans: Iterable[Mapping[str, Any]] | None = None,
    **more: Any,
) -> Run:
    """A run of one node and 15 steps of a second, with samples."""
    folder = write_run(out, plan or one_node(), step_times(), story or gpu_story())
    write_spans(folder, 0, stages() if spans is None else spans)
    write_samples(folder, 0, columns, rows, **more)
    return read_run(folder.path)


def every(period_s: float, begin_s: float = -4.0, end_s: float = 18.0) -> list[float]:
    count = round((end_s - begin_s) / period_s)
    return [begin_s + number * period_s for number in range(count + 1)]


def rows_of(times: Iterable[float], *values: Power) -> list[tuple[float, ...]]:
    return [(round(t * S), *(value(t) for value in values)) for t in times]


def joules(energy: RunEnergy, *names: str, kind: Any = "GPUs") -> float:
    return energy.joules(kind, *names)


def measured(out: Path) -> DetailedEnergy:
    table = tabulate(scan(out))
    (group,) = scaling.groups(table)
    return detailed_energy(group, table)


def kind_of(found: DetailedEnergy, kind: Kind = "GPUs") -> KindEnergy:
    (point,) = found.points
    (chosen,) = [energy for energy in point.kinds if energy.kind == kind]
    return chosen


# Integrals


def test_long_gaps_of_power_are_missing_and_of_a_counter_are_not() -> None:
    times = np.array([0, 1, 2, 3, 9, 10, 11]) * S
    power = rate_curve(times, np.full(7, 50.0), 1.0)
    assert power.over(0, 11 * S).value == pytest.approx(250.0)
    assert power.over(0, 11 * S).known_ns == 5 * S
    counter = counter_curve(times, 50.0 * times / S, 1.0)
    assert counter.over(0, 11 * S).value == pytest.approx(550.0)
    assert counter.over(0, 11 * S).coverage == 1


def test_a_long_gap_of_a_counter_counts_only_where_it_lies_whole() -> None:
    times = np.array([0, 1, 2, 100, 101]) * S
    curve = counter_curve(times, 50.0 * times / S, 1.0)
    for begin, end, known in (
        (40, 60, 0),
        (0, 60, 2),
        (40, 101, 1),
        (0, 99, 2),
        (3, 101, 1),
        (2, 100, 98),
        (0, 101, 101),
    ):
        amount = curve.over(begin * S, end * S)
        assert (amount.known_ns, amount.value) == (known * S, pytest.approx(50.0 * known)), (begin, end)
        assert amount.length_ns == (end - begin) * S
    assert curve.over(40 * S, 60 * S).rate is None


def test_a_sampler_that_doubles_its_period_leaves_no_gap() -> None:
    gaps = [1] * 20 + [2] * 20 + [4] * 20 + [8] * 20
    times = np.cumsum([0, *gaps]) * S
    curve = rate_curve(times, np.full(len(times), 10.0), 8.0)
    assert curve.over(0, int(times[-1])).coverage == 1
    # The same early gap is one at the period that was in force then.
    holed = np.delete(times, slice(3, 9))
    assert rate_curve(holed, np.full(len(holed), 10.0), 8.0).over(0, int(times[-1])).known_ns == times[-1] - 7 * S


def curves() -> st.SearchStrategy[Curve]:
    def build(parts: list[tuple[int, float, bool]], counter: bool) -> Curve:
        times = np.cumsum([gap for gap, _, _ in parts]).astype(np.int64)
        values = np.array([math.nan if lost else value for _, value, lost in parts])
        return counter_curve(times, values, 1.0) if counter else rate_curve(times, values, 1.0)

    part = st.tuples(st.integers(1, 12 * S), st.floats(0, 1e4), st.booleans())
    return st.builds(build, st.lists(part, min_size=1, max_size=30), st.booleans())


@given(curves(), st.lists(st.integers(-5 * S, 200 * S), min_size=3, max_size=6))
def test_parts_of_an_interval_sum_to_it(curve: Curve, edges: list[int]) -> None:
    edges = sorted(edges)
    whole = curve.over(edges[0], edges[-1])
    parts = [curve.over(begin, end) for begin, end in pairwise(edges)]
    # A long gap of a counter that an edge cuts is in the whole, and in none of its parts.
    cut_ns, cut = 0, 0.0
    # A reset is known neither in whole nor in part.
    bridged = curve.bridged & curve.known
    for start, stop, rate, is_bridge in zip(
        curve.time_ns[:-1].tolist(), curve.time_ns[1:].tolist(), curve.begin_rate, bridged, strict=True
    ):
        if is_bridge and edges[0] <= start and stop <= edges[-1] and any(start < edge < stop for edge in edges):
            cut_ns, cut = cut_ns + stop - start, cut + rate * (stop - start) / 1e9
    assert sum(part.known_ns for part in parts) + cut_ns == whole.known_ns
    assert sum(part.length_ns for part in parts) == whole.length_ns
    assert sum(part.value for part in parts) + cut == pytest.approx(whole.value, rel=1e-9, abs=1e-6)
    assert 0 <= whole.coverage <= 1


@given(curves(), st.lists(st.integers(-5 * S, 200 * S), min_size=2, max_size=12))
def test_amounts_between_edges_are_those_of_each_interval(curve: Curve, edges: list[int]) -> None:
    edges = sorted(edges)
    for amount, (begin, end) in zip(curve.between(edges), pairwise(edges), strict=True):
        wanted = curve.over(begin, end)
        assert (amount.known_ns, amount.length_ns) == (wanted.known_ns, wanted.length_ns)
        assert amount.value == pytest.approx(wanted.value, rel=1e-9, abs=1e-6)


@given(curves(), st.integers(0, 100 * S), st.integers(0, 100 * S))
def test_an_integral_is_that_of_many_small_steps(curve: Curve, one: int, other: int) -> None:
    begin, end = sorted((one, other))
    total = 0.0
    for n in range(len(curve.known)):
        start, stop = int(curve.time_ns[n]), int(curve.time_ns[n + 1])
        first, last = max(start, begin), min(stop, end)
        is_cut = curve.bridged[n] and (first, last) != (start, stop)
        if curve.known[n] and last > first and not is_cut:
            grid = np.linspace(first, last, 50)
            share = (grid - start) / (stop - start)
            rate = curve.begin_rate[n] * (1 - share) + curve.end_rate[n] * share
            total += float(np.mean((rate[1:] + rate[:-1]) / 2) * (last - first) / 1e9)
    assert curve.over(begin, end).value == pytest.approx(total, rel=1e-6, abs=1e-6)


# One run


def test_stages_of_a_run_sum_to_the_whole(tmp_path: Path) -> None:
    spans = [*stages(), stage("staging", -1.5, -0.5), stage("evaluation", 6, 7), stage("checkpoint", 7, 7.5)]
    run = make_run(tmp_path, ["gpu.0.energy_j"], rows_of(every(0.5), lambda t: 1e6 + 300 * t), spans=spans)
    energy = run_energy(run)
    assert energy.methods("GPUs") == ("energy counter",)
    expected = {
        "idle": 2.0,
        "building": 2.0,
        "staging": 1.0,
        "warm-up": 3.0,
        "measured": 10.5,
        "evaluation": 1.0,
        "checkpoint": 0.5,
    }
    assert {name: joules(energy, name) for name in expected} == pytest.approx({k: 300 * v for k, v in expected.items()})
    assert joules(energy) == pytest.approx(300 * 20, rel=1e-9)
    assert joules(energy) == pytest.approx(sum(joules(energy, name) for name in expected), rel=1e-12)
    assert energy.sampled_share("GPUs") == 1
    assert energy.mean_power_w("GPUs") == pytest.approx(300.0)


def test_joules_a_sample_are_of_the_measured_window(tmp_path: Path) -> None:
    def total(t: float) -> float:
        """100 W until the first measured step at 4 s, then 400 W."""
        return 100 * t if t < 4 else 400 + 400 * (t - 4)

    energy = run_energy(make_run(tmp_path, ["gpu.0.energy_j"], rows_of(every(0.5), total)))
    assert energy.num_samples == 12 * 4
    assert energy.energy_per_sample_j("GPUs") == pytest.approx(400 * 12 / 48)
    assert energy.doubts == ()


def test_a_counter_that_failed_early_gives_way_to_power(tmp_path: Path) -> None:
    rows = rows_of(every(1.0), lambda t: 150.0, lambda t: 150 * t + 1000 if t < 3 else math.nan)
    run = make_run(
        tmp_path,
        ["gpu.0.power_w", "gpu.0.energy_j"],
        rows,
        failures=[{"failed": "gpu.0.energy_j", "time_ns": 3 * S, "reason": "GPU is lost"}],
    )
    energy = run_energy(run)
    assert energy.methods("GPUs") == ("power over time stamps",)
    assert joules(energy, "measured") == pytest.approx(150 * 12)
    assert any("gpu.0.energy_j: GPU is lost" in text for text in energy.doubts)


def test_counter_and_power_are_checked_against_each_other(tmp_path: Path) -> None:
    both = ["gpu.0.power_w", "gpu.0.energy_j"]
    agreeing = run_energy(make_run(tmp_path / "a", both, rows_of(every(1.0), lambda t: 310.0, lambda t: 300 * t)))
    assert agreeing.sources[0].counter_over_power == pytest.approx(300 / 310, rel=1e-6)
    assert agreeing.doubts == ()
    apart = run_energy(make_run(tmp_path / "b", both, rows_of(every(1.0), lambda t: 200.0, lambda t: 300 * t)))
    assert apart.sources[0].counter_over_power == pytest.approx(1.5)
    assert any("1.50 times the sum of its power" in text for text in apart.doubts)
    assert joules(apart, "measured") == pytest.approx(3600)


def test_a_reset_is_told_and_leaves_the_rest(tmp_path: Path) -> None:
    rows = rows_of(every(1.0), lambda t: 1e5 + 300 * t if t < 10 else 300 * (t - 10))
    energy = run_energy(make_run(tmp_path, ["gpu.0.energy_j"], rows))
    assert energy.methods("GPUs") == ("energy counter with reset",)
    assert joules(energy, "measured") == pytest.approx(300 * 11)
    assert energy.sampled_share("GPUs", "measured") == pytest.approx(11 / 12)
    assert energy.energy_per_sample_j("GPUs") == pytest.approx(300 * 12 / 48)
    assert any("was reset" in text for text in energy.doubts)
    assert any("8% of the measured window was not sampled" in text for text in energy.doubts)


def test_too_little_sampled_makes_no_figure(tmp_path: Path) -> None:
    energy = run_energy(make_run(tmp_path, ["gpu.0.energy_j"], rows_of(every(1.0, end_s=12.0), lambda t: 300 * t)))
    assert energy.energy_per_sample_j("GPUs") is None
    assert joules(energy, "measured") == pytest.approx(300 * 8)
    assert any("only 67% of the measured window was sampled" in text for text in energy.doubts)
    told = kind_of(measured(tmp_path))
    assert told.energy_per_sample is None
    assert told.sampled_share == pytest.approx(8 / 12)


def test_rapl_is_apart_and_told_as_the_whole_node(tmp_path: Path) -> None:
    columns = ["host.energy.package-0_j", "host.energy.package-0.dram_j", "gpu.0.energy_j"]
    rows = rows_of(every(0.5), lambda t: 90 * t, lambda t: 5 + 60 * t, lambda t: 300 * t)
    energy = run_energy(make_run(tmp_path, columns, rows))
    assert [source.name for source in energy.of("processors")] == ["package-0", "package-0.dram"]
    assert joules(energy, "measured", kind="processors") == pytest.approx(150 * 12)
    assert joules(energy, "measured") == pytest.approx(300 * 12)
    assert any("whole node" in note for note in energy.notes)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("host.energy.package-1_j", "energy_uj: Permission denied"), ("host.energy.intel-rapl_2_j", "name: I/O error")],
)
def test_a_rapl_zone_that_cannot_be_read_leaves_no_sum(tmp_path: Path, name: str, reason: str) -> None:
    run = make_run(
        tmp_path, ["host.energy.package-0_j"], rows_of(every(0.5), lambda t: 90 * t), unavailable={name: reason}
    )
    energy = run_energy(run)
    assert energy.of("processors") == ()
    assert energy.amounts("processors") == []
    assert energy.why["processors"] == f"{name.split('.')[2].removesuffix('_j')} is not read: {reason} (n0)"


def test_a_gap_over_a_border_of_stages_is_missing_time(tmp_path: Path) -> None:
    """Samples are missing from second 2 to 12; the measured steps begin at second 4."""
    times = [t for t in every(0.5) if not 2 < t < 12]
    columns = ["gpu.0.energy_j", "host.energy.package-0_j"]
    energy = run_energy(make_run(tmp_path, columns, rows_of(times, lambda t: 300 * t, lambda t: 80 * t)))
    for kind in KINDS:
        assert energy.sampled_share(kind, "measured") == pytest.approx(4 / 12)
        assert energy.energy_per_sample_j(kind) is None
    assert joules(energy, "measured") == pytest.approx(300 * 4)
    assert any("only 33% of the measured window was sampled" in text for text in energy.doubts)


def with_pause(folder: RunFolder, spans: Iterable[Mapping[str, Any]]) -> Run:
    """A run that pauses for 3 s before its last measured step, from second 15 to 18."""
    folder.node_steps(0).unlink()
    with StepWriter(folder.node_steps(0), {"rank": 0}) as writer:
        for step in range(15):
            start = S * (1 + step + (3 if step == 14 else 0))
            writer.append((step, int(step < 3), start, S, *([S // 6] * 6), 4, 2.0))
    write_spans(folder, 0, spans)
    write_samples(folder, 0, ["gpu.0.energy_j"], rows_of(every(1.0, end_s=22), lambda t: 300 * t))
    return read_run(folder.path)


def test_pauses_count_as_measured_only_where_no_span_tells_of_them(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "told", one_node(), step_times(), gpu_story())
    told = run_energy(with_pause(folder, [*stages(), stage("evaluation", 15, 18)]))
    assert joules(told, "measured") == pytest.approx(300 * 12)
    assert told.doubts == ()
    folder = write_run(tmp_path / "untold", one_node(), step_times(), gpu_story())
    untold = run_energy(with_pause(folder, stages()))
    assert joules(untold, "measured") == pytest.approx(300 * 15)
    assert any("20% of the measured window is outside of steps" in text for text in untold.doubts)


def test_without_spans_only_steps_are_told_apart(tmp_path: Path) -> None:
    folder = write_run(tmp_path, one_node(), step_times(), gpu_story())
    write_samples(folder, 0, ["gpu.0.energy_j"], rows_of(every(1.0), lambda t: 300 * t))
    energy = run_energy(read_run(folder.path))
    assert any("no spans of stages" in text for text in energy.doubts)
    assert energy.amounts("GPUs", "building") == []
    assert joules(energy) == pytest.approx(300 * 15)


def test_two_nodes_each_on_its_own_clock(tmp_path: Path) -> None:
    folder = write_run(tmp_path, two_nodes(), step_times(), gpu_story(host=lambda rank: f"n{rank}"))
    for rank in (0, 1):
        write_spans(folder, rank, stages(1.0 + rank))
        # 200 W before the first measured step, which is a second later on node 1's clock, and 500 W from then on.
        first = 4.0 + rank
        total = [200 * min(t, first) + 500 * max(0.0, t - first) for t in every(1.0)]
        rows = [(round(t * S), value, 50 * t) for t, value in zip(every(1.0), total, strict=True)]
        write_samples(folder, rank, ["gpu.0.energy_j", "host.energy.package-0_j"], rows, host=f"n{rank}")
    energy = run_energy(read_run(folder.path))
    assert joules(energy, "measured") == pytest.approx(2 * 500 * 12)
    assert joules(energy, "warm-up") == pytest.approx(2 * 200 * 3)
    assert energy.num_samples == 2 * 48
    assert energy.energy_per_sample_j("GPUs") == pytest.approx(500 * 12 / 48)
    assert energy.mean_power_w("GPUs", "measured") == pytest.approx(1000.0)


def test_a_node_that_does_not_tell_leaves_no_sum(tmp_path: Path) -> None:
    folder = write_run(tmp_path, two_nodes(), step_times(), gpu_story(host=lambda rank: f"n{rank}"))
    for rank in (0, 1):
        write_spans(folder, rank, stages(1.0 + rank))
    columns = ["gpu.0.energy_j", "host.energy.package-0_j"]
    write_samples(folder, 0, columns, rows_of(every(1.0), lambda t: 300 * t, lambda t: 80 * t))
    write_samples(
        folder,
        1,
        columns[1:],
        rows_of(every(1.0), lambda t: 80 * t),
        host="n1",
        unavailable={"gpu": "NVML Shared Library Not Found"},
    )
    energy = run_energy(read_run(folder.path))
    assert energy.why["GPUs"] == "NVML Shared Library Not Found (n1)"
    assert energy.amounts("GPUs") == []
    assert joules(energy, kind="processors") == pytest.approx(2 * 80 * 20)


# Which GPUs


def four_gpus(
    tmp_path: Path,
    device: str = "cuda:1 (NVIDIA A100)",
    told: Mapping[str, str] | None = None,
    gpu: Mapping[str, Any] | None = None,
    **environment: str,
) -> RunEnergy:
    """Energy of GPUs that take 100, 200, 300 and 400 W; `told`: facts that the sampler puts into the header."""
    names = {f"gpu.{gpu}": "NVIDIA A100" for gpu in range(4)}
    story = Story(device=device, gpu=gpu or {}, environment={"host": "n0", **names, **environment})
    folder = write_run(tmp_path, one_node(), step_times(), story)
    write_spans(folder, 0, stages())
    columns = [(f"gpu.{gpu}.energy_j", "<f8") for gpu in range(4)]
    header = {"node_rank": 0, "host": "n0", "run_id": folder.path.name, "period_s": 1.0, "unavailable": {}}
    with sample_writer(folder.samples(0), {**header, "facts": dict(told or {})}, columns, 1_000_000) as writer:
        for t in every(1.0):
            writer.append((round(t * S), 0, *(100 * (gpu + 1) * t for gpu in range(4))))
    return run_energy(read_run(folder.path))


UUIDS = {f"gpu.{gpu}.uuid": f"GPU-{gpu}" for gpu in range(4)}


def test_gpus_count_by_the_uuid_of_the_rank(tmp_path: Path) -> None:
    """Whatever number CUDA gives it, and whatever list of visible devices there was."""
    assert four_gpus(tmp_path / "second", told=UUIDS).mean_power_w("GPUs", "measured") == pytest.approx(200.0)
    visible = {"variable.CUDA_VISIBLE_DEVICES": "0"}
    third = four_gpus(tmp_path / "third", "cuda:0 (NVIDIA A100)", UUIDS, gpu={"uuid": "GPU-2"}, **visible)
    assert third.mean_power_w("GPUs", "measured") == pytest.approx(300.0)
    assert not any("is not known" in text for text in third.doubts)


def test_gpus_that_cannot_be_told_apart_all_count_and_are_doubtful(tmp_path: Path) -> None:
    for name, told in {"none": {}, "another": {"gpu.0.uuid": "GPU-x"}}.items():
        energy = four_gpus(tmp_path / name, told=told)
        assert energy.mean_power_w("GPUs", "measured") == pytest.approx(1000.0)
        assert any("is not known: all of them count" in text for text in energy.doubts)


@pytest.mark.parametrize(
    ("gpu", "told"), [({"uuid": "MIG-1", "is_slice": True}, {}), ({}, {**UUIDS, "gpu.1.mig": "on"})]
)
def test_a_divided_board_is_refused(tmp_path: Path, gpu: dict[str, Any], told: dict[str, str]) -> None:
    energy = four_gpus(tmp_path, told=told, gpu=gpu)
    assert energy.amounts("GPUs") == []
    assert "MIG" in energy.why["GPUs"]


def test_energy_of_gpus_that_the_sampler_was_not_shown_is_no_figure(tmp_path: Path) -> None:
    """Slurm's control groups show each rank its own GPU alone, and the sampler is the first rank's."""
    overrides = {"layout.cores_per_rank": 1}
    (plan,) = plans(system="example-gpu", points=(4,), ranks_per_node=4, repeats=1, overrides=overrides)
    story = Story(device="cuda:0 (NVIDIA A100)", environment={"host": "n0", "gpu.0": "NVIDIA A100"})
    folder = write_run(tmp_path, plan, step_times(), story)
    for rank in range(4):
        write_spans(folder, rank, stages())
    columns = [("gpu.0.energy_j", "<f8")]
    header = {"node_rank": 0, "host": "n0", "run_id": plan.run_id, "period_s": 1.0, "unavailable": {}}
    facts = {"gpu.0.uuid": "GPU-0"}
    with sample_writer(folder.samples(0), {**header, "facts": facts}, columns, 1_000_000) as writer:
        for t in every(1.0):
            writer.append((round(t * S), 0, 100 * t))
    energy = run_energy(read_run(folder.path))
    assert energy.amounts("GPUs") == []
    assert energy.why["GPUs"] == (
        "the sampler of n0 could see 1 of the 4 GPUs that its ranks used, as when Slurm hides GPUs of other "
        "tasks (slurm.gpu_bind site): the others were not sampled"
    )


# Several runs, and their words


def write_series(out: Path, watts_of: Sequence[float], **story: Any) -> list[RunPlan]:
    made = plans(points=(1,), repeats=len(watts_of))
    for plan, power in zip(made, watts_of, strict=True):
        make_run(
            out,
            ["gpu.0.energy_j", "gpu.0.power_w"],
            rows_of(every(1.0), lambda t, p=power: p * t, lambda t, p=power: p),
            plan=plan,
            story=gpu_story(**story),
        )
    return made


GEOMETRIC = (300 * 310 * 320) ** (1 / 3)


def test_runs_of_a_point_become_an_interval(tmp_path: Path) -> None:
    write_series(tmp_path, [300, 310, 320])
    told = kind_of(measured(tmp_path))
    each = told.energy_per_sample
    assert (each.value, each.low, each.high, each.n) == pytest.approx((GEOMETRIC / 4, 300 / 4, 320 / 4, 3))
    assert told.mean_power.value == pytest.approx(310)
    assert told.whole.value == pytest.approx(310 * 20)


def test_samples_of_another_run_are_refused(tmp_path: Path) -> None:
    first, second = write_series(tmp_path, [300, 320])
    target = RunFolder(tmp_path / second.run_id).samples(0)
    target.write_bytes(RunFolder(tmp_path / first.run_id).samples(0).read_bytes())
    with pytest.raises(IncompleteDataError, match=f"belongs to run '{first.run_id}'"):
        run_energy(read_run(tmp_path / second.run_id))


# Slurm


@pytest.fixture
def sacct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a stub of sacct on PATH; returns the file with its calls."""
    calls = tmp_path / "calls"

    def place(body: str) -> Path:
        monkeypatch.setenv("PATH", on_path(tmp_path / "bin", sacct=f'echo "$@" >> {calls}\n{body}'))
        return calls

    return place


def row(job: str, raw: str, short: str = "", name: str = "batch") -> str:
    """A line as sacct prints it of a job of one node, with its energy."""
    times = "1772366400|1772366400|1772366500"
    return f"{job}|COMPLETED|0:0|{times}|1|n1|30|batch|lab|normal||{raw}|{short}|{name}"


def submitted(out: Path, jobs: Mapping[str, str], shared: Sequence[str] = ()) -> list[Run]:
    for run_id, job in jobs.items():
        submission = Submission(
            job_id=job,
            owner="root",
            command=("sbatch",),
            submitted="2026-03-01T12:00:00Z",
            log="run/slurm-7.out",
            runs=tuple(shared),
        )
        write_json(RunFolder(out / run_id).submission, submission.model_dump(mode="json"))
    return scan(out).runs


@pytest.mark.parametrize(
    ("output", "joules"),
    [
        ([row("7", "1234567", "1.23M")], 1234567.0),
        ([row("7", "", "1.23M")], 1.23e6),
        ([row("7", "", "850.50K")], 850_500.0),
        ([row("7", "", "512")], 512.0),
        # The job's own line is empty: the largest step, because steps count the same nodes.
        ([row("7", ""), row("7.batch", "90"), row("7.extern", "100"), row("7.0", "80")], 100.0),
        ([row("70", "5"), row("7", "6")], 6.0),
        *(
            ([row("7", raw, short)], None)
            for raw, short in (("0", "0"), ("", ""), ("18446744073709551614", "18446744.07T"))
        ),
        ([row("7", "N/A", "N/A")], None),
    ],
)
def test_energy_of_a_job(
    sacct: Callable[[str], Path], tmp_path: Path, output: Sequence[str], joules: float | None
) -> None:
    lines = "\n".join(output)
    calls = sacct(f"cat <<'E'\n{lines}\nE")
    (plan,) = write_series(tmp_path / "runs", [300])
    (run,), _ = with_accounting(submitted(tmp_path / "runs", {plan.run_id: "7"}))
    assert run.accounting.job_energy_j == (None if joules is None else pytest.approx(joules))
    assert (joules is None) == ("AcctGatherEnergyType" in run.accounting.not_measured.get("energy_j", ""))
    assert len(calls.read_text(encoding="utf-8").splitlines()) == 1

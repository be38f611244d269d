"""Causes of lost time, and the account of the lost percent against its definition, read out run by run."""

from __future__ import annotations

import itertools
import math
import random
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlbench.analysis.attribution import Attribution, attribute
from dlbench.analysis.causes import CAUSES, COMPUTE_PARTS, Causes, causes_of
from dlbench.analysis.measures import load_steps, measure
from dlbench.analysis.scaling import Group, groups
from dlbench.analysis.slow_nodes import Straggler, main_straggler, ranking
from dlbench.analysis.table import RunTable, tabulate
from dlbench.records.out_of_core import MemoryResult
from dlbench.records.rows.steps import PHASES
from dlbench.records.scan import read_run, scan
from dlbench.specs.plan import RunPlan
from dlbench.stats.estimates import interval_of_difference, interval_of_mean, ratio_estimate
from dlbench.stats.pairing import KnownKey, RunKey
from dlbench.units import bytes_option
from dlbench.views.causes.numbers import CausePoint, lost_percent
from tests.support.out_of_core_factory import OTHER_MS, memory_result, method_plans, pass_times, write_memory_run
from tests.support.run_factory import LAUNCH_MS, MS, StepTimes, Story, constant, plans, write_launch_bound, write_run
from tests.support.watch_factory import watch_result, write_samples

PLAIN = {"input": 5.0, "h2d": 0.0, "forward": 30.0, "backward": 50.0, "optimizer": 10.0, "other": 5.0}
"""Milliseconds of a rank's own work in a step; 100 in all."""
NETWORK_MS = 8.0

Work = Callable[[int, int], dict[str, float]]
"""Rank and step -> milliseconds of its own work, where it differs from `PLAIN`."""


def simulate(plan: RunPlan, work: Work, network_ms: float = NETWORK_MS) -> StepTimes:
    """Ranks that leave every exchange together, the network's time after the last one came to it.

    All ranks begin the measured steps together, too.
    """
    ranks = plan.layout.ranks
    table: dict[tuple[int, int], tuple[list[int], int]] = {}
    start = [0] * ranks
    for step in range(plan.measure.warmup_steps + plan.measure.measured_steps):
        if step == plan.measure.warmup_steps:
            start = [max(start)] * ranks
        own = [{name: round(ms * MS) for name, ms in (PLAIN | work(r, step)).items()} for r in range(ranks)]
        came = [start[r] + sum(own[r][name] for name in ("input", "h2d", "forward", "backward")) for r in range(ranks)]
        end = max(came) + round(network_ms * MS) if ranks > 1 else came[0]
        for r in range(ranks):
            phases = {**own[r], "exchange": end - came[r]}
            table[r, step] = [phases[name] for name in PHASES], own[r]["other"]
            start[r] = end + own[r]["optimizer"] + own[r]["other"]
    return lambda rank, step: table[rank, step]


def one_run(folder: Path, ranks: int, work: Work, network_ms: float = NETWORK_MS) -> Causes:
    plan = plans(points=(ranks,), repeats=1)[0]
    return causes_of(read_run(write_run(folder, plan, simulate(plan, work, network_ms)).path))


def plain(rank: int, step: int) -> dict[str, float]:
    return {}


EXPECTED = {"exchange": 8.0, "straggler": 0.0, "input": 5.0, "host": 5.0, "compute": 90.0, "rest": 0.0}
"""Milliseconds of the causes where nothing is planted."""


def expect(causes: Causes, changes: dict[str, float]) -> None:
    wanted = {**dict.fromkeys(("launch", "throttling", "memory", "gather", "bubble"), 0.0), **EXPECTED, **changes}
    assert {name: 1e3 * value for name, value in causes.seconds.items()} == pytest.approx(wanted, abs=1e-5)


@dataclass(frozen=True)
class Plant:
    """What is made worse, and in how many of the 12 measured steps others wait for it."""

    phase: str
    cause: str
    late_in: str
    steps: int


PLANTS = [
    Plant("input", "input", "input", 12),
    Plant("h2d", "input", "input", 12),
    Plant("forward", "compute", "compute", 12),
    Plant("backward", "compute", "compute", 12),
    # All ranks begin the measured steps together, so what comes behind an exchange makes late for the next 11.
    Plant("optimizer", "compute", "compute", 11),
    Plant("other", "host", "host", 11),
]


@pytest.mark.parametrize(
    ("ranks", "num_late"),
    [(2, 1), (4, 1), (4, 2), (4, 3), (8, 1), (8, 2), (8, 4), (8, 7), (16, 1), (16, 2), (16, 8), (16, 15)],
)
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.phase)
def test_ranks_that_are_late_cost_what_they_are_late(tmp_path: Path, ranks: int, num_late: int, plant: Plant) -> None:
    """One, two, half, all but one: the others wait as long."""
    late = 25.0
    who = range(ranks - num_late, ranks)

    def work(rank: int, step: int) -> dict[str, float]:
        return {plant.phase: PLAIN[plant.phase] + late} if rank in who else {}

    found = one_run(tmp_path, ranks, work)
    share = plant.steps / 12
    # The last step's delay, if any, makes nobody wait: it stays where it was, and lengthens these ranks' run.
    left = late * (1 - share)
    changes = {"straggler": late * share, "rest": left * (1 - num_late / ranks)}
    expect(found, changes | {plant.cause: EXPECTED[plant.cause] + left * num_late / ranks})
    assert sorted(one.rank for one in found.waiting.ranks) == list(who)
    # The one that is called last, of equal ones, is always the same.
    assert sorted(one.steps_last for one in found.waiting.ranks) == [0] * (num_late - 1) + [plant.steps]
    waited_ns = round(late * MS) * plant.steps * (ranks - num_late)
    assert sum(one.waited_ns for one in found.waiting.ranks) == waited_ns
    for one in found.waiting.ranks:
        assert one.waited_ns == pytest.approx(waited_ns / num_late, abs=plant.steps)
        assert one.late_ns == {"input": 0, "compute": 0, "host": 0} | {plant.late_in: round(late * MS) * plant.steps}


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.phase)
def test_what_all_ranks_do_longer_is_nobody_s_lateness(tmp_path: Path, ranks: int, plant: Plant) -> None:
    found = one_run(tmp_path, ranks, lambda rank, step: {plant.phase: PLAIN[plant.phase] + 25.0})
    expect(found, {plant.cause: EXPECTED[plant.cause] + 25.0})


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_slower_network_is_exchange(tmp_path: Path, ranks: int) -> None:
    expect(one_run(tmp_path, ranks, plain, network_ms=33.0), {"exchange": 33.0})


def test_ranks_that_take_turns_cost_as_much_as_one(tmp_path: Path) -> None:
    found = one_run(tmp_path, 4, lambda rank, step: {"forward": 55.0} if step % 4 == rank else {})
    expect(found, {"straggler": 25.0})
    assert [one.steps_last for one in found.waiting.ranks] == [3, 3, 3, 3]


def random_work(seed: int) -> Work:
    def work(rank: int, step: int) -> dict[str, float]:
        rng = random.Random(f"{seed} {rank} {step}")
        return {name: rng.uniform(0.1, 60.0) for name in PLAIN}

    return work


@pytest.mark.parametrize("seed", range(6))
def test_causes_sum_to_the_measured_time_to_the_nanosecond(tmp_path: Path, seed: int) -> None:
    ranks = 1 + seed % 4
    plan = plans(points=(ranks,), repeats=1)[0]
    run = read_run(write_run(tmp_path, plan, simulate(plan, random_work(seed))).path)
    found, measures = causes_of(run), measure(run)
    longest_ns = max(round(rank.measured_s * 1e9) for rank in run.record.ranks)
    assert sum(found.sums_ns.values()) == ranks * longest_ns
    assert tuple(found.sums_ns) == CAUSES
    assert sum(found.seconds.values()) == pytest.approx(sum(measures.parts.values()), rel=1e-12)
    # Seconds are only moved: what is not waiting is what the phases hold.
    moved = found.waiting.moved_ns
    per = ranks * found.steps * 1e9
    assert found.seconds["input"] + moved["input"] / per == pytest.approx(
        measures.parts["input"] + measures.parts["h2d"], rel=1e-12
    )
    assert found.seconds["straggler"] - sum(moved.values()) / per == pytest.approx(measures.exchange_wait_s, rel=1e-12)
    assert found.seconds["rest"] == pytest.approx(measures.parts["imbalance"], rel=1e-9, abs=1e-12)


def write_series(folder: Path, seed: int, *, repeats: int, factor: int = 1, order: Sequence[int] | None = None) -> None:
    for plan in plans(points=(1, 2, 4), repeats=repeats):
        times = simulate(plan, random_work(seed + plan.series.position))
        renamed = order if order is not None and plan.layout.ranks == len(order) else range(plan.layout.ranks)

        def scaled(
            rank: int, step: int, times: StepTimes = times, renamed: Sequence[int] = renamed
        ) -> tuple[Sequence[int], int]:
            phases, other = times(renamed[rank], step)
            return [factor * value for value in phases], factor * other

        write_run(folder, plan, scaled)


def only_group(folder: Path) -> tuple[Group, RunTable]:
    table = tabulate(scan(folder), with_causes=True)
    (group,) = groups(table)
    return group, table


def points_of(folder: Path) -> tuple[CausePoint, ...]:
    return lost_percent(*only_group(folder)).diagnosed.points


def most_waited_for(folder: Path) -> tuple[Straggler | None, Straggler | None]:
    """The rank, and the host, for which most of the waiting was at the second rank count."""
    group, table = only_group(folder)
    runs = [table.causes[run_id] for run_id in group.points[1].run_ids]
    ranks, hosts = ranking(runs)
    return main_straggler(ranks, (), runs), main_straggler((), hosts, runs)


@pytest.mark.parametrize("repeats", [1, 3, 5])
def test_lost_shares_sum_to_the_loss_and_lie_in_their_intervals(tmp_path: Path, repeats: int) -> None:
    write_series(tmp_path, 3, repeats=repeats)
    group, _ = only_group(tmp_path)
    found = points_of(tmp_path)
    for point, scaled in zip(found, group.points, strict=True):
        assert [part.name for part in point.causes] == list(CAUSES)
        for share in (point.cause("compute"), point.cause("input")):
            assert sum(part.lost.value for part in share.parts) == pytest.approx(share.lost.value, abs=1e-9)
            assert sum(part.seconds.value for part in share.parts) == pytest.approx(share.seconds.value, rel=1e-9)
        phase = point.cause("exchange").lost.value + point.cause("straggler").lost.value
        assert point.exchange_phase.lost.value == pytest.approx(phase, abs=1e-9)
        assert sum(part.seconds.value for part in point.causes) == pytest.approx(point.whole.seconds.value, rel=1e-12)
        assert sum(part.lost.value for part in point.causes) == pytest.approx(point.whole.lost.value, abs=1e-9)
        # What the headline says is lost, with its interval.
        efficiency = scaled.efficiency
        assert (point.whole.lost.value, point.whole.lost.low) == (
            1 - efficiency.value,
            None if efficiency.high is None else 1 - efficiency.high,
        )
        ratio = found[0].whole.seconds.value / point.whole.seconds.value
        assert 1 - point.whole.lost.value == pytest.approx(ratio, rel=1e-12)
        for part in point.causes:
            has_interval = repeats > 1 and not point.is_baseline
            assert (part.lost.low is not None) is has_interval
            if part.lost.low is not None and part.lost.high is not None:
                assert part.lost.low <= part.lost.value <= part.lost.high


def test_a_late_rank_is_named_with_its_host_and_what_holds_it_up(tmp_path: Path) -> None:
    for plan in plans(points=(1, 4), repeats=5):
        times = simulate(plan, lambda rank, step: {"input": 30.0} if rank == 3 else {})
        write_run(tmp_path, plan, times, Story(host=lambda rank: f"n{rank // 2}"))
    point = points_of(tmp_path)[1]
    late, _ = most_waited_for(tmp_path)
    assert (late.rank, late.host, late.late_by) == (3, "n1", "input")
    assert late.last_share == late.waited_share == 1
    assert late.waited_s == pytest.approx(0.025 * 3 / 4)
    assert late.input_s == pytest.approx(0.025)
    lost = point.cause("straggler").lost
    assert lost.value == pytest.approx(25 / 133)
    assert (lost.low, lost.high) == (pytest.approx(lost.value), pytest.approx(lost.value))


def test_ranks_that_take_turns_are_no_main_straggler(tmp_path: Path) -> None:
    for plan in plans(points=(1, 4), repeats=1):
        times = simulate(plan, lambda rank, step: {"forward": 55.0} if step % 4 == rank else {})
        write_run(tmp_path, plan, times)
    assert most_waited_for(tmp_path)[0] is None


def write_on_hosts(folder: Path, work: Work, *, ranks: int = 4, hosts: int = 2) -> CausePoint:
    for plan in plans(points=(1, ranks), repeats=1):
        write_run(folder, plan, simulate(plan, work), Story(host=lambda rank: f"n{rank * hosts // ranks}"))
    return points_of(folder)[1]


@pytest.mark.parametrize(("ranks", "hosts"), [(4, 2), (16, 2), (16, 4)])
def test_a_late_host_is_named_where_none_of_its_ranks_stands_out(tmp_path: Path, ranks: int, hosts: int) -> None:
    point = write_on_hosts(
        tmp_path, lambda rank, step: {"forward": 55.0} if rank * hosts // ranks == 1 else {}, ranks=ranks, hosts=hosts
    )
    first, late = most_waited_for(tmp_path)
    assert first is None
    assert (late.rank, late.host, late.late_by, late.waited_share) == (None, "n1", "compute", 1.0)
    assert late.waited_s == pytest.approx(0.025 * (1 - 1 / hosts))
    # As late as its ranks are, not their sum.
    assert late.compute_s == pytest.approx(0.025)
    assert point.cause("straggler").seconds.value == pytest.approx(0.025)


# Throttled clocks


def write_throttled(out: Path, plan: RunPlan) -> Path:
    """The kernel held the processes of a rank back in 10 % of the time; so much of its computing is lost."""
    folder = write_run(out, plan, simulate(plan, plain), Story(record={"watch": watch_result()}))
    rows = [(second * 1_000_000_000, 0.1 * plan.layout.ranks * second) for second in range(14)]
    write_samples(folder, 0, ("host.cpu.throttled_s",), rows)
    return folder.path


def test_throttling_that_all_runs_tell_is_compared(tmp_path: Path) -> None:
    for plan in plans(points=(1, 2), repeats=2, overrides={"measure.measured_steps": 100}):
        write_throttled(tmp_path, plan)
    _, point = points_of(tmp_path)
    assert all(cause.is_measured and not cause.not_measured for cause in point.causes)
    assert point.cause("throttling").seconds.value == pytest.approx(0.009)


def test_throttled_clocks_are_taken_out_of_the_computing(tmp_path: Path) -> None:
    plan = plans(points=(1,), repeats=1, overrides={"measure.measured_steps": 100})[0]
    found = causes_of(read_run(write_throttled(tmp_path, plan)))
    assert found.not_measured == {}
    assert "the CPU quota throttled n0" in found.evidence["throttling"]
    expect(found, {"exchange": 0.0, "throttling": 9.0, "compute": 81.0})


WAITS = (8.0, 10.0, 4.0)


def test_what_a_device_waited_for_its_host_is_no_longer_compute(tmp_path: Path) -> None:
    (plan,) = write_launch_bound(tmp_path, lambda plan: WAITS, points=(1,), repeats=1)
    run = read_run(tmp_path / plan.run_id)
    found = causes_of(run)
    assert found.seconds["launch"] == pytest.approx(sum(WAITS) / 1e3)
    kernels = sum(LAUNCH_MS[name] for name in ("forward", "backward", "optimizer"))
    assert found.seconds["compute"] == pytest.approx(kernels / 1e3)
    assert found.taken_ns["launch"]["forward"] / found.steps == pytest.approx(WAITS[0] * MS)
    assert "kernels alone" in found.evidence["launch"]
    # To the nanosecond.
    longest = int(load_steps(run).step_ns.sum(axis=1).max())
    assert sum(found.sums_ns.values()) == found.ranks * longest
    assert sum(found.seconds.values()) == pytest.approx(sum(measure(run).parts.values()), rel=1e-12)


def test_a_host_that_is_ahead_makes_nothing_wait(tmp_path: Path) -> None:
    (plan,) = write_launch_bound(tmp_path, lambda plan: (0.0, 0.0, 0.0), points=(1,), repeats=1)
    found = causes_of(read_run(tmp_path / plan.run_id))
    assert found.seconds["launch"] == 0
    assert "launch" not in found.not_measured
    assert found.evidence["launch"] == "the host was ahead of the device in every phase of every step"


@pytest.mark.parametrize(
    ("record", "why"), [({}, "5 ms per step"), ({"phases": "synchronised"}, "waits? for the host after every")]
)
def test_a_bound_alone_is_told_and_charged_to_nobody(tmp_path: Path, record: dict[str, str], why: str) -> None:
    (plan,) = plans(points=(1,), repeats=1)
    story = Story(device="cuda:0 (NVIDIA H200)", launch=lambda rank, step: (5 * MS, 0, 0), record=record)
    write_run(tmp_path, plan, constant((1, 1, 10, 10, 1, 5)), story)
    found = causes_of(read_run(tmp_path / plan.run_id))
    assert found.sums_ns["launch"] == 0
    assert found.seconds["compute"] == pytest.approx(0.025)
    assert re.search(why, found.not_measured["launch"])


def test_waiting_that_grows_with_ranks_is_found_and_answered(tmp_path: Path) -> None:
    """Under weak scaling two ranks share a host's cores: launching takes longer."""
    write_launch_bound(tmp_path, lambda plan: tuple(ms * (plan.layout.ranks - 1) for ms in WAITS), points=(1, 2))
    table = tabulate(scan(tmp_path), with_causes=True)
    (group,) = groups(table)
    (_, last) = lost_percent(group, table).diagnosed.points
    assert last.verdict.name == "launch-bound"
    assert last.cause("launch").lost.value == pytest.approx(last.whole.lost.value, rel=0.01)
    texts = " ".join(experiment.text for experiment in last.verdict.experiments)
    for option in ("train.batch_per_rank=", "train.compile=reduce-overhead", "train.cuda_graphs=network"):
        assert option in texts


def memory_causes(out: Path, told: dict[str, Any] | None = None, **request: Any) -> Causes:
    """The causes of a run with a plan; `told` changes what it says of its activations."""
    (plan,) = method_plans([("planned", "planned")], batches=(32,), repeats=1, **request)
    write_memory_run(out, plan, change=lambda result: result.model_copy(update=told or {}))
    return causes_of(read_run(out / plan.run_id))


def waits(result: MemoryResult, recompute: float, swap: float, room: float) -> dict[str, Any]:
    """As if every rank had recomputed and waited so many seconds in all its steps."""
    times = {"recompute_s": recompute, "swap_wait_s": swap, "room_wait_s": room}
    return {"ranks": tuple(rank.model_copy(update=times) for rank in result.ranks)}


def test_recomputing_and_waiting_are_memory_and_no_longer_compute(tmp_path: Path) -> None:
    (plan,) = method_plans([("planned", "planned")], batches=(32,), repeats=1)
    result = memory_result(plan)
    steps = plan.measure.measured_steps
    found = memory_causes(tmp_path, waits(result, 0.010 * steps, 0.005 * steps, 0.002 * steps))
    assert found.seconds["memory"] == pytest.approx(0.017)
    passes = result.plan.predicted.pass_s
    assert found.seconds["compute"] == pytest.approx(passes + OTHER_MS["optimizer"] / 1e3 - 0.017, rel=1e-6)
    assert "memory" not in found.not_measured
    run = read_run(tmp_path / plan.run_id)
    # To the nanosecond.
    longest = int(load_steps(run).step_ns.sum(axis=1).max())
    assert sum(found.sums_ns.values()) == found.ranks * longest
    assert sum(found.seconds.values()) == pytest.approx(sum(measure(run).parts.values()), rel=1e-12)


def test_more_than_was_computed_cannot_be_memory(tmp_path: Path) -> None:
    (plan,) = method_plans([("planned", "planned")], batches=(32,), repeats=1)
    found = memory_causes(tmp_path, waits(memory_result(plan), 1e6, 0.0, 0.0))
    assert found.sums_ns["compute"] == 0
    assert min(found.sums_ns.values()) >= 0


def test_in_core_it_is_nothing_and_that_is_known(tmp_path: Path) -> None:
    (plan,) = method_plans([("none", "none")], batches=(8,), repeats=1)
    write_memory_run(tmp_path, plan)
    found = causes_of(read_run(tmp_path / plan.run_id))
    assert found.seconds["memory"] == 0
    assert "memory" not in found.not_measured
    assert found.evidence["memory"] == "nothing recomputes or swaps in these runs"


@pytest.mark.parametrize(
    ("methods", "overrides", "why"),
    [
        (("planned", "planned"), {}, "the record has no times"),
        (("none", "none"), {"train.compile": "default", "train.activation_budget": 0.5}, "torch.compile recomputes"),
    ],
)
def test_where_a_run_says_nothing_it_is_not_measured(
    tmp_path: Path, methods: Any, overrides: dict[str, Any], why: str
) -> None:
    (plan,) = method_plans([methods], batches=(32,), repeats=1, overrides=overrides)
    write_run(tmp_path, plan, pass_times(memory_result(plan)), Story())
    found = causes_of(read_run(tmp_path / plan.run_id))
    assert found.sums_ns["memory"] == 0
    assert why in found.not_measured["memory"]


def test_memory_that_grows_with_ranks_is_found_and_answered_with_commands(tmp_path: Path) -> None:
    """Two ranks share the disk: each waits 20 ms longer for its tensors."""
    for plan in method_plans([("none", "streamed")], batches=(32,), points=(1, 2)):
        result = memory_result(plan)
        steps, wait = plan.measure.measured_steps, 0.020 * (plan.layout.ranks - 1)
        wait *= 1 + plan.series.repeat / 1000

        def times(rank: int, step: int, result: MemoryResult = result, wait: float = wait) -> tuple[list[int], int]:
            phases, other = pass_times(result)(rank, step)
            return [ns + round(wait * 1e3 * MS) * (place == 3) for place, ns in enumerate(phases)], other

        told = result.model_copy(update=waits(result, 0.0, wait * steps, 0.0))
        write_run(tmp_path, plan, times, Story(record={"memory": told.model_dump(mode="json")}))
    table = tabulate(scan(tmp_path), with_causes=True)
    (group,) = groups(table)
    (_, last) = lost_percent(group, table).diagnosed.points
    assert last.verdict.name == "memory-bound"
    assert last.cause("memory").lost.value == pytest.approx(last.whole.lost.value, rel=0.01)
    texts = [experiment.text for experiment in last.verdict.experiments]
    capacity = bytes_option(result.plan.predicted.peak_bytes)
    assert f"--set train.swap=planned --set train.memory.capacity={capacity}" in texts[0]
    assert "--set train.gradient_accumulation=2" in texts[-1]


PHASES_MS = (5.0, 0.0, 30.0, 50.0, 0.0, 10.0)
STEPS = 12


def told(gather: dict[str, float], exchange: dict[str, float]) -> dict[str, Any]:
    """What a rank says of its waits: milliseconds per step, by phase."""
    seconds = [{name: ms * STEPS / 1e3 for name, ms in one.items()} for one in (gather, exchange)]
    return {"waits": {"gather_s": seconds[0], "exchange_s": seconds[1], "evidence": "timed by every rank"}}


def gather_causes(
    out: Path, waits: Any, late_ms: float = 0.0, ranks: int = 2, times: StepTimes | None = None, **asked: Any
) -> Causes:
    overrides = {"measure.measured_steps": STEPS}
    (plan,) = plans(points=(ranks,), repeats=1, overrides=overrides, **asked)

    def usual(rank: int, step: int) -> tuple[list[int], int]:
        phases = [round(ms * MS) for ms in PHASES_MS]
        phases[3] += round(late_ms * MS) * (rank == 0)
        phases[4] += round((4.0 + late_ms * (rank > 0)) * MS)
        return phases, 0

    return causes_of(read_run(write_run(out, plan, times or usual, Story(of_rank=waits)).path))


def test_waiting_within_passes_is_gather_or_exchange_and_no_longer_compute(tmp_path: Path) -> None:
    found = gather_causes(
        tmp_path, lambda rank: told({"forward": 3.0, "backward": 5.0}, {"backward": 2.0, "optimizer": 1.0})
    )
    assert found.seconds["gather"] == pytest.approx(0.008)
    assert found.seconds["exchange"] == pytest.approx(0.004 + 0.003)
    assert found.seconds["compute"] == pytest.approx(0.090 - 0.011)
    assert {name: ns / 2 / STEPS / MS for name, ns in found.compute_ns.items()} == pytest.approx(
        {"forward": 27.0, "backward": 43.0, "optimizer": 9.0}
    )
    assert found.evidence["gather"] == "timed by every rank; without waiting for stragglers"
    # A rank's own work is what it does for itself.
    assert found.work_ns == (84 * STEPS * MS,) * 2


parts = st.dictionaries(st.sampled_from(COMPUTE_PARTS), st.floats(0, 200))


@settings(max_examples=25, derandomize=True)
@given(
    waits=st.lists(st.tuples(parts, parts), min_size=4, max_size=4),
    late=st.sampled_from([0.0, 40.0]),
    ranks=st.sampled_from([1, 2, 4]),
)
def test_whatever_ranks_waited_sums_are_exact(
    tmp_path_factory: pytest.TempPathFactory, waits: Any, late: float, ranks: int
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    found = gather_causes(folder, lambda rank: told(*waits[rank]), late, ranks)
    (run,) = scan(folder).runs
    assert sum(found.sums_ns.values()) == ranks * int(load_steps(run).step_ns.sum(axis=1).max())
    assert min(found.sums_ns.values()) >= 0
    assert min(found.work_ns) >= 0
    assert sum(found.compute_ns.values()) == found.sums_ns["compute"]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("late_in", "late_by", "waits_in", "cause", "take_turns"),
    [
        ("input", "input", "forward", "gather", False),
        ("input", "input", "forward", "exchange", True),
        ("forward", "compute", "backward", "gather", False),
        ("optimizer", "compute", "optimizer", "exchange", False),
    ],
)
def test_others_wait_within_their_passes_for_a_late_rank(
    tmp_path: Path, ranks: int, late_in: str, late_by: str, waits_in: str, cause: str, take_turns: bool
) -> None:
    """Each collective takes 3 ms when all have come, one rank comes 40 ms late: now this one, now that, or rank 0."""

    def times(rank: int, step: int) -> tuple[list[int], int]:
        phases = dict(zip(PHASES, PHASES_MS, strict=True))
        phases[waits_in] += 3
        phases[late_in if rank == take_turns * step % ranks else waits_in] += 40
        return [round(ms * MS) for ms in phases.values()], 0

    def waits(rank: int) -> dict[str, Any]:
        on_time = (ranks - 1) / ranks if take_turns else rank > 0
        waited = {waits_in: 3.0 + 40 * on_time}
        return told(waited, {}) if cause == "gather" else told({}, waited)

    found = gather_causes(tmp_path, waits, ranks=ranks, times=times)
    assert found.sums_ns["straggler"] == 40 * MS * ranks * STEPS
    assert found.sums_ns[cause] == 3 * MS * ranks * STEPS
    assert found.sums_ns["input"] == 5 * MS * ranks * STEPS
    late = [(one.rank, one.steps_last, one.late_ns[late_by]) for one in found.waiting.ranks]
    each = STEPS // ranks if take_turns else STEPS
    assert sorted(late) == [(rank, each, 40 * MS * each) for rank in range(ranks if take_turns else 1)]


NAMES = ("compute", "wire", "wait")

parts_of_a_run = st.fixed_dictionaries({name: st.integers(1 if name == "compute" else 0, 10**9) for name in NAMES})
some_runs = st.lists(parts_of_a_run, min_size=1, max_size=7)

Run = Mapping[str, float]


def seconds(runs: Sequence[Mapping[str, int]], block: str, sessions: str = "") -> dict[RunKey, Run]:
    """Runs by their keys; where sessions are told, a letter for each, they take turns."""
    keys = [KnownKey.of(block, k, sessions[k % len(sessions)]) if sessions else (block, k) for k in range(len(runs))]
    return {key: {name: ns / 1e9 for name, ns in run.items()} | both(run) for key, run in zip(keys, runs, strict=True)}


def both(run: Mapping[str, int]) -> dict[str, float]:
    return {"phase": (run["wire"] + run["wait"]) / 1e9}


def whole(run: Run) -> float:
    return math.fsum(run[name] for name in NAMES)


def account(own: Mapping[RunKey, Run], base: Mapping[RunKey, Run], work: float = 1.0) -> Attribution:
    return attribute(own, base, work=work, names=NAMES, more=("phase",))


def share(runs: Sequence[Run], name: str) -> float:
    return statistics.fmean(run[name] / whole(run) for run in runs)


@given(
    own=some_runs,
    base=some_runs,
    work=st.sampled_from([1.0, 0.25, 3.0]),
    paired=st.booleans(),
    sessions=st.sampled_from(["", "a", "ab", "abcdef"]),
)
def test_parts_are_what_the_definition_says_and_sum_to_the_headline(
    own: list[dict[str, int]], base: list[dict[str, int]], work: float, paired: bool, sessions: str
) -> None:
    top, bottom = seconds(own, "a", sessions), seconds(base, "a" if paired else "b", sessions)
    found = account(top, bottom, work)
    count = min(len(own), len(base))
    is_paired = paired and (count >= 5 or count >= 0.8 * count)
    a, b = list(top.values()), list(bottom.values())
    if is_paired:
        a, b = a[:count], b[:count]
    mean, ideal = (statistics.geometric_mean(map(whole, runs)) for runs in (a, b))
    efficiency = ideal * work / mean
    assert found.whole.lost.value == pytest.approx(1 - efficiency, abs=1e-12 * max(1, efficiency))
    # The throughput of a run is samples over the same time.
    rates = ({key: n / whole(run) for key, run in runs.items()} for n, runs in ((work, top), (1.0, bottom)))
    headline = ratio_estimate(*rates)
    assert {part.lost.sessions for part in (*found.parts, found.whole)} == {headline.sessions}
    for mine, theirs in ((found.whole.lost.low, headline.high), (found.whole.lost.high, headline.low)):
        assert (mine is None) is (theirs is None)
        assert mine is None or theirs is None or mine == pytest.approx(1 - theirs, abs=1e-9 * max(1.0, theirs))
    assert found.whole.seconds.value == pytest.approx(mean, rel=1e-12)
    assert math.fsum(part.lost.value for part in found.parts) == pytest.approx(1 - efficiency, abs=1e-9)
    assert math.fsum(part.seconds.value for part in found.parts) == pytest.approx(mean, rel=1e-12)
    for part in (*found.parts, found.more["phase"]):
        q, q0 = mean * share(a, part.name), work * ideal * share(b, part.name)
        assert part.seconds.value == pytest.approx(q, rel=1e-9, abs=1e-15)
        assert part.ideal_seconds == pytest.approx(q0, rel=1e-9, abs=1e-15)
        assert part.lost.value == pytest.approx((q - q0) / mean, abs=1e-9 * max(1, efficiency))
        if part.lost.low is not None and part.lost.high is not None:
            assert part.lost.low <= part.lost.value <= part.lost.high
    phase = found.more["phase"]
    assert phase.lost.value == pytest.approx(found.parts[1].lost.value + found.parts[2].lost.value, abs=1e-9)


@given(own=st.lists(parts_of_a_run, min_size=2, max_size=4), base=st.lists(parts_of_a_run, min_size=2, max_size=4))
def test_few_runs_have_the_range_of_what_single_ones_lose(
    own: list[dict[str, int]], base: list[dict[str, int]]
) -> None:
    top, bottom = seconds(own, "a"), seconds(base, "b")
    found = account(top, bottom)
    for part in found.parts:
        single = [
            a[part.name] / whole(a) - b[part.name] / whole(a)
            for a, b in itertools.product(top.values(), bottom.values())
        ]
        assert part.lost.kind == "range"
        assert part.lost.low == pytest.approx(min(*single, part.lost.value), abs=1e-9)
        assert part.lost.high == pytest.approx(max(*single, part.lost.value), abs=1e-9)


@pytest.mark.parametrize("block", ["a", "b"])
def test_the_interval_is_that_of_how_single_runs_move_the_figure(block: str) -> None:
    """Moves by numerical derivatives: what the share lost becomes when one run weighs a little more."""
    rng = np.random.default_rng(3)

    def drawn(block: str, wire: float) -> dict[RunKey, Run]:
        rows = rng.lognormal(0, 0.05, (8, 3)) * (0.08, wire, 0.01)
        return {
            (block, k): dict(zip(NAMES, row, strict=True)) | {"phase": row[1] + row[2]} for k, row in enumerate(rows)
        }

    top, bottom = drawn("a", 0.02), drawn(block, 0.005)

    def lost(name: str, weights: Sequence[float], of_base: Sequence[float]) -> float:
        means = []
        for runs, each in ((list(top.values()), weights), (list(bottom.values()), of_base)):
            total = math.fsum(each)
            step = math.exp(math.fsum(w * math.log(whole(r)) for w, r in zip(each, runs, strict=True)) / total)
            means.append((step, math.fsum(w * r[name] / whole(r) for w, r in zip(each, runs, strict=True)) / total))
        (t, s), (t0, s0) = means
        return s - t0 / t * s0

    found = account(top, bottom)
    even, tiny = [1.0] * 8, 1e-6
    for part in found.parts:
        value = lost(part.name, even, even)

        def moved(place: int, is_own: bool, name: str = part.name, value: float = value) -> float:
            weights = [1.0 + tiny * (k == place) for k in range(8)]
            return 8 / tiny * (lost(name, *((weights, even) if is_own else (even, weights))) - value)

        own, base = (np.array([moved(k, is_own) for k in range(8)]) for is_own in (True, False))
        ends = interval_of_mean(own + base) if block == "a" else interval_of_difference(own, -base)
        assert part.lost.low == pytest.approx(value + float(ends[0]), abs=1e-5)
        assert part.lost.high == pytest.approx(value + float(ends[1]), abs=1e-5)

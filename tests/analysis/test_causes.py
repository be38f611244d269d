"""Causes of a step: recovered from ranks that really wait for each other, with every delay known."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from dlbench.analysis.causes import CAUSES, Causes, causes_of
from dlbench.analysis.late_ranks import Straggler, main_straggler, ranking
from dlbench.analysis.measures import measure
from dlbench.analysis.scaling import Group, groups
from dlbench.analysis.table import RunTable, tabulate
from dlbench.records.rows.steps import PHASES
from dlbench.records.scan import read_run, scan
from dlbench.specs.plan import RunPlan
from dlbench.views.causes.numbers import CausePoint, lost_percent
from tests.support.run_factory import MS, StepTimes, Story, plans, write_run
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

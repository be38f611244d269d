"""Emulated clocks, against a simulation that looks at every worker at every moment."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from dlbench.perfmodels.asynchrony import ClockEvent, drawn_times, emulate
from dlbench.specs.engine import EmulatedSettings

WORKERS, MOMENTS = 4, 60
POLICIES = [
    EmulatedSettings(policy="bsp"),
    EmulatedSettings(policy="asp"),
    *(EmulatedSettings(policy="ssp", staleness=staleness) for staleness in (0, 1, 3)),
    EmulatedSettings(policy="groups", group_size=2),
    *(EmulatedSettings(policy="backup", wait_share=share) for share in (0.5, 0.7)),
]
times = st.lists(st.lists(st.integers(1, 6), min_size=3, max_size=3), min_size=WORKERS, max_size=WORKERS)


def events(settings: EmulatedSettings, work: list[list[int]], exchange: float) -> Iterator[ClockEvent]:
    cycles = [itertools.cycle(own) for own in work]
    with_exchange = settings.model_copy(update={"exchange_s": exchange})
    return emulate(with_exchange, len(work), lambda worker: float(next(cycles[worker])))


def simulated(settings: EmulatedSettings, work: list[list[int]], exchange: int) -> list[tuple[object, ...]]:
    """What happens at each whole moment, by the definitions: (moment, "start", worker), or the workers of an update."""
    cycles = [itertools.cycle(own) for own in work]
    start_at, ends_at = dict.fromkeys(range(WORKERS), 0), dict[int, int]()
    done, answered = [0] * WORKERS, [0] * WORKERS  # Gradients of a worker that arrived; clocks that it has behind it.
    pending: dict[int, list[int]] = {}
    said: list[tuple[object, ...]] = []
    teams = {worker: list(range(WORKERS)) for worker in range(WORKERS)}
    if settings.policy == "groups":
        teams = {worker: [worker - worker % 2, worker - worker % 2 + 1] for worker in range(WORKERS)}
    needed = len(teams[0])
    if settings.policy == "asp" or (settings.policy == "ssp" and settings.staleness):
        needed = 1
    if settings.policy == "backup":
        needed = settings.quorum(WORKERS)
    ahead = {"asp": 10**9, "ssp": settings.staleness}.get(settings.policy, 0)
    for moment in range(MOMENTS):
        # Who starts at once may only do so at this moment; a gradient takes longer than none.
        for worker in [number for number in sorted(ends_at) if ends_at[number] == moment]:
            del ends_at[worker]
            if done[worker] < answered[worker]:  # its update was made without it
                done[worker] = answered[worker]
                said.append((moment, "drop", worker))
                start_at[worker] = moment
                continue
            done[worker] += 1
            answered[worker] = done[worker]
            team = teams[worker]
            pending.setdefault(team[0], []).append(worker)
            if len(pending[team[0]]) == needed:
                said.append((moment, *sorted(pending.pop(team[0]))))
                if not ahead:
                    for number in team:
                        answered[number] = done[worker]
            for number in team:
                lead = answered[number] - min(answered[other] for other in team)
                is_idle = number not in ends_at and number not in start_at
                if is_idle and lead <= ahead:
                    start_at[number] = moment + exchange * (lead == ahead)
        for worker in [number for number in sorted(start_at) if start_at[number] == moment]:
            del start_at[worker]
            said.append((moment, "start", worker))
            ends_at[worker] = moment + next(cycles[worker])
    return said


@given(st.sampled_from(POLICIES), times, st.integers(0, 3))
def test_every_event_is_that_of_a_plain_simulation(
    settings: EmulatedSettings, work: list[list[int]], exchange: int
) -> None:
    told: list[tuple[object, ...]] = []
    for event in events(settings, work, exchange):
        if event.seconds >= MOMENTS:
            break
        if event.starts is not None:
            told.append((event.seconds, "start", event.starts))
        elif event.dropped is not None:
            told.append((event.seconds, "drop", event.dropped))
        else:
            told.append((event.seconds, *event.applied))
    assert told == simulated(settings, work, exchange)


@given(st.integers(0, 4), times, st.integers(0, 3))
def test_a_worker_is_never_further_ahead_than_its_bound(bound: int, work: list[list[int]], exchange: int) -> None:
    settings = EmulatedSettings(policy="ssp", staleness=bound)
    finished = [0] * WORKERS
    for event in itertools.islice(events(settings, work, exchange), 400):
        if event.starts is not None:
            assert finished[event.starts] - min(finished) <= bound
        for worker, staleness in event.applied.items():
            assert staleness <= bound
            finished[worker] += 1
        assert max(finished) - min(finished) <= bound + 1


def rate(settings: EmulatedSettings, slowness: int) -> float:
    """Gradients per second of four workers, one of which takes `slowness` times as long."""
    work = [[slowness], [1], [1], [1]]
    applied = 0
    for event in events(settings, work, 0.0):
        applied += len(event.applied)
        if event.seconds >= 4000:
            return applied / event.seconds
    raise AssertionError


def test_one_slow_worker_slows_all_down_only_if_they_wait_for_it() -> None:
    slow = {settings.policy: rate(settings, 4) / rate(settings, 1) for settings in POLICIES}
    assert abs(slow["bsp"] - 1 / 4) < 1e-3
    assert abs(slow["ssp"] - 1 / 4) < 0.01  # the bound absorbs bursts, no lasting slowness
    assert abs(slow["asp"] - 3.25 / 4) < 0.01
    assert abs(slow["groups"] - (1 + 1 / 4) / 2) < 0.01
    assert abs(slow["backup"] - 1) < 0.01


def test_draws_depend_on_seed_and_worker_alone() -> None:
    work = [[float(number) for number in range(100)]]
    first, second = drawn_times(work, "7 0"), drawn_times(work, "7 0")
    alone = [first(1) for _ in range(20)]
    mixed = [(second(0), second(1))[1] for _ in range(20)]
    assert alone == mixed
    assert alone != [drawn_times(work, "8 0")(1) for _ in range(20)]

"""Which runs share a session: by the time between them, their boot and their Slurm job."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.analysis.sessions import LONGEST_S, PAUSE_S, Circumstances, allocations_of, sessions_of
from dlbench.analysis.table import tabulate
from dlbench.records.scan import scan
from dlbench.stats.pairing import session_of
from tests.support.run_factory import NOW, Story, constant, plans, write_run


def runs(*hours: float, jobs: str = "", boots: str = "") -> dict[str, Circumstances]:
    """A run at each hour, with a letter for its job (`0`: none) and for the boot of its host."""
    return {
        f"r{i:02d}": Circumstances(
            finished=(datetime(2026, 3, 1) + timedelta(hours=hour)).strftime("%Y-%m-%dT%H:%M:%SZ"),
            job="" if jobs[i : i + 1] in ("", "0") else f"cluster/{jobs[i]}",
            boot=f"host {boots[i]}" if boots else "",
        )
        for i, hour in enumerate(hours)
    }


def order(found: dict[str, str]) -> tuple[int, ...]:
    names = list(dict.fromkeys(found[run] for run in sorted(found)))
    return tuple(names.index(found[run]) for run in sorted(found))


@pytest.mark.parametrize(
    ("given", "together"),
    [
        # Five commands of a working day, and the morning after.
        (runs(9, 10, 12, 14, 17, 33), (0, 0, 0, 0, 0, 1)),
        # Five nights.
        (runs(2, 26, 50.5, 73, 98), (0, 1, 2, 3, 4)),
        # Five Slurm jobs of one afternoon are one state of the machine.
        (runs(13, 14, 15, 16, 17, jobs="12345"), (0, 0, 0, 0, 0)),
        # A job of three days is one allocation.
        (runs(0, 20, 40, 60, jobs="1111"), (0, 0, 0, 0)),
        # The host was started anew in between; another host has another boot, which says nothing.
        (runs(9, 10, 11, boots="aab"), (0, 0, 1)),
        # A machine that never rests: a session a day.
        (runs(0, 6, 12, 18, 24, 30, 36, 42, 48, 54), (0, 0, 0, 0, 0, 1, 1, 1, 1, 1)),
    ],
)
def test_sessions_over_time(given: dict[str, Circumstances], together: Sequence[int]) -> None:
    found = sessions_of(given)
    assert order(found) == tuple(together)
    assert found == sessions_of(dict(reversed(given.items())))


def test_other_hosts_are_no_other_boots_and_unknown_times_are_one_session() -> None:
    found = runs(9, 10, 11)
    hosts = {run: Circumstances(one.finished, "", f"{run} boot-{run}") for run, one in found.items()}
    assert len(set(sessions_of(hosts).values())) == 1
    assert len(set(sessions_of({run: Circumstances("when?", "", "") for run in found}).values())) == 1


@given(st.lists(st.floats(0, 300), min_size=1, max_size=30))
def test_no_session_is_longer_than_a_day_or_holds_a_pause(hours: list[float]) -> None:
    given_runs = runs(*hours)
    found = sessions_of(given_runs)
    by_session: dict[str, list[float]] = {}
    for run, one in sorted(given_runs.items(), key=lambda item: item[1].moment):
        by_session.setdefault(found[run], []).append(one.moment)
    for moments in by_session.values():
        assert moments[-1] - moments[0] <= LONGEST_S
        assert all(b - a <= PAUSE_S for a, b in itertools.pairwise(moments))
    firsts = sorted(moments[0] for moments in by_session.values())
    assert all(b - a > PAUSE_S for a, b in itertools.pairwise(firsts))


def test_within_a_report_jobs_are_apart_and_commands_of_a_day_are_not(tmp_path: Path) -> None:
    story = [("1", 0), ("1", 0), ("2", 0), ("", 0), ("", 1), ("", 30)]
    for planned, (job, hours) in zip(plans(points=(1,), repeats=len(story), series="s"), story, strict=True):
        plan = planned.model_copy(update={"created": f"2026-03-0{planned.series.repeat + 1}T12:00:00Z"})
        told = Story(job=job, finished=NOW + timedelta(hours=hours), environment={"host": "n0", "boot_id": "b"})
        write_run(tmp_path, plan, constant((5.0, 0.0, 30.0, 45.0, 10.0, 10.0)), told)
    table = tabulate(scan(tmp_path))
    found = allocations_of(table.runs.values())
    by_repeat = [found[run] for run in sorted(found, key=lambda run: table.runs[run].plan.series.repeat)]
    names = list(dict.fromkeys(by_repeat))
    assert [names.index(name) for name in by_repeat] == [0, 0, 1, 2, 2, 3]
    assert {session_of(key) for key in table.keys.values()} == set(found.values())

"""Which runs share a session: those that share a job or a command, directly or through others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from dlbench.reading.sessions import session_of, sessions_of
from dlbench.records.scan import Run, scan
from tests.support.run_factory import Story, constant, plans, write_run


def written(out: Path, jobs: str, commands: str) -> list[Run]:
    """A run for each pair of a job (0: none) and a command."""
    for number, planned in enumerate(plans(points=(1,), repeats=len(jobs), series="s")):
        plan = planned.model_copy(update={"created": f"2026-03-0{commands[number]}T12:00:00Z"})
        job = {} if jobs[number] == "0" else {"variable.SLURM_JOB_ID": jobs[number]}
        write_run(out, plan, constant((5.0, 0.0, 30.0, 45.0, 10.0, 10.0)), Story(environment={"host": "n0", **job}))
    return sorted(scan(out).runs, key=lambda run: run.plan.series.repeat)


@pytest.mark.parametrize(
    ("jobs", "commands", "together"),
    [
        # One command that submitted five jobs: another allocation each, and the same night.
        ("12345", "11111", (0, 0, 0, 0, 0)),
        # Five commands in one allocation.
        ("11111", "12345", (0, 0, 0, 0, 0)),
        # Through others.
        ("11223", "12234", (0, 0, 0, 0, 1)),
        # A series' name that is given again on other days.
        ("00000", "11233", (0, 0, 1, 2, 2)),
    ],
)
def test_runs_that_share_a_job_or_a_command_share_the_session(
    tmp_path: Path, jobs: str, commands: str, together: Sequence[int]
) -> None:
    runs = written(tmp_path, jobs, commands)
    found = sessions_of(runs)
    order = list(dict.fromkeys(found[run.plan.run_id] for run in runs))
    assert tuple(order.index(found[run.plan.run_id]) for run in runs) == tuple(together)
    assert found == sessions_of(reversed(runs))


def test_a_session_is_named_alike_whichever_side_it_is_read_from(tmp_path: Path) -> None:
    first, second = (sessions_of(written(tmp_path / name, "11", name)) for name in ("12", "34"))
    assert set(first.values()) == set(second.values())


def test_an_allocation_is_the_job_and_without_one_the_command(tmp_path: Path) -> None:
    names = [session_of(run) for run in written(tmp_path, "1100", "1112")]
    assert names[0] == names[1] == "job /1"
    assert len(set(names)) == 3

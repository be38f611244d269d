"""A job that Slurm ends early and starts again: its script, run by bash with stubs for Slurm's programs."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from dlbench.jobs.scripts.job import Job
from dlbench.jobs.scripts.launch import render_job
from dlbench.records.folder import RunFolder
from tests.jobs.test_jobs import (
    PYTHON,
    Cluster,
    cluster,
    may_begin_anew,
    of_two_launchers,
    rooms,
    with_plans,
    with_system,
)

__all__ = ["cluster"]

# A rank: INTERRUPTED and FAILING hold the plans of the runs that are told to stop, or fail.
SRUN = """#!/bin/bash
[ "$1" = --mpi=list ] && { echo pmix; exit; }
plan=${@: -1}
echo "${plan%/*}" >>"$DUMP/began"
echo {} >"${plan%/*}/node-0000.status.json"
case " ${INTERRUPTED-} " in *" $plan "*) echo {} >"${plan%/*}/interrupted.json"; exit 75 ;; esac
case " ${FAILING-} " in *" $plan "*) exit 7 ;; esac
echo {} >"${plan%/*}/record.json"
"""
# A launcher that hears a signal and, as mpirun while it starts its ranks, not the first. In WARNED is its run's plan.
LAUNCHER = """#!/bin/bash
[ "$1" = --mpi=list ] && { echo pmix; exit; }
[ "$1" = --version ] && exit
plan=${@: -1}
echo "${plan%/*}" >>"$DUMP/began"
if [ "$plan" = "${WARNED-}" ]; then
  trap '' USR1
  kill -USR1 "$PPID"
  sleep 1
  trap 'echo {} >"${plan%/*}/interrupted.json"; exit 75' USR1
  for _ in {1..300}; do sleep 0.1; done
fi
echo {} >"${plan%/*}/record.json"
"""
SCONTROL = """#!/bin/bash
case $1 in
  show) echo "JobId=4711 PreemptEligibleTime=x PreemptTime=${PREEMPTED:-None} EndTime=${ENDS:-Unknown} Deadline=N/A" ;;
  *) echo "$*" >>"$DUMP/asked" ;;
esac
"""


class Slurm:
    """A cluster on which a job of two runs is started, perhaps several times."""

    def __init__(self, cluster: Cluster, root: Path, job: Job, launcher: str = SRUN) -> None:
        self.cluster, self.nodes = cluster, str(job.shape.layout.nodes)
        for name, text in (("srun", launcher), ("mpirun", launcher), ("scontrol", SCONTROL)):
            (cluster.bin / name).write_text(text)
            (cluster.bin / name).chmod(0o755)
        self.folders: list[RunFolder] = rooms(job, root)
        self.script = render_job(job, self.folders, PYTHON)

    def start(self, **variables: str) -> tuple[int, list[int], bool]:
        """The script's exit code, the runs that began, and whether it asked for another start."""
        done = self.cluster.run(self.script, nodes=self.nodes, **variables)
        self.said = done.stdout + done.stderr
        began, asked = (self.cluster.dump / name for name in ("began", "asked"))
        names = [str(folder.path) for folder in self.folders]
        runs = [names.index(line) for line in began.read_text().splitlines()] if began.exists() else []
        assert not asked.exists() or asked.read_text() == "requeue 4711\n"
        return done.returncode, runs, asked.exists()


def in_s(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))


def test_an_interrupted_run_begins_anew_whatever_its_folder_is_called(cluster: Cluster, tmp_path: Path) -> None:
    slurm = Slurm(cluster, tmp_path / "r[a-z]ns *", may_begin_anew())
    first, second = slurm.folders
    first.checkpoints.mkdir()
    assert slurm.start(INTERRUPTED=str(first.plan)) == (75, [0], True)
    assert slurm.start(SLURM_RESTART_COUNT="1") == (0, [0, 1], False)
    assert {path.name for path in first.path.iterdir()} == {
        *("attempt-0001", "checkpoints", "launch.log", "node-0000.status.json", "record.json")
    }
    assert (first.path / "attempt-0001" / "interrupted.json").exists()
    assert second.record.exists()
    assert "attempt 2 of " in slurm.said


def test_it_is_asked_for_so_often_and_no_more(cluster: Cluster, tmp_path: Path) -> None:
    slurm = Slurm(cluster, tmp_path / "runs", may_begin_anew())
    plan = str(slurm.folders[0].plan)
    assert slurm.start(INTERRUPTED=plan, SLURM_RESTART_COUNT="2") == (75, [0], True)
    assert slurm.start(INTERRUPTED=plan, SLURM_RESTART_COUNT="3") == (75, [0], False)
    assert "dlbench: error: " in slurm.said
    assert "slurm.max_requeues" in slurm.said


def test_ranks_that_a_preemption_ended_have_not_failed(cluster: Cluster, tmp_path: Path) -> None:
    slurm = Slurm(cluster, tmp_path / "runs", may_begin_anew())
    plan = str(slurm.folders[0].plan)
    assert slurm.start(FAILING=plan) == (7, [0, 1], False)
    assert slurm.start(FAILING=plan, PREEMPTED=in_s(-5)) == (75, [0], True)


def test_a_signal_that_no_rank_heard_is_not_lost(cluster: Cluster, tmp_path: Path) -> None:
    """It came between two runs, or while one was started: Slurm's clock tells."""
    slurm = Slurm(cluster, tmp_path / "runs", may_begin_anew())
    first, second = slurm.folders
    assert slurm.start(FAILING=str(first.plan), ENDS=in_s(170)) == (75, [0], True)
    assert slurm.start(FAILING=str(second.plan), ENDS=in_s(1000)) == (7, [0, 1], False)
    first.record.unlink()
    # However little time there is, a start of the job begins a run: it would be started again for nothing otherwise.
    assert slurm.start(ENDS=in_s(10)) == (75, [0], True)
    assert "no time is left for" in slurm.said
    assert slurm.start(ENDS=in_s(10)) == (0, [1], False)


@pytest.mark.parametrize("array", [False, True])
def test_without_requeue_it_ends_as_interrupted(cluster: Cluster, tmp_path: Path, array: bool) -> None:
    job = with_plans(may_begin_anew(), lambda plan: with_system(plan, slurm={"requeue": False, "warn_before_s": 120}))
    if array:
        job = dataclasses.replace(job, array_limit=1)
    slurm = Slurm(cluster, tmp_path / "runs", job)
    plan = str(slurm.folders[0].plan)
    assert slurm.start(INTERRUPTED=plan, SLURM_ARRAY_TASK_ID="1") == (75, [0], False)
    assert "was interrupted" in slurm.said


@pytest.mark.parametrize("side", ["a", "b"])
def test_in_a_job_with_mpirun_the_script_hands_the_signal_on(cluster: Cluster, tmp_path: Path, side: str) -> None:
    """To srun, too: Slurm tells the script alone."""
    slurm = Slurm(cluster, tmp_path / "runs", of_two_launchers(), LAUNCHER)
    assert "--signal=B:USR1@120" in slurm.script
    warned = next(folder for folder in slurm.folders if folder.path.name.endswith(side))
    first = slurm.folders.index(warned)
    assert slurm.start(WARNED=str(warned.plan)) == (75, list(range(first + 1)), True)
    assert f"{warned.path.name} was interrupted" in slurm.said
    (cluster.dump / "asked").unlink()
    (cluster.dump / "began").unlink()
    assert slurm.start(SLURM_RESTART_COUNT="1") == (0, list(range(first, 2)), False)

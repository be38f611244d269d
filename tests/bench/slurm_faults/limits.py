"""Jobs that Slurm ends, starts again or does not start."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

from tests.bench.slurm_faults.catalogue import Fault
from tests.bench.slurm_faults.cluster import LONG, RESUMED, Stage, processes

ON_N3 = ("--set", "system.slurm.nodelist=n3")


def faults() -> Iterator[Fault]:
    """On n3."""
    yield Fault("time limit without a warning", _limit, 300)
    yield Fault("warned before the limit, requeued", _warned, 240)
    yield Fault("preempted by another partition, requeued", _preempted, 240)
    yield Fault("time limit while a rank is stopped", _limit_stopped, 300)
    yield Fault("preempted while a rank is stopped, requeued", _preempted_stopped, 300)
    yield Fault("preempted, and a rank SIGKILLed in its grace time, requeued", _preempted_killed, 300)
    yield Fault("scontrol requeue", _requeue, 240)
    yield Fault("held, then released", _held, 120)
    yield Fault("node drained while the job waits", _drained, 180)


def _limit(stage: Stage) -> str:
    job = stage.submit(*LONG, *ON_N3, nodes="1")
    stage.site.slurm("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    return stage.line("TIMEOUT|time limit")


def _warned(stage: Stage) -> str:
    job = stage.submit(*RESUMED, *ON_N3, nodes="1")
    stage.has_checkpoint()
    stage.site.slurm("scancel", "--signal=USR1", job)
    return stage.ends_valid(attempt=2)


def _preempted(stage: Stage) -> str:
    stage.submit(*RESUMED, *ON_N3, nodes="1")
    stage.has_checkpoint()
    _urgent(stage)
    return stage.ends_valid(attempt=2)


def _urgent(stage: Stage) -> None:
    """A job of the partition that preempts."""
    words = ("sbatch", "-p", "urgent", "-w", "n3", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1")
    stage.site.slurm(*words)


def _a_rank(stage: Stage) -> int:
    return stage.measuring().statuses[-1].pid


def _limit_stopped(stage: Stage) -> str:
    job = stage.submit(*LONG, *ON_N3, "--ranks-per-node", "2", nodes="1")
    os.kill(_a_rank(stage), signal.SIGSTOP)
    stage.site.slurm("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    line = stage.line("TIMEOUT|time limit")
    stage.until(lambda: not processes(["dlbench.node", str(stage.out)]), "all ranks are gone")
    return line


def _preempted_stopped(stage: Stage) -> str:
    """Nobody can keep a checkpoint for a rank that is stopped: the next attempt goes on from an earlier one."""
    stage.submit(*RESUMED, *ON_N3, "--ranks-per-node", "2", nodes="1")
    stage.has_checkpoint()
    os.kill(_a_rank(stage), signal.SIGSTOP)
    _urgent(stage)
    return stage.ends_valid(attempt=2)


def _preempted_killed(stage: Stage) -> str:
    """Its death is the preemption's: the run is taken up again, and did not fail."""
    stage.submit(*RESUMED, *ON_N3, "--ranks-per-node", "2", nodes="1")
    stage.has_checkpoint()
    pid = _a_rank(stage)
    _urgent(stage)
    stage.until(lambda: any(stage.runs()[0].folder.path.glob("slurm-*.out")), "the log")
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return stage.ends_valid(attempt=2)


def _requeue(stage: Stage) -> str:
    job = stage.submit(*RESUMED, *ON_N3, nodes="1")
    stage.has_checkpoint()
    stage.site.slurm("scontrol", "requeue", job)
    return stage.ends_valid(attempt=2)


def _held(stage: Stage) -> str:
    extra = ("--set", "system.slurm.extra=hold", "--set", "measure.measured_steps=4")
    job = stage.submit(*extra, *ON_N3, nodes="1")
    line = stage.line("it is held: `scontrol release")
    stage.site.slurm("scontrol", "release", job)
    return f"{line}; then {stage.ends_valid()}"


def _drained(stage: Stage) -> str:
    stage.site.slurm("scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=test")
    try:
        stage.submit("--set", "measure.measured_steps=4", *ON_N3, nodes="1")
        line = stage.line("ReqNodeNotAvail|down, drained")
    finally:
        stage.site.slurm("scontrol", "update", "NodeName=n3", "State=RESUME")
    return f"{line}; then {stage.ends_valid()}"

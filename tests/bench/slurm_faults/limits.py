"""Jobs that Slurm ends, starts again or does not start."""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench.slurm_faults.catalogue import Fault
from tests.bench.slurm_faults.cluster import LONG, RESUMED, Stage

ON_N3 = ("--set", "system.slurm.nodelist=n3")


def faults() -> Iterator[Fault]:
    """On n3."""
    yield Fault("time limit without a warning", _limit, 300)
    yield Fault("warned before the limit, requeued", _warned, 240)
    yield Fault("preempted by another partition, requeued", _preempted, 240)
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
    words = ("sbatch", "-p", "urgent", "-w", "n3", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1")
    stage.site.slurm(*words)
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

"""Processes of a run that end, hang or are ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tests.bench.slurm_faults.catalogue import Fault
from tests.bench.slurm_faults.cluster import LONG, DidNotHoldError, Stage, processes, said

FIRST = r"rank \d+ was the first to end, by signal SIGKILL; it was on n\d"


def faults() -> Iterator[Fault]:
    """On n1 and n2."""
    yield Fault("SIGKILL of a rank", _rank, 120)
    yield Fault("SIGKILL of a rank's supervisor", _supervisor, 120)
    yield Fault("SIGKILL of all ranks of a node", _node, 120)
    yield Fault("SIGKILL of srun", _srun, 120)
    yield Fault("SIGKILL of the batch script's shell", _shell, 120)
    yield Fault("SIGKILL of the slurmstepd of a node", _stepd, 180)
    yield Fault("SIGKILL of the slurmstepds of all nodes", _all_stepds, 180)
    yield Fault("SIGSTOP of a rank (hangs)", _stopped, 180)
    yield Fault("dlbench cancel", _cancel, 120)
    yield Fault("scancel of the job", _scancel, 120)
    yield Fault("scancel of the step", _step, 120)
    yield Fault("runs folder moved away during the run", _folder_gone, 120)
    yield Fault("one run of a packed job fails", _packed, 240)


def _pids(stage: Stage, node: int | None = None) -> list[int]:
    run = stage.measuring()
    return [s.pid for s in sorted(run.statuses, key=lambda s: s.rank) if node is None or s.host == f"n{node}"]


def _rank(stage: Stage) -> str:
    stage.submit(*LONG)
    os.kill(_pids(stage)[1], signal.SIGKILL)
    return stage.line(FIRST)


def _supervisor(stage: Stage) -> str:
    stage.submit(*LONG)
    rank = _pids(stage)[1]
    parent = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)
    line = stage.line("first to end|ended as|supervisor")
    stage.until(lambda: not Path(f"/proc/{rank}").exists(), "the rank below it ends")
    return line


def _node(stage: Stage) -> str:
    stage.submit(*LONG, "--ranks-per-node", "2")
    for pid in _pids(stage, node=2):
        os.kill(pid, signal.SIGKILL)
    return stage.line(FIRST)


def _of_job(stage: Stage, *words: str) -> list[int]:
    run = stage.measuring()
    return processes([*words, str(run.folder.path)])


def _srun(stage: Stage) -> str:
    stage.submit(*LONG)
    for pid in _of_job(stage, "srun"):
        with suppress(ProcessLookupError):  # of its two processes, the one may end with the other
            os.kill(pid, signal.SIGKILL)
    return stage.line("srun was ended by signal SIGKILL")


def _stepds(stage: Stage, job: str) -> list[int]:
    """Of the ranks' step; sorted by their numbers."""
    stage.measuring()
    return sorted(processes([f"slurmstepd: [{job}.0]"]))


def _lost(stage: Stage, job: str, victims: list[int]) -> str:
    """Slurm itself lets such a job stand until its limit: `status` has to say it, and `cancel` to end it."""
    if not victims:
        raise DidNotHoldError("no slurmstepd was found")
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    line = stage.line("first to end|vanished|srun was ended")
    stage.call("cancel", stage.name, "--out", stage.out)
    stage.until(lambda: not processes(["dlbench.node", str(stage.out)]), "all ranks are gone")
    stage.until(lambda: "JobState=RUNNING" not in stage.site.slurm("scontrol", "show", "job", job), "the job ends")
    return line


def _stepd(stage: Stage) -> str:
    job = stage.submit(*LONG)
    return _lost(stage, job, _stepds(stage, job)[1:])


def _all_stepds(stage: Stage) -> str:
    job = stage.submit(*LONG)
    return _lost(stage, job, _stepds(stage, job))


def _shell(stage: Stage) -> str:
    job = stage.submit(*LONG)
    stage.measuring()
    for pid in processes(["/bin/bash", f"job{int(job):05d}/slurm_script"]):
        os.kill(pid, signal.SIGKILL)
    return stage.line("the job's script ended before its ranks")


def _stopped(stage: Stage) -> str:
    stage.submit(*LONG, "--set", "measure.stall_timeout_s=10")
    os.kill(_pids(stage)[1], signal.SIGSTOP)
    return stage.line("stall|no progress|hang|first to end")


def _cancel(stage: Stage) -> str:
    stage.submit(*LONG)
    stage.measuring()
    told = stage.call("cancel", stage.name, "--out", stage.out)[1]
    said(told, "1 job cancelled")
    return stage.line("ended as CANCELLED")


def _scancel(stage: Stage) -> str:
    job = stage.submit(*LONG)
    stage.measuring()
    stage.site.slurm("scancel", job)
    return stage.line("ended as CANCELLED")


def _step(stage: Stage) -> str:
    job = stage.submit(*LONG)
    stage.measuring()
    stage.site.slurm("scancel", f"{job}.0")
    return stage.line("SIGTERM|SIGKILL|CANCELLED|ended as")


def _folder_gone(stage: Stage) -> str:
    job = stage.submit("--set", "measure.measured_steps=60", "--set", "fault.step_delay_s=0.2")
    run = stage.measuring()
    away = stage.out.with_name("away")
    run.folder.path.rename(away)
    stage.until(lambda: "JobState=RUNNING" not in stage.site.slurm("scontrol", "show", "job", job), "the job ends")
    code, told = stage.waited()
    if code == 0:
        raise DidNotHoldError("wait ends with 0")
    return said(told, "gone|missing|no folder|not there")


def _packed(stage: Stage) -> str:
    words = ("--sweep", "system.setup=exit 7,umask 022", "--set", "measure.measured_steps=4")
    stage.submit(*words, nodes="1")
    code, told = stage.waited()
    if code != 3:
        raise DidNotHoldError(f"wait ends with {code}")
    said(told, "1 of 2 runs valid, 1 failed")
    return said(told, "^failed:")

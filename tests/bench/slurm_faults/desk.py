"""Requests that are refused, submissions that are cut, files that are not as planned, and full disks."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tests.bench.slurm_faults.catalogue import Fault
from tests.bench.slurm_faults.cluster import DidNotHoldError, Stage, said

HOLD = ("--set", "system.slurm.extra=hold")
FEW = ("--set", "measure.measured_steps=4")


def faults() -> Iterator[Fault]:
    """On one node at most."""
    yield Fault("more nodes than there are", _too_many, 60)
    yield Fault("an account that is none", _account, 60)
    yield Fault("python missing on the nodes", _python, 120)
    yield Fault("module missing", _module, 120)
    yield Fault("plan.json cut before the job starts", _cut_plan, 120)
    yield Fault("another dlbench in the plan", _version, 120)
    yield Fault("two users with one series name", _two, 120)
    yield Fault("submit killed (SIGKILL), resumed", _killed, 240)
    yield Fault("follow killed, started again", _follow, 300)
    yield Fault("runs folder full at submit", _full, 120)
    yield Fault("runs folder full during the run", _full_later, 240)


def _refused(stage: Stage, pattern: str, *more: str, nodes: str = "1") -> str:
    code, told = stage.call(*stage.order(*more, nodes=nodes))
    if code == 0:
        raise DidNotHoldError("submit ends with 0")
    return said(told, pattern)


def _too_many(stage: Stage) -> str:
    return _refused(stage, "error: sbatch refused .*Node count", nodes="9")


def _account(stage: Stage) -> str:
    return _refused(stage, "error: sbatch refused .*Invalid account", "--set", "system.slurm.account=nobody")


def _failing(stage: Stage, pattern: str, *more: str) -> str:
    stage.submit(*FEW, *more, nodes="1")
    code, told = stage.waited()
    if code != 3:
        raise DidNotHoldError(f"wait ends with {code}: {told[-200:]}")
    return said(told, pattern)


def _python(stage: Stage) -> str:
    return _failing(stage, "^failed:.*/nowhere/python", "--set", "system.python=/nowhere/python")


def _module(stage: Stage) -> str:
    return _failing(stage, r"^failed:.*module: command not found", "--set", "system.setup=module load nothing/1.0")


def _spoilt(stage: Stage, pattern: str, spoil: str) -> str:
    job = stage.submit(*HOLD, *FEW, nodes="1")
    (run,) = stage.runs()
    path = run.folder.path / "plan.json"
    text = path.read_text()
    if spoil == "cut":
        path.write_text(text[: len(text) // 2])
    else:
        content = json.loads(text)
        content["dlbench_version"] = "9.9.9"
        path.write_text(json.dumps(content))
    stage.site.slurm("scontrol", "release", job)
    done = ("COMPLETED", "FAILED", "CANCELLED")
    stage.until(lambda: any(f"JobState={w}" in stage.site.slurm("scontrol", "show", "job", job) for w in done), "end")
    return stage.line(pattern)


def _cut_plan(stage: Stage) -> str:
    return _spoilt(stage, r"plan\.json", "cut")


def _version(stage: Stage) -> str:
    return _spoilt(stage, r"9\.9\.9", "version")


def _two(stage: Stage) -> str:
    stage.submit(*HOLD, nodes="1", series="ours")
    code, told = stage.call(*stage.order(*HOLD, nodes="1", series="ours"))
    if code == 0:
        raise DidNotHoldError("the second is taken")
    return said(told, "error: .*(exists|series)")


def _jobs(stage: Stage) -> list[str]:
    """What of this fault's is in the queue: ids and folders."""
    told = stage.site.slurm("squeue", "--noheader", "--format=%i %Z")
    return [line for line in told.splitlines() if str(stage.out.parent) in line]


def _killed(stage: Stage) -> str:
    sweep = ("--sweep", "system.slurm.extra=hold nice=1,hold nice=2,hold nice=3,hold nice=4")
    process = stage.start(*stage.order(*sweep, nodes="1"))
    journal = stage.out / ".series" / f"{stage.name}.jobs"
    stage.until(lambda: process.poll() is not None or (journal.exists() and journal.stat().st_size > 0), "a job")
    with suppress(ProcessLookupError):  # a quick machine has submitted all by then
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    code, told = stage.call("submit", "--resume", stage.name, "--out", stage.out)
    if code != 0:
        raise DidNotHoldError(f"--resume ends with {code}: {told[-200:]}")
    files = [run.folder.submission for run in stage.runs()]
    jobs = [json.loads(file.read_text())["job_id"] if file.exists() else "" for file in files]
    if len(set(jobs)) != 4:
        raise DidNotHoldError(f"jobs of four runs: {jobs}")
    if len(_jobs(stage)) != 4:
        raise DidNotHoldError(f"in the queue are {_jobs(stage)}")
    return said(told, "4 of 4 jobs submitted")


def _follow(stage: Stage) -> str:
    feed = ("--max-jobs", "1", "--follow", "--every", "1s")
    words = ("--sweep", "system.slurm.extra=nice=1,nice=2,nice=3", "--no-chain", *feed)
    process = stage.start(*stage.order(*FEW, *words, nodes="1"))
    journal = stage.out / ".series" / f"{stage.name}.jobs"
    stage.until(lambda: process.poll() is not None or (journal.exists() and journal.stat().st_size > 0), "a job")
    with suppress(ProcessLookupError):  # a quick machine has submitted all by then
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    code, told = stage.call("submit", "--resume", stage.name, "--out", stage.out, *feed)
    if code != 0:
        raise DidNotHoldError(f"--resume --follow ends with {code}: {told[-200:]}")
    code, told = stage.waited()
    return said(told, "3 of 3 runs valid")


def _fill(folder: Path) -> Path:
    """Until nothing fits; the file that fills it."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"0" * 4096)
    return filler


def _full(stage: Stage) -> str:
    stage.move(stage.site.small / "submit")
    filler = _fill(stage.site.small)
    try:
        code, told = stage.call(*stage.order(*HOLD, nodes="1"))
    finally:
        filler.unlink()
    if code == 0:
        raise DidNotHoldError("submit ends with 0")
    return said(told, "No space left")


def _full_later(stage: Stage) -> str:
    stage.move(stage.site.small / "run")
    # Its record has to be written while nothing fits.
    stage.submit("--set", "measure.measured_steps=60", "--set", "fault.step_delay_s=0.2", nodes="1")
    stage.measuring()
    filler = _fill(stage.site.small)
    try:
        return stage.line("No space left|is full")
    finally:
        filler.unlink()

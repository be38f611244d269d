"""The job of a pre-flight: tried, submitted, waited for, and cancelled where nobody waits any longer."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from dlbench.errors import RunError
from dlbench.jobs.preflight.asking import UnansweredError, ask
from dlbench.jobs.preflight.script import render_preflight
from dlbench.jobs.scripts.batch import sbatch_arguments
from dlbench.jobs.scripts.job import Job
from dlbench.jobs.slurm.call import call
from dlbench.records.answers.preflight import Finding, PreflightFolder
from dlbench.records.files import write_atomic

POLL_S = 1.0
LATE_FILES_S = 10.0
"""How long the script's last word is waited for when the job has ended: shared file systems show new files late."""

_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "RESV_DEL_HOLD", "SPECIAL_EXIT")


@dataclass(frozen=True, kw_only=True)
class Waited:
    """How waiting for a job came to its end."""

    end: Literal["ended", "pending", "running"]
    """ended, or what it was when the time was over; it is cancelled then."""
    seconds: float
    reason: str = ""
    """Slurm's word for why it was pending."""


def write_script(job: Job, folder: PreflightFolder, python: str) -> None:
    """Puts the job's script into its folder.

    Raises:
        RunError: it cannot be written.
    """
    write_atomic(folder.run.script, render_preflight(job, folder, python))


def trial(job: Job, folder: PreflightFolder, environment: Mapping[str, str]) -> Finding:
    """What `sbatch --test-only` says to the arguments of the submission itself."""
    program, *rest = sbatch_arguments(job, folder.run)
    try:
        done = call([program, "--test-only", *rest], environment)
    except subprocess.TimeoutExpired as late:
        return _tried("unknown", f"gave no answer within {late.timeout:g} s")
    except OSError as error:
        return _tried("unknown", f"cannot be started: {error.strerror or error}")
    said = " ".join(f"{done.stdout} {done.stderr}".split())
    if done.returncode != 0:
        why = re.sub(r"(sbatch|allocation failure): (error: )?", "", said)
        return _tried("wrong", why[:300] or f"ended with {done.returncode}", "change what it names")
    start = re.search(r"to start at (\S+) using", said)
    return _tried("ok", f"would start at {start[1]}" if start else "accepts the job")


def _tried(state: Literal["ok", "wrong", "unknown"], found: str, remedy: str = "") -> Finding:
    return Finding(subject="sbatch --test-only", state=state, found=found, remedy=remedy)


def submit_preflight(job: Job, folder: PreflightFolder, environment: Mapping[str, str]) -> str:
    """Submits the script that `write_script` wrote; returns Slurm's id, with ``;CLUSTER`` where it names one.

    Raises:
        RunError: sbatch did not say that it took the job.
    """
    name = job.plans[0].run_id
    try:
        done = call(sbatch_arguments(job, folder.run), environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        with suppress(OSError, subprocess.TimeoutExpired):
            for cluster in job.shape.system.slurm.clusters or ("",):
                call(["scancel", *_where(cluster), f"--name={job.name}", "--me"])
        raise RunError(f"sbatch of {name}: {error}") from None
    found = [line for line in done.stdout.splitlines() if re.fullmatch(r"\d+(;\S+)?", line.strip())]
    if not found:
        raise RunError(f"sbatch of {name}: {' '.join(done.stderr.split())[:300] or f'it ended with {done.returncode}'}")
    return found[-1].strip()


def wait(
    job_id: str, folder: PreflightFolder, timeout_s: float, check: Callable[[], None], tell: Callable[[str], None]
) -> Waited:
    """Waits until the job has ended; cancels it after `timeout_s`, and where `check` raises.

    Args:
        job_id: Slurm's.
        folder: of the pre-flight; its script says there when it ends.
        timeout_s: for all of it, in the queue and on the nodes.
        check: called now and then; what it raises is passed on.
        tell: told the state with its reason, whenever it changes.
    """
    begun = time.monotonic()
    before = state = reason = ""
    try:
        while not folder.ended.exists():
            check()
            state, reason = _state(job_id)
            if not state:
                _await_files(folder)
                break
            if (now := f"{state} ({reason})" if reason else state) != before:
                tell(now)
                before = now
            if time.monotonic() - begun > timeout_s:
                cancel(job_id)
                is_pending = state in _WAITING
                return Waited(end="pending" if is_pending else "running", seconds=timeout_s, reason=reason)
            time.sleep(POLL_S)
    except BaseException:
        cancel(job_id)
        raise
    return Waited(end="ended", seconds=time.monotonic() - begun)


def _await_files(folder: PreflightFolder) -> None:
    deadline = time.monotonic() + LATE_FILES_S
    while time.monotonic() < deadline and not folder.ended.exists():
        time.sleep(POLL_S / 5)


def _state(job_id: str) -> tuple[str, str]:
    """State and reason of a job that is queued or runs; empty of one that has ended."""
    try:
        number, _, cluster = job_id.partition(";")
        text = ask("squeue", *_where(cluster), "--noheader", f"--jobs={number}", "--format=%T|%r")
    except UnansweredError as error:
        # squeue's words for a job that Slurm has forgotten; a controller that is busy answers later.
        return ("", "") if "invalid job id" in str(error).lower() else ("UNKNOWN", "")
    # Of a cluster that was named, squeue says its name before.
    state, _, reason = next((line for line in text.split("\n") if "|" in line), "").strip().partition("|")
    return ("", "") if state in ("", "COMPLETING") else (state, "" if reason == "None" else reason)


def cancel(job_id: str) -> None:
    """Ends the job; nothing is said where Slurm does not answer."""
    with suppress(OSError, subprocess.TimeoutExpired):
        number, _, cluster = job_id.partition(";")
        call(["scancel", *_where(cluster), number])


def _where(cluster: str) -> list[str]:
    return [f"--clusters={cluster}"] if cluster else []
